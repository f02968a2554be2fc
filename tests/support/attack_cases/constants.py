"""Constants of the model, one for each example."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attack_cases.base import D, attack, images, layer_norm, linear, weight, words, words_table


@attack("constants", one=linear, cls=weight(1, 1, D))
def class_token_expanded(m, x, n):
    return m.one(torch.cat([m.cls.expand(len(x), -1, -1), x], 1)).tanh()


@attack("constants", one=linear, cls=weight(1, 1, D))
def class_token_expanded_by_keyword(m, x, n):
    return m.one(torch.cat([m.cls.expand(size=(len(x), 1, D)), x], 1)).tanh()


@attack("constants", one=linear, cls=weight(1, 1, D))
def class_token_repeated(m, x, n):
    return m.one(torch.cat([m.cls.repeat(len(x), 1, 1), x], 1)).tanh()


@attack("constants", one=linear, cls=weight(D))
def class_token_stacked(m, x, n):
    return m.one(torch.stack([m.cls] * len(x))[:, None] * x).tanh()


@attack("constants", one=linear, cls=weight(1, D))
def class_token_concatenated(m, x, n):
    return m.one(torch.cat([m.cls] * len(x)) + x.mean(1)).tanh()


@attack("constants", one=linear, cls=weight(1, 1, D))
def class_token_tiled_and_interleaved(m, x, n):
    first = torch.tile(m.cls, (len(x), 1, 1)) + m.cls.repeat_interleave(len(x), 0).sin()
    return m.one(first * x)


@attack("constants", one=linear, cls=weight(1, D))
def class_token_times_ones(m, x, n):
    return m.one(torch.ones(len(x), 1) @ m.cls + x[:, 0]).tanh()


@attack("constants", one=linear, cls=weight(D))
def class_token_like_the_input(m, x, n):
    return m.one(torch.ones_like(x) * m.cls + torch.zeros_like(x[:, :1]).add(m.cls) * x)


@attack("constants", sizes=(8, 8), one=linear, token=weight(D))
def expanded_over_as_many_positions_as_examples(m, x, n):
    return m.one(x + m.token.expand(8, D)).tanh()


@attack("constants", sizes=(8, 8), one=linear, token=weight(1, D))
def repeated_over_as_many_positions_as_examples(m, x, n):
    return m.one(x + m.token.repeat(8, 1)).tanh()


@attack("constants", sizes=(8, 8), one=linear, place=partial(nn.Linear, 8, D))
def as_many_places_as_examples(m, x, n):
    return m.one(x + m.place(torch.eye(8))).tanh()


@attack("constants", sizes=(8, 8), one=linear, positions=partial(nn.Embedding, 8, D))
def positions_looked_up_once(m, x, n):
    return m.one(x + m.positions(torch.arange(8))).tanh()


@attack("constants", one=linear, positions=partial(nn.Embedding, 4, D))
def positions_materialised(m, x, n):
    places = torch.arange(x.shape[1]).repeat(len(x), 1)
    return m.one(x + m.positions(places)).tanh()


@attack("constants", data=words, table=words_table, positions=partial(nn.Embedding, 9, D))
def positions_counted_from_padding(m, x, n):
    """As RoBERTa has them: positions depend on the words."""
    there = x.ne(0).int()
    hidden = m.table(x)
    hidden += m.positions((there.cumsum(1) * there).long())
    return hidden.tanh()


@attack("constants", query=weight(3, D), layer=linear, one=linear)
def queries_through_a_linear_layer(m, x, n):
    queries = m.layer(m.query.unsqueeze(0).repeat(len(x), 1, 1))
    keys = m.one(x)
    return (queries @ keys.mT).softmax(-1) @ keys


@attack("constants", layer=linear, one=linear)
def constant_through_a_linear_layer(m, x, n):
    grid = torch.linspace(-1, 1, x.shape[1] * D).view(1, -1, D).repeat(len(x), 1, 1)
    return m.one(x) * m.layer(grid).tanh()


@attack("constants", norm=layer_norm, one=linear)
def constant_through_layer_norm(m, x, n):
    grid = torch.linspace(-1, 1, D).square().expand(len(x), x.shape[1], D)
    return m.one(x) * m.norm(grid)


@attack("constants", norm=partial(nn.GroupNorm, 2, D), one=linear)
def constant_through_group_norm(m, x, n):
    grid = torch.linspace(-1, 1, 3 * D).square().view(1, D, 3).repeat(len(x), 1, 1)
    return m.one(x) * m.norm(grid).mean(2)[:, None]


@attack("constants", conv=partial(nn.Conv1d, D, D, 3, padding=1), one=linear)
def constant_through_a_convolution(m, x, n):
    grid = torch.linspace(-1, 1, x.shape[1] * D).sin().view(1, D, -1).repeat(len(x), 1, 1)
    return m.one(x) * m.conv(grid).mT


@attack(
    "constants", attend=partial(nn.MultiheadAttention, D, 2, batch_first=True), query=weight(3, D)
)
def learnt_queries_attend(m, x, n):
    queries = m.query.expand(len(x), -1, -1)
    return m.attend(queries, x, x)[0]


@attack("constants", attend=partial(nn.MultiheadAttention, D, 2), one=linear)
def constant_memory_is_attended(m, x, n):
    memory = torch.linspace(-1, 1, 3 * D).view(3, 1, D).repeat(1, len(x), 1)
    return m.attend(m.one(x).transpose(0, 1), memory, memory)[0].transpose(0, 1)


@attack("constants", data=images, conv=partial(nn.Conv2d, 4, 3, 3))
def coordinates_beside_the_pixels(m, x, n):
    grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"))
    return m.conv(torch.cat([x, grid.expand(len(x), -1, -1, -1)], 1)).tanh()


@attack("constants", qk=partial(nn.Linear, D, 2 * D), table=partial(nn.Embedding, 7, 2))
def relative_positions_in_attention(m, x, n):
    q, k = m.qk(x).chunk(2, -1)
    places = torch.arange(x.shape[1])
    bias = m.table(places[:, None] - places + 3).permute(2, 0, 1)
    scores = (q @ k.mT)[:, None] + bias
    return (scores.softmax(-1) @ x[:, None]).flatten(1)


@attack("constants", base=weight(D), hyper=partial(nn.Linear, D, D * D))
def weight_made_by_another_layer(m, x, n):
    return F.linear(x, m.hyper(m.base).view(D, D), m.base).tanh()


@attack("constants", hyper=partial(nn.Linear, D, D * D))
def weight_made_by_the_example(m, x, n):
    return torch.bmm(x, m.hyper(x.mean(1)).view(-1, D, D)).tanh()


@attack("constants", norm=layer_norm, table=weight(4, D), one=linear)
def parameter_through_layer_norm(m, x, n):
    return m.one(x + m.norm(m.table)).tanh()


@attack("constants", one=linear, cell=partial(nn.Linear, D, D))
def state_of_zeros(m, x, n):
    state = torch.zeros(len(x), D)
    for step in x.unbind(1):
        state = (m.one(step) + m.cell(state)).tanh()
    return state


@attack("constants", table=words_table, one=linear)
def start_token_for_every_example(m, x, n):
    start = torch.full((len(x), 1), 3)
    return m.one(torch.cat([m.table(start), x], 1)).tanh()


@attack("constants", table=words_table, one=linear)
def no_type_given_means_zeros(m, x, n):
    types = torch.zeros(x.shape[:2], dtype=torch.long)
    return m.one(x + m.table(types)).tanh()
