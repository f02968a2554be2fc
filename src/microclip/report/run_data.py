"""Everything known about a run with a ledger: its timeline, draggers, domains and examples.

`read_timeline` summarizes norms, bounds and weights in stretches of consecutive steps, in one pass
over the ledger, with only the rows of one stretch in memory; `read_held_back` counts the examples
that a rule holds back. `read_examples` reads the labels of all examples, line by line, and the
contents of those to show. What the page shows, and in which words, is up to `sections`, `held_back`
and `gallery`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from microclip import guard
from microclip.draggers import Draggers, score
from microclip.draggers.source import IdIndex, Source, column, whole_steps
from microclip.draggers.statistics import LITTLE
from microclip.issues import Issues, find_issues
from microclip.ledger import Record, open_ledger
from microclip.probing.forecast import SMALLEST, TOP_TENTH
from microclip.report.folder import EXAMPLES, FILE_CHECKSUM
from microclip.report.runs import Run, count_lines, is_being_written, lines, parsed

KINDS = ("image", "audio", "text")
LONGEST_FACT = 300  # characters of a label or domain that are kept
STRETCHES = 120
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COLUMNS = ("step", "size", "norm", "weight", "bound", "loss", "skipped")
HELD_SHOWN = 24  # of those held back now, and of those released again
MOST_SUSPECTS = 2000
MOST_GROUPS = 30  # domains, or labels standing in for them

Values = npt.NDArray[np.float64]
Line = list[float | None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What is known about an example, besides its content."""

    label: str | None = None
    truth: str | None = None
    domain: str | None = None

    @property
    def wrong(self) -> bool | None:
        """Whether its label is wrong; None if unknown."""
        if self.truth is None or self.label is None:
            return None
        return self.label != self.truth


@dataclass(frozen=True)
class Content:
    """The content of an example: a text, or the name of a file."""

    kind: str
    text: str | None = None
    file: str | None = None
    checksum: str | None = None  # of the file; None if unknown


@dataclass
class Examples:
    """What a run says about its examples, by id as text."""

    facts: dict[str, Facts] = field(default_factory=dict)
    contents: dict[str, Content] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_examples(path: Path, known: Collection[str], shown: Collection[str]) -> Examples:
    """Read the examples of a run.

    Args:
        path: The folder of the run.
        known: All ids in its ledger.
        shown: The ids whose contents to keep.
    """
    found = Examples()
    if not (path / EXAMPLES).exists():
        return found
    unreadable = 0
    unknown: dict[str, None] = {}
    for line, complete in lines(path, EXAMPLES):
        entry = parsed(line)
        one = None if entry is None else _id(entry.get("id"))
        if entry is None or one is None:
            unreadable += complete or not is_being_written(line)
            continue
        if one not in known:
            unknown[one[:LONGEST_FACT]] = None
            continue
        found.facts[one] = Facts(*(_fact(entry.get(key)) for key in ("label", "truth", "domain")))
        if one in shown:
            content = _content(entry)
            if content is None:
                found.contents.pop(one, None)
            else:
                found.contents[one] = content
    if unreadable:
        found.notes.append(
            f"Skipped {count_lines(unreadable)} of {EXAMPLES} that could not be read as examples."
        )
    if unknown:
        some = ", ".join(repr(one[:40]) for one in list(unknown)[:3])
        found.notes.append(
            f"{len(unknown)} ids in {EXAMPLES} are not in the ledger, for instance {some}: these "
            "examples were never trained on, or the Clipper got other ids for them."
        )
    return found


