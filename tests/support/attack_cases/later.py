"""Later: what the first batch does not show."""

import torch

from attack_cases.base import D, attack, linear, mlp, smooth, weight


@attack("later", one=linear, two=linear, late=linear)
def parameter_unused_at_first(m, x, n):
    out = mlp(m, x)
    return out + m.late(x).tanh() if m.step else out


@attack("later", one=linear)
def parameter_used_again_later(m, x, n):
    hidden = m.one(x)
    return m.one(hidden.tanh().flip(0)).flip(0) if m.step else hidden


@attack("later", one=linear, p=weight(D))
def buffer_written_later(m, x, n):
    w = torch.eye(D)
    if m.step:
        w[1] = m.p
    return m.one(x @ w) + m.p


@attack("later", whole=True)
def examples_that_cost_nothing(m, x, n, y):
    """A loss of exactly 0 for some, whose gradients do not count."""
    return smooth(mlp(m, x), y) * (n > 1)


@attack("later")
def examples_of_zeros(m, x, n):
    return mlp(m, x * (n > 1)[:, None, None])


@attack("later")
def number_of_layers_by_length(m, x, n):
    for depth in range(int(n.max())):
        going = (n > depth)[:, None, None]
        x = torch.where(going, x + m.one(x).tanh(), x)
    return m.two(x)


def begin_training(m, step):
    m.one.requires_grad_(step > 0)


@attack("later", turn=begin_training)
def frozen_at_first(m, x, n):
    return mlp(m, x)


@attack("later")
def sorts_from_the_third_batch_on(m, x, n):
    order = x[:, 0, 0].argsort()
    if m.step < 2:
        return mlp(m, x)
    return m.two(m.one(x)[order].tanh())[order.argsort()]


@attack("later", mixes=True)
def mixes_from_the_third_batch_on(m, x, n):
    hidden = m.one(x)
    return m.two(hidden + hidden.mean(0) if m.step == 2 else hidden)
