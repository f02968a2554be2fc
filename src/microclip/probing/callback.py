"""Probing repeatedly during training: how the best micro-batch size drifts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from microclip.engines.losses import LossFn
from microclip.probing.result import Best, Probe, Row
from microclip.probing.run_probe import probe


@dataclass(frozen=True)
class Moment:
    """One probe of the run, without its Gram matrix."""

    step: int  # steps taken before
    rows: tuple[Row, ...]
    best: Best | None
    sentence: str


class ProbeEvery:
    """Probes every n steps; call `step` once per training step, before or after backward.

    Args:
        n: Probe at steps n - 1, 2n - 1, ... counted from 0.
        recent: How many of the latest batches a probe gets. They are kept until then.
        options: Passed to `microclip.probe`: sizes, rules, held_out, draws, ...

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> watch = ProbeEvery(2, draws=16, replicates=16)
    >>> for batch in torch.randn(4, 8, 3):
    ...     _ = watch.step(model, lambda x: model(x).squeeze(1).square(), batch)
    >>> [moment.step for moment in watch.history]
    [1, 3]
    """

    def __init__(self, n: int, *, recent: int = 2, **options: Any) -> None:
        for name, value in (("n", n), ("recent", recent)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, but got {value!r}.")
        self.n = n
        self.history: list[Moment] = []
        self._options = options
        self._recent: deque[Any] = deque(maxlen=recent)
        self._steps = 0

    def step(self, model: nn.Module, loss_fn: LossFn, batch: Any) -> Probe | None:
        """Count a step; every n-th time probe and return the result, else None.

        Gradients, buffers, random generators and training mode are left as they are.
        """
        number, self._steps = self._steps, self._steps + 1
        due = self._steps % self.n == 0
        missing = self.n - self._steps % self.n
        if due or missing < (self._recent.maxlen or 1):  # no probe gets the others
            self._recent.append(batch)
        if not due:
            return None
        found = probe(model, loss_fn, list(self._recent), **self._options)
        self._recent.clear()
        self.history.append(Moment(number, found.rows, found.best, found.sentence))
        return found

    @property
    def sentence(self) -> str:
        """Say how the best size moved, without calling any size the best for training."""
        known = [(moment.step, moment.best) for moment in self.history if moment.best is not None]
        if not known:
            return "Nothing to report yet: no probe has found a result."
        runs: list[tuple[int, int, int]] = []  # size, first step, last step
        for step, best in known:
            if runs and runs[-1][0] == best.size:
                runs[-1] = (best.size, runs[-1][1], step)
            else:
                runs.append((best.size, step, step))
        listed = ", then ".join(
            f"b = {size} " + (f"at step {a}" if a == z else f"from step {a} to {z}")
            for size, a, z in runs
        )
        helped = sum(best.helps for _, best in known)
        return (
            f"Ranked first: {listed}; in {helped} of {len(known)} probes it was clearly better "
            "than a plain step. These are the weights of this run, and a run with another size has "
            "others, so race the two or three sizes that rank first before deciding."
        )

    def plot(self, path: str | Path) -> None:
        """Plot gains and the best size against the step; needs matplotlib."""
        if not self.history:
            raise ValueError(f"There is nothing to plot: {self._steps} steps, no probe yet.")
        from microclip.probing.plot import draw_history

        draw_history(self.history, path)

    def __str__(self) -> str:
        lines = [
            f"step {moment.step}: "
            + ", ".join(f"b={row.size} {row.gain:.2f}" for row in moment.rows)
            for moment in self.history
        ]
        return "\n".join([*lines, self.sentence])
