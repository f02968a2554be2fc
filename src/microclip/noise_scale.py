"""The gradient noise scale, averaged over steps: how large a mini-batch is worth its compute.

Knows outcomes; nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from microclip.outcome import Noise, Outcome
from microclip.user_warnings import warn

SHOWN = 5  # domains in a warning


class NoiseScale:
    """An exponential moving average of the gradient noise scale, over all ranks.

    >>> import microclip
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(3, 1)
    >>> clipper = microclip.Clipper(model, 1, rule=microclip.rules.Keep(), noise_scale=True)
    >>> noise = NoiseScale()
    >>> for _ in range(20):
    ...     model.zero_grad()
    ...     x = torch.randn(32, 3)
    ...     outcome = clipper.backward(lambda x: (model(x) - 1).square().mean(1), x)
    ...     noise.update(outcome)
    >>> noise.batch_size > 0
    True

    It is `tr(S) / |G|^2`, where G is the true gradient and S the covariance of a single example's:
    a mini-batch of that size gets half of its squared length from noise. Much smaller ones waste
    no examples, much larger ones save hardly any steps (McCandlish et al., 2018). With
    `rules.Keep()` it is that of plain training, with other rules that of the clipped gradients.

    Args:
        decay: How much of the average stays at each step; 0.99 averages over about 100 steps. The
            two estimates are averaged, not their ratio, which would be biased.
        domain: Average that of one domain; steps without it do not count. None: of all examples,
            where differences between domains count as noise.
    """

    def __init__(self, decay: float = 0.99, *, domain: Hashable = None) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, but got {decay!r}.")
        self.decay, self.domain = decay, domain
        self._average: Tensor | None = None  # of trace and squared norm; not divided by its weight
        self._others: dict[Hashable, None] = {}  # domains of the steps before the first with ours

    def update(self, outcome: Outcome) -> None:
        """Add a step, without reading the device. Steps that are not finite do not count."""
        noise = outcome.noise
        if noise is None:
            raise ValueError(
                "The outcome has no noise estimate: create the Clipper with noise_scale=True."
            )
        if self.domain is not None:
            noise = self._of_domain(outcome)
        if noise is None:
            return
        found = torch.stack([noise.trace, noise.squared_norm])
        before = torch.zeros_like(found) if self._average is None else self._average.to(found)
        after = self.decay * before + (1 - self.decay) * found
        self._average = torch.where(found.isfinite().all(), after, before)

    def _of_domain(self, outcome: Outcome) -> Noise | None:
        if outcome.domain_noise is not None:
            if self.domain not in outcome.domain_noise and self._average is None:
                self._others.update(dict.fromkeys(outcome.domain_noise))
            return outcome.domain_noise.get(self.domain)
        raise ValueError(
            f"The noise scale of the domain {self.domain!r} alone is not known: this step had no "
            "domains= or several ranks, or its rule needs all norms before it weights any gradient "
            "(Median, Quantile). Use NoiseScale() for all domains together, or measure it in a "
            "single process with rule=rules.Keep()."
        )

    @property
    def scale(self) -> Tensor:
        """The noise scale in examples; inf if the gradient is all noise, NaN before any step.

        Warns if no step so far had the domain.
        """
        if self._average is None:
            if self._others:
                shown = ", ".join(sorted(map(repr, self._others))[:SHOWN])
                warn(
                    f"No step so far had the domain {self.domain!r}, so its noise scale is not "
                    f"known; their domains are {shown}{', ...' * (len(self._others) > SHOWN)}.",
                    RuntimeWarning,
                )
            return torch.tensor(torch.nan)
        trace, squared = self._average
        known = torch.where(squared > 0, trace / squared, torch.inf)
        return torch.where((trace == 0) & (squared == 0), torch.nan, known)

    @property
    def batch_size(self) -> float:
        """The mini-batch size that the noise scale suggests, in whole examples; reads the device.

        inf if the gradient is all noise, NaN before any step.
        """
        found = float(self.scale)
        return float(max(1, math.ceil(found))) if math.isfinite(found) else found

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"average": None if self._average is None else self._average.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        average = state["average"]
        self._average = None if average is None else torch.tensor(average, dtype=torch.float64)
