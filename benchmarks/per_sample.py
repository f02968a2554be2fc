"""The same gradient by other means, for b = 1: per-sample gradients of torch.func and Opacus.

Each step leaves what `Clipper(model, 1)` would leave in `.grad`, so that the work is the same.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from measure import Step
from models import Task


def steps(task: Task) -> dict[str, Step]:
    """Return a step of each kind; those of Opacus only if it is installed."""
    found = {"vmap": _vmap(task)}
    try:
        import opacus  # noqa: F401
    except ImportError:
        return found
    return {**found, "opacus": _opacus_hooks(task), "ghost": _opacus_ghost(task)}


def _weights(norms: Tensor) -> Tensor:
    return norms.min() / norms / len(norms)


def _vmap(task: Task) -> Step:
    model = task.model

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(model, parameters, (x.unsqueeze(0),))
        return task.loss(output, y.unsqueeze(0)).squeeze(0)

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = each(parameters, *task.batch)
        squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
        weights = _weights(torch.stack(squares).sum(0).sqrt())
        for name, parameter in model.named_parameters():
            parameter.grad = torch.tensordot(weights, gradients[name], 1)

    return step


def _opacus_hooks(task: Task) -> Step:
    from opacus import GradSampleModule

    model = copy.deepcopy(task.model)
    wrapped = GradSampleModule(model, loss_reduction="sum")

    def step() -> None:
        task.loss(wrapped(task.batch[0]), task.batch[1]).sum().backward()
        samples = {name: p.grad_sample for name, p in model.named_parameters()}
        squares = [g.flatten(1).square().sum(1) for g in samples.values()]
        weights = _weights(torch.stack(squares).sum(0).sqrt())
        for name, parameter in task.model.named_parameters():
            parameter.grad = torch.tensordot(weights, samples[name], 1)
        for parameter in model.parameters():
            parameter.grad = parameter.grad_sample = None

    return step


def _opacus_ghost(task: Task) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    model = copy.deepcopy(task.model)
    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )

    def step() -> None:
        losses = task.loss(wrapped(task.batch[0]), task.batch[1])
        losses.sum().backward(retain_graph=True)
        weights = _weights(wrapped.get_norm_sample())
        wrapped.disable_hooks()
        model.zero_grad()
        (weights * losses).sum().backward()
        wrapped.enable_hooks()
        for ours, theirs in zip(task.model.parameters(), model.parameters(), strict=True):
            ours.grad, theirs.grad, theirs.grad_sample = theirs.grad, None, None

    return step
