"""Micro-batches larger than a batch: the loss of all their examples, or a refusal."""

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

import properties
import reference
from trainers import (
    COUNT,
    MODELS,
    Ordered,
    OrderedSeq2Seq,
    Watch,
    assert_wide_steps,
    bert,
    changed,
    ctc,
    examples,
    gpt2,
    llama,
    mixtral,
    one_length_per_batch,
    own_loss,
    stacked,
    trainer,
)  # fmt: skip


def config(**more):
    torch.manual_seed(0)
    return BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **more,
    )  # fmt: skip


def segformer():
    torch.manual_seed(0)
    sizes = SegformerConfig(
        num_channels=1, num_encoder_blocks=1, depths=[1], sr_ratios=[1], hidden_sizes=[8],
        patch_sizes=[3], strides=[2], num_attention_heads=[1], mlp_ratios=[1],
        decoder_hidden_size=8, num_labels=3, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(sizes)
    model.decode_head.batch_norm = torch.nn.Identity()  # batch statistics would couple the examples
    return model


class Pairs(CLIPModel):
    """Always returns its loss."""

    def forward(self, input_ids=None, pixel_values=None):
        return super().forward(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def clip():
    torch.manual_seed(0)
    text = {
        "vocab_size": 17, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 8, "projection_dim": 8,
        "eos_token_id": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "projection_dim": 8,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "num_channels": 1,
    }  # fmt: skip
    return Pairs(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def some_left_out(row, example):
    if row % 3 == 1:
        example["labels"] = torch.tensor(-100)


def maps(row, example):
    generator = torch.Generator().manual_seed(row)
    example["labels"] = torch.randint(0, 3, (8, 8), generator=generator)
    example["labels"][: row % 6] = 255


def answers(row, example):
    example["start_positions"], example["end_positions"] = torch.tensor(row % 6), torch.tensor(5)
    del example["labels"]


def answers_outside(row, example):
    answers(row, example)
    if row % 3 == 1:
        example["start_positions"] = example["end_positions"] = torch.tensor(6)


def answers_cut_off(row, example):
    answers(row, example)
    if row % 3 == 1:
        example["end_positions"] = torch.tensor(6)


def sentences(row, example):
    example["next_sentence_label"] = torch.tensor(row % 2)


def wishes(row, example):
    example["labels"] = torch.tensor(float(row % 5))


def many_wishes(row, example):
    example["labels"] = torch.tensor([float(row % 2), float(row % 3 == 0), 1.0])


def pairs(row, example):
    example["pixel_values"] = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(row))
    del example["labels"]


def nothing(row, example):
    """No labels in the first part of a micro-batch, in all of another, in the end of a third."""
    if row in (0, 1, 4, 5, 6, 7, 10, 11):
        example["labels"] = torch.full_like(example["labels"], -100)


def first_label_only(row, example):
    """Keep only the first label, which no token predicts."""
    if row in (0, 1, 4, 5, 6, 7, 10, 11):
        example["labels"][1:] = -100


def summing():
    model = ctc()
    model.config.ctc_loss_reduction = "sum"
    return model


CASES = {
    "gpt2": (gpt2, examples("llama")),
    "gpt2-lengths": (gpt2, changed("llama", one_length_per_batch)),
    "labels-left-out": (bert, changed("bert", some_left_out)),
    "tokens": (lambda: BertForTokenClassification(config(num_labels=17)), examples("llama")),
    "masked": (lambda: BertForMaskedLM(config()), examples("llama")),
    "segmentation": (segformer, changed("vit", maps)),
    "answers": (lambda: BertForQuestionAnswering(config()), changed("llama", answers)),
    "outside": (lambda: BertForQuestionAnswering(config()), changed("llama", answers_outside)),
    "ctc-sum": (summing, examples("ctc")),
    "regression": (
        lambda: BertForSequenceClassification(config(num_labels=1)), changed("bert", wishes),
    ),
    "multi-label": (
        lambda: BertForSequenceClassification(
            config(num_labels=3, problem_type="multi_label_classification")
        ),
        changed("bert", many_wishes),
    ),
    "experts": (lambda: mixtral(output_router_logits=False), examples("llama")),
}  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize(("size", "steps", "b"), [(2, 4, 4), (2, 4, 3), (1, 8, 4)])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_all_examples(tmp_path, name, size, steps, b):
    make, data = CASES[name]
    watch = Watch()
    run = trainer(
        tmp_path, make(), data, b=b, watch=[watch], per_device_train_batch_size=size,
        gradient_accumulation_steps=steps,
    )  # fmt: skip
    run.train()
    assert_wide_steps(run, watch, data, own_loss, size, steps, b)


@pytest.mark.sample(4)
@pytest.mark.parametrize("change", [nothing, first_label_only])
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(("size", "b"), [(2, 4), (4, 4), (8, 4)])
def test_nothing_to_learn(tmp_path, make, change, size, b):
    """A micro-batch without labels adds nothing, not NaN."""
    data, watch = changed("llama", change), Watch()
    model = make()
    run = trainer(
        tmp_path, model, data, b=b, watch=[watch], per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size,
    )  # fmt: skip
    run.train()

    def loss(model, batch):
        counted = (batch["labels"][:, 1:] != -100).sum()
        scores = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        wanted = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(scores, wanted, reduction="sum") / counted.clamp(min=1)

    assert_wide_steps(run, watch, data, loss, size, 8 // size, b)
    assert (run.clipper.outcome.norms > 0).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "data", "match"),
    [
        (lambda: BertForQuestionAnswering(config()), changed("llama", answers_cut_off), "end out"),
        (lambda: BertForPreTraining(config()), changed("llama", sentences), "neither a mean"),
        (lambda: mixtral(output_router_logits=True), examples("llama"), "adds 'aux_loss'"),
        (clip, changed("llama", pairs), "neither a mean"),
    ],
    ids=["answers-cut-off", "two-means", "router", "contrastive"],
)
def test_models_whose_loss_is_not_a_mean_are_refused(tmp_path, make, data, match):
    run = trainer(tmp_path, make(), data, b=4, per_device_train_batch_size=2,
                  gradient_accumulation_steps=4)  # fmt: skip
    with pytest.raises(NotImplementedError, match=match):
        run.train()
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", MODELS)
def test_dropout_is_not_refused(tmp_path, kind):
    """Not even with a custom loss, which is measured with dropout turned off."""
    model = MODELS[kind]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    if kind == "ctc":
        model.config.apply_spec_augment = True
        model.config.mask_time_prob, model.config.mask_time_length = 0.5, 2

    class Custom(OrderedSeq2Seq if kind == "t5" else Ordered):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    run = trainer(tmp_path, model, examples(kind)[:8], kind=Custom, b=4,
                  per_device_train_batch_size=2, gradient_accumulation_steps=4)  # fmt: skip
    run.train()
    assert run.clipper.outcome.sizes.tolist() == [4, 4]


def test_batches_larger_than_the_arguments_say(tmp_path):
    """From a custom loader; micro-batches still have the requested size."""

    class Loading(Ordered):
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=11)
            return self.accelerator.prepare(loader)

    data, watch = examples("bert"), Watch()
    run = trainer(tmp_path, bert(), data, kind=Loading, b=5, watch=[watch],
                  per_device_train_batch_size=2, gradient_accumulation_steps=2)  # fmt: skip
    run.train()
    assert run.clipper.outcome.sizes.tolist() == [5, 5, 5, 5, 2]
    assert_wide_steps(run, watch, data, own_loss, COUNT, 1, 5)


def test_batch_norm_is_named(tmp_path):
    model = bert()
    model.dropout = torch.nn.BatchNorm1d(8)
    run = trainer(tmp_path, model, examples("bert"), b=8)
    with pytest.warns(RuntimeWarning, match="dropout is a BatchNorm1d"):
        run.train()


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_bf16(tmp_path, kind):
    data, watch = examples(kind), Watch()
    run = trainer(tmp_path, MODELS[kind](), data, b=8, watch=[watch], bf16=True)
    run.train()
    twin = MODELS[kind]().train()
    found = watch.gradients[0]
    (wanted,) = reference.microbatch_gradients(
        lambda batch: twin(**batch).loss, list(twin.parameters()), [stacked(data, range(8))]
    )
    properties.assert_close(found, wanted, 0.05)
