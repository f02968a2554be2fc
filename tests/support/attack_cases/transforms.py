"""Gradients, functions and transforms of the model's own."""

import copy
import pickle
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attack_cases.base import D, attack, linear, linears, mlp, smooth, weight


def adversarial_step(m, x):
    z = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(mlp(m, z).square().sum(), z)
    return x + 0.1 * slope.tanh()


@attack("gradients")
def adversarial_examples(m, x, n):
    return mlp(m, adversarial_step(m, x))


@attack("gradients")
def adversarial_later(m, x, n):
    return mlp(m, adversarial_step(m, x) if m.step else x)


@attack("gradients")
def inner_backward_to_the_input(m, x, n):
    z = x.detach().clone().requires_grad_()
    mlp(m, z).square().sum().backward(inputs=[z])
    return mlp(m, x - 0.1 * z.grad)


@attack("gradients")
def inner_backward_and_zero_grad(m, x, n):
    z = x.detach().clone().requires_grad_()
    mlp(m, z).square().sum().backward()
    m.zero_grad(set_to_none=True)
    return mlp(m, x - 0.1 * z.grad)


@attack("gradients", whole=True)
def gradient_penalty(m, x, n, y):
    z = x.detach().requires_grad_()
    out = mlp(m, z)
    (slope,) = torch.autograd.grad(out.sin().sum(), z, create_graph=True)
    return smooth(out, y) + slope.square().mean((1, 2))


@attack("gradients")
def energy_and_forces(m, x, n):
    z = x.detach().requires_grad_()
    energy = mlp(m, z).square().sum()
    return -torch.autograd.grad(energy, z, create_graph=True)[0]


@attack("gradients")
def one_step_of_the_inner_loop(m, x, n):
    """MAML: each example takes a step of its own with the weight of the second layer."""
    hidden, w = m.one(x).tanh(), m.two.weight
    out = []
    for row in hidden:
        (slope,) = torch.autograd.grad(F.linear(row, w).square().mean(), w, create_graph=True)
        out.append(F.linear(row, w - 0.1 * slope, m.two.bias))
    return torch.stack(out)


@attack("gradients")
def gradients_of_the_examples_by_vmap(m, x, n):
    def energy(row):
        return mlp(m, row).square().sum()

    return vmap(grad(energy))(x).sin() + m.one(x)


@attack("gradients")
def directional_derivative(m, x, n):
    out, change = jvp(partial(mlp, m), (x,), (x.cos(),))
    return out + 0.3 * change


@attack("gradients")
def mapped_by_vmap(m, x, n):
    return vmap(lambda row: m.two(m.one(row).tanh().cumsum(0)))(x)


@attack("gradients")
def mapped_by_vmap_over_time(m, x, n):
    return vmap(partial(mlp, m), in_dims=1, out_dims=1)(x)


@attack("gradients", models=linears(3))
def ensemble_by_functional_call(m, x, n):
    weights = {
        name: torch.stack([dict(model.named_parameters())[name] for model in m.models])
        for name in ("weight", "bias")
    }
    out = vmap(lambda w: functional_call(m.models[0], w, (x,)))(weights)
    return out.tanh().mean(0)


@attack("gradients")
def functional_call_with_other_weights(m, x, n):
    noisy = {name: p + 0.1 * p.sin() for name, p in m.one.named_parameters()}
    return m.two(functional_call(m.one, noisy, (x,)).tanh())


class NumpyTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        import numpy as np

        out = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, d):
        (out,) = ctx.saved_tensors
        return d * (1 - out * out)


