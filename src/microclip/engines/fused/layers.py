"""Which torch functions have an algebra of their own, and where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from microclip.engines.fused.convolution import convolution
from microclip.engines.fused.elementwise import broadcast, expand
from microclip.engines.fused.norms import batch_norm, group_norm, layer_norm, rms_norm
from microclip.engines.fused.products import addmm, attention, embedding, linear, matmul
from microclip.engines.fused.record import Handler

HANDLERS: dict[Any, Handler] = {
    F.linear: linear,
    torch.addmm: addmm,
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.rms_norm: rms_norm,
    F.conv1d: convolution(1),
    F.conv2d: convolution(2),
    F.conv3d: convolution(3),
    F.multi_head_attention_forward: attention,
    torch.Tensor.expand: expand,
    F.batch_norm: batch_norm,
}
for _sum in (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__):
    HANDLERS[_sum] = broadcast(False, _sum)
for _matmul in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
    HANDLERS[_matmul] = matmul(_matmul)
for _scale in (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__):
    HANDLERS[_scale] = broadcast(True, _scale)
