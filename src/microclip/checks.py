"""Checks of what a user passes to a Clipper: its settings, and the arguments of `fold()`.

Pure functions that raise with the value found and the remedy. They never run a model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from microclip.microbatches import Ids, check_size
from microclip.rules import Rule

if TYPE_CHECKING:
    from microclip.engines.single_pass.verify import Verify


def check_model(model: object) -> None:
    """Refuse what is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Clipper needs the model, a torch.nn.Module, but got {type(model).__name__}. "
            "Put several modules into one torch.nn.ModuleList."
        )


def check_rule(rule: object) -> None:
    """Refuse what is not an instance of a rule, such as its class."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be an instance of a Rule, such as microclip.rules.MinNorm(), but got "
            f"{rule!r}."
        )


def check_ledger(ledger: object) -> None:
    """Refuse what cannot record, such as a path."""
    if ledger is not None and not hasattr(ledger, "record"):
        raise TypeError(
            f"ledger must be a microclip.Ledger, but got {ledger!r}. "
            "Pass ledger=microclip.Ledger(path)."
        )


def check_choice(what: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of a few."""
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{what} must be one of {choices}, but got {value!r}.")


def check_budget(memory_budget: object) -> int | None:
    """Return a valid number of bytes, or None."""
    if memory_budget is None:
        return None
    if not isinstance(memory_budget, int) or isinstance(memory_budget, bool) or memory_budget <= 0:
        raise ValueError(
            f"memory_budget must be a positive number of bytes or None, but got {memory_budget!r}. "
            "For two gibibytes, pass 2 * 2**30."
        )
    return memory_budget


def check_verify(verify: object) -> Verify:
    """Return a valid frequency of checks."""
    if verify in ("rarely", "always", "never"):
        return cast("Verify", verify)
    if isinstance(verify, int) and not isinstance(verify, bool) and verify > 0:
        return verify
    raise ValueError(
        f'verify must be "rarely", "always", "never" or a positive number of steps, but got '
        f"{verify!r}."
    )


def check_loss_fn(loss_fn: object) -> None:
    """Refuse what cannot be called, such as a loss."""
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be a function from a micro-batch to its loss, but got "
            f"{type(loss_fn).__name__}. Clipping needs the loss of every micro-batch, not that of "
            "the whole batch: call backward(loss_fn, batch) instead of backward(loss)."
        )


def check_fold_arguments(
    loss_fn: object,
    chunk: object,
    domains: object,
    size: object,
    loss: object,
    loss_scale: object,
    domain: object,
) -> None:
    """Refuse arguments of one way to call `fold()` together with those of the other."""
    if loss_fn is None:
        if chunk is not None or domains is not None:
            raise TypeError("fold() with a chunk or domains needs loss_fn: fold(loss_fn, chunk).")
    elif size is not None or loss is not None or domain is not None or loss_scale != 1:
        raise TypeError(
            "size, loss, loss_scale and domain are for fold() after your own backward; "
            "fold(loss_fn, chunk) finds them out itself. Did you mean domains=?"
        )


def check_own_backward(
    size: object, loss: Any, loss_scale: object, domain: object
) -> Tensor | None:
    """Check the arguments of `fold()` after a backward pass; return the loss as a tensor."""
    if not isinstance(loss_scale, int | float) or not 0 < loss_scale < math.inf:
        raise ValueError(
            f"loss_scale must be the positive number that the loss was multiplied by, but got "
            f"{loss_scale!r}. For a loss divided by 8 it is 1 / 8."
        )
    if isinstance(loss, int | float):
        loss = torch.tensor(float(loss))
    if loss is not None and not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor or a number, but got {type(loss).__name__}.")
    if not isinstance(domain, Hashable):
        raise TypeError(
            f"domain must be a hashable label, such as a string or a number, but got {domain!r}."
        )
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(
            f"size must be a positive integer, the number of examples folded, but got {size!r}."
        )
    return loss


def check_streams(rule: Rule, engine: str) -> None:
    """Refuse rules and engines that need the examples, where there are only gradients."""
    if engine in ("two_pass", "fused") or not rule.streams:
        raise RuntimeError(
            f"fold() after your own backward sees gradients once, but {rule!r} with "
            f"engine={engine!r} needs the examples. Use backward(loss_fn, batch) or "
            "fold(loss_fn, chunk), or a rule that streams."
        )


def size_and_ids(size: int | None, ids: Ids | None) -> tuple[int, tuple[Hashable, ...]]:
    """Return the size of a micro-batch and its ids, which may both have been left out."""
    names = () if ids is None else tuple(ids.tolist() if isinstance(ids, Tensor) else ids)
    count = check_size(size) or len(names) or 1
    if names and len(names) != count:
        raise ValueError(f"The micro-batch has {count} examples, but ids has {len(names)}.")
    return count, names


def check_gradients_exist(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse a `fold()` before any backward pass."""
    if all(parameter.grad is None for parameter in parameters.values()):
        raise RuntimeError(
            "fold() found no gradient: every parameter's .grad is None. Call loss.backward() "
            "first, and fold() once after each."
        )


def check_same_parameters(model: nn.Module, trained: dict[str, nn.Parameter]) -> None:
    """Refuse a part of a step that trains other parameters than the first part."""
    now = {id(p) for p in model.parameters() if p.requires_grad}
    if now == {id(parameter) for parameter in trained.values()}:
        return
    changed = [name for name, p in model.named_parameters() if p.requires_grad != (name in trained)]
    raise RuntimeError(
        f"requires_grad of parameter {changed[0]!r} has changed since the first fold() of this "
        "step, so its gradient would not be clipped with the others. Freeze and unfreeze between "
        "finish() and the next fold()."
        if changed
        else "The model's parameters were replaced after the first fold() of this step. Change "
        "the model between finish() and the next fold()."
    )
