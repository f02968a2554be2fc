"""The torch functions that the recorder knows how to take apart, and their handlers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from microclip.engines.single_pass import elementwise, norms, products, recurrent
from microclip.engines.single_pass.convolution import convolution
from microclip.engines.single_pass.torch_functions import Handler

HANDLERS: dict[Any, Handler] = {
    F.linear: products.linear,
    torch.addmm: products.addmm,
    F.embedding: products.embedding,
    F.embedding_bag: products.embedding_bag,
    torch.Tensor.__getitem__: products.get_item,
    torch.index_select: products.index_select,
    torch.Tensor.index_select: products.index_select,
    F.layer_norm: norms.layer_norm,
    F.group_norm: norms.group_norm,
    F.rms_norm: norms.rms_norm,
    F.instance_norm: norms.instance_norm,
    F.batch_norm: norms.batch_norm,
    torch.batch_norm: norms.torch_batch_norm,
    F.conv1d: convolution(1),
    F.conv2d: convolution(2),
    F.conv3d: convolution(3),
    F.prelu: elementwise.prelu,
    torch.Tensor.prelu: elementwise.prelu,
    torch.Tensor.expand: elementwise.expand,
    torch.Tensor.expand_as: elementwise.expand_as,
    torch.broadcast_to: elementwise.broadcast_to,
    torch.Tensor.repeat: elementwise.repeat(torch.Tensor.repeat),
    torch.tile: elementwise.repeat(torch.tile),
    torch.Tensor.tile: elementwise.repeat(torch.Tensor.tile),
    torch.cat: elementwise.concatenation(torch.cat),
    torch.stack: elementwise.concatenation(torch.stack),
    torch.Tensor.__setitem__: elementwise.set_item,
    torch.Tensor.copy_: elementwise.copy_,
    torch.masked_fill: elementwise.masked_fill,
    torch.Tensor.masked_fill: elementwise.masked_fill,
    torch.Tensor.masked_fill_: elementwise.masked_fill_,
    torch.Tensor.index_put_: elementwise.index_put_,
    torch.lstm: recurrent.lstm,
    torch.gru: recurrent.gru,
    torch.rnn_tanh: recurrent.rnn_tanh,
    torch.rnn_relu: recurrent.rnn_relu,
    torch.lstm_cell: recurrent.lstm_cell,
    torch.gru_cell: recurrent.gru_cell,
    torch.rnn_tanh_cell: recurrent.rnn_cell(torch.tanh),
    torch.rnn_relu_cell: recurrent.rnn_cell(torch.relu),
}
for _module, _name in ((torch, "_grouped_mm"), (F, "grouped_mm")):  # newer than the oldest torch
    if hasattr(_module, _name):
        HANDLERS[getattr(_module, _name)] = products.grouped_mm
for _matmul in (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.mm,
    torch.Tensor.mm,
):
    HANDLERS[_matmul] = products.matmul(_matmul)
