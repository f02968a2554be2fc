"""Copies: there are more rows than examples, or others between them."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attack_cases.base import D, attack, constant, kept, linear, mlp, words, words_table


@attack("copies")
def doubled_later(m, x, n):
    if m.step == 0:
        return mlp(m, x)
    straight, mirrored = mlp(m, torch.cat([x, x.flip(1)])).chunk(2)
    return straight * mirrored


@attack("copies", mixes=True)
def doubled_with_the_neighbour(m, x, n):
    straight, other = mlp(m, torch.cat([x, x.flip(0)])).chunk(2)
    return straight * other


@attack("copies")
def siamese(m, x, n):
    one, other = mlp(m, torch.stack([x, -x])).unbind()
    return one - 2 * other


@attack("copies")
def siamese_in_one_dimension(m, x, n):
    out = mlp(m, torch.stack([x, x.sin()]).flatten(0, 1)).view(2, *x.shape)
    return out[0] * out[1]


@attack("copies")
def three_samples_of_each_side_by_side(m, x, n):
    noise = torch.arange(3.0).repeat(len(x)).view(-1, 1, 1)
    out = mlp(m, x.repeat_interleave(3, 0) * noise.cos())
    return out.view(len(x), 3, -1).logsumexp(1)


@attack("copies")
def three_rounds_of_the_batch(m, x, n):
    noise = torch.arange(3.0).repeat_interleave(len(x)).view(-1, 1, 1)
    out = mlp(m, x.repeat(3, 1, 1) * noise.cos())
    return out.view(3, len(x), -1).logsumexp(0)


@attack("copies")
def tiled(m, x, n):
    out = mlp(m, torch.tile(x, (2, 1, 1)) * torch.linspace(1, 2, x.shape[1])[:, None])
    return out[: len(x)] + out[len(x) :].square()


@attack("copies")
def expanded_and_folded(m, x, n):
    turned = x.expand(3, *x.shape) * torch.arange(1.0, 4.0).view(3, 1, 1, 1)
    return mlp(m, turned.reshape(-1, *x.shape[1:])).view(3, *x.shape).mean(0)


@attack("copies")
def as_many_copies_as_positions(m, x, n):
    rows = mlp(m, x[:, 0].repeat_interleave(n, 0)).sin()
    return torch.zeros(len(x), D).index_add(0, torch.arange(len(x)).repeat_interleave(n), rows)


@attack("copies")
def chunks_in_reverse(m, x, n):
    parts = [mlp(m, part) for part in reversed(x.split(2))]
    return torch.cat(parts[::-1])


@attack("copies")
def example_by_example(m, x, n):
    return torch.stack([mlp(m, one[:length]).mean(0) for one, length in zip(x, n, strict=True)])


@attack("copies")
def examples_last_to_first(m, x, n):
    out = torch.empty_like(x)
    for i in reversed(range(len(x))):
        out[i] = mlp(m, x[i])
    return out


@attack("copies")
def two_examples_at_a_time(m, x, n):
    out = torch.zeros_like(x)
    for i in range(0, len(x), 2):
        out[i : i + 2] += mlp(m, x[i : i + 2])
    return out


@attack("copies")
def padded_to_a_multiple(m, x, n):
    padded = F.pad(x, (0, 0, 0, 0, 0, -len(x) % 4))
    return mlp(m, padded)[: len(x)]


@attack("copies")
def a_row_of_zeros_in_front(m, x, n):
    return m.two(m.one(torch.cat([torch.zeros(1, *x.shape[1:]), x])).tanh())[1:]


@attack("copies")
def rows_of_different_kinds(m, x, n):
    rows = torch.cat([x.flatten(0, 1), x.mean(1), x[:, 0]])
    tokens, means, first = mlp(m, rows).split([x.shape[0] * x.shape[1], len(x), len(x)])
    return tokens.view_as(x) + means[:, None] * first[:, None]


@attack("copies", one=linear, two=linear, queue=constant(0.5, 3, D))
def prototypes_among_the_rows(m, x, n):
    """Parameters pass a layer together with the examples, and belong to all of them."""
    out = mlp(m, torch.cat([m.queue, x.mean(1)]))
    return out[3:] @ out[:3].T


@attack("copies")
def constant_rows_among_the_rows(m, x, n):
    queue = torch.linspace(-1, 1, 3 * D).view(3, D)
    out = mlp(m, torch.cat([x.mean(1), queue]))
    return out[: len(x)] @ out[len(x) :].T


@attack("copies")
def mixed_up_within_an_example(m, x, n):
    share = (n / x.shape[1]).view(-1, 1, 1).to(x.dtype)
    return mlp(m, share * x + (1 - share) * x.flip(1))


@attack("copies", mixes=True)
def mixed_up_with_the_neighbour(m, x, n):
    return mlp(m, 0.7 * x + 0.3 * x.roll(1, 0))


@attack("copies", data=words, table=words_table, one=linear)
def pairs_of_positions(m, x, n):
    hidden = m.table(x)
    first, second = torch.triu_indices(x.shape[1], x.shape[1], 1)
    pairs = torch.cat([hidden[:, first], hidden[:, second]])
    left, right = m.one(pairs).tanh().chunk(2)
    return left * right.exp()


@attack("copies", two=linear, adjacency=partial(nn.Linear, D, D))
def graphs_in_one_block_diagonal_matrix(m, x, n):
    edges = torch.block_diag(*(one @ one.T for one in x)).tanh()
    return m.two(edges @ m.adjacency(x.flatten(0, 1))).view_as(x)


@attack("copies")
def edges_between_nodes_of_many_graphs(m, x, n):
    """Messages along edges, whose number differs by example, added up at their targets."""
    start, T = torch.arange(len(x)).repeat_interleave(n) * x.shape[1], x.shape[1]
    source = start + kept(x, n).nonzero()[:, 1]
    target = start + (kept(x, n).nonzero()[:, 1] + 1) % T
    nodes = x.flatten(0, 1)
    messages = m.one(nodes[source] - nodes[target]).tanh()
    return m.two(nodes.index_add(0, target, messages)).view_as(x)
