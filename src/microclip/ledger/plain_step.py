"""A step of plain training: ids, losses and what the model predicted, and the rows they become.

Nothing is read from the device before rows are made. Knows nothing about folders.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from microclip.ledger.arrays import arrow, ids_array, integers, texts_array
from microclip.ledger.predictions import (
    Labels,
    as_tensor,
    expect_values,
    prediction_columns,
    predictions,
)
from microclip.ledger.tables import EXAMPLES, MICROBATCHES, with_metadata

DOUBLE = 2.0**53
EXACT = {2: 2.0**11, 4: 2.0**24, 8: DOUBLE}  # bytes of a float: below, whole numbers are exact


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
        where: Which examples to keep, or None for all.
    """

    step: int
    ids: Tensor | tuple[Hashable, ...]
    losses: Tensor
    predictions: Tensor | None
    classes: int
    domains: tuple[Hashable, ...] | None
    where: Tensor | None = None

    def __len__(self) -> int:
        return self.losses.shape[0]


def plain_step(
    step: int,
    ids: Labels,
    losses: Tensor | Sequence[float],
    logits: Any,
    labels: Labels | None,
    domains: Labels | None,
    where: Any = None,
) -> PlainStep:
    """Check and copy what a step had; later changes of the tensors do not matter."""
    expect_values(ids=ids, losses=losses, logits=logits, labels=labels, where=where)
    names = one_each(ids, "ids")
    size = len(names)
    given = as_tensor(losses, "losses")
    if given.shape != (size,) or not given.dtype.is_floating_point:
        raise ValueError(
            f"losses must hold one floating-point number for each of the {size} ids, but got "
            f"a tensor of shape {tuple(given.shape)} and type {given.dtype}. Compute them with "
            'reduction="none", and average what is left (tokens, pixels) within each example.'
        )
    rows, classes = None, 0
    if logits is not None or labels is not None:
        rows, classes = predictions(size, logits, labels, given.device)
    copied = given.detach().to(torch.float32, copy=True)
    of_domains = None if domains is None else _tuple(one_each(domains, "domains", size))
    kept = None if where is None else _where(where, size)
    return PlainStep(step, names, copied, rows, classes, of_domains, kept)


def _where(where: Any, size: int) -> Tensor:
    found = as_tensor(where, "where")
    if found.shape != (size,) or found.dtype != torch.bool:
        raise ValueError(
            f"where must hold True or False for each of the {size} ids, but got a tensor of shape "
            f"{tuple(found.shape)} and type {found.dtype}."
        )
    return found.clone()


def kept_rows(steps: Sequence[PlainStep]) -> list[PlainStep]:
    """Return steps without the examples that are not kept, and only those that have any left."""
    chosen = [each.where for each in steps if each.where is not None]
    if not chosen:
        return list(steps)
    masks = iter(torch.split(_on_host(chosen), [len(mask) for mask in chosen]))
    found = [each if each.where is None else _kept(each, next(masks)) for each in steps]
    return [each for each in found if len(each)]


def _kept(step: PlainStep, mask: Tensor) -> PlainStep:
    if bool(mask.all()):
        return replace(step, where=None)
    places = mask.nonzero().squeeze(1)
    on_device = places.to(step.losses.device)

    def chosen(labels: Any) -> Any:
        if isinstance(labels, Tensor):
            return labels[places.to(labels.device)]
        return None if labels is None else tuple(labels[place] for place in places.tolist())

    return replace(
        step,
        ids=chosen(step.ids),
        losses=step.losses[on_device],
        predictions=None if step.predictions is None else step.predictions[:, on_device],
        domains=chosen(step.domains),
        where=None,
    )


def one_each(labels: Any, what: str, size: int | None = None) -> Tensor | tuple[Any, ...]:
    """Return a copy of labels, one per example: integers of a tensor stay where they are."""
    exact = DOUBLE
    if isinstance(labels, Tensor):
        if labels.dim() != 1:
            raise ValueError(
                f"{what} must hold one entry per example, but got a tensor of shape "
                f"{tuple(labels.shape)}."
            )
        plain = labels.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        found: Tensor | tuple[Any, ...]
        found = labels.detach().clone() if plain else tuple(labels.tolist())
        if labels.is_floating_point():
            exact = 2 / torch.finfo(labels.dtype).eps
    elif isinstance(labels, set | frozenset):
        raise ValueError(
            f"{what} must be in the order of the examples, but got a set, which has no order. Pass "
            "a list or a tensor."
        )
    elif isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise ValueError(f"{what} must hold one entry per example, but got {labels!r}.")
    else:
        found = tuple(_entry(label, what) for label in labels)
    if size is not None and len(found) != size:
        raise ValueError(
            f"{what} must hold one entry per example: there are {size} ids, but {what} has "
            f"{len(found)}."
        )
    if what == "ids" and not isinstance(found, Tensor):
        return tuple(_name(each, exact) for each in found)
    return found


def _name(label: Any, exact: float) -> Any:
    """Return an id; one that is a floating-point number must be a whole one, and exact."""
    if not isinstance(label, float) and getattr(getattr(label, "dtype", None), "kind", "") != "f":
        return label
    limit = min(exact, EXACT.get(getattr(label, "itemsize", 8), DOUBLE))
    if not abs(label) < limit or label != int(label):
        raise ValueError(
            f"ids must be integers or strings, but one of them is {label!r}: a floating-point "
            f"number of its type names a single example only if it is whole and below {limit:.0f}. "
            "Keep ids as integers, such as torch.int64."
        )
    return int(label)


def _entry(label: Any, what: str) -> Any:
    """Return one id or domain; an element of a tensor as a number."""
    is_array = hasattr(label, "ndim") and label.ndim > 0
    if is_array and math.prod(label.shape) != 1:
        raise ValueError(f"{what} must hold one entry per example, but one of them is {label!r}.")
    return label.item() if is_array or isinstance(label, Tensor) else label


def _tuple(labels: Tensor | tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(labels.tolist()) if isinstance(labels, Tensor) else labels


def plain_tables(steps: Sequence[PlainStep], rank: int, examples: bool) -> dict[str, pa.Table]:
    """Return the rows of some steps, none of them empty, for each table that gets any.

    A step has one row of micro-batches, one per domain if there are several. Its norm and bound
    are null: nobody computed them.
    """
    lengths = integers(len(each) for each in steps)
    losses = _on_host([each.losses for each in steps])
    predicted = _joined_predictions(steps)
    domains, codes = _domain_codes(steps)
    labels = _joined_ids(steps)
    numbers = torch.arange(len(steps)).repeat_interleave(lengths)
    if len(domains) > 1:  # neighbors in the table, as micro-batches have one domain each
        order = (numbers * len(domains) + codes).argsort(stable=True)
        losses, numbers, codes = losses[order], numbers[order], codes[order]
        labels = _reordered(labels, order)
        predicted = None if predicted is None else predicted[:, order]
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
        if predicted is not None:
            columns |= prediction_columns(predicted)
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
