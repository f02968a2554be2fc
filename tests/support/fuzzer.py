"""Random networks of layers and of operations that move rows, to test the single pass with.

A program is made from one number: layers that work on features (linear layers, norms, scales,
look-ups), layers that work along an example (attention, convolution, positions), and detours,
inside of which the rows lie differently: sorted, permuted, flattened, unpadded, repeated, cut,
routed to experts. After a detour they are put back. A program runs on any number of examples, and
an example's loss does not depend on the others, unless the program `mixes`, as few do.

    python tests/support/fuzzer.py --first 0 --count 1000 --engines fused auto --sizes 1 3 B
    python tests/support/fuzzer.py --first 0 --count 200 --drift        six different batches, auto
    python tests/support/fuzzer.py --show 17                            what program 17 is made of

What a module gets is a `Flow`: features (..., D), and beside them a `key` (..., 3) that goes
through the same detours: a number that orders and routes are drawn from, whether the position is
within its example's length, and the example's number. How the leading dimensions have come about
is known when a program is made, as groups of axes: (("B",), ("T",)) is where it begins,
(("T",), ("B",)) is time first, (("T", "B"),) is that in one dimension, and "R" stands for rows in
any order.
"""

import argparse
import itertools
import json
import logging
import random
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip.microbatches import cut

from reference import microbatch_gradients, weighted_sum
from verdicts import default_dtype, is_bad, kind, summary, verdict

DEPTH = 3  # of detours within detours
MIXES = 0.03  # of all programs
WORDS = 6  # that are looked up
BATCHES = 6  # of a drifting program


class Flow(NamedTuple):
    """Features of some rows, and what is known of them."""

    h: Tensor
    key: Tensor
    examples: int

    @property
    def number(self):
        return self.key[..., 0]

    @property
    def kept(self):
        return self.key[..., 1] > 0

    @property
    def owner(self):
        return self.key[..., 2].long()


class Block(nn.ModuleList):
    """Modules one after the other; each gives the features anew, in the shape they had."""

    def forward(self, flow):
        for module in self:
            flow = flow._replace(h=module(flow))
        return flow.h


class Maker:
    """Draws a program."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.B = self.draw.randint(4, 7)
        self.T = self.draw.choice([self.B, self.draw.randint(2, 6)])
        self.D = self.draw.choice([self.B, *[self.draw.randint(3, 5)] * 2])
        self.K = self.draw.choice([2, 2, 3])
        self.length = self.draw.choice([4, 4, 4, 6])
        self.mixes = self.draw.random() < MIXES
        self.linears = []

    def maybe(self, chance):
        return self.draw.random() < chance

    def block(self, groups, depth=0, least=1):
        """Make a few modules for rows that lie like this."""
        count = self.draw.randint(least, max(least, self.length - depth))
        return Block([self.module(groups, depth) for _ in range(count)])

    def module(self, groups, depth):
        while True:
            detour = depth < DEPTH and self.maybe(0.45)
            table = DETOURS if detour else LAYERS
            make = self.draw.choices(list(table), list(table.values()))[0]
            made = make(self, groups, depth + 1) if detour else make(self, groups)
            if made is not None:
                return made

    def weight(self, *shape):
        return nn.Parameter(torch.randn(shape) / max(1, shape[-1] if shape else 1) ** 0.5)

    def linear(self):
        """A new linear layer, or one that is used elsewhere, too."""
        if not self.linears or self.maybe(0.85):
            self.linears.append(nn.Linear(self.D, self.D))
        return self.draw.choice(self.linears)


# How rows lie


def has_rows(groups):
    """Whether there are rows of several examples."""
    return any(name in ("B", "R") for group in groups for name in group)


def row_places(groups):
    return [i for i, group in enumerate(groups) if any(name in ("B", "R") for name in group)]


def time_place(groups):
    """Where an example's positions have a dimension of their own, or None."""
    return groups.index(("T",)) if ("T",) in groups else None


def shape_of(groups, key, sizes, examples):
    """Sizes of the groups' axes; "R" is as long as it is, and "S3" is three long."""
    named = {**sizes, "B": examples}
    return [
        [key.shape[i]] if "R" in group else [named.get(n) or int(n[1:]) for n in group]
        for i, group in enumerate(groups)
    ]


