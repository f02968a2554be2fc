"""Everything scores are computed from, gathered in one pass over a ledger (two with a loss per
example). Memory grows with the number of examples, never with the number of steps.

A norm or loss of a micro-batch is shared by all its members. If it is roughly the mean of what its
members contribute, y_j = mean of beta_i over i in j, then ridge regression can separate them: it
gives the beta that minimize

    sum_j (y_j - mean_{i in j} beta_i)^2 + lambda sum_i beta_i^2

by conjugate gradients. `Memberships` keeps who was in which micro-batch in a temporary file that
every iteration reads once. What the evidence means for an example is up to `scoring`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.source import (
    PLACE,
    IdIndex,
    Source,
    WeightReader,
    column,
    members,
    step_groups,
    whole_steps,
)
from microclip.draggers.statistics import (
    HeldBack,
    Numbers,
    Series,
    Values,
    comparable,
    excess_losses,
    log_norms,
)

COLUMNS = ("step", "ids", "norm", "weight", "domain", "loss")

# lambda, relative to the mean diagonal entry of XᵀX, the evidence about an average example: those
# seen often keep nearly all of their estimate, those seen once are shrunk towards 0.
SHRINKAGE = 0.1
TOLERANCE = 1e-4  # of the residual; ranks stop changing long before that
PASSES = 50


@dataclass
class Evidence:
    """What a ledger says about every example, in the order of the index."""

    index: IdIndex
    norm: Series = field(default_factory=Series)  # log(norm / median of step and domain)
    weight: Series = field(default_factory=Series)  # what its gradient was multiplied by
    held_back: HeldBack | None = None  # None: the rule does not weight examples
    loss: Series = field(default_factory=Series)  # as recorded
    excess: Series = field(default_factory=Series)  # loss - median of step and domain
    confidence: Series = field(default_factory=Series)  # exp(-loss)
    broken: Series = field(default_factory=Series)  # 1: norm or loss not finite while others were
    appearances: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    domains: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    domain_names: list[str | None] = field(default_factory=list)
    losses: str = "none"  # "example", "microbatch" or "none": what has a loss
    norms: Memberships | None = None  # for regressions, if the method needs one
    mean_losses: Memberships | None = None
    steps: int = 0

    def __len__(self) -> int:
        return len(self.index)

    def close(self) -> None:
        """Delete the temporary files."""
        for memberships in (self.norms, self.mean_losses):
            if memberships is not None:
                memberships.close()


def gather(source: Source, norms: bool, mean_losses: bool) -> Evidence:
    """Read a ledger, keeping memberships for regressions on norms or mean losses if needed."""
    evidence = Evidence(IdIndex(source.integers))
    try:
        evidence.norms = Memberships() if norms else None
        evidence.mean_losses = Memberships() if mean_losses else None
        weights = WeightReader(source) if source.has_example_weights else None
        evidence.held_back = None if weights is None else HeldBack()
        columns = COLUMNS if weights is None else (*COLUMNS, *PLACE)
        for table in whole_steps(source.microbatches, columns):
            _add_microbatches(evidence, table, source, weights)
        if source.examples:
            evidence.losses = "example"
            for table in whole_steps(source.examples, ("step", "id", "loss")):
                _add_examples(evidence, table, source)
    except BaseException:
        evidence.close()
        raise
    return _finish(evidence)


def _add_microbatches(
    evidence: Evidence, table: pa.Table, source: Source, weights: WeightReader | None
) -> None:
    ids, sizes = members(table)
    examples = evidence.index.look_up(ids)
    total = len(evidence.index)
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
    if weights is None or evidence.held_back is None:
        add(evidence.weight, _finite(table["weight"].to_numpy()))
    else:
        given, factors = weights.read(table)
        evidence.weight.add(examples, _finite(factors), thirds, total)
        steps = np.repeat(table["step"].to_numpy(), sizes)
        evidence.held_back.add(examples, given, steps, total)
    add(
        evidence.broken,
        np.where(comparable(norms, groups), ~np.isfinite(norms), np.nan),
    )
    if evidence.norms is not None:
        evidence.norms.add(examples, sizes, relative)
    known = pc.is_valid(table["loss"]).to_numpy(zero_copy_only=False)
    if known.any() and not source.examples:
        evidence.losses = "microbatch"
        losses = pc.fill_null(table["loss"], np.nan).to_numpy()
        excess = np.where(known, excess_losses(losses, groups), np.nan)
        add(evidence.loss, _finite(losses))
        add(evidence.excess, excess)
        if evidence.mean_losses is not None:
            evidence.mean_losses.add(examples, sizes, excess)


def _add_examples(evidence: Evidence, table: pa.Table, source: Source) -> None:
    examples = evidence.index.look_up(column(table, "id"))
    total = len(evidence.index)
    evidence.appearances = _padded(evidence.appearances, total)
    evidence.domains = _padded(evidence.domains, total)
    steps, losses = table["step"].to_numpy(), table["loss"].to_numpy().astype(np.float64)
    groups, thirds = step_groups(table, evidence.domains[examples]), source.thirds(steps)
    evidence.loss.add(examples, _finite(losses), thirds, total)
    evidence.excess.add(examples, excess_losses(losses, groups), thirds, total)
    # the probability of the label if the loss is cross-entropy; a loss below 0 counts as 0
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
    if evidence.held_back is not None:
        evidence.held_back.finish(total)
    return evidence


def _domain_numbers(evidence: Evidence, table: pa.Table) -> Numbers:
    """Number the domain of every row; there are few names, so a list is fast enough."""
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


class Memberships:
    """Micro-batches with their members and one value each, in a temporary file."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._chunks: list[tuple[int, int]] = []  # micro-batches and memberships of each chunk

    def add(self, examples: Numbers, sizes: Numbers, values: Values) -> None:
        """Store some micro-batches; those without a value (NaN) are dropped."""
        known = ~np.isnan(values) & (sizes > 0)
        examples = examples[np.repeat(known, sizes)]
        sizes, values = sizes[known], values[known]
        if not len(sizes):
            return
        for array in (values, sizes.astype(np.int32), examples.astype(np.int32)):
            self._file.write(array.tobytes())
        self._chunks.append((len(sizes), len(examples)))

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def _read(self) -> Iterator[tuple[Numbers, Numbers, Values]]:
        self._file.seek(0)

        def array(count: int, dtype: Any) -> npt.NDArray[Any]:
            return np.frombuffer(self._file.read(count * np.dtype(dtype).itemsize), dtype)

        for rows, count in self._chunks:
            values, sizes = array(rows, np.float64), array(rows, np.int32)
            yield array(count, np.int32), sizes.astype(np.int64), values

    def regress(self, total: int, shrinkage: float = SHRINKAGE) -> Values:
        """Return beta for all examples; NaN for those in no micro-batch with a value."""
        rows = sum(rows for rows, _ in self._chunks)
        if not rows:
            return np.full(total, np.nan)
        mean = sum(float(values.sum()) for _, _, values in self._read()) / rows
        right, diagonal = np.zeros(total), np.zeros(total)
        for examples, sizes, values in self._read():
            right += _spread(examples, sizes, (values - mean) / sizes, total)
            diagonal += _spread(examples, sizes, 1 / np.square(sizes), total)
        seen = diagonal > 0
        ridge = shrinkage * diagonal[seen].mean()

        def apply(beta: Values) -> Values:
            result: Values = ridge * beta
            for examples, sizes, _ in self._read():
                starts = np.cumsum(sizes) - sizes
                fitted = np.add.reduceat(beta[examples], starts) / sizes
                result += _spread(examples, sizes, fitted / sizes, total)
            return result

        beta = conjugate_gradients(apply, right, diagonal + ridge)
        return np.where(seen, beta, np.nan)


def _spread(examples: Numbers, sizes: Numbers, values: Values, total: int) -> Values:
    """Add the value of every micro-batch to each of its members."""
    spread = np.bincount(examples, np.repeat(values, sizes), minlength=total)
    return spread.astype(np.float64, copy=False)


def conjugate_gradients(
    apply: Callable[[Values], Values], right: Values, diagonal: Values
) -> Values:
    """Solve A x = right for a positive definite A, preconditioned by its diagonal.

    >>> A = np.array([[4.0, 1.0], [1.0, 3.0]])
    >>> conjugate_gradients(lambda x: A @ x, np.array([1.0, 2.0]), np.diag(A)) * 11
    array([1., 7.])
    """
    x = np.zeros_like(right)
    residual = right.copy()
    direction = preconditioned = residual / diagonal
    strength = float(residual @ preconditioned)
    target = TOLERANCE**2 * strength
    for _ in range(PASSES):
        if strength <= target:
            break
        image = apply(direction)
        length = strength / float(direction @ image)
        x += length * direction
        residual -= length * image
        preconditioned = residual / diagonal
        before, strength = strength, float(residual @ preconditioned)
        direction = preconditioned + strength / before * direction
    return x
