"""Cutting a batch into micro-batches: domains, ragged ends, weights of examples.

Knows nothing of models, gradients or rules. Slices are contiguous and in order; nothing is
shuffled. Tensors are cut along `batch_dim`, by default their first dimension, and so are lists with
one string per example; everything else is passed on whole. What a batch is made of: `batches`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor

from microclip.batches import (
    are_equal,
    copied,
    count_examples,
    map_tensors,
    numbers_in,
    select,
    tensors_of,
    versions_of,
)

Domains = Tensor | Sequence[Hashable]
Ids = Tensor | Sequence[Hashable]


class ExampleWeights:
    """The weights of a batch's examples, by their position in the batch.

    Args:
        values: The weights, on the host; None if they are taken from losses.
        from_losses: Returns weights for positions and their losses, on the host, if weights are
            not known beforehand.
        are_required: Whether the examples must be weighted one by one, so that a mean loss over
            several of them will not do.
    """

    def __init__(
        self,
        values: Tensor | None,
        count: int,
        from_losses: Callable[[list[int], Tensor], Tensor] | None = None,
        are_required: bool = False,
    ) -> None:
        self.values = torch.ones(count, dtype=torch.float64) if values is None else values.double()
        self.are_required = are_required
        self.leaves_losses = False  # whether losses stay as they are, and only sizes are weighted
        self._from_losses = from_losses
        # factors of the losses, such as lengths; rules see losses without them
        self.scales = torch.ones(count, dtype=torch.float64)

    def multipliers(self, positions: Sequence[Sequence[int]], losses: Tensor) -> Tensor | None:
        """Return factors for losses, so that each micro-batch's mean loss becomes a weighted mean.

        Args:
            positions: The examples of each micro-batch; all of them make up `losses`.
            losses: One loss per example, or per micro-batch.
        """
        if self._from_losses is not None:
            rows, shown = list(chain.from_iterable(positions)), losses.detach().cpu()
            if len(losses) == len(rows):
                shown = shown / self.scales[rows].to(shown.dtype)
            else:
                shown = shown.repeat_interleave(torch.tensor([*map(len, positions)]))
            self.values[rows] = self._from_losses(rows, shown).double()
        if self.leaves_losses:
            return None
        factors = []
        for each in positions:
            weights = self.values[list(each)]
            factors.append(weights * (len(each) / weights.sum().clamp(min=1e-300)))
        return torch.cat(factors).to(losses.device, losses.dtype)

    def total(self, positions: Sequence[int]) -> float:
        """Return the sum of the weights of some examples."""
        return float(self.values[list(positions)].sum())


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A few examples of one domain."""

    source: Any  # the batch that they are cut from
    positions: Sequence[int]
    domain: Hashable  # None when no domains were given
    ids: tuple[Hashable, ...]  # positions in the mini-batch when no ids were given
    batch_dim: int = 0
    weights: ExampleWeights | None = None  # None: all examples count the same

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.positions)

    @property
    def effective_size(self) -> float:
        """The sum of the weights of its examples."""
        return self.size if self.weights is None else self.weights.total(self.positions)

    def mean(self, losses: Tensor) -> Tensor:
        """Return the mean of one loss per example, weighted if examples are."""
        if self.weights is None:
            return losses.mean()
        factors = self.weights.multipliers([self.positions], losses)
        return losses.mean() if factors is None else (losses * factors).mean()

    @property
    def batch(self) -> Any:
        """The examples, in a container like the batch's, cut again on every access.

        So a loss function may modify its container, as that of transformers' Trainer does.
        """
        return select(self.source, self.positions, self.batch_dim)