def along(order, like, dim):
    """An order along one dimension, as gather wants it."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return order.view(shape).expand_as(like)


def tilted(t, dim):
    """Make equal rows differ: rounding would decide which of them is the largest."""
    shape = [1] * t.dim()
    shape[dim] = -1
    return t * torch.linspace(1, 1.3, t.shape[dim]).view(shape)


# Layers for features, whatever the rows


class Linear(nn.Module):
    """x W^T + b, in one of many spellings."""

    def __init__(self, layer, spelling):
        super().__init__()
        self.layer, self.spelling = layer, spelling

    def forward(self, flow):
        return LINEAR[self.spelling](flow.h, self.layer, self.layer.weight, self.layer.bias)

    def extra_repr(self):
        return self.spelling


LINEAR = {
    "module": lambda h, layer, w, b: layer(h),
    "function": lambda h, layer, w, b: F.linear(h, w, b),
    "keywords": lambda h, layer, w, b: F.linear(input=h, bias=b, weight=w),
    "matmul": lambda h, layer, w, b: h @ w.T + b,
    "matmul by keyword": lambda h, layer, w, b: torch.add(torch.matmul(h, other=w.mT), other=b),
    "einsum": lambda h, layer, w, b: torch.einsum("...d,ed->...e", h, w) + b,
    "tensordot": lambda h, layer, w, b: torch.tensordot(h, w, ([-1], [1])) + b,
    "addmm": lambda h, layer, w, b: torch.addmm(b, h.flatten(0, -2), w.T).view(h.shape),
    "from the left": lambda h, layer, w, b: (w @ h.flatten(0, -2).T).T.view(h.shape) + b,
    "straight through": lambda h, layer, w, b: F.linear(h, w + (w.round() - w).detach(), b),
    "in place": lambda h, layer, w, b: F.linear(h, w).add_(b),
}


def make_linear(maker, groups):
    return Linear(maker.linear(), maker.draw.choice(list(LINEAR)))


class Perceptron(nn.Module):
    def __init__(self, D):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)

    def forward(self, flow):
        return flow.h + self.down(F.gelu(self.up(flow.h)))


def make_perceptron(maker, groups):
    return Perceptron(maker.D)


class Norm(nn.Module):
    """A norm over features; the last one takes all rows for a batch."""

    def __init__(self, D, name):
        super().__init__()
        self.name = name
        if name == "layer":
            self.norm = nn.LayerNorm(D)
        elif name == "rms":
            self.norm = nn.RMSNorm(D)
        else:
            self.norm = nn.GroupNorm(1, D)

    def forward(self, flow):
        if self.name != "group":
            return self.norm(flow.h)
        rows = flow.h.flatten(0, -2)
        return self.norm(rows[..., None]).view(flow.h.shape) if len(rows) else flow.h


def make_norm(maker, groups):
    return Norm(maker.D, maker.draw.choice(["layer", "rms", "group"]))


class Elementwise(nn.Module):
    """A parameter that meets every element."""

    def __init__(self, parameter, spelling):
        super().__init__()
        self.p, self.spelling = parameter, spelling

    def forward(self, flow):
        return ELEMENTWISE[self.spelling](flow.h, self.p, flow)

    def extra_repr(self):
        return f"{self.spelling}, {tuple(self.p.shape)}"


def add_in_place(h, p, flow):
    h = h * 1.1
    h += p
    return h


def scale_kept_rows_in_place(h, p, flow):
    h = h.clone()
    h[flow.kept] *= p
    return h


def write_into_other_rows(h, p, flow):
    h = h.clone()
    h[~flow.kept] = p
    return h


def write_diagonal(h, p, flow):
    w = torch.zeros(h.shape[-1], h.shape[-1])
    w.diagonal().copy_(p.expand(h.shape[-1]))
    return h @ w + h


ELEMENTWISE = {
    "plus": lambda h, p, flow: h + p,
    "from a number": lambda h, p, flow: 1.2 * p - h,
    "times": lambda h, p, flow: p * h,
    "one plus": lambda h, p, flow: h * (1 + p.tanh()),
    "add": lambda h, p, flow: torch.add(h, p, alpha=0.5),
    "addcmul": lambda h, p, flow: torch.addcmul(h, h.sin(), p),
    "lerp": lambda h, p, flow: torch.lerp(h, p.expand_as(h), 0.3),
    "where": lambda h, p, flow: torch.where(h > 0, h, h * p.sigmoid()),
    "kept or not": lambda h, p, flow: torch.where(flow.kept[..., None], h + p, h),
    "expanded": lambda h, p, flow: h * p.expand(h.shape).cos(),
    "like": lambda h, p, flow: h + torch.zeros_like(h).add(p),
    "in place": add_in_place,
    "kept rows in place": scale_kept_rows_in_place,
    "written into rows": write_into_other_rows,
    "on a diagonal": write_diagonal,
}


def make_elementwise(maker, groups):
    shape = () if maker.maybe(0.25) else (maker.D,)
    return Elementwise(maker.weight(*shape), maker.draw.choice(list(ELEMENTWISE)))


class LookUp(nn.Module):
    """A line of a table for each row, chosen by its number."""

    def __init__(self, table, spelling):
        super().__init__()
        self.table, self.spelling = table, spelling

    def forward(self, flow):
        index = (flow.number * 5).long() % WORDS
        return flow.h + LOOK_UP[self.spelling](self.table, index)

    def extra_repr(self):
        return self.spelling


LOOK_UP = {
    "embedding": lambda table, index: F.embedding(index, table),
    "index": lambda table, index: table[index],
    "one hot": lambda table, index: F.one_hot(index, WORDS).to(table.dtype) @ table,
    "index_select": lambda table, index: table.index_select(0, index.flatten()).view(
        *index.shape, table.shape[1]
    ),
    "gather": lambda table, index: table.gather(
        0, index.reshape(-1, 1).expand(-1, table.shape[1])
    ).view(*index.shape, table.shape[1]),
}


def make_look_up(maker, groups):
    return LookUp(maker.weight(WORDS, maker.D), maker.draw.choice(list(LOOK_UP)))


class Activation(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, flow):
        return self.function(flow.h)

    def extra_repr(self):
        return self.function.__name__


def make_activation(maker, groups):
    functions = [torch.tanh, F.gelu, torch.sin, F.softplus, F.leaky_relu, torch.atan]
    return Activation(maker.draw.choice(functions))


class Gate(nn.Module):
    """Rows times a gate of their own, which gradients may or may not go through."""

    def __init__(self, layer, spelling):
        super().__init__()
        self.layer, self.spelling = layer, spelling

    def forward(self, flow):
        gate = self.layer(flow.h).sigmoid()
        if self.spelling == "detached":
            gate = gate.detach()
        elif self.spelling == "no_grad":
            with torch.no_grad():
                gate = self.layer(flow.h.cos()).sigmoid()
        return flow.h * gate

    def extra_repr(self):
        return self.spelling


def make_gate(maker, groups):
    return Gate(maker.linear(), maker.draw.choice(["plain", "plain", "detached", "no_grad"]))


class Constant(nn.Module):
    """A constant, one copy for each row, through a layer of the model."""

    def __init__(self, layer, D, spelling):
        super().__init__()
        self.layer, self.spelling = layer, spelling
        self.constant = torch.linspace(-1, 1, D).square()

    def forward(self, flow):
        made = self.constant.expand(flow.h.shape)
        if self.spelling == "repeated":
            made = self.constant.repeat(*flow.h.shape[:-1], 1)
        elif self.spelling == "ones":
            made = torch.ones_like(flow.h) * self.constant
        return flow.h * (1 + self.layer(made).tanh())

    def extra_repr(self):
        return self.spelling


def make_constant(maker, groups):
    layer = maker.draw.choice([maker.linear(), nn.LayerNorm(maker.D)])
    return Constant(layer, maker.D, maker.draw.choice(["expanded", "repeated", "ones"]))


class Prototypes(nn.Module):
    """Rows of parameters that go through a layer together with all others."""

    def __init__(self, layer, rows):
        super().__init__()
        self.layer, self.rows = layer, rows

    def forward(self, flow):
        rows = flow.h.flatten(0, -2)
        both = self.layer(torch.cat([rows, self.rows])).tanh()
        out, prototypes = both.split([len(rows), len(self.rows)])
        return (out @ prototypes.T @ prototypes).view(flow.h.shape) + flow.h


def make_prototypes(maker, groups):
    return Prototypes(maker.linear(), maker.weight(3, maker.D))


# Layers along an example


class Positions(nn.Module):
    """A parameter for each position, wherever the positions lie."""

    def __init__(self, table, place, spelling):
        super().__init__()
        self.table, self.place, self.spelling = table, place, spelling

    def forward(self, flow):
        T, dims = len(self.table), flow.h.dim()
        shape = [1] * (dims - 1) + [flow.h.shape[-1]]
        shape[self.place] = T
        if self.spelling == "broadcast":
            return flow.h + self.table.view(shape)
        places = torch.arange(T).view(shape[:-1]).expand(flow.h.shape[:-1])
        if self.spelling == "materialised":
            places = places.contiguous()
        if self.spelling == "in place":
            h = flow.h.clone()
            h += F.embedding(places, self.table)
            return h
        return flow.h + F.embedding(places, self.table)

    def extra_repr(self):
        return self.spelling


def make_positions(maker, groups):
    place = time_place(groups)
    if place is None:
        return None
    spellings = ["broadcast", "expanded", "materialised", "in place"]
    return Positions(maker.weight(maker.T, maker.D), place, maker.draw.choice(spellings))


class Along(nn.Module):
    """A function of (batch, positions, features), for positions that lie anywhere."""

    def __init__(self, place, function):
        super().__init__()
        self.place, self.function = place, function

    def forward(self, flow):
        moved = flow.h.movedim(self.place, -2)
        kept = flow.kept.movedim(self.place, -1)
        batch = moved.reshape(-1, *moved.shape[-2:])
        out = self.function(batch, kept.reshape(batch.shape[:2]))
        return flow.h + out.reshape(moved.shape).movedim(-2, self.place)


class Attention(nn.Module):
    """Attention by hand."""

    def __init__(self, D, masked):
        super().__init__()
        self.qkv, self.masked = nn.Linear(D, 3 * D), masked

    def forward(self, h, kept):
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = q @ k.mT / h.shape[-1] ** 0.5
        if self.masked:
            scores = scores.masked_fill(~kept[:, None], -9.0)
        return scores.softmax(-1) @ v


class ModuleAttention(nn.Module):
    def __init__(self, D, batch_first):
        super().__init__()
        self.attend = nn.MultiheadAttention(D, 1, batch_first=batch_first)

    def forward(self, h, kept):
        if self.attend.batch_first:
            return self.attend(h, h, h, need_weights=False)[0]
        h = h.transpose(0, 1)
        return self.attend(h, h, h)[0].transpose(0, 1)


class Convolution(nn.Module):
    def __init__(self, D, groups):
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1, groups=groups)

    def forward(self, h, kept):
        return self.conv(h.mT).mT


class Recurrence(nn.Module):
    def __init__(self, D):
        super().__init__()
        self.cell = nn.GRU(D, D, batch_first=True)

    def forward(self, h, kept):
        return self.cell(h)[0]


class MixedPositions(nn.Module):
    """A weight from positions to positions."""

    def __init__(self, T):
        super().__init__()
        self.layer = nn.Linear(T, T)

    def forward(self, h, kept):
        return self.layer(h.mT).mT


class Reduced(nn.Module):
    """Something of the whole example, given back to each of its positions."""

    def __init__(self, layer, how):
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, h, kept):
        if self.how == "kept":
            weights = kept.to(h.dtype)[..., None]
            summed = (h * weights).sum(1) / (weights.sum(1) + 1)
        else:
            summed = REDUCE[self.how](h)
        return self.layer(summed)[:, None].expand_as(h)

    def extra_repr(self):
        return self.how


REDUCE = {
    "mean": lambda h: h.mean(1),
    "max": lambda h: tilted(h, 1).amax(1),
    "logsumexp": lambda h: h.logsumexp(1),
    "last": lambda h: h[:, -1],
}


class Shifted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h, kept):
        return self.function(h)


SHIFT = [
    lambda h: h.roll(1, 1),
    lambda h: h.flip(1),
    lambda h: h.cumsum(1),
    lambda h: h.softmax(1),
    lambda h: torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1),
    lambda h: tilted(h, 1).sort(1).values,
]


def make_along(maker, groups):
    place = time_place(groups)
    if place is None:
        return None
    D = maker.D
    makes = {
        lambda: Attention(D, maker.maybe(0.5)): 4,
        lambda: ModuleAttention(D, maker.maybe(0.5)): 2,
        lambda: Convolution(D, maker.draw.choice([1, D])): 3,
        lambda: MixedPositions(maker.T): 1,
        lambda: Reduced(maker.linear(), maker.draw.choice([*REDUCE, "kept"])): 3,
        lambda: Shifted(maker.draw.choice(SHIFT)): 3,
        lambda: Recurrence(D): 0.3,
    }
    return Along(place, maker.draw.choices(list(makes), list(makes.values()))[0]())


class ByOwner(nn.Module):
    """Rows of an example added up, wherever they are, and given back to each of them."""

    def __init__(self, layer, spelling):
        super().__init__()
        self.layer, self.spelling = layer, spelling

    def forward(self, flow):
        rows, owner = flow.h.flatten(0, -2), flow.owner.flatten()
        total = BY_OWNER[self.spelling](rows, owner, flow.examples)
        return flow.h + self.layer(total).tanh()[owner].view(flow.h.shape)

    def extra_repr(self):
        return self.spelling


def attend_within_owners(rows, owner, examples):
    scores = (rows @ rows.T).masked_fill(owner[:, None] != owner, -torch.inf)
    return torch.zeros(examples, rows.shape[1]).index_add(0, owner, scores.softmax(-1) @ rows)


BY_OWNER = {
    "index_add": lambda rows, owner, examples: torch.zeros(examples, rows.shape[1]).index_add(
        0, owner, rows
    ),
    "scatter_add": lambda rows, owner, examples: torch.zeros(examples, rows.shape[1]).scatter_add(
        0, owner[:, None].expand_as(rows), rows
    ),
    "index_put": lambda rows, owner, examples: torch.zeros(examples, rows.shape[1]).index_put(
        (owner,), rows, accumulate=True
    ),
    "one hot": lambda rows, owner, examples: F.one_hot(owner, examples).to(rows.dtype).T @ rows,
    "attention": attend_within_owners,
}


def make_by_owner(maker, groups):
    if not has_rows(groups):
        return None
    return ByOwner(maker.linear(), maker.draw.choice(list(BY_OWNER)))


LAYERS = {
    make_linear: 5,
    make_perceptron: 1,
    make_norm: 2,
    make_elementwise: 4,
    make_look_up: 2,
    make_activation: 2,
    make_gate: 1.5,
    make_constant: 0.7,
    make_prototypes: 0.5,
    make_positions: 2,
    make_along: 4,
    make_by_owner: 0.7,
}


# Detours: inside, rows lie in another way


class Permuted(nn.Module):
    """Dimensions in another order."""

    def __init__(self, inner, order, spelling):
        super().__init__()
        self.inner, self.order, self.spelling = inner, order, spelling
        self.back = sorted(range(len(order)), key=order.__getitem__)

    def forward(self, flow):
        last = len(self.order)
        h, key = (t.permute(*self.order, last) for t in (flow.h, flow.key))
        if self.spelling == "contiguous":
            h = h.contiguous()
        elif self.spelling == "transpose" and self.order == [1, 0]:
            h = flow.h.transpose(0, 1)
        out = self.inner(flow._replace(h=h, key=key))
        return out.permute(*self.back, last)

    def extra_repr(self):
        return f"{self.order}, {self.spelling}"


def make_permuted(maker, groups, depth):
    if len(groups) < 2:
        return None
    order = list(range(len(groups)))
    while order == sorted(order):
        maker.draw.shuffle(order)
    inner = maker.block(tuple(groups[i] for i in order), depth)
    return Permuted(inner, order, maker.draw.choice(["permute", "contiguous", "transpose"]))


class Merged(nn.Module):
    """Two neighbouring dimensions in one."""

    def __init__(self, inner, place, spelling):
        super().__init__()
        self.inner, self.place, self.spelling = inner, place, spelling

    def forward(self, flow):
        i, shape = self.place, flow.h.shape
        key = flow.key.flatten(i, i + 1)
        if self.spelling == "flatten":
            h = flow.h.flatten(i, i + 1)
        else:
            h = flow.h.reshape(*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
        out = self.inner(flow._replace(h=h, key=key))
        if self.spelling == "flatten":
            return out.unflatten(i, shape[i : i + 2])
        return out.reshape(shape)

    def extra_repr(self):
        return f"{self.place}, {self.spelling}"


def make_merged(maker, groups, depth):
    if len(groups) < 2:
        return None
    i = maker.draw.randrange(len(groups) - 1)
    merged = (*groups[:i], groups[i] + groups[i + 1], *groups[i + 2 :])
    if "R" in merged[i]:
        merged = (*groups[:i], ("R",), *groups[i + 2 :])
    return Merged(maker.block(merged, depth), i, maker.draw.choice(["flatten", "reshape"]))


class Split(nn.Module):
    """A dimension taken apart into its axes again."""

    def __init__(self, inner, groups, place, sizes):
        super().__init__()
        self.inner, self.groups, self.place, self.sizes = inner, groups, place, sizes

    def forward(self, flow):
        shape = shape_of(self.groups, flow.key, self.sizes, flow.examples)[self.place]
        h, key = (t.unflatten(self.place, shape) for t in (flow.h, flow.key))
        out = self.inner(flow._replace(h=h, key=key))
        return out.flatten(self.place, self.place + len(shape) - 1)


def make_split(maker, groups, depth):
    places = [i for i, group in enumerate(groups) if len(group) > 1]
    if not places:
        return None
    i = maker.draw.choice(places)
    apart = (*groups[:i], *((name,) for name in groups[i]), *groups[i + 1 :])
    sizes = {"T": maker.T, "K": maker.K}
    return Split(maker.block(apart, depth), groups, i, sizes)


class Reordered(nn.Module):
    """Rows in an order of the data's making."""

    def __init__(self, inner, place, order, spelling, back):
        super().__init__()
        self.inner, self.place, self.order = inner, place, order
        self.spelling, self.back = spelling, back

    def forward(self, flow):
        dim = self.place
        order = ORDERS[self.order](flow, dim)
        h = REORDER[self.spelling](flow.h, order, dim)
        key = flow.key.index_select(dim, order)
        out = self.inner(flow._replace(h=h, key=key))
        return RESTORE[self.back](out, order, dim)

    def extra_repr(self):
        return f"{self.place}, {self.order}, {self.spelling}, {self.back}"


