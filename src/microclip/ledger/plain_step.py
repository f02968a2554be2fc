"""A step of plain training: ids, losses and what the model predicted, and the rows they become.

Nothing is read from the device before rows are made. Of the logits only what is needed to judge
labels is kept: the probabilities of the given label and of the likeliest other class. Knows nothing
about folders.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from microclip.ledger.arrays import arrow, ids_array, integers, texts_array
from microclip.ledger.tables import EXAMPLES, MICROBATCHES, PREDICTIONS, SCHEMAS, with_metadata

Labels = Tensor | Sequence[Any]


@dataclass(frozen=True, eq=False)
class PlainStep:
    """What was recorded of one step, on whatever device it was.

    Attributes:
        step: Its number.
        ids: A tensor of integers, or a tuple of anything.
        losses: One per example.
        predictions: Four rows: label, its probability, likeliest other class, its probability; NaN
            where unknown. None if nothing is known.
        classes: How many classes the model tells apart, 0 if unknown.
        domains: One per example, or None.
    """

    step: int
    ids: Tensor | tuple[Hashable, ...]
    losses: Tensor
    predictions: Tensor | None
    classes: int
    domains: tuple[Hashable, ...] | None

    def __len__(self) -> int:
        return self.losses.shape[0]


def plain_step(
    step: int,
    ids: Labels,
    losses: Tensor | Sequence[float],
    logits: Any,
    labels: Labels | None,
    domains: Labels | None,
) -> PlainStep:
    """Check and copy what a step had; later changes of the tensors do not matter."""
    _expect_values(ids=ids, losses=losses, logits=logits, labels=labels)
    names = _one_each(ids, "ids")
    size = len(names)
    given = _as_tensor(losses, "losses")
    if given.shape != (size,) or not given.dtype.is_floating_point:
        raise ValueError(
            f"losses must hold one floating-point number for each of the {size} ids, but got "
            f"a tensor of shape {tuple(given.shape)} and type {given.dtype}. Compute them with "
            'reduction="none", and average what is left (tokens, pixels) within each example.'
        )
    predictions, classes = None, 0
    if logits is not None or labels is not None:
        predictions, classes = _predictions(size, logits, labels, given.device)
    copied = given.detach().to(torch.float32, copy=True)
    of_domains = None if domains is None else _tuple(_one_each(domains, "domains", size))
    return PlainStep(step, names, copied, predictions, classes, of_domains)


def _expect_values(**given: Any) -> None:
    """Refuse tensors without values: they could not be written later, nor anything with them."""
    for name, value in given.items():
        if isinstance(value, Tensor) and (
            value.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(value)
        ):
            raise ValueError(
                f"{name} must be a tensor with values, but it is on the meta device or inside of a "
                "torch.func transformation such as vmap. Record after it."
            )


def _one_each(labels: Any, what: str, size: int | None = None) -> Tensor | tuple[Any, ...]:
    """Return a copy of labels, one per example: integers of a tensor stay where they are."""
    if isinstance(labels, Tensor):
        if labels.dim() != 1:
            raise ValueError(
                f"{what} must hold one entry per example, but got a tensor of shape "
                f"{tuple(labels.shape)}."
            )
        plain = labels.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        found: Tensor | tuple[Any, ...]
        found = labels.detach().clone() if plain else tuple(labels.tolist())
    elif isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise ValueError(f"{what} must hold one entry per example, but got {labels!r}.")
    else:
        found = tuple(_entry(label, what) for label in labels)
    if size is not None and len(found) != size:
        raise ValueError(
            f"{what} must hold one entry per example: there are {size} ids, but {what} has "
            f"{len(found)}."
        )
    return found


def _entry(label: Any, what: str) -> Any:
    """Return one id or domain; an element of a tensor as a number."""
    is_array = hasattr(label, "ndim") and label.ndim > 0
    if is_array and math.prod(label.shape) != 1:
        raise ValueError(f"{what} must hold one entry per example, but one of them is {label!r}.")
    return label.item() if is_array or isinstance(label, Tensor) else label


def _as_tensor(values: Any, what: str) -> Tensor:
    """Return numbers as a tensor, without their graph."""
    if isinstance(values, Tensor):
        return values.detach()
    if isinstance(values, list | tuple):
        values = [each.detach() if isinstance(each, Tensor) else each for each in values]
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} must be a tensor, an array or a list of numbers, but got {values!r:.200}."
        ) from error


def _tuple(labels: Tensor | tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(labels.tolist()) if isinstance(labels, Tensor) else labels


@torch.no_grad()
def _predictions(
    size: int, logits: Any, labels: Labels | None, device: torch.device
) -> tuple[Tensor, int]:
    """Return the four rows of `PlainStep.predictions`, and the number of classes."""
    scores = None if logits is None else _two_dimensional(_as_tensor(logits, "logits"), size)
    given = None
    if labels is not None:
        given = _as_tensor(labels, "labels")
        if given.dim() == 2 and given.shape[1] == 1:
            given = given.squeeze(1)
        if given.dim() != 1 or len(given) != size or given.dtype.is_complex:
            raise ValueError(
                f"labels must hold one class number for each of the {size} ids, but got shape "
                f"{tuple(given.shape)}. For several labels per example, or other targets, leave "
                "labels and logits out: losses are enough."
            )
        given = given.to(device if scores is None else scores.device, torch.float32)
    if scores is None:
        assert given is not None
        unknown = torch.full_like(given, torch.nan)
        return torch.stack([given, unknown, unknown, unknown]), 0
    classes = scores.shape[1]
    found = scores.float().softmax(1)
    if given is None:
        highest, other = found.max(1)
        unknown = torch.full_like(highest, torch.nan)
        return torch.stack([unknown, unknown, other.float(), highest]), classes
    # others, such as -100, are not a class
    inside = (given >= 0) & (given < classes) & (given == given.round())
    column = given.nan_to_num().clamp(0, classes - 1).long()[:, None]
    own = found.gather(1, column)
    masked = found.scatter(1, column, torch.where(inside[:, None], -1.0, own))
    highest, other = masked.max(1)
    own = torch.where(inside, own.squeeze(1), torch.nan)
    return torch.stack([given, own, other.float(), highest]), classes


def _two_dimensional(logits: Tensor, size: int) -> Tensor:
    """Return logits with a column per class; a single score is that of class 1 of two."""
    found = logits
    if found.dim() == 2 and found.shape[1] == 1:
        found = found.squeeze(1)
    if found.dim() == 1 and len(found) == size:
        return torch.stack([torch.zeros_like(found), found], 1)
    if found.dim() != 2 or len(found) != size or not found.shape[1]:
        raise ValueError(
            f"logits must have one row for each of the {size} ids and one column per class, but "
            f"got shape {tuple(logits.shape)}. For other outputs, such as those of language models "
            "or regressions, leave logits out: losses are enough."
        )
    return found


def plain_tables(steps: Sequence[PlainStep], rank: int, examples: bool) -> dict[str, pa.Table]:
    """Return the rows of some steps, none of them empty, for each table that gets any.

    A step has one row of micro-batches, one per domain if there are several. Its norm and bound
    are null: nobody computed them.
    """
    lengths = integers(len(each) for each in steps)
    losses = _on_host([each.losses for each in steps])
    predictions = _joined_predictions(steps)
    domains, codes = _domain_codes(steps)
    labels = _joined_ids(steps)
    numbers = torch.arange(len(steps)).repeat_interleave(lengths)
    if len(domains) > 1:  # neighbors in the table, as micro-batches have one domain each
        order = (numbers * len(domains) + codes).argsort(stable=True)
        losses, numbers, codes = losses[order], numbers[order], codes[order]
        labels = _reordered(labels, order)
        predictions = None if predictions is None else predictions[:, order]
    keys, sizes = torch.unique_consecutive(numbers * len(domains) + codes, return_counts=True)
    rows = keys // len(domains)
    places = torch.arange(len(rows)) - torch.searchsorted(rows, rows)
    row_of = torch.arange(len(rows)).repeat_interleave(sizes)
    sums = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row_of, losses.double())
    step_numbers = integers(each.step for each in steps)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids, are_integers = ids_array(labels, alone=len(steps) == 1)
    unknown = pa.nulls(len(rows), pa.float64())
    found = {
        MICROBATCHES: pa.table(
            {
                "step": arrow(step_numbers[rows]),
                "rank": arrow(torch.full_like(rows, rank).int()),
                "microbatch": arrow(places.int()),
                "ids": pa.ListArray.from_arrays(arrow(offsets.int()), ids),
                "size": arrow(sizes.int()),
                "norm": unknown,
                "weight": arrow(torch.ones(len(rows), dtype=torch.float64)),
                "bound": unknown,
                "domain": texts_array(domains).take(arrow(keys % len(domains))),
                "loss": arrow(sums / sizes),
                "skipped": pa.array([False]).take(arrow(torch.zeros_like(rows))),
            }
        )
    }
    if examples:
        columns = {
            "step": arrow(step_numbers[rows].repeat_interleave(sizes)),
            "rank": arrow(torch.full_like(row_of, rank).int()),
            "microbatch": arrow(places.repeat_interleave(sizes).int()),
            "id": ids,
            "loss": arrow(losses),
        }
        if predictions is not None:
            columns |= _prediction_columns(predictions)
        found[EXAMPLES] = pa.table(columns)
    about = {
        "ids": "integer" if are_integers else "string",
        "examples": "yes" if examples else "no",
        "classes": max(each.classes for each in steps),
    }
    return {name: with_metadata(table, **about) for name, table in found.items()}


def _on_host(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Return tensors joined on the host, with a single transfer if they are on one device."""
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    return torch.cat(parts, dim).cpu()