class MicrobatchList(Sequence[Microbatch]):
    """The micro-batches of a batch, each cut when it is accessed.

    Args:
        batch: The batch.
        positions: The positions of the examples in it, for each micro-batch.
        domains: The domain of each micro-batch.
        ids: The ids of the examples, for each micro-batch.
        spare: A copy of the batch, in case it is written to.
        batch_dim: The dimension that the examples lie along.
        weights: The weights of the examples, if they differ.
    """

    def __init__(
        self,
        batch: Any,
        positions: list[Sequence[int]],
        domains: list[Hashable],
        ids: list[tuple[Hashable, ...]],
        spare: Any = None,
        batch_dim: int = 0,
        weights: ExampleWeights | None = None,
    ) -> None:
        self.sizes = [len(each) for each in positions]
        self.weights = weights
        self.domains = domains
        self.ids = ids
        self.batch_dim = batch_dim
        self._batch = batch
        self._positions = positions
        self._spare = spare
        self._versions = versions_of(batch)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...

    @overload
    def __getitem__(self, index: slice) -> MicrobatchList: ...

    def __getitem__(self, index: int | slice) -> Microbatch | MicrobatchList:
        batch, positions, domains, ids = self._batch, self._positions, self.domains, self.ids
        if isinstance(index, slice):
            more = self._spare, self.batch_dim, self.weights
            return MicrobatchList(batch, positions[index], domains[index], ids[index], *more)
        cut_at = positions[index], domains[index], ids[index]
        return Microbatch(batch, *cut_at, self.batch_dim, self.weights)

    @property
    def effective_sizes(self) -> list[float]:
        """For each micro-batch, the sum of its examples' weights."""
        if self.weights is None:
            return [*map(float, self.sizes)]
        return [self.weights.total(each) for each in self._positions]

    def multipliers(self, losses: Tensor) -> Tensor | None:
        """Return factors for one loss per example, micro-batch after micro-batch; None: all 1."""
        return None if self.weights is None else self.weights.multipliers(self._positions, losses)

    @property
    def order(self) -> list[int]:
        """The positions of the examples in the batch, micro-batch after micro-batch."""
        return list(chain.from_iterable(self._positions))

    def chosen(self, rows: Sequence[int]) -> MicrobatchList:
        """Return the micro-batches of these rows, in this order."""
        return MicrobatchList(
            self._batch,
            [self._positions[row] for row in rows],
            [self.domains[row] for row in rows],
            [self.ids[row] for row in rows],
            self._spare,
            self.batch_dim,
            self.weights,
        )

    def with_weights(self, weights: ExampleWeights) -> MicrobatchList:
        """Return the same micro-batches, with weights for their examples."""
        more = self._spare, self.batch_dim, weights
        return MicrobatchList(self._batch, self._positions, self.domains, self.ids, *more)

    def keep_copy(self) -> MicrobatchList:
        """Return the same micro-batches, with a spare copy of the batch."""
        return self._over(self._batch, copied(self._batch))

    @property
    def as_it_is(self) -> MicrobatchList:
        """The same micro-batches, tracking writes to the batch from now on."""
        return self._over(self._batch, None)

    @property
    def pristine(self) -> MicrobatchList:
        """The same micro-batches, cut from the spare copy if there is one: without later writes."""
        return self if self._spare is None else self._over(self._spare, None)

    @property
    def were_edited(self) -> bool:
        """Whether the batch, or its copy, has been written to since it was cut.

        Writes through `.data` or numpy are only found by comparison with a copy.
        """
        if versions_of(self._batch) != self._versions:
            return True
        if self._spare is None:
            return False
        pairs = zip(tensors_of(self._batch), tensors_of(self._spare), strict=True)
        return not all(are_equal(one, other) for (_, one), (_, other) in pairs)

    @property
    def can_be_repeated(self) -> bool:
        """Whether the original batch is still available."""
        return self._spare is not None or not self.were_edited

    @torch.no_grad()
    def reverted(self) -> MicrobatchList:
        """Return the same micro-batches after undoing writes to the batch, from the copy."""
        if self.were_edited:
            for (_, leaf), (_, copy) in zip(
                tensors_of(self._batch), tensors_of(self._spare), strict=True
            ):
                leaf.copy_(copy)
        return self.as_it_is

    def _over(self, batch: Any, spare: Any) -> MicrobatchList:
        more = spare, self.batch_dim, self.weights
        return MicrobatchList(batch, self._positions, self.domains, self.ids, *more)

    @cached_property
    def examples(self) -> int:
        """The number of examples in all micro-batches."""
        return sum(self.sizes)

    @property
    def numbers_per_example(self) -> list[tuple[str, int]]:
        """Lists and arrays with one number per example, by name: they are passed on whole."""
        count = count_examples(self._batch, self.batch_dim)
        return list(numbers_in(self._batch, count, "batch"))

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The tensors of the batch."""
        return [leaf for _, leaf in tensors_of(self._batch)]

    @property
    def whole(self) -> Any:
        """All examples, micro-batch after micro-batch, in a new container."""
        positions = self.order
        if positions == list(range(count_examples(self._batch, self.batch_dim))):
            return map_tensors(lambda leaf: leaf, self._batch)
        return select(self._batch, positions, self.batch_dim)


def cut(
    batch: Any,
    microbatch_size: int | None,
    *,
    domains: Domains | None = None,
    ids: Ids | None = None,
    first_position: int = 0,
    batch_dim: int = 0,
) -> MicrobatchList:
    """Cut a batch into micro-batches of `microbatch_size` examples (None: the whole batch).

    With `domains`, the examples are first sorted by domain (a stable sort), so that no micro-batch
    mixes two; the last micro-batch of each domain may be smaller.

    >>> [m.size for m in cut(torch.zeros(10, 3), 4)]
    [4, 4, 2]
    >>> [(m.domain, m.ids) for m in cut(torch.zeros(4), 2, domains=["de", "en", "de", "de"])]
    [('de', (0, 2)), ('de', (3,)), ('en', (1,))]
    """
    size = count_examples(batch, batch_dim)
    names = _as_list(ids, "ids", size) or list(range(first_position, first_position + size))
    labels = _as_list(domains, "domains", size)
    positions: list[Sequence[int]] = []
    owners: list[Hashable] = []
    for domain, found in _by_domain(labels, size):
        step = len(found) if microbatch_size is None else microbatch_size
        pieces = [found[start : start + step] for start in range(0, len(found), step)]
        positions += pieces
        owners += [domain] * len(pieces)
    labels_of = [tuple([names[i] for i in each]) for each in positions]
    return MicrobatchList(batch, positions, owners, labels_of, batch_dim=batch_dim)


def check_size(microbatch_size: object) -> int | None:
    """Return a valid micro-batch size as an int or None, or raise."""
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


def check_batch_dim(batch_dim: object) -> int:
    """Return a valid dimension, or raise."""
    if isinstance(batch_dim, int) and not isinstance(batch_dim, bool) and batch_dim >= 0:
        return batch_dim
    raise ValueError(
        f"batch_dim must be 0 or a positive integer, the dimension that the examples lie along, "
        f"but got {batch_dim!r}. It is 1 for tensors of shape (time, examples, ...)."
    )


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
    if isinstance(labels, Tensor) and labels.dim() != 1:
        raise ValueError(
            f"{what} must hold one label per example, but got a tensor of shape {labels.shape}."
        )
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        raise ValueError(f"{what} must hold one label per example, but got {labels!r}.")
    found = labels.tolist() if isinstance(labels, Tensor) else list(labels)
    found = [label.item() if isinstance(label, Tensor) else label for label in found]
    if len(found) != size:
        raise ValueError(
            f"{what} must hold one label per example: the batch has {size} examples, "
            f"but {what} has {len(found)}."
        )
    if any(isinstance(label, float) and math.isnan(label) for label in found):
        raise ValueError(f"{what} contains NaN, which is not equal to anything, not even itself.")
    return found