def one_for_each(t, dim):
    """Add up over all dimensions but one."""
    others = [i for i in range(t.dim()) if i != dim]
    return t.sum(others) if others else t


ORDERS = {
    "by number": lambda flow, dim: one_for_each(flow.number, dim).argsort(),
    "longest first": lambda flow, dim: one_for_each(flow.kept.int(), dim).argsort(
        descending=True, stable=True
    ),
    "by features": lambda flow, dim: (
        one_for_each(flow.h.detach().sum(-1), dim).sort(stable=True).indices
    ),
    "backwards": lambda flow, dim: torch.arange(flow.h.shape[dim]).flip(0),
    "rolled": lambda flow, dim: torch.arange(flow.h.shape[dim]).roll(1),
    "python": lambda flow, dim: torch.tensor(
        sorted(range(flow.h.shape[dim]), key=one_for_each(flow.number, dim).tolist().__getitem__),
        dtype=torch.long,
    ),
}

REORDER = {
    "index_select": lambda t, order, dim: t.index_select(dim, order),
    "index": lambda t, order, dim: t[(slice(None),) * dim + (order,)],
    "gather": lambda t, order, dim: t.gather(dim, along(order, t, dim)),
    "take_along_dim": lambda t, order, dim: torch.take_along_dim(t, along(order, t, dim), dim),
    "list": lambda t, order, dim: t.movedim(dim, 0)[order.tolist()].movedim(0, dim),
    "unbound": lambda t, order, dim: (
        torch.stack([t.unbind(dim)[i] for i in order.tolist()], dim) if len(order) else t
    ),
}


