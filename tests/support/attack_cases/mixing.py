"""Mixing: the loss of an example depends on the others."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attack_cases.base import D, attack, constant, kept, linear, mlp, smooth, weight


@attack("mixing", mixes=True)
def mean_of_the_batch_subtracted(m, x, n):
    hidden = m.one(x)
    return m.two(hidden - 0.5 * hidden.mean(0))


@attack("mixing", mixes=True)
def mean_of_the_detached_batch_subtracted(m, x, n):
    hidden = m.one(x)
    return m.two(hidden - 0.5 * hidden.detach().mean(0))


@attack("mixing", mixes=True, whole=True)
def mean_loss_as_a_baseline(m, x, n, y):
    losses = smooth(mlp(m, x), y)
    return losses * (1 + losses.detach().mean()).square()


@attack("mixing", mixes=True, whole=True)
def contrastive(m, x, n, y):
    z = F.normalize(mlp(m, x).mean(1), dim=-1)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="none") + smooth(z, y)


@attack("mixing", mixes=True, one=linear, w=constant(1.0, D), b=weight(D))
def batch_norm_as_a_function(m, x, n):
    hidden = m.one(x).sin().mT
    return torch.batch_norm(hidden, m.w, m.b, None, None, True, 0.1, 1e-2, False)


@attack("mixing", mixes=True, one=linear, norm=partial(nn.BatchNorm1d, D, eps=1e-2))
def batch_norm_as_a_module(m, x, n):
    return m.norm(m.one(x).sin().mT)


@attack("mixing", one=linear, norm=lambda: nn.BatchNorm1d(D).eval())
def batch_norm_at_rest(m, x, n):
    return m.norm(m.one(x).mT)


@attack("mixing", mixes=True, one=linear, w=constant(1.0, D))
def batch_norm_by_hand(m, x, n):
    hidden = m.one(x).sin()
    mean, square = hidden.mean((0, 1)), hidden.square().mean((0, 1))
    return (hidden - mean) / (square - mean.square() + 0.1).sqrt() * m.w


@attack("mixing", mixes=True)
def divided_by_the_largest(m, x, n):
    return m.two(m.one(x) / x.abs().amax())


@attack("mixing", mixes=True)
def divided_by_the_largest_as_a_number(m, x, n):
    return m.two(m.one(x) / x.abs().max().item())


@attack("mixing", mixes=True)
def scaled_by_the_longest(m, x, n):
    return m.two(m.one(x).tanh()) * int(n.max())


@attack("mixing", mixes=True)
def divided_by_the_number_of_examples(m, x, n):
    return m.two(m.one(x).tanh()) / len(x)


@attack("mixing", mixes=True, whole=True)
def mean_over_the_tokens_of_the_batch(m, x, n, y):
    each = mlp(m, x).square().mean(2) * kept(x, n)
    return (each.sum(1) + 0.1 * y.sin()) * len(x) / n.sum()


@attack("mixing", mixes=True)
def attention_over_examples(m, x, n):
    hidden = m.one(x).transpose(0, 1)
    return ((m.two(hidden) @ hidden.mT).softmax(-1) @ hidden).transpose(0, 1)


@attack("mixing", mixes=True)
def softmax_over_examples(m, x, n):
    hidden = m.one(x)
    return m.two(x) * hidden.softmax(0) + hidden


@attack("mixing", mixes=True)
def running_sum_over_examples(m, x, n):
    return m.two(m.one(x).tanh().cumsum(0))


@attack("mixing", mixes=True)
def convolution_over_one_long_sequence(m, x, n):
    long = m.one(x).reshape(1, -1, D)
    return m.two((long + long.roll(1, 1)).view_as(x).sin())


@attack("mixing", mixes=True)
def sorted_values_are_the_output(m, x, n):
    return mlp(m, x).sort(0).values


@attack("mixing", mixes=True)
def branch_by_the_whole_batch(m, x, n):
    return m.one(x) if n.sum() > len(n) * 2.5 else m.two(x)


@attack("mixing", mixes=True)
def padding_to_the_longest_counts(m, x, n):
    """A mean over positions, padding included: it depends on who else is in the batch."""
    return mlp(m, x[:, : int(n.max())]).mean(1)


@attack("mixing", mixes=True)
def norm_of_the_batch(m, x, n):
    hidden = m.one(x)
    return m.two(hidden / hidden.norm())


@attack("mixing", mixes=True, whole=True)
def loss_of_the_hardest_half(m, x, n, y):
    losses = smooth(mlp(m, x), y)
    return losses * (losses >= losses.median())


@attack("mixing", mixes=True, whole=True)
def losses_add_up_to_their_mean(m, x, n, y):
    """The mean expanded: every example says that it owns all of them."""
    return smooth(mlp(m, x), y).mean().expand(len(x))


@attack("mixing", one=linear, norm=partial(nn.InstanceNorm1d, D, affine=True))
def normalised_within_examples(m, x, n):
    return m.norm(m.one(x).mT.square())


@attack("mixing", mixes=True)
def neighbours_by_an_index_of_the_data(m, x, n):
    return m.two(m.one(x)[n % len(x)])


@attack("mixing", mixes=True)
def sorted_and_never_put_back(m, x, n):
    return m.two(m.one(x)[x[:, 0, 0].argsort()]) * x


@attack("mixing", mixes=True)
def covariance_of_the_batch(m, x, n):
    rows = m.one(x).flatten(0, 1)
    return m.two(x) @ (rows.T @ rows / len(rows))


@attack("mixing", mixes=True)
def fourier_transform_over_examples(m, x, n):
    return m.two(torch.fft.fft(m.one(x), dim=0).real)
