"""The Trainer of transformers at work on tiny models: shared by its tests."""

import gc

import torch
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2BertConfig,
    Wav2Vec2BertForCTC,
)

from microclip.integrations.transformers import ClippedSeq2SeqTrainer, ClippedTrainer
from microclip.microbatches import cut

import reference

# Every train() collects garbage, which takes longer than these models do: not what was imported.
gc.collect()
gc.freeze()

COUNT = 22  # examples: with 8 in a step, the last step has 6


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=17, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config)


def ctc():
    torch.manual_seed(0)
    config = Wav2Vec2BertConfig(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, feature_projection_input_dim=4, conv_depthwise_kernel_size=3,
        ctc_loss_reduction="mean", pad_token_id=0, apply_spec_augment=False, layerdrop=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, conformer_conv_dropout=0.0,
    )  # fmt: skip
    return Wav2Vec2BertForCTC(config)


def mixtral(**more):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, max_position_embeddings=8,
        num_local_experts=4, num_experts_per_tok=2, **more,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=17, n_embd=8, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def examples(kind):
    """Labels of different lengths for the language models: norms must not follow token counts."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(COUNT):
        tokens = torch.randint(1, 17, (6,), generator=generator)
        if kind == "vit":
            pixels = torch.randn(1, 8, 8, generator=generator)
            found.append({"pixel_values": pixels, "labels": tokens[0] % 3})
            continue
        if kind == "ctc":
            frames = torch.randn(12, 4, generator=generator)
            mask = (torch.arange(12) < 9 + i % 4).long()
            words = torch.where(torch.arange(4) < 1 + i % 4, tokens[:4] % 6 + 1, -100)
            found.append({"input_features": frames, "attention_mask": mask, "labels": words})
            continue
        labels = tokens.clone()
        labels[: i % 5] = -100
        found.append({"input_ids": tokens, "labels": labels if kind != "bert" else tokens[0] % 3})
    return found


MODELS = {"bert": bert, "llama": llama, "t5": t5, "vit": vit, "ctc": ctc}


class Watch(TrainerCallback):
    """Keeps the gradients that the optimizer is about to see."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(
            [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        )


class InOrder:
    """The examples in the order given."""

    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


class Ordered(InOrder, ClippedTrainer):
    pass


class OrderedSeq2Seq(InOrder, ClippedSeq2SeqTrainer):
    pass


def trainer(folder, model, data, *, kind=Ordered, b=None, watch=(), clip=None, **arguments):
    options = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.0,
        "num_train_epochs": 1, "max_grad_norm": 0.0, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", **arguments,
    }  # fmt: skip
    seq2seq = issubclass(kind, ClippedSeq2SeqTrainer)
    args = (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(str(folder), **options)
    more = {} if kind is InOrderPlain else {"microbatch_size": b, **(clip or {})}
    return kind(model, args, train_dataset=data, callbacks=list(watch), **more)


class InOrderPlain(InOrder, Trainer):
    pass


def windows(sub_step, steps):
    """The examples of each optimizer step, as lists of what the model sees at once."""
    parts = [list(range(i, min(i + sub_step, COUNT))) for i in range(0, COUNT, sub_step)]
    return [parts[i : i + steps] for i in range(0, len(parts), steps)]


def stacked(data, rows):
    return {key: torch.stack([data[i][key] for i in rows]) for key in data[0]}


def wanted(model, data, parts, b):
    """The twin's gradient of one optimizer step."""
    size = len(parts[0])
    if b is not None and b > size:
        rows = [i for part in parts for i in part]
        pieces = [rows[i : i + b] for i in range(0, len(rows), b)]
        batches, sizes = [stacked(data, piece) for piece in pieces], [len(p) for p in pieces]
    else:
        cuts = [piece for part in parts for piece in cut(stacked(data, part), b)]
        batches, sizes = [piece.batch for piece in cuts], [piece.size for piece in cuts]
    model.train()
    gradients = reference.microbatch_gradients(
        lambda batch: model(**batch).loss, list(model.parameters()), batches
    )
    return reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]
