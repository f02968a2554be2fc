"""Snapshots of per-example gradients during a run: known draggers compared with other examples.

The source of the paper's Figure 1 (cosines) and Table 3 (c-hat), from the weights in a folder; the
second half reduces recorded snapshots to single numbers. Records call snapshots "moments". Knows
how to find draggers in the recipes' data, and nothing of how the weights were trained.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from microclip.probing import Draggers, Estimate, compare_draggers, gram_of
from microclip_lab.language.recipe import Texts
from microclip_lab.reproduction.records import Record
from microclip_lab.speech.recordings import Recordings
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.checkpoints import load_weights
from microclip_lab.training.recipe import Data, Recipe
from microclip_lab.vision.pictures import Pictures

CANARY = "canary"  # their domain in the speech recipe
MEMORY = 2**30  # bytes for the Gram matrix: fixed, so that free memory does not matter


@dataclass(frozen=True)
class Snapshot:
    """Gradient statistics after a step.

    Cosines are means over pairs with intervals over resampled examples, and `*_spread` is the
    standard deviation of the pairs. c-hat is there in both orientations: `dragger_over_benign`
    as the paper defines c, `benign_over_dragger` as it prints the fraction.
    """

    step: int
    draggers: int  # number compared
    benign: int
    left_out: int  # further rows whose gradient is zero
    loss_draggers: float  # mean over the compared ones
    loss_benign: float
    dragger_benign: Estimate
    benign_benign: Estimate
    dragger_dragger: Estimate
    dragger_benign_spread: float
    benign_benign_spread: float
    dragger_dragger_spread: float
    dragger_to_mean: Estimate  # cosine to the mean benign gradient
    benign_to_mean: Estimate  # to the mean of the others
    dragger_over_benign: Estimate
    benign_over_dragger: Estimate
    dragger_over_mean: Estimate  # relative to the norm of the mean benign gradient

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON: estimates as [value, low, high], NaN as null."""
        said: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Estimate):
                said[field.name] = [_finite(each) for each in (value.value, value.low, value.high)]
            else:
                said[field.name] = _finite(value)
        return said

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot that `to_json` wrote."""
        values: dict[str, Any] = {
            name: Estimate(*(_number(each) for each in value))
            if isinstance(value, list | tuple)
            else _number(value)
            for name, value in said.items()
        }
        return cls(**values)


def known_draggers(recipe: Recipe[Any, Any], data: Data[Any]) -> list[bool]:
    """Return for each training row whether it is a known dragger.

    Draggers are images and texts with a label that is known to be wrong, and canaries in speech.
    """
    training = data.training
    if isinstance(training, Pictures):
        if training.truths is None:
            return [False] * len(training)
        wrong: list[bool] = (training.labels != training.truths).tolist()
        return wrong
    if isinstance(training, Recordings):
        assert data.domains is not None
        return [domain == CANARY for domain in data.domains]
    if isinstance(data, Texts):
        return [e.truth is not None and e.target != e.truth for e in data.examples]
    raise TypeError(
        "Draggers are known for the data of the recipes vision, speech and language, but got "
        f"{type(training).__name__} of the recipe {recipe.name!r}."
    )


def rows_to_compare(
    recipe: Recipe[Any, Any], data: Data[Any], seed: int, draggers: int, benign: int
) -> tuple[list[int], list[int]]:
    """Return rows of draggers and of others, drawn with the seed; all of them if there are fewer.

    Only one copy of a canary is used: copies have a cosine of 1 by construction.
    """
    known = known_draggers(recipe, data)
    dragging = _distinct(data, [row for row, drags in enumerate(known) if drags])
    others = [row for row, drags in enumerate(known) if not drags]
    draw = np.random.default_rng((seed, 2))
    return _drawn(dragging, draggers, draw), _drawn(others, benign, draw)


def take_snapshot(
    recipe: Recipe[Any, Any],
    data: Data[Any],
    weights_folder: Path,
    step: int,
    seed: int,
    *,
    draggers: int = 64,
    benign: int = 128,
) -> Snapshot | None:
    """Compare gradients of known draggers and of others; None if there are not two of each.

    Rows and augmentation are the same for every step of every run with this seed; dropout is off.
    The caller's random state and number of threads are restored, so that this can be called during
    training.

    Args:
        recipe: What is trained.
        data: Its data for the seed.
        weights_folder: A folder with model.safetensors, such as a checkpoint.
        step: The step of these weights; only recorded.
        seed: The seed of the run.
        draggers: Maximum number of draggers.
        benign: Maximum number of other examples.
    """
    dragging, others = rows_to_compare(recipe, data, seed, draggers, benign)
    if len(dragging) < 2 or len(others) < 2:
        return None
    with _isolated():
        model = recipe.build(data)
        load_weights(model, weights_folder)
        model.eval()
        rows = [*dragging, *others]
        batch = recipe.collate([data.training[row] for row in rows], BatchRng(seed, 0, len(rows)))
        with torch.no_grad():
            losses = recipe.losses(model, batch).double()
        gram = gram_of(model, lambda part: recipe.losses(model, part), [batch], MEMORY)
    drags = torch.arange(len(rows)) < len(dragging)
    # utterances that are too short for their text have a zero gradient with CTC, and no cosine
    there = gram.matrix.diagonal() > 0
    if (drags & there).sum() < 2 or (~drags & there).sum() < 2:
        return None
    return _snapshot(step, gram.matrix[there][:, there], drags[there], losses[there], len(rows))


def _snapshot(step: int, matrix: Tensor, drags: Tensor, losses: Tensor, drawn: int) -> Snapshot:
    found = compare_draggers(matrix, drags)
    assert found.dragger_dragger is not None  # since there are at least two
    same = {field.name for field in fields(Draggers)} & {field.name for field in fields(Snapshot)}
    figures = {name: getattr(found, name) for name in same}
    return Snapshot(
        **figures,
        step=step,
        left_out=drawn - len(matrix),
        loss_draggers=losses[drags].mean().item(),
        loss_benign=losses[~drags].mean().item(),
        dragger_dragger_spread=_spread(matrix[drags][:, drags]),
    )


def _spread(matrix: Tensor) -> float:
    """Return the standard deviation of the cosines of all pairs; 0 for a single pair."""
    norms = matrix.diagonal().sqrt()
    cosines = matrix / (norms[:, None] * norms)
    pairs = cosines[tuple(torch.triu_indices(len(matrix), len(matrix), offset=1))]
    return pairs.std().item() if len(pairs) > 1 else 0.0


def _distinct(data: Data[Any], rows: Sequence[int]) -> list[int]:
    if not isinstance(data.training, Recordings):
        return list(rows)
    files = data.training.files
    first: dict[Path, int] = {}
    for row in rows:
        first.setdefault(files[row].path, row)
    return list(first.values())


def _drawn(rows: Sequence[int], count: int, draw: np.random.Generator) -> list[int]:
    return [rows[place] for place in draw.permutation(len(rows))[:count]]


@contextmanager
def _isolated() -> Iterator[None]:
    """Compute on one thread, since more sum in another order, and restore the random state."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> Any:
    return math.nan if value is None else value


