"""Whether the loss that a Trainer trains on is transformers' own, from the Trainer to the model.

The losses of single examples are known for transformers' own losses alone. A loss can be replaced
in many places; a function counts as transformers' own if its source is theirs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel
from transformers.loss.loss_utils import LOSS_MAPPING

from microclip.engines.gradients import is_sharded

PACKAGES = tuple(
    f"{Path(p.__file__ or '').parent}{os.sep}" for p in (transformers, accelerate, torch)
)
PEFT = "/site-packages/peft/"  # adapters hand labels and losses on as they are


def why_unknown(
    trainer: Any, model: nn.Module, inner: nn.Module, inputs: dict[str, Any]
) -> str | None:
    """Return why the loss may be another one than transformers has for this model, or None.

    Asked before every step, so it looks at attributes alone and never at a tensor's values.
    """
    if not has_stock_compute_loss(trainer):
        return "compute_loss is overridden"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is given"
    if trainer.label_smoother is not None:
        return "labels are smoothed"
    if is_sharded(inner):
        return "the model is sharded"
    for each in {id(model): model, id(inner): inner}.values():
        found = _why_unknown_module(each, outer=each is not inner)
        if found is not None:
            return found
    return _why_unknown_inputs(inner, inputs)


def has_stock_compute_loss(trainer: Any) -> bool:
    """Whether a Trainer's `compute_loss` is transformers' own."""
    return "compute_loss" not in vars(trainer) and _is_theirs(type(trainer).compute_loss)


def loss_state(inner: nn.Module, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a model's loss depends on beside its weights, to notice when it changes."""
    labels = inputs["labels"]
    forward = getattr(inner.forward, "__func__", inner.forward)
    loss = (vars(inner).get("_loss_function"), getattr(inner, "loss_type", None))
    settings = dict(_settings(getattr(inner, "config", None)))
    return (
        *(id(inner), type(inner), forward, loss),
        *(frozenset(inputs), labels.dim(), labels.dtype, settings),
    )


def _why_unknown_module(module: nn.Module, outer: bool) -> str | None:
    name = type(module).__name__
    compiled = hasattr(module, "_orig_mod")
    if outer and not compiled and not isinstance(module, DistributedDataParallel):
        return f"the model is wrapped in {name}"
    called = outer or type(module).__call__ is nn.Module.__call__
    if not called or not _is_theirs(module.forward):
        return f"{name}.forward is not transformers' own"
    hooks = (
        *(module._forward_hooks.values(), module._forward_pre_hooks.values()),
        *(nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks),
    )
    if any(hooks):
        return f"{name} has forward hooks"
    loss = vars(module).get("_loss_function")
    if loss is None:
        loss = LOSS_MAPPING.get(getattr(module, "loss_type", None) or "ForCausalLM")
    if loss is not None and not _is_theirs(loss):
        return f"{name}.loss_function is not transformers' own"
    defined = inspect.getattr_static(type(module), "loss_function", None)
    if isinstance(defined, property) and defined.fget is not None:
        defined = defined.fget
    if defined is not None and not _is_theirs(defined):
        return f"{name}.loss_function is not transformers' own"
    return None


def _why_unknown_inputs(inner: nn.Module, inputs: dict[str, Any]) -> str | None:
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return "the labels are not whole numbers"
    others = [name for name in inputs if name != "labels"]
    if any("label" in name or "loss" in name for name in others):
        return "there are other labels beside 'labels'"
    known = inspect.signature(inner.forward).parameters
    beside = [name for name in others if name not in known]
    if beside and not _is_peft(inner):
        return f"{beside[0]!r} is no argument of the model and may reach the loss"
    return None


def _is_theirs(function: Any) -> bool:
    """Whether a function and all that are wrapped in it are transformers', accelerate's, torch's.

    The body counts: `functools.wraps` would lend another one's name and module.
    """
    return all(_is_in(_source(layer)) for layer in _layers(function))


def _layers(function: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _source(function: Any) -> str:
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else code.co_filename


def _is_in(path: str) -> bool:
    return PEFT in path or path.startswith(PACKAGES)


def _is_peft(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a configuration's settings, also those of the configurations inside."""
    for name, value in vars(config).items() if config is not None else ():
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            # a list or a dict may be changed in place, a number not
            yield f"{prefix}{name}", repr(value) if isinstance(value, list | dict) else value
