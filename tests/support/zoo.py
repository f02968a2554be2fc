"""Models of many kinds, each with a loss and a batch of seven examples: what engines must handle.

Seven is odd and prime on purpose: every micro-batch size but 1 and 7 leaves a ragged end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

EXAMPLES = 7


@dataclass(frozen=True)
class Case:
    model: nn.Module
    loss_fn: Callable[[Any], Tensor]
    batch: Any
    each_loss_fn: Callable[[Any], Tensor] | None = None  # one per example, if loss_fn gives a mean

    @property
    def parameters(self):
        return [p for p in self.model.parameters() if p.requires_grad]


def classifier(model, inputs, classes=5):
    def loss_fn(batch, reduction="mean"):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction)

    batch = {"x": inputs, "y": torch.randint(0, classes, (EXAMPLES,))}
    return Case(model, loss_fn, batch, partial(loss_fn, reduction="none"))


def mlp(dtype):
    """Its loss_fn itself gives one loss per example."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
    case = classifier(model, torch.randn(EXAMPLES, 6, dtype=dtype))
    return replace(case, loss_fn=case.each_loss_fn)


def cnn_batchnorm(dtype):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(54, 5),
    )
    return classifier(model, torch.randn(EXAMPLES, 2, 8, 8, dtype=dtype))


def cnn_groupnorm(dtype):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, groups=4, bias=False),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(36, 5),
    )
    return classifier(model, torch.randn(EXAMPLES, 2, 8, 8, dtype=dtype))


def convolutions(dtype):
    """One and three dimensions, dilation, padding that is no number."""
    model = nn.Sequential(
        nn.Conv1d(2, 8, 3, padding=2, dilation=2),
        nn.Unflatten(2, (2, 2, 3)),
        nn.Conv3d(8, 3, 2, padding="valid", groups=1),
        nn.Flatten(),
        nn.RMSNorm(6),
        nn.Linear(6, 5),
    )
    return classifier(model, torch.randn(EXAMPLES, 2, 12, dtype=dtype))


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of rank two, used twice."""

    def __init__(self, width):
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, width))
        self.up = nn.Parameter(torch.randn(width, 2))

    def forward(self, x):
        return self.frozen(x) + x @ self.down.T @ self.up.T


def low_rank(dtype):
    layer = LowRank(6)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 5).requires_grad_(False))
    return classifier(model, torch.randn(EXAMPLES, 6, dtype=dtype))


class GPT(nn.Module):
    """A small decoder; `tied`: embedding and head share one weight."""

    def __init__(self, vocabulary=13, width=8, depth=2, heads=2, length=6, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]).to(
            self.positions.dtype
        )
        hidden = self.tokens(tokens) + self.positions
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def language_model(model):
    def loss_fn(batch):
        (tokens,) = batch
        logits = model(tokens)[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)

    return Case(model, loss_fn, (torch.randint(0, 13, (EXAMPLES, 6)),))


def gpt(dtype):
    return language_model(GPT())


def tied_embeddings(dtype):
    return language_model(GPT(tied=True))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def lstm(dtype):
    return classifier(Recurrent(), torch.randn(EXAMPLES, 5, 3, dtype=dtype))


class Sometimes(nn.Module):
    """One parameter frozen, one never used, one used only by examples whose first value is > 0."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.rare = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        hidden = self.frozen(x)
        if (x[:, 0] > 0).any():
            hidden = hidden + (x[:, :1] > 0) * self.rare(x)
        return self.head(hidden)


def frozen_and_unused(dtype):
    x = torch.randn(EXAMPLES, 4, dtype=dtype)
    x[:, 0] = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    return classifier(Sometimes(), x)