def _id(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    return str(value)


def _fact(value: Any) -> str | None:
    if value is None or isinstance(value, dict | list):
        return None
    text = str(value)
    if len(text) <= LONGEST_FACT:
        return text
    return f"{text[:LONGEST_FACT]}… ({len(text):,} characters)"


def _content(entry: dict[str, Any]) -> Content | None:
    kind, text, file = entry.get("kind"), entry.get("text"), entry.get("file")
    if kind not in KINDS:
        kind = "text" if isinstance(text, str) else None
    if kind == "text":
        return Content("text", text=text) if isinstance(text, str) else None
    if kind is None or not isinstance(file, str):
        return None
    checksum = entry.get(FILE_CHECKSUM)
    return Content(kind, file=file, checksum=checksum if isinstance(checksum, str) else None)


@dataclass
class Timeline:
    """What happened in each stretch; None where nothing was finite."""

    steps: list[float] = field(default_factory=list)  # the middle of each stretch
    norms: dict[float, Line] = field(default_factory=lambda: {q: [] for q in QUANTILES})
    weights: dict[float, Line] = field(default_factory=lambda: {q: [] for q in QUANTILES})
    bound: Line = field(default_factory=list)
    loss: Line = field(default_factory=list)
    first: int = 0
    last: int = 0
    recorded: int = 0  # steps
    microbatches: int = 0
    largest: int = 0  # examples in a micro-batch
    not_finite: int = 0  # micro-batches with a gradient that was not
    mean_weight: float | None = None  # of the average example
    has_norms: bool = False  # plain training may be recorded without
    smallest: Line = field(default_factory=list)  # smallest over mean norm, averaged over steps
    top_tenth: Line = field(default_factory=list)  # its share of the squared norms


def read_timeline(ledger: Path) -> Timeline:
    """Read a ledger from the first step to the last."""
    source = Source.open(ledger)
    timeline = Timeline(first=source.steps.start, last=source.steps.stop - 1)
    count = min(STRETCHES, len(source.steps))
    given = total = 0.0
    for stretch in _stretches(source, count):
        steps = stretch["step"].to_numpy()
        sizes = stretch["size"].to_numpy()
        norms, weights, bounds = (_numbers(stretch, name) for name in ("norm", "weight", "bound"))
        timeline.steps.append(float(steps[0] + steps[-1]) / 2)
        for curves, values in ((timeline.norms, norms), (timeline.weights, weights)):
            for quantile, found in zip(QUANTILES, _quantiles(values), strict=True):
                curves[quantile].append(found)
        timeline.bound.append(_quantiles(bounds)[2])
        timeline.smallest.append(_smallest_over_mean(steps, norms))
        timeline.top_tenth.append(_top_tenth(norms))
        timeline.loss.append(_mean(_numbers(stretch, "loss"), sizes))
        timeline.recorded += len(np.unique(steps))
        timeline.microbatches += len(steps)
        timeline.largest = max(timeline.largest, int(sizes.max()))
        measured = pc.is_valid(stretch["norm"]).to_numpy()
        timeline.has_norms |= bool(measured.any())
        timeline.not_finite += int((measured & ~np.isfinite(norms)).sum())
        counted = np.isfinite(weights)
        given += float((weights * sizes)[counted].sum())
        total += float(sizes[counted].sum())
    timeline.mean_weight = given / total if total else None
    return timeline


def _stretches(source: Source, count: int) -> Iterator[pa.Table]:
    """Yield the rows of consecutive steps together, in `count` stretches of equal length."""
    waiting: list[pa.Table] = []
    place = 0
    for table in whole_steps(source.microbatches, COLUMNS):
        table = table.sort_by("step")
        places = (table["step"].to_numpy() - source.steps.start) * count // len(source.steps)
        for now in np.unique(places):
            if now != place and waiting:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting = []
            place = now
            first, last = np.searchsorted(places, [now, now + 1])
            waiting.append(table.slice(first, last - first))
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def _numbers(table: pa.Table, name: str) -> Values:
    values: Any = table[name].to_numpy()
    found: Values = np.asarray(values, dtype=np.float64)
    return found


def _quantiles(values: Values) -> Line:
    known = values[np.isfinite(values)]
    if not len(known):
        return [None] * len(QUANTILES)
    found: Line = np.quantile(known, QUANTILES).tolist()
    return found


def _smallest_over_mean(steps: npt.NDArray[Any], norms: Values) -> float | None:
    """Return the smallest over the mean norm of a step, averaged; None without norms to compare."""
    starts = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))  # steps are sorted
    counts = np.diff(np.append(starts, len(steps)))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.minimum.reduceat(norms, starts) / (np.add.reduceat(norms, starts) / counts)
    known = ratios[np.isfinite(ratios) & (counts > 1)]
    return float(known.mean()) if len(known) else None


