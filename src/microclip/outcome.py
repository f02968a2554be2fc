"""What one step did: norms, weights and bounds of its micro-batches, and the ids of their examples.

Tensors stay on the device of the gradients, and nothing is copied to the host until a value is
read. Knows nothing of models, engines or rules.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Noise:
    """Unbiased estimates of how noisy gradients are, from one step (McCandlish et al., 2018).

    With v_j the weighted gradient of micro-batch j, of size b_j, and v their mean over B examples,

        E sum_j b_j |v_j|^2 = B |G|^2 + m tr(S)   and   E B |v|^2 = B |G|^2 + tr(S),

    where m is the number of micro-batches, G the true gradient and S the covariance of a single
    example's. Both estimates may come out negative: average them over steps, not their ratio.
    """

    trace: Tensor  # of tr(S); NaN if there is only one micro-batch
    squared_norm: Tensor  # of |G|^2

    @classmethod
    def estimate(cls, energy: Tensor, count: Tensor, total: Tensor, norm: Tensor) -> Noise:
        """Estimate from sum_j b_j |v_j|^2, m, B and |v|."""
        trace = (energy - total * norm.square()) / (count - 1)
        trace = torch.where(count > 1, trace, torch.nan)
        return cls(trace, norm.square() - trace / total)

    @property
    def scale(self) -> Tensor:
        """tr(S) / |G|^2, in examples; inf if this step cannot tell G from 0, NaN if unknown."""
        return torch.where(self.squared_norm <= 0, torch.inf, self.trace / self.squared_norm)


@dataclass(frozen=True, eq=False)
class Outcome:
    """One entry per micro-batch, in the order they were processed (domains sorted)."""

    step: int  # the number of steps that were finished before
    loss: Tensor | None  # mean over all examples; None if no loss was given to `fold()`
    losses: Tensor | None  # mean loss of each micro-batch
    example_losses: Tensor | None  # in the order of `ids`, if loss_fn returns one per example
    norms: Tensor  # |g_j|
    weights: Tensor  # the factor of g_j: 0 for a zero gradient or a skipped one
    bounds: Tensor  # the bound of the micro-batch's domain
    sizes: Tensor  # examples in the micro-batch
    skipped: Tensor  # bool: skipped because its norm was not finite
    domains: tuple[Hashable, ...]  # all None when no domains were given
    ids: tuple[tuple[Hashable, ...], ...]  # positions in the mini-batch when no ids were given
    engine: str  # the engine that did the work
    notes: tuple[str, ...] = ()  # remarks on this step for the user
    example_weights: Tensor | None = None  # in the order of `ids`, if the rule weights examples
    noise: Noise | None = None  # of all ranks, if the Clipper was asked for it
    domain_noise: dict[Hashable, Noise] | None = None  # of each domain, where that is known
    # what loss_fn recorded with `Ledger.record_predictions`, in the order of `ids`: rows for label,
    # its probability, likeliest other class, its probability; NaN where unknown
    predictions: Tensor | None = None
    classes: int = 0  # how many the model tells apart, if that is known

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bound(self) -> Tensor:
        """The bound; with several domains, the smallest one."""
        return self.bounds.min() if len(self) else self.bounds.new_full((), torch.nan)

    @property
    def held_back(self) -> int | None:
        """How many examples have less than half their weight; None if examples are not weighted."""
        return None if self.example_weights is None else int((self.example_weights < 0.5).sum())

    @property
    def noise_scale(self) -> Tensor | None:
        """The gradient noise scale in examples, from this step alone; None if it is not known.

        That of a single step is very noisy: `microclip.NoiseScale` averages.
        """
        return None if self.noise is None else self.noise.scale

    @property
    def noise_scales(self) -> dict[Hashable, Tensor] | None:
        """The gradient noise scale of each domain; None if it is not known.

        Known in a single process, for models that are not sharded and rules that stream.
        """
        if self.domain_noise is None:
            return None
        return {domain: noise.scale for domain, noise in self.domain_noise.items()}

    @property
    def mean_weight(self) -> Tensor:
        """The mean weight per example."""
        return _mean(self.weights, self._shares)

    @property
    def suppression(self) -> Tensor:
        """Per micro-batch: 1 - weight / (largest weight), so 0 for the largest."""
        return 1 - self.weights / self.weights.max().clamp(min=torch.finfo(self.weights.dtype).tiny)

    @property
    def effective_sample_size(self) -> Tensor:
        """The equivalent number of equally weighted examples, (sum w)^2 / sum w^2."""
        mean, square = self.mean_weight, _mean(self.weights.square(), self._shares)
        return self._shares.sum() * mean.square() / square.clamp(min=torch.finfo(square.dtype).tiny)

    @property
    def weight_shares(self) -> dict[Hashable, Tensor]:
        """Per domain: its share of the total weight in this step."""
        given = self._shares * self.weights
        total = given.sum().clamp(min=torch.finfo(given.dtype).tiny)
        rows: dict[Hashable, list[int]] = {}
        for row, domain in enumerate(self.domains):
            rows.setdefault(domain, []).append(row)
        return {domain: given[chosen].sum() / total for domain, chosen in rows.items()}

    @property
    def _shares(self) -> Tensor:
        return self.sizes * ~self.skipped

    def __str__(self) -> str:
        loss = "not given" if self.loss is None else f"{self.loss.item():.4g}"
        skipped = int(self.skipped.sum())
        return (
            f"step {self.step}: loss {loss}, {len(self)} micro-batches of up to "
            f"{int(self.sizes.max())} examples, bound {self.bound.item():.4g}, "
            f"mean weight {self.mean_weight.item():.3g}, "
            f"effective sample size {self.effective_sample_size.item():.4g} "
            f"of {int(self.sizes.sum())}" + (f", {skipped} skipped" if skipped else "")
        )


def _mean(values: Tensor, shares: Tensor) -> Tensor:
    return (values * shares).sum() / shares.sum().clamp(min=1)
