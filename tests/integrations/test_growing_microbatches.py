"""Micro-batches of several batches in the Trainer: the loss of all examples, or a refusal."""

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
    bert,
    ctc,
    examples,
    gpt2,
    llama,
    mixtral,
    stacked,
    trainer,
    windows,
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
    model.decode_head.batch_norm = torch.nn.Identity()  # it would mix examples
    return model


class Pairs(CLIPModel):
    """Gives its loss without being asked for it."""

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


def changed(kind, change):
    data = examples(kind)
    for row, example in enumerate(data):
        change(row, example)
    return data


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
    """The first part of one micro-batch, the whole of another, and the second part of a third."""
    if row in (0, 1, 4, 5, 6, 7, 10, 11):
        example["labels"] = torch.full_like(example["labels"], -100)


def first_label_only(row, example):
    """Which no token predicts."""
    if row in (0, 1, 4, 5, 6, 7, 10, 11):
        example["labels"][1:] = -100


def summing():
    model = ctc()
    model.config.ctc_loss_reduction = "sum"
    return model


def padded(row, example):
    """Another length for every batch of two, and none within it: no labels are left out."""
    length = 3 + row // 2 % 4
    example["input_ids"] = example["labels"] = example["input_ids"][:length]


CASES = {
    "gpt2": (gpt2, examples("llama")),
    "gpt2-lengths": (gpt2, changed("llama", padded)),
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


def own(model, batch):
    return model(**batch).loss


def assert_clipped(run, watch, data, loss, sub_step, steps, b):
    model = run.model.train()
    taken = windows(sub_step, steps)
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
            else:  # of different lengths: the mean over all their tokens
                gradients += [by_tokens(model, data, piece, loss)]
        sizes = [len(piece) for piece in pieces]
        twin = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])[0]
        properties.assert_close(found, twin, 1e-5)


def by_tokens(model, data, rows, loss):
    each = reference.microbatch_gradients(
        lambda batch: loss(model, batch),
        list(model.parameters()),
        [stacked(data, [r]) for r in rows],
    )
    counts = [len(data[row]["labels"]) - 1 for row in rows]
    return reference.weighted_sum(each, [count / sum(counts) for count in counts])


@pytest.mark.parametrize(("sub_step", "steps", "b"), [(2, 4, 4), (2, 4, 3), (1, 8, 4)])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_all_examples(tmp_path, name, sub_step, steps, b):
    make, data = CASES[name]
    watch = Watch()
    run = trainer(
        tmp_path, make(), data, b=b, watch=[watch], per_device_train_batch_size=sub_step,
        gradient_accumulation_steps=steps,
    )  # fmt: skip
    run.train()
    assert_clipped(run, watch, data, own, sub_step, steps, b)


@pytest.mark.parametrize("change", [nothing, first_label_only])
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(("sub_step", "b"), [(2, 4), (4, 4), (8, 4)])
def test_nothing_to_learn(tmp_path, make, change, sub_step, b):
    """A micro-batch without labels adds nothing; it is not NaN."""
    data, watch = changed("llama", change), Watch()
    model = make()
    run = trainer(
        tmp_path, model, data, b=b, watch=[watch], per_device_train_batch_size=sub_step,
        gradient_accumulation_steps=8 // sub_step,
    )  # fmt: skip
    run.train()

    def loss(model, batch):
        counted = (batch["labels"][:, 1:] != -100).sum()
        scores = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        wanted = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(scores, wanted, reduction="sum") / counted.clamp(min=1)

    assert_clipped(run, watch, data, loss, sub_step, 8 // sub_step, b)
    assert (run.clipper.outcome.norms > 0).all()


def scores_of(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def by_token(model, batch):
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def by_text(model, batch):
    """Every text counts alike, however many labels it has."""
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    each = F.cross_entropy(scores.transpose(1, 2), wanted, reduction="none").sum(1)
    return (each / (wanted != -100).sum(1).clamp(min=1)).mean()


def added_up(model, batch):
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum")


def class_weights(model, batch):
    """A mean over the weights of the labels."""
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), weight=torch.arange(1.0, 18.0))


def contrastive(model, batch):
    scores = F.normalize(scores_of(model, batch).mean(1))
    return F.cross_entropy(scores @ scores.T / 0.1, torch.arange(len(scores)))


def variance(model, batch):
    """A small term that looks at all examples."""
    return (
        by_token(model, batch) + 0.01 * scores_of(model, batch).mean(1).var(0, correction=0).mean()
    )


