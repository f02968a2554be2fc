"""Convolutions: products of a weight with the patches of its input.

`Patches` is the contribution of a convolution's weight, `CutPatches` the same with its patches cut.
"""

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
from microclip.engines.single_pass.contributions import (
    Contribution,
    Groups,
    Materialized,
    Shares,
    empty_gradients,
    singles,
    together,
)
from microclip.engines.single_pass.memory import CALLS, Weight
from microclip.engines.single_pass.owners import arranged, refuse_unowned_gradients
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.rows import Rows
from microclip.engines.single_pass.torch_functions import Handler, apply

PATCHES_AT_ONCE = 2**23  # bytes of patches cut at a time, so that they are read from the cache
PATCHES_KEPT = 2**22  # bytes of patches that are cut once and kept
PORTIONS = 4  # for operations that make copies, where memory is tight
WORTH_SAVING = 2**22  # bytes
GROUPING_PAYS = 256  # window positions of a micro-batch
GROUPED_INPUTS = 64  # numbers in a window
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
WRITING = 16  # the cost of a materialized number, in products: patches cost more than other rows


@dataclass(frozen=True)
class Geometry:
    """How a convolution runs over its input."""

    shape: tuple[int, ...]  # of the weight
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    is_tight: bool = False  # saving memory comes before saving time

    @cached_property
    def inputs(self) -> int:
        """Return how many numbers a window has."""
        return math.prod(self.shape[1:])

    def nbytes_of_patches(self, d: Tensor) -> int:
        """Return the memory that patches take, given the output's gradient."""
        return self.inputs * d.shape[0] * math.prod(d.shape[2:]) * d.element_size()

    def as_weight(self, x: Tensor, result: Tensor) -> Weight:
        """Describe this convolution as a weight that multiplies the rows of its patches."""
        rows, each = math.prod(result.shape[2:]), multitensor.accumulation_dtype(result).itemsize
        cut = self.nbytes_of_patches(result) if self.keeps_patches(result) else x.nbytes
        kept = cut + result.nbytes
        return Weight(rows, self.shape[0], self.inputs, each, kept, WRITING, CALLS)

    def keeps_patches(self, d: Tensor) -> bool:
        """Whether patches are few enough to be cut once and kept, given the output's gradient."""
        return not self.is_tight and self.nbytes_of_patches(d) <= PATCHES_KEPT

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution."""
        options = (self.stride, self.padding, self.dilation, False, self._none, self.groups)
        return torch.convolution(x, weight, bias, *options)

    def input_gradient(self, d: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the input's gradient; a kernel may make several copies of it."""

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
        """Return the weight gradients of all micro-batches.

        Micro-batches of the same size become channel groups of one convolution, whose weight
        gradient is theirs, concatenated.
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

        A row is the window at one position. If `by_place`, rows are contiguous, with the channels
        of each offset side by side; else each input's positions are contiguous.
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
        """Whether channels make longer contiguous runs than positions."""
        return self.shape[1] >= 2 * d.shape[-1]

    def weights(self, products: Tensor, by_place: bool) -> Tensor:
        """Return (..., outputs, inputs) as weights (..., *shape), possibly in another order."""
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
class Patches(Contribution):
    """A convolution's weight: one row for each position of its window."""

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
    def materialize(self, groups: Groups) -> Tensor:
        if self._is_better_grouped(groups):
            return self.geometry.weight_gradients(self.d, self.x, groups)
        return self._cut(groups).materialize(groups)

    @override
    def gradient_of(self, groups: Groups, microbatch: int) -> Tensor:
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
    def columns(
        self, groups: Groups, start: int, stop: int, table_rows: Tensor | None = None
    ) -> Tensor:
        geometry = replace(self.geometry, shape=(stop - start, *self.shape[1:]))
        part = Patches(self.x, self.d[:, start:stop], geometry)
        return multitensor.widened(part.materialize(groups).flatten(1))

    @override
    def kept(self, groups: Groups) -> Contribution:
        """Cut few patches once, for norms and sum; for many, a convolution finds the sum."""
        if not self.geometry.keeps_patches(self.d):
            return self
        return self._cut(groups, to_keep=True)

    def _is_better_grouped(self, groups: Groups) -> bool:
        """Whether torch's kernel is faster than patches: for many positions, on a CPU.

        In half precision it would round what is still to be added up.
        """
        rows = min(groups.sizes) * math.prod(self.d.shape[2:])
        fast = multitensor.on_host(self.d) and self.d.dtype == torch.float32
        return fast and rows >= GROUPING_PAYS and self.geometry.inputs >= GROUPED_INPUTS

    def _cut(self, groups: Groups, to_keep: bool = False) -> CutPatches:
        """Cut the patches, some at a time: they overlap, and take more memory than the input."""
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
    """The rows of neighboring micro-batches, with each micro-batch treated as one example."""

    first: int
    groups: Groups
    rows: Rows

    def of(self, values: Tensor) -> Tensor:
        """Return this part's share of (micro-batches, ...)."""
        if len(self.groups) == len(values):
            return values
        return values[self.first : self.first + len(self.groups)]


