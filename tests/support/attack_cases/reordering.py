"""Reordering: row i is no longer example i."""

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from attack_cases.base import D, attack, mlp, smooth, weight


@attack("reordering")
def sorted_by_length(m, x, n):
    order = n.argsort(descending=True, stable=True)
    return m.two(m.one(x)[order].tanh())[order.argsort()]


@attack("reordering")
def sorted_by_value(m, x, n):
    order = x[:, 0, 0].argsort()
    out = torch.empty_like(x)
    out[order] = m.one(x[order]).tanh()
    return m.two(out)


@attack("reordering")
def torch_sort_and_gather(m, x, n):
    _, order = torch.sort(x.sum((1, 2)))
    there = order[:, None, None].expand_as(x)
    back = order.argsort()[:, None, None].expand_as(x)
    return m.two(m.one(x.gather(0, there)).tanh().gather(0, back))


@attack("reordering")
def topk_of_the_batch(m, x, n):
    order = x[:, 0, 0].topk(len(x)).indices
    hidden = m.one(x.index_select(0, order)).tanh()
    return m.two(torch.zeros_like(x).index_copy(0, order, hidden))


@attack("reordering")
def random_permutation(m, x, n):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(len(x)))
    return m.two(m.one(x)[order].tanh()).index_select(0, order.argsort())


@attack("reordering")
def flipped(m, x, n):
    return m.two(m.one(x.flip(0)).tanh().flip(0))


@attack("reordering")
def all_of_the_model_flipped(m, x, n):
    return mlp(m, x.flip(0)).flip(0)


@attack("reordering")
def flipped_by_a_negative_index(m, x, n):
    backwards = torch.arange(len(x) - 1, -1, -1)
    return m.two(m.one(x[backwards]).tanh()[backwards])


@attack("reordering")
def rolled_later(m, x, n):
    if m.step == 0:
        return mlp(m, x)
    return m.two(m.one(x.roll(2, 0)).tanh().roll(-2, 0))


@attack("reordering")
def halves_swapped(m, x, n):
    half = len(x) // 2
    hidden = m.one(torch.cat([x[half:], x[:half]])).tanh()
    return m.two(torch.cat([hidden[len(x) - half :], hidden[: len(x) - half]]))


@attack("reordering")
def every_other_example_first(m, x, n):
    hidden = m.one(torch.cat([x[::2], x[1::2]])).tanh()
    out = torch.empty_like(hidden)
    middle = (len(x) + 1) // 2
    out[::2], out[1::2] = hidden[:middle], hidden[middle:]
    return m.two(out)


@attack("reordering")
def sorted_by_python(m, x, n):
    order = sorted(range(len(x)), key=lambda i: (int(n[i]), i))
    places = sorted(range(len(x)), key=order.__getitem__)
    return m.two(m.one(x[order]).tanh()[places])


@attack("reordering", scale=weight(4, D))
def every_column_sorted_by_itself(m, x, n):
    ordered, order = x.sort(0)
    out = (ordered * m.scale).tanh() + m.scale.sum(0)
    return out.gather(0, order.argsort(0))


@attack("reordering")
def packed_sequence_into_linear_layers(m, x, n):
    packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
    done = PackedSequence(mlp(m, packed.data), *packed[1:])
    out, _ = pad_packed_sequence(done, batch_first=True, total_length=x.shape[1])
    return out


@attack("reordering", whole=True)
def losses_in_another_order(m, x, n, y):
    return smooth(mlp(m, x), y)[x[:, 0, 0].argsort()]


@attack("reordering", whole=True)
def losses_sorted_by_length(m, x, n, y):
    order = n.argsort(stable=True)
    return smooth(mlp(m, x[order]), y[order])


@attack("reordering", whole=True)
def losses_sorted_by_themselves(m, x, n, y):
    return smooth(mlp(m, x), y).sort().values
