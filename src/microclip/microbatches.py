"""Cutting a batch into micro-batches: nested containers of tensors, domains, ragged ends.

Knows nothing of models, gradients or rules. Slices are contiguous, in the order given; nothing is
shuffled. Tensors are cut along their first dimension; everything else is handed on whole.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Domains = Tensor | Sequence[Hashable]
Ids = Tensor | Sequence[Hashable]


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Some examples of one domain."""

    source: Any  # the batch they belong to
    positions: Sequence[int]
    domain: Hashable  # None when no domains were given
    ids: tuple[Hashable, ...]  # positions in the mini-batch when none were given

    @property
    def size(self) -> int:
        """How many examples there are."""
        return len(self.positions)

    @property
    def batch(self) -> Any:
        """The examples, in the shape of the batch they are cut from, cut anew whenever asked for.

        So a loss function may take its container apart, as that of transformers' Trainer does.
        """
        return _select(self.source, self.positions)


class Cuts(Sequence[Microbatch]):
    """The micro-batches of a batch, which are put together when they are asked for.

    Args:
        batch: What they are cut from.
        positions: Where each one's examples are in it.
        domains: That of each.
        ids: Those of each one's examples.
    """

    def __init__(
        self,
        batch: Any,
        positions: list[Sequence[int]],
        domains: list[Hashable],
        ids: list[tuple[Hashable, ...]],
    ) -> None:
        self.sizes = [len(each) for each in positions]
        self.domains = domains
        self.ids = ids
        self._batch = batch
        self._positions = positions

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...

    @overload
    def __getitem__(self, index: slice) -> Cuts: ...

    def __getitem__(self, index: int | slice) -> Microbatch | Cuts:
        batch, positions, domains, ids = self._batch, self._positions, self.domains, self.ids
        if isinstance(index, slice):
            return Cuts(batch, positions[index], domains[index], ids[index])
        return Microbatch(batch, positions[index], domains[index], ids[index])

    def chosen(self, rows: Sequence[int]) -> Cuts:
        """Return some of the micro-batches, in the order given."""
        return Cuts(
            self._batch,
            [self._positions[row] for row in rows],
            [self.domains[row] for row in rows],
            [self.ids[row] for row in rows],
        )

    @cached_property
    def examples(self) -> int:
        """How many examples there are in all micro-batches."""
        return sum(self.sizes)

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The tensors of the batch that they are cut from."""
        return [leaf for _, leaf in tensors_of(self._batch)]

    @property
    def whole(self) -> Any:
        """All the examples, micro-batch after micro-batch, in a container of their own."""
        positions = list(chain.from_iterable(self._positions))
        if positions == list(range(len(self.leaves[0]))):
            return _map(lambda leaf: leaf, self._batch)
        return _select(self._batch, positions)


def cut(
    batch: Any,
    microbatch_size: int | None,
    *,
    domains: Domains | None = None,
    ids: Ids | None = None,
    first_position: int = 0,
) -> Cuts:
    """Cut a batch into micro-batches of `microbatch_size` examples (None: the whole batch).

    With `domains`, the examples are first sorted by domain (a stable sort), so that no micro-batch
    mixes two; the last micro-batch of each domain may be smaller than the rest.

    >>> [m.size for m in cut(torch.zeros(10, 3), 4)]
    [4, 4, 2]
    >>> [(m.domain, m.ids) for m in cut(torch.zeros(4), 2, domains=["de", "en", "de", "de"])]
    [('de', (0, 2)), ('de', (3,)), ('en', (1,))]
    """
    size = count_examples(batch)
    names = _as_list(ids, "ids", size) or list(range(first_position, first_position + size))
    labels = _as_list(domains, "domains", size)
    positions: list[Sequence[int]] = []
    owners: list[Hashable] = []
    for domain, found in _by_domain(labels, size):
        step = len(found) if microbatch_size is None else microbatch_size
        pieces = [found[start : start + step] for start in range(0, len(found), step)]
        positions += pieces
        owners += [domain] * len(pieces)
    return Cuts(batch, positions, owners, [tuple([names[i] for i in each]) for each in positions])


def check_size(microbatch_size: object) -> int | None:
    """Return a valid micro-batch size as an int or None, or explain what is wrong with it."""
    if microbatch_size is None:
        return None
    if not isinstance(microbatch_size, bool):
        try:
            size = operator.index(microbatch_size)  # type: ignore[arg-type]
        except TypeError:
            size = 0
        if size > 0:
            return size
    raise ValueError(
        f"microbatch_size must be a positive integer or None, but got {microbatch_size!r}. "
        "None makes each batch one micro-batch."
    )


def count_examples(batch: Any) -> int:
    """Return the length of the first dimension that all tensors of the batch share."""
    first_name, size = "", -1
    for name, leaf in tensors_of(batch):
        if size < 0:
            first_name, size = name, leaf.shape[0]
        elif leaf.shape[0] != size:
            raise ValueError(
                f"All tensors of a batch must have the examples along their first dimension, but "
                f"{first_name} has {size} and {name} has {leaf.shape[0]}. "
                "Let loss_fn close over what does not belong to single examples."
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


def is_empty(batch: Any) -> bool:
    """Whether a batch has tensors, and no examples in them."""
    lengths = [len(leaf) for _, leaf in tensors_of(batch)]
    return bool(lengths) and not any(lengths)


def _select(batch: Any, positions: Sequence[int]) -> Any:
    """Return the batch with only these examples: views where they are neighbours, else copies."""
    start, stop = positions[0], positions[-1] + 1
    if list(positions) == list(range(start, stop)):
        return _map(lambda leaf: leaf[start:stop], batch)
    chosen = torch.tensor(positions)
    return _map(lambda leaf: leaf.index_select(0, chosen.to(leaf.device)), batch)


def copied(batch: Any) -> Any:
    """Return a batch whose tensors can be changed without harm."""
    return _map(torch.clone, batch)


def _by_domain(labels: list[Hashable] | None, size: int) -> list[tuple[Hashable, Sequence[int]]]:
    """Return each domain with the positions of its examples, domains in sorted order."""
    if labels is None:
        return [(None, range(size))]
    positions: dict[Hashable, list[int]] = {}
    for position, label in enumerate(labels):
        positions.setdefault(label, []).append(position)
    try:
        return sorted(positions.items(), key=operator.itemgetter(0))
    except TypeError as error:
        kinds = sorted({type(label).__name__ for label in positions})
        raise TypeError(
            f"domains must be labels that can be sorted, but they mix {' and '.join(kinds)}. "
            "Use strings or integers throughout."
        ) from error


def _as_list(labels: Tensor | Sequence[Hashable] | None, what: str, size: int) -> Any:
    """Return ids or domains as a list with one entry per example."""
    if labels is None:
        return None
    if isinstance(labels, str) or (isinstance(labels, Tensor) and labels.dim() != 1):
        shape = repr(labels) if isinstance(labels, str) else f"a tensor of shape {labels.shape}"
        raise ValueError(f"{what} must hold one label per example, but got {shape}.")
    found = labels.tolist() if isinstance(labels, Tensor) else list(labels)
    if len(found) != size:
        raise ValueError(
            f"{what} must hold one label per example: the batch has {size} examples, "
            f"but {what} has {len(found)}."
        )
    if any(isinstance(label, float) and math.isnan(label) for label in found):
        raise ValueError(f"{what} holds NaN, which is equal to nothing, not even to itself.")
    return found


def tensors_of(node: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that will be cut, with a name a user can find it by."""
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
            "into the batch and pack them inside loss_fn."
        )
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", child) for key, child in node.items()]
    if _is_dataclass(node):
        return [(f".{f.name}", getattr(node, f.name)) for f in dataclasses.fields(node)]
    if isinstance(node, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(node)]
    return []


def _map(function: Callable[[Tensor], Tensor], node: Any) -> Any:
    """Rebuild a nested container with its tensors replaced; it keeps its type."""
    if isinstance(node, Tensor):
        return function(node) if node.dim() > 0 else node
    if isinstance(node, Mapping):
        # a copy keeps what a BatchEncoding holds beside its data
        mapping = copy.copy(node) if isinstance(node, MutableMapping) else dict(node)
        mapping.update({key: _map(function, child) for key, child in node.items()})
        return mapping
    if _is_dataclass(node):
        rebuilt = copy.copy(node)
        for field in dataclasses.fields(node):
            # past __setattr__ and __post_init__: frozen classes and checks of whole batches
            object.__setattr__(rebuilt, field.name, _map(function, getattr(node, field.name)))
        return rebuilt
    if isinstance(node, list | tuple):
        children = [_map(function, child) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
    return node


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)
