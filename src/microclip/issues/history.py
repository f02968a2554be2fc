"""What a ledger says about every example over the whole run, as one number and a few counts.

| recorded | the number, higher for wrong labels |
| --- | --- |
| predictions and labels, of most | mean over visits of log(p of likeliest other / p of label) |
| losses above 0 | logarithm of the mean loss, without the first tenth of the steps |
| losses of any sign | mean loss above the median of the step, by domain |

The first is the area under the margin: over a whole run, examples that are right have more support
from the others than those that are wrong, even if the model learns both in the end. The losses of
the first steps are left out because they may be ten times as large and mean nothing yet. A visit
counts as *learned* if the label was the likeliest class or, without predictions, if the loss was
below half of the typical one at the start. An example whose loss is exactly 0 throughout, as if it
were masked, has no number, unless most are like that. Knows nothing about verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.evidence import Evidence
from microclip.draggers.source import Source, column, whole_steps
from microclip.draggers.statistics import Numbers, Series, Values, medians
from microclip.issues.votes import Votes
from microclip.ledger.tables import PREDICTIONS

LARGEST = float(np.log(1e9))  # of a margin: no single visit may decide everything
Flags = npt.NDArray[np.bool_]

START = 0.1  # of the steps: the loss at the start is their median
LATE = 2  # the last third of the run
UNKNOWN = -1


@dataclass
class History:
    """Per example, in the order of the evidence's index."""

    numbers: Values  # NaN: cannot be judged
    early: Values  # the same over the first third of the run, for margins; else NaN
    unlikely: Values  # the margin plus -log(p of label), mean over visits; NaN without predictions
    start: float  # the loss at the start of the run
    loss: Values  # the mean loss after the start
    late_loss: Values  # the mean loss over the last third of the run
    contested: float  # the share of labels that predictions contest at the end; see `votes`
    floor: float  # the number of wrong examples is at least this, on average
    mirrored: bool  # whether 0 means undecided, so that right and wrong lie on its two sides
    labels: Numbers  # UNKNOWN: not recorded, or none of the classes
    outside: Numbers  # 1: its label is none of the classes
    suggested: Numbers  # the likeliest other class over the run; UNKNOWN without predictions
    votes: Values  # that class' share of the probability that other classes got
    learned: Numbers  # at how many visits
    visits: Numbers
    forgotten: Numbers  # how often it was learned at one visit and not at the next
    changed: Numbers  # how often its recorded label was not the one before
    statistic: str  # "margin", "loss" or "excess"


def read_history(
    source: Source, evidence: Evidence, classes: int | None, given: Numbers | None
) -> History:
    """Read a ledger; `given` are labels of examples that the ledger does not know itself."""
    start = _typical_loss(source, 0)
    gathered = _Gatherer(len(evidence), classes, given, start / 2)
    begins = _tenth(source, 1)
    for table in whole_steps(source.examples, ("step", "id", "loss", *PREDICTIONS)):
        examples = evidence.index.look_up(column(table, "id"))
        steps = table["step"].to_numpy()
        gathered.add(examples, source.thirds(steps), steps >= begins, table)
    margins = gathered.margins.finish(len(evidence))
    after = gathered.losses.finish(len(evidence)).mean
    loss = np.where(np.isnan(after), evidence.loss.mean, after)
    if np.mean(margins.counts > 0) > 0.5:
        numbers, floor, statistic = margins.mean, 0.0, "margin"
    elif not (loss < 0).any() and np.sum(loss > 0) >= np.sum(loss == 0):
        loss = np.where(loss == 0, np.nan, loss)
        numbers, statistic = np.log(loss), "loss"
        lower = min(start, _typical_loss(source, 1) or start)  # it may start far too high
        floor = float(np.log(lower / 2)) if lower > 0 else -np.inf
    else:
        numbers, floor, statistic = evidence.excess.mean.copy(), -np.inf, "excess"
    if len(evidence.domain_names) > 1 and statistic != "margin":
        # losses of different tasks are not comparable
        middle = float(np.nanmedian(numbers))
        numbers = numbers - medians(numbers, evidence.domains) + middle
        if statistic == "loss":
            loss = np.exp(numbers)
        else:
            numbers = _scaled(numbers - middle, evidence.domains)
    suggested, votes = gathered.votes.winners(len(evidence))
    return History(
        numbers,
        margins.third(0),
        gathered.unlikely.finish(len(evidence)).mean,
        start,
        loss,
        evidence.loss.third(LATE),
        gathered.late_votes.contested(gathered.labels, gathered.late_visits),
        floor,
        statistic == "margin",
        gathered.labels,
        gathered.outside,
        suggested,
        votes,
        gathered.learned,
        gathered.visits,
        gathered.forgotten,
        gathered.changed,
        statistic,
    )


def _scaled(values: Values, groups: Numbers) -> Values:
    """Divide values by their group's median distance from 0, where that is not 0."""
    spread = medians(np.abs(values), groups)
    return values / np.where(spread > 0, spread, 1.0)


def _tenth(source: Source, number: int) -> int:
    """Return the first step of a tenth of the run."""
    return source.steps.start + number * max(1, round(START * len(source.steps)))


def _typical_loss(source: Source, tenth: int) -> float:
    """Return the median over the steps of a tenth of the run of their mean loss."""
    first, end = _tenth(source, tenth), _tenth(source, tenth + 1)
    found: list[float] = []
    for table in whole_steps(source.microbatches, ("step", "loss", "size")):
        steps = table["step"].to_numpy()
        chosen = (steps >= first) & (steps < end)
        losses = pc.fill_null(table["loss"], np.nan).to_numpy()[chosen]
        sizes = table["size"].to_numpy()[chosen].astype(np.float64)
        _, groups = np.unique(steps[chosen], return_inverse=True)
        if len(groups):
            sums = np.bincount(groups, losses * sizes) / np.bincount(groups, sizes)
            found.extend(sums[np.isfinite(sums)].tolist())
        if (steps >= end).any():
            break
    return float(np.median(found)) if found else 0.0


