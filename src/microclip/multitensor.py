"""Operations over all gradients of a model at once; the only user of `torch._foreach_*`.

Norms are taken block by block and combined in float64, if the device has it. A single reduction
over a large float32 tensor drifts (8e-4 over 40 million elements on a CPU, so an embedding table
would not be exact); small blocks stay below 1e-6 at worst and cost no more.

Squares leave the range of their dtype long before the numbers do: those of float32 lose digits
below 1e-19 and overflow above 1e19. So a norm near either end is recomputed, scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import cast

import torch
from torch import Tensor

BLOCK = 1024
HALF = (torch.float16, torch.bfloat16)
# norms in these ranges are accurate: squares lose less than 1e-7 of them
SAFE_SINGLE, SAFE_DOUBLE = (1e-10, 1e18), (1e-140, 1e140)
LARGEST_FACTOR = 1e30  # that float32 gradients are multiplied by at once


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value of this tensor is free."""
    return tensor.device.type == "cpu"


@cache
def widest(device: torch.device) -> torch.dtype:
    """Return the dtype that norms are combined in: float64, or float32 if the device has none.

    MPS and some XPUs have none. Unknown devices are asked, once.
    """
    if device.type in ("cpu", "cuda", "meta"):
        return torch.float64
    try:
        with torch._C.DisableTorchFunction():
            torch.ones((), dtype=torch.float64, device=device).add(1)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the L2 norm over all elements of all tensors, a scalar on this device."""
    wide = widest(device)
    tensors = [tensor for tensor in tensors if tensor.numel()]  # a shard may be empty
    if not tensors:
        return torch.zeros((), device=device, dtype=wide)
    if not on_host(tensors[0]):
        return join(torch._foreach_norm(tensors, 2, dtype=wide), device)
    total = torch.linalg.vector_norm(_block_norms(tensors), dtype=wide)
    if is_safe(total.item(), tensors):
        return cast(Tensor, total)
    return join([_scaled_norm(tensor) for tensor in tensors], device)


def is_safe(norm: float, tensors: list[Tensor]) -> bool:
    """Whether a norm computed by squaring these tensors is well within range."""
    if SAFE_SINGLE[0] < norm < SAFE_SINGLE[1]:
        return True
    low, high = SAFE_DOUBLE
    return all(tensor.dtype == torch.float64 for tensor in tensors) and low < norm < high


def _scaled_norm(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor of any magnitude: max x |tensor / max|."""
    flat = _flat(tensor).to(widest(tensor.device))
    largest = flat.abs().max()
    if not 0 < largest.item() < math.inf:
        return largest
    scaled: Tensor = torch.linalg.vector_norm(flat / largest)
    return scaled * largest


def join(norms: Iterable[Tensor], device: torch.device) -> Tensor:
    """Combine the norms of parts into the norm of the whole."""
    parts = [part.to(device) for part in norms]
    if not parts:
        return torch.zeros((), device=device, dtype=widest(device))
    stacked = torch.stack(parts)
    total = torch.linalg.vector_norm(stacked)
    if on_host(total) and not is_safe(total.item(), [stacked]):
        return _scaled_norm(stacked)
    return cast(Tensor, total)


