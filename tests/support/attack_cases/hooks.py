"""Hooks, checkpoints, compilation, threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from microclip import Clipper

from attack_cases.base import D, attack, linear, mlp, weight


def hook_on_the_output(m):
    m.one.register_forward_hook(lambda module, args, out: out * m.scale)


@attack("hooks", setup=hook_on_the_output, one=linear, two=linear, scale=weight(D))
def hook_multiplies_the_output(m, x, n):
    return mlp(m, x)


def hooks_that_turn_the_batch_round(m):
    m.two.register_forward_pre_hook(lambda module, args: (args[0].flip(0),))
    m.two.register_forward_hook(lambda module, args, out: out.flip(0))


@attack("hooks", setup=hooks_that_turn_the_batch_round, one=linear, two=linear)
def hooks_turn_the_batch_round(m, x, n):
    return mlp(m, x)


@attack("hooks")
def hook_on_a_tensor(m, x, n):
    hidden = m.one(x)
    hidden.register_hook(lambda d: 2 * d)
    return m.two(hidden.tanh())


@attack("hooks", mixes=True)
def hook_normalises_the_gradient_of_a_batch(m, x, n):
    hidden = m.one(x)
    hidden.register_hook(lambda d: d / d.norm())
    return m.two(hidden.tanh())


def hook_on_the_module(m):
    m.two.register_full_backward_hook(lambda module, back, out: (0.5 * back[0],))


@attack("hooks", setup=hook_on_the_module, one=linear, two=linear)
def hook_on_the_backward_pass_of_a_module(m, x, n):
    return mlp(m, x)


def hook_on_the_parameter(m):
    m.one.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))


@attack("hooks", mixes=True, setup=hook_on_the_parameter, one=linear, two=linear)
def hook_on_a_parameter(m, x, n):
    return mlp(m, x)


@attack("hooks", mixes=True)
def hook_on_a_derived_weight(m, x, n):
    w = m.one.weight * 2
    w.register_hook(lambda g: g.clamp(-0.02, 0.02))
    return m.two((x @ w).tanh())


@attack("checkpoints")
def checkpoint_that_reenters(m, x, n):
    return checkpoint(lambda h: m.two(h).tanh(), m.one(x), use_reentrant=True)


@attack("checkpoints")
def checkpoint_that_does_not_reenter(m, x, n):
    return checkpoint(lambda h: mlp(m, h), x, use_reentrant=False)


@attack("checkpoints")
def checkpoint_later(m, x, n):
    if m.step == 0:
        return mlp(m, x)
    return checkpoint(lambda h: m.two(h[n.argsort()]), m.one(x), use_reentrant=False)[
        n.argsort().argsort()
    ]


@attack("checkpoints")
def saved_tensors_on_disk_or_so(m, x, n):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return mlp(m, x)


def compile_the_body(m):
    m.compiled = torch.compile(partial(mlp, m), backend="eager", dynamic=True)


@attack("checkpoints", setup=compile_the_body, one=linear, two=linear)
def compiled(m, x, n):
    return m.compiled(x)


def compile_a_sort(m):
    def body(x, n):
        order = n.argsort(stable=True)
        return m.two(m.one(x)[order].tanh())[order.argsort()]

    m.compiled = torch.compile(body, backend="eager", dynamic=True)


@attack("checkpoints", setup=compile_a_sort, one=linear, two=linear)
def compiled_with_a_sort_inside(m, x, n):
    return m.compiled(x, n)


@attack("threads")
def branches_in_threads(m, x, n):
    with ThreadPoolExecutor(2) as pool:
        left, right = pool.map(lambda layer: layer(x).tanh(), (m.one, m.two))
    return left * right


@attack("threads")
def a_thread_sorts(m, x, n):
    with ThreadPoolExecutor(1) as pool:
        ordered = pool.submit(lambda: x.flip(0)).result()
        return pool.submit(mlp(m, ordered).flip, 0).result()


@attack("threads")
def another_clipper_has_the_same_batch(m, x, n):
    """While this forward pass runs, another thread clips another model on the same tensors."""
    hidden = m.one(x).tanh()
    other = nn.Linear(D, 1)
    clipper = Clipper(other, microbatch_size=1, engine="fused")
    thread = threading.Thread(
        target=clipper.backward, args=(lambda part: other(part[0]).square().mean((1, 2)), (x, n))
    )
    thread.start()
    thread.join()
    return m.two(x) * hidden
