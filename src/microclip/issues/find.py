"""From the history of a run to a verdict on every example: flagged or not, what kind, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.evidence import Evidence, gather
from microclip.draggers.scoring import are_positions
from microclip.draggers.source import LedgerLike, Source, open_record
from microclip.draggers.statistics import Numbers, Values
from microclip.issues.estimate import estimate
from microclip.issues.history import UNKNOWN, History, read_history
from microclip.issues.result import (
    FORGOTTEN,
    KINDS,
    NEVER_LEARNED,
    NOT_FINITE,
    OUTLIER,
    WRONG_LABEL,
    Issues,
)
from microclip.user_warnings import warn

FEWEST = 20  # examples; fewer say nothing about what is usual
FEW_VISITS = 4
AGREED = 0.5  # of the votes of other classes; with fewer for any of them, it is an outlier
OFTEN = 3  # times forgotten
OFTEN_SHARE = 0.2  # of its visits

Labels = Mapping[Any, int] | Sequence[int]
Flags = npt.NDArray[np.bool_]


def find_issues(
    ledger: LedgerLike, labels: Labels | None = None, *, threshold: float = 0.5
) -> Issues:
    """Find examples that are probably wrong, in the record of a training run.

    >>> found = find_issues("runs/first")  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP
    Issues(178 of 1797 examples flagged, about 179 (157 to 230) wrong)
    >>> found.to_csv("issues.csv")  # doctest: +SKIP

    Args:
        ledger: The folder of a ledger, a `microclip.Ledger`, or the result of `open_ledger`. It
            must have a loss per example; with logits and labels, the verdicts are better and other
            labels are suggested.
        labels: The given class of each example, if it was not recorded: a mapping from ids, or a
            sequence whose places are the ids. Labels on record must not differ from them.
        threshold: Flag examples that are wrong with at least this probability.
    """
    if isinstance(threshold, bool | str) or not 0 < threshold <= 1:
        raise ValueError(
            f"threshold must be a number above 0 and at most 1, but got {threshold!r}."
        )
    record = open_record(ledger)
    source = Source.open(record)
    _expect_losses(source)
    evidence = gather(source, norms=False, mean_losses=False)
    _expect_examples(evidence)
    given = None if labels is None else _given_labels(evidence, labels, record.classes)
    history = read_history(source, evidence, record.classes, given)
    _expect_one_label_each(evidence, history)
    if given is not None:
        _expect_recorded(evidence, history, given)
    return _judge(evidence, history, record.classes, threshold)


def _expect_losses(source: Source) -> None:
    if not source.examples:
        there = "losses of micro-batches" if source.has_losses else "no losses"
        raise ValueError(
            f"find_issues() needs a loss per example, but the ledger {source.path} has {there} "
            "only. Record them with Ledger.record(ids, losses), or let the Clipper's loss_fn "
            "return one loss per example. microclip.draggers.score() can rank what is there."
        )


def _expect_examples(evidence: Evidence) -> None:
    if are_positions(evidence):
        last = len(evidence) - 1
        warn(
            f"The ids 0 to {last} start anew in every one of the {evidence.steps} steps: unless "
            "each step saw the whole data set, they are positions in the mini-batch, not examples, "
            "and the result means nothing. Record ids of examples: see microclip.with_ids().",
            UserWarning,
        )
    if len(evidence) < FEWEST:
        raise ValueError(
            f"find_issues() compares examples with each other, and {len(evidence)} are too few: it "
            f"needs {FEWEST}."
        )
    usual = float(np.median(evidence.appearances))
    if usual < 2:
        raise ValueError(
            "Most examples were seen only once, so there is no history to judge them by. Record at "
            f"least {FEW_VISITS} epochs. For a single one, microclip.draggers.score() ranks "
            "examples, and microclip.spikes() names the rows behind bad steps."
        )
    if np.median(evidence.loss.counts) < 2:
        raise ValueError(
            "Most losses in this ledger are NaN or inf, so there is nothing to compare. Find out "
            "first where they begin: microclip.spikes() names the step and its rows."
        )


def _given_labels(evidence: Evidence, labels: Labels, classes: int | None) -> Numbers:
    """Return the label of each example, in the order of the index."""
    found = np.full(len(evidence), UNKNOWN)
    by_id = isinstance(labels, Mapping)
    if not hasattr(labels, "__getitem__"):
        raise TypeError(
            "labels must be a mapping from ids to classes, or a sequence whose places are the ids, "
            f"but got an object of type {type(labels).__name__}."
        )
    for place, one in enumerate(evidence.index.ids.to_pylist()):
        inside = one in labels if by_id else isinstance(one, int) and 0 <= one < len(labels)
        if not inside:
            raise ValueError(
                f"labels has no label for the example {one!r}. Pass a mapping from every id in the "
                "ledger to its class, or, if ids are positions in the data set, a sequence."
            )
        label = _class(labels[one], one)
        if label < 0 or (classes is not None and label >= classes):
            told = "0 or above" if classes is None else f"one of the {classes} classes"
            raise ValueError(
                f"The label {label} of the example {one!r} is out of range: not {told}."
            )
        found[place] = label
    return found


def _class(label: Any, one: Any) -> int:
    value = label.item() if getattr(label, "shape", None) == () else label
    if not isinstance(value, int | float) or value % 1 != 0:
        raise ValueError(
            f"The label {str(label)[:50]!r} of the example {one!r} is not a whole number. Pass the "
            "number of its class, 0, 1, 2, ..., as the model counts them."
        )
    return int(value)


def _expect_recorded(evidence: Evidence, history: History, given: Numbers) -> None:
    differ = np.flatnonzero(history.labels != given)
    if len(differ):
        first = int(differ[0])
        raise ValueError(
            f"labels differ from those on record for {len(differ)} of the {len(evidence)} examples:"
            f" {evidence.index.ids[first].as_py()!r} has {given[first]}, but was trained with "
            f"{history.labels[first]}. What is judged are the labels that a model was trained "
            "with: leave labels= out, or train again with the new ones."
        )


def _expect_one_label_each(evidence: Evidence, history: History) -> None:
    changed = int((history.changed > 0).sum())
    if changed > len(evidence) / 10:
        one = evidence.index.ids[int(np.argmax(history.changed))].as_py()
        raise ValueError(
            f"{changed} of the {len(evidence)} ids, for instance {one!r}, had different labels at "
            "different steps, so they are not ids of examples. Positions in the mini-batch look "
            "like this: record ids that follow the example, see microclip.with_ids()."
        )


def _judge(evidence: Evidence, history: History, classes: int | None, threshold: float) -> Issues:
    not_finite = (evidence.broken.total > 0) & (evidence.broken.total * 2 >= history.visits)
    outside, rare = history.outside > 0, _rare(history.labels)
    judged = ~np.isnan(history.numbers) & ~not_finite & ~outside & ~rare
    judged &= history.visits > 1
    numbers = history.numbers[judged]
    if len(numbers) < FEWEST or np.ptp(numbers) < 1e-9 * max(1.0, float(np.abs(numbers).max())):
        raise ValueError(
            "All examples have the same loss at every visit, so there is nothing to tell them "
            'apart by. Record the loss of each example (reduction="none"), not their mean.'
            if len(numbers) >= FEWEST
            else f"Only {len(numbers)} of {len(evidence)} examples can be judged: the others were "
            "seen once, never had a finite loss, or are alone in their class. "
            f"{FEWEST} are needed."
        )
    found = estimate(history, judged)
    probability = np.full(len(evidence), np.nan)
    probability[judged] = found.probability
    certain = not_finite | outside
    probability[certain] = 1.0
    flagged = np.nan_to_num(probability) >= threshold
    extra = float(certain.sum())
    wrong = float(np.nansum(probability))
    low, high = (share * len(numbers) + extra for share in (found.low, found.high))
    table = _tabulate(evidence, history, probability, found.order, flagged, not_finite, classes)
    notes = _notes(history, judged, wrong, high, rare, int((~judged & ~certain & ~rare).sum()))
    interval = (int(min(low, wrong)), int(np.ceil(max(high, wrong))))
    return Issues(
        table, round(wrong), interval, notes, history.statistic, threshold, evidence.steps
    )


def _rare(labels: Numbers) -> Flags:
    """Return whose label no other example has: nobody can tell whether it is right."""
    if not len(labels) or labels.max() == UNKNOWN:
        return np.zeros(len(labels), dtype=np.bool_)
    found: Flags = (np.bincount(labels + 1)[labels + 1] == 1) & (labels != UNKNOWN)
    return found


def _tabulate(
    evidence: Evidence,
    history: History,
    probability: Values,
    order: Values,
    flagged: Flags,
    not_finite: Flags,
    classes: int | None,
) -> pa.Table:
    kinds = _kinds(history, flagged, not_finite)
    suggested = history.suggested
    columns: dict[str, Any] = {
        "id": evidence.index.ids,
        "flagged": pa.array(flagged),
        "probability": _array(probability),
        "kind": pa.array([None, *KINDS], pa.string()).take(pa.array(kinds + 1)),
        "given_label": pa.array(history.labels, mask=history.labels == UNKNOWN),
        "suggested_label": pa.array(suggested, mask=suggested == UNKNOWN),
        "confidence": _array(probability * history.votes),
        "margin": _array(
            history.numbers if history.statistic == "margin" else np.full(len(evidence), np.nan)
        ),
        "loss": _array(evidence.loss.mean),
        "loss_early": _array(evidence.loss.third(0)),
        "loss_late": _array(evidence.loss.third(2)),
        "visits": pa.array(history.visits),
        "learned": pa.array(history.learned),
        "forgotten": pa.array(history.forgotten),
        "nonfinite": pa.array(evidence.broken.total.astype(np.int64)),
        "domain": pa.array(evidence.domain_names, pa.string()).take(pa.array(evidence.domains)),
    }
    keys = {
        "certain": pa.array(probability == 1.0),
        "unknown": pa.array(np.isnan(probability)),
        "number": _array(order),
        "id": evidence.index.ids,
    }
    ways = ("descending", "ascending", "descending", "ascending")
    places = pc.sort_indices(pa.table(keys), sort_keys=list(zip(keys, ways, strict=True)))
    table = pa.table(columns).take(places)
    usual = float(np.nanmedian(evidence.loss.mean))
    return table.append_column("evidence", _evidence(table, usual, classes))


def _kinds(history: History, flagged: Flags, not_finite: Flags) -> Numbers:
    """Return the place of each example's kind in KINDS; -1 for none."""
    kinds = np.full(len(flagged), -1)
    seen = (history.visits > 1) & ~np.isnan(history.numbers)
    often = (history.forgotten >= OFTEN) & (history.forgotten >= OFTEN_SHARE * history.visits)
    kinds[often] = KINDS.index(FORGOTTEN)
    kinds[seen & (history.learned == 0)] = KINDS.index(NEVER_LEARNED)
    agreed = (np.nan_to_num(history.votes) >= AGREED) | (history.outside > 0)
    kinds[flagged] = np.where(agreed, KINDS.index(WRONG_LABEL), KINDS.index(OUTLIER))[flagged]
    kinds[not_finite] = KINDS.index(NOT_FINITE)
    return kinds


