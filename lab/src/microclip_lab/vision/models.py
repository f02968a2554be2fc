"""ViT and DeiT from transformers, with random weights or from a checkpoint."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Architecture = Literal["vit", "deit"]
# of initial weights: DeiT-B's at its width; signals would shrink in narrower layers
DEVIATION, WIDTH = 0.02, 768
EPSILON = 1e-6  # transformers' 1e-12 is lost in float32


class DropPath(nn.Module):
    """Stochastic depth: skip a branch of a layer for some examples.

    It replaces the dropout at the end of each branch of transformers' layers. It uses F.dropout, so
    that whatever can freeze dropout can freeze this too.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        """Return the branch, or 0, rescaled to keep the mean."""
        if not self.training or not self.probability:
            return branch
        each = branch.new_ones(len(branch), *[1] * (branch.dim() - 1))
        return branch * F.dropout(each, self.probability)

    def extra_repr(self) -> str:
        """Say how often."""
        return f"probability={self.probability}"


def new(
    architecture: Architecture,
    *,
    classes: int,
    channels: int,
    image_size: int,
    patch_size: int,
    hidden_size: int,
    layers: int,
    heads: int,
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> nn.Module:
    """Return a classifier with random weights from torch's global generator."""
    from transformers import (
        DeiTConfig,
        DeiTForImageClassification,
        ViTConfig,
        ViTForImageClassification,
    )

    kinds: dict[Architecture, tuple[Any, Any]] = {
        "vit": (ViTConfig, ViTForImageClassification),
        "deit": (DeiTConfig, DeiTForImageClassification),
    }
    config, model = kinds[architecture]
    built = model(
        config(
            num_labels=classes,
            num_channels=channels,
            image_size=image_size,
            patch_size=patch_size,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            hidden_dropout_prob=dropout,
            layer_norm_eps=EPSILON,
            initializer_range=DEVIATION * (WIDTH / hidden_size) ** 0.5,
        )
    )
    if architecture == "deit":
        _begin_with_differing_tokens(built.deit.embeddings, built.config.initializer_range)
    _drop_paths(built, drop_path)
    return cast(nn.Module, built)


def from_checkpoint(
    name: str, *, classes: int, channels: int, image_size: int, drop_path: float = 0.0
) -> nn.Module:
    """Return a pretrained classifier; a head of another size is initialized anew."""
    from transformers import AutoConfig, AutoModelForImageClassification

    config = AutoConfig.from_pretrained(name)
    _refuse_another("image_size", "image-size", config, image_size, name)
    _refuse_another("num_channels", None, config, channels, name)
    model = AutoModelForImageClassification.from_pretrained(
        name, num_labels=classes, ignore_mismatched_sizes=True
    )
    _drop_paths(model, drop_path)
    return cast(nn.Module, model)


def _refuse_another(fact: str, option: str | None, config: Any, found: int, name: str) -> None:
    expected = getattr(config, fact, found)
    if expected != found:
        remedy = f"Say --{option} {expected}" if option else "Choose another one"
        raise ValueError(
            f"The checkpoint {name} has {fact} = {expected}, but the pictures have {found}. "
            f"{remedy}, or train without a checkpoint."
        )


@torch.no_grad()
def _begin_with_differing_tokens(embeddings: Any, deviation: float) -> None:
    """Initialize tokens and positions as DeiT does.

    transformers begins DeiT with zeros there. A token of nothing but zeros has no variance, which
    layer norm divides by: the first gradients are ten thousand times too long, and any clipping
    would seem to help.
    """
    for weights in (
        embeddings.cls_token,
        embeddings.distillation_token,
        embeddings.position_embeddings,
    ):
        nn.init.trunc_normal_(weights, std=deviation)


def _drop_paths(model: nn.Module, highest: float) -> None:
    """Skip deeper layers more often, the last one with the given probability."""
    if not highest:
        return
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "layernorm_before")
        and isinstance(getattr(module, "dropout", 0), nn.Dropout)
    ]
    if not layers:
        raise ValueError(
            f"drop_path is for ViT and DeiT, but {type(model).__name__} has no layers like theirs. "
            "Say --drop-path 0."
        )
    for depth, layer in enumerate(layers):
        dropped = DropPath(highest * depth / max(1, len(layers) - 1))
        before = cast(nn.Dropout, layer.dropout)
        layer.dropout = nn.Sequential(before, dropped) if before.p else dropped
