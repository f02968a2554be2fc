"""T5's position bias with a batch dimension, so that a single pass can clip it.

T5 shares one bias among all examples of a batch, so the model sums their gradients. One
copy per example has the same values and costs memory: texts x length^2 x heads. That is worth it
for short texts, where streaming takes three times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention


class BiasPerExample(T5Attention):
    """Self-attention of the first layer, which computes the bias for all layers."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        """Attend, as T5 does."""
        if position_bias is None and past_key_values is None:
            position_bias = self.bias(hidden_states)
        return super().forward(
            hidden_states, mask, key_value_states, position_bias, past_key_values, **options
        )

    def bias(self, states: Tensor) -> Tensor:
        """Return (examples, heads, length, length)."""
        examples, length = states.shape[:2]
        places = torch.arange(length, device=states.device)
        numbered: Any = self._relative_position_bucket
        buckets: Tensor = numbered(
            places[None, :] - places[:, None],
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        values: Tensor = self.relative_attention_bias(buckets.expand(examples, length, length))
        return values.permute(0, 3, 1, 2)


def use_bias_per_example(model: Any) -> None:
    """Give both stacks of a T5 a bias per example; weights and their names stay the same."""
    for stack in (model.encoder, model.decoder):
        layer = stack.block[0].layer[0]
        known: Any = layer.SelfAttention
        made: Any = BiasPerExample(
            known.config,
            has_relative_attention_bias=True,
            layer_idx=known.layer_idx,
            is_causal=known.is_causal,
        )
        made.load_state_dict(known.state_dict())
        layer.SelfAttention = made
