"""Ledgers written by hand: a step is a list of micro-batches, each with its examples and norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microclip import Outcome
from microclip.ledger import Ledger


@dataclass(frozen=True)
class Row:
    """A micro-batch: its examples and what was measured."""

    ids: Sequence[Any]
    norm: float
    weight: float = 1.0
    domain: Any = None
    loss: float | None = None  # of the micro-batch
    losses: Sequence[float] | None = None  # of its examples
    weights: Sequence[float] | None = None  # of its examples, for rules that weight them


def outcome(step: int, rows: Sequence[Row], notes: tuple[str, ...] = ()) -> Outcome:
    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    norms = column([row.norm for row in rows])
    each = [loss for row in rows for loss in row.losses or ()]
    means = [sum(r.losses) / len(r.losses) if r.losses else r.loss for r in rows]
    known = all(mean is not None for mean in means)
    given = [weight for row in rows for weight in row.weights or ()]
    return Outcome(
        step=step,
        loss=column(means).mean() if known else None,
        losses=column(means) if known else None,
        example_losses=column(each) if each else None,
        norms=norms,
        weights=column([row.weight for row in rows]),
        bounds=torch.ones_like(norms),
        sizes=torch.tensor([len(row.ids) for row in rows]),
        skipped=~norms.isfinite(),
        domains=tuple(row.domain for row in rows),
        ids=tuple(tuple(row.ids) for row in rows),
        engine="stream",
        notes=notes,
        example_weights=column(given) if given else None,
    )


def write(path, steps: Sequence[Sequence[Row]], rank: int = 0, **options: Any):
    """Write a ledger; `steps` are numbered from 0."""
    with Ledger(path, **options) as ledger:
        for step, rows in enumerate(steps):
            ledger.record(outcome(step, rows), rank=rank)
    return path
