"""Operations over all gradients of a model at once; the one place that touches `torch._foreach_*`.

Norms are taken block by block and combined in float64. One reduction over a large float32 tensor
drifts (8e-4 over 40 million elements on a CPU, so an embedding table would break "exact"); small
blocks stay below 1e-6 at worst and cost no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

BLOCK = 1024
HALF = (torch.float16, torch.bfloat16)


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value of this tensor costs nothing."""
    return tensor.device.type == "cpu"


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype that norms are combined in."""
    return torch.float32 if device.type == "mps" else torch.float64


def norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the L2 norm over all elements of all tensors, a scalar on this device."""
    wide = widest(device)
    tensors = [tensor for tensor in tensors if tensor.numel()]  # a shard may be empty
    if not tensors:
        return torch.zeros((), device=device, dtype=wide)
    if not on_host(tensors[0]):
        return join(torch._foreach_norm(tensors, 2, dtype=wide), device)
    total = torch.linalg.vector_norm(_block_norms(tensors), dtype=wide)
    if 0 < total.item() < math.inf:
        return cast(Tensor, total)
    # Squares of float32 vanish below 1e-19 and overflow above 1e19: look again before believing.
    return join([torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors], device)


def join(norms: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the norm of the whole from the norms of its parts."""
    parts = [part.to(device) for part in norms]
    if not parts:
        return torch.zeros((), device=device, dtype=widest(device))
    return cast(Tensor, torch.linalg.vector_norm(torch.stack(parts)))


def _block_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of blocks that together make up all the tensors, float32 or wider."""
    blocks, ends = [], []
    for tensor in tensors:
        flat = _flat(tensor)
        if flat.dtype in HALF:  # faster and more exact than a reduction that widens as it goes
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
    """Return the squared L2 norm of each entry along the first dimension, added up widely."""
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
    """Return each entry along the first dimension as one row, in the order of the memory."""
    return tensors.unsqueeze(1) if tensors.dim() == 1 else as_it_lies(tensors).flatten(1)


def as_it_lies(tensors: Tensor) -> Tensor:
    """Return each entry along the first dimension with its elements in the order of the memory."""
    return tensors.permute(0, *_order(tensors)) if not tensors.is_contiguous() else tensors


def put_back(lying: Tensor, tensors: Tensor) -> Tensor:
    """Return one entry of `as_it_lies(tensors)`, or what became of it, in the right order."""
    if tensors.is_contiguous():
        return lying
    order = _order(tensors)
    return lying.permute([order.index(i) for i in range(1, tensors.dim())])


def _order(tensors: Tensor) -> list[int]:
    """Return the dimensions but the first as they follow each other in memory."""
    return sorted(range(1, tensors.dim()), key=tensors.stride, reverse=True)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in a row, in whatever order the memory has them."""
    if not tensor.is_contiguous():
        tensor = as_it_lies(tensor.unsqueeze(0))
    return tensor.reshape(-1)


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to add gradients up in: never half precision, which drifts."""
    return torch.float32 if tensor.dtype in HALF else tensor.dtype


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in a precision that its products can be added up in."""
    return tensor.float() if tensor.dtype in HALF else tensor


def add_(sums: list[Tensor], tensors: list[Tensor], coefficient: Tensor) -> None:
    """Add coefficient x tensors to sums, in place."""
    if not sums:
        return
    if on_host(coefficient):
        torch._foreach_add_(sums, tensors, alpha=coefficient.item())
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
        if tensors and coefficient.item() != 1:
            torch._foreach_mul_(tensors, coefficient.item())
        return
    for device in {tensor.device for tensor in tensors}:  # more than one: a model cut over devices
        here = [tensor for tensor in tensors if tensor.device == device]
        torch._foreach_mul_(here, coefficient.to(device))
