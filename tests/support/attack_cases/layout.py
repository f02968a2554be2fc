"""Layout: examples lie along another dimension than the first."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attack_cases.base import (
    D,
    attack,
    constant,
    encoder_layer,
    images,
    layer_norm,
    linear,
    mlp,
    rows,
    shaped,
    weight,
)


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
