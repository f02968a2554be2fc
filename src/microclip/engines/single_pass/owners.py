"""Which example owns each index along an axis of a tensor.

Usually the examples follow one another along the axis, k indices each: owner = index // k. In a
flattened time-first tensor they are interleaved: owner = (index // inner) % B. Sorting, masking and
routing leave no such order, and the owners are a vector of example numbers, in which NO_OWNER marks
rows that hold constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from microclip.engines.base import CannotFuseError

NO_OWNER = -1
FEW = 2**16  # numbers that are copied from an accelerator sooner than reduced there


class Owners:
    """The owners of `outer` x (a base of examples) x `inner` indices along an axis.

    Args:
        examples: The number of examples.
        outer: How often the base is repeated, as a whole.
        inner: How often each of its entries is repeated.
        base: Example numbers; None: all the examples, in order.
    """

    __slots__ = ("__dict__", "base", "examples", "inner", "outer")
    # how often constant rows were assumed to belong to the examples expected there: harmless, since
    # whatever meets them has to agree, but still a guess
    guesses = 0

    def __init__(
        self, examples: int, outer: int = 1, inner: int = 1, base: Tensor | None = None
    ) -> None:
        self.examples = examples
        self.outer = outer
        self.inner = inner
        self.base = base

    @classmethod
    def of(cls, vector: Tensor, examples: int) -> Owners:
        """Return owners given one by one, in the simplest equivalent form."""
        vector = vector.cpu()  # once: several values of it are about to be read
        count = vector.shape[0]
        if count and count % examples == 0:
            times = count // examples
            for regular in (cls(examples, 1, times), cls(examples, times, 1)):
                expected = regular.vector(vector.device)
                if torch.equal(vector, expected):
                    return regular
                if bool(((vector == expected) | (vector == NO_OWNER)).all()):
                    cls.guesses += 1
                    return regular
        return cls(examples, base=vector)

    @property
    def is_regular(self) -> bool:
        """Whether every example owns equally many indices, in an order known beforehand."""
        return self.base is None

    def __len__(self) -> int:
        return self.outer * self.base_length * self.inner

    def __repr__(self) -> str:
        base = f"{self.examples} examples" if self.base is None else self.base.tolist()
        return f"Owners({self.outer} x {base} x {self.inner})"

    @property
    def base_length(self) -> int:
        """Return the number of entries that are repeated."""
        return self.examples if self.base is None else self.base.shape[0]

    def vector(self, device: torch.device | None = None) -> Tensor:
        """Return the owners one by one."""
        base = torch.arange(self.examples, device=device) if self.base is None else self.base
        if device is not None and base.device != device:
            base = base.to(device)
        if self.inner > 1:
            base = base.repeat_interleave(self.inner)
        return base.repeat(self.outer) if self.outer > 1 else base

    def widened(self, outer: int, inner: int) -> Owners:
        """Return the owners of an axis that this one is merged into."""
        if outer == inner == 1:
            return self
        return Owners(self.examples, self.outer * outer, self.inner * inner, self.base)

    def joined(self, other: Owners) -> Owners | None:
        """Return the owners of a result of both, index by index; None if they differ."""
        if self is other:
            return self
        if self.base is None and other.base is None:
            return self if (self.outer, self.inner) == (other.outer, other.inner) else None
        one = self.vector()
        two = other.vector(one.device)
        agree = (one == two) | (one == NO_OWNER) | (two == NO_OWNER)
        if not bool(agree.all()):
            return None
        if self.base is None or other.base is None:
            return self if self.base is None else other
        return Owners.of(torch.where(one == NO_OWNER, two, one), self.examples)

    def taken(self, index: Tensor) -> Owners:
        """Return the owners of chosen indices."""
        return Owners.of(self.vector(index.device)[index], self.examples)

    def sliced(self, start: int, stop: int, step: int = 1) -> Owners:
        """Return the owners of a range of indices."""
        if start == 0 and stop >= len(self) and step == 1:
            return self
        return Owners.of(self.vector()[start:stop:step], self.examples)

    @property
    def only(self) -> int | None:
        """Return the example that owns everything, if there is just one."""
        if self.base is None:
            return 0 if self.examples == 1 else None
        if self.base.shape[0] == 0:
            return None
        first = int(self.base[0])
        return first if bool((self.base == first).all()) else None

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return how to bring rows of an irregular order into a regular one.

        (examples, most rows of any example) indices, which of them are real, and the rows that no
        example owns.
        """
        vector = self.vector()
        if not len(vector):
            nothing = torch.zeros(self.examples, 1, dtype=torch.long, device=vector.device)
            return nothing, nothing.bool(), None
        order = vector.argsort(stable=True)
        counts = torch.bincount(vector + 1, minlength=self.examples + 1)
        unowned, counts = int(counts[0]), counts[1:]
        most = max(1, int(counts.max()))
        starts = counts.cumsum(0) - counts + unowned
        places = torch.arange(most, device=vector.device)
        real = places < counts.unsqueeze(1)
        index = (starts.unsqueeze(1) + places).clamp(max=len(vector) - 1)
        return order[index], real, order[:unowned] if unowned else None