def assign_back(t, order, dim):
    out = torch.empty_like(t)
    out[(slice(None),) * dim + (order,)] = t
    return out


RESTORE = {
    "inverse": lambda t, order, dim: t.index_select(dim, order.argsort()),
    "inverse index": lambda t, order, dim: t[(slice(None),) * dim + (order.argsort(),)],
    "index_copy": lambda t, order, dim: torch.zeros_like(t).index_copy(dim, order, t),
    "index_add": lambda t, order, dim: torch.zeros_like(t).index_add(dim, order, t),
    "scatter": lambda t, order, dim: torch.zeros_like(t).scatter(dim, along(order, t, dim), t),
    "gather": lambda t, order, dim: t.gather(dim, along(order.argsort(), t, dim)),
    "assigned": assign_back,
}


def make_reordered(maker, groups, depth):
    places = row_places(groups)
    if not places:
        return None
    i = maker.draw.choice(places)
    inner = maker.block((*groups[:i], ("R",), *groups[i + 1 :]), depth)
    how = (maker.draw.choice(list(table)) for table in (ORDERS, REORDER, RESTORE))
    return Reordered(inner, i, *how)


class Flipped(nn.Module):
    """Turned round, or rolled, by the functions that are there for it."""

    def __init__(self, inner, place, spelling):
        super().__init__()
        self.inner, self.place, self.spelling = inner, place, spelling

    def forward(self, flow):
        there, back = FLIP[self.spelling]
        h, key = (there(t, self.place) for t in (flow.h, flow.key))
        return back(self.inner(flow._replace(h=h, key=key)), self.place)

    def extra_repr(self):
        return f"{self.place}, {self.spelling}"


