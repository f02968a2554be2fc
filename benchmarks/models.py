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
    loss: Callable[[Tensor, Tensor], Tensor]  # one per example, from outputs and targets

    def to(self, device: torch.device) -> Task:
        """Return the task on a device; the model is moved."""
        x, y = self.batch
        return Task(self.model.to(device), (x.to(device), y.to(device)), self.loss)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.batch[0].device

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return one loss per example."""
        return self.loss(self.model(batch[0]), batch[1])

    @property
    def buffer(self) -> int:
        """Bytes of one gradient."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


class Block(nn.Module):
    """Attention and two layers, made of parts that all the libraries compared here know."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.first_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Transformer(nn.Module):
    """A stack of blocks over whatever `embed` makes of the input; `head` on every position."""

    def __init__(self, embed: nn.Module, head: nn.Module, width: int, depth: int, causal: bool):
        super().__init__()
        self.embed, self.head = embed, head
        self.blocks = nn.Sequential(*[Block(width, 4, causal) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))))


def places(x: Tensor) -> Tensor:
    """Number the places of every example; some libraries need positions asked for one by one."""
    ones = torch.ones_like(x if x.dim() == 2 else x[..., 0], dtype=torch.long)
    return ones.cumsum(1) - 1


class Tokens(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(places(tokens))


class Patches(nn.Module):
    def __init__(self, width: int, patch: int, count: int):
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Embedding(count, width)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.cut(images).flatten(2).mT
        return patches + self.positions(places(patches))


def _language(width: int, depth: int, length: int, batch_size: int, vocabulary: int = 1024) -> Task:
    head = nn.Linear(width, vocabulary, bias=False)
    model = Transformer(Tokens(vocabulary, width, length), head, width, depth, causal=True)
    tokens = torch.randint(0, vocabulary, (batch_size, length + 1))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.mT, targets, reduction="none").mean(1)

    return Task(model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), loss)


def _images(model: nn.Module, batch_size: int) -> Task:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none")

    images, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    return Task(model, (images, labels), loss)


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
