"""Noticing batches whose examples lie along the second dimension, by what recurrent layers get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


@contextmanager
def watching(model: nn.Module, counts: set[int], warn: Callable[[str], None]) -> Iterator[None]:
    """Warn if a layer that takes time first is given examples first.

    Args:
        model: What runs inside the block.
        counts: How many examples it may be given at once.
        warn: Is told, at the end of the block.
    """
    found: list[tuple[str, tuple[int, ...]]] = []

    def look(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if isinstance(given, Tensor) and given.dim() == 3:
            time, examples = given.shape[:2]
            if time in counts and examples not in counts:
                found.append((name, tuple(given.shape)))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
                label = f"{type(module).__name__} {name!r}"
                hook = module.register_forward_pre_hook(partial(look, label), with_kwargs=True)
                hooks.enter_context(hook)
        yield
    if found:
        name, shape = found[0]
        warn(
            f"{name} has batch_first=False and got a tensor of shape {shape}, so what was counted "
            f"as {shape[0]} examples seems to be time. If your batches have time first, say "
            "batch_dim=1; if the examples come first indeed, build the layer with batch_first=True."
        )
