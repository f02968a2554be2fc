"""A control: plain training whose steps are as long as another run's.

If clipping only changed how long steps are, this would do as well. Knows nothing of where the
lengths come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from microclip.rules import Rule


class Replay(Rule):
    """Keep the direction of the whole gradient, and give it the length of another run's step.

    For one micro-batch per step, b = B. The first step that is taken gets the first length; a
    checkpoint knows which one is next. A gradient of zero, which has no direction, stays zero.

    >>> rule = Replay([0.5, 2.0])
    >>> rule.weights(torch.tensor([4.0]), torch.tensor([32.0]))
    tensor([0.1250])
    >>> rule.observe(torch.tensor([4.0]), torch.tensor([32.0]))  # the step is finished
    >>> rule.weights(torch.tensor([4.0]), torch.tensor([32.0]))
    tensor([0.5000])

    Args:
        lengths: One for each step.
    """

    def __init__(self, lengths: Sequence[float]) -> None:
        self.lengths = tuple(float(length) for length in lengths)
        for step, length in enumerate(self.lengths, start=1):
            if not math.isfinite(length) or length < 0:
                raise ValueError(
                    "Lengths of gradients are finite and 0 or more, but that of step "
                    f"{step} of {len(self.lengths)} is {length}. Replay a run that did not diverge."
                )
        self.step = 0  # steps that are finished
        self._judged = False  # whether this step's gradient has been given its weight

    def __repr__(self) -> str:
        return f"Replay({len(self.lengths)} lengths)"

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return length/norm."""
        length = self._length(norms)
        self._judged = True
        return length / norms

    def factor(self, norms: Tensor) -> Tensor:
        """Return 1/norm."""
        return 1 / norms

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the length, whatever the norm."""
        return torch.full_like(norms[0], self._length(norms))

    def observe(self, norms: Tensor, sizes: Tensor) -> None:
        """Go on to the next length."""
        if not self._judged:  # a second domain of a step that is counted already
            raise ValueError(
                "Replay gives one length to the whole gradient of a step, but the mini-batch has "
                "several domains. Train without by_domain, that is without domains=."
            )
        self._judged = False
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps are finished."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint ended."""
        if set(state) != {"step"}:
            raise ValueError(
                f"Replay's state has the entry 'step', but the checkpoint holds {sorted(state)}."
            )
        self.step = int(state["step"])
        self._judged = False

    def _length(self, norms: Tensor) -> float:
        if len(norms) != 1:
            raise ValueError(
                f"Replay gives one length to the whole gradient of a step, but got {len(norms)} "
                "micro-batches. Set microbatch_size to the batch size, with nothing cut in chunks."
            )
        if self.step >= len(self.lengths):
            raise ValueError(
                f"Replay has the lengths of {len(self.lengths)} steps, but this is step "
                f"{self.step + 1}. Train for no more steps than the run that is replayed."
            )
        return self.lengths[self.step]
