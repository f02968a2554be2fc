"""Per-example gradients at a moment of a run: known draggers against the others.

What the paper's Figure 1 (cosines) and Table 3 (c-hat) are made of, from the weights in a folder.
Knows the recipes' data well enough to tell draggers, and nothing of how the weights were trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from microclip.probing.draggers import Draggers, Estimate, look_at
from microclip.probing.gram import gram_of
from microclip_lab.language.recipe import Texts
from microclip_lab.speech.recordings import Recordings
from microclip_lab.training.batch_rng import Draws
from microclip_lab.training.checkpoints import load_weights
from microclip_lab.training.recipe import Data, Recipe
from microclip_lab.vision.pictures import Pictures

CANARY = "canary"  # the domain that the speech recipe gives them
MEMORY = 2**30  # bytes for the Gram matrix: a given number, so that no free memory has a say


@dataclass(frozen=True)
class Moment:
    """What gradients looked like after a step.

    Cosines are means over pairs with intervals over resampled examples, and `*_spread` is the
    standard deviation of the pairs. c-hat is there in both orientations: `dragger_over_benign`
    as the paper defines c, `benign_over_dragger` as it prints the fraction.
    """

    step: int
    draggers: int  # that were compared
    benign: int
    left_out: int  # further rows that were drawn, but have no gradient at all
    loss_draggers: float  # mean over those that were compared
    loss_benign: float
    dragger_benign: Estimate
    benign_benign: Estimate
    dragger_dragger: Estimate
    dragger_benign_spread: float
    benign_benign_spread: float
    dragger_dragger_spread: float
    dragger_to_mean: Estimate  # cosine to the mean benign gradient
    benign_to_mean: Estimate  # to that of the others
    dragger_over_benign: Estimate
    benign_over_dragger: Estimate
    dragger_over_mean: Estimate  # to the norm of the mean benign gradient

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads: an estimate as [value, low, high], NaN as null."""
        said: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Estimate):
                said[field.name] = [_finite(each) for each in (value.value, value.low, value.high)]
            else:
                said[field.name] = _finite(value)
        return said

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Moment:
        """Return the moment that `to_json` told of."""
        values: dict[str, Any] = {
            name: Estimate(*(_number(each) for each in value))
            if isinstance(value, list | tuple)
            else _number(value)
            for name, value in said.items()
        }
        return cls(**values)


def known_draggers(recipe: Recipe[Any, Any], data: Data[Any]) -> list[bool]:
    """Say of each training row whether it is known to drag.

    Pictures and texts whose label is not the right one, where that is known; canaries of speech.
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
        "Draggers are known of the recipes vision, speech and language with the data that they "
        f"load themselves, but got {type(training).__name__} of the recipe {recipe.name!r}."
    )


def rows_to_look_at(
    recipe: Recipe[Any, Any], data: Data[Any], seed: int, draggers: int, benign: int
) -> tuple[list[int], list[int]]:
    """Return rows of draggers and of others, drawn by the seed; all there are, if they are fewer.

    Of a canary that was inserted several times one row is taken: twins would only show that the
    cosine of a gradient with itself is 1.
    """
    known = known_draggers(recipe, data)
    dragging = _distinct(data, [row for row, drags in enumerate(known) if drags])
    others = [row for row, drags in enumerate(known) if not drags]
    draw = np.random.default_rng((seed, 2))
    return _drawn(dragging, draggers, draw), _drawn(others, benign, draw)


def look(
    recipe: Recipe[Any, Any],
    data: Data[Any],
    weights_folder: Path,
    step: int,
    seed: int,
    *,
    draggers: int = 64,
    benign: int = 128,
) -> Moment | None:
    """Look at gradients of known draggers and of others; None if there are not two of each.

    The rows and how they are augmented are the same for every step of every run that has this
    seed; nothing is dropped out. Neither random numbers nor the number of threads change for the
    caller, so that a run may be looked at while it trains.

    Args:
        recipe: What is trained.
        data: What it loaded with the seed.
        weights_folder: A folder with model.safetensors, as checkpoints are.
        step: The step after which these were the weights; only noted.
        seed: The run's.
        draggers: How many to look at, at most.
        benign: How many others to look at, at most.
    """
    dragging, others = rows_to_look_at(recipe, data, seed, draggers, benign)
    if len(dragging) < 2 or len(others) < 2:
        return None
    with _by_itself():
        model = recipe.build(data)
        load_weights(model, weights_folder)
        model.eval()
        rows = [*dragging, *others]
        batch = recipe.collate([data.training[row] for row in rows], Draws(seed, 0, len(rows)))
        with torch.no_grad():
            losses = recipe.losses(model, batch).double()
        gram = gram_of(model, lambda part: recipe.losses(model, part), [batch], MEMORY)
    drags = torch.arange(len(rows)) < len(dragging)
    # CTC gives no gradient to an utterance that is too short for its text, and no cosine either
    there = gram.matrix.diagonal() > 0
    if (drags & there).sum() < 2 or (~drags & there).sum() < 2:
        return None
    return _moment(step, gram.matrix[there][:, there], drags[there], losses[there], len(rows))


def _moment(step: int, matrix: Tensor, drags: Tensor, losses: Tensor, drawn: int) -> Moment:
    found = look_at(matrix, drags)
    assert found.dragger_dragger is not None  # there are two or more
    same = {field.name for field in fields(Draggers)} & {field.name for field in fields(Moment)}
    figures = {name: getattr(found, name) for name in same}
    return Moment(
        **figures,
        step=step,
        left_out=drawn - len(matrix),
        loss_draggers=losses[drags].mean().item(),
        loss_benign=losses[~drags].mean().item(),
        dragger_dragger_spread=_spread(matrix[drags][:, drags]),
    )


def _spread(matrix: Tensor) -> float:
    """Return the standard deviation of the cosines of all pairs; 0 of a single one."""
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
def _by_itself() -> Iterator[None]:
    """Compute on one thread, since more add up in another order, and give random numbers back."""
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
