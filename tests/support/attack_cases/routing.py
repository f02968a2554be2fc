"""Routing: rows go to different layers."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attack_cases.base import D, attack, linear, linears, mlp, smooth, weight


@attack("routing", experts=linears(3))
def experts_by_mask(m, x, n):
    rows, to = x.flatten(0, 1), (n[:, None] * torch.arange(1, x.shape[1] + 1)).flatten() % 3
    out = torch.zeros_like(rows)
    for index, expert in enumerate(m.experts):
        out[to == index] = expert(rows[to == index])
    return out.view_as(x)


@attack("routing", experts=linears(3))
def experts_nobody_uses_at_first(m, x, n):
    to = (x.shape[1] - n) % 3
    out = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        chosen = (to == index).nonzero().squeeze(1)
        out = out.index_add(0, chosen, expert(x[chosen]).tanh())
    return out


@attack("routing", router=partial(nn.Linear, D, 3), experts=linears(3))
def top_two_experts(m, x, n):
    tokens = x.flatten(0, 1)
    gates, chosen = m.router(tokens).softmax(-1).topk(2)
    gates = gates / gates.sum(-1, keepdim=True)
    out = torch.zeros_like(tokens)
    for index, expert in enumerate(m.experts):
        which, place = torch.where(chosen == index)
        out.index_add_(0, which, expert(tokens[which]) * gates[which, place, None])
    return out.view_as(x)


@attack("routing", router=partial(nn.Linear, D, 3), experts=linears(3))
def only_hit_experts(m, x, n):
    """As Mixtral does it: a loop over the experts that somebody chose."""
    tokens = x.flatten(0, 1)
    gates = m.router(tokens).sigmoid()
    hits = F.one_hot(gates.topk(1).indices, 3).permute(2, 1, 0)
    out = torch.zeros_like(tokens)
    for index in hits.sum((1, 2)).nonzero().flatten():
        _, which = torch.where(hits[index])
        out.index_add_(0, which, m.experts[index](tokens[which]) * gates[which, index, None])
    return out.view_as(x)


@attack("routing", weights=weight(3, D, D), router=partial(nn.Linear, D, 3))
def buffers_with_room_for_all(m, x, n):
    """(experts, places, features), every place taken by one token or none."""
    tokens = x.flatten(0, 1)
    gate, to = m.router(tokens).softmax(-1).max(-1)
    hot = F.one_hot(to, 3)
    place = (hot.cumsum(0) * hot).sum(-1) - 1
    buffer = torch.zeros(3, len(tokens), D).index_put((to, place), tokens)
    out = torch.bmm(buffer, m.weights).tanh()[to, place]
    return (out * gate[:, None]).view_as(x)


@attack("routing", weights=weight(3, D, D), router=partial(nn.Linear, D, 3))
def dispatched_by_einsum(m, x, n):
    tokens = x.flatten(0, 1)
    gate, to = m.router(tokens).softmax(-1).max(-1)
    hot = F.one_hot(to, 3)
    place = F.one_hot((hot.cumsum(0) * hot).sum(-1) - 1, len(tokens))
    dispatch = (hot[:, :, None] * place[:, None, :]).to(x.dtype)
    buffer = torch.einsum("nec,nd->ecd", dispatch, tokens)
    out = torch.einsum("ecd,edf->ecf", buffer, m.weights).tanh()
    return torch.einsum("nec,n,ecf->nf", dispatch, gate, out).view_as(x)


@attack("routing", mixes=True, weights=weight(3, D, D))
def buffers_that_overflow(m, x, n):
    """Who comes late is dropped, so an example depends on those before it."""
    to = (n[:, None] * torch.arange(1, x.shape[1] + 1)).flatten() % 3
    hot = F.one_hot(to, 3)
    place = (hot.cumsum(0) * hot).sum(-1) - 1
    stays = place < 3
    tokens = x.flatten(0, 1)
    buffer = torch.zeros(3, 3, D).index_put((to[stays], place[stays]), tokens[stays])
    out = torch.bmm(buffer, m.weights)
    return tokens.index_put((stays.nonzero().squeeze(1),), out[to[stays], place[stays]]).view_as(x)


@attack("routing", experts=linears(3))
def tokens_sorted_by_expert(m, x, n):
    tokens, to = x.flatten(0, 1), (n[:, None] + torch.arange(x.shape[1])).flatten() % 3
    order = to.argsort(stable=True)
    parts = tokens[order].split(to.bincount(minlength=3).tolist())
    out = torch.cat([expert(part) for expert, part in zip(m.experts, parts, strict=True)])
    return out[order.argsort()].view_as(x)


def grouped_product(rows, weights, ends):
    """What is there for experts; torch has none in double precision."""
    if rows.dtype == torch.float32:
        return F.grouped_mm(rows, weights, offs=ends)
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ w for part, w in zip(parts, weights, strict=True)])


@attack("routing", weights=weight(3, D, D))
def grouped_matrix_product(m, x, n):
    tokens, to = x.flatten(0, 1), n.repeat_interleave(x.shape[1]) % 3
    order = to.argsort(stable=True)
    ends = to.bincount(minlength=3).cumsum(0).to(torch.int32)
    out = grouped_product(tokens[order], m.weights, ends)
    return torch.empty_like(out).index_copy(0, order, out).view_as(x)


@attack("routing", weights=weight(3, D, D))
def a_weight_for_each_example(m, x, n):
    return torch.bmm(x, m.weights[n % 3]).tanh()


@attack("routing", weights=weight(3, D, D), bias=weight(3, D))
def a_weight_for_each_token(m, x, n):
    to = (n[:, None] + torch.arange(x.shape[1])) % 3
    return torch.einsum("btd,btde->bte", x, m.weights[to]) + m.bias[to]


@attack("routing", weights=weight(3, D, D))
def weights_chosen_by_one_hot(m, x, n):
    hot = F.one_hot(n % 3, 3).to(x.dtype)
    return torch.einsum("btd,be,edf->btf", x, hot, m.weights)


@attack("routing", mixes=True, whole=True, router=partial(nn.Linear, D, 3), experts=linears(3))
def balanced_over_the_batch(m, x, n, y):
    gates = m.router(x).softmax(-1)
    out = sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(m.experts))
    return smooth(out, y) + gates.mean((0, 1)).square().sum()


@attack("routing", mixes=True)
def experts_choose_among_all_tokens(m, x, n):
    tokens = x.flatten(0, 1)
    chosen = tokens[:, 0].topk(len(tokens) // 2).indices
    return m.two(tokens).index_add(0, chosen, m.one(tokens[chosen]).tanh()).view_as(x)


@attack("routing")
def experts_choose_within_examples(m, x, n):
    chosen = x[..., 0].topk(2, dim=1).indices[..., None].expand(-1, -1, D)
    return x.scatter_add(1, chosen, mlp(m, x.gather(1, chosen)))


@attack("routing", one=linear, two=linear, code=weight(5, D))
def nearest_code_straight_through(m, x, n):
    hidden = m.one(x)
    nearest = torch.cdist(hidden.flatten(0, 1), m.code).argmin(-1)
    quantised = m.code[nearest].view_as(hidden)
    return m.two(hidden + (quantised - hidden).detach()) + 0.3 * quantised


@attack("routing")
def early_exit(m, x, n):
    done, out = n == 1, m.one(x)
    going = (~done).nonzero().squeeze(1)
    return out.index_copy(0, going, m.two(out[going].tanh()))


@attack("routing", experts=linears(2))
def experts_by_lists_of_python_numbers(m, x, n):
    groups = [[i for i, k in enumerate(n.tolist()) if k % 2 == side] for side in (0, 1)]
    parts = [expert(x[group]) for expert, group in zip(m.experts, groups, strict=True)]
    places = torch.tensor(groups[0] + groups[1])
    return torch.cat(parts)[places.argsort()]
