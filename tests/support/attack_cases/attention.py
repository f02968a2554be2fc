"""Attention and recurrence."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from attack_cases.base import D, attack, encoder_layer, kept, linear, masked_mean, weight

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
