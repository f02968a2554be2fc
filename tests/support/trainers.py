"""transformers' Trainer on tiny models, with expected gradients, for its tests."""

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

import properties
import reference

# Every train() collects garbage, which takes longer than training these models: exempt the imports.
gc.collect()
gc.freeze()

COUNT = 22  # examples; with 8 in a step, the last step has 6
ONE_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}  # per step


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
    """Return examples; language models get different numbers of labels, to vary token counts."""
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
    """Keeps the gradients that the optimizer is about to use."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(
            [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        )


class InOrder:
    """Takes the examples in order, without shuffling."""

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


def windows(size, steps):
    """Return, for each optimizer step, the rows of its batches."""
    parts = [list(range(i, min(i + size, COUNT))) for i in range(0, COUNT, size)]
    return [parts[i : i + steps] for i in range(0, len(parts), steps)]


def own_loss(model, batch):
    return model(**batch).loss


def clipped(model, loss, batches, sizes, **domains):
    """Return the clipped gradient of these micro-batches, by the reference."""
    gradients = reference.microbatch_gradients(
        lambda batch: loss(model, batch), list(model.parameters()), batches
    )
    weigh = reference.WEIGH["MinNorm()"]
    return reference.clipped_gradient(gradients, sizes, weigh, **domains)[0]


def stacked(data, rows):
    return {key: torch.stack([data[i][key] for i in rows]) for key in data[0]}


def wanted(model, data, parts, b):
    """Return the clipped gradient of one optimizer step, by the reference."""
    size = len(parts[0])
    if b is not None and b > size:
        rows = [i for part in parts for i in part]
        pieces = [rows[i : i + b] for i in range(0, len(rows), b)]
        batches, sizes = [stacked(data, piece) for piece in pieces], [len(p) for p in pieces]
    else:
        cuts = [piece for part in parts for piece in cut(stacked(data, part), b)]
        batches, sizes = [piece.batch for piece in cuts], [piece.size for piece in cuts]
    return clipped(model.train(), own_loss, batches, sizes)


def changed(kind, change):
    """Return examples after `change(row, example)` has edited each in place."""
    data = examples(kind)
    for row, example in enumerate(data):
        change(row, example)
    return data


def one_length_per_batch(row, example):
    """Texts of one length within each batch of two, different between batches."""
    length = 3 + row // 2 % 4
    example["input_ids"] = example["labels"] = example["input_ids"][:length]


def assert_wide_steps(run, watch, data, loss, size, steps, b):
    """Check every step; micro-batches of b span batches of this size."""
    model = run.model.train()
    taken = windows(size, steps)
    assert len(watch.gradients) == len(taken)
    for found, parts in zip(watch.gradients, taken, strict=True):
        rows = [row for part in parts for row in part]
        pieces = [rows[i : i + b] for i in range(0, len(rows), b)]
        gradients = []
        for piece in pieces:
            lengths = {len(data[row].get("input_ids", ())) for row in piece}
            if len(lengths) == 1:
                gradients += reference.microbatch_gradients(
                    lambda batch: loss(model, batch), list(model.parameters()),
                    [stacked(data, piece)],
                )  # fmt: skip
            else:  # different lengths: the mean over all their tokens
                gradients += [_mean_over_tokens(model, data, piece, loss)]
        sizes = [len(piece) for piece in pieces]
        twin = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]
        properties.assert_close(found, twin, 1e-5)


def _mean_over_tokens(model, data, rows, loss):
    each = reference.microbatch_gradients(
        lambda batch: loss(model, batch),
        list(model.parameters()),
        [stacked(data, [r]) for r in rows],
    )
    counts = [len(data[row]["labels"]) - 1 for row in rows]
    return reference.weighted_sum(each, [count / sum(counts) for count in counts])