def exchange_halves(t, dim):
    half = t.shape[dim] // 2
    first, second = t.split([half, t.shape[dim] - half], dim)
    return torch.cat([second, first], dim)


def exchange_halves_back(t, dim):
    half = t.shape[dim] // 2
    second, first = t.split([t.shape[dim] - half, half], dim)
    return torch.cat([first, second], dim)


FLIP = {
    "flip": (lambda t, dim: t.flip(dim), lambda t, dim: t.flip(dim)),
    "roll": (lambda t, dim: t.roll(2, dim), lambda t, dim: t.roll(-2, dim)),
    "halves": (exchange_halves, exchange_halves_back),
}


def make_flipped(maker, groups, depth):
    i = maker.draw.randrange(len(groups))
    name = ("T",) if groups[i] == ("T",) else ("R",)
    if name == ("R",) and i not in row_places(groups):
        return None
    inner = maker.block((*groups[:i], name, *groups[i + 1 :]), depth)
    return Flipped(inner, i, maker.draw.choice(list(FLIP)))


class Selected(nn.Module):
    """Some rows only, each example's own; others are left as they are."""

    def __init__(self, inner, which, spelling, back):
        super().__init__()
        self.inner, self.which, self.spelling, self.back = inner, which, spelling, back

    def forward(self, flow):
        mask = WHICH[self.which](flow)
        h = SELECT[self.spelling](flow.h, mask)
        out = self.inner(flow._replace(h=h, key=flow.key[mask]))
        return PUT_BACK[self.back](flow.h, mask, out)

    def extra_repr(self):
        return f"{self.which}, {self.spelling}, {self.back}"


WHICH = {
    "kept": lambda flow: flow.kept,
    "positive": lambda flow: flow.number > 0,
    "either": lambda flow: flow.kept | (flow.number > 0.5),
    "features": lambda flow: flow.h.detach()[..., 0] > flow.number,
}

SELECT = {
    "mask": lambda h, mask: h[mask],
    "masked_select": lambda h, mask: h.masked_select(mask[..., None]).view(-1, h.shape[-1]),
    "nonzero": lambda h, mask: h[mask.nonzero(as_tuple=True)],
    "index_select": lambda h, mask: h.flatten(0, -2).index_select(
        0, mask.flatten().nonzero().squeeze(1)
    ),
    "gather": lambda h, mask: h.flatten(0, -2).gather(
        0, mask.flatten().nonzero().expand(-1, h.shape[-1])
    ),
}


def places_of(mask):
    return mask.flatten().nonzero().squeeze(1)


def put_by_mask(h, mask, rows):
    out = h.clone()
    out[mask] = rows
    return out


def put_in_place(h, mask, rows):
    out = torch.zeros_like(h)
    out[mask] += rows
    return out + h


PUT_BACK = {
    "mask": put_by_mask,
    "in place": put_in_place,
    "masked_scatter": lambda h, mask, rows: h.masked_scatter(mask[..., None], rows),
    "index_put": lambda h, mask, rows: h.index_put(mask.nonzero(as_tuple=True), rows),
    "index_copy": lambda h, mask, rows: (
        h.flatten(0, -2).index_copy(0, places_of(mask), rows).view(h.shape)
    ),
    "index_add": lambda h, mask, rows: (
        h.flatten(0, -2).index_add(0, places_of(mask), rows).view(h.shape)
    ),
    "scatter": lambda h, mask, rows: (
        h.flatten(0, -2)
        .scatter(0, places_of(mask)[:, None].expand(-1, h.shape[-1]), rows)
        .view(h.shape)
    ),
}


def make_selected(maker, groups, depth):
    if not has_rows(groups):
        return None
    inner = maker.block((("R",),), depth)
    how = (maker.draw.choice(list(table)) for table in (WHICH, SELECT, PUT_BACK))
    return Selected(inner, *how)


class Routed(nn.Module):
    """Rows go to different experts."""

    def __init__(self, experts, spelling):
        super().__init__()
        self.experts, self.spelling = nn.ModuleList(experts), spelling

    def forward(self, flow):
        rows, key = flow.h.flatten(0, -2), flow.key.flatten(0, -2)
        to = (key[:, 0] * 3).floor().long() % len(self.experts)
        run = [partial(self.run, expert, flow.examples) for expert in self.experts]
        return ROUTES[self.spelling](rows, key, to, run).view(flow.h.shape)

    @staticmethod
    def run(expert, examples, rows, key):
        return expert(Flow(rows, key, examples))

    def extra_repr(self):
        return self.spelling


def route_by_mask(rows, key, to, experts):
    out = torch.zeros_like(rows)
    for i, expert in enumerate(experts):
        out[to == i] = expert(rows[to == i], key[to == i])
    return out


def route_by_index_add(rows, key, to, experts):
    out = torch.zeros_like(rows)
    for i in to.unique().tolist():
        (chosen,) = torch.where(to == i)
        out.index_add_(0, chosen, experts[i](rows[chosen], key[chosen]))
    return out


def route_by_sorting(rows, key, to, experts):
    order = to.argsort(stable=True)
    counts = to.bincount(minlength=len(experts)).tolist()
    parts = zip(experts, rows[order].split(counts), key[order].split(counts), strict=True)
    return torch.cat([expert(*part) for expert, *part in parts])[order.argsort()]


def route_by_buffers(rows, key, to, experts):
    """(experts, places, features): a place for everybody, many of them empty."""
    hot = F.one_hot(to, len(experts))
    place = (hot.cumsum(0) * hot).sum(1) - 1
    where = (to, place)
    full = (len(experts), len(rows))
    buffer = torch.zeros(*full, rows.shape[1]).index_put(where, rows)
    keys = torch.zeros(*full, key.shape[1]).index_put(where, key)
    out = torch.stack([expert(*pair) for expert, *pair in zip(experts, buffer, keys, strict=True)])
    return out[where]


def route_by_where(rows, key, to, experts):
    out = torch.zeros_like(rows)
    for i, expert in enumerate(experts):
        out = torch.where((to == i)[:, None], expert(rows, key), out)
    return out


ROUTES = {
    "mask": route_by_mask,
    "index_add": route_by_index_add,
    "sorting": route_by_sorting,
    "buffers": route_by_buffers,
    "where": route_by_where,
}


def make_routed(maker, groups, depth):
    if not has_rows(groups):
        return None
    spelling = maker.draw.choice(list(ROUTES))
    # what is in a buffer's empty places would be added up for the first example
    inner = (("E",),) if spelling in ("buffers", "where") else (("R",),)
    experts = [maker.block(inner, DEPTH) for _ in range(maker.draw.choice([2, 3]))]
    return Routed(experts, spelling)


