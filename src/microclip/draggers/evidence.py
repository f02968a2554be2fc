"""One pass over a ledger, two if it has a loss per example: all that scores are made of.

Memory goes by the number of examples, never by that of steps. What the evidence says about an
example is for `methods` to judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.memberships import Memberships
from microclip.draggers.relative import comparable, excess_losses, log_norms
from microclip.draggers.roster import Numbers, Roster
from microclip.draggers.series import Series, Values
from microclip.draggers.steps import column, members, step_groups, whole_steps

if TYPE_CHECKING:
    from microclip.draggers.source import Source

COLUMNS = ("step", "ids", "norm", "weight", "domain", "loss")


@dataclass
class Evidence:
    """What a ledger says, example by example, in the order of the roster."""

    roster: Roster
    norm: Series = field(default_factory=Series)  # log(norm / median of step and domain)
    weight: Series = field(default_factory=Series)
    loss: Series = field(default_factory=Series)  # as given
    excess: Series = field(default_factory=Series)  # loss - median of step and domain
    confidence: Series = field(default_factory=Series)  # exp(-loss)
    broken: Series = field(default_factory=Series)  # 1: norm or loss not finite, where others were
    appearances: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    domains: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    domain_names: list[str | None] = field(default_factory=list)
    losses: str = "none"  # "example": one each; "microbatch": one per micro-batch; "none"
    norms: Memberships | None = None  # set aside for regressions, if somebody asked for one
    mean_losses: Memberships | None = None
    steps: int = 0

    def __len__(self) -> int:
        return len(self.roster)

    def close(self) -> None:
        """Remove what was set aside."""
        for memberships in (self.norms, self.mean_losses):
            if memberships is not None:
                memberships.close()


def gather(source: Source, norms: bool, mean_losses: bool) -> Evidence:
    """Read a ledger; set memberships aside for regressions on norms or on mean losses."""
    evidence = Evidence(Roster(source.integers))
    try:
        evidence.norms = Memberships() if norms else None
        evidence.mean_losses = Memberships() if mean_losses else None
        for table in whole_steps(source.microbatches, COLUMNS):
            _add_microbatches(evidence, table, source)
        if source.examples:
            evidence.losses = "example"
            for table in whole_steps(source.examples, ("step", "id", "loss")):
                _add_examples(evidence, table, source)
    except BaseException:
        evidence.close()
        raise
    return _finish(evidence)


def _add_microbatches(evidence: Evidence, table: pa.Table, source: Source) -> None:
    ids, sizes = members(table)
    examples = evidence.roster.enter(ids)
    total = len(evidence.roster)
    domains = _domain_numbers(evidence, table)
    groups = step_groups(table, domains)
    norms = table["norm"].to_numpy()
    relative = log_norms(norms, groups)
    thirds = np.repeat(source.thirds(table["step"].to_numpy()), sizes)

    evidence.steps += len(pc.unique(table["step"]))
    evidence.appearances = _padded(evidence.appearances, total)
    evidence.appearances += np.bincount(examples, minlength=total)
    evidence.domains = _padded(evidence.domains, total)
    evidence.domains[examples] = np.repeat(domains, sizes)

    def add(series: Series, values: Values) -> None:
        series.add(examples, np.repeat(values, sizes), thirds, total)

    add(evidence.norm, relative)
    add(evidence.weight, _finite(table["weight"].to_numpy()))
    add(
        evidence.broken,
        np.where(comparable(norms, groups), ~np.isfinite(norms), np.nan),
    )
    if evidence.norms is not None:
        evidence.norms.add(examples, sizes, relative)
    told = pc.is_valid(table["loss"]).to_numpy(zero_copy_only=False)
    if told.any() and not source.examples:
        evidence.losses = "microbatch"
        losses = pc.fill_null(table["loss"], np.nan).to_numpy()
        excess = np.where(told, excess_losses(losses, groups), np.nan)
        add(evidence.loss, _finite(losses))
        add(evidence.excess, excess)
        if evidence.mean_losses is not None:
            evidence.mean_losses.add(examples, sizes, excess)


def _add_examples(evidence: Evidence, table: pa.Table, source: Source) -> None:
    examples = evidence.roster.enter(column(table, "id"))
    total = len(evidence.roster)
    evidence.appearances = _padded(evidence.appearances, total)
    evidence.domains = _padded(evidence.domains, total)
    steps, losses = table["step"].to_numpy(), table["loss"].to_numpy().astype(np.float64)
    groups, thirds = step_groups(table, evidence.domains[examples]), source.thirds(steps)
    evidence.loss.add(examples, _finite(losses), thirds, total)
    evidence.excess.add(examples, excess_losses(losses, groups), thirds, total)
    # the probability of the label, if the loss is cross-entropy; a loss below 0 is none
    evidence.confidence.add(examples, np.exp(-np.maximum(_finite(losses), 0)), thirds, total)
    whole = comparable(np.where(np.isfinite(losses), 1.0, np.nan), groups)
    lost = whole & ~np.isfinite(losses)
    evidence.broken.add(examples[lost], np.ones(int(lost.sum())), thirds[lost], total)


def _finish(evidence: Evidence) -> Evidence:
    total = len(evidence)
    for series in (
        evidence.norm,
        evidence.weight,
        evidence.loss,
        evidence.excess,
        evidence.confidence,
        evidence.broken,
    ):
        series.finish(total)
    return evidence


def _domain_numbers(evidence: Evidence, table: pa.Table) -> Numbers:
    """Number the domain of every row; the names are few, so a list will do."""
    coded = column(table, "domain").dictionary_encode(null_encoding="encode")
    places = []
    for name in coded.dictionary.to_pylist():
        if name not in evidence.domain_names:
            evidence.domain_names.append(name)
        places.append(evidence.domain_names.index(name))
    numbers: Numbers = np.array(places, dtype=np.int64)[coded.indices.to_numpy()]
    return numbers


def _finite(values: Values) -> Values:
    found: Values = np.where(np.isfinite(values), values, np.nan)
    return found


def _padded(numbers: Numbers, total: int) -> Numbers:
    return np.pad(numbers, (0, total - len(numbers)))
