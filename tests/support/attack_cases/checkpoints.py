"""Gradient checkpointing: segments that run again in the backward pass, reentrant or not."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from attack_cases.base import (
    D,
    V,
    attack,
    images,
    layer_norm,
    linear,
    mlp,
    weight,
    words,
    words_table,
)

again = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
CAUSE = "checkpoints"
encoder = partial(nn.TransformerEncoderLayer, D, 2, 8, 0.0, batch_first=True)


def body(m, h):
    return m.two(m.one(h).tanh())


@attack(CAUSE)
def one_inside_another(m, x, n):
    def outer(h):
        return again(lambda g: m.two(g).tanh(), m.one(h).tanh()) + m.one(h)

    return again(outer, m.one(x))


@attack(CAUSE)
def three_levels(m, x, n):
    def inner(h):
        return m.two(h.sin()).tanh()

    def middle(h):
        return m.one(again(inner, m.one(h))).sin()

    return m.two(again(lambda h: again(middle, m.two(h).tanh()) + h, m.one(x)))


@attack(CAUSE)
def reentrant_inside_reentrant(m, x, n):
    def outer(h):
        return m.two(reentrant(lambda g: body(m, g), m.one(h).tanh()))

    return m.one(reentrant(outer, m.one(x)))


@attack(CAUSE)
def reentrant_inside_another(m, x, n):
    return again(lambda h: reentrant(partial(body, m), m.one(h)) * h, m.two(x))


@attack(CAUSE)
def another_inside_reentrant(m, x, n):
    return reentrant(lambda h: m.one(again(partial(body, m), m.one(h)) * h), m.two(x))


@attack(CAUSE)
def reentrant_of_data_alone(m, x, n):
    """Torch gives the parameters inside no gradient."""
    return m.two(reentrant(lambda h: m.one(h).tanh(), x)) + m.two(x)


@attack(CAUSE)
def arguments_by_keyword(m, x, n):
    def layer(h, *, scale, pair):
        return m.two(h * scale) + pair[0] * pair[1][0]

    return again(layer, m.one(x), scale=x.sin(), pair=(x, [m.one(x).tanh()]))


@attack(CAUSE)
def closes_over_the_examples(m, x, n):
    hidden = m.one(x)
    return again(lambda h: m.two(h.tanh()) * x + m.two(hidden), x.cos())


@attack(CAUSE)
def without_parameters(m, x, n):
    return m.two(again(lambda h: h.tanh().exp().softmax(-1), m.one(x)))


@attack(CAUSE)
def reentrant_without_parameters(m, x, n):
    return m.two(reentrant(lambda h: h.tanh().exp().softmax(-1), m.one(x)))


@attack(CAUSE)
def the_same_segment_twice(m, x, n):
    return again(partial(body, m), again(partial(body, m), x).tanh() + x)


@attack(CAUSE)
def reentrant_twice_and_outside(m, x, n):
    """Norms that seem complete are not."""
    hidden = reentrant(partial(body, m), reentrant(partial(body, m), m.one(x)).tanh() + x)
    return m.two(m.one(hidden) + m.two(m.one(x)))


@attack(CAUSE, scale=weight(D), one=linear)
def a_small_parameter_inside_and_outside(m, x, n):
    hidden = reentrant(lambda h: (h * m.scale).tanh() * m.scale, m.one(x))
    return hidden * m.scale


@attack(CAUSE, data=words, table=words_table, one=linear)
def tied_embeddings_inside(m, x, n):
    hidden = again(lambda i: m.one(m.table(i)).tanh(), x)
    return again(lambda h: nn.functional.linear(h, m.table.weight).tanh(), hidden)


@attack(CAUSE, data=words, table=words_table, one=linear)
def tied_embeddings_reentrant(m, x, n):
    hidden = reentrant(lambda h: m.one(h).tanh(), m.table(x))
    return reentrant(lambda h: nn.functional.linear(h, m.table.weight).tanh(), hidden)


@attack(CAUSE, mixes=True)
def mixes_the_examples(m, x, n):
    return again(lambda h: m.two(h - h.mean(0)).tanh(), m.one(x))


@attack(CAUSE, mixes=True)
def mixes_the_examples_reentrant(m, x, n):
    return reentrant(lambda h: m.two(h * h.mean(0)).tanh(), m.one(x))


@attack(CAUSE, mixes=True)
def mixes_them_later(m, x, n):
    return again(lambda h: m.two(h - h.mean(0) if m.step else h).tanh(), m.one(x))


@attack(CAUSE)
def changes_in_place(m, x, n):
    def layer(h):
        out = m.one(h).sin()
        out += h
        return m.two(out).mul_(2).add_(x)

    return again(layer, m.two(x))


@attack(CAUSE)
def changes_in_place_reentrant(m, x, n):
    def layer(h):
        out = m.one(h).sin()
        out += x
        return m.two(out).mul_(2)

    return reentrant(layer, m.two(x)).clone().tanh_()


@attack(CAUSE, one=linear, two=linear, p=weight(D, D))
def parameters_as_arguments(m, x, n):
    return again(lambda h, w, b: (h @ w).tanh() + b, m.one(x), m.p, m.two.bias)


@attack(CAUSE, one=linear, two=linear, p=weight(D, D))
def parameters_as_arguments_reentrant(m, x, n):
    hidden = reentrant(lambda h, w, b: (h @ w).tanh() + b, m.one(x), m.p, m.two.bias)
    return reentrant(lambda w, h: (h @ w).tanh(), m.p, hidden)


@attack(CAUSE, one=linear, p=weight(D, D))
def derived_weight_as_argument(m, x, n):
    w = m.p / m.p.norm()
    return again(lambda h, w: (h @ w).tanh() @ w.exp(), m.one(x), w)


@attack(CAUSE, one=linear, p=weight(D, D))
def derived_weight_as_argument_reentrant(m, x, n):
    w = m.p / m.p.norm()
    return reentrant(lambda h, w: (h @ w).tanh(), m.one(x), w) @ w


@attack(CAUSE, one=linear, p=weight(D, D), scale=weight(D))
def derived_weight_inside(m, x, n):
    def layer(h):
        w = m.scale * (m.p + m.one.weight) / m.p.norm(dim=1, keepdim=True).exp()
        return nn.functional.linear(h, w).tanh()

    return again(layer, again(layer, m.one(x)))


@attack(CAUSE, one=linear, p=weight(D, D), scale=weight(D))
def derived_weight_inside_reentrant(m, x, n):
    def layer(h):
        w = m.scale * (m.p + m.one.weight) / m.p.norm(dim=1, keepdim=True).exp()
        return nn.functional.linear(h, w).tanh()

    return reentrant(layer, reentrant(layer, m.one(x)))


@attack(CAUSE)
def without_early_stop(m, x, n):
    with set_checkpoint_early_stop(False):
        return again(lambda h: again(partial(body, m), m.one(h)).tanh(), m.two(x))


@attack(CAUSE)
def early_stop_with_more_to_do(m, x, n):
    return again(lambda h: (m.two(h.tanh()) + 1, m.one(h).detach())[0].neg(), m.one(x))


@attack(CAUSE)
def sorts_inside(m, x, n):
    def layer(h, n):
        order = n.argsort(stable=True)
        return m.two(m.one(h[order]).tanh())[order.argsort()]

    return again(layer, m.two(x), n)


@attack(CAUSE)
def sorts_inside_reentrant(m, x, n):
    def layer(h, n):
        order = n.argsort(stable=True)
        return m.two(m.one(h[order]).tanh())[order.argsort()]

    return reentrant(layer, m.two(x), n)


@attack(CAUSE)
def unpads_inside(m, x, n):
    real = torch.arange(x.shape[1]) < n[:, None]

    def layer(h):
        out = torch.zeros_like(h)
        out[real] = m.two(m.one(h[real]).tanh())
        return out

    return again(layer, m.one(x))


@attack(CAUSE)
def selective(m, x, n):
    def policy(ctx, op, *args, **kwargs):
        keeps = op in (torch.ops.aten.addmm.default, torch.ops.aten.tanh.default)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return again(partial(body, m), m.one(x), context_fn=contexts)


@attack(CAUSE)
def in_sequence(m, x, n):
    layers = [m.one, torch.tanh, m.two, torch.sin, m.one]
    return checkpoint_sequential(layers, 2, m.two(x), use_reentrant=False)


@attack(CAUSE)
def gradient_inside_the_forward_pass(m, x, n):
    probe = x.detach().requires_grad_()
    out = again(partial(body, m), probe)
    (slope,) = torch.autograd.grad(out.square().sum(), probe)
    return again(partial(body, m), x + 0.1 * slope.sign())


@attack(CAUSE)
def gradient_inside_a_segment(m, x, n):
    def layer(h):
        probe = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m.one(probe).square().sum(), probe)
        return m.two(h + 0.1 * slope.sign())

    return again(layer, m.one(x))


@attack(CAUSE)
def gradient_inside_a_reentrant_segment(m, x, n):
    def layer(h):
        with torch.enable_grad():
            probe = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(m.one(probe).square().sum(), probe)
        return m.two(h + 0.1 * slope.sign())

    return reentrant(layer, m.one(x))


@attack(CAUSE)
def several_results(m, x, n):
    def layer(h):
        a = m.one(h)
        return a.tanh(), {"b": m.two(a), "unused": m.two(h)}, None, a.detach()

    first, rest, _, kept = again(layer, m.two(x))
    return first * rest["b"] + kept


@attack(CAUSE)
def a_result_that_is_not_used(m, x, n):
    again(partial(body, m), x)
    return mlp(m, x)


@attack(CAUSE)
def without_gradients(m, x, n):
    with torch.no_grad():
        target = again(partial(body, m), x)
        other = reentrant(partial(body, m), x)
    return mlp(m, x) - target * other


@attack(CAUSE, one=linear, layer=encoder, norm=layer_norm)
def encoder_layer_inside(m, x, n):
    return m.norm(again(m.layer, m.one(x)))


@attack(CAUSE, one=linear, layer=encoder, norm=layer_norm)
def encoder_layer_inside_reentrant(m, x, n):
    return m.norm(reentrant(m.layer, m.one(x)))


@attack(CAUSE, one=linear, layer=partial(nn.LSTM, D, D, batch_first=True))
def lstm_inside(m, x, n):
    return again(lambda h: m.layer(h)[0], m.one(x))


@attack(CAUSE, data=images, one=partial(nn.Conv2d, 2, 4, 3, padding=1),
        norm=partial(nn.GroupNorm, 2, 4), two=partial(nn.Conv2d, 4, 3, 2))  # fmt: skip
def convolutions_inside(m, x, n):
    hidden = again(lambda h: m.norm(m.one(h)).relu(), x)
    return again(lambda h: nn.functional.max_pool2d(m.two(h), 2), hidden)


@attack(CAUSE, data=words, bag=partial(nn.EmbeddingBag, V, D), p=weight(3, D, D))
def odd_layers_inside(m, x, n):
    return again(lambda i: torch.einsum("bd,kde->bke", m.bag(i), m.p).tanh(), x)


@attack(CAUSE)
def other_hooks_inside(m, x, n):
    def layer(h):
        with torch.autograd.graph.save_on_cpu():
            return body(m, h)

    return again(layer, m.one(x))


@attack(CAUSE)
def a_view_of_the_result(m, x, n):
    hidden = reentrant(lambda h: m.one(h)[:, :2], m.two(x))
    hidden = hidden.mul(2)
    hidden += 1
    return m.two(hidden)


@attack(CAUSE)
def a_list_outside_changes_what_is_done(m, x, n):
    """The segment reads what was there when it first ran."""
    seen = [x]

    def layer(h):
        return m.two(h * seen[0])

    return again(layer, m.one(x)) + m.one(seen[0])


@attack(CAUSE, sizes=(6, 6))
def a_constant_with_as_many_rows_as_examples(m, x, n):
    """Its rows are times, but nothing in the shapes shows it."""

    def layer(h):
        times = torch.linspace(0, 1, h.shape[0]).view(-1, 1, 1).expand(h.shape[0], 6, D)
        return m.two(h) * m.one(times[:, : h.shape[1]])

    return reentrant(layer, m.one(x).transpose(0, 1).roll(1, 1)).roll(-1, 1).transpose(0, 1)
