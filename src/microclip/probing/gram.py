"""The Gram matrix of per-example gradients: G[i, k] = <g_i, g_k>, over one or several batches.

It holds everything there is to know about any grouping of these examples. It is accumulated
parameter by parameter, in float64, and no table of examples x parameters is built. Models that a
single pass cannot follow are differentiated one example at a time, for as many parameters at once
as fit; losses that depend on the rest of their batch are refused, since such examples have no
gradient of their own. Knows nothing about rules, micro-batches or what the matrix is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from microclip import multitensor
from microclip.batches import count_examples
from microclip.engines.base import CannotFuseError
from microclip.engines.gradients import LossFn, call, trainable
from microclip.engines.randomness import DropoutDisabled, RandomState
from microclip.engines.single_pass import PerExampleGradients, contributions_of, free_memory
from microclip.engines.snapshot import undisturbed
from microclip.microbatches import cut
from microclip.wrappers import ddp_wrappers, is_sharded

LARGEST = 8192  # examples: beyond it the matrix itself takes more than half a gigabyte
BLOCK_BYTES = 2**24  # of gradients materialized at once; larger blocks are no faster
TRIED = 3  # examples
TOLERANCE, TOLERANCE_IN_HALF = 0.01, 0.05  # of the largest inner product
Parameters = dict[str, nn.Parameter]
MIXING = 0.02  # of the largest loss; less than that is rounding


@dataclass(frozen=True, eq=False)
class Gram:
    """Inner products of all pairs of examples, in the order of the batches."""

    matrix: Tensor  # (examples, examples), float64, on the host
    sizes: tuple[int, ...]  # of the batches
    notes: tuple[str, ...] = ()  # what a user may want to know about how it was computed

    def __len__(self) -> int:
        return len(self.matrix)


def gram_of(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Any], memory_budget: int | None = None
) -> Gram:
    """Return the Gram matrix of all examples' gradients; the model is left as it was.

    Args:
        model: What is trained; frozen parameters are ignored.
        loss_fn: Returns one loss per example.
        batches: A few batches, each as it would be trained on.
        memory_budget: Bytes that may be held beside one batch's forward and backward pass; by
            default half of the free memory. Less memory means more passes, never another result.
    """
    chosen, sizes = collect(batches)
    _refuse_ranks(model)
    _refuse_batchnorm(model)
    parameters = trainable(model)
    device = next(iter(parameters.values())).device
    budget = free_memory(device) if memory_budget is None else float(memory_budget)
    notes: tuple[str, ...] = ()
    with undisturbed(model, parameters):
        reason = _reason_against_single_pass(parameters, loss_fn, chosen[0])
        if reason is None:
            try:
                total = GramAccumulator(parameters, sizes)
                total.add_single_passes(loss_fn, chosen, budget)
            except CannotFuseError as error:  # a later example takes another path
                reason = str(error)
        if reason is not None:
            notes = (f"Gradients were taken one example at a time, which is slower: {reason}",)
            clear(parameters)
            total = GramAccumulator(parameters, sizes)
            for rows in one_by_one(parameters, loss_fn, chosen, budget):
                total.add_rows(rows)
    matrix = total.matrix.to("cpu", torch.float64)
    _refuse_nonfinite(matrix, sizes)
    return Gram((matrix + matrix.mT) / 2, sizes, notes)


def _reason_against_single_pass(parameters: Parameters, loss_fn: LossFn, batch: Any) -> str | None:
    """Try a few examples both ways; None: a single pass gives the same result.

    Dropout is disabled. A loss that depends on the rest of the batch has no per-example gradient at
    all, and is refused here.
    """
    few = cut(batch, min(TRIED, count_examples(batch)))[0]
    devices = {parameter.device for parameter in parameters.values()}
    before = RandomState.now(devices)
    alone, together = (GramAccumulator(parameters, (few.size,)) for _ in range(2))
    with DropoutDisabled():
        refuse_mixing(loss_fn, few.batch, few.size, before, devices)
        try:
            together.add_single_passes(loss_fn, [few.batch], 0.0)
        except CannotFuseError as refusal:
            return str(refusal)
        finally:
            clear(parameters)
        for rows in one_by_one(parameters, loss_fn, [few.batch], BLOCK_BYTES):
            alone.add_rows(rows)
    deterministic = RandomState.now(devices).equals(before)
    scale = alone.matrix.diagonal().max().clamp(min=torch.finfo(torch.float32).tiny)
    error = ((alone.matrix - together.matrix).abs().max() / scale).item()
    half = any(parameter.dtype in multitensor.HALF for parameter in parameters.values())
    if deterministic and error > (TOLERANCE_IN_HALF if half else TOLERANCE):
        return f"A single pass gives inner products that are off by {error:.1e} of the largest."
    return None


class GramAccumulator:
    """The matrix while it is being added up: parameter by parameter, batch against batch."""

    def __init__(self, parameters: Parameters, sizes: tuple[int, ...]) -> None:
        self._parameters = parameters
        self._devices = {parameter.device for parameter in parameters.values()}
        self._device = next(iter(parameters.values())).device
        wide = multitensor.widest(self._device)
        self.matrix = torch.zeros(sum(sizes), sum(sizes), dtype=wide, device=self._device)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def add_rows(self, rows: Tensor) -> None:
        """Add what some columns contribute to the products of all examples."""
        for columns in torch.split(rows, max(1, BLOCK_BYTES // (8 * len(rows))), dim=1):
            self.matrix += (columns @ columns.mT).to(self._device, self.matrix.dtype)

    def add_single_passes(self, loss_fn: LossFn, batches: list[Any], budget: float) -> None:
        """Differentiate each batch, keeping earlier batches' gradients as far as the budget goes.

        If the budget does not cover all of them, the later batches are repeated for each portion
        that is held; random numbers are replayed, so that the gradients are the same.
        """
        first, last = 0, len(batches) - 1
        states: dict[int, RandomState] = {}
        while first <= last:
            held: dict[int, dict[str, PerExampleGradients]] = {}
            room, holding = budget, True
            for number in range(first, len(batches)):
                if number in states:
                    states[number].restore()
                new = number not in states
                states[number] = RandomState.now(self._devices)
                holding = holding and number < last and (not held or room > 0)
                mine = self._add_batch(number, loss_fn, batches[number], new, held, holding)
                if holding:
                    held[number] = mine
                    taken = sum(gradients.nbytes for gradients in mine.values())
                    room = room - taken if room >= 2 * taken else 0.0  # the next needs as much
            first += len(held)
            if first == last:  # it has met all the others
                break

    def _add_batch(
        self,
        number: int,
        loss_fn: LossFn,
        batch: Any,
        new: bool,
        held: dict[int, dict[str, PerExampleGradients]],
        holding: bool,
    ) -> dict[str, PerExampleGradients]:
        """Add a batch's products with the held ones, and with itself if it is new."""
        mine: dict[str, PerExampleGradients] = {}
        examples = count_examples(batch)

        def on_parameter(name: str, gradients: PerExampleGradients) -> None:
            if new:
                self._add(number, number, gradients, gradients)
            for other, theirs in held.items():
                if name in theirs:
                    self._add(other, number, theirs[name], gradients)
            if holding:
                mine[name] = gradients

        def losses(batch: Any) -> Tensor:
            return losses_of(loss_fn, batch, examples)

        contributions_of(self._parameters, losses, batch, on_parameter)
        return mine

    def _add(
        self, one: int, other: int, ones: PerExampleGradients, others: PerExampleGradients
    ) -> None:
        """Add what a parameter contributes to the products of two batches' examples."""
        found = ones.inner_products(others, BLOCK_BYTES).to(self._device)
        here, there = self._spans[one], self._spans[other]
        self.matrix[here, there] += found
        if one != other:
            self.matrix[there, here] += found.mT