class Repeated(nn.Module):
    """Several copies of each row, made different, and brought together again."""

    def __init__(self, inner, place, copies, spelling, together):
        super().__init__()
        self.inner, self.place, self.copies = inner, place, copies
        self.spelling, self.together = spelling, together

    def forward(self, flow):
        h, dim, K = flow.h, self.place, self.copies
        first = self.spelling in FIRST  # whether copies come before what they are copies of
        copies = REPEAT[self.spelling](h, dim, K)
        key = REPEAT[self.spelling](flow.key, dim, K)
        out = self.inner(flow._replace(h=copies, key=key))
        axes = (K, h.shape[dim]) if first else (h.shape[dim], K)
        return TOGETHER[self.together](out.unflatten(dim, axes), dim if first else dim + 1)

    def extra_repr(self):
        return f"{self.place}, {self.spelling}, {self.together}"


REPEAT = {
    "repeat": lambda t, dim, K: t.repeat(*(K if i == dim else 1 for i in range(t.dim()))),
    "tile": lambda t, dim, K: torch.tile(t, [K if i == dim else 1 for i in range(t.dim())]),
    "cat": lambda t, dim, K: torch.cat([t] * K, dim),
    "stack": lambda t, dim, K: torch.stack([t] * K, dim).flatten(dim, dim + 1),
    "expand": lambda t, dim, K: (
        t.unsqueeze(dim)
        .expand(*t.shape[:dim], K, *t.shape[dim:])
        .reshape(*t.shape[:dim], -1, *t.shape[dim + 1 :])
    ),
    "repeat_interleave": lambda t, dim, K: t.repeat_interleave(K, dim),
    "stack behind": lambda t, dim, K: torch.stack([t] * K, dim + 1).flatten(dim, dim + 1),
}
FIRST = ("repeat", "tile", "cat", "stack", "expand")

TOGETHER = {
    "mean": lambda t, dim: t.mean(dim),
    "weighted": lambda t, dim: torch.tensordot(
        t, torch.linspace(0.2, 0.8, t.shape[dim]), ([dim], [0])
    ),
    "logsumexp": lambda t, dim: t.logsumexp(dim),
    "product": lambda t, dim: t.select(dim, 0) * t.select(dim, 1).sin(),
    "chunks": lambda t, dim: sum(part.squeeze(dim) for part in t.chunk(t.shape[dim], dim)),
    "largest": lambda t, dim: tilted(t, dim).max(dim).values,
}


class Unlike(nn.Module):
    """Makes copies differ: by their place in the dimension, which is not the examples'."""

    def __init__(self, place, copies, first):
        super().__init__()
        self.place, self.copies, self.first = place, copies, first

    def forward(self, flow):
        count = flow.h.shape[self.place] // self.copies
        factor = torch.linspace(0.7, 1.3, self.copies)
        factor = factor.repeat_interleave(count) if self.first else factor.repeat(count)
        shape = [1] * flow.h.dim()
        shape[self.place] = -1
        return flow.h * factor.view(shape)


def make_repeated(maker, groups, depth):
    places = row_places(groups)
    if not places or any("K" in group for group in groups):
        return None
    i = maker.draw.choice(places)
    spelling = maker.draw.choice(list(REPEAT))
    group = ("R",) if "R" in groups[i] else groups[i]
    new = ("K", *group) if spelling in FIRST else (*group, "K")
    new = ("R",) if "R" in group else new
    inner = maker.block((*groups[:i], new, *groups[i + 1 :]), depth)
    inner.insert(0, Unlike(i, maker.K, spelling in FIRST))
    return Repeated(inner, i, maker.K, spelling, maker.draw.choice(list(TOGETHER)))


class TwoViews(nn.Module):
    """Two versions of every example, one behind the other, in one go: siamese."""

    def __init__(self, inner, place, spelling):
        super().__init__()
        self.inner, self.place, self.spelling = inner, place, spelling

    def forward(self, flow):
        h, dim = flow.h, self.place
        both = torch.cat([h, h.sin() + 0.1], dim)
        key = torch.cat([flow.key, flow.key], dim)
        out = self.inner(flow._replace(h=both, key=key))
        one, other = CUT_IN_TWO[self.spelling](out, dim)
        return one * other.tanh()

    def extra_repr(self):
        return f"{self.place}, {self.spelling}"


