"""Detours of random networks: inside, the rows lie in another way; afterwards they are put back.

Every `make_...` draws one from a `fuzzer.Maker`, or returns None where it does not fit.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from fuzz_rows import DEPTH, Flow, along, has_rows, row_places, shape_of, tilted, time_place


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