def arranged(tensor: Tensor, axis: int | None, owners: Owners) -> Tensor:
    """Return a tensor with its examples along the first axis: (examples, n, ...other axes).

    Where examples own different numbers of rows, the missing ones are zeros.
    """
    if owners.base is None:
        if axis == 0 and owners.outer == 1:
            return tensor.reshape(owners.examples, owners.inner, *tensor.shape[1:])
        assert axis is not None
        split = torch.unflatten(tensor, axis, (owners.outer, owners.examples, owners.inner))
        moved = split.movedim((axis + 1, axis, axis + 2), (0, 1, 2))
        return moved.reshape(owners.examples, owners.outer * owners.inner, *moved.shape[3:])
    rows = tensor.unsqueeze(0) if axis is None else tensor.movedim(axis, 0)
    index, real, _ = owners.padded
    index, real = index.to(rows.device), real.to(rows.device)
    if not len(rows):
        return rows.new_zeros((*index.shape, *rows.shape[1:]))
    return torch.where(real.view(*real.shape, *(1,) * (rows.dim() - 1)), rows[index], 0)


def refuse_unowned_gradients(d: Tensor, axis: int | None, owners: Owners, name: str | None) -> None:
    """Make sure that no loss depends on rows that belong to no example."""
    if owners.base is None:
        return
    unowned = owners.padded[2]
    if unowned is None:
        return
    rows = d.unsqueeze(0) if axis is None else d.movedim(axis, 0)
    if bool(rows[unowned.to(rows.device)].any()):
        raise CannotFuseError(
            f"Parameter {name!r} meets rows that belong to no example, but the losses depend on "
            "them."
        )


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor that depends on the examples: each index along the axis on its owner only.

    Without an axis, all of it belongs to a single example.
    """

    axis: int | None
    owners: Owners

    @property
    def example(self) -> int | None:
        """Return the example that owns all of it, if there is just one."""
        return self.owners.only

    @property
    def alone(self) -> Owned:
        """Return the same without an axis, if all of it belongs to one example."""
        example = self.owners.only
        if self.axis is None or example is None or example == NO_OWNER:
            return self
        return Owned(None, Owners(self.owners.examples, base=self.owners.vector()[:1]))

    def at(self, axis: int | None) -> Owned:
        """Return the same owners along another axis."""
        return self if axis == self.axis else Owned(axis, self.owners)

    def elements(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the owner of every element, as a view if possible."""
        vector = self.owners.vector(device)
        if self.axis is None:
            return vector[0].expand(tuple(shape))
        return vector.view([-1 if i == self.axis else 1 for i in range(len(shape))]).expand(
            tuple(shape)
        )


@dataclass(frozen=True, slots=True)
class Opaque:
    """A tensor that depends on the examples in an unknown way, or on several at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that depends on parameters and on no example."""


DERIVED = Derived()
State = Owned | Opaque | Derived


def from_elements(owners: Tensor, examples: int) -> Owned | Literal[False] | None:
    """Find the axis along which the owner of a tensor's elements changes.

    Returns:
        None if no element has an owner, False if there is no such axis.
    """
    if owners.dim() == 0:
        return (
            None if int(owners) == NO_OWNER else Owned(None, Owners(examples, base=owners.view(1)))
        )
    if not owners.numel():
        nothing = torch.zeros(0, dtype=torch.long, device=owners.device)
        return Owned(list(owners.shape).index(0), Owners(examples, base=nothing))
    if owners.numel() <= FEW:
        owners = owners.cpu()  # one read, and not one for every axis
    largest = owners.max()
    if int(largest) == NO_OWNER:
        return None
    if bool(((owners == largest) | (owners == NO_OWNER)).all()):
        return Owned(None, Owners(examples, base=largest.view(1)))
    for axis in range(owners.dim()):
        others = [i for i in range(owners.dim()) if i != axis]
        vector = owners.amax(others, keepdim=True) if others else owners
        if bool(((owners == vector) | (owners == NO_OWNER)).all()):
            return Owned(axis, Owners.of(vector.flatten(), examples))
    return False
