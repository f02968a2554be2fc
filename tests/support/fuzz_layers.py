"""Layers of random networks: on features, whatever the rows, and along an example.

Every `make_...` draws one from a `fuzzer.Maker`, or returns None where it does not fit.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fuzz_rows import WORDS, has_rows, tilted, time_place

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