@dataclass(frozen=True)
class CutPatches(Contribution):
    """A convolution's weight as rows. Parts that are cut lazily can be iterated over only once."""

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
    def materialize(self, groups: Groups) -> Tensor:
        out = None
        for part in self.parts:
            out = empty_gradients(groups, part.rows.shape, part.rows.right) if out is None else out
            part.rows.materialize_into(part.groups, part.of(out))
        assert out is not None
        return self._weights(out)

    @override
    def gradient_of(self, groups: Groups, microbatch: int) -> Tensor:
        for part in self.parts:
            row = microbatch - part.first
            if 0 <= row < len(part.groups):
                return self._weights(part.rows.gradient_of(part.groups, row))
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
        found = recorder.common_case(input, weight, bias)
        if found is None and not recorder.is_recorded(input):
            input = recorder.adopt(input)
        if found is None and (recorder.any_depends([weight]) or not recorder.depends(input)):
            if recorder.any_depends([input, weight, bias]):
                raise CannotFuseError(
                    "The single-pass engine does not support a convolution whose weight depends on "
                    f"the examples, with parameter {recorder.first_name([input, bias])!r}."
                )
            return cast(Tensor, recorder.derive(function, (input, weight, bias, *options), {}))
        w, b = recorder.name(weight), recorder.name(bias)
        if isinstance(padding, str):
            input, padding = _padded(input, weight, padding, many(dilation))
        state = found or recorder.owned(input, w or b)
        if input.dim() != dimensions + 2 or state.axis != 0:
            raise CannotFuseError(
                f"Convolution {w or b!r} gets a tensor of shape {tuple(input.shape)} whose first "
                "dimension is not that of the examples."
            )
        recorder.expect(w, b)
        geometry = _geometry(
            tuple(weight.shape), many(stride), many(padding), many(dilation), groups,
            recorder.is_tight,
        )  # fmt: skip
        owners = state.owners
        plain = owners.base is None and owners.outer == owners.inner == 1

        def images(tensor: Tensor) -> Tensor:
            """Return the images in the order of their examples."""
            return tensor if plain else arranged(tensor, 0, owners).flatten(0, 1)

        def note(x: Tensor, d: Tensor) -> None:
            refuse_unowned_gradients(d, 0, owners, w or b)
            x, d = images(x), images(d)
            each = len(d) // recorder.groups.examples
            microbatches = recorder.groups if each == 1 else recorder.groups.times(each)
            if b is not None:
                recorder.on_contribution(b, Materialized(microbatches.sum(d.flatten(2).sum(2))))
            if w is not None and groups == 1 and each == 1:
                recorder.on_contribution(w, Patches(x, d, geometry))
            elif w is not None:
                recorder.on_contribution(
                    w, Materialized(geometry.weight_gradients(d, x, microbatches))
                )

        with recorder.untracked():
            held = None if bias is None else bias.detach()
            kept_out = weight.detach()
            if recorder.can_hook_output(input) and not recorder.is_tight:
                result = recorder.hook_output(geometry.forward(input, kept_out, held), note, input)
            else:
                noted = recorder.final_only(note)
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
    """Return an input and a numeric padding; uneven padding is applied to the input."""
    spans = [(k - 1) * d for k, d in zip(weight.shape[2:], dilations, strict=True)]
    if padding != "same":
        return input, [0] * len(spans)
    if any(span % 2 for span in spans):
        sides = [side for span in reversed(spans) for side in (span // 2, span - span // 2)]
        return F.pad(input, sides), [0] * len(spans)
    return input, [span // 2 for span in spans]
