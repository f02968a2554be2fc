"""Custom losses with micro-batches larger than a batch: measured, or refused."""

import pytest
import torch
from torch.nn import functional as F

from trainers import (
    Ordered,
    Watch,
    assert_wide_steps,
    bert,
    changed,
    examples,
    llama,
    one_length_per_batch,
    trainer,
)


def scores_of(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def by_token(model, batch):
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def by_text(model, batch):
    """Every text counts the same, however many labels it has."""
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    each = F.cross_entropy(scores.transpose(1, 2), wanted, reduction="none").sum(1)
    return (each / (wanted != -100).sum(1).clamp(min=1)).mean()


def added_up(model, batch):
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum")


def class_weights(model, batch):
    """A mean weighted by label."""
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), weight=torch.arange(1.0, 18.0))


def contrastive(model, batch):
    scores = F.normalize(scores_of(model, batch).mean(1))
    return F.cross_entropy(scores @ scores.T / 0.1, torch.arange(len(scores)))


def variance(model, batch):
    """Adds a small term that depends on all examples at once."""
    return (
        by_token(model, batch) + 0.01 * scores_of(model, batch).mean(1).var(0, correction=0).mean()
    )


def smoothing(model, batch):
    scores, wanted = scores_of(model, batch)[:, :-1].log_softmax(-1), batch["labels"][:, 1:]
    counts = wanted != -100
    hard = -scores.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
    return ((0.9 * hard - 0.1 * scores.mean(-1)) * counts).sum() / counts.sum()


class CustomLoss(Ordered):
    """A Trainer with a custom loss that pops from its inputs, as many do."""

    loss = staticmethod(by_token)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None
        batch = {"labels": inputs.pop("labels"), **inputs}
        return self.loss(model, batch)


def custom_trainer(folder, loss, data, size, watch, model=None):
    kind = type("CustomLoss", (CustomLoss,), {"loss": staticmethod(loss)})
    return trainer(
        folder, model or llama(), data, kind=kind, b=4, watch=[watch],
        per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
    )  # fmt: skip


@pytest.mark.parametrize("loss", [by_token, by_text, added_up])
def test_a_custom_loss_is_measured(tmp_path, loss):
    data, watch = examples("llama"), Watch()
    run = custom_trainer(tmp_path, loss, data, 2, watch)
    run.train()
    assert_wide_steps(run, watch, data, loss, 2, 4, 4)


def late(row, example):
    """Labels are ignored from row 12 on."""
    example["labels"] = example["input_ids"].clone()
    if row >= 12:
        example["labels"][: row % 5] = -100


@pytest.mark.parametrize("loss", [by_token, by_text])
def test_the_denominator_may_become_clear_later(tmp_path, loss):
    data, watch = changed("llama", late), Watch()
    run = custom_trainer(tmp_path, loss, data, 2, watch)
    run.train()
    assert_wide_steps(run, watch, data, loss, 2, 4, 4)


def test_a_zero_head_does_not_hide_it(tmp_path):
    """All losses are equal, but their gradients are not."""
    model, data, watch = llama(), examples("llama"), Watch()
    torch.nn.init.zeros_(model.lm_head.weight)
    run = custom_trainer(tmp_path, by_text, data, 2, watch, model)
    run.train()
    assert_wide_steps(run, watch, data, by_text, 2, 4, 4)


@pytest.mark.parametrize("loss", [class_weights, contrastive, variance])
def test_losses_that_nothing_explains_are_refused(tmp_path, loss):
    watch = Watch()
    run = custom_trainer(tmp_path, loss, examples("llama"), 2, watch)
    with pytest.raises(NotImplementedError, match="neither a mean .* per_device_train_batch_size"):
        run.train()
    assert not watch.gradients


@pytest.mark.parametrize("loss", [by_token, by_text, added_up])
def test_batches_of_one_are_compared_in_pairs(tmp_path, loss):
    data, watch = examples("llama"), Watch()
    run = custom_trainer(tmp_path, loss, data, 1, watch)
    run.train()
    assert_wide_steps(run, watch, data, loss, 1, 8, 4)


