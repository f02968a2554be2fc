"""Convolutions: products of a weight with the patches of its input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from microclip import multitensor
from microclip.engines.base import CannotFuseError
from microclip.engines.single_pass.formed import Formed, Use, room_for
from microclip.engines.single_pass.groups import Groups, Shares, singles, together
from microclip.engines.single_pass.owners import arranged, refuse_gradients_of_nobody
from microclip.engines.single_pass.plan import CALLS, Weight
from microclip.engines.single_pass.record import Handler, Recorder, apply
from microclip.engines.single_pass.uses import Rows

PATCHES_AT_ONCE = 2**23  # bytes of patches cut at a time, to be read again while they are at hand
PATCHES_KEPT = 2**22  # bytes of patches that are cut once and kept
PORTIONS = 4  # in which to do what makes copies, where memory is tight
WORTH_SAVING = 2**22  # bytes
GROUPING_PAYS = 256  # places of a micro-batch's windows
GROUPED_INPUTS = 64  # numbers that a window takes in
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
WRITING = 16  # the worth of a written number, in products: patches cost more than other rows do


@dataclass(frozen=True)
class Geometry:
    """How a convolution runs over its input."""

    shape: tuple[int, ...]  # of the weight
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    is_tight: bool = False  # memory goes before time

    @cached_property
    def inputs(self) -> int:
        """Return how many numbers a window takes in."""
        return math.prod(self.shape[1:])

    def nbytes_of_patches(self, d: Tensor) -> int:
        """Return the memory that patches take, given what comes back from all places."""
        return self.inputs * d.shape[0] * math.prod(d.shape[2:]) * d.element_size()

    def as_weight(self, x: Tensor, result: Tensor) -> Weight:
        """Return the weight that this convolution is to the rows of its patches."""
        rows, each = math.prod(result.shape[2:]), multitensor.accumulation_dtype(result).itemsize
        cut = self.nbytes_of_patches(result) if self.keeps_patches(result) else x.nbytes
        kept = cut + result.nbytes
        return Weight(rows, self.shape[0], self.inputs, each, kept, WRITING, CALLS)

    def keeps_patches(self, d: Tensor) -> bool:
        """Whether patches are few enough to be cut once and kept, given what comes back."""
        return not self.is_tight and self.nbytes_of_patches(d) <= PATCHES_KEPT

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution."""
        options = (self.stride, self.padding, self.dilation, False, self._none, self.groups)
        return torch.convolution(x, weight, bias, *options)

    def input_gradient(self, d: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return what goes on to the layer before; a kernel may make several copies of it."""

        def of(d: Tensor, x: Tensor) -> Tensor:
            return cast(Tensor, self._backward(d, x, weight, [True, False, False], self.groups)[0])

        if not self.is_tight or x.nbytes < WORTH_SAVING:
            return of(d, x)
        found = torch.empty_like(x)
        for out, *sides in zip(*(side.chunk(PORTIONS) for side in (found, d, x)), strict=True):
            out.copy_(of(*sides))
        return found

    def weight_gradient(self, d: Tensor, x: Tensor) -> Tensor:
        """Return the plain weight gradient."""
        weight = x.new_empty(()).expand(self.shape)
        found = self._backward(d, x, weight, [False, True, False], self.groups)[1]
        return cast(Tensor, found)

    def weight_gradients(self, d: Tensor, x: Tensor, microbatches: Groups) -> Tensor:
        """Return those of all micro-batches.

        Micro-batches of one size become groups of channels of one convolution, and its weight
        gradient holds theirs one after the other.
        """
        found = []
        portions = PORTIONS // 2 if self.is_tight else 1
        for block in microbatches:
            for part in zip(*(block.of(side).chunk(portions) for side in (d, x)), strict=True):
                found.append(self._grouped(*part))
        return together(found)

    def _grouped(self, d: Tensor, x: Tensor) -> Tensor:
        """Return the gradients of (micro-batches, examples, channels, ...)."""
        count = len(x)
        wide_x, wide_d = (side.transpose(0, 1).flatten(1, 2) for side in (x, d))
        weight = x.new_empty(()).expand(count * self.shape[0], *self.shape[1:])
        mask = [False, True, False]
        found = self._backward(wide_d, wide_x, weight, mask, self.groups * count)[1]
        return cast(Tensor, found).view(count, *self.shape)

    def patches(self, x: Tensor, by_place: bool) -> Tensor:
        """Return (micro-batches, rows, inputs) of (micro-batches, examples, channels, ...).

        A row is the window at one place. They lie one after the other if `by_place`, with the
        channels of each offset side by side; else all places lie side by side for each input.
        """
        dimensions = len(self.stride)
        channels = 2 + dimensions if by_place else 2
        x = x.movedim(2, channels) if by_place else x
        first = 2 if by_place else 3
        if any(self.padding):
            sides = [side for pad in reversed(self.padding) for side in (pad, pad)]
            x = F.pad(x, [0, 0, *sides] if by_place else sides)
        elif by_place:
            x = x.contiguous()
        for i in range(dimensions):
            reach = (self.shape[2 + i] - 1) * self.dilation[i] + 1
            x = x.unfold(first + i, reach, self.stride[i])
            x = x if self.dilation[i] == 1 else x[..., :: self.dilation[i]]
        places, offsets = range(first, first + dimensions), range(3 + dimensions, x.dim())
        if by_place:
            x = x.permute(0, 1, *places, *offsets, channels)
            return x.reshape(len(x), -1, self.inputs)
        x = x.permute(0, channels, *offsets, 1, *places)
        return x.reshape(len(x), self.inputs, -1).mT

    def is_better_by_place(self, d: Tensor) -> bool:
        """Whether more channels than places would lie side by side, given what comes back."""
        return self.shape[1] >= 2 * d.shape[-1]

    def weights(self, products: Tensor, by_place: bool) -> Tensor:
        """Return (..., outputs, inputs) as weights (..., *shape), whose order may be another."""
        if not by_place:
            return torch.unflatten(products, -1, self.shape[1:])
        offsets = self.shape[2:]
        found = torch.unflatten(products, -1, (*offsets, self.shape[1]))
        return found.movedim(-1, -1 - len(offsets))

    @cached_property
    def _none(self) -> tuple[int, ...]:
        return (0,) * len(self.stride)

    def _backward(self, d: Tensor, x: Tensor, weight: Tensor, mask: list[bool], groups: int) -> Any:
        options = (self.stride, self.padding, self.dilation, False, self._none, groups)
        return torch.ops.aten.convolution_backward(d, x, weight, None, *options, mask)


_geometry = lru_cache(maxsize=1024)(Geometry)  # the same at every step


@dataclass(frozen=True)
class Patches(Use):
    """A convolution's weight: rows, one for each place that its window took."""

    x: Tensor
    d: Tensor
    geometry: Geometry

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.geometry.shape

    @property
    @override
    def nbytes(self) -> int:
        return self.x.nbytes + self.d.nbytes

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return self._cut(groups).squared_norms(groups)

    @override
    def form(self, groups: Groups) -> Tensor:
        if self._is_better_grouped(groups):
            return self.geometry.weight_gradients(self.d, self.x, groups)
        return self._cut(groups).form(groups)

    @override
    def of_one(self, groups: Groups, microbatch: int) -> Tensor:
        here = groups.examples_of(microbatch)
        found = self.geometry.weight_gradient(self.d[here], self.x[here])
        return found.to(multitensor.accumulation_dtype(found))

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        each = shares.as_(self.d.dtype).of_examples.view(-1, *(1,) * (self.d.dim() - 1))
        found = self.geometry.weight_gradient(self.d * each, self.x)
        found = found.to(multitensor.accumulation_dtype(found))
        return found if total is None else total.add_(found)

    @override
    def without(self, left_out: Shares) -> Patches:
        each = left_out.of_examples.view(-1, *(1,) * (self.d.dim() - 1))
        return Patches(self.x.masked_fill(each, 0.0), self.d.masked_fill(each, 0.0), self.geometry)

    @override
    def kept(self, groups: Groups) -> Use:
        """Few patches are cut once, for norms and for the sum; else a convolution finds the sum."""
        if not self.geometry.keeps_patches(self.d):
            return self
        return self._cut(groups, to_keep=True)

    def _is_better_grouped(self, groups: Groups) -> bool:
        """Whether the library's own kernel is faster than patches: for many places, on a CPU.

        In half precision it would round what is to be added up.
        """
        rows = min(groups.sizes) * math.prod(self.d.shape[2:])
        fast = multitensor.on_host(self.d) and self.d.dtype == torch.float32
        return fast and rows >= GROUPING_PAYS and self.geometry.inputs >= GROUPED_INPUTS

    def _cut(self, groups: Groups, to_keep: bool = False) -> CutPatches:
        """Return the same with its patches cut, some at a time: they overlap, and take memory."""
        geometry = self.geometry
        by_place = geometry.is_better_by_place(self.d)
        inputs_first = geometry.inputs < self.shape[0]  # products are faster the wide way
        parts: Iterable[Part] = self._parts(groups, by_place, inputs_first)
        return CutPatches(tuple(parts) if to_keep else parts, geometry, by_place, inputs_first)

    def _parts(self, groups: Groups, by_place: bool, inputs_first: bool) -> Iterator[Part]:
        each = self.geometry.nbytes_of_patches(self.d) // groups.examples
        for block in groups:
            x, d = block.of(self.x), block.of(self.d)
            step = max(1, PATCHES_AT_ONCE // (each * block.size))
            for start in range(0, block.count, step):
                if step < block.count:
                    x, d = (block.of(side)[start : start + step] for side in (self.x, self.d))
                rows = Rows(self.geometry.patches(x, by_place), _by_channel(d).mT, inputs_first)
                yield Part(block.first_microbatch + start, singles(len(d)), rows)


def _by_channel(d: Tensor) -> Tensor:
    """Return (micro-batches, examples, channels, ...) as (micro-batches, channels, places)."""
    if d.shape[1] == 1:
        return d.flatten(3).squeeze(1)
    return d.flatten(3).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Part:
    """The rows of neighbouring micro-batches, each of them taken for one example."""

    first: int
    groups: Groups
    rows: Rows

    def of(self, values: Tensor) -> Tensor:
        """Return this part's share of (micro-batches, ...)."""
        if len(self.groups) == len(values):
            return values
        return values[self.first : self.first + len(self.groups)]


@dataclass(frozen=True)
class CutPatches(Use):
    """The same as rows. Parts that are cut as they are asked for can be asked for once."""

    parts: Iterable[Part]
    geometry: Geometry
    by_place: bool
    inputs_first: bool

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.geometry.shape

    @property
    @override
    def nbytes(self) -> int:
        return sum(part.rows.nbytes for part in self.parts)

    @override
    def squared_norms(self, groups: Groups) -> Tensor:
        return together([part.rows.squared_norms(part.groups) for part in self.parts])

    @override
    def form(self, groups: Groups) -> Tensor:
        out = None
        for part in self.parts:
            out = room_for(groups, part.rows.shape, part.rows.right) if out is None else out
            part.rows.form_into(part.groups, part.of(out))
        assert out is not None
        return self._weights(out)

    @override
    def of_one(self, groups: Groups, microbatch: int) -> Tensor:
        for part in self.parts:
            row = microbatch - part.first
            if 0 <= row < len(part.groups):
                return self._weights(part.rows.of_one(part.groups, row))
        raise IndexError(microbatch)

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        flat = None
        for part in self.parts:
            coefficients = part.of(shares.of_microbatches)
            flat = part.rows.add_to(flat, part.groups.shares(coefficients))
        assert flat is not None
        found = self._weights(flat)
        return found.contiguous() if total is None else total.add_(found)

    def _weights(self, products: Tensor) -> Tensor:
        """Return products of rows as weights."""
        return self.geometry.weights(products.mT if self.inputs_first else products, self.by_place)

    @override
    def without(self, left_out: Shares) -> CutPatches:
        parts = []
        for part in self.parts:
            shares = part.groups.shares(part.of(left_out.of_microbatches))
            parts.append(replace(part, rows=part.rows.without(shares)))
        return replace(self, parts=tuple(parts))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any
    ) -> Tensor:
        geometry, note = rest
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.note = geometry, note
        return cast(Tensor, geometry.forward(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.note(x, d)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = ctx.geometry.input_gradient(d, x, weight)
        return None, dx, None, None, None, None


def convolution(dimensions: int) -> Handler:
    """Return the handler of F.conv1d, F.conv2d or F.conv3d."""

    def many(value: Any) -> tuple[int, ...]:
        return (value,) * dimensions if isinstance(value, int) else tuple(value)

    def handler(
        recorder: Recorder,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        options = (stride, padding, dilation, groups)
        function = FUNCTIONS[dimensions]
        found = recorder.usual(input, weight, bias)
        if found is None and not recorder.is_recorded(input):
            input = recorder.adopt(input)
        if found is None and (recorder.any_depends([weight]) or not recorder.depends(input)):
            if recorder.any_depends([input, weight, bias]):
                raise CannotFuseError(
                    "The single-pass engine cannot take apart a convolution whose weight depends "
                    f"on the examples, beside parameter {recorder.first_name([input, bias])!r}."
                )
            return cast(Tensor, recorder.derive(function, (input, weight, bias, *options), {}))
        w, b = recorder.name(weight), recorder.name(bias)
        if isinstance(padding, str):
            input, padding = _padded(input, weight, padding, many(dilation))
        state = found or recorder.owned(input, w or b)
        if input.dim() != dimensions + 2 or state.axis != 0:
            raise CannotFuseError(
                f"Convolution {w or b!r} gets a tensor of shape {tuple(input.shape)} that does not "
                "have the examples along its first dimension."
            )
        recorder.expect(w, b)
        geometry = _geometry(
            tuple(weight.shape), many(stride), many(padding), many(dilation), groups,
            recorder.is_tight,
        )  # fmt: skip
        owners = state.owners
        plain = owners.base is None and owners.outer == owners.inner == 1

        def images(tensor: Tensor) -> Tensor:
            """Return the images of each example after each other."""
            return tensor if plain else arranged(tensor, 0, owners).flatten(0, 1)

        def note(x: Tensor, d: Tensor) -> None:
            refuse_gradients_of_nobody(d, 0, owners, w or b)
            x, d = images(x), images(d)
            each = len(d) // recorder.groups.examples
            microbatches = recorder.groups if each == 1 else recorder.groups.times(each)
            if b is not None:
                recorder.on_use(b, Formed(microbatches.sum(d.flatten(2).sum(2))))
            if w is not None and groups == 1 and each == 1:
                recorder.on_use(w, Patches(x, d, geometry))
            elif w is not None:
                recorder.on_use(w, Formed(geometry.weight_gradients(d, x, microbatches)))

        with recorder.untracked():
            held = None if bias is None else bias.detach()
            kept_out = weight.detach()
            if recorder.can_tap(input) and not recorder.is_tight:
                result = recorder.tap(geometry.forward(input, kept_out, held), note, input)
            else:
                noted = recorder.noted(note)
                result = apply(
                    _Convolution, recorder.anchor, input, kept_out, held, geometry, noted
                )
        if w is not None and groups == 1 and plain:
            recorder.weights[w] = geometry.as_weight(input, result)
        return recorder.own(result, state)

    return handler


def _padded(
    input: Tensor, weight: Tensor, padding: str, dilations: tuple[int, ...]
) -> tuple[Tensor, Any]:
    """Return an input, and a padding in numbers: what is uneven is added beforehand."""
    spans = [(k - 1) * d for k, d in zip(weight.shape[2:], dilations, strict=True)]
    if padding != "same":
        return input, [0] * len(spans)
    if any(span % 2 for span in spans):
        sides = [side for span in reversed(spans) for side in (span // 2, span - span // 2)]
        return F.pad(input, sides), [0] * len(spans)
    return input, [span // 2 for span in spans]
