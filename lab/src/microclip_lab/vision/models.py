"""ViT and DeiT of transformers, small or large, new or from a checkpoint."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Architecture = Literal["vit", "deit"]
# of first weights: DeiT-B's at its width; what goes through a narrower layer would shrink with it
DEVIATION, WIDTH = 0.02, 768
EPSILON = 1e-6  # transformers' 1e-12 is below what float32 can tell from the variance


class DropPath(nn.Module):
    """Leave out a branch of a layer for some examples: stochastic depth.

    It takes the place of the dropout that transformers' layers end their branches with. It draws
    with F.dropout, so that everything that knows how to hold dropout still can hold this still.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        """Return the branch, or 0, and more of what is left."""
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
    """Return a classifier with first weights drawn from torch's generator."""
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
    """Return the classifier of a hub name or a folder; a head of another size is begun anew."""
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
    """Draw the first tokens and positions as DeiT does.

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
    """Let deeper layers be left out more often, the last with the probability given."""
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