def smoothing(model, batch):
    scores, wanted = scores_of(model, batch)[:, :-1].log_softmax(-1), batch["labels"][:, 1:]
    counts = wanted != -100
    hard = -scores.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
    return ((0.9 * hard - 0.1 * scores.mean(-1)) * counts).sum() / counts.sum()


class OwnLoss(Ordered):
    """A Trainer with a loss of its own, which takes its inputs apart, as many do."""

    loss = staticmethod(by_token)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None
        batch = {"labels": inputs.pop("labels"), **inputs}
        return self.loss(model, batch)


def own_trainer(folder, loss, data, sub_step, watch, model=None):
    kind = type("OwnLoss", (OwnLoss,), {"loss": staticmethod(loss)})
    return trainer(
        folder, model or llama(), data, kind=kind, b=4, watch=[watch],
        per_device_train_batch_size=sub_step, gradient_accumulation_steps=8 // sub_step,
    )  # fmt: skip


@pytest.mark.parametrize("loss", [by_token, by_text, added_up])
def test_a_loss_of_your_own_is_measured(tmp_path, loss):
    data, watch = examples("llama"), Watch()
    run = own_trainer(tmp_path, loss, data, 2, watch)
    run.train()
    assert_clipped(run, watch, data, loss, 2, 4, 4)


def late(row, example):
    """Labels are left out from the third step on."""
    example["labels"] = example["input_ids"].clone()
    if row >= 12:
        example["labels"][: row % 5] = -100


@pytest.mark.parametrize("loss", [by_token, by_text])
def test_what_it_is_may_turn_out_later(tmp_path, loss):
    data, watch = changed("llama", late), Watch()
    run = own_trainer(tmp_path, loss, data, 2, watch)
    run.train()
    assert_clipped(run, watch, data, loss, 2, 4, 4)


def test_a_head_of_zeros_does_not_hide_it(tmp_path):
    """All losses are alike, but their gradients are not."""
    model, data, watch = llama(), examples("llama"), Watch()
    torch.nn.init.zeros_(model.lm_head.weight)
    run = own_trainer(tmp_path, by_text, data, 2, watch, model)
    run.train()
    assert_clipped(run, watch, data, by_text, 2, 4, 4)


@pytest.mark.parametrize("loss", [class_weights, contrastive, variance])
def test_losses_that_nothing_explains_are_refused(tmp_path, loss):
    watch = Watch()
    run = own_trainer(tmp_path, loss, examples("llama"), 2, watch)
    with pytest.raises(NotImplementedError, match="neither a mean .* per_device_train_batch_size"):
        run.train()
    assert not watch.gradients


@pytest.mark.parametrize("loss", [by_token, by_text, added_up])
def test_with_one_example_at_once_two_are_compared(tmp_path, loss):
    data, watch = examples("llama"), Watch()
    run = own_trainer(tmp_path, loss, data, 1, watch)
    run.train()
    assert_clipped(run, watch, data, loss, 1, 8, 4)


def over_all(model, batch):
    """The mean over all labels, also those that are left out."""
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.transpose(1, 2), wanted, reduction="none").mean()


@pytest.mark.parametrize("loss", [by_token, by_text, over_all])
@pytest.mark.parametrize("sub_step", [1, 2])
def test_texts_of_other_lengths_may_not_tell(tmp_path, loss, sub_step):
    """Each batch is of one length, so no two examples that differ can be looked at together."""
    watch = Watch()
    run = own_trainer(tmp_path, loss, changed("llama", padded), sub_step, watch)
    with pytest.raises(NotImplementedError, match="do not tell: examples or labels other than"):
        run.train()
    assert all(parameter.grad is None for parameter in run.model.parameters())


def by_weight(model, batch):
    """The mean over weights that come with the labels."""
    scores, wanted = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    each = F.cross_entropy(scores.transpose(1, 2), wanted.clamp(min=0), reduction="none")
    return (each * batch["loss_weights"]).sum() / batch["loss_weights"].sum()