def _evidence(table: pa.Table, usual: float, classes: int | None) -> pa.Array:
    """Say in words why; only for examples of some kind."""
    texts: list[str | None] = [None] * len(table)
    places = np.flatnonzero(pc.is_valid(table["kind"]).to_numpy(zero_copy_only=False))
    for place, row in zip(places, table.take(pa.array(places)).to_pylist(), strict=True):
        texts[place] = _sentence(row, usual, classes)
    return pa.array(texts, pa.string())


def _sentence(row: dict[str, Any], usual: float, classes: int | None) -> str:
    visits, label, kind = row["visits"], row["given_label"], row["kind"]
    if kind == NOT_FINITE:
        return f"its loss was NaN or inf at {row['nonfinite']} of {visits} visits"
    if classes is not None and label is not None and label >= classes:
        return f"its label {label} is none of the {classes} classes"
    if kind == FORGOTTEN:
        return f"learned and forgotten {row['forgotten']} times in {visits} visits"
    loss = f"mean loss {row['loss']:.3g}, where half of all examples have less than {usual:.3g}"
    if row["suggested_label"] is None or row["margin"] is None:
        return loss
    other = visits - row["learned"]
    mostly = f", mostly {row['suggested_label']}" if kind == WRONG_LABEL else ""
    return f"the model preferred another class at {other} of {visits} visits{mostly}; {loss}"


