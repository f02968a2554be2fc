"""Ways in which a user's model can mislead the single pass, grouped by cause.

An attack is a tiny model and a few batches, one after the other. The first batch is harmless where
what is meant to go wrong can start later: all lengths are full, every row goes to the first
expert, a branch is not taken. An engine may be exact or refuse; it may not be wrong, nor crash.

Each function below is the forward pass of a model `m`, whose parts are made by the keywords of
the decorator: two linear layers, `m.one` and `m.two`, where none are named. It gets the data `x`
of some examples and their lengths `n`; the `whole` ones also get `y`, and return the losses.

    python tests/support/attacks.py                        all of them, fused and auto, b = 1
    python tests/support/attacks.py --sizes 1 3 B --dtypes float64 float32 --only routing

"""

import argparse
import copy
import logging
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributions, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from microclip import Clipper
from microclip.microbatches import cut

from reference import microbatch_gradients, weighted_sum
from verdicts import default_dtype, is_bad, summary, verdict

D = 4  # features
V = 7  # words


@dataclass(frozen=True)
class Attack:
    """A model, batches to put through it one after the other, and the loss of each example.

    `mixes`: what an example contributes depends on the others, so only streaming can be right.
    """

    name: str
    cause: str
    build: Callable[[int], nn.Module]
    batches: Callable[[], list[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    mixes: bool = False
    turn: Callable[[nn.Module, int], None] | None = None  # what happens between the batches

    def before(self, model, step):
        """Get the model ready for a batch; it knows which one it is, as a schedule would."""
        model.step = step
        if self.turn is not None:
            self.turn(model, step)

    def __str__(self):
        return f"{self.cause}: {self.name}"


class Sizes(NamedTuple):
    B: int = 8
    T: int = 4


ATTACKS: list[Attack] = []


class Net(nn.Module):
    """Parts, and a function that puts them to use."""

    def __init__(self, parts, forward, setup):
        super().__init__()
        for name, make in parts.items():
            part = make()
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.body = forward
        if setup is not None:
            setup(self)

    def forward(self, *args):
        return self.body(self, *args)


def attack(cause, *, sizes=(), data=None, mixes=False, whole=False, setup=None, turn=None, **parts):
    """Make an attack of a forward pass; `parts` are functions that make layers or parameters."""
    parts = parts or {"one": linear, "two": linear}

    def enter(forward):
        def build(seed=0):
            torch.manual_seed(seed)
            return Net(parts, forward, setup)

        def loss(model, batch):
            x, n, y = batch
            return model(x, n, y) if whole else smooth(model(x, n), y)

        def batches():
            return [batch(each, data or sequences, Sizes(*sizes)) for each in (full, even, ragged)]

        name = forward.__name__.replace("_", " ")
        ATTACKS.append(Attack(name, cause, build, batches, loss, mixes, turn))
        return forward

    return enter


def attempt(attack, engine, b=1, dtype=torch.float64, seed=0):
    """Say what an engine makes of an attack; `b`: None for the whole batch."""
    with default_dtype(dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = attack.build(seed)
        before, loss_fn = partial(attack.before, model), partial(attack.loss, model)
        return verdict(model, loss_fn, attack.batches(), engine, b, dtype, before)


def found_to_mix(attack):
    """Whether losses or gradients of the examples alone are not those that they have together."""
    with default_dtype(torch.float64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = attack.build(0)
        return any(mixes(model, attack, *each) for each in enumerate(attack.batches()))


def mixes(model, attack, step, batch):
    attack.before(model, step)
    parameters, loss_fn = list(model.parameters()), partial(attack.loss, model)
    pieces = [piece.batch for piece in cut(batch, 1)]
    losses = torch.cat([loss_fn(piece).detach() for piece in pieces])
    alone = microbatch_gradients(loss_fn, parameters, pieces)
    together = microbatch_gradients(lambda part: loss_fn(part).sum(), parameters, [batch])
    flat = (flattened(parameters, weighted_sum(g, [1.0] * len(g))) for g in (alone, together))
    # sorted, since in whatever order the losses come, they are those of the same examples
    return not (
        torch.allclose(losses.sort().values, loss_fn(batch).detach().sort().values, rtol=1e-9)
        and torch.allclose(*flat, rtol=1e-7)
    )


def flattened(parameters, gradients):
    pairs = zip(parameters, gradients, strict=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in pairs]
    return torch.cat([torch.view_as_real(g + 0j).flatten() for g in found])


# Data


def batch(lengths, data, sizes):
    """Examples, their lengths, and what their losses are weighted by."""
    n = lengths(*sizes)
    draw = torch.Generator().manual_seed(int(n.sum()))
    x = data(sizes, draw)
    return x, n, torch.randn(sizes.B, generator=draw) + 1


def full(B, T):
    return torch.full((B,), T)


def ragged(B, T):
    """Lengths from 1 to T, whose sum is no multiple of B where that can be."""
    n = 1 + (5 * torch.arange(B) + T - 1) % T
    if n.sum() % B == 0:
        n[1] = n[1] % T + 1
    return n


def even(B, T):
    """Lengths from 1 to T whose sum is a multiple of B: nothing in the shapes is suspicious."""
    n = ragged(B, T)
    while n.sum() % B:
        n[int(n.argmax())] -= 1
    return n


def sequences(sizes, draw):
    """Examples of different sizes, so that clipping has something to do."""
    return spread(torch.randn(sizes.B, sizes.T, D, generator=draw))


def shaped(*shape):
    return lambda sizes, draw: spread(torch.randn(sizes.B, *shape, generator=draw))


def words(sizes, draw):
    return torch.randint(0, V, (sizes.B, sizes.T), generator=draw)


def spread(x):
    size = torch.linspace(0.4, 1.6, len(x))
    return x * size.view(-1, *(1,) * (x.dim() - 1))


def smooth(out, y):
    """One loss per example, which is not the same for any two outputs."""
    out = torch.view_as_real(out) if out.is_complex() else out
    out = out.reshape(len(out), -1)
    return (1.3 * out).sin().mean(1) * y + out.square().mean(1)


# Parts

linear = partial(nn.Linear, D, D)
layer_norm = partial(nn.LayerNorm, D)
words_table = partial(nn.Embedding, V, D)
images = shaped(2, 4, 4)
rows = shaped(D)


def weight(*shape):
    return lambda: 0.5 * torch.randn(shape)


def constant(value, *shape):
    return lambda: torch.full(shape, value)


def linears(count):
    return lambda: nn.ModuleList(linear() for _ in range(count))


def mlp(m, x):
    return m.two(m.one(x).tanh())


def kept(x, n):
    """Which positions are within their example's length."""
    return torch.arange(x.shape[1]) < n[:, None]


def owners(x, n):
    """The example of every position that is kept."""
    return torch.arange(len(x)).repeat_interleave(n)


def masked_mean(out, n):
    return (out * kept(out, n)[..., None]).sum(1) / n[:, None]


# Reordering: row i is no longer example i


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


# Masking and unpadding: examples have different numbers of rows


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


# Routing: rows go to different layers


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


# Layout: examples are somewhere else than along the first dimension


@attack("layout", sizes=(8, 16))
def time_first(m, x, n):
    return mlp(m, x.transpose(0, 1).contiguous()).transpose(0, 1)


@attack("layout", sizes=(8, 8))
def time_first_and_as_long_as_the_batch(m, x, n):
    return mlp(m, x.transpose(0, 1)).transpose(0, 1)


@attack("layout", sizes=(8, 8), positions=weight(8, 1, D), one=linear)
def positions_along_the_first_dimension(m, x, n):
    return m.one(x.transpose(0, 1) + m.positions).tanh().transpose(0, 1)


@attack("layout", sizes=(8, 16))
def time_first_by_unbind(m, x, n):
    return torch.stack([mlp(m, step) for step in x.unbind(1)]).transpose(0, 1)


@attack("layout", sizes=(8, 16))
def rows_of_time_and_batch(m, x, n):
    rows = x.transpose(0, 1).reshape(-1, D)
    return mlp(m, rows).view(x.shape[1], len(x), D).transpose(0, 1)


@attack("layout", w=weight(D, D), bias=weight(D, 1))
def batch_last(m, x, n):
    return (m.w @ x.permute(1, 2, 0) + m.bias).tanh().permute(2, 0, 1)


@attack("layout", sizes=(D, D), w=weight(D, D), scale=weight(D))
def batch_last_in_a_cube(m, x, n):
    return (m.w @ x.permute(1, 2, 0) * m.scale[:, None]).permute(2, 0, 1)


@attack("layout", sizes=(D, 3), data=rows, scale=weight(D), bias=weight(D), one=linear)
def as_many_examples_as_features(m, x, n):
    return m.one((x.T * m.scale[:, None] + m.bias[:, None]).T)


@attack("layout", sizes=(D, 3), data=rows, w=weight(D, D))
def weight_from_the_left(m, x, n):
    return (m.w @ x.T).T.tanh()


@attack("layout", sizes=(2, 6), qkv=partial(nn.Linear, D, 3 * D), out=linear)
def as_many_examples_as_heads(m, x, n):
    """Heads before examples, all in one dimension, as older code for bmm has it."""
    q, k, v = (
        part.view(*x.shape[:2], 2, D // 2).permute(2, 0, 1, 3).flatten(0, 1)
        for part in m.qkv(x).chunk(3, -1)
    )
    mixed = torch.bmm((q @ k.mT).softmax(-1), v).view(2, *x.shape[:2], D // 2)
    return m.out(mixed.permute(1, 2, 0, 3).flatten(2))


@attack(
    "layout",
    data=shaped(3, 2, 4, 4),
    conv=partial(nn.Conv2d, 2, 3, 3),
    head=partial(nn.Linear, 12, 2),
)
def frames_folded_into_the_batch(m, x, n):
    out = m.conv(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2])
    return m.head(out.flatten(2))


@attack("layout", data=shaped(3, 2, 4, 4), conv=partial(nn.Conv2d, 2, 3, 3))
def frames_before_examples(m, x, n):
    folded = x.transpose(0, 1).flatten(0, 1)
    return m.conv(folded).tanh().unflatten(0, (x.shape[1], len(x))).transpose(0, 1)


@attack("layout", data=shaped(8, 2, 4, 4), conv=partial(nn.Conv3d, 2, 3, (1, 3, 3)))
def examples_as_the_depth_of_a_volume(m, x, n):
    volume = x.permute(1, 2, 0, 3, 4)  # a volume for each frame, with a slice for each example
    return m.conv(volume).permute(2, 0, 1, 3, 4).tanh()


@attack("layout", data=images, conv=partial(nn.Conv2d, 2, 3, (1, 3)))
def images_on_top_of_each_other(m, x, n):
    tall = x.transpose(0, 1).reshape(1, 2, -1, 4)
    return m.conv(tall).view(3, len(x), -1).transpose(0, 1).tanh()


@attack("layout", data=images, style=partial(nn.Linear, 2, 2), w=weight(3, 2, 3, 3))
def examples_as_groups_of_a_convolution(m, x, n):
    """A kernel for each example, as StyleGAN has it."""
    style = m.style(x.mean((2, 3)))
    kernels = (m.w * style[:, None, :, None, None]).flatten(0, 1)
    out = F.conv2d(x.reshape(1, -1, 4, 4), kernels, padding=1, groups=len(x))
    return out.view(len(x), 3, 4, 4)


@attack("layout", w=weight(3, D, 3))
def same_kernel_for_all_groups(m, x, n):
    wide = x.mT.reshape(1, -1, x.shape[1])
    return F.conv1d(wide, m.w.repeat(len(x), 1, 1), groups=len(x)).view(len(x), -1).tanh()


@attack("layout", sizes=(8, 16), one=linear, two=linear, norm=layer_norm)
def one_long_sequence(m, x, n):
    return m.two(m.norm(m.one(x.reshape(1, -1, D)))).view_as(x)


@attack("layout", sizes=(8, 8))
def transposed_twice(m, x, n):
    return m.two(m.one(x.transpose(0, 1)).tanh().mT.permute(2, 0, 1))


@attack("layout", w=weight(3, D), v=weight(4, 3))
def einsum_in_an_odd_order(m, x, n):
    out = torch.einsum("btd,ed->etb", x, m.w)
    return torch.einsum("etb,te->be", out.tanh(), m.v)


@attack("layout", sizes=(8, 8), w=weight(8, 8), one=linear)
def mixing_over_time(m, x, n):
    """As MLP-Mixer does; a square weight of the size of the batch."""
    return m.one(torch.einsum("st,btd->sbd", m.w, x).tanh()).movedim(0, 1)


@attack("layout", data=images, w=partial(nn.Linear, 18, 3))
def unfolded_patches(m, x, n):
    return m.w(F.unfold(x, 3, padding=1).mT).tanh()


@attack("layout", sizes=(8, 8), w=partial(nn.Linear, 3, 3))
def windows_before_examples(m, x, n):
    windows = x.unfold(1, 3, 1).permute(1, 2, 0, 3)
    return m.w(windows).tanh().permute(2, 0, 1, 3)


@attack("layout", sizes=(8, 8), w=partial(nn.Linear, 3, 3))
def windows_by_strides(m, x, n):
    x = x.contiguous()
    b, t, d = x.stride()
    windows = x.as_strided((x.shape[1] - 2, len(x), D, 3), (t, b, d, t))
    return m.w(windows).tanh().transpose(0, 1)


@attack("layout", data=images, conv=partial(nn.Conv2d, 2, 3, 3), head=partial(nn.Linear, 3, 3))
def channels_last(m, x, n):
    out = m.conv(x.to(memory_format=torch.channels_last)).tanh()
    return m.head(out.permute(0, 2, 3, 1))


@attack(
    "layout", sizes=(2, 4), data=images, scale=weight(2, 1, 1), conv=partial(nn.Conv2d, 2, 2, 3)
)
def as_many_examples_as_channels(m, x, n):
    return m.conv((x.transpose(0, 1) * m.scale[:, None]).transpose(0, 1))


@attack("layout", sizes=(8, 8), one=linear, cell=partial(nn.RNN, D, D))
def recurrence_time_first(m, x, n):
    return m.cell(m.one(x).transpose(0, 1))[0].transpose(0, 1)


def open_gate(m, step):
    m.gate.data.fill_(0.3 * step)


encoder_layer = partial(nn.TransformerEncoderLayer, D, 2, 8, 0.0)


@attack("layout", sizes=(8, 8), turn=open_gate, gate=constant(0.0), layer=encoder_layer, one=linear)
def time_first_encoder_behind_a_zero_gate(m, x, n):
    return m.one(x) + m.gate * m.layer(x.transpose(0, 1)).transpose(0, 1)


@attack("layout", sizes=(8, 8), attend=partial(nn.MultiheadAttention, D, 2), one=linear)
def attention_time_first(m, x, n):
    hidden = m.one(x).transpose(0, 1)
    return m.attend(hidden, hidden, hidden, need_weights=False)[0].transpose(0, 1)


@attack("layout", sizes=(8, 8), attend=partial(nn.MultiheadAttention, D, 2, batch_first=True))
def attention_over_single_positions(m, x, n):
    """Each example's positions are given as a batch of sequences of length one."""
    rows = x.reshape(-1, 1, D)
    return m.attend(rows, rows, rows)[0].view_as(x)


@attack("layout", sizes=(8, 8), one=linear)
def features_and_examples_in_one_dimension(m, x, n):
    flat = x.permute(1, 0, 2).reshape(x.shape[1], -1)
    return m.one(flat.view(x.shape[1], len(x), D)).tanh().swapaxes(0, 1)


@attack("layout", sizes=(8, 8), norm=partial(nn.GroupNorm, 2, D), conv=partial(nn.Conv1d, D, D, 3))
def convolution_and_norm_of_wrong_rows(m, x, n):
    """(positions, features, examples in pairs of one) as if positions were examples."""
    columns = x.permute(1, 0, 2).reshape(-1, D, 1)
    normed = m.norm(columns).view(x.shape[1], len(x), D)
    return m.conv(normed.permute(1, 2, 0)).tanh()


@attack("layout", sizes=(8, 8), norm=layer_norm, one=linear)
def layer_norm_time_first(m, x, n):
    return m.norm(m.one(x).transpose(0, 1)).movedim(1, 0).sin()


# Copies: there are more rows than examples, or others between them


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


# Constants of the model, one for each example


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


# Parameters in unusual places


@attack("parameters", one=linear, scale=constant(0.7))
def without_dimensions(m, x, n):
    return m.one(x) * m.scale


def open_gain(m, step):
    m.gain.data.fill_(0.3 * step)


@attack("parameters", turn=open_gain, one=linear, gain=constant(0.0), bias=constant(0.2))
def rezero(m, x, n):
    return x + m.gain * m.one(x).tanh() + m.bias


@attack("parameters", one=linear, two=linear, logit_scale=constant(0.4))
def temperature_of_similarities(m, x, n):
    a, b = F.normalize(m.one(x), dim=-1), F.normalize(m.two(x), dim=-1)
    return m.logit_scale.exp() * a @ b.mT


@attack("parameters", scale=constant(0.7), bias=constant(0.1))
def scalars_with_scalars_of_examples(m, x, n):
    return torch.stack([m.scale * one.sum() + m.bias.exp() for one in x])


@attack("parameters", one=linear, p=weight(D))
def written_into_a_buffer_line_by_line(m, x, n):
    w = torch.zeros(D, D)
    w[0], w[2, 1:] = m.p, m.p[1:].sin()
    return x @ w + m.one(x)


@attack("parameters", p=weight(D))
def nothing_but_written_into_a_buffer(m, x, n):
    w = torch.zeros(D, D)
    w[1] = m.p
    return (x @ w).tanh()


@attack("parameters", one=linear, p=weight(D, D))
def copied_into_a_buffer(m, x, n):
    w = torch.empty(D, D)
    w.copy_(m.p)
    return x @ w + m.one(x)


@attack("parameters", p=weight(D * (D + 1) // 2), one=linear)
def triangular_matrix(m, x, n):
    w = torch.zeros(D, D)
    i, j = torch.tril_indices(D, D)
    w[i, j] = m.p
    return m.one(x @ w @ w.T)


@attack("parameters", p=weight(D), one=linear)
def put_onto_the_diagonal(m, x, n):
    w = torch.zeros(D, D)
    w.diagonal().copy_(m.p)
    return m.one(x @ w)


@attack("parameters", p=weight(D), one=linear)
def diagonal_embedded_and_skewed(m, x, n):
    w = torch.diag_embed(m.p) + torch.diag(m.p[1:], 1)
    return m.one(x @ torch.linalg.matrix_exp(w - w.T))


@attack("parameters", p=weight(D), one=linear)
def index_put_in_place(m, x, n):
    w = torch.eye(D)
    w.index_put_((torch.arange(D), torch.arange(D).flip(0)), m.p, accumulate=True)
    return m.one(x @ w)


@attack("parameters", p=weight(D), one=linear)
def written_into_every_example(m, x, n):
    out = x.clone()
    out[:, 0] = m.p
    return m.one(out).tanh()


@attack("parameters", p=weight(D), one=linear)
def written_into_short_examples(m, x, n):
    out = x.clone()
    out[~kept(x, n)] = m.p
    return m.one(out).tanh()


@attack("parameters", p=weight(D), one=linear)
def written_into_one_example_of_a_buffer(m, x, n):
    out = torch.zeros(len(x), D)
    for i in range(len(x)):
        out[i] = m.p * int(n[i])
    return m.one(out + x[:, 0])


@attack("parameters", p=weight(D), q=weight(D), one=linear)
def stacked_into_a_matrix(m, x, n):
    return m.one(x @ torch.stack([m.p, m.q, m.p * m.q, m.q.sin()]))


@attack("parameters", p=lambda: nn.ParameterList(0.5 * torch.randn(D) for _ in range(D)))
def list_of_rows_concatenated(m, x, n):
    return F.linear(x, torch.cat([p[None] for p in m.p])).tanh()


@attack("parameters", p=weight(D * D + D))
def views_of_one_flat_parameter(m, x, n):
    return F.linear(x, m.p[: D * D].view(D, D), m.p[D * D :]).tanh()


@attack("parameters", p=weight(D, 3 * D))
def split_into_three(m, x, n):
    q, k, v = m.p.chunk(3, 1)
    return ((x @ q) @ (x @ k).mT).softmax(-1) @ (x @ v)


@attack("parameters", p=weight(4, D), one=linear)
def added_in_place(m, x, n):
    hidden = m.one(x)
    hidden += m.p
    return hidden.tanh()


@attack("parameters", p=weight(4, D), q=weight(4, D), one=linear)
def gradients_that_share_memory(m, x, n):
    """For one example alone autograd gives both parameters views of the same tensor."""
    return (m.one(x) + m.p.view(1, 4, D) + m.q.view(1, 4, D)).sin()


@attack("parameters", p=weight(4, D), one=linear, two=linear)
def gradient_that_shares_memory_with_an_inner_one(m, x, n):
    """Who changes the gradient of `p` in place changes what is still to come back to `one`."""
    return m.two((m.one(x) + m.p.unsqueeze(0)).tanh())


@attack("parameters", p=weight(D), q=weight(D), one=linear)
def multiplied_in_place(m, x, n):
    hidden = m.one(x)
    hidden *= m.p
    hidden[:, 1:] -= m.q
    return hidden.tanh()


@attack("parameters", p=weight(D), one=linear)
def in_place_on_a_view(m, x, n):
    hidden = m.one(x)
    hidden[:, ::2].add_(m.p)
    hidden[..., 1].mul_(2)
    return hidden.tanh()


@attack("parameters", p=weight(D // 2), one=linear)
def in_place_chunk_by_chunk(m, x, n):
    hidden = m.one(x).clone()
    left, right = hidden[..., : D // 2], hidden[..., D // 2 :]
    left *= m.p
    right.add_(left, alpha=0.5)
    return hidden


@attack("parameters", p=weight(D), one=linear)
def in_place_on_some_examples(m, x, n):
    hidden = m.one(x).clone()
    hidden[n > 1] *= m.p
    return hidden


@attack("parameters", mixes=True, p=weight(D), one=linear)
def in_place_on_the_first_examples(m, x, n):
    hidden = m.one(x).clone()
    hidden[: len(x) // 2 + 1] *= m.p
    return hidden


@attack("parameters", p=weight(D), one=linear)
def in_place_arithmetic_with_values(m, x, n):
    hidden = m.one(x)
    hidden.addcmul_(x, m.p, value=0.5)
    hidden.lerp_(m.p.expand_as(hidden), 0.25)
    return hidden.sin_()


@attack("parameters", f=lambda: torch.complex(torch.randn(3), torch.randn(3)), one=linear)
def complex_filter(m, x, n):
    return torch.fft.irfft(torch.fft.rfft(m.one(x)) * m.f, n=D)


@attack("parameters", f=weight(3), one=linear)
def real_parameter_times_complex_tensor(m, x, n):
    return torch.fft.irfft(torch.fft.rfft(m.one(x)) * m.f, n=D)


@attack("parameters", f=weight(3, 2), one=linear)
def real_pairs_viewed_as_complex(m, x, n):
    return torch.fft.rfft(m.one(x)) * torch.view_as_complex(m.f)


@attack("parameters", one=linear)
def complex_tensor_through_a_real_layer(m, x, n):
    spectrum = torch.fft.fft(x, dim=1)
    return torch.complex(m.one(spectrum.real), m.one(spectrum.imag)).abs()


def rounded(w):
    return (4 * w).round() / 4


@attack("parameters")
def straight_through_weight_and_plain_bias(m, x, n):
    w = m.one.weight
    return m.two(F.linear(x, rounded(w) + w - w.detach(), m.one.bias).tanh())


@attack("parameters")
def straight_through_the_other_way_round(m, x, n):
    w = m.one.weight
    return m.two(F.linear(x, w + (rounded(w) - w).detach(), m.one.bias).tanh())


@attack("parameters", one=linear, two=linear, step_size=constant(0.3, 1))
def learnt_quantisation_of_activations(m, x, n):
    steps = m.one(x) / m.step_size
    return m.two((steps + (steps.round() - steps).detach()) * m.step_size)


def weight_norm_layer():
    return parametrizations.weight_norm(nn.Linear(D, D))


def spectral_norm_layer():
    return parametrizations.spectral_norm(nn.Linear(D, D)).eval()


def orthogonal_layer():
    return parametrizations.orthogonal(nn.Linear(D, D))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


def symmetric_layer():
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@attack("parameters", one=weight_norm_layer, two=linear)
def weight_normalisation(m, x, n):
    return mlp(m, x)


@attack("parameters", one=spectral_norm_layer, two=linear)
def spectral_normalisation(m, x, n):
    return mlp(m, x)


@attack("parameters", one=orthogonal_layer, two=symmetric_layer)
def parametrized_matrices(m, x, n):
    with parametrize.cached():
        return m.two(m.one(m.two(x)).tanh())


@attack("parameters", data=words, table=words_table)
def tied_in_three_places(m, x, n):
    hidden = m.table(x)
    scores = hidden @ m.table.weight.T
    return F.linear(scores.softmax(-1) @ m.table.weight, m.table.weight)


def tie(m):
    m.two.weight = m.one.weight


@attack("parameters", setup=tie, one=linear, two=linear)
def two_layers_of_one_weight(m, x, n):
    return mlp(m, x) @ m.one.weight


@attack("parameters", one=linear, norm=layer_norm)
def same_layers_three_times(m, x, n):
    for _ in range(3):
        x = x + m.one(m.norm(x)).tanh()
    return x


@attack("parameters", data=words, table=weight(V, D), one=linear)
def looked_up_by_index(m, x, n):
    return m.one(m.table[x]).tanh()


@attack("parameters", data=words, table=weight(V, D), one=linear)
def looked_up_in_other_ways(m, x, n):
    flat = x.flatten()
    picked = m.table.index_select(0, flat).view(*x.shape, D)
    gathered = m.table.gather(0, flat[:, None].expand(-1, D)).view(*x.shape, D)
    return m.one(picked) * gathered + F.one_hot(x, V).to(m.table.dtype) @ m.table


@attack("parameters", data=words, bag=partial(nn.EmbeddingBag, V, D, mode="mean"), one=linear)
def bags_of_words(m, x, n):
    return m.one(m.bag(x)).tanh()


@attack("parameters", data=words, bag=partial(nn.EmbeddingBag, V, D, mode="sum"), one=linear)
def bags_with_offsets_and_weights(m, x, n):
    keep = kept(x, n)
    weights = torch.linspace(0.5, 1.5, x.shape[1]).expand(x.shape)[keep]
    return m.one(m.bag(x[keep], n.cumsum(0) - n, per_sample_weights=weights)).tanh()


@attack("parameters", data=words, table=partial(nn.Embedding, V, D, padding_idx=0), one=linear)
def padding_gets_no_gradient(m, x, n):
    return m.one(m.table(x.masked_fill(~kept(x, n), 0))).tanh()


@attack(
    "parameters", data=words, table=partial(nn.Embedding, V, D, scale_grad_by_freq=True), mixes=True
)
def gradient_scaled_by_frequency(m, x, n):
    return m.table(x).sin()


@attack("parameters", p=weight(D), w=weight(D, D))
def arguments_by_keyword(m, x, n):
    hidden = torch.matmul(input=x, other=m.w)
    hidden = torch.add(input=hidden, other=m.p, alpha=2)
    return torch.mul(hidden, other=m.p).add(other=m.p)


@attack("parameters")
def layer_by_keyword(m, x, n):
    hidden = F.linear(bias=m.one.bias, input=x, weight=m.one.weight).tanh()
    return F.linear(hidden, weight=m.two.weight, bias=None)


@attack("parameters", p=weight(D), w=weight(D, D))
def with_an_out_argument(m, x, n):
    """Out needs tensors without a graph, so it is the derived constant that is written."""
    norm = torch.empty(())
    with torch.no_grad():
        torch.sum(m.w.square(), dim=(0, 1), out=norm)
    return x @ m.w / norm.sqrt() + m.p


@attack("parameters", p=weight(D), q=weight(D), w=weight(D, D))
def fused_arithmetic(m, x, n):
    hidden = torch.addcmul(m.p, x, m.q, value=0.5)
    hidden = torch.lerp(hidden, m.q.expand_as(hidden), m.p.sigmoid())
    return torch.addcdiv(hidden, x @ m.w, m.q.square() + 1)


@attack("parameters", p=weight(D), w=weight(D, D))
def batched_and_flat_products(m, x, n):
    flat = torch.addmm(m.p, x.flatten(0, 1), m.w, beta=0.5, alpha=2).view_as(x)
    both = torch.baddbmm(m.p.expand_as(x), x, m.w.expand(len(x), D, D))
    return flat * both + torch.addmv(m.p[:1].expand(len(x)), x[:, 0], m.w[0]).view(-1, 1, 1)


@attack("parameters", w=weight(D, D), v=weight(D))
def products_in_all_spellings(m, x, n):
    rows = x.flatten(0, 1)
    hidden = torch.mm(rows, m.w) + rows.mm(m.w).sin() + torch.tensordot(rows, m.w, 1)
    return (hidden.mv(m.v) + torch.inner(rows, m.v) + (m.v * rows).sum(-1)).view(len(x), -1)


@attack("parameters", p=weight(D), q=weight(D), one=linear)
def chosen_by_where_among_parameters(m, x, n):
    return m.one(torch.where(x > 0, m.p * x, m.q) + torch.where(kept(x, n)[..., None], m.p, m.q))


@attack("parameters", slopes=partial(nn.PReLU, 4), both=partial(nn.Bilinear, D, D, 3))
def prelu_and_bilinear(m, x, n):
    return m.both(m.slopes(x).sin(), x)


@attack("parameters", p=weight(D), q=weight(D), one=linear)
def clamped_and_compared(m, x, n):
    hidden = torch.maximum(m.one(x), m.p)
    return torch.clamp(hidden, max=m.q.exp()) + torch.minimum(m.p, m.q)


@attack("parameters", p=weight(4), k=weight(3, D, 2))
def kernel_as_a_function_of_parameters(m, x, n):
    return F.conv1d(x.mT, m.k.softmax(-1) * m.p[:1].exp()) + m.p.var()


@attack("parameters", p=weight(D, D))
def inverse_and_norm(m, x, n):
    w = torch.linalg.inv(m.p + 3 * torch.eye(D))
    return x @ w / torch.linalg.norm(m.p) + torch.linalg.solve(w, x.mT).mT


@attack("parameters", p=weight(D), one=linear)
def as_python_numbers_and_tensors(m, x, n):
    scale = float(m.p.detach().sum())
    return m.one(x) * scale + m.p[0] * x + m.p.tolist()[1]


@attack("parameters", p=weight(D), one=linear)
def subtracted_and_divided_from_the_left(m, x, n):
    return (m.p - m.one(x)) / (m.p.square() + 1) + 2 ** (m.p * 0.1) - 1 / (1 + m.p**2 + x**2)


@attack("parameters", p=weight(D), one=linear)
def spelled_by_torch_ops(m, x, n):
    hidden = torch.ops.aten.addmm(m.one.bias, x.flatten(0, 1), m.one.weight.t())
    return torch.ops.aten.mul.Tensor(hidden, m.p).view_as(x)


@attack("parameters", p=weight(3, D))
def examples_as_the_weight_of_a_layer(m, x, n):
    return F.linear(m.p, x.mean(1)).T.sin()


@attack("parameters", signal=weight(1, D, 9))
def examples_as_the_kernel_of_a_convolution(m, x, n):
    return F.conv1d(m.signal, x.mT).squeeze(0).sin()


@attack("parameters", p=weight(5, D), one=linear)
def prototypes_first(m, x, n):
    far = torch.cdist(m.p, m.one(x).mean(1))
    return (m.p @ m.one(x)[:, 0].T).T * far.mT


@attack("parameters", image=weight(1, 2, 5, 5), one=partial(nn.Linear, D, 2))
def looked_up_between_the_pixels(m, x, n):
    places = m.one(x).tanh()[:, :, None]
    each = F.grid_sample(m.image.expand(len(x), -1, -1, -1), places, align_corners=True)
    once = F.grid_sample(m.image, places.reshape(1, -1, 1, 2), align_corners=True)
    return each.squeeze(3) * once.view(2, len(x), -1).transpose(0, 1)


@attack(
    "parameters",
    mean=weight(D),
    spread=weight(D),
    one=linear,
    mixture=weight(3),
    centres=weight(3, D),
)
def learnt_distributions(m, x, n):
    normal = distributions.Normal(m.mean, m.spread.exp(), validate_args=False)
    parts = distributions.Independent(
        distributions.Normal(m.centres, 1.0, validate_args=False), 1, validate_args=False
    )
    weights = distributions.Categorical(logits=m.mixture, validate_args=False)
    both = distributions.MixtureSameFamily(weights, parts, validate_args=False)
    hidden = m.one(x)
    return normal.log_prob(hidden).sum(-1) + both.log_prob(hidden)


@attack("parameters", moves=weight(D, D), start=weight(D), one=linear)
def conditional_random_field(m, x, n):
    scores = m.one(x)
    state = m.start + scores[:, 0]
    for t in range(1, x.shape[1]):
        new = (state[:, :, None] + m.moves).logsumexp(1) + scores[:, t]
        state = torch.where((t < n)[:, None], new, state)
    path = scores.argmax(-1)
    return state.logsumexp(1) - m.moves[path[:, :-1], path[:, 1:]].sum(1) - m.start[path[:, 0]]


@attack(
    "parameters",
    a=weight(D, 3),
    b=partial(nn.Linear, D, 3),
    c=partial(nn.Linear, D, 3),
    skip=weight(D),
)
def state_space(m, x, n):
    state, out = torch.zeros(len(x), D, 3), []
    for step in x.unbind(1):
        decay = (-m.a.exp() * F.softplus(step)[..., None]).exp()
        state = decay * state + step[..., None] * m.b(step)[:, None]
        out.append((state * m.c(step)[:, None]).sum(-1) + m.skip * step)
    return torch.stack(out, 1)


@attack("parameters", base=linear, down=weight(2, D), up=weight(D, 2), size=constant(1.2, D))
def low_rank_with_its_own_size(m, x, n):
    """DoRA: the direction of a weight is trained apart from its length."""
    w = m.base.weight.detach() + m.up @ m.down
    return F.linear(x, m.size[:, None] * w / w.norm(dim=1, keepdim=True).detach()) + m.base.bias


def prune_the_first(m):
    prune.l1_unstructured(m.one, "weight", 0.3)
    prune.random_unstructured(m.two, "bias", 0.5)


@attack("parameters", setup=prune_the_first, one=linear, two=linear)
def pruned(m, x, n):
    return mlp(m, x)


@attack("parameters", w=weight(2, D, 3), v=weight(2, 3, D))
def a_weight_for_each_head(m, x, n):
    heads = torch.einsum("btd,hde->hbte", x, m.w).tanh()
    return torch.einsum("hbte,hed->btd", heads, m.v)


@attack("parameters", w=weight(D, D), p=weight(D))
def turned_and_cut(m, x, n):
    w = m.w.T.flip(0).roll(1, 1)
    return x @ w + m.w.flatten()[::5] + m.w.t()[1:3].mT.mean(1) * m.p.unfold(0, 2, 2).reshape(-1)


@attack("parameters", p=weight(4, D), one=linear)
def as_long_as_the_longest(m, x, n):
    length = int(n.max())
    return masked_mean(m.one(x[:, :length] + m.p[:length]).tanh(), n)


@attack("parameters", p=weight(D, 5), q=weight(5), one=linear)
def chosen_by_length(m, x, n):
    return m.one(x) * m.p[:, n].T[:, None] + m.q.take(n)[:, None, None]


@attack("parameters", p=weight(D), one=linear)
def scattered_into_the_examples(m, x, n):
    places = (n - 1).view(-1, 1, 1).expand(-1, 1, D)
    return m.one(x.scatter(1, places, m.p.expand(len(x), 1, D))).tanh()


@attack("parameters", p=weight(D), q=weight(D))
def only_compared_with(m, x, n):
    return torch.where(x > m.p, x * m.q, x) + m.q * (x < m.p)


@attack("parameters", p=weight(D), one=linear)
def sums_of_python(m, x, n):
    return sum([m.one(x), m.p, m.p * x]) + max(m.p.unbind(), key=float)


def freeze_the_bias(m, step):
    m.one.bias.requires_grad_(step == 0)


@attack("parameters", turn=freeze_the_bias)
def frozen_later(m, x, n):
    return mlp(m, x)


# In place: what a tensor holds, or how it lies, changes after it was made


@attack("in place")
def buffer_overwritten_by_the_flipped_batch(m, x, n):
    buffer = torch.empty_like(x)
    buffer.copy_(x.flip(0))
    return m.two(m.one(buffer).tanh().flip(0))


@attack("in place")
def copied_through_a_transposed_view(m, x, n):
    buffer = torch.zeros_like(x)
    buffer.transpose(0, 1).copy_(x.flip(0).transpose(0, 1))
    return m.two(m.one(buffer).tanh().flip(0))


@attack("in place", sizes=(8, 8))
def transposed_in_place(m, x, n):
    turned = x.clone().transpose_(0, 1)
    return m.two(m.one(turned).tanh().transpose(0, 1))


@attack("in place", sizes=(8, 8))
def dimensions_swapped_in_place_and_back(m, x, n):
    hidden = m.one(x)
    hidden.swapdims_(0, 1).unsqueeze_(0)
    out = m.two(hidden.tanh())
    return out.squeeze(0).transpose(0, 1)


@attack("in place")
def selected_into_an_out_argument(m, x, n):
    order, buffer = n.argsort(stable=True), torch.empty(0)
    torch.index_select(x, 0, order, out=buffer)
    return m.two(m.one(buffer).tanh()[order.argsort()])


@attack("in place")
def data_exchanged(m, x, n):
    other = x.clone()
    other.data = x.flip(0)
    return m.two(m.one(other).tanh().flip(0))


@attack("in place")
def tensors_exchanged(m, x, n):
    flipped, straight = x.flip(0), x.clone()
    torch.utils.swap_tensors(flipped, straight)
    return m.two(m.one(straight).tanh().flip(0))


@attack("in place")
def memory_shared_with_numpy(m, x, n):
    buffer = torch.zeros_like(x)
    buffer.numpy()[:] = x.numpy()[::-1]
    return m.two(m.one(buffer).tanh().flip(0))


@attack("in place")
def halves_exchanged_by_assignment(m, x, n):
    half = len(x) // 2
    buffer = x.clone()
    buffer[: len(x) - half], buffer[len(x) - half :] = x[half:], x[:half]
    hidden = m.one(buffer).tanh()
    return m.two(torch.cat([hidden[len(x) - half :], hidden[: len(x) - half]]))


@attack("in place")
def sorted_into_out_arguments(m, x, n):
    values, order = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.sort(x, 0, out=(values, order))
    hidden = values.tanh() * m.one.bias + m.two.bias
    return m.one(hidden.gather(0, order.argsort(0))) + m.two(x)


@attack("in place")
def filled_by_index_copy_and_scatter(m, x, n):
    order = x[:, 0, 0].argsort()
    hidden = torch.empty_like(x).index_copy_(0, order, m.one(x[order]).tanh())
    again = torch.zeros_like(x).scatter_(0, order[:, None, None].expand_as(x), m.one(x[order]))
    return m.two(hidden) * again


@attack("in place", mixes=True)
def neighbour_written_over(m, x, n):
    hidden = m.one(x)
    hidden[0] = hidden[-1].clone()
    return m.two(hidden)


@attack("in place")
def positions_rotated_in_place(m, x, n):
    hidden = m.one(x).clone()
    for i, k in enumerate(n.tolist()):
        hidden[i] = hidden[i].roll(k, 0)
    return m.two(hidden * torch.linspace(0.5, 1.5, x.shape[1])[:, None])


@attack("in place", mixes=True)
def sum_kept_in_a_buffer(m, x, n):
    total = torch.zeros(x.shape[1:])
    for row in m.one(x):
        total += row
    return m.two(x) * total


@attack("in place", one=linear, p=weight(4, D))
def a_position_at_a_time(m, x, n):
    steps = [m.one(step + m.p[t]) for t, step in enumerate(x.unbind(1))]
    return torch.stack(steps, 1).tanh()


# Attention and recurrence

attention = partial(nn.MultiheadAttention, D, 2, batch_first=True)
time_first_attention = partial(nn.MultiheadAttention, D, 2)


@attack("attention", attend=partial(attention, add_bias_kv=True))
def keys_and_values_of_its_own(m, x, n):
    return m.attend(x, x, x)[0]


@attack("attention", attend=partial(attention, add_zero_attn=True), one=linear)
def weights_are_the_output(m, x, n):
    hidden = m.one(x)
    out, weights = m.attend(hidden, hidden, hidden, average_attn_weights=False)
    return out.flatten(1) * weights.flatten(1).square().sum(1, keepdim=True)


@attack("attention", attend=attention)
def padding_mask(m, x, n):
    return m.attend(x, x, x, key_padding_mask=~kept(x, n), need_weights=False)[0]


@attack("attention", attend=partial(attention, kdim=3, vdim=2))
def keys_of_another_width(m, x, n):
    return m.attend(x, x[..., :3].sin(), x[..., 2:])[0]


@attack("attention", attend=time_first_attention, one=linear, sizes=(8, 8))
def mask_for_each_example_and_head(m, x, n):
    hidden = m.one(x).transpose(0, 1)
    mask = (~kept(x, n))[:, None, None].expand(-1, 2, x.shape[1], -1).flatten(0, 1)
    return m.attend(hidden, hidden, hidden, attn_mask=mask)[0].transpose(0, 1)


@attack("attention", attend=time_first_attention)
def without_a_batch(m, x, n):
    return torch.stack([m.attend(one, one, one)[0] for one in x])


@attack("attention", sizes=(4, 4), qkv=partial(nn.Linear, D, 3 * D), out=linear)
def scaled_dot_product(m, x, n):
    heads = m.qkv(x).view(*x.shape[:2], 3, 2, D // 2).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
    return m.out(mixed.transpose(1, 2).flatten(2))


@attack("attention", layer=partial(encoder_layer, batch_first=True, norm_first=True))
def encoder_layer_with_padding(m, x, n):
    return masked_mean(m.layer(x, src_key_padding_mask=~kept(x, n)), n)


@attack("attention", model=partial(nn.Transformer, D, 2, 1, 1, 8, 0.0), one=linear, sizes=(8, 8))
def encoder_and_decoder_time_first(m, x, n):
    source, target = x.transpose(0, 1), m.one(x)[:, :3].transpose(0, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    return m.model(source, target, tgt_mask=mask).transpose(0, 1)


@attack(
    "attention",
    layer=partial(nn.TransformerDecoderLayer, D, 2, 8, 0.0, batch_first=True),
    start=weight(2, D),
)
def decoder_started_from_parameters(m, x, n):
    return m.layer(m.start.repeat(len(x), 1, 1), x, memory_key_padding_mask=~kept(x, n))


@attack("recurrence", cell=partial(nn.LSTM, D, 3, batch_first=True), one=linear)
def lstm(m, x, n):
    return m.cell(m.one(x))[0]


@attack("recurrence", cell=partial(nn.LSTM, D, D, 2, bidirectional=True, proj_size=2))
def lstm_with_projections_time_first(m, x, n):
    return m.cell(x.transpose(0, 1))[0].transpose(0, 1)


@attack("recurrence", cell=partial(nn.GRU, D, 3, batch_first=True), one=linear)
def gru_of_packed_sequences(m, x, n):
    packed = pack_padded_sequence(m.one(x), n, batch_first=True, enforce_sorted=False)
    return m.cell(packed)[1].squeeze(0)


@attack("recurrence", cell=partial(nn.GRU, D, D, batch_first=True), start=weight(1, 1, D))
def gru_with_a_learnt_start(m, x, n):
    return m.cell(x, m.start.expand(-1, len(x), -1).contiguous())[0]


@attack("recurrence", cell=partial(nn.LSTM, D, 3, batch_first=True))
def lstm_with_zeros_to_start(m, x, n):
    zeros = torch.zeros(1, len(x), 3)
    return m.cell(x, (zeros, zeros))[1][1][0]


@attack("recurrence", cell=partial(nn.RNN, D, 3, nonlinearity="relu", bias=False, batch_first=True))
def rnn_without_a_batch(m, x, n):
    return torch.stack([m.cell(one[: int(k)])[0][-1] for one, k in zip(x, n, strict=True)])


@attack("recurrence", cell=partial(nn.LSTMCell, D, D), start=weight(D))
def lstm_cell_with_a_learnt_start(m, x, n):
    h = m.start.expand(len(x), D)
    c = m.start.repeat(len(x), 1)
    for step in x.unbind(1):
        h, c = m.cell(step, (h, c))
    return h


@attack("recurrence", cell=partial(nn.GRUCell, D, D), other=partial(nn.RNNCell, D, D))
def cells_from_zeros(m, x, n):
    state, other = torch.zeros(len(x), D), None
    for t, step in enumerate(x.unbind(1)):
        other = m.other(step, other)
        state = torch.where((t < n)[:, None], m.cell(other, state), state)
    return state


# Gradients, functions and transforms of the model's own


def adversarial_step(m, x):
    z = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(mlp(m, z).square().sum(), z)
    return x + 0.1 * slope.tanh()


@attack("gradients")
def adversarial_examples(m, x, n):
    return mlp(m, adversarial_step(m, x))


@attack("gradients")
def adversarial_later(m, x, n):
    return mlp(m, adversarial_step(m, x) if m.step else x)


@attack("gradients")
def inner_backward_to_the_input(m, x, n):
    z = x.detach().clone().requires_grad_()
    mlp(m, z).square().sum().backward(inputs=[z])
    return mlp(m, x - 0.1 * z.grad)


@attack("gradients")
def inner_backward_and_zero_grad(m, x, n):
    z = x.detach().clone().requires_grad_()
    mlp(m, z).square().sum().backward()
    m.zero_grad(set_to_none=True)
    return mlp(m, x - 0.1 * z.grad)


@attack("gradients", whole=True)
def gradient_penalty(m, x, n, y):
    z = x.detach().requires_grad_()
    out = mlp(m, z)
    (slope,) = torch.autograd.grad(out.sin().sum(), z, create_graph=True)
    return smooth(out, y) + slope.square().mean((1, 2))


@attack("gradients")
def energy_and_forces(m, x, n):
    z = x.detach().requires_grad_()
    energy = mlp(m, z).square().sum()
    return -torch.autograd.grad(energy, z, create_graph=True)[0]


@attack("gradients")
def one_step_of_the_inner_loop(m, x, n):
    """MAML: each example takes a step of its own with the weight of the second layer."""
    hidden, w = m.one(x).tanh(), m.two.weight
    out = []
    for row in hidden:
        (slope,) = torch.autograd.grad(F.linear(row, w).square().mean(), w, create_graph=True)
        out.append(F.linear(row, w - 0.1 * slope, m.two.bias))
    return torch.stack(out)


@attack("gradients")
def gradients_of_the_examples_by_vmap(m, x, n):
    def energy(row):
        return mlp(m, row).square().sum()

    return vmap(grad(energy))(x).sin() + m.one(x)


@attack("gradients")
def directional_derivative(m, x, n):
    out, change = jvp(partial(mlp, m), (x,), (x.cos(),))
    return out + 0.3 * change


@attack("gradients")
def mapped_by_vmap(m, x, n):
    return vmap(lambda row: m.two(m.one(row).tanh().cumsum(0)))(x)


@attack("gradients")
def mapped_by_vmap_over_time(m, x, n):
    return vmap(partial(mlp, m), in_dims=1, out_dims=1)(x)


@attack("gradients", models=linears(3))
def ensemble_by_functional_call(m, x, n):
    weights = {
        name: torch.stack([dict(model.named_parameters())[name] for model in m.models])
        for name in ("weight", "bias")
    }
    out = vmap(lambda w: functional_call(m.models[0], w, (x,)))(weights)
    return out.tanh().mean(0)


@attack("gradients")
def functional_call_with_other_weights(m, x, n):
    noisy = {name: p + 0.1 * p.sin() for name, p in m.one.named_parameters()}
    return m.two(functional_call(m.one, noisy, (x,)).tanh())


class NumpyTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        import numpy as np

        out = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, d):
        (out,) = ctx.saved_tensors
        return d * (1 - out * out)


class Scale(torch.autograd.Function):
    """x * p, with the gradient of p summed up over everything but features."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx, d):
        x, p = ctx.saved_tensors
        return d * p, (d * x).flatten(0, -2).sum(0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return -0.5 * d


class TimesBatchSize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        return d * len(d)


class FlipsExamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.flip(0)

    @staticmethod
    def backward(ctx, d):
        return d.flip(0)


@attack("functions", one=linear, scale=weight(D))
def function_in_numpy_then_a_scale(m, x, n):
    return NumpyTanh.apply(m.one(x)) * m.scale


@attack("functions", scale=weight(D), one=linear)
def function_in_numpy_of_the_input(m, x, n):
    return m.one(NumpyTanh.apply(x) * m.scale)


@attack("functions", scale=weight(D), one=linear)
def function_of_a_parameter(m, x, n):
    return Scale.apply(m.one(x), m.scale).tanh()


@attack("functions")
def function_of_a_weight_in_numpy(m, x, n):
    return m.two(F.linear(x, NumpyTanh.apply(m.one.weight), m.one.bias))


@attack("functions")
def gradient_reversed(m, x, n):
    return m.two(Reversed.apply(m.one(x)).tanh())


@attack("functions", mixes=True)
def gradient_times_the_batch_size(m, x, n):
    return m.two(TimesBatchSize.apply(m.one(x)).tanh())


@attack("functions")
def function_that_flips_examples(m, x, n):
    return FlipsExamples.apply(m.two(FlipsExamples.apply(m.one(x)).tanh()))


@torch.library.custom_op("attacks::times_and_flip", mutates_args=())
def times_and_flip(x: Tensor, p: Tensor) -> Tensor:
    return x.flip(0) * p


def _times_and_flip_saves(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _times_and_flip_backward(ctx, d):
    x, p = ctx.saved_tensors
    return (d * p).flip(0), (d * x.flip(0)).flatten(0, -2).sum(0)


times_and_flip.register_autograd(_times_and_flip_backward, setup_context=_times_and_flip_saves)


@attack("functions", one=linear, scale=weight(D))
def custom_operator(m, x, n):
    return times_and_flip(m.one(x), m.scale).flip(0).tanh()


@attack("functions")
def with_torch_functions_switched_off(m, x, n):
    with torch._C.DisableTorchFunction():
        hidden = m.one(x).tanh()
    return m.two(hidden)


@attack("functions")
def reordered_with_torch_functions_switched_off(m, x, n):
    with torch._C.DisableTorchFunction():
        x = x.flip(0)
    out = mlp(m, x)
    with torch._C.DisableTorchFunction():
        return out.flip(0)


@attack("functions")
def input_through_numpy(m, x, n):
    order = n.numpy().argsort(kind="stable")
    hidden = m.one(torch.from_numpy(x.numpy()[order].copy())).tanh()
    return m.two(hidden[torch.from_numpy(order.argsort())])


@attack("functions")
def input_through_python_lists(m, x, n):
    return mlp(m, torch.tensor(x.tolist())[:, : x.shape[1]])


@attack("functions")
def input_through_storage(m, x, n):
    flat = torch.tensor([], dtype=x.dtype).set_(x.contiguous().untyped_storage())
    start = x.storage_offset() if x.is_contiguous() else 0
    return mlp(m, flat[start : start + x.numel()].view_as(x))


class Tagged(Tensor):
    """A subclass that does nothing but be one."""


@attack("functions")
def subclass_of_tensor(m, x, n):
    return mlp(m, x.as_subclass(Tagged)).as_subclass(Tensor)


@attack("functions")
def detached_and_put_back(m, x, n):
    hidden = m.one(x)
    return m.two(hidden.detach().tanh()) + hidden - hidden.detach().sin()


@attack("functions")
def data_of_parameters_and_tensors(m, x, n):
    hidden = m.one(x)
    hidden.data.clamp_(-1, 1)
    return m.two(hidden) + x @ m.one.weight.data


@attack("functions")
def without_gradients_for_a_while(m, x, n):
    with torch.no_grad():
        target = mlp(m, x.flip(1))
    return mlp(m, x) * target + m.one(x)


@attack("functions")
def without_gradients_in_full_batches(m, x, n):
    with torch.set_grad_enabled(m.step > 0):
        hidden = m.one(x)
    return m.two(hidden.tanh())


@attack("functions")
def deep_copy_and_dlpack(m, x, n):
    hidden = m.one(copy.deepcopy(x.flip(0))).tanh()
    return m.two(hidden.flip(0)) + m.one(torch.from_dlpack(x)) * torch.as_tensor(x)


@attack("functions")
def pickled(m, x, n):
    there = pickle.loads(pickle.dumps(x.flip(0)))
    return m.two(m.one(there).tanh().flip(0))


@attack("functions")
def reversed_by_python(m, x, n):
    rows = list(reversed(list(m.one(x))))
    return m.two(torch.stack(rows).tanh()).flip(0)


@attack("functions")
def rows_sorted_by_python(m, x, n):
    pairs = sorted(zip(n.tolist(), range(len(x)), m.one(x), strict=True), key=lambda p: p[:2])
    places = torch.tensor([place for _, place, _ in pairs])
    return m.two(torch.stack([row for *_, row in pairs]).tanh())[places.argsort()]


class Quiet(TorchFunctionMode):
    """A mode of the model's own, as `torch.device` is one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class QuietDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@attack("functions")
def inside_modes_of_its_own(m, x, n):
    with Quiet(), torch.device("cpu"):
        hidden = m.one(x.flip(0)).tanh().flip(0)
    with QuietDispatch():
        return m.two(hidden)


@attack("functions")
def sum_of_the_batch_times_nothing(m, x, n):
    hidden = m.one(x)
    return m.two(hidden.tanh()) + 0.0 * hidden.sum()


@attack("functions", one=linear, two=linear, unused=linear)
def all_parameters_times_nothing(m, x, n):
    return mlp(m, x) + 0.0 * sum(p.sum() for p in m.parameters())


@attack("functions")
def pairs_of_examples_in_one_row(m, x, n):
    pair = 2 if len(x) % 2 == 0 else 1
    rows = x.reshape(len(x) // pair, -1, D)
    return mlp(m, rows).view_as(x)


# Hooks, checkpoints, compilation, threads


def hook_on_the_output(m):
    m.one.register_forward_hook(lambda module, args, out: out * m.scale)


@attack("hooks", setup=hook_on_the_output, one=linear, two=linear, scale=weight(D))
def hook_multiplies_the_output(m, x, n):
    return mlp(m, x)


def hooks_that_turn_the_batch_round(m):
    m.two.register_forward_pre_hook(lambda module, args: (args[0].flip(0),))
    m.two.register_forward_hook(lambda module, args, out: out.flip(0))


@attack("hooks", setup=hooks_that_turn_the_batch_round, one=linear, two=linear)
def hooks_turn_the_batch_round(m, x, n):
    return mlp(m, x)


@attack("hooks")
def hook_on_a_tensor(m, x, n):
    hidden = m.one(x)
    hidden.register_hook(lambda d: 2 * d)
    return m.two(hidden.tanh())


@attack("hooks", mixes=True)
def hook_normalises_the_gradient_of_a_batch(m, x, n):
    hidden = m.one(x)
    hidden.register_hook(lambda d: d / d.norm())
    return m.two(hidden.tanh())


def hook_on_the_module(m):
    m.two.register_full_backward_hook(lambda module, back, out: (0.5 * back[0],))


@attack("hooks", setup=hook_on_the_module, one=linear, two=linear)
def hook_on_the_backward_pass_of_a_module(m, x, n):
    return mlp(m, x)


def hook_on_the_parameter(m):
    m.one.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))


@attack("hooks", mixes=True, setup=hook_on_the_parameter, one=linear, two=linear)
def hook_on_a_parameter(m, x, n):
    return mlp(m, x)


@attack("hooks", mixes=True)
def hook_on_a_derived_weight(m, x, n):
    w = m.one.weight * 2
    w.register_hook(lambda g: g.clamp(-0.02, 0.02))
    return m.two((x @ w).tanh())


@attack("checkpoints")
def checkpoint_that_reenters(m, x, n):
    return checkpoint(lambda h: m.two(h).tanh(), m.one(x), use_reentrant=True)


@attack("checkpoints")
def checkpoint_that_does_not_reenter(m, x, n):
    return checkpoint(lambda h: mlp(m, h), x, use_reentrant=False)


@attack("checkpoints")
def checkpoint_later(m, x, n):
    if m.step == 0:
        return mlp(m, x)
    return checkpoint(lambda h: m.two(h[n.argsort()]), m.one(x), use_reentrant=False)[
        n.argsort().argsort()
    ]


@attack("checkpoints")
def saved_tensors_on_disk_or_so(m, x, n):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return mlp(m, x)


def compile_the_body(m):
    m.compiled = torch.compile(partial(mlp, m), backend="eager", dynamic=True)


@attack("checkpoints", setup=compile_the_body, one=linear, two=linear)
def compiled(m, x, n):
    return m.compiled(x)


def compile_a_sort(m):
    def body(x, n):
        order = n.argsort(stable=True)
        return m.two(m.one(x)[order].tanh())[order.argsort()]

    m.compiled = torch.compile(body, backend="eager", dynamic=True)


@attack("checkpoints", setup=compile_a_sort, one=linear, two=linear)
def compiled_with_a_sort_inside(m, x, n):
    return m.compiled(x, n)


@attack("threads")
def branches_in_threads(m, x, n):
    with ThreadPoolExecutor(2) as pool:
        left, right = pool.map(lambda layer: layer(x).tanh(), (m.one, m.two))
    return left * right


@attack("threads")
def a_thread_sorts(m, x, n):
    with ThreadPoolExecutor(1) as pool:
        ordered = pool.submit(lambda: x.flip(0)).result()
        return pool.submit(mlp(m, ordered).flip, 0).result()


@attack("threads")
def another_clipper_has_the_same_batch(m, x, n):
    """While this forward pass runs, another thread clips another model on the same tensors."""
    hidden = m.one(x).tanh()
    other = nn.Linear(D, 1)
    clipper = Clipper(other, microbatch_size=1, engine="fused")
    thread = threading.Thread(
        target=clipper.backward, args=(lambda part: other(part[0]).square().mean((1, 2)), (x, n))
    )
    thread.start()
    thread.join()
    return m.two(x) * hidden


# Mixing: the loss of an example depends on the others


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


# Later: what the first batch does not show


@attack("later", one=linear, two=linear, late=linear)
def parameter_unused_at_first(m, x, n):
    out = mlp(m, x)
    return out + m.late(x).tanh() if m.step else out


@attack("later", one=linear)
def parameter_used_again_later(m, x, n):
    hidden = m.one(x)
    return m.one(hidden.tanh().flip(0)).flip(0) if m.step else hidden


@attack("later", one=linear, p=weight(D))
def buffer_written_later(m, x, n):
    w = torch.eye(D)
    if m.step:
        w[1] = m.p
    return m.one(x @ w) + m.p


@attack("later", whole=True)
def examples_that_cost_nothing(m, x, n, y):
    """A loss of exactly 0 for some, whose gradients do not count."""
    return smooth(mlp(m, x), y) * (n > 1)


@attack("later")
def examples_of_zeros(m, x, n):
    return mlp(m, x * (n > 1)[:, None, None])


@attack("later")
def number_of_layers_by_length(m, x, n):
    for depth in range(int(n.max())):
        going = (n > depth)[:, None, None]
        x = torch.where(going, x + m.one(x).tanh(), x)
    return m.two(x)


def begin_training(m, step):
    m.one.requires_grad_(step > 0)


@attack("later", turn=begin_training)
def frozen_at_first(m, x, n):
    return mlp(m, x)


@attack("later")
def sorts_from_the_third_batch_on(m, x, n):
    order = x[:, 0, 0].argsort()
    if m.step < 2:
        return mlp(m, x)
    return m.two(m.one(x)[order].tanh())[order.argsort()]


@attack("later", mixes=True)
def mixes_from_the_third_batch_on(m, x, n):
    hidden = m.one(x)
    return m.two(hidden + hidden.mean(0) if m.step == 2 else hidden)


# Vision and sound

conv2 = partial(nn.Conv2d, 2, 4, 3, padding=1)


@attack("vision", data=images, conv=conv2, head=partial(nn.Linear, 16, 3))
def max_pooling(m, x, n):
    return m.head(F.max_pool2d(m.conv(x).tanh(), 2).flatten(1))


@attack("vision", data=images, conv=conv2, pool=partial(nn.AdaptiveMaxPool2d, 2))
def adaptive_max_pooling(m, x, n):
    return m.pool(m.conv(x)).sin()


@attack("vision", data=images, conv=conv2, head=partial(nn.Conv2d, 4, 2, 3))
def pooled_and_unpooled(m, x, n):
    pooled, places = F.max_pool2d(m.conv(x), 2, return_indices=True)
    return m.head(F.max_unpool2d(pooled.tanh(), places, 2))


@attack("vision", data=images, conv=conv2, head=partial(nn.Linear, 4, 3))
def average_of_all_places(m, x, n):
    return m.head(F.adaptive_avg_pool2d(m.conv(x).tanh(), 1).flatten(1))


@attack("vision", data=images, conv=conv2, up=partial(nn.ConvTranspose2d, 4, 2, 2, stride=2))
def transposed_convolution(m, x, n):
    return m.up(F.avg_pool2d(m.conv(x).tanh(), 2))


@attack("vision", data=images, conv=conv2, head=partial(nn.Conv2d, 1, 3, 3))
def pixels_shuffled(m, x, n):
    return m.head(F.pixel_shuffle(m.conv(x), 2)).tanh()


@attack("vision", data=images, conv=conv2, deep=partial(nn.Conv2d, 4, 8, 3, groups=4, dilation=1))
def interpolated_and_depthwise(m, x, n):
    larger = F.interpolate(m.conv(x).tanh(), scale_factor=2, mode="bilinear")
    return m.deep(larger)


@attack(
    "vision",
    data=images,
    conv=conv2,
    norm=partial(nn.GroupNorm, 2, 4),
    more=partial(nn.InstanceNorm2d, 4, affine=True),
)
def group_and_instance_norm(m, x, n):
    return m.more(m.norm(m.conv(x)).sin()).sin()


@attack("vision", norm=partial(nn.RMSNorm, D), one=linear, two=partial(nn.LayerNorm, (4, D)))
def rms_and_two_dimensional_norm(m, x, n):
    return m.two(m.one(m.norm(x)))


@attack("vision", data=images, conv=conv2, head=partial(nn.Conv2d, 4, 2, 1))
def local_response_norm(m, x, n):
    return m.head(F.local_response_norm(m.conv(x), 2, alpha=0.5))


@attack("vision", data=images, conv=partial(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="circular"))
def circular_padding_and_strides(m, x, n):
    return m.conv(x)[:, :, ::2, 1::2].tanh()


@attack("vision", data=images, conv=partial(nn.Conv2d, 2, 3, 3))
def convolution_without_a_batch(m, x, n):
    return torch.stack([m.conv(one).tanh() for one in x])


@attack("vision", data=images, theta=partial(nn.Linear, 2, 6), conv=conv2)
def spatial_transformer(m, x, n):
    theta = m.theta(x.mean((2, 3))).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(m.conv(x), grid, align_corners=False)


@attack("vision", data=images, patches=partial(nn.Conv2d, 2, D, 2, stride=2), one=linear)
def windows_of_a_shifted_image(m, x, n):
    """Windows of all images in one dimension, as Swin has them."""
    hidden = m.patches(x).permute(0, 2, 3, 1).roll((1, 1), (1, 2))
    windows = hidden.view(len(x), 2, 1, 1, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 2, D)
    out = m.one(windows)
    return (out.softmax(1) * out).view(len(x), -1)


@attack("vision", data=images, conv=conv2)
def masked_patches(m, x, n):
    """Only some patches are visible, each example's own."""
    patches = m.conv(x).flatten(2).mT
    visible = (x.sum(1).flatten(1)).argsort(1)[:, :5]
    return patches[torch.arange(len(x))[:, None], visible].tanh()


@attack("vision", data=images, conv=partial(nn.Conv1d, 2, 3, 3), one=partial(nn.Linear, 4, 4))
def rows_of_images_as_a_batch(m, x, n):
    lines = x.permute(2, 0, 1, 3).flatten(0, 1)
    out = m.conv(m.one(lines)).view(4, len(x), 3, 2)
    return out.transpose(0, 1).tanh()


# Losses and containers


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


# The command line


def table(attacks, engines, sizes, dtypes, say=print):
    """Try attacks with each engine, size and precision; return all verdicts."""
    found = []
    for each in attacks:
        for engine in engines:
            for b in sizes:
                for dtype in dtypes:
                    said = attempt(each, engine, b, dtype)
                    found.append((each, engine, b, dtype, said))
                    cell = f"{engine:6s} b={b or 'B'} {str(dtype)[6:]}"
                    say(f"{str(each)[:58]:58s} {cell:22s} {said[:110]}")
    return found


def size(text):
    return None if text == "B" else int(text)


def arguments(argv):
    parser = argparse.ArgumentParser(description="Attack the single pass.")
    parser.add_argument("--engines", nargs="+", default=["fused", "auto"])
    parser.add_argument("--sizes", nargs="+", type=size, default=[1], help="numbers, or B")
    parser.add_argument("--dtypes", nargs="+", default=["float64"])
    parser.add_argument("--only", default="", help="a cause, or a part of a name")
    parser.add_argument("--bad", action="store_true", help="show nothing but mistakes")
    return parser.parse_args(argv)


def main(argv=None):
    options = arguments(argv)
    torch.set_num_threads(1)
    logging.getLogger("microclip").setLevel(logging.ERROR)  # it says when it gives up, as it should
    chosen = [each for each in ATTACKS if options.only in str(each)]
    dtypes = [getattr(torch, name) for name in options.dtypes]
    say = (lambda line: None) if options.bad else print
    start = time.perf_counter()
    found = table(chosen, options.engines, options.sizes, dtypes, say)
    if options.bad:
        for each, engine, b, dtype, said in found:
            if is_bad(said):
                print(f"{each}, {engine}, b={b or 'B'}, {str(dtype)[6:]}: {said}")
    print(f"{len(chosen)} attacks in {time.perf_counter() - start:.0f} s")
    for engine in options.engines:
        print(f"{engine:9s}", summary(row[-1] for row in found if row[1] == engine))
    return any(is_bad(row[-1]) for row in found)


if __name__ == "__main__":
    sys.exit(main())
