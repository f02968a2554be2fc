"""What one use of a parameter contributes to its gradient, and contributions that are materialized.

A *contribution* belongs to one place where the forward pass used a parameter. It is known after the
backward pass. `Materialized` holds one gradient per micro-batch: for small parameters, and where
examples have many rows. `MaterializedParts` splits that over several tensors, and `SmallParameters`
puts many parameters into one. Contributions of weights that multiply rows are in `rows`, those of
convolutions in `convolution`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from microclip import multitensor
from microclip.engines.single_pass.groups import Groups, Shares


class Contribution(ABC):
    """The gradients of all micro-batches with respect to one parameter, in some representation."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the parameter's shape."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the memory it holds."""

    @abstractmethod
    def squared_norms(self, groups: Groups) -> Tensor:
        """Return the squared norm of every micro-batch's gradient."""

    @abstractmethod
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        """Return total + sum_j share_j g_j, in place if there is a total."""

    @abstractmethod
    def materialize(self, groups: Groups) -> Tensor:
        """Return the gradients of all micro-batches: (micro-batches, *shape)."""

    def gradient_of(self, groups: Groups, microbatch: int) -> Tensor:
        """Return the gradient of one micro-batch."""
        return self.materialize(groups)[microbatch]

    def nonzero(self, groups: Groups) -> Tensor:
        """Return, for every micro-batch, whether its gradient has a nonzero element."""
        return self.materialize(groups).flatten(1).any(1)

    def materialized(self, groups: Groups) -> Contribution:
        """Return the same contribution with materialized gradients."""
        return Materialized(self.materialize(groups))

    @abstractmethod
    def without(self, left_out: Shares) -> Contribution:
        """Blank what is left out: a share of 0 would not do, since 0 x NaN is NaN."""

    def kept(self, groups: Groups) -> Contribution:
        """Return the same contribution in the representation to keep until the sum is taken."""
        return self

    def columns(
        self, groups: Groups, start: int, stop: int, table_rows: Tensor | None = None
    ) -> Tensor:
        """Return (micro-batches, elements) of rows `start` to `stop` of the parameter.

        Complex numbers count as pairs of real ones. If `table_rows` is given, rows are numbered
        within it: only those rows of an embedding table are looked at.
        """
        gradients = self.materialize(groups)
        if gradients.is_complex():
            gradients = torch.view_as_real(gradients)
        rows = gradients if self.shape else gradients.unsqueeze(1)
        return multitensor.widened(rows[:, start:stop].flatten(1))


@dataclass(frozen=True)
class Materialized(Contribution):
    """The gradients of all micro-batches: (micro-batches, *shape of the parameter)."""

    gradients: Tensor

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.gradients.shape[1:]

    @property
    @override
    def nbytes(self) -> int:
        return self.gradients.nbytes

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return multitensor.squared_norms(self.gradients)

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        lying = multitensor.in_memory_order(self.gradients)
        flat = multitensor.widened(multitensor.as_rows(lying))
        sum_ = (shares.as_(flat.dtype).of_microbatches @ flat).view(lying.shape[1:])
        sum_ = multitensor.from_memory_order(sum_, self.gradients)
        return sum_.contiguous() if total is None else total.view_as(sum_).add_(sum_)

    @override
    def materialize(self, groups: Groups) -> Tensor:
        return self.gradients

    @override
    def without(self, left_out: Shares) -> Materialized:
        mask = left_out.of_microbatches.view(-1, *(1,) * (self.gradients.dim() - 1))
        return Materialized(self.gradients.masked_fill(mask, 0.0))


@dataclass(frozen=True)
class MaterializedParts(Contribution):
    """Materialized gradients in several tensors, each small enough for the allocator to reuse."""

    parts: tuple[Materialized, ...]

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    @override
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return torch.cat([part.squared_norms(groups) for part in self.parts])

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        for part, each in zip(self.parts, self._split(shares), strict=True):
            total = part.add_to(total, each)
        assert total is not None
        return total

    @override
    def materialize(self, groups: Groups) -> Tensor:
        return torch.cat([part.gradients for part in self.parts])

    @override
    def without(self, left_out: Shares) -> MaterializedParts:
        pairs = zip(self.parts, self._split(left_out), strict=True)
        return MaterializedParts(tuple(part.without(each) for part, each in pairs))

    def _split(self, shares: Shares) -> list[Shares]:
        """Return each part's shares; the parts only look at those of micro-batches."""
        each = torch.split(shares.of_microbatches, [len(part.gradients) for part in self.parts])
        return [Shares(of_microbatches, shares.of_examples) for of_microbatches in each]


class SmallParameters:
    """Materialized gradients of many small parameters in one tensor: biases, scales, ..."""

    LARGEST = 2**13  # elements of a parameter

    def __init__(self, parts: dict[str, Materialized]) -> None:
        self._shapes = {name: part.shape for name, part in parts.items()}
        self._all = Materialized(torch.cat([_flat(part.gradients) for part in parts.values()], 1))

    @classmethod
    def takes(cls, contribution: Materialized, device: torch.device) -> bool:
        """Whether a parameter's only contribution is small enough and on the right device."""
        gradients = contribution.gradients
        small = gradients.numel() <= cls.LARGEST * gradients.shape[0]
        return small and not gradients.is_complex() and gradients.device == device

    def squared_norms(self, groups: Groups) -> Tensor:
        """Return the squared norms over all these parameters."""
        return self._all.squared_norms(groups)

    def nonzero(self, groups: Groups) -> Tensor:
        """Return, for every micro-batch, whether any of its gradients is nonzero."""
        return self._all.nonzero(groups)

    def gradients_of(self, microbatch: int) -> dict[str, Tensor]:
        """Return the gradients of one micro-batch."""
        row = self._all.gradients[microbatch]
        parts = torch.split(row, [math.prod(shape) for shape in self._shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def leave_out(self, left_out: Shares) -> None:
        """Blank micro-batches."""
        self._all = self._all.without(left_out)

    def add_to(self, totals: dict[str, Tensor], shares: Shares) -> None:
        """Add sum_j share_j g_j to the totals."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts: Any = torch.split_with_sizes_copy(self._all.add_to(None, shares), sizes)  # type: ignore[func-returns-value]
        for (name, shape), part in zip(self._shapes.items(), parts, strict=True):
            if len(shape) != 1:
                part = part.view(shape)
            totals[name] = totals[name].add_(part) if name in totals else part


def empty_gradients(groups: Groups, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory for one gradient per micro-batch, in a precision to add up in."""
    dtype = multitensor.accumulation_dtype(like)
    return torch.empty((len(groups), *shape), dtype=dtype, device=like.device)


def _flat(gradients: Tensor) -> Tensor:
    """Return one row per micro-batch."""
    return gradients if gradients.dim() == 2 else gradients.reshape(len(gradients), -1)