class Scale(torch.autograd.Function):
    """x * p, with the gradient of p summed up over everything but features."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx, d):
        x, p = ctx.saved_tensors
        return d * p, (d * x).flatten(0, -2).sum(0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return -0.5 * d


class TimesBatchSize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return d * len(d)


class FlipsExamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.flip(0)

    @staticmethod
    def backward(ctx, d):
        return d.flip(0)


@attack("functions", one=linear, scale=weight(D))
def function_in_numpy_then_a_scale(m, x, n):
    return NumpyTanh.apply(m.one(x)) * m.scale


@attack("functions", scale=weight(D), one=linear)
def function_in_numpy_of_the_input(m, x, n):
    return m.one(NumpyTanh.apply(x) * m.scale)


@attack("functions", scale=weight(D), one=linear)
def function_of_a_parameter(m, x, n):
    return Scale.apply(m.one(x), m.scale).tanh()


@attack("functions")
def function_of_a_weight_in_numpy(m, x, n):
    return m.two(F.linear(x, NumpyTanh.apply(m.one.weight), m.one.bias))


@attack("functions")
def gradient_reversed(m, x, n):
    return m.two(Reversed.apply(m.one(x)).tanh())


@attack("functions", mixes=True)
def gradient_times_the_batch_size(m, x, n):
    return m.two(TimesBatchSize.apply(m.one(x)).tanh())


@attack("functions")
def function_that_flips_examples(m, x, n):
    return FlipsExamples.apply(m.two(FlipsExamples.apply(m.one(x)).tanh()))


@torch.library.custom_op("attacks::times_and_flip", mutates_args=())
def times_and_flip(x: Tensor, p: Tensor) -> Tensor:
    return x.flip(0) * p


def _times_and_flip_saves(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _times_and_flip_backward(ctx, d):
    x, p = ctx.saved_tensors
    return (d * p).flip(0), (d * x.flip(0)).flatten(0, -2).sum(0)


times_and_flip.register_autograd(_times_and_flip_backward, setup_context=_times_and_flip_saves)


@attack("functions", one=linear, scale=weight(D))
def custom_operator(m, x, n):
    return times_and_flip(m.one(x), m.scale).flip(0).tanh()


@attack("functions")
def with_torch_functions_switched_off(m, x, n):
    with torch._C.DisableTorchFunction():
        hidden = m.one(x).tanh()
    return m.two(hidden)


@attack("functions")
def reordered_with_torch_functions_switched_off(m, x, n):
    with torch._C.DisableTorchFunction():
        x = x.flip(0)
    out = mlp(m, x)
    with torch._C.DisableTorchFunction():
        return out.flip(0)


@attack("functions")
def input_through_numpy(m, x, n):
    order = n.numpy().argsort(kind="stable")
    hidden = m.one(torch.from_numpy(x.numpy()[order].copy())).tanh()
    return m.two(hidden[torch.from_numpy(order.argsort())])


@attack("functions")
def input_through_python_lists(m, x, n):
    return mlp(m, torch.tensor(x.tolist())[:, : x.shape[1]])


@attack("functions")
def input_through_storage(m, x, n):
    flat = torch.tensor([], dtype=x.dtype).set_(x.contiguous().untyped_storage())
    start = x.storage_offset() if x.is_contiguous() else 0
    return mlp(m, flat[start : start + x.numel()].view_as(x))


class Tagged(Tensor):
    """A subclass that does nothing but be one."""


@attack("functions")
def subclass_of_tensor(m, x, n):
    return mlp(m, x.as_subclass(Tagged)).as_subclass(Tensor)


@attack("functions")
def detached_and_put_back(m, x, n):
    hidden = m.one(x)
    return m.two(hidden.detach().tanh()) + hidden - hidden.detach().sin()


@attack("functions")
def data_of_parameters_and_tensors(m, x, n):
    hidden = m.one(x)
    hidden.data.clamp_(-1, 1)
    return m.two(hidden) + x @ m.one.weight.data


@attack("functions")
def without_gradients_for_a_while(m, x, n):
    with torch.no_grad():
        target = mlp(m, x.flip(1))
    return mlp(m, x) * target + m.one(x)


@attack("functions")
def without_gradients_in_full_batches(m, x, n):
    with torch.set_grad_enabled(m.step > 0):
        hidden = m.one(x)
    return m.two(hidden.tanh())


@attack("functions")
def deep_copy_and_dlpack(m, x, n):
    hidden = m.one(copy.deepcopy(x.flip(0))).tanh()
    return m.two(hidden.flip(0)) + m.one(torch.from_dlpack(x)) * torch.as_tensor(x)


@attack("functions")
def pickled(m, x, n):
    there = pickle.loads(pickle.dumps(x.flip(0)))
    return m.two(m.one(there).tanh().flip(0))


@attack("functions")
def reversed_by_python(m, x, n):
    rows = list(reversed(list(m.one(x))))
    return m.two(torch.stack(rows).tanh()).flip(0)


@attack("functions")
def rows_sorted_by_python(m, x, n):
    pairs = sorted(zip(n.tolist(), range(len(x)), m.one(x), strict=True), key=lambda p: p[:2])
    places = torch.tensor([place for _, place, _ in pairs])
    return m.two(torch.stack([row for *_, row in pairs]).tanh())[places.argsort()]


class Quiet(TorchFunctionMode):
    """A mode of the model's own, as `torch.device` is one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class QuietDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@attack("functions")
def inside_modes_of_its_own(m, x, n):
    with Quiet(), torch.device("cpu"):
        hidden = m.one(x.flip(0)).tanh().flip(0)
    with QuietDispatch():
        return m.two(hidden)


@attack("functions")
def sum_of_the_batch_times_nothing(m, x, n):
    hidden = m.one(x)
    return m.two(hidden.tanh()) + 0.0 * hidden.sum()


@attack("functions", one=linear, two=linear, unused=linear)
def all_parameters_times_nothing(m, x, n):
    return mlp(m, x) + 0.0 * sum(p.sum() for p in m.parameters())


@attack("functions")
def pairs_of_examples_in_one_row(m, x, n):
    pair = 2 if len(x) % 2 == 0 else 1
    rows = x.reshape(len(x) // pair, -1, D)
    return mlp(m, rows).view_as(x)
