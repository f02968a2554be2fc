"""What a use of a parameter can be asked, and uses whose gradients are written out.

A *use* is one place where a parameter took part in the forward pass, seen after the backward pass.
`Formed`: one gradient per micro-batch; for what is small, and for long rows. `Pieces` and `Joined`
are the same in several tensors, and many of them in one.
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


class Use(ABC):
    """The gradients of all micro-batches with respect to one parameter, in some form."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return that of the parameter."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the memory it holds on to."""

    @abstractmethod
    def squared_norms(self, groups: Groups) -> Tensor:
        """Return the squared norm of every micro-batch's gradient."""

    @abstractmethod
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        """Return total + sum_j share_j g_j, in place where there is a total."""

    @abstractmethod
    def form(self, groups: Groups) -> Tensor:
        """Return the gradients of all micro-batches, written out."""

    def of_one(self, groups: Groups, microbatch: int) -> Tensor:
        """Return the gradient of one micro-batch."""
        return self.form(groups)[microbatch]

    def touched(self, groups: Groups) -> Tensor:
        """Return, for every micro-batch, whether its gradient has an element that is not 0."""
        return self.form(groups).flatten(1).any(1)

    def written_out(self, groups: Groups) -> Use:
        """Return the same as gradients that are written out."""
        return Formed(self.form(groups))

    @abstractmethod
    def without(self, left_out: Shares) -> Use:
        """Blank what will be left out: a share of 0 would not do, since 0 x NaN is NaN."""

    def kept(self, groups: Groups) -> Use:
        """Return the same in the form that it is kept in."""
        return self


@dataclass(frozen=True)
class Formed(Use):
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
        lying = multitensor.as_it_lies(self.gradients)
        flat = multitensor.widened(multitensor.as_rows(lying))
        sum_ = (shares.as_(flat.dtype).of_microbatches @ flat).view(lying.shape[1:])
        sum_ = multitensor.put_back(sum_, self.gradients)
        return sum_.contiguous() if total is None else total.view_as(sum_).add_(sum_)

    @override
    def form(self, groups: Groups) -> Tensor:
        return self.gradients

    @override
    def without(self, left_out: Shares) -> Formed:
        mask = left_out.of_microbatches.view(-1, *(1,) * (self.gradients.dim() - 1))
        return Formed(self.gradients.masked_fill(mask, 0.0))


@dataclass(frozen=True)
class Pieces(Use):
    """The same in pieces, each small enough for memory that is used again."""

    parts: tuple[Formed, ...]

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
        for part, each in zip(self.parts, self._of(shares), strict=True):
            total = part.add_to(total, each)
        assert total is not None
        return total

    @override
    def form(self, groups: Groups) -> Tensor:
        return torch.cat([part.gradients for part in self.parts])

    @override
    def without(self, left_out: Shares) -> Pieces:
        shares = self._of(left_out)
        return Pieces(tuple(part.without(s) for part, s in zip(self.parts, shares, strict=True)))

    def _of(self, shares: Shares) -> list[Shares]:
        """Return the shares of each; by micro-batch is all that they ask for."""
        each = torch.split(shares.of_microbatches, [len(part.gradients) for part in self.parts])
        return [Shares(of_microbatches, shares.of_examples) for of_microbatches in each]


class Joined:
    """Many small written-out gradients side by side, as one: biases, scales and the like."""

    LARGEST = 2**13  # elements of a parameter

    def __init__(self, parts: dict[str, Formed]) -> None:
        self._shapes = {name: part.shape for name, part in parts.items()}
        self._all = Formed(torch.cat([_flat(part.gradients) for part in parts.values()], 1))

    @classmethod
    def takes(cls, use: Formed, device: torch.device) -> bool:
        """Whether a parameter's only use is small enough, and where the others are."""
        gradients = use.gradients
        small = gradients.numel() <= cls.LARGEST * gradients.shape[0]
        return small and not gradients.is_complex() and gradients.device == device

    def squared_norms(self, groups: Groups) -> Tensor:
        """Return those of all the gradients together."""
        return self._all.squared_norms(groups)

    def touched(self, groups: Groups) -> Tensor:
        """Return, for every micro-batch, whether any of its gradients is not 0."""
        return self._all.touched(groups)

    def of_one(self, microbatch: int) -> dict[str, Tensor]:
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


def room_for(groups: Groups, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory for one gradient per micro-batch, in a precision to add up in."""
    dtype = multitensor.accumulation_dtype(like)
    return torch.empty((len(groups), *shape), dtype=dtype, device=like.device)


def _flat(gradients: Tensor) -> Tensor:
    """Return one row per micro-batch."""
    return gradients if gradients.dim() == 2 else gradients.reshape(len(gradients), -1)
