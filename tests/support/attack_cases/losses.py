"""Losses and containers."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attack_cases.base import D, V, attack, kept, linear, mlp, smooth, weight


@attack("losses", whole=True, one=partial(nn.Linear, D, V), sizes=(8, 8))
def connectionist(m, x, n, y):
    scores = m.one(x).log_softmax(-1).transpose(0, 1)
    labels = torch.arange(2).repeat(len(x), 1) + 1
    lengths = torch.full((len(x),), 2)
    frames = n.clamp(min=4)
    return F.ctc_loss(scores, labels, frames, lengths, reduction="none") * y.square()


@attack("losses", whole=True, one=partial(nn.Linear, D, V), sizes=(8, 8))
def connectionist_with_flat_labels(m, x, n, y):
    scores = m.one(x).transpose(0, 1).log_softmax(-1)
    lengths = n.clamp(max=3)
    labels = torch.cat([torch.arange(1, int(k) + 1) for k in lengths])
    frames = torch.full((len(x),), x.shape[1])
    return F.ctc_loss(scores, labels, frames, lengths, reduction="none") * y.square()


@attack("losses", whole=True)
def cosine_of_two_views(m, x, n, y):
    return y * F.cosine_similarity(m.one(x).flatten(1), m.two(x).tanh().flatten(1))


@attack("losses", whole=True)
def triplet_of_own_parts(m, x, n, y):
    out = mlp(m, x).tanh()
    return y * F.triplet_margin_loss(out[:, 0], out[:, 1], out[:, 2], margin=9, reduction="none")


@attack("losses", whole=True)
def distances_within_an_example(m, x, n, y):
    return y * torch.cdist(m.one(x), m.two(x).tanh()).square().mean((1, 2))


@attack("losses", whole=True)
def losses_by_example_in_a_list(m, x, n, y):
    out = mlp(m, x)
    losses = [(out[i, : int(n[i])] ** 2).mean() * y[i] for i in range(len(x))]
    return torch.stack(losses)


@attack("losses", whole=True)
def losses_written_one_by_one(m, x, n, y):
    losses = torch.zeros(len(x))
    for i in reversed(range(len(x))):
        losses[i] = mlp(m, x[i, : int(n[i])]).square().mean() * y[i]
    return losses


@attack("losses", whole=True, one=linear, two=linear, noise=weight(2))
def uncertainty_weights(m, x, n, y):
    first, second = m.one(x).square().mean((1, 2)), m.two(x).sin().mean((1, 2))
    losses = torch.stack([first, second])
    return ((-m.noise).exp()[:, None] * losses + m.noise[:, None]).sum(0) * y


@attack("losses", whole=True)
def penalty_on_the_weights(m, x, n, y):
    penalty = sum(p.square().sum() for p in m.parameters())
    return smooth(mlp(m, x), y) + 0.01 * penalty


@attack("losses", whole=True, sizes=(8, 8))
def losses_of_time_first_output(m, x, n, y):
    out = mlp(m, x.transpose(0, 1))
    each = F.mse_loss(out, x.transpose(0, 1).roll(1, 0), reduction="none").mean(-1)
    return each.mean(0) * y


@attack("losses", whole=True, one=partial(nn.Linear, D, 3))
def negative_log_likelihood_of_tokens(m, x, n, y):
    labels = (n[:, None] + torch.arange(x.shape[1])) % 3
    each = F.nll_loss(m.one(x).log_softmax(-1).permute(0, 2, 1), labels, reduction="none")
    return (each * kept(x, n)).sum(1) / n


class Outputs(dict):
    """As transformers return them: a dict with attributes."""

    __getattr__ = dict.__getitem__


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": linear(), "b": linear()})

    def forward(self, inputs, *, order):
        hidden = {name: layer(inputs["x"][order]) for name, layer in self.layers.items()}
        return Outputs(hidden=(hidden["a"], [hidden["b"].tanh()]), order=order)


@attack("losses", head=Head, one=linear)
def nested_containers(m, x, n):
    out = m.head({"x": m.one(x), "n": n}, order=n.argsort(stable=True))
    first, (second,) = out.hidden
    return (first * second)[out["order"].argsort()]


@attack("losses", whole=True)
def kept_by_the_model_between_calls(m, x, n, y):
    """The model leaves its hidden states in itself, where the loss finds them."""
    m.__dict__["hidden"] = m.one(x.flip(0)).tanh()
    out = m.two(m.__dict__.pop("hidden").flip(0))
    return smooth(out, y)
