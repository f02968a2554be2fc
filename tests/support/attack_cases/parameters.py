"""Parameters in unusual places."""

from functools import partial

import torch
from torch import distributions, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from attack_cases.base import (
    D,
    V,
    attack,
    constant,
    kept,
    layer_norm,
    linear,
    masked_mean,
    mlp,
    weight,
    words,
    words_table,
)


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
