"""The models that costs are measured on, each with a batch and one loss per example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    losses: Callable[[tuple[Tensor, Tensor]], Tensor]  # one per example

    @property
    def buffer(self) -> int:
        """Bytes of one gradient."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


class Transformer(nn.Module):
    """A stack of blocks over whatever `embed` makes of the input; `head` on every position."""

    def __init__(self, embed: nn.Module, head: nn.Module, width: int, depth: int, causal: bool):
        super().__init__()
        self.embed, self.head = embed, head
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=self.causal)
        return self.head(self.norm(hidden))


class Tokens(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Patches(nn.Module):
    def __init__(self, width: int, patch: int, count: int):
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(1, count, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        return self.cut(images).flatten(2).mT + self.positions


def _language(width: int, depth: int, length: int, batch_size: int, vocabulary: int = 1024) -> Task:
    head = nn.Linear(width, vocabulary, bias=False)
    model = Transformer(Tokens(vocabulary, width, length), head, width, depth, causal=True)
    tokens = torch.randint(0, vocabulary, (batch_size, length + 1))

    def losses(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).mT, batch[1], reduction="none").mean(1)

    return Task(model, (tokens[:, :-1], tokens[:, 1:]), losses)


def _images(model: nn.Module, batch_size: int) -> Task:
    def losses(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    images, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    return Task(model, (images, labels), losses)


def gpt(batch_size: int) -> Task:
    """About 3M parameters, 64 tokens."""
    return _language(224, 4, 64, batch_size)


def wide(batch_size: int) -> Task:
    """A wider one, 32 tokens."""
    return _language(448, 4, 32, batch_size)


def vit(batch_size: int) -> Task:
    """Patches of 4 x 4 on images of 32 x 32."""
    stack = Transformer(Patches(192, 4, 64), nn.Identity(), 192, 4, causal=False)
    pooled = nn.Sequential(stack, nn.Flatten(1), nn.Linear(64 * 192, 10))
    return _images(pooled, batch_size)


def conv(batch_size: int) -> Task:
    """A convolutional network with GroupNorm."""
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((32, 1), (64, 2), (128, 2), (128, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(8, width), nn.ReLU()]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return _images(model, batch_size)


TASKS = {"gpt": gpt, "wide": wide, "vit": vit, "conv": conv}