def _top_tenth(norms: Values) -> float | None:
    """Return the share of the squared norms that the top tenth of them holds."""
    energy = np.sort(np.square(norms[np.isfinite(norms)]))[::-1]
    total = energy.sum()
    if len(energy) < 10 or not total > 0:
        return None
    return float(energy[: len(energy) // 10].sum() / total)


def _mean(values: Values, sizes: npt.NDArray[Any]) -> float | None:
    known = np.isfinite(values)
    if not known.any():
        return None
    return float(np.average(values[known], weights=sizes[known]))


@dataclass(frozen=True)
class HeldBack:
    """What a rule that weights examples did, over time."""

    steps: list[int]  # the last step of each stretch
    counts: list[int]  # examples that are held back then
    wrong: list[int]  # those of them with a label that is known to be wrong
    notes: tuple[tuple[int, str], ...]  # what the rule said, and when


def read_held_back(record: Record, wrong: Collection[str]) -> HeldBack:
    """Count the examples held back after each stretch: low weight at their last visit."""
    source = Source.open(record)
    index = IdIndex(source.integers)
    held, are_wrong = np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
    found: dict[int, tuple[int, int, int]] = {}  # by stretch
    count = min(STRETCHES, len(source.steps))
    for table in whole_steps(source.examples, ("step", "id", "weight")):
        table = table.sort_by("step").combine_chunks()
        examples = index.look_up(column(table, "id"))
        new = index.ids.slice(len(held)).to_pylist()
        held = np.pad(held, (0, len(new)))
        flags = np.array([str(one) in wrong for one in new], dtype=bool)
        are_wrong = np.concatenate([are_wrong, flags])
        little = pc.fill_null(table["weight"], 1.0).to_numpy() < LITTLE
        steps = table["step"].to_numpy()
        places = (steps - source.steps.start) * count // len(source.steps)
        for place in np.unique(places):
            first, last = np.searchsorted(places, [place, place + 1])
            held[examples[first:last]] = little[first:last]  # of two visits, the later one counts
            step = int(steps[last - 1])
            found[int(place)] = step, int(held.sum()), int((held & are_wrong).sum())
    steps_, counts, known = (list(each) for each in zip(*found.values(), strict=True))
    return HeldBack(steps_, counts, known, record.notes)


@dataclass(frozen=True)
class RunData:
    """What is known about a run with a ledger."""

    key: str  # unique on the page
    run: Run
    timeline: Timeline
    draggers: Draggers
    examples: Examples
    domains: guard.Report | None
    grouped_by: str  # what the guard compared: "domain", "label", or "" for nothing
    warnings: tuple[str, ...]
    held: HeldBack | None = None  # None: the rule does not weight examples
    issues: Issues | None = None  # None: it cannot be said what is wrong
    issue_warnings: tuple[str, ...] = ()
    no_issues: str = ""  # why
    classes: int | None = None  # that the model tells apart; None if unknown
    created: str = ""  # when the ledger was

    @cached_property
    def ids(self) -> list[str]:
        """The ids of all examples, the most suspicious first."""
        return [str(one) for one in self.draggers.table["id"].to_pylist()]

    @cached_property
    def wrong(self) -> list[bool | None]:
        """Whether the label of each example is wrong, in the same order; None if unknown."""
        return [
            facts.wrong if (facts := self.examples.facts.get(one)) else None for one in self.ids
        ]

    @cached_property
    def groups(self) -> list[str | None]:
        """The domain of each example, or its label if that stands in for it, in the same order."""
        recorded = self.column("domain")
        if self.grouped_by == "domain" and any(one is not None for one in recorded):
            return recorded
        known = [self.examples.facts.get(one) for one in self.ids]
        return [getattr(facts, self.grouped_by, None) if facts else None for facts in known]

    def column(self, name: str, count: int | None = None) -> list[Any]:
        """Return a column of the draggers table, or its first `count` values."""
        found: list[Any] = self.draggers.table[name].slice(0, count).to_pylist()
        return found

    @property
    def is_plain(self) -> bool:
        """Whether nothing was clipped: all weights are 1, as in plain training and with `Keep`."""
        return self.timeline.mean_weight == 1 and self.held is None

    @property
    def is_clipped(self) -> bool:
        """Whether a rule for norms was applied, perhaps besides weights of examples."""
        if self.held is None:
            return not self.is_plain
        rule = self.run.example_rule
        return rule is not None and rule.clip is not None

    @property
    def figures(self) -> dict[str, float]:
        """How unequal gradients were after a quarter of the steps, as far as the norms tell.

        Micro-batches of four give the smallest over the mean norm, those of one the top tenth's
        share of the energy; other sizes give neither.
        """
        timeline = self.timeline
        source = {4: (SMALLEST, timeline.smallest), 1: (TOP_TENTH, timeline.top_tenth)}
        if timeline.largest not in source or not timeline.steps:
            return {}
        name, line = source[timeline.largest]
        wanted = timeline.first + (timeline.last - timeline.first) / 4
        place = min(range(len(line)), key=lambda i: abs(timeline.steps[i] - wanted))
        value = line[place]
        return {} if value is None else {name: value}

    @property
    def measure(self) -> str:
        """The column that says most about an example: its loss, or else its norms."""
        return "log_norm" if self.draggers.losses == "none" else "excess_loss"


def read_run_data(key: str, run: Run, ledger: Path, shown: int, say: Say) -> RunData:
    """Read the ledger of a run, and the contents of its `shown` most suspicious examples."""
    say(f"{run.name}: reading the ledger")
    record = open_ledger(ledger)
    timeline = read_timeline(ledger)
    say(f"{run.name}: scoring {record.rows:,} micro-batches")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        draggers = score(record)
    ids = [str(one) for one in draggers.table["id"].to_pylist()]
    say(f"{run.name}: looking for wrong labels")
    issues, doubts, why = _find_issues(record)
    to_show = {str(one) for one in shown_ids(draggers, issues, shown)}
    examples = read_examples(run.path, set(ids), to_show)
    held = None
    if "held_back" in draggers.table.column_names:
        wrong = {one for one, facts in examples.facts.items() if facts.wrong}
        held = read_held_back(record, wrong)
    say(f"{run.name}: checking domains")
    grouped_by, report = _check_domains(ledger, draggers, examples, ids)
    messages = tuple(str(warning.message) for warning in given)
    return RunData(
        key,
        run,
        timeline,
        draggers,
        examples,
        report,
        grouped_by,
        messages,
        held,
        issues if shown else None,
        doubts,
        why,
        record.classes,
        str(record.manifest.get("created", "")),
    )


def suspect_rows(issues: Issues) -> tuple[list[dict[str, Any]], int]:
    """Return what to review, the most probably wrong first, and how many there are in all."""
    found = issues.table.filter(pc.is_valid(issues.table["kind"]))
    return found.slice(0, MOST_SUSPECTS).to_pylist(), len(found)


def _find_issues(record: Record) -> tuple[Issues | None, tuple[str, ...], str]:
    """Return what is wrong with the data, and doubts; or else why nothing can be said."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            found = find_issues(record)
        except ValueError as error:
            return None, (), str(error).replace(f" {record.path}", "")
    return found, tuple(str(warning.message) for warning in given), ""


def held_back_rows(draggers: Draggers, now: bool) -> pa.Table:
    """Return the examples that are held back now, or those that were released again."""
    table = draggers.table
    at_last = pc.is_valid(table["held_back_since"])
    if now:
        return table.filter(at_last)
    return table.filter(pc.and_(pc.greater(table["held_back"], 0), pc.invert(at_last)))


def ids_to_describe(ledger: Path, count: int) -> set[int | str]:
    """Return the ids of examples that a page shows, so that only those need to be described."""
    record = open_ledger(ledger)
    return shown_ids(score(record), _find_issues(record)[0], count)


def shown_ids(draggers: Draggers, issues: Issues | None, count: int) -> set[int | str]:
    """Return the ids of examples that a page shows, with the `count` most suspicious ones."""
    found = set(draggers.top(count)["id"].to_pylist())
    if "held_back" in draggers.table.column_names:
        for now in (True, False):
            rows = held_back_rows(draggers, now).slice(0, min(HELD_SHOWN, count))
            found.update(rows["id"].to_pylist())
    if issues is not None and count:
        found.update(row["id"] for row in suspect_rows(issues)[0])
    return found


def _check_domains(
    ledger: Path, draggers: Draggers, examples: Examples, ids: list[str]
) -> tuple[str, guard.Report | None]:
    """Run the guard on the recorded domains, else on those of the examples, else on labels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", guard.DomainWarning)  # findings are shown on the page
        if pc.count_distinct(draggers.table["domain"]).as_py() > 0:
            return "domain", guard.check(ledger)
        for kind in ("domain", "label"):
            known = {one: getattr(facts, kind) for one, facts in examples.facts.items()}
            groups = {known.get(one) for one in ids}
            if None not in groups and 2 <= len(groups) <= MOST_GROUPS:
                return kind, guard.check(ledger, domain_of=lambda one, known=known: known[str(one)])
    return "", None