def _block_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of blocks that together make up all the tensors, float32 or wider."""
    blocks, ends = [], []
    for tensor in tensors:
        flat = _flat(tensor)
        if flat.dtype in HALF:  # faster and more accurate than a reduction that widens as it goes
            flat = flat.float()
        end = flat.numel() % BLOCK
        whole = flat.numel() - end
        if whole:
            rows = (flat[:whole] if end else flat).view(-1, BLOCK)
            blocks.append(torch.linalg.vector_norm(rows, dim=1))
        if end:
            ends.append(flat[whole:])
    if ends:
        blocks.append(torch.stack([norm.double() for norm in torch._foreach_norm(ends, 2)]))
    return torch.cat(blocks)


def squared_norms(tensors: Tensor) -> Tensor:
    """Return the squared L2 norm of each entry along the first dimension, in a wide dtype."""
    if tensors.is_complex():
        tensors = torch.view_as_real(tensors)
    flat = as_rows(tensors)
    flat = flat.to(accumulation_dtype(flat))
    wide = widest(tensors.device)
    end = flat.shape[1] % BLOCK
    whole = flat.shape[1] - end
    if not whole:
        return flat.square().sum(1, dtype=wide)
    rows = (flat[:, :whole] if end else flat).reshape(len(flat), -1, BLOCK)
    total: Tensor = torch.linalg.vector_norm(rows, dim=2).to(wide).square().sum(1)
    return total + flat[:, whole:].square().sum(1, dtype=wide) if end else total


def as_rows(tensors: Tensor) -> Tensor:
    """Return each entry along the first dimension as one row, in memory order."""
    return tensors.unsqueeze(1) if tensors.dim() == 1 else in_memory_order(tensors).flatten(1)


def in_memory_order(tensors: Tensor) -> Tensor:
    """Return each entry along the first dimension with its elements in memory order."""
    return tensors.permute(0, *_order(tensors)) if not tensors.is_contiguous() else tensors


def from_memory_order(lying: Tensor, tensors: Tensor) -> Tensor:
    """Undo `in_memory_order(tensors)` for one entry."""
    if tensors.is_contiguous():
        return lying
    order = _order(tensors)
    return lying.permute([order.index(i) for i in range(1, tensors.dim())])


def _order(tensors: Tensor) -> list[int]:
    """Return all dimensions but the first, in memory order."""
    return sorted(range(1, tensors.dim()), key=tensors.stride, reverse=True)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements as one row, in memory order."""
    if not tensor.is_contiguous():
        tensor = in_memory_order(tensor.unsqueeze(0))
    return tensor.reshape(-1)


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to accumulate gradients in: never half precision, which drifts."""
    return torch.float32 if tensor.dtype in HALF else tensor.dtype


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in a precision that its products can be accumulated in."""
    return tensor.float() if tensor.dtype in HALF else tensor


def add_(sums: list[Tensor], tensors: list[Tensor], coefficient: Tensor) -> None:
    """Add coefficient x tensors to sums, in place."""
    if not sums:
        return
    if on_host(coefficient):
        factor, *rest = _in_range(coefficient.item())
        if rest:
            tensors = [t.to(s.dtype, copy=True) for s, t in zip(sums, tensors, strict=True)]
            for another in rest:
                torch._foreach_mul_(tensors, another)
        torch._foreach_add_(sums, tensors, alpha=factor)
        return
    for device in {tensor.device for tensor in sums}:
        here = [
            (s, t.to(s.dtype)) for s, t in zip(sums, tensors, strict=True) if s.device == device
        ]
        scaled = torch._foreach_mul([t for _, t in here], coefficient.to(device))
        torch._foreach_add_([s for s, _ in here], scaled)


def multiply_(tensors: list[Tensor], coefficient: Tensor) -> None:
    """Multiply all tensors by one number, in place."""
    if on_host(coefficient):
        for factor in _in_range(coefficient.item()):
            if tensors and factor != 1:
                torch._foreach_mul_(tensors, factor)
        return
    for device in {tensor.device for tensor in tensors}:  # several if the model is split
        here = [tensor for tensor in tensors if tensor.device == device]
        torch._foreach_mul_(here, coefficient.to(device))


def _in_range(coefficient: float) -> list[float]:
    """Return factors within the range of float32 whose product is the coefficient."""
    if not is_extreme(coefficient):
        return [coefficient]
    count = math.ceil(abs(math.log(coefficient)) / math.log(LARGEST_FACTOR))
    root = coefficient ** (1 / count)
    return [*[root] * (count - 1), coefficient / root ** (count - 1)]


def is_extreme(coefficient: float) -> bool:
    """Whether a coefficient must be applied to float32 gradients in several factors."""
    return 0 < coefficient < 1 / LARGEST_FACTOR or LARGEST_FACTOR < coefficient < math.inf
