"""What the micro-batches of one batch log and return, put together as if it had been run whole."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_JOINED = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


class Outputs:
    """What `training_step` returned for each micro-batch that it did not skip."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._sizes: list[int] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, output: Any, size: int) -> None:
        """Take one in; its graph is not kept."""
        self._found.append(_detached(output))
        self._sizes.append(size)

    def joined(self) -> Any:
        """Return what it would have returned for the whole batch, whose loss is the mean."""
        first, sizes = self._found[0], self._sizes
        if isinstance(first, Tensor):
            return _mean(self._found, sizes)
        return {
            key: _mean([each[key] for each in self._found], sizes)
            if key == "loss"
            else _join(f"{key!r}", [each.get(key) for each in self._found], sizes)
            for key in first
        }


class Logs:
    """Turns what micro-batches log in `training_step` into one entry for their batch."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._log = module.log
        self._signature = inspect.signature(module.log)
        self._size = 0
        self._entries: dict[str, tuple[list[Any], list[int], dict[str, Any]]] = {}

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Keep what is logged inside the block, for a micro-batch of this size."""
        self._size = size
        before = vars(self._module).get("log")
        self._module.log = self._keep  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log  # the method is seen again
            if before is not None:
                self._module.log = before  # type: ignore[method-assign]

    def _keep(self, *args: Any, **kwargs: Any) -> None:
        options = self._signature.bind(*args, **kwargs).arguments
        name, value = options.pop("name"), options.pop("value")
        reduction = _JOINED.get(_name_of(options.get("reduce_fx", "mean")))
        plain = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not plain or reduction is None:
            self._log(name, value, **options)  # a Metric adds up by itself
            return
        values, sizes, _ = self._entries.setdefault(name, ([], [], options))
        values.append(value.detach() if isinstance(value, Tensor) else value)
        sizes.append(options.get("batch_size") or self._size)

    def write(self) -> None:
        """Log what was kept."""
        for name, (values, sizes, options) in self._entries.items():
            reduction = _JOINED[_name_of(options.get("reduce_fx", "mean"))]
            found = [torch.as_tensor(value, dtype=_float(value)) for value in values]
            if reduction == "mean":
                value = _mean(found, sizes)
            else:
                value = getattr(torch.stack([each.reshape(()) for each in found]), reduction)()
            self._log(name, value, **{**options, "batch_size": sum(sizes)})
        self._entries.clear()


def _mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    total = torch.stack([value * size for value, size in zip(values, sizes, strict=True)]).sum(0)
    mean: Tensor = total / sum(sizes)
    return mean


def _join(name: str, values: list[Any], sizes: list[int]) -> Any:
    """Return one value for the batch: examples in a row, means of figures, or what all agree on."""
    first = values[0]
    if isinstance(first, Tensor) and all(isinstance(value, Tensor) for value in values):
        if all(v.dim() > 0 and len(v) == size for v, size in zip(values, sizes, strict=True)):
            return torch.cat(values)
        if all(v.dim() == 0 and v.is_floating_point() for v in values):
            return _mean(values, sizes)
        if all(v.shape == first.shape and torch.equal(v, first) for v in values):
            return first
    elif isinstance(first, Mapping) and all(isinstance(v, Mapping) for v in values):
        keys = [key for key in first if all(key in value for value in values)]
        return {key: _join(f"{name}[{key!r}]", [v[key] for v in values], sizes) for key in keys}
    elif all(isinstance(value, float) for value in values):
        return math.fsum(v * size for v, size in zip(values, sizes, strict=True)) / sum(sizes)
    elif isinstance(first, list) and all(
        isinstance(v, list) and len(v) == size for v, size in zip(values, sizes, strict=True)
    ):
        return [each for value in values for each in value]
    elif all(type(value) is type(first) and value == first for value in values):
        return first
    raise NotImplementedError(
        f"training_step returned {name} beside the loss, once for each of {len(values)} "
        f"micro-batches, and microclip does not know how to make one value of them: {first!r}, "
        f"{values[1]!r}, ... Return one entry per example or a mean as a float, use self.log, or "
        "leave it out."
    )


def _detached(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.detach()
    if isinstance(node, Mapping):
        return {key: _detached(value) for key, value in node.items()}
    return node


def _name_of(reduce_fx: Any) -> str:
    return reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")


def _float(value: Any) -> torch.dtype:
    given = isinstance(value, Tensor) and value.is_floating_point()
    return value.dtype if given else torch.get_default_dtype()
