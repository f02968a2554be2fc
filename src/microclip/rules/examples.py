"""Rules that weight examples, by what is known about them before the backward pass.

Such a rule sees ids and losses instead of norms. Its step is one weighted backward pass, for any
model, at the price of a plain one: the gradient is sum_i w_i g_i / sum_i w_i, so that holding
examples back does not shorten the step. With `clip`, a rule of `norms` is applied as well, to
micro-batches of weighted examples.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from microclip.rules.norms import Keep, Rule, is_number

KEEP = Keep()


@dataclass(frozen=True, eq=False)
class Seen:
    """What a finished step showed of its examples, over all ranks; everything is on the host."""

    step: int
    keys: Tensor  # int64: ids that are integers, digests of other ids
    losses: Tensor  # float64
    weights: Tensor  # the weight that each had in this step
    domains: Tensor  # int64: 0 without domains, otherwise a key of the domain
    norms: Tensor | None = None  # of their gradients, for rules that need them


class ExampleRule(Rule):
    """Gives every example a weight. Subclass it and write `weigh`, and `remember` to learn.

    Args:
        clip: A rule for norms, such as `Unit()`, applied to micro-batches of weighted examples.
        total_steps: How many steps training will have, for rules whose behavior depends on it.
            The integrations set it if it is None.
    """

    needs_losses: ClassVar[bool] = False  # whether `weigh` gets the losses of the current step
    needs_norms: ClassVar[bool] = False  # whether `remember` gets norms, which takes b = 1
    needs_ids: ClassVar[bool] = True  # whether examples must have ids
    clip: Rule | None = None
    total_steps: int | None = None

    def __init__(self, *, clip: Rule | None = None, total_steps: int | None = None) -> None:
        if clip is not None and (not isinstance(clip, Rule) or isinstance(clip, ExampleRule)):
            raise TypeError(
                f"clip must be a rule for norms, such as microclip.rules.Unit(), but got {clip!r}."
            )
        if clip is not None and self.needs_norms:
            raise ValueError(
                f"{type(self).__name__} takes the norms of single examples, so it cannot be "
                f"combined with clip={clip!r}, which would clip them. Use LossHistory."
            )
        self.clip = clip
        self.total_steps = check_total_steps(total_steps)

    @property
    def is_one_pass(self) -> bool:
        """Whether a step is one weighted backward pass, whatever the micro-batch size."""
        return self.clip is None and not self.needs_norms

    def weigh(self, keys: Tensor, losses: Tensor | None) -> Tensor:
        """Return a weight of 0 or more for each example; called before the backward pass.

        Do not change any state here: the step may be abandoned.

        Args:
            keys: The ids of the examples: integers as they are, digests of others.
            losses: Their losses if `needs_losses`, else None.
        """
        raise NotImplementedError(f"{type(self).__name__} must define weigh(keys, losses).")

    def remember(self, seen: Seen) -> None:
        """Learn from a finished step; called once per step, with the same data on every rank."""

    def messages(self) -> list[str | Warning]:
        """Return what users should know of since the last call, for `outcome.notes`.

        Warnings among them are also issued, once the step is finished.
        """
        return []

    def _settings(self) -> dict[str, Any]:
        """Return the arguments to show."""
        return {"total_steps": self.total_steps, "clip": self.clip}

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in self._settings().items() if v is not None)
        return f"{type(self).__name__}({shown})"

    # what is left for micro-batches of weighted examples

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the weights of micro-batches: those of `clip`, or 1."""
        return (self.clip or KEEP).weights(norms, sizes)

    def factor(self, norms: Tensor) -> Tensor:
        """Return the factor of `clip`, or 1."""
        return (self.clip or KEEP).factor(norms)

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the bound of `clip`, or the largest norm."""
        return (self.clip or KEEP).bound(norms, sizes)

    def observe(self, norms: Tensor, sizes: Tensor) -> None:
        """Show the norms of a finished step to `clip`."""
        (self.clip or KEEP).observe(norms, sizes)

    @property
    def streams(self) -> bool:
        """Whether `clip` streams."""
        return (self.clip or KEEP).streams


def check_total_steps(total_steps: object) -> int | None:
    """Return a valid number of steps, or None."""
    if total_steps is None:
        return None
    steps = 0
    if not isinstance(total_steps, bool) and hasattr(total_steps, "__index__"):
        steps = operator.index(total_steps)
    if steps < 1:
        raise ValueError(
            "total_steps must be the number of optimizer steps of all training, or None, but got "
            f"{total_steps!r}."
        )
    return steps


class LossWeight(ExampleRule):
    """Gives less weight to examples whose loss stands out, for training on data seen only once.

    It remembers no examples, only how losses are usually distributed: their median and spread (1.48
    x the median distance from it), averaged over recent steps. An example up to `low` spreads above
    the median keeps its weight, one beyond `high` loses it, and in between it falls linearly.

    >>> rule = LossWeight(low=2, high=4)
    >>> rule.center, rule.spread, rule.seen = 1.0, 0.5, 100
    >>> rule.weigh(torch.zeros(3, dtype=torch.int64), torch.tensor([1.2, 2.5, 9.0]))
    tensor([1.0000, 0.5000, 0.0000])
    """

    needs_losses = True
    needs_ids = False
    MEMORY = 0.9  # the share of the past in the averages
    FEW = 12  # losses to see before any of them is judged

    def __init__(self, low: float = 2.0, high: float = 4.0, *, clip: Rule | None = None) -> None:
        super().__init__(clip=clip)
        if not (is_number(low) and is_number(high) and 0 < low < high):
            raise ValueError(
                f"LossWeight needs 0 < low < high, but got low={low!r}, high={high!r}."
            )
        self.low, self.high = float(low), float(high)
        self.center = self.spread = math.nan  # unknown before the first step
        self.seen = 0  # losses

    def _settings(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "clip": self.clip}

    def weigh(self, keys: Tensor, losses: Tensor | None) -> Tensor:
        """Return 1 for ordinary losses, down to 0 for those that stand out."""
        assert losses is not None
        if self.seen < self.FEW or not self.spread > 0:
            return torch.ones_like(losses)
        distance = (losses - self.center) / self.spread
        weights = ((self.high - distance) / (self.high - self.low)).clamp(0, 1)
        return weights.nan_to_num(nan=1.0)  # a loss that is not a number must not pass unnoticed

    def remember(self, seen: Seen) -> None:
        """Update median and spread; at once if the losses have moved away altogether."""
        losses = seen.losses[seen.losses.isfinite()]
        if not len(losses):
            return
        self.seen += len(losses)
        center = losses.median().item()
        # small batches have no spread of their own
        distances = (losses - (center if math.isnan(self.center) else self.center)).abs()
        spread = 1.4826 * distances.median().item()
        if not spread > 0.1 * distances.mean().item():  # most losses are equal, such as 0
            spread = 1.2533 * distances.mean().item()
        moved = len(losses) > 2 and abs(center - self.center) > self.low * self.spread
        if math.isnan(self.center) or moved:
            own = 1.4826 * (losses - center).abs().median().item()
            self.center, self.spread = center, own if moved and own > 0 else spread
        else:
            old = self.MEMORY
            self.center = old * self.center + (1 - old) * center
            self.spread = old * self.spread + (1 - old) * spread

    def state_dict(self) -> dict[str, Any]:
        """Return median and spread for a checkpoint."""
        own = {"center": self.center, "spread": self.spread, "seen": self.seen}
        return own if self.clip is None else {**own, "clip": self.clip.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if not {"center", "spread", "seen"} <= state.keys():
            raise ValueError(
                "The state of LossWeight has the entries 'center', 'spread' and 'seen', but got "
                f"{sorted(map(str, state))}: the checkpoint was written with another rule."
            )
        self.center, self.spread = float(state["center"]), float(state["spread"])
        self.seen = int(state["seen"])
        if self.clip is not None:
            self.clip.load_state_dict(state.get("clip", {}))
