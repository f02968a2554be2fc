"""Batches: nested containers of tensors, and the examples that lie along one dimension of each.

Counting examples, selecting some of them, copying. Knows nothing of micro-batches or models.
Tensors with fewer dimensions than `batch_dim` have the examples along their last.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from microclip import multitensor


def axis_of(leaf: Tensor, batch_dim: int) -> int:
    """Return the dimension that the examples of a tensor lie along."""
    return min(batch_dim, leaf.dim() - 1)


def count_examples(batch: Any, batch_dim: int = 0) -> int:
    """Return the number of examples, which must be the same in all tensors of a batch."""
    first_name, size = "", -1
    for name, leaf in tensors_of(batch):
        length = leaf.shape[axis_of(leaf, batch_dim)]
        if size < 0:
            first_name, size = name, length
        elif length != size:
            where = "first dimension" if batch_dim == 0 else f"dimension {batch_dim}"
            raise ValueError(
                f"All tensors of a batch must have the examples along their {where}, but "
                f"{first_name} has {size} and {name} has {length}. Let loss_fn close over tensors "
                "that do not have one entry per example, and pass batch_dim=1 if tensors are "
                "(time, examples, ...)."
            )
    if size < 0:
        raise ValueError(
            f"Found no tensor with a first dimension in the batch of type {type(batch).__name__}, "
            "so there is nothing to cut. A batch is a tensor, or a tuple, list, dict or dataclass "
            "that holds tensors with the examples along their first dimension."
        )
    if size == 0:
        raise ValueError(f"The batch is empty: {first_name} has 0 examples.")
    return size


def is_empty(batch: Any, batch_dim: int = 0) -> bool:
    """Whether a batch has tensors, but no examples in them."""
    lengths = [leaf.shape[axis_of(leaf, batch_dim)] for _, leaf in tensors_of(batch)]
    return bool(lengths) and not any(lengths)


def select(batch: Any, positions: Sequence[int], batch_dim: int) -> Any:
    """Return the batch with only these examples: views if they are contiguous, else copies."""

    def strings(texts: Any) -> Any:
        if len(texts) != count_examples(batch, batch_dim):
            return texts
        return type(texts)([texts[position] for position in positions])

    start, stop = positions[0], positions[-1] + 1
    if list(positions) == list(range(start, stop)):
        if batch_dim == 0:
            return map_tensors(lambda leaf: leaf[start:stop], batch, strings)
        length = stop - start
        return map_tensors(
            lambda leaf: leaf.narrow(axis_of(leaf, batch_dim), start, length), batch, strings
        )
    chosen = torch.tensor(positions)
    return map_tensors(
        lambda leaf: leaf.index_select(axis_of(leaf, batch_dim), chosen.to(leaf.device)),
        batch,
        strings,
    )


def copied(batch: Any) -> Any:
    """Return a batch with copies of all tensors."""
    return map_tensors(_copy, batch)


def _copy(leaf: Tensor) -> Tensor:
    if leaf.grad_fn is not None:
        return leaf.clone()
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals itself. True if reading them is not free."""
    if not multitensor.on_host(one) or torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def versions_of(batch: Any) -> list[int]:
    """Return numbers that change when a tensor of a batch is written to or replaced."""
    return [
        -1 if leaf.is_inference() else leaf._version + (id(leaf) << 32)
        for _, leaf in tensors_of(batch)
    ]


def tensors_of(node: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that will be cut, with a name that locates it."""
    if isinstance(node, Tensor):
        if node.dim() > 0:
            yield name, node
        return
    for key, child in _children(node):
        yield from tensors_of(child, f"{name}{key}")


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, PackedSequence):
        raise TypeError(
            "A PackedSequence cannot be cut into examples. Put the padded tensor and the lengths "
            "into the batch, and pack them inside loss_fn."
        )
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", child) for key, child in node.items()]
    if _is_dataclass(node):
        return [(f".{f.name}", getattr(node, f.name)) for f in dataclasses.fields(node)]
    if isinstance(node, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(node)]
    return []


def map_tensors(
    function: Callable[[Tensor], Tensor], node: Any, strings: Callable[[Any], Any] | None = None
) -> Any:
    """Rebuild a nested container of the same types, replacing tensors and lists of strings."""
    if isinstance(node, Tensor):
        return function(node) if node.dim() > 0 else node
    if isinstance(node, Mapping):
        # a copy keeps what a BatchEncoding holds besides its data
        mapping = copy.copy(node) if isinstance(node, MutableMapping) else dict(node)
        mapping.update({key: map_tensors(function, child, strings) for key, child in node.items()})
        return mapping
    if _is_dataclass(node):
        rebuilt = copy.copy(node)
        for field in dataclasses.fields(node):
            # bypasses frozen classes and checks in __post_init__ that expect whole batches
            child = map_tensors(function, getattr(node, field.name), strings)
            object.__setattr__(rebuilt, field.name, child)
        return rebuilt
    if isinstance(node, list | tuple):
        if hasattr(node, "_fields"):
            return type(node)(*[map_tensors(function, child, strings) for child in node])
        if strings is not None and _are_strings(node):
            return strings(node)
        return type(node)([map_tensors(function, child, strings) for child in node])
    return node


def numbers_in(node: Any, count: int, name: str) -> Iterator[tuple[str, int]]:
    """Yield lists and arrays with this many numbers, with a name that locates them."""
    if isinstance(node, Tensor):
        return
    is_list = isinstance(node, list) and all(type(each) in (int, float, bool) for each in node)
    if is_list or (hasattr(node, "__array__") and getattr(node, "ndim", 0) > 0):
        if len(node) == count > 1:
            yield name, count
        return
    for key, child in _children(node):
        yield from numbers_in(child, count, f"{name}{key}")


def _are_strings(values: Sequence[Any]) -> bool:
    """Whether these are strings, some of which may be None."""
    kinds = set(map(type, values))
    return bool(kinds & {str, bytes}) and kinds <= {str, bytes, type(None)}


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)
