"""The Gram matrix of per-example gradients: G[i, k] = <g_i, g_k>, over one or several batches.

All there is to know of any grouping of these examples is in it. It is added up parameter by
parameter, in float64, and no table of examples x parameters is made. Knows nothing of rules,
micro-batches or what the matrix is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from microclip.engines.base import CannotFuseError
from microclip.engines.gradients import is_sharded, trainable
from microclip.engines.losses import LossFn
from microclip.engines.single_pass.budget import free_memory
from microclip.engines.snapshot import undisturbed
from microclip.microbatches import count_examples
from microclip.probing.agreement import clear, reason_against_single_pass
from microclip.probing.totals import Totals, in_single_passes
from microclip.probing.visit import one_by_one

LARGEST = 8192  # examples: beyond it the matrix itself takes more than half a gigabyte


@dataclass(frozen=True, eq=False)
class Gram:
    """Inner products of all pairs of examples, in the order of the batches."""

    matrix: Tensor  # (examples, examples), float64, on the host
    sizes: tuple[int, ...]  # of the batches
    notes: tuple[str, ...] = ()  # what a user may want to know about how it was made

    def __len__(self) -> int:
        return len(self.matrix)


def gram_of(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Any], memory_budget: int | None = None
) -> Gram:
    """Return the Gram matrix of all examples' gradients; the model is left as it was.

    Args:
        model: What is trained; parameters that do not require gradients play no part.
        loss_fn: Returns one loss per example.
        batches: Each as it would be trained on; a few of them.
        memory_budget: Bytes that may be held beside one batch's forward and backward pass; half
            of what is free if not said. Less memory means more passes, never another result.
    """
    chosen, sizes = collect(batches)
    _refuse_ranks(model)
    _refuse_batchnorm(model)
    parameters = trainable(model)
    device = next(iter(parameters.values())).device
    budget = free_memory(device) if memory_budget is None else float(memory_budget)
    notes: tuple[str, ...] = ()
    with undisturbed(model, parameters):
        reason = reason_against_single_pass(parameters, loss_fn, chosen[0])
        if reason is None:
            try:
                totals = Totals(parameters, sizes)
                in_single_passes(parameters, loss_fn, chosen, totals, budget)
            except CannotFuseError as error:  # one of the later examples takes another path
                reason = str(error)
        if reason is not None:
            notes = (f"Gradients were taken one example at a time, which is slower: {reason}",)
            clear(parameters)
            totals = Totals(parameters, sizes)
            for rows in one_by_one(parameters, loss_fn, chosen, budget):
                totals.add_rows(rows)
    matrix = totals.matrix.to("cpu", torch.float64)
    _refuse_nonfinite(matrix, sizes)
    return Gram((matrix + matrix.mT) / 2, sizes, notes)


def collect(batches: Iterable[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return the batches as a list, with their sizes, or say what is wrong with them."""
    if isinstance(batches, Tensor | Mapping | tuple | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be a list of batches, but got a {type(batches).__name__}, which is "
            "what one batch may be. Write [batch]."
        )
    chosen: list[Any] = []
    sizes: list[int] = []
    for batch in batches:
        size = count_examples(batch)
        if size == 1:
            raise ValueError(
                f"Batch {len(chosen)} has one example, which cannot be cut into micro-batches. "
                "Give batches as they are trained on."
            )
        chosen.append(batch)
        sizes.append(size)
        if sum(sizes) > LARGEST:
            raise ValueError(
                f"The first {len(sizes)} batches have {sum(sizes)} examples, more than the "
                f"{LARGEST} that a probe can compare with each other. Give fewer: "
                "list(itertools.islice(loader, 4))."
            )
    if sum(sizes) < 4:
        raise ValueError(
            f"The probe needs at least 4 examples, two to make a step and two to judge it by, "
            f"but got {sum(sizes)}."
        )
    return chosen, tuple(sizes)


def _refuse_ranks(model: nn.Module) -> None:
    """A probe is one process's: passes that no other rank makes would wait for it for ever."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "The probe runs on one rank alone, but DistributedDataParallel waits for all of them. "
            "Probe model.module, with a loss_fn that calls it."
        )
    if is_sharded(model):
        raise ValueError(
            "The probe runs on one rank alone, but this model's parameters are sharded over "
            "several. Probe an unsharded copy of it."
        )


def _refuse_batchnorm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"Module {name!r} is a {type(module).__name__} in training mode, which mixes "
                "examples: a micro-batch's gradient is then not the mean of its examples' "
                "gradients, and these cannot tell what any micro-batch size would do. Probe in "
                "evaluation mode (model.eval()), or use GroupNorm or LayerNorm."
            )


def _refuse_nonfinite(matrix: Tensor, sizes: tuple[int, ...]) -> None:
    bad = (~matrix.diagonal().isfinite()).nonzero().flatten().tolist()
    if not bad:
        return
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    places = []
    for position in bad[:8]:
        number = max(i for i, start in enumerate(starts) if start <= position)
        places.append(f"{position - starts[number]} of batch {number}")
    more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    raise ValueError(
        f"The gradients of {len(bad)} of {len(matrix)} examples are not finite: "
        f"{', '.join(places)}{more}. Look at these examples, or leave them out."
    )