CUT_IN_TWO = {
    "chunk": lambda t, dim: t.chunk(2, dim) if t.shape[dim] else (t, t),
    "split": lambda t, dim: t.split([t.shape[dim] // 2] * 2, dim),
    "tensor_split": lambda t, dim: t.tensor_split(2, dim),
    "narrow": lambda t, dim: [
        t.narrow(dim, i * (t.shape[dim] // 2), t.shape[dim] // 2) for i in (0, 1)
    ],
    "unflatten": lambda t, dim: t.unflatten(dim, (2, t.shape[dim] // 2)).unbind(dim),
}


def make_two_views(maker, groups, depth):
    places = row_places(groups)
    if not places:
        return None
    i = maker.draw.choice(places)
    inner = maker.block((*groups[:i], ("R",), *groups[i + 1 :]), depth)
    return TwoViews(inner, i, maker.draw.choice(list(CUT_IN_TWO)))


class Pieces(nn.Module):
    """Rows a few at a time, with the same layers for all."""

    def __init__(self, inner, place, spelling):
        super().__init__()
        self.inner, self.place, self.spelling = inner, place, spelling

    def forward(self, flow):
        parts = zip(*(t.split(2, self.place) for t in (flow.h, flow.key)), strict=True)
        parts = list(parts)
        if self.spelling == "reversed":
            parts.reverse()
        done = [self.inner(flow._replace(h=h, key=key)) for h, key in parts]
        if self.spelling == "reversed":
            done.reverse()
        if self.spelling != "assigned":
            return torch.cat(done, self.place)
        out, start = torch.empty_like(flow.h), 0
        for part in done:
            out.narrow(self.place, start, part.shape[self.place]).copy_(part)
            start += part.shape[self.place]
        return out

    def extra_repr(self):
        return f"{self.place}, {self.spelling}"


def make_pieces(maker, groups, depth):
    places = row_places(groups)
    if not places:
        return None
    i = maker.draw.choice(places)
    inner = maker.block((*groups[:i], ("E",), *groups[i + 1 :]), DEPTH)
    return Pieces(inner, i, maker.draw.choice(["plain", "reversed", "assigned"]))


class OneByOne(nn.Module):
    """A loop over a dimension in Python."""

    def __init__(self, inner, place, spelling):
        super().__init__()
        self.inner, self.place, self.spelling = inner, place, spelling

    def forward(self, flow):
        pairs = list(zip(flow.h.unbind(self.place), flow.key.unbind(self.place), strict=True))
        done = [self.inner(flow._replace(h=h, key=key)) for h, key in pairs]
        if not done:
            return flow.h
        if self.spelling == "cat":
            return torch.cat([one.unsqueeze(self.place) for one in done], self.place)
        return torch.stack(done, self.place)

    def extra_repr(self):
        return f"{self.place}, {self.spelling}"


def make_one_by_one(maker, groups, depth):
    if len(groups) < 2:
        return None
    i = maker.draw.randrange(len(groups))
    left = (*groups[:i], *groups[i + 1 :])
    inner = maker.block(left, DEPTH)
    return OneByOne(inner, i, maker.draw.choice(["stack", "cat"]))


class Padded(nn.Module):
    """Rows of zeros before or after the others."""

    def __init__(self, inner, place, before, after):
        super().__init__()
        self.inner, self.place, self.sides = inner, place, (before, after)

    def forward(self, flow):
        h, key = (self.padded(t) for t in (flow.h, flow.key))
        out = self.inner(flow._replace(h=h, key=key))
        return out.narrow(self.place, self.sides[0], flow.h.shape[self.place])

    def padded(self, t):
        if self.sides[0]:
            zeros = t.new_zeros(*t.shape[: self.place], self.sides[0], *t.shape[self.place + 1 :])
            t = torch.cat([zeros, t], self.place)
        after = [0, 0] * (t.dim() - 1 - self.place) + [0, self.sides[1]]
        return F.pad(t, after)

    def extra_repr(self):
        return f"{self.place}, {self.sides}"


def make_padded(maker, groups, depth):
    places = row_places(groups)
    if not places:
        return None
    i = maker.draw.choice(places)
    inner = maker.block((*groups[:i], ("E",), *groups[i + 1 :]), DEPTH)
    return Padded(inner, i, maker.draw.randint(0, 1), maker.draw.randint(1, 2))


class TopPositions(nn.Module):
    """Some positions of each example, chosen by number, through a block and back."""

    def __init__(self, inner, place, count, spelling):
        super().__init__()
        self.inner, self.place, self.count, self.spelling = inner, place, count, spelling

    def forward(self, flow):
        dim = self.place
        chosen = flow.number.topk(self.count, dim).indices[..., None]
        index = chosen.expand(*chosen.shape[:-1], flow.h.shape[-1])
        key = flow.key.gather(dim, chosen.expand(*chosen.shape[:-1], 3))
        out = self.inner(flow._replace(h=flow.h.gather(dim, index), key=key))
        if self.spelling == "scatter":
            return flow.h.scatter(dim, index, out)
        return flow.h.scatter_add(dim, index, out)

    def extra_repr(self):
        return f"{self.place}, {self.spelling}"


def make_top_positions(maker, groups, depth):
    place = time_place(groups)
    if place is None:
        return None
    count = maker.draw.randint(1, maker.T)
    inner = maker.block((*groups[:place], (f"S{count}",), *groups[place + 1 :]), depth)
    return TopPositions(inner, place, count, maker.draw.choice(["scatter", "scatter_add"]))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, flow):
        return flow.h + 0.5 * self.inner(flow).tanh()


def make_residual(maker, groups, depth):
    return Residual(maker.block(groups, depth))


DETOURS = {
    make_permuted: 3,
    make_merged: 3,
    make_split: 3,
    make_reordered: 4,
    make_flipped: 1.5,
    make_selected: 4,
    make_routed: 2,
    make_repeated: 2,
    make_two_views: 1,
    make_pieces: 0.5,
    make_one_by_one: 0.5,
    make_padded: 0.7,
    make_top_positions: 1,
    make_residual: 1,
}


# What mixes


class Mixing(nn.Module):
    """Something of other examples."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling = spelling

    def forward(self, flow):
        return MIX[self.spelling](flow.h)

    def extra_repr(self):
        return self.spelling


MIX = {
    "mean": lambda h: h - 0.5 * h.mean(0),
    "detached": lambda h: h / (1 + h.detach().square().mean()),
    "number": lambda h: h * (1 + h.abs().max().item()),
    "softmax": lambda h: h * (1 + h.softmax(0)),
    "neighbour": lambda h: h + 0.3 * h.roll(1, 0).tanh(),
    "cumsum": lambda h: h + 0.3 * h.cumsum(0).tanh(),
    "size": lambda h: h * len(h) ** 0.5,
}


# Programs


class Program(nn.Module):
    """From the data of some examples to one loss for each."""

    def __init__(self, maker):
        super().__init__()
        D = maker.D
        self.data = maker.draw.choice(["sequences", "sequences", "words", "images"])
        self.loss = maker.draw.choice(list(LOSSES))
        self.sizes = {"T": maker.T, "D": D}
        if self.data == "words":
            self.table = nn.Embedding(WORDS, D)
        elif self.data == "images":
            self.conv = nn.Conv2d(2, D, (2, 3), padding=(0, 1))
        self.body = maker.block((("B",), ("T",)), least=3)
        if maker.mixes:
            mixing = Mixing(maker.draw.choice(list(MIX)))
            self.body.insert(maker.draw.randint(0, len(self.body)), mixing)
        self.head = nn.Linear(D, 3)

    def extra_repr(self):
        return f"{self.data}, {self.loss}, {self.sizes}"

    def forward(self, batch):
        x, key = batch["x"], batch["key"]
        h = x
        if self.data == "words":
            h = self.table(x)
        elif self.data == "images":
            h = self.conv(x).flatten(2).mT
        kept = torch.arange(key.shape[1]) < batch["n"][:, None]
        owner = torch.arange(len(x))[:, None].expand(key.shape)
        key = torch.stack([key, kept.to(key.dtype), owner.to(key.dtype)], -1)
        out = self.head(self.body(Flow(h, key, len(x))))
        return LOSSES[self.loss](out, kept, batch["y"], batch["n"])


def token_losses(out, y):
    rows = out.flatten(0, -2)
    first = torch.zeros(len(rows), dtype=torch.long)
    return F.cross_entropy(rows, first, reduction="none") * y.flatten()


def unpadded_loss(out, kept, y, n):
    each = token_losses(out[kept], y.repeat_interleave(n))
    owner = torch.arange(len(n)).repeat_interleave(n)
    return torch.zeros(len(n)).index_add(0, owner, each) / n


def split_loss(out, kept, y, n):
    each = out[kept].square().mean(1)
    return torch.stack([part.mean() for part in each.split(n.tolist())]) * y


def wavy_loss(out, kept, y, n):
    out = out.flatten(1)
    return (1.3 * out).sin().mean(1) * y + out.square().mean(1)


def masked_loss(out, kept, y, n):
    each = token_losses(out, y[:, None].expand(kept.shape)).view(kept.shape)
    return (each * kept).sum(1) / n


def sorted_loss(out, kept, y, n):
    return wavy_loss(out, kept, y, n)[n.argsort(stable=True)]


def time_first_loss(out, kept, y, n):
    out = out.transpose(0, 1)
    return (F.huber_loss(out, out.detach().sin(), reduction="none").mean(-1) * kept.T).sum(0) * y


LOSSES = {
    "wavy": wavy_loss,
    "unpadded": unpadded_loss,
    "masked": masked_loss,
    "split": split_loss,
    "sorted": sorted_loss,
    "time first": time_first_loss,
}


def made(seed):
    """Return a program, and whoever made it."""
    maker = Maker(seed)
    torch.manual_seed(seed)
    model = Program(maker)
    model.mixes = maker.mixes
    return model, maker


def data(model, maker, seed, calm=False, fewer=0):
    """Return a batch for a program; the lengths and all that routes are drawn with it.

    A calm one has full lengths, is sorted, and goes to the first expert.
    """
    draw = torch.Generator().manual_seed(seed)
    B, T = maker.B - fewer, maker.T
    normal = partial(torch.randn, generator=draw)
    if model.data == "words":
        x = torch.randint(0, WORDS, (B, T), generator=draw)
    elif model.data == "images":
        x = normal(B, 2, 2, T)
    else:
        x = normal(B, T, maker.D) * torch.linspace(0.5, 1.5, B).view(-1, 1, 1)
    n = torch.randint(1, T + 1, (B,), generator=draw)
    key, y = normal(B, T), normal(B) + 1.5
    if calm:
        n, key = torch.full_like(n, T), torch.linspace(0.1, 0.2, B * T).view(B, T)
    return {"x": x, "key": key, "n": n, "y": y}


def program(seed):
    """Return (model, batch, loss_fn), all from one number."""
    with default_dtype(torch.float64):
        model, maker = made(seed)
        return model, data(model, maker, seed), partial(run, model)


def run(model, batch):
    with default_dtype(torch.float64):
        return model(batch)


def check(seed, engine, b=1):
    """Say what an engine makes of a program; `b`: None for the whole batch."""
    model, batch, loss_fn = program(seed)
    return verdict(model, loss_fn, [batch], engine, b)


def drift(seed, engine="auto", b=1):
    """The same with one batch after the other, other lengths and routes each time.

    Often the first one is calm, and one in between is smaller.
    """
    with default_dtype(torch.float64):
        model, maker = made(seed)
        batches = [
            data(model, maker, BATCHES * seed + step, step == 0 and seed % 2 == 0, int(step == 3))
            for step in range(BATCHES)
        ]
    return verdict(model, partial(run, model), batches, engine, b)


def found_to_mix(seed):
    """Whether the examples' gradients alone do not add up to those that they have together."""
    model, batch, loss_fn = program(seed)
    parameters = list(model.parameters())
    pieces = [piece.batch for piece in cut(batch, 1)]
    alone = microbatch_gradients(loss_fn, parameters, pieces)
    (whole,) = microbatch_gradients(lambda part: loss_fn(part).sum(), parameters, [batch])
    total = weighted_sum(alone, [1.0] * len(alone))
    zeros = [torch.zeros_like(p) for p in parameters]
    pairs = (
        [zero if g is None else g for zero, g in zip(zeros, found, strict=True)]
        for found in (whole, total)
    )
    return not all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(*pairs, strict=True))


# The command line


class Counts:
    """Verdicts of one engine and size."""

    def __init__(self, title):
        self.title = title
        self.all, self.mixing = [], []

    def add(self, seed, said, mixes):
        self.all.append((seed, said))
        if mixes:
            self.mixing.append(said)

    @property
    def is_bad(self):
        return any(is_bad(said) for _, said in self.all)

    def __str__(self):
        lines = [f"{self.title}: {summary(said for _, said in self.all)}"]
        if self.mixing:
            lines.append(f"  of these mix: {summary(self.mixing)}")
        for name in ("WRONG", "CRASH"):
            seeds = [str(seed) for seed, said in self.all if kind(said) == name]
            if seeds:
                lines.append(f"  {name}: {' '.join(seeds[:60])}{' ...' * (len(seeds) > 60)}")
        return "\n".join(lines)


def size(text):
    return None if text == "B" else int(text)


def arguments(argv):
    parser = argparse.ArgumentParser(description="Try the single pass with random networks.")
    parser.add_argument("--first", type=int, default=0, help="the first program's number")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--engines", nargs="+", default=["fused"])
    parser.add_argument("--sizes", nargs="+", type=size, default=[1], help="numbers, or B")
    parser.add_argument("--drift", action="store_true", help="six batches for each, under auto")
    parser.add_argument("--out", type=Path, help="a file for all verdicts, one line each")
    parser.add_argument("--show", type=int, help="print this program and what becomes of it")
    return parser.parse_args(argv)


def show(seed, engines, sizes):
    model, batch, _ = program(seed)
    print(model)
    print({name: tuple(leaf.shape) for name, leaf in batch.items()}, "mixes:", model.mixes)
    for engine, b in itertools.product(engines, sizes):
        print(f"{engine} b={b or 'B'}: {check(seed, engine, b)}")


def main(argv=None):
    options = arguments(argv)
    torch.set_num_threads(1)
    logging.getLogger("microclip").setLevel(logging.ERROR)
    if options.show is not None:
        show(options.show, options.engines, options.sizes)
        return False
    engines = ["auto"] if options.drift else options.engines
    cells = list(itertools.product(engines, options.sizes))
    counts = {cell: Counts(f"{cell[0]} b={cell[1] or 'B'}") for cell in cells}
    start, lines = time.perf_counter(), []
    for seed in range(options.first, options.first + options.count):
        mixes = Maker(seed).mixes
        for engine, b in cells:
            said = drift(seed, engine, b) if options.drift else check(seed, engine, b)
            counts[engine, b].add(seed, said, mixes)
            lines.append(json.dumps({"seed": seed, "engine": engine, "b": b, "said": said}))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    print(f"{options.count} programs in {time.perf_counter() - start:.0f} s")
    print(*counts.values(), sep="\n")
    return any(count.is_bad for count in counts.values())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