def over_all(model, batch):
    """The mean over all labels, ignored ones included."""
    scores, wanted = scores_of(model, batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(scores.transpose(1, 2), wanted, reduction="none").mean()


@pytest.mark.sample(3)
@pytest.mark.parametrize("loss", [by_token, by_text, over_all])
@pytest.mark.parametrize("size", [1, 2])
def test_texts_of_different_lengths_may_not_tell(tmp_path, loss, size):
    """Each batch has one length, so no two different examples fit into one batch."""
    watch = Watch()
    run = custom_trainer(tmp_path, loss, changed("llama", one_length_per_batch), size, watch)
    with pytest.raises(NotImplementedError, match="do not tell: examples or labels other than"):
        run.train()
    assert all(parameter.grad is None for parameter in run.model.parameters())


def by_weight(model, batch):
    """The mean weighted by a column."""
    scores, wanted = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    each = F.cross_entropy(scores.transpose(1, 2), wanted.clamp(min=0), reduction="none")
    return (each * batch["loss_weights"]).sum() / batch["loss_weights"].sum()


def by_mask(model, batch):
    """The mean over tokens that are not padding, whatever their labels."""
    scores, wanted = model(input_ids=batch["input_ids"]).logits, batch["labels"]
    each = F.cross_entropy(scores.transpose(1, 2), wanted.clamp(min=0), reduction="none")
    return (each * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def with_masks(row, example):
    example["attention_mask"] = (torch.arange(6) < 3 + row % 4).long()
    example["loss_weights"] = 0.1 + torch.rand(5, generator=torch.Generator().manual_seed(row))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("loss", [by_weight, by_mask])
def test_means_over_other_columns(tmp_path, loss, size):
    data, watch = changed("llama", with_masks), Watch()
    kind = type("CustomLoss", (CustomLoss,), {"loss": staticmethod(loss)})
    run = trainer(
        tmp_path, llama(), data, kind=kind, b=4, watch=[watch], remove_unused_columns=False,
        per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
    )  # fmt: skip
    run.train()
    assert_wide_steps(run, watch, data, loss, size, 8 // size, 4)


def unweighted(model, batch):
    return F.cross_entropy(scores_of(model, batch), batch["labels"])


def weighted(model, batch):
    weights = torch.tensor([1.0, 9.0, 1.0])
    return F.cross_entropy(scores_of(model, batch), batch["labels"], weight=weights)


ORDERS = {  # the class of each row: mixed, one per batch, one late, one always in the middle
    "mixed": lambda row: row % 3,
    "pairs": lambda row: row // 2 % 3,
    "late": lambda row: int(row >= 18),
    "middle": lambda row: [0, 1, 1, 2][row % 4],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("loss", [unweighted, weighted])
def test_class_weights_are_detected(tmp_path, loss, order, size):
    """With one class or one example per batch, class weights do not show in its loss."""
    data, watch, b = examples("bert"), Watch(), max(4, 2 * size)
    for row, example in enumerate(data):
        example["labels"] = torch.tensor(ORDERS[order](row))
    kind = type("CustomLoss", (CustomLoss,), {"loss": staticmethod(loss)})
    run = trainer(
        tmp_path, bert(), data, kind=kind, b=b, watch=[watch],
        per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
    )  # fmt: skip
    if loss is weighted:
        with pytest.raises(NotImplementedError, match="neither a mean over examples or labels"):
            run.train()
        return
    run.train()
    assert_wide_steps(run, watch, data, loss, size, 8 // size, b)


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
    assert_wide_steps(run, watch, data, smoothing if name == "smoother" else by_text, 2, 4, 4)


def text_loss(outputs, labels, num_items_in_batch=None):
    wanted = labels[:, 1:]
    each = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), wanted, reduction="none").sum(1)
    return (each / (wanted != -100).sum(1).clamp(min=1)).mean()
