"""T5: a small one with random weights, or a checkpoint's. Knows nothing of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microclip_lab.training.config import SettingError


@dataclass(frozen=True)
class Size:
    """How large a T5 is."""

    width: int
    feed_forward: int
    heads: int
    encoder_layers: int
    decoder_layers: int


def small(size: Size, vocabulary: int, dropout: float) -> nn.Module:
    """Return a T5 with random weights, of version 1.1: gated, nothing scaled before the logits.

    transformers draws embeddings with deviation 1, for an optimizer whose steps grow with the
    weights. AdamW's do not: words then hardly move from where they began, and logits begin at a
    multiple of what they should be. So they are drawn smaller here, 1 / sqrt(width).
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
            tie_word_embeddings=False,  # T5's way of saying that outputs are not scaled
            decoder_start_token_id=0,
        )
    )
    with torch.no_grad():
        for weight in (made.shared.weight, made.lm_head.weight):  # one and the same, or two
            weight.normal_(std=size.width**-0.5)
    use_bias_per_example(made)
    return made


def of_checkpoint(checkpoint: str, pretrained: bool, dropout: float | None) -> nn.Module:
    """Return a checkpoint's T5, or one of its size with random weights.

    Args:
        checkpoint: A name on the hub, or a folder.
        pretrained: Whether its weights are wanted.
        dropout: In place of the checkpoint's own, unless None.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    options: dict[str, Any] = {} if dropout is None else {"dropout_rate": dropout}
    maker: Any = T5ForConditionalGeneration
    try:
        config: Any = T5Config.from_pretrained(checkpoint, **options)
        if pretrained:
            # in 32 bits, whatever it was saved in: mixed precision is the training's business
            loaded: nn.Module = maker.from_pretrained(
                checkpoint, config=config, dtype=torch.float32
            )
            return loaded
    except (OSError, ValueError) as error:
        raise SettingError(
            f"The T5 checkpoint {checkpoint} could not be loaded: {error} Name one of the hub, or "
            "a folder with config.json and model.safetensors; --no-pretrained takes its "
            "configuration and draws the weights."
        ) from error
    drawn: nn.Module = maker(config)
    return drawn