Matched = Literal["step", "loss"]
MATCHED: tuple[Matched, ...] = ("step", "loss")


def moments_of(record: Record) -> list[Mapping[str, Any]]:
    """Return the snapshots of a run, by step."""
    return sorted(record.moments, key=lambda moment: moment["step"])


def value(moment: Mapping[str, Any], name: str) -> float:
    """Return a figure of a snapshot without its interval; NaN if unknown.

    >>> value({"loss_benign": 0.5, "dragger_benign": [0.1, 0.0, 0.2]}, "dragger_benign")
    0.1
    """
    found = moment.get(name)
    if isinstance(found, list | tuple):
        found = found[0]
    return math.nan if found is None else float(found)


def level(record: Record, name: str) -> float | None:
    """Return the mean of a figure over all snapshots but the first; None if one is unknown."""
    values = [value(moment, name) for moment in moments_of(record)[1:]]
    if not values or not all(math.isfinite(each) for each in values):
        return None
    return statistics.fmean(values)


def ratios(runs: Sequence[Record], name: str, matched: Matched) -> list[float] | str:
    """Return a ratio of each run, at the last step or at a common loss, or why there is none."""
    found: list[float] = []
    for record in runs:
        if not record.moments:
            return f"{record.id} was not looked into"
    ends = [moments_of(record)[-1] for record in runs]
    if matched == "step" and len({end["step"] for end in ends}) > 1:
        return f"{runs[0].id} and the others were not last looked into at the same step"
    losses = [value(end, "loss_benign") for end in ends]
    if matched == "loss" and not all(math.isfinite(loss) for loss in losses):
        return f"{runs[0].id} or another one ended with a loss that is not finite"
    target = max(losses)
    for record, end in zip(runs, ends, strict=True):
        ratio = value(end, name) if matched == "step" else at_loss(record, name, target)
        if ratio is None:
            return f"{record.id} has a lower loss than {target:.4g} as soon as it is looked into"
        if not math.isfinite(ratio) or ratio <= 0:
            return f"{record.id} has no {name.replace('_', ' ')}"
        found.append(ratio)
    return found


def at_loss(record: Record, name: str, target: float) -> float | None:
    """Return a ratio where the loss of benign examples first falls to the target.

    Between two snapshots its logarithm is interpolated linearly in the loss. None if the first
    snapshot is already below the target.
    """
    moments = moments_of(record)
    losses = [value(moment, "loss_benign") for moment in moments]
    for place, loss in enumerate(losses):
        if not loss <= target:
            continue
        here = value(moments[place], name)
        if loss == target:
            return here
        if place == 0:
            return None
        before, above = value(moments[place - 1], name), losses[place - 1]
        if not (before > 0 and here > 0):
            return math.nan
        share = (above - target) / (above - loss)
        return math.exp((1 - share) * math.log(before) + share * math.log(here))
    return math.nan


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line.

    >>> slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    2.0
    """
    return statistics.linear_regression(xs, ys).slope
