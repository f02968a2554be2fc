"""How draggers differ from other examples: the directions and norms of their gradients.

The paper's Figure 1 compares cosines of pairs of examples; its c-hat compares norms. Both are
computed here for any labeling of the examples. c-hat comes in two orientations: the paper defines c
by c |g| <= |mu|, dragger over benign, but prints the fraction the other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLINGS = 1000
CONFIDENCE = 0.95
TINY = torch.finfo(torch.float64).tiny


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
    """Examples labeled as draggers compared with the others, the benign ones.

    Cosines are means over all pairs of different examples (`*_spread`: their standard deviation),
    or over examples against a mean gradient that excludes the example itself.
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
    dragger_over_mean: Estimate  # against the norm of the mean benign gradient, as in the theorem
    trim: float  # the share of the longest benign gradients left out of c-hat

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


def compare_draggers(
    matrix: Tensor, labels: Tensor, trim: float = 0.1, resamplings: int = RESAMPLINGS, seed: int = 0
) -> Draggers:
    """Compare labeled draggers with the others.

    Args:
        matrix: The Gram matrix.
        labels: One per example, true for a dragger.
        trim: The share of the longest benign gradients to leave out of c-hat; the paper keeps 90
            of 100.
        resamplings: How many bootstrap samples to take for the intervals.
        seed: Of the bootstrap.
    """
    found = labels.bool().flatten()
    if len(found) != len(matrix):
        raise ValueError(
            f"labels must have one value per example: {len(matrix)} examples were probed, but "
            f"there are {len(found)} labels."
        )
    if not 0 <= trim < 1:
        raise ValueError(f"trim must be a share from 0 to below 1, but got {trim}.")
    bad, good = found.nonzero().flatten(), (~found).nonzero().flatten()
    if len(bad) < 1 or len(good) < 2:
        raise ValueError(
            f"A comparison needs at least one dragger and two benign examples, but {len(bad)} of "
            f"{len(found)} examples are labeled as draggers."
        )
    norms = matrix.diagonal().clamp(min=0).sqrt()
    cosines = matrix / (norms.unsqueeze(1) * norms).clamp(min=TINY)
    d, b = _samples(bad, good, resamplings, seed)
    ratio = _mean(norms, d) / _trimmed(norms, b, trim).clamp(min=TINY)
    signal = _over_pairs(matrix, b, b).clamp(min=TINY).sqrt()
    return Draggers(
        draggers=len(bad),
        benign=len(good),
        dragger_benign=_estimate(_over_pairs(cosines, d, b)),
        benign_benign=_estimate(_over_pairs(cosines, b, b)),
        dragger_dragger=_estimate(_over_pairs(cosines, d, d)) if len(bad) > 1 else None,
        dragger_benign_spread=_spread(cosines, bad, good),
        benign_benign_spread=_spread(cosines, good, good),
        dragger_to_mean=_estimate(_to_mean(matrix, d, b)),
        benign_to_mean=_estimate(_to_mean(matrix, b, b)),
        dragger_over_benign=_estimate(ratio),
        benign_over_dragger=_estimate(1 / ratio.clamp(min=TINY)),
        dragger_over_mean=_estimate(_mean(norms, d) / signal),
        trim=trim,
    )


# Samples are rows of counts, one column per example: how often it was drawn. The first row has each
# example once, the others are bootstrap samples, separate for draggers and benign examples.


def _samples(bad: Tensor, good: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    examples = len(bad) + len(good)
    found = []
    for kind in (bad, good):
        drawn = kind[torch.randint(len(kind), (count + 1, len(kind)), generator=generator)]
        drawn[0] = kind
        counts = torch.zeros(count + 1, examples, dtype=torch.float64)
        found.append(counts.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64)))
    return found[0], found[1]


def _estimate(values: Tensor) -> Estimate:
    """Return the value for the examples themselves, with the interval of the bootstrap samples."""
    replicates = values[1:][~values[1:].isnan()].sort().values
    if not len(replicates):
        return Estimate(values[0].item(), math.nan, math.nan)
    place = int((1 - CONFIDENCE) / 2 * len(replicates))
    return Estimate(values[0].item(), replicates[place].item(), replicates[-1 - place].item())


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return counts @ values / counts.sum(1)


def _over_pairs(values: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return means over pairs of different examples; two copies of one do not count as a pair.

    A sample that repeats a single example has no pairs: NaN, which intervals skip.
    """
    same = one * other
    total = ((one @ values) * other).sum(1) - same @ values.diagonal()
    pairs = one.sum(1) * other.sum(1) - same.sum(1)
    return total / pairs.masked_fill(pairs == 0, math.nan)


def _spread(cosines: Tensor, rows: Tensor, columns: Tensor) -> float:
    pairs = cosines[rows.unsqueeze(1), columns][rows.unsqueeze(1) != columns]
    return pairs.std().item() if len(pairs) > 1 else 0.0


def _to_mean(matrix: Tensor, counts: Tensor, others: Tensor) -> Tensor:
    """Return mean cosines of examples and a mean gradient that excludes the example."""
    own = matrix.diagonal()
    sums = others @ matrix  # every example with the whole sum, which may include the example
    products = sums - others * own
    whole = (sums * others).sum(1, keepdim=True)
    squares = (whole - 2 * others * sums + others.square() * own).clamp(min=0)
    cosines = products / (own.clamp(min=0) * squares).sqrt().clamp(min=TINY)
    return (counts * cosines).sum(1) / counts.sum(1)


def _trimmed(norms: Tensor, counts: Tensor, trim: float) -> Tensor:
    """Return means over the shortest of each sample; at least one is kept."""
    order = norms.argsort()
    kept = (counts.sum(1, keepdim=True) * (1 - trim)).round().clamp(min=1)
    ordered = counts[:, order]
    before = ordered.cumsum(1) - ordered
    taken = torch.minimum(ordered, (kept - before).clamp(min=0))
    return taken @ norms[order] / taken.sum(1)