class Spectral(nn.Module):
    """Complex parameters: a filter in the frequency domain."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))


def complex_parameters(dtype):
    case = classifier(Spectral(), torch.randn(EXAMPLES, 8, dtype=dtype))
    if dtype == torch.float64:  # .double() leaves complex parameters alone
        case.model.filter.data = case.model.filter.data.to(torch.complex128)
    return case


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.shared, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        hidden = self.first(x)
        hidden = checkpoint(
            lambda h: self.shared(h).tanh(), hidden, use_reentrant=self.use_reentrant
        )
        if not self.use_reentrant:  # a second use inside a checkpoint, which reentrant ones split
            hidden = checkpoint(lambda h: self.shared(h).tanh(), hidden, use_reentrant=False)
        return self.head(hidden)


def checkpointed(dtype):
    return classifier(Checkpointed(False), torch.randn(EXAMPLES, 6, dtype=dtype))


def checkpointed_reentrant(dtype):
    return classifier(Checkpointed(True), torch.randn(EXAMPLES, 6, dtype=dtype))


def with_labels(model, batch, each):
    """A transformers model that computes its own mean loss, fed a BatchEncoding.

    `each` gives one loss per example from the logits and the labels.
    """
    return Case(
        model,
        lambda batch: model(**batch).loss,
        hf.BatchEncoding(batch),
        lambda batch: each(model(**batch).logits, batch["labels"]),
    )


def each_class(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def each_token(logits, labels):
    return F.cross_entropy(logits.mT, labels, reduction="none").mean(1)


def each_next_token(logits, labels):
    return each_token(logits[:, :-1], labels[:, 1:])


def each_transcript(logits, labels):
    probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    frames = torch.full((len(labels),), logits.shape[1])
    lengths = torch.full((len(labels),), labels.shape[1])
    loss = F.ctc_loss(probabilities, labels, frames, lengths, blank=0, reduction="none")
    return loss / labels.shape[1]


def hf_gpt2(dtype):
    config = hf.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 17, (EXAMPLES, 6))
    return with_labels(
        hf.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, each_next_token
    )


def hf_llama(dtype):
    config = hf.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 17, (EXAMPLES, 6))
    return with_labels(
        hf.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, each_next_token
    )


def hf_t5(dtype):
    config = hf.T5Config(
        vocab_size=17, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    batch = {
        "input_ids": torch.randint(1, 17, (EXAMPLES, 6)),
        "labels": torch.randint(1, 17, (EXAMPLES, 4)),
    }
    return with_labels(hf.T5ForConditionalGeneration(config), batch, each_token)


def hf_vit(dtype):
    config = hf.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4, num_channels=1, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = {
        "pixel_values": torch.randn(EXAMPLES, 1, 8, 8, dtype=dtype),
        "labels": torch.randint(0, 5, (EXAMPLES,)),
    }
    return with_labels(hf.ViTForImageClassification(config), batch, each_class)


def hf_deit(dtype):
    config = hf.DeiTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4, num_channels=1, num_labels=5, layer_norm_eps=1e-6,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = hf.DeiTForImageClassification(config)
    for name, parameter in model.named_parameters():  # zero as built, which makes gradients huge
        if "token" in name or "position" in name:
            nn.init.trunc_normal_(parameter, std=0.02)
    batch = {
        "pixel_values": torch.randn(EXAMPLES, 1, 8, 8, dtype=dtype),
        "labels": torch.randint(0, 5, (EXAMPLES,)),
    }
    return with_labels(model, batch, each_class)


def hf_bert(dtype):
    config = hf.BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    batch = {
        "input_ids": torch.randint(0, 17, (EXAMPLES, 6)),
        "attention_mask": torch.tensor([[1] * 6] * 4 + [[1] * 4 + [0] * 2] * 3),
        "labels": torch.randint(0, 5, (EXAMPLES,)),
    }
    return with_labels(hf.BertForSequenceClassification(config), batch, each_class)


def hf_wav2vec2_bert(dtype):
    config = hf.Wav2Vec2BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, feature_projection_input_dim=6, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        layerdrop=0.0, conformer_conv_dropout=0.0, apply_spec_augment=False,
        ctc_loss_reduction="mean", pad_token_id=0, conv_depthwise_kernel_size=3,
    )  # fmt: skip
    batch = {
        "input_features": torch.randn(EXAMPLES, 12, 6, dtype=dtype),
        "labels": torch.randint(1, 9, (EXAMPLES, 3)),
    }
    return with_labels(hf.Wav2Vec2BertForCTC(config), batch, each_transcript)


MODELS = {
    build.__name__: build
    for build in (
        mlp, cnn_batchnorm, cnn_groupnorm, convolutions, low_rank, gpt, lstm, tied_embeddings,
        frozen_and_unused, complex_parameters,
        checkpointed, checkpointed_reentrant, hf_gpt2, hf_llama, hf_t5, hf_vit, hf_deit,
        hf_bert, hf_wav2vec2_bert,
    )
}  # fmt: skip


# what the single-pass engine refuses, and a word of its reason
CANNOT_FUSE = {"cnn_batchnorm": "mixes examples"}


@cache
def case(name: str, dtype: torch.dtype) -> Case:
    torch.manual_seed(len(name))
    made = MODELS[name](dtype)
    # not .to(dtype): that would drop the imaginary part of complex parameters
    (made.model.double() if dtype == torch.float64 else made.model).train()
    return made
