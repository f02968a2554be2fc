"""The model: a Conformer with a CTC head, Wav2Vec2-BERT from transformers.

It has no BatchNorm, so the loss of an utterance does not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from microclip_lab.speech.tokens import BLANK
from microclip_lab.training.config import SettingError

Positions = Literal["rotary", "relative", "relative_key"]

# Fixed for every model: masks come from `features`, losses from the recipe, and randomly skipped
# layers would leave parameters without gradients on some processes.
FIXED: dict[str, Any] = {
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "add_adapter": False,
    "pad_token_id": BLANK,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
}


def new(
    *,
    tokens: int,
    inputs: int,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
    kernel_size: int,
    positions: Positions | None,
    dropout: float,
) -> nn.Module:
    """Return a model with random weights."""
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertForCTC

    config = Wav2Vec2BertConfig(
        vocab_size=tokens,
        feature_projection_input_dim=inputs,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        conv_depthwise_kernel_size=kernel_size,
        position_embeddings_type=positions,
        # 0.02, the default, suits 1,024 units; with it a small model starts near zero, and CTC
        # outputs only blanks for hundreds of steps
        initializer_range=max(0.02, 0.8 / hidden_size**0.5),
        hidden_dropout=dropout,
        activation_dropout=dropout,
        attention_dropout=dropout,
        conformer_conv_dropout=dropout,
        final_dropout=dropout,
        **FIXED,
    )
    return Wav2Vec2BertForCTC(config)


def from_checkpoint(checkpoint: str, tokens: int) -> nn.Module:
    """Return a pretrained model (hub name or folder) with a new head."""
    from transformers import Wav2Vec2BertForCTC

    model: nn.Module = Wav2Vec2BertForCTC.from_pretrained(
        checkpoint, vocab_size=tokens, ignore_mismatched_sizes=True, **FIXED
    )
    return model.float()


def extractor_of(checkpoint: str) -> Any:
    """Return the feature extractor that goes with a checkpoint."""
    from transformers import AutoFeatureExtractor, SeamlessM4TFeatureExtractor

    found = AutoFeatureExtractor.from_pretrained(checkpoint)  # type: ignore[no-untyped-call]
    if not isinstance(found, SeamlessM4TFeatureExtractor):
        raise SettingError(
            f"checkpoint must be a Wav2Vec2-BERT model, whose features are made by "
            f"SeamlessM4TFeatureExtractor, but {checkpoint} has {type(found).__name__}."
        )
    return found
