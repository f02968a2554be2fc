"""What a classifier predicted: the rows that are kept of its logits, and their columns.

Only what is needed to judge labels is kept: the probabilities of the given label and of the
likeliest other class. Knows nothing about steps or folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from microclip.ledger.arrays import arrow
from microclip.user_warnings import warn

Labels = Tensor | Sequence[Any]

FIELDS = (
    ("label", pa.int32()),
    ("label_probability", pa.float32()),
    ("other", pa.int32()),  # the likeliest class that is not the label
    ("other_probability", pa.float32()),
)


def expect_values(**given: Any) -> None:
    """Refuse tensors without values: they could not be written later, nor anything with them."""
    for name, value in given.items():
        if isinstance(value, Tensor) and (
            value.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(value)
        ):
            raise ValueError(
                f"{name} must be a tensor with values, but it is on the meta device or inside a "
                "torch.func transformation such as vmap. Record after it."
            )


def as_tensor(values: Any, what: str) -> Tensor:
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


@torch.no_grad()
def predictions(
    size: int, logits: Any, labels: Labels | None, device: torch.device | None = None
) -> tuple[Tensor, int]:
    """Return label, its probability, likeliest other class, its probability; and how many classes.

    One row for each of these, NaN where unknown; nothing is read from the device.
    """
    scores = None if logits is None else _two_dimensional(as_tensor(logits, "logits"), size)
    given = None
    if labels is not None:
        given = as_tensor(labels, "labels")
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


def prediction_columns(rows: Tensor) -> dict[str, pa.Array]:
    """Return the columns of what `predictions` returned, on the host; NaN becomes null."""
    found = {}
    label = rows[0]
    whole = (label == label.round()) & (label.abs() < 2**24)  # float32 holds these exactly
    if not bool((whole | label.isnan()).all()):
        warn(
            "Some labels are not whole numbers, or 2**24 or more, so they were not recorded. For "
            "targets that are not classes, leave logits and labels out of record()."
        )
    rows[0] = torch.where(whole, label, torch.nan)
    for (name, kind), row in zip(FIELDS, rows, strict=True):
        values = arrow(row)
        known = pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float32()), values)
        found[name] = known.cast(kind)
    return found
