"""Two ways to per-example gradients: a single pass that is taken apart, or one pass per example.

Neither holds a table of all examples' gradients: the first hands over what each parameter's
gradients are made of as soon as the backward pass has delivered it, the second as many parameters
at a time as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from microclip import multitensor
from microclip.engines.losses import LossFn, call
from microclip.engines.randomness import RandomState
from microclip.engines.single_pass.anything import anything
from microclip.engines.single_pass.formed import Use
from microclip.engines.single_pass.groups import Groups
from microclip.engines.single_pass.layers import HANDLERS
from microclip.engines.single_pass.record import Recorder
from microclip.microbatches import count_examples, cut, tensors_of
from microclip.probing.columns import Uses

Parameters = dict[str, nn.Parameter]
OnParameter = Callable[[str, Uses], None]


def losses_of(loss_fn: LossFn, batch: Any, examples: int) -> Tensor:
    """Return one loss per example, or explain why there must be."""
    losses = call(loss_fn, batch, examples)
    if losses.shape != (examples,):
        raise ValueError(
            f"The probe needs one loss per example, but for {examples} of them loss_fn returned "
            f"a tensor of shape {tuple(losses.shape)}. Return the losses themselves, as "
            'reduction="none" does, without taking their mean.'
        )
    return losses


def single_pass(
    parameters: Parameters, loss_fn: LossFn, batch: Any, on_parameter: OnParameter
) -> None:
    """Differentiate a batch once; `on_parameter` gets each parameter's uses, example by example."""
    examples = count_examples(batch)
    groups = Groups([1] * examples)
    leaves = [leaf for _, leaf in tensors_of(batch)]
    recorder = Recorder(parameters, groups, leaves, HANDLERS, anything)
    collector = _Collector(recorder, on_parameter)
    with recorder.watching():
        losses = losses_of(loss_fn, batch, examples)
        losses = recorder.in_order(losses)
    recorder.is_final = True
    try:
        losses.sum().backward()  # type: ignore[no-untyped-call]
        collector.complete()
    finally:
        recorder.let_go()


class _Collector:
    """Puts the uses of each parameter together; those of derived tensors come at the end."""

    def __init__(self, recorder: Recorder, on_parameter: OnParameter) -> None:
        self._recorder = recorder
        self._on_parameter = on_parameter
        self._of: dict[str, Uses] = {}
        recorder.on_use = self._add

    @torch.no_grad()
    def _add(self, name: str, use: Use) -> None:
        uses = self._of.setdefault(name, [])
        uses.append(use)
        if len(uses) == self._recorder.expected[name] and not self._waits(name):
            self._on_parameter(name, self._of.pop(name))

    def _waits(self, name: str) -> bool:
        """Whether more may come of a parameter, by way of tensors derived from it."""
        derived = self._recorder.derived
        return name in derived or any(name in other.leaves for other in derived.values())

    @torch.no_grad()
    def complete(self) -> None:
        """Follow derived tensors back, and make sure that nothing went past the recorder."""
        self._recorder.check_nothing_unseen()
        for origin, uses in self._recorder.pulled_back(self._of).items():
            self._of.setdefault(origin, []).extend(uses)
        for name in list(self._of):
            self._on_parameter(name, self._of.pop(name))


def one_by_one(
    parameters: Parameters, loss_fn: LossFn, batches: list[Any], table_bytes: float
) -> Iterator[Tensor]:
    """Yield (examples, columns) for some parameters at a time; all passes are made for each."""
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
    # .backward(), since reentrant checkpointing does not know torch.autograd.grad
    losses_of(loss_fn, example, 1).sum().backward()  # type: ignore[no-untyped-call]
    parts = []
    for parameter in chosen:
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        parts.append(real.to(multitensor.accumulation_dtype(real)).flatten())
    for parameter in parameters.values():
        parameter.grad = None
    widest = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    return torch.cat([part.to(widest) for part in parts])