def collect(batches: Iterable[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return the batches as a list, and their sizes; refuse what cannot be probed."""
    if isinstance(batches, Tensor | Mapping | tuple | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be a list of batches, but got a {type(batches).__name__}, which looks "
            "like a single batch. Write [batch]."
        )
    chosen: list[Any] = []
    sizes: list[int] = []
    for batch in batches:
        size = count_examples(batch)
        if size == 1:
            raise ValueError(
                f"Batch {len(chosen)} has one example, which cannot be cut into micro-batches. "
                "Pass batches as they are trained on."
            )
        chosen.append(batch)
        sizes.append(size)
        if sum(sizes) > LARGEST:
            raise ValueError(
                f"The first {len(sizes)} batches have {sum(sizes)} examples, more than the "
                f"{LARGEST} that a probe can compare with each other. Pass fewer: "
                "list(itertools.islice(loader, 4))."
            )
    if sum(sizes) < 4:
        raise ValueError(
            f"The probe needs at least 4 examples, two for a step and two to judge it by, but got "
            f"{sum(sizes)}."
        )
    return chosen, tuple(sizes)


def _refuse_ranks(model: nn.Module) -> None:
    """A probe runs in one process: collectives in its passes would wait forever."""
    if ddp_wrappers(model):
        raise ValueError(
            "The probe runs on one rank, but DistributedDataParallel waits for all of them. Probe "
            "model.module, with a loss_fn that calls it."
        )
    if is_sharded(model):
        raise ValueError(
            "The probe runs on one rank, but this model's parameters are sharded over several. "
            "Probe an unsharded copy of it."
        )


def _refuse_batchnorm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"Module {name!r} is a {type(module).__name__} in training mode, which mixes "
                "examples: a micro-batch's gradient is then not the mean of its examples' "
                "gradients, so per-example gradients say nothing about micro-batch sizes. Probe in "
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
        f"{', '.join(places)}{more}. Check these examples, or leave them out."
    )


def losses_of(loss_fn: LossFn, batch: Any, examples: int) -> Tensor:
    """Return one loss per example, or say that there must be one."""
    losses = call(loss_fn, batch, examples)
    if losses.shape != (examples,):
        raise ValueError(
            f"The probe needs one loss per example, but for {examples} examples loss_fn returned "
            f"a tensor of shape {tuple(losses.shape)}. Return the unreduced losses, as with "
            'reduction="none".'
        )
    return losses


def refuse_mixing(
    loss_fn: LossFn, batch: Any, size: int, before: RandomState, devices: set[torch.device]
) -> None:
    """Refuse losses that depend on the other examples of the batch.

    Args:
        loss_fn: Returns one loss per example.
        batch: A few examples.
        size: How many.
        before: The state of the random generators, to go back to.
        devices: Where parameters are.
    """
    with torch.enable_grad():
        together = losses_of(loss_fn, batch, size).detach()
        alone = torch.cat([losses_of(loss_fn, part.batch, 1).detach() for part in cut(batch, 1)])
    if not RandomState.now(devices).equals(before):
        before.restore()
        return  # the model adds noise, which is not the same twice
    difference = (together - alone).abs().max() / alone.abs().max().clamp(min=1e-12)
    if difference > MIXING:
        raise ValueError(
            f"The loss of an example changes with its neighbors in the batch (from "
            f"{alone.tolist()} alone to {together.tolist()} together), so it has no gradient of "
            "its own, and a micro-batch's gradient is not the mean over its examples. BatchNorm, "
            "in-batch negatives and losses normalized over the batch do this; probe without them."
        )


def one_by_one(
    parameters: Parameters, loss_fn: LossFn, batches: list[Any], table_bytes: float
) -> Iterator[Tensor]:
    """Yield (examples, columns) for some parameters at a time, repeating all passes for each."""
    examples = [part.batch for batch in batches for part in cut(batch, 1)]
    wide = {name: 8 if p.dtype == torch.float64 else 4 for name, p in parameters.items()}
    portions: list[list[str]] = [[]]
    taken = 0
    for name, parameter in parameters.items():
        size = parameter.numel() * wide[name] * (1 + parameter.is_complex()) * len(examples)
        if portions[-1] and taken + size > table_bytes:
            portions.append([])
            taken = 0
        portions[-1].append(name)
        taken += size
    state = RandomState.now({parameter.device for parameter in parameters.values()})
    for portion in portions:
        state.restore()  # the same gradients for all portions
        chosen = [parameters[name] for name in portion]
        yield torch.stack([_row(parameters, chosen, loss_fn, example) for example in examples])


def _row(
    parameters: Parameters, chosen: list[nn.Parameter], loss_fn: LossFn, example: Any
) -> Tensor:
    # .backward(), since reentrant checkpointing does not support torch.autograd.grad
    losses_of(loss_fn, example, 1).sum().backward()  # type: ignore[no-untyped-call]
    parts = []
    for parameter in chosen:
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        parts.append(real.to(multitensor.accumulation_dtype(real)).flatten())
    clear(parameters)
    widest = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    return torch.cat([part.to(widest) for part in parts])


def clear(parameters: Parameters) -> None:
    """Drop all gradients."""
    for parameter in parameters.values():
        parameter.grad = None
