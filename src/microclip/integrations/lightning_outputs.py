"""What `training_step` returns and logs for each micro-batch, merged into that of the batch.

Knows nothing of clipping, or of how micro-batches are run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


class MicrobatchOutputs:
    """Collects what `training_step` returns per micro-batch and merges it for the batch."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []
        self._sizes: list[int] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, output: Any, size: int) -> None:
        """Add one micro-batch's output, without its graph."""
        self._outputs.append(_detach(output))
        self._sizes.append(size)

    def merged(self) -> Any:
        """Return the output of the whole batch, with the mean loss."""
        first, sizes = self._outputs[0], self._sizes
        if isinstance(first, Tensor):
            return _weighted_mean(self._outputs, sizes)
        return {
            key: _weighted_mean([each[key] for each in self._outputs], sizes)
            if key == "loss"
            else _merge(f"{key!r}", [each.get(key) for each in self._outputs], sizes)
            for key in first
        }


class MicrobatchLogs:
    """Merges what `training_step` logs per micro-batch into one log entry for the batch."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._log = module.log
        self._signature = inspect.signature(module.log)
        self._size = 0
        self._entries: dict[str, tuple[list[Any], list[int], dict[str, Any]]] = {}

    @contextmanager
    def capture(self, size: int) -> Iterator[None]:
        """Inside the block, collect `self.log` calls of a micro-batch of this size."""
        self._size = size
        before = vars(self._module).get("log")
        self._module.log = self._collect  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log  # uncovers the method again
            if before is not None:
                self._module.log = before  # type: ignore[method-assign]

    def _collect(self, *args: Any, **kwargs: Any) -> None:
        options = self._signature.bind(*args, **kwargs).arguments
        name, value = options.pop("name"), options.pop("value")
        reduction = _REDUCTIONS.get(_reduction_name(options.get("reduce_fx", "mean")))
        plain = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not plain or reduction is None:
            self._log(name, value, **options)  # a torchmetrics Metric accumulates by itself
            return
        values, sizes, _ = self._entries.setdefault(name, ([], [], options))
        values.append(value.detach() if isinstance(value, Tensor) else value)
        sizes.append(options.get("batch_size") or self._size)

    def write(self) -> None:
        """Log the merged entries."""
        for name, (values, sizes, options) in self._entries.items():
            reduction = _REDUCTIONS[_reduction_name(options.get("reduce_fx", "mean"))]
            tensors = [torch.as_tensor(value, dtype=_float_dtype(value)) for value in values]
            if reduction == "mean":
                value = _weighted_mean(tensors, sizes)
            else:
                value = getattr(torch.stack([each.reshape(()) for each in tensors]), reduction)()
            self._log(name, value, **{**options, "batch_size": sum(sizes)})
        self._entries.clear()


def _weighted_mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    total = torch.stack([value * size for value, size in zip(values, sizes, strict=True)]).sum(0)
    mean: Tensor = total / sum(sizes)
    return mean


def _merge(name: str, values: list[Any], sizes: list[int]) -> Any:
    """Merge outputs: concatenate per-example values, average numbers, or keep what is equal."""
    first = values[0]
    if isinstance(first, Tensor) and all(isinstance(value, Tensor) for value in values):
        if all(v.dim() > 0 and len(v) == size for v, size in zip(values, sizes, strict=True)):
            return torch.cat(values)
        if all(v.dim() == 0 and v.is_floating_point() for v in values):
            return _weighted_mean(values, sizes)
        if all(v.shape == first.shape and torch.equal(v, first) for v in values):
            return first
    elif isinstance(first, Mapping) and all(isinstance(v, Mapping) for v in values):
        keys = [key for key in first if all(key in value for value in values)]
        return {key: _merge(f"{name}[{key!r}]", [v[key] for v in values], sizes) for key in keys}
    elif all(isinstance(value, float) for value in values):
        return math.fsum(v * size for v, size in zip(values, sizes, strict=True)) / sum(sizes)
    elif isinstance(first, list) and all(
        isinstance(v, list) and len(v) == size for v, size in zip(values, sizes, strict=True)
    ):
        return [each for value in values for each in value]
    elif all(type(value) is type(first) and value == first for value in values):
        return first
    raise NotImplementedError(
        f"training_step returned {name} along with the loss, once for each of {len(values)} "
        f"micro-batches, and microclip cannot merge these into one value for the batch: {first!r}, "
        f"{values[1]!r}, ... Return one entry per example or a mean as a float, log it with "
        "self.log, or leave it out."
    )


def _detach(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.detach()
    if isinstance(node, Mapping):
        return {key: _detach(value) for key, value in node.items()}
    return node


def _reduction_name(reduce_fx: Any) -> str:
    return reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")


def _float_dtype(value: Any) -> torch.dtype:
    given = isinstance(value, Tensor) and value.is_floating_point()
    return value.dtype if given else torch.get_default_dtype()