def by_mask(model, batch):
    """The mean over tokens that are not padding, whatever their labels are."""
    scores, wanted = model(input_ids=batch["input_ids"]).logits, batch["labels"]
    each = F.cross_entropy(scores.transpose(1, 2), wanted.clamp(min=0), reduction="none")
    return (each * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def with_masks(row, example):
    example["attention_mask"] = (torch.arange(6) < 3 + row % 4).long()
    example["loss_weights"] = 0.1 + torch.rand(5, generator=torch.Generator().manual_seed(row))


@pytest.mark.parametrize("sub_step", [1, 2])
@pytest.mark.parametrize("loss", [by_weight, by_mask])
def test_means_over_other_columns(tmp_path, loss, sub_step):
    data, watch = changed("llama", with_masks), Watch()
    kind = type("OwnLoss", (OwnLoss,), {"loss": staticmethod(loss)})
    run = trainer(
        tmp_path, llama(), data, kind=kind, b=4, watch=[watch], remove_unused_columns=False,
        per_device_train_batch_size=sub_step, gradient_accumulation_steps=8 // sub_step,
    )  # fmt: skip
    run.train()
    assert_clipped(run, watch, data, loss, sub_step, 8 // sub_step, 4)


def unweighted(model, batch):
    return F.cross_entropy(scores_of(model, batch), batch["labels"])


def weighted(model, batch):
    weights = torch.tensor([1.0, 9.0, 1.0])
    return F.cross_entropy(scores_of(model, batch), batch["labels"], weight=weights)


ORDERS = {  # of the classes: together, apart, late, with one that is always in the middle
    "mixed": lambda row: row % 3,
    "pairs": lambda row: row // 2 % 3,
    "late": lambda row: int(row >= 18),
    "middle": lambda row: [0, 1, 1, 2][row % 4],
}


@pytest.mark.parametrize("sub_step", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("loss", [unweighted, weighted])
def test_class_weights_do_not_hide(tmp_path, loss, order, sub_step):
    """Where classes are alone in a batch, or an example in it, weights do not show in its loss."""
    data, watch, b = examples("bert"), Watch(), max(4, 2 * sub_step)
    for row, example in enumerate(data):
        example["labels"] = torch.tensor(ORDERS[order](row))
    kind = type("OwnLoss", (OwnLoss,), {"loss": staticmethod(loss)})
    run = trainer(
        tmp_path, bert(), data, kind=kind, b=b, watch=[watch],
        per_device_train_batch_size=sub_step, gradient_accumulation_steps=8 // sub_step,
    )  # fmt: skip
    if loss is weighted:
        with pytest.raises(NotImplementedError, match="neither a mean over examples or labels"):
            run.train()
        return
    run.train()
    assert_clipped(run, watch, data, loss, sub_step, 8 // sub_step, b)


@pytest.mark.parametrize("name", ["smoother", "function"])
def test_other_losses_of_the_trainer(tmp_path, name):
    data, watch = examples("llama"), Watch()
    options, clip = {"label_smoothing_factor": 0.1}, {}
    if name == "function":
        options, clip = {}, {"compute_loss_func": text_loss}
    run = trainer(
        tmp_path, llama(), data, b=4, watch=[watch], per_device_train_batch_size=2,
        gradient_accumulation_steps=4, clip=clip, **options,
    )  # fmt: skip
    run.train()
    assert_clipped(run, watch, data, smoothing if name == "smoother" else by_text, 2, 4, 4)


def text_loss(outputs, labels, num_items_in_batch=None):
    wanted = labels[:, 1:]
    each = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), wanted, reduction="none").sum(1)
    return (each / (wanted != -100).sum(1).clamp(min=1)).mean()


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
def test_models_whose_loss_is_no_mean_are_refused(tmp_path, make, data, match):
    run = trainer(tmp_path, make(), data, b=4, per_device_train_batch_size=2,
                  gradient_accumulation_steps=4)  # fmt: skip
    with pytest.raises(NotImplementedError, match=match):
        run.train()
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_dropout_is_no_reason_to_refuse(tmp_path, kind):
    """Also with a loss of one's own, which is measured while nothing is drawn at random."""
    model = MODELS[kind]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    if kind == "ctc":
        model.config.apply_spec_augment = True
        model.config.mask_time_prob, model.config.mask_time_length = 0.5, 2

    class Own(OrderedSeq2Seq if kind == "t5" else Ordered):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    run = trainer(tmp_path, model, examples(kind)[:8], kind=Own, b=4,
                  per_device_train_batch_size=2, gradient_accumulation_steps=4)  # fmt: skip
    run.train()
    assert run.clipper.outcome.sizes.tolist() == [4, 4]


def test_batches_larger_than_the_arguments_say(tmp_path):
    """A loader of one's own: micro-batches still have the size that was asked for."""

    class Loading(Ordered):
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=11)
            return self.accelerator.prepare(loader)

    data, watch = examples("bert"), Watch()
    run = trainer(tmp_path, bert(), data, kind=Loading, b=5, watch=[watch],
                  per_device_train_batch_size=2, gradient_accumulation_steps=2)  # fmt: skip
    run.train()
    assert run.clipper.outcome.sizes.tolist() == [5, 5, 5, 5, 2]
    assert_clipped(run, watch, data, own, COUNT, 1, 5)


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
