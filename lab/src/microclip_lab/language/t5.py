"""T5: a small one with random weights, or a pretrained one. Knows nothing of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microclip_lab.training.config import SettingError


@dataclass(frozen=True)
class Size:
    """The size of a T5."""

    width: int
    feed_forward: int
    heads: int
    encoder_layers: int
    decoder_layers: int


def small(size: Size, vocabulary: int, dropout: float) -> nn.Module:
    """Return a T5 v1.1 (gated, unscaled logits) with random weights.

    transformers initializes embeddings with deviation 1, for an optimizer whose steps grow with the
    weights. With AdamW such embeddings hardly move, and logits start far too large. So they are
    initialized with deviation 1 / sqrt(width) here.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    from microclip_lab.language.position_bias import use_bias_per_example

    config: Any = T5Config
    made = T5ForConditionalGeneration(
        config(
            vocab_size=vocabulary,
            d_model=size.width,
            d_kv=size.width // size.heads,
            d_ff=size.feed_forward,
            num_heads=size.heads,
            num_layers=size.encoder_layers,
            num_decoder_layers=size.decoder_layers,
            dropout_rate=dropout,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,  # in T5 this also turns off the scaling of outputs
            decoder_start_token_id=0,
        )
    )
    with torch.no_grad():
        for weight in (made.shared.weight, made.lm_head.weight):  # tied or not
            weight.normal_(std=size.width**-0.5)
    use_bias_per_example(made)
    return made


def of_checkpoint(checkpoint: str, pretrained: bool, dropout: float | None) -> nn.Module:
    """Return a pretrained T5, or one of its size with random weights.

    Args:
        checkpoint: A name on the hub, or a folder.
        pretrained: Whether to load its weights.
        dropout: Replaces the checkpoint's, unless None.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    options: dict[str, Any] = {} if dropout is None else {"dropout_rate": dropout}
    maker: Any = T5ForConditionalGeneration
    try:
        config: Any = T5Config.from_pretrained(checkpoint, **options)
        if pretrained:
            # in 32 bits, however it was saved: mixed precision is up to the training loop
            loaded: nn.Module = maker.from_pretrained(
                checkpoint, config=config, dtype=torch.float32
            )
            return loaded
    except (OSError, ValueError) as error:
        raise SettingError(
            f"The T5 checkpoint {checkpoint} could not be loaded: {error} Give a hub name, or "
            "a folder with config.json and model.safetensors; --no-pretrained uses its "
            "configuration with random weights."
        ) from error
    drawn: nn.Module = maker(config)
    return drawn
