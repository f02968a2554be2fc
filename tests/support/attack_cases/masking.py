"""Masking and unpadding: examples have different numbers of rows."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attack_cases.base import (
    D,
    V,
    attack,
    kept,
    layer_norm,
    linear,
    masked_mean,
    mlp,
    owners,
    weight,
    words,
    words_table,
)


@attack("masking")
def unpadded_by_a_mask(m, x, n):
    keep = kept(x, n)
    out = torch.zeros_like(x)
    out[keep] = mlp(m, x[keep])
    return out


@attack("masking")
def masked_select_and_masked_scatter(m, x, n):
    keep = kept(x, n)[..., None]
    found = x.masked_select(keep).view(-1, D)
    return torch.zeros_like(x).masked_scatter(keep, mlp(m, found))


@attack("masking")
def nonzero_and_index_select(m, x, n):
    places = kept(x, n).flatten().nonzero().squeeze(1)
    out = mlp(m, x.flatten(0, 1).index_select(0, places))
    return torch.zeros_like(x).flatten(0, 1).index_add(0, places, out).view_as(x)


@attack("masking")
def index_put_of_rows_and_columns(m, x, n):
    where = kept(x, n).nonzero(as_tuple=True)
    return torch.zeros_like(x).index_put(where, mlp(m, x[where]))


@attack("masking")
def scattered_back(m, x, n):
    places = kept(x, n).flatten().nonzero().expand(-1, D)
    found = x.flatten(0, 1).gather(0, places)
    return torch.zeros_like(x).flatten(0, 1).scatter(0, places, mlp(m, found)).view_as(x)


@attack("masking", whole=True)
def unpadded_to_the_end(m, x, n, y):
    out = mlp(m, x[kept(x, n)])
    each = (1.3 * out).sin().mean(1) * y.repeat_interleave(n) + out.square().mean(1)
    return torch.zeros(len(x)).index_add(0, owners(x, n), each) / n


@attack("masking", whole=True)
def losses_scattered_to_their_examples(m, x, n, y):
    each = m.two(m.one(x)[kept(x, n)].tanh()).square().mean(1)
    return y * torch.zeros_like(y).scatter_add(0, owners(x, n), each)


@attack("masking", whole=True)
def losses_by_segment(m, x, n, y):
    each = mlp(m, x[kept(x, n)]).square().mean(1)
    return y * torch.segment_reduce(each, "mean", lengths=n)


@attack("masking", whole=True)
def split_by_lengths(m, x, n, y):
    parts = m.one(x[kept(x, n)]).tanh().split(n.tolist())
    return torch.stack([m.two(part).square().mean() for part in parts]) * y


@attack(
    "masking", data=words, whole=True, table=words_table, one=linear, head=partial(nn.Linear, D, V)
)
def masked_language_head(m, x, n, y):
    """The head sees the masked positions only: a share of all, or none in some examples."""
    hidden = m.one(m.table(x)).tanh()
    masked = x % 3 == (n % 3)[:, None]
    masked[:, 0] = True
    each = F.cross_entropy(m.head(hidden[masked]), x[masked], reduction="none")
    which = masked.nonzero()[:, 0]
    return torch.zeros(len(x)).index_add(0, which, each) * y


@attack("masking", data=words, whole=True, table=words_table, head=partial(nn.Linear, D, V))
def head_that_ignores_an_index(m, x, n, y):
    labels = x.roll(-1, 1).masked_fill(~kept(x, n), -100)
    logits = m.head(m.table(x)).flatten(0, 1)
    each = F.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=-100)
    return each.view(x.shape).sum(1) / n * y


@attack("masking", whole=True, q=linear, kv=partial(nn.Linear, D, 2 * D), positions=weight(4, D))
def packed_attention(m, x, n, y):
    """All tokens in one row; attention by blocks, as with the variable-length kernels."""
    owner, starts = owners(x, n), n.cumsum(0) - n
    tokens = x[kept(x, n)]
    tokens = tokens + m.positions[torch.arange(len(tokens)) - starts[owner]]
    k, v = m.kv(tokens).chunk(2, -1)
    scores = (m.q(tokens) @ k.T).masked_fill(owner[:, None] != owner, -torch.inf)
    each = (scores.softmax(-1) @ v).square().mean(1)
    return torch.zeros(len(x)).index_add(0, owner, each) * y


@attack("masking")
def trimmed_to_the_longest(m, x, n):
    return masked_mean(mlp(m, x[:, : int(n.max())]), n)


@attack("masking")
def last_kept_position(m, x, n):
    return m.two(m.one(x)[torch.arange(len(x)), n - 1].tanh())


@attack("masking")
def last_kept_position_gathered(m, x, n):
    last = (n - 1).view(-1, 1, 1).expand(-1, 1, D)
    return m.two(m.one(x).gather(1, last).squeeze(1).tanh())


@attack("masking")
def taken_along_a_dimension(m, x, n):
    order = (torch.arange(x.shape[1]) * n[:, None]) % x.shape[1]
    return m.two(torch.take_along_dim(m.one(x).tanh(), order[..., None], 1))


@attack("masking")
def taken_from_the_flat_tensor(m, x, n):
    first = torch.arange(len(x)) * x.shape[1] * D + (n - 1) * D
    return mlp(m, torch.take(x, first[:, None] + torch.arange(D)))


@attack("masking")
def active_rows_of_a_recurrence(m, x, n):
    """Finished examples leave the batch, which is sorted so that those left are the first."""
    order = n.argsort(descending=True, stable=True)
    x, n = x[order], n[order]
    state = torch.zeros(len(x), D)
    for t in range(int(n.max())):
        active = int((n > t).sum())
        new = (m.one(x[:active, t]) + m.two(state[:active])).tanh()
        state = torch.cat([new, state[active:]])
    return state[order.argsort()]


@attack("masking")
def nothing_is_selected_at_first(m, x, n):
    short = n < x.shape[1]
    out = m.one(x).clone()
    out[short] = out[short] + m.two(x[short])
    return out


@attack("masking")
def chosen_by_where(m, x, n):
    return torch.where(kept(x, n)[..., None], m.one(x), m.two(x))


@attack("masking")
def jagged_nested_tensor(m, x, n):
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), n.cumsum(0)])
    nested = torch.nested.nested_tensor_from_jagged(x[kept(x, n)], offsets)
    out = m.two(m.one(nested).tanh())
    return torch.stack([part.mean(0) for part in out.unbind()])


@attack("masking", data=words, table=words_table, one=linear)
def each_word_of_the_batch_embedded_once(m, x, n):
    """Rows of words, which no example owns alone."""
    found, places = x.unique(return_inverse=True)
    return m.one(m.table(found)).tanh()[places]


@attack("masking", data=words, table=words_table, one=linear)
def equal_examples_computed_once(m, x, n):
    found, places = (x[:, :1] % 2).unique(dim=0, return_inverse=True)
    return m.one(m.table(found)).tanh()[places] * m.table(x)


@attack("masking")
def two_masks_one_after_the_other(m, x, n):
    keep = kept(x, n)
    tokens = m.one(x[keep]).tanh()
    again = tokens[:, 0].detach() > -0.5
    again[n.cumsum(0) - 1] = True
    out = tokens.clone()
    out[again] = m.two(tokens[again])
    return torch.zeros_like(x).masked_scatter(keep[..., None], out)


@attack(
    "masking", norm=layer_norm, one=linear, scale=weight(D), positions=partial(nn.Embedding, 4, D)
)
def many_layers_on_unpadded_tokens(m, x, n):
    keep = kept(x, n)
    tokens = m.norm(x[keep]) * m.scale + m.positions(keep.nonzero()[:, 1])
    tokens = m.one(F.gelu(tokens)) + m.scale
    return torch.zeros_like(x).masked_scatter(keep[..., None], tokens)


@attack("masking", data=words, table=words_table, head=linear)
def unpadded_words(m, x, n):
    hidden = m.head(m.table(x[kept(x, n)]).tanh())
    return torch.stack([part.mean(0) for part in hidden.split(n.tolist())])


@attack("masking", conv=partial(nn.Conv1d, D, 3, 3, padding=1))
def every_sequence_convolved_alone(m, x, n):
    outs = [m.conv(one[:k].T[None]).mean(2) for one, k in zip(x, n.tolist(), strict=True)]
    return torch.cat(outs)


@attack("masking")
def pooled_by_owner(m, x, n):
    tokens, owner = m.one(x[kept(x, n)]), owners(x, n)[:, None].expand(-1, D)
    best = torch.full((len(x), D), -9.0).scatter_reduce(0, owner, tokens, "amax")
    mean = torch.zeros(len(x), D).index_reduce(0, owner[:, 0], tokens, "mean", include_self=False)
    return m.two(best * mean)


@attack("masking")
def reversed_within_their_lengths(m, x, n):
    """As a bidirectional model reads padded sequences backwards."""
    places = (n[:, None] - 1 - torch.arange(x.shape[1])) % x.shape[1]
    back = m.one(x).gather(1, places[..., None].expand_as(x)).tanh()
    return m.two(back.gather(1, places[..., None].expand_as(x))) * kept(x, n)[..., None]


@attack("masking", one=linear, two=linear, norm=layer_norm)
def one_layer_in_every_layout(m, x, n):
    keep = kept(x, n)
    straight = m.one(x)
    flipped = m.one(x.flip(0)).flip(0)
    turned = m.one(x.transpose(0, 1)).transpose(0, 1)
    unpadded = torch.zeros_like(x).masked_scatter(keep[..., None], m.one(x[keep].sin()))
    doubled = m.one(torch.cat([x, 2 * x])).view(2, *x.shape).prod(0)
    return m.two(m.norm(straight * flipped + turned.sin() + unpadded + doubled))


@attack("masking")
def sparse_adjacency(m, x, n):
    """Nodes of all graphs together, their edges in one sparse matrix."""
    T, nodes = x.shape[1], x.flatten(0, 1)
    start = torch.arange(len(x)).repeat_interleave(n) * T
    here = kept(x, n).nonzero()[:, 1]
    edges = torch.stack([start + (here + 1) % T, start + here])
    values = torch.ones(edges.shape[1])
    matrix = torch.sparse_coo_tensor(edges, values, (len(nodes),) * 2, check_invariants=False)
    return m.two(torch.sparse.mm(matrix, m.one(nodes).tanh())).view_as(x)