def _notes(
    history: History, judged: Flags, wrong: float, high: float, rare: Flags, unknown: int
) -> tuple[str, ...]:
    found = []
    usual = int(np.median(history.visits))
    if usual < FEW_VISITS:
        found.append(
            f"Half of the examples were seen at most {usual} times: record {FEW_VISITS} epochs or "
            "more for verdicts that can be relied on."
        )
    if rare.any():
        some = sorted(int(label) for label in history.labels[rare])
        shown = ", ".join(map(str, some[:5])) + (", ..." if len(some) > 5 else "")
        of = f"class {shown} has" if len(some) == 1 else f"{len(some)} classes ({shown}) have"
        found.append(f"{of[0].upper()}{of[1:]} a single example, which cannot be judged.")
    if unknown:
        found.append(
            f"{unknown} examples cannot be judged: they were seen once, their loss was always 0, "
            "or what the others are judged by was not recorded of them."
        )
    if high > 2 * wrong + 10:
        found.append(
            "Right and wrong examples are hard to tell apart in this run, so there may be many "
            "more than are flagged; the order is more reliable than the probabilities."
        )
    if history.statistic == "margin":
        against = int((history.numbers[judged] > 0).sum())
        if against > 1.5 * wrong + 10:
            found.append(
                f"The model preferred another class for {against} examples, averaged over the run: "
                "many labels are hard for it, and it cannot tell which of these are wrong. A "
                "better model, or more training, can."
            )
    else:
        found.append(
            "Judged by losses alone, which cannot always tell wrong examples from hard ones. For "
            "classification, record logits and labels too: verdicts get better, and come with a "
            "suggested label."
        )
    return tuple(found)


def _array(values: Values) -> pa.Array:
    return pa.array(values, from_pandas=True)  # NaN (unknown) becomes null