def _joined_ids(steps: Sequence[PlainStep]) -> list[Any] | Tensor:
    tensors = [each.ids for each in steps if isinstance(each.ids, Tensor)]
    if len(tensors) == len(steps):
        return _on_host([ids.to(torch.int64) for ids in tensors])
    return list(chain.from_iterable(_tuple(each.ids) for each in steps))


def _reordered(labels: list[Any] | Tensor, order: Tensor) -> list[Any] | Tensor:
    if isinstance(labels, Tensor):
        return labels[order]
    return [labels[place] for place in order.tolist()]


def _domain_codes(steps: Sequence[PlainStep]) -> tuple[list[str | None], Tensor]:
    """Return the names of all domains (None for none), and the place of each example's in them."""
    if all(each.domains is None for each in steps):
        return [None], torch.zeros(sum(map(len, steps)), dtype=torch.int64)
    names: dict[str | None, int] = {}
    found = []
    for each in steps:
        for domain in each.domains or (None,) * len(each):
            name = None if domain is None else str(domain)
            found.append(names.setdefault(name, len(names)))
    return list(names), integers(found)


def _joined_predictions(steps: Sequence[PlainStep]) -> Tensor | None:
    """Return the predictions of all steps on the host, NaN for steps without."""
    if all(each.predictions is None for each in steps):
        return None
    parts = [
        torch.full((4, len(each)), torch.nan, device=each.losses.device)
        if each.predictions is None
        else each.predictions
        for each in steps
    ]
    return _on_host(parts, 1)


def _prediction_columns(predictions: Tensor) -> dict[str, pa.Array]:
    found = {}
    label = predictions[0]
    whole = (label == label.round()) & (label.abs() < 2**24)  # float32 holds these exactly
    if not bool((whole | label.isnan()).all()):
        warnings.warn(
            "Some labels are not whole numbers, or 2**24 or more, so they were not recorded. For "
            "targets that are not classes, leave logits and labels out of record().",
            RuntimeWarning,
            stacklevel=2,
        )
    predictions[0] = torch.where(whole, label, torch.nan)
    for name, row in zip(PREDICTIONS, predictions, strict=True):
        values = arrow(row)
        known = pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float32()), values)
        found[name] = known.cast(SCHEMAS[EXAMPLES].field(name).type)
    return found
