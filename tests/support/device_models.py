"""Small models for the tests of devices, each with inputs for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

EXAMPLES = 8


class Tokens(nn.Module):
    """Embeddings, attention that leaves padding out, and the mean over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0])
        kept = (~padding).to(x.dtype).unsqueeze(2)
        return self.head((x * kept).sum(1) / kept.sum(1))


class Recurrent(nn.Module):
    """An RNN, and of its outputs the one at a place that each example names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.rnn, self.head = nn.RNN(6, 7, batch_first=True), nn.Linear(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.rnn(self.embedding(tokens))
        last = (tokens != 0).sum(1).sub(1).clamp(min=0)
        return self.head(outputs.gather(1, last[:, None, None].expand(-1, 1, 7)).squeeze(1))


class Sorted(nn.Module):
    """Brings examples into the order of their length, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        order = (tokens != 0).sum(1).argsort(stable=True)
        hidden = self.embedding(tokens[order]).mean(1)
        return self.head(hidden[order.argsort()])


def _mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), *more, nn.Linear(16, 5))


def _conv(normalization: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), normalization, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 5),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "dropout": lambda: _mlp(nn.Dropout(0.5)),
    "conv": lambda: _conv(nn.GroupNorm(2, 4)),
    "batchnorm": lambda: _conv(nn.BatchNorm2d(4)),
    "tokens": Tokens,
    "recurrent": Recurrent,
    "sorted": Sorted,
}


def inputs(model: str, step: int) -> Tensor:
    """Return the inputs of a step."""
    generator = torch.Generator().manual_seed(step)
    if model in ("conv", "batchnorm"):
        return torch.randn(EXAMPLES, 2, 6, 6, generator=generator)
    if model in ("tokens", "recurrent", "sorted"):
        tokens = torch.randint(1, 11, (EXAMPLES, 6), generator=generator)
        lengths = torch.randint(2, 7, (EXAMPLES, 1), generator=generator)
        return tokens.where(torch.arange(6) < lengths, 0)
    return torch.randn(EXAMPLES, 6, generator=generator) * (1 + torch.arange(EXAMPLES)[:, None])
