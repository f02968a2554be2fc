"""Draggers as the probe sees them: which way their gradients point, and how long they are.

The paper's Figure 1 compares cosines of pairs of examples; its c-hat compares norms. Both are
given here for any labelling of the examples. c-hat comes in two orientations: the paper defines c
by c |g| <= |mu|, dragger over benign, but prints the fraction the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLINGS = 300
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval over resampled examples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Draggers:
    """Examples labelled as draggers against the others, the benign ones.

    Cosines are means over all pairs of different examples (`*_spread`: their standard deviation),
    or over examples against a mean gradient that the example itself is not part of.
    """

    draggers: int
    benign: int
    dragger_benign: Estimate
    benign_benign: Estimate
    dragger_dragger: Estimate | None  # None: there is only one
    dragger_benign_spread: float
    benign_benign_spread: float
    dragger_to_mean: Estimate  # cosine to the mean benign gradient
    benign_to_mean: Estimate
    dragger_over_benign: Estimate  # c-hat as c is defined: draggers are longer if above 1
    benign_over_dragger: Estimate  # c-hat as the paper prints it
    dragger_over_mean: Estimate  # to the norm of the mean benign gradient, as the theorem has it
    trim: float  # the share of the longest benign gradients that c-hat leaves out

    def __str__(self) -> str:
        lines = [
            f"{self.draggers} draggers, {self.benign} benign examples",
            f"cosine dragger-benign   {self.dragger_benign}, "
            f"pairs +-{self.dragger_benign_spread:.2g}",
            f"cosine benign-benign    {self.benign_benign}, "
            f"pairs +-{self.benign_benign_spread:.2g}",
            f"cosine dragger-dragger  {self.dragger_dragger or 'one dragger, no pair'}",
            f"dragger to benign mean  {self.dragger_to_mean}",
            f"benign to benign mean   {self.benign_to_mean}",
            f"c-hat dragger/benign    {self.dragger_over_benign}",
            f"c-hat as printed        {self.benign_over_dragger}",
            f"dragger/|mean benign|   {self.dragger_over_mean}",
        ]
        return "\n".join(lines)


def cosines_to_the_rest(matrix: Tensor) -> Tensor:
    """Return the cosine of each gradient and the mean of all the others."""
    own = matrix.diagonal()
    rows = matrix.sum(1)
    products, rest = rows - own, matrix.sum() - 2 * rows + own
    lengths = (own.clamp(min=0) * rest.clamp(min=0)).sqrt()
    return products / lengths.clamp(min=torch.finfo(matrix.dtype).tiny)


def look_at(
    matrix: Tensor, labels: Tensor, trim: float = 0.1, resamplings: int = RESAMPLINGS, seed: int = 0
) -> Draggers:
    """Compare labelled draggers with the others.

    Args:
        matrix: The Gram matrix.
        labels: One per example, true for a dragger.
        trim: The share of the longest benign gradients to leave out of c-hat; the paper keeps 90
            of 100.
        resamplings: Bootstrap samples that the intervals come from.
        seed: Of the bootstrap.
    """
    found = labels.bool().flatten()
    if len(found) != len(matrix):
        raise ValueError(
            f"labels must hold one value per example: {len(matrix)} were probed, but there are "
            f"{len(found)} labels."
        )
    if not 0 <= trim < 1:
        raise ValueError(f"trim must be a share from 0 to below 1, but got {trim}.")
    bad, good = found.nonzero().flatten(), (~found).nonzero().flatten()
    if len(bad) < 1 or len(good) < 2:
        raise ValueError(
            f"Comparing needs at least one dragger and two benign examples, but {len(bad)} of "
            f"{len(found)} examples are labelled as draggers."
        )
    norms = matrix.diagonal().clamp(min=0).sqrt()
    cosines = matrix / (norms.unsqueeze(1) * norms).clamp(min=torch.finfo(matrix.dtype).tiny)
    samples = _Samples(bad, good, resamplings, seed)

    def dragger_over_benign(d: Tensor, b: Tensor) -> float:
        return norms[d].mean().item() / _trimmed(norms[b], trim)

    def dragger_over_mean(d: Tensor, b: Tensor) -> float:
        signal = _off_diagonal(matrix, b, b)
        return norms[d].mean().item() / math.sqrt(signal) if signal > 0 else math.inf

    estimate = samples.estimate
    return Draggers(
        draggers=len(bad),
        benign=len(good),
        dragger_benign=estimate(lambda d, b: _off_diagonal(cosines, d, b)),
        benign_benign=estimate(lambda d, b: _off_diagonal(cosines, b, b)),
        dragger_dragger=(
            estimate(lambda d, b: _off_diagonal(cosines, d, d)) if len(bad) > 1 else None
        ),
        dragger_benign_spread=_spread(cosines, bad, good),
        benign_benign_spread=_spread(cosines, good, good),
        dragger_to_mean=estimate(lambda d, b: _to_mean(matrix, d, b)),
        benign_to_mean=estimate(lambda d, b: _to_mean(matrix, b, b)),
        dragger_over_benign=estimate(dragger_over_benign),
        benign_over_dragger=estimate(lambda d, b: 1 / max(dragger_over_benign(d, b), 1e-300)),
        dragger_over_mean=estimate(dragger_over_mean),
        trim=trim,
    )


class _Samples:
    """The examples, and bootstrap samples of them, draggers and benign ones each by themselves."""

    def __init__(self, bad: Tensor, good: Tensor, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._own = bad, good
        self._drawn = [
            tuple(
                kind[torch.randint(len(kind), (len(kind),), generator=generator)]
                for kind in (bad, good)
            )
            for _ in range(count)
        ]

    def estimate(self, statistic: Callable[[Tensor, Tensor], float]) -> Estimate:
        """Return a statistic of draggers and benign examples, with its interval."""
        values = torch.tensor([statistic(*sample) for sample in self._drawn], dtype=torch.float64)
        tail = (1 - CONFIDENCE) / 2
        ordered = values[~values.isnan()].sort().values
        place = int(tail * len(ordered))
        low, high = (ordered[place], ordered[-1 - place]) if len(ordered) else (math.nan, math.nan)
        return Estimate(statistic(*self._own), float(low), float(high))


def _off_diagonal(values: Tensor, rows: Tensor, columns: Tensor) -> float:
    """Return the mean over pairs of different examples; copies of one are no pair."""
    different = rows.unsqueeze(1) != columns
    count = different.sum().item()
    total = (values[rows.unsqueeze(1), columns] * different).sum().item()
    return total / count if count else math.nan


def _spread(cosines: Tensor, rows: Tensor, columns: Tensor) -> float:
    pairs = cosines[rows.unsqueeze(1), columns][rows.unsqueeze(1) != columns]
    return pairs.std().item() if len(pairs) > 1 else 0.0


def _to_mean(matrix: Tensor, rows: Tensor, mean: Tensor) -> float:
    """Return the mean cosine of examples and a mean gradient that leaves the example out."""
    parts = (rows.unsqueeze(1) != mean).to(matrix.dtype)
    inner = matrix[mean.unsqueeze(1), mean]
    products = (matrix[rows.unsqueeze(1), mean] * parts).sum(1)
    squares = torch.einsum("rk,kl,rl->r", parts, inner, parts).clamp(min=0)
    lengths = (matrix.diagonal()[rows].clamp(min=0) * squares).sqrt()
    return (products / lengths.clamp(min=torch.finfo(matrix.dtype).tiny)).mean().item()


def _trimmed(norms: Tensor, trim: float) -> float:
    """Return the mean of the shortest; at least one is kept."""
    kept = max(1, round(len(norms) * (1 - trim)))
    return norms.sort().values[:kept].mean().clamp(min=1e-300).item()
