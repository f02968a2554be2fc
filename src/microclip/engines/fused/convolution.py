"""Convolutions: products of a weight with the patches of its input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from microclip import multitensor
from microclip.engines.base import CannotFuseError
from microclip.engines.fused.groups import Groups, Shares, together
from microclip.engines.fused.record import Handler, Recorder, apply
from microclip.engines.fused.uses import Formed, Rows, Use, forming_pays
from microclip.engines.fused.workspace import Workspace

PATCHES_AT_ONCE = 2**22  # bytes of patches written out at a time
GROUPING_PAYS = 256  # places of a micro-batch's windows


@dataclass(frozen=True)
class Geometry:
    """How a convolution runs over its input."""

    shape: tuple[int, ...]  # of the weight
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution."""
        options = (self.stride, self.padding, self.dilation, False, self._none, self.groups)
        return torch.convolution(x, weight, bias, *options)

    def input_gradient(self, d: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return what goes on to the layer before."""
        found = self._backward(d, x, weight, [True, False, False], self.groups)[0]
        return cast(Tensor, found)

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
        return together([self._grouped(block.of(d), block.of(x)) for block in microbatches])

    def _grouped(self, d: Tensor, x: Tensor) -> Tensor:
        """Return the gradients of (micro-batches, examples, channels, ...)."""
        count = len(x)
        wide_x, wide_d = (side.transpose(0, 1).flatten(1, 2) for side in (x, d))
        weight = x.new_empty(()).expand(count * self.shape[0], *self.shape[1:])
        mask = [False, True, False]
        found = self._backward(wide_d, wide_x, weight, mask, self.groups * count)[1]
        return cast(Tensor, found).view(count, *self.shape)

    def patches(self, x: Tensor) -> Tensor:
        """Return (micro-batches, inputs, places) from (micro-batches, examples, channels, ...)."""
        dimensions = len(self.stride)
        x = F.pad(x, [side for pad in reversed(self.padding) for side in (pad, pad)])
        for i in range(dimensions):
            reach = (self.shape[2 + i] - 1) * self.dilation[i] + 1
            x = x.unfold(3 + i, reach, self.stride[i])[..., :: self.dilation[i]]
        places, offsets = range(3, 3 + dimensions), range(3 + dimensions, 3 + 2 * dimensions)
        x = x.permute(0, 2, *offsets, 1, *places)
        return x.reshape(len(x), math.prod(self.shape[1:]), -1)

    @property
    def _none(self) -> tuple[int, ...]:
        return (0,) * len(self.stride)

    def _backward(self, d: Tensor, x: Tensor, weight: Tensor, mask: list[bool], groups: int) -> Any:
        options = (self.stride, self.padding, self.dilation, False, self._none, groups)
        return torch.ops.aten.convolution_backward(d, x, weight, None, *options, mask)


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
        found = [rows.squared_norms(Groups([1] * count)) for _, count, rows in self._rows(groups)]
        return together(found)

    @override
    def forming_pays(self, groups: Groups) -> bool:
        rows = groups.largest * math.prod(self.d.shape[2:])
        return forming_pays(rows, self.shape[0], math.prod(self.shape[1:]))

    @override
    def form(self, groups: Groups, workspace: Workspace) -> Tensor:
        if self._is_better_grouped(groups):
            return self.geometry.weight_gradients(self.d, self.x, groups)
        out = workspace.empty((len(groups), *self.shape), self.x)
        for first, count, rows in self._rows(groups):
            rows.form_into(Groups([1] * count), out[first : first + count].flatten(2))
        return out

    @override
    def add_to(self, total: Tensor | None, shares: Shares) -> Tensor:
        each = shares.of_examples.to(self.d.dtype).view(-1, *(1,) * (self.d.dim() - 1))
        found = self.geometry.weight_gradient(self.d * each, self.x)
        found = found.to(multitensor.accumulation_dtype(found))
        return found if total is None else total.add_(found)

    @override
    def without(self, left_out: Shares) -> Patches:
        each = left_out.of_examples.view(-1, *(1,) * (self.d.dim() - 1))
        return Patches(self.x.masked_fill(each, 0.0), self.d.masked_fill(each, 0.0), self.geometry)

    @override
    def kept(self, workspace: Workspace) -> Patches:
        return Patches(self.x, workspace.keep(self.d), self.geometry)

    def _is_better_grouped(self, groups: Groups) -> bool:
        """Whether the library's own kernel is faster than patches: for many places, on a CPU.

        In half precision it would round what is to be added up.
        """
        rows = min(groups.sizes) * math.prod(self.d.shape[2:])
        fast = multitensor.on_host(self.d) and self.d.dtype == torch.float32
        return fast and rows >= GROUPING_PAYS

    def _rows(self, groups: Groups) -> Iterator[tuple[int, int, Rows]]:
        """Yield rows of some micro-batches at a time: patches overlap, and take memory.

        With each comes the number of its first micro-batch and how many there are.
        """
        inputs, places = math.prod(self.shape[1:]), math.prod(self.d.shape[2:])
        for block in groups:
            each = block.size * places * inputs * self.x.element_size()
            step = max(1, PATCHES_AT_ONCE // each)
            for start in range(0, block.count, step):
                x, d = (
                    block.of(self.x)[start : start + step],
                    block.of(self.d)[start : start + step],
                )
                deltas = d.flatten(3).transpose(1, 2).flatten(2)
                rows = Rows(self.geometry.patches(x).mT, deltas.mT, inputs_first=False)
                yield block.first_microbatch + start, len(x), rows


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
        dx = ctx.geometry.input_gradient(d, x, weight) if ctx.needs_input_grad[1] else None
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
        w, b = recorder.name(weight), recorder.name(bias)
        recorder.check(input, w or b)
        strides, dilations = many(stride), many(dilation)
        if isinstance(padding, str):
            spans = [(k - 1) * d for k, d in zip(weight.shape[2:], dilations, strict=True)]
            if padding == "same" and any(span % 2 for span in spans):
                raise CannotFuseError(f"Convolution {w!r} pads unevenly.")
            padding = [span // 2 if padding == "same" else 0 for span in spans]
        if input.dim() != dimensions + 2 or input.shape[0] != recorder.groups.examples:
            raise CannotFuseError(
                f"Convolution {w or b!r} gets a tensor of shape {tuple(input.shape)}, not one "
                f"with {recorder.groups.examples} examples along its first dimension."
            )
        recorder.expect(w, b)
        geometry = Geometry(tuple(weight.shape), strides, many(padding), dilations, groups)

        def note(x: Tensor, d: Tensor) -> None:
            if b is not None:
                recorder.on_use(b, recorder.formed(d.flatten(2).mT))
            if w is not None and groups == 1:
                recorder.on_use(w, Patches(x, d, geometry))
            elif w is not None:
                recorder.on_use(w, Formed(geometry.weight_gradients(d, x, recorder.groups)))

        held = None if bias is None else bias.detach()
        return apply(_Convolution, recorder.anchor, input, weight.detach(), held, geometry, note)

    return handler
