"""Counting what the host reads from a device: every such read waits for all that is queued there.

`CountReads` sees any device's operations through torch's dispatcher; the stand-in device counts by
itself. Knows nothing of microclip but its folder's name.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# whose results are numbers of the host, or have a size that depends on values
READING = {
    "_local_scalar_dense", "bincount", "equal", "histc", "masked_select", "nonzero",
    "unique_consecutive", "unique_dim", "_unique", "_unique2",
}  # fmt: skip


@dataclass
class Counts:
    """What the host read, by operation and place in microclip."""

    reads: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How often the host read something."""
        return sum(self.reads.values())

    def note(self, name: str) -> None:
        """Count a read."""
        here = [f for f in traceback.extract_stack() if "/src/microclip/" in f.filename]
        where = "outside"
        if here:
            where = f"{here[-1].filename.rpartition('/microclip/')[2]} in {here[-1].name}"
        self.reads[f"{name}, {where}"] += 1


def reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation on tensors of a device makes the host wait for their values."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "_index_put_impl_":  # a single number is filled in without looking at the mask
        return _has_masks(args[1]) and args[2].numel() > 1
    return name in READING


def _has_masks(indices: Any) -> bool:
    return any(each is not None and each.dtype == torch.bool for each in indices)


class CountReads(TorchDispatchMode):
    """Counts the reads from all devices inside the block, in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = pytree.tree_leaves((args, kwargs))
        away = [t for t in given if isinstance(t, Tensor) and t.device.type not in ("cpu", "meta")]
        found = func(*args, **kwargs)
        looks = name == "index" and _has_masks(args[1])  # inside: nonzero
        if away and (looks or reads(name, args, kwargs) or _is_copied(name, args, found)):
            self.counts.note(name)
        return found


def _is_copied(name: str, args: tuple[Any, ...], found: Any) -> bool:
    """Whether an operation copied from a device to the host."""
    if name == "_to_copy":
        return args[0].device.type != "cpu" and found.device.type == "cpu"
    if name in ("copy_", "_copy_from"):
        one, other = args[:2]
        source, target = (other, one) if name == "copy_" else (one, other)
        return source.device.type != "cpu" and target.device.type == "cpu"
    return False