class _Gatherer:
    """Adds up visits; memory grows with the number of examples, not of visits."""

    def __init__(
        self, total: int, classes: int | None, given: Numbers | None, low_loss: float
    ) -> None:
        self._classes, self._given, self._low_loss = classes, given, low_loss
        self.labels = np.full(total, UNKNOWN) if given is None else given.copy()
        self.outside: Numbers = np.zeros(total, dtype=np.int64)
        self.margins, self.unlikely, self.losses = Series(), Series(), Series()
        self.votes, self.late_votes = Votes(), Votes()  # of other classes; of all, in the end
        self.late_visits: Numbers = np.zeros(total, dtype=np.int64)
        self.visits: Numbers = np.zeros(total, dtype=np.int64)
        self.learned: Numbers = np.zeros(total, dtype=np.int64)
        self.forgotten: Numbers = np.zeros(total, dtype=np.int64)
        self.changed: Numbers = np.zeros(total, dtype=np.int64)
        self._state = np.full(total, UNKNOWN)  # whether it was learned at its last visit

    def add(self, examples: Numbers, thirds: Numbers, begun: Flags, table: pa.Table) -> None:
        """Add the visits of some whole steps, later than those before.

        Args:
            examples: Whose they are.
            thirds: In which third of the run they were.
            begun: Whether they were after the start.
            table: What was recorded of them.
        """
        order = np.lexsort((table["step"].to_numpy(), examples))
        examples, thirds, table = examples[order], thirds[order], table.take(pa.array(order))
        losses = table["loss"].to_numpy().astype(np.float64)
        label = pc.fill_null(table["label"], UNKNOWN).to_numpy().astype(np.int64)
        own = _floats(table["label_probability"])
        other = pc.fill_null(table["other"], UNKNOWN).to_numpy().astype(np.int64)
        highest = _floats(table["other_probability"])
        if self._given is not None:
            label, own, other, highest = _with_labels(
                self._given[examples], label, own, other, highest, losses
            )
        known = label > UNKNOWN  # -100 and the like are none
        those, label_of = examples[known], label[known]
        before = np.where(_first(those), self.labels[those], np.roll(label_of, 1))
        other_before = those[(before != UNKNOWN) & (before != label_of)]
        self.changed += np.bincount(other_before, minlength=len(self.labels))
        self.labels[those] = label_of
        if self._classes is not None:
            self.outside[examples[label >= self._classes]] = 1
        with np.errstate(divide="ignore", invalid="ignore"):
            margin = np.clip(np.log(highest) - np.log(own), -LARGEST, LARGEST)
            unlikely = np.clip(margin - np.log(own), -LARGEST, 2 * LARGEST)
        judged = ~np.isnan(margin)
        self.margins.add(examples, margin, thirds, len(self.labels))
        self.unlikely.add(examples, unlikely, thirds, len(self.labels))
        counted = np.where(begun[order] & np.isfinite(losses), losses, np.nan)
        self.losses.add(examples, counted, thirds, len(self.labels))
        some = judged & (other != UNKNOWN)
        self.votes.add(examples[some], other[some], highest[some])
        late, some = judged & (thirds == LATE), some & (thirds == LATE)
        self.late_visits += np.bincount(examples[late], minlength=len(self.labels))
        self.late_votes.add(examples[late], label[late], own[late])
        self.late_votes.add(examples[some], other[some], highest[some])
        learned = np.where(judged, margin <= 0, losses < self._low_loss)
        self._add_states(examples, learned.astype(np.int64))

    def _add_states(self, examples: Numbers, learned: Numbers) -> None:
        """Count what was learned and forgotten; examples are sorted, their visits in order."""
        total = len(self.labels)
        self.visits += np.bincount(examples, minlength=total)
        self.learned += np.bincount(examples, learned, minlength=total).astype(np.int64)
        first = _first(examples)
        previous = np.where(first, self._state[examples], np.roll(learned, 1))
        lost = (previous == 1) & (learned == 0)
        self.forgotten += np.bincount(examples[lost], minlength=total)
        last = np.roll(first, -1)
        if len(last):
            last[-1] = True
        self._state[examples[last]] = learned[last]


def _with_labels(
    given: Numbers, label: Numbers, own: Values, other: Numbers, highest: Values, losses: Values
) -> tuple[Numbers, Values, Numbers, Values]:
    """Fill in labels that were not recorded, for visits of which the likeliest class is known.

    If that class is the label, the next likeliest one is unknown, and has at most what is left.
    Otherwise the probability of the label is that of a cross-entropy.
    """
    absent = (label == UNKNOWN) & (given != UNKNOWN) & (other != UNKNOWN)
    same = absent & (other == given)
    differs = absent & ~same
    guessed = np.minimum(np.exp(-np.maximum(losses, 0.0)), highest)
    own = np.where(same, highest, np.where(differs, guessed, own))
    highest = np.where(same, np.minimum(1 - highest, highest), highest)
    other = np.where(same, UNKNOWN, other)
    return np.where(label == UNKNOWN, given, label), own, other, highest


def _first(examples: Numbers) -> Flags:
    """Return which visits are the first of their example; examples are sorted."""
    found: Flags = np.diff(examples, prepend=UNKNOWN) != 0
    return found


def _floats(values: pa.ChunkedArray) -> Values:
    found: Values = pc.fill_null(values, np.nan).to_numpy().astype(np.float64)
    return found
