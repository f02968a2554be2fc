"""The two models of the dragger benchmark, and one training run, plain or clipped.

The same seed gives the same network, order and distortions to a plain and to a clipped run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import microclip

from dragger_data import Noisy
from models import Block, places

CLASSES = 10


@dataclass(frozen=True)
class Recipe:
    """What is common to all runs on one kind of data."""

    network: Callable[[], nn.Module]
    epochs: int
    batch_size: int = 32
    microbatch_size: int = 4
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    distort: bool = False  # mirror and shift training images, as one does with photographs


class TinyViT(nn.Module):
    """Patches of 2 x 2 on images of 8 x 8: two blocks of width 64, about 0.1M parameters."""

    def __init__(self, width: int = 64, depth: int = 2):
        super().__init__()
        self.cut = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.Sequential(*[Block(width, 4, causal=False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.cut(images).flatten(2).mT
        mixed = self.blocks(patches + self.positions(places(patches)))
        return self.head(self.norm(mixed).mean(1))


def small_cnn() -> nn.Module:
    """Four convolutions with GroupNorm, about 0.1M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((32, 2), (48, 2), (64, 1), (96, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(8, width), nn.ReLU()]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, CLASSES)
    )


DIGITS = Recipe(TinyViT, epochs=40)
CIFAR = Recipe(small_cnn, epochs=12, distort=True)

# called with the rows of a plain step's batch, its logits and its losses
Watch = Callable[[Tensor, Tensor, Tensor], None]
# called after each epoch with how many there were so far
Visit = Callable[[int, nn.Module], None]


def fresh(recipe: Recipe, seed: int) -> nn.Module:
    """Return the network of a seed, untrained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return recipe.network()


def train(
    recipe: Recipe,
    data: Noisy,
    seed: int,
    *,
    ledger: microclip.Ledger | None = None,
    second: microclip.Ledger | None = None,
    watch: Watch | None = None,
    visit: Visit | None = None,
    epochs: int | None = None,
) -> nn.Module:
    """Train: clipped and on record if there is a ledger (or two), else plainly, with a watcher.

    `epochs` ends early on the schedule of the whole run, as scores of young networks want it.
    """
    model = fresh(recipe, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    per_epoch = len(data) // recipe.batch_size
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.0, total_iters=recipe.epochs * per_epoch
    )

    def losses(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    clipper = None
    if ledger is not None:
        clipper = microclip.Clipper(model, recipe.microbatch_size, engine="fused", ledger=ledger)
    draw = torch.Generator().manual_seed(seed)
    for epoch in range(recipe.epochs if epochs is None else epochs):
        order = torch.randperm(len(data), generator=draw)[: per_epoch * recipe.batch_size]
        for rows in order.view(-1, recipe.batch_size):
            images, labels = data.images[rows], data.labels[rows]
            if recipe.distort:
                images = distorted(images, draw)
            optimizer.zero_grad()
            if clipper is not None:
                outcome = clipper.backward(losses, (images, labels), ids=rows)
                if second is not None:
                    second.record(outcome)
            else:
                logits = model(images)
                each = F.cross_entropy(logits, labels, reduction="none")
                each.mean().backward()
                if watch is not None:
                    watch(rows, logits.detach(), each.detach())
            optimizer.step()
            schedule.step()
        if visit is not None:
            visit(epoch + 1, model)
    return model


def distorted(images: Tensor, draw: torch.Generator, reach: int = 3) -> Tensor:
    """Mirror half of the images and shift all of a batch by up to `reach` pixels."""
    mirrored = torch.rand(len(images), generator=draw) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    down, right = torch.randint(0, 2 * reach + 1, (2,), generator=draw).tolist()
    size = images.shape[-1]
    return F.pad(images, (reach,) * 4)[..., down : down + size, right : right + size]


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the model's answers to all images."""
    return torch.cat([model(some) for some in images.split(500)])


def accuracy(model: nn.Module, data: Noisy) -> float:
    """Return the share of the clean test images that are recognised, in percent."""
    hits = logits(model, data.test_images).argmax(1) == data.test_labels
    return 100 * hits.double().mean().item()
