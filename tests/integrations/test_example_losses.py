"""Per-example losses in the Trainer: a single pass, with the reference's gradients."""

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification

from microclip.microbatches import cut

import properties
from trainers import (
    MODELS,
    ONE_BATCH,
    Ordered,
    OrderedSeq2Seq,
    Watch,
    bert,
    clipped,
    ctc,
    examples,
    own_loss,
    stacked,
    trainer,
    wanted,
    windows,
)


@pytest.mark.sample(5)
@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_a_single_pass_equals_the_reference(tmp_path, kind, b):
    model, data, watch = MODELS[kind](), examples(kind), Watch()
    run = trainer(
        tmp_path, model, data, kind=OrderedSeq2Seq if kind == "t5" else Ordered, b=b,
        watch=[watch], clip={"engine": "fused"}, **ONE_BATCH,
    )  # fmt: skip
    run.train()
    assert run.clipper.outcome.engine == "fused"
    assert len(run.clipper.outcome.example_losses) == 6
    assert len(watch.gradients) == 3
    for found, parts in zip(watch.gradients, windows(8, 1), strict=True):
        properties.assert_close(found, wanted(model, data, parts, b), 1e-5)


def test_a_sum_of_losses_stays_a_sum(tmp_path):
    """CTC's default in transformers; the stock Trainer would add up sums when it accumulates."""
    model, data, watch = ctc(), examples("ctc"), Watch()
    model.config.ctc_loss_reduction = "sum"
    run = trainer(tmp_path, model, data, b=2, watch=[watch], clip={"engine": "fused"}, **ONE_BATCH)
    run.train()
    for found, parts in zip(watch.gradients, windows(8, 1), strict=True):
        properties.assert_close(found, wanted(model, data, parts, 2), 1e-5)


def test_domains_have_their_own_token_means(tmp_path):
    """Micro-batches are cut from examples sorted by domain, so tokens are counted likewise."""
    data = [{**e, "place": i % 3} for i, e in enumerate(examples("llama"))]
    model, watch = MODELS["llama"](), Watch()
    run = trainer(
        tmp_path, model, data, b=2, watch=[watch],
        clip={"engine": "fused", "domain_column": "place"}, **ONE_BATCH,
    )  # fmt: skip
    run.train()
    for found, (rows,) in zip(watch.gradients, windows(8, 1), strict=True):
        batch = stacked(examples("llama"), rows)
        pieces = cut(batch, 2, domains=[row % 3 for row in rows])
        twin = clipped(
            model, own_loss, [p.batch for p in pieces], [p.size for p in pieces],
            domains=[p.domain for p in pieces],
        )  # fmt: skip
        properties.assert_close(found, twin, 1e-5)


@pytest.mark.parametrize("kind", ["llama", "ctc"])
@pytest.mark.parametrize("steps", [1, 2])
def test_examples_have_their_own_losses_in_the_outcome(tmp_path, kind, steps):
    """Whatever the length of the texts next to them, and in the order of the ids."""
    data = [{**e, "place": i % 3, "number": i} for i, e in enumerate(examples(kind))]
    model, columns = MODELS[kind](), {"domain_column": "place", "id_column": "number"}
    more = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": steps}
    run = trainer(tmp_path, model, data, b=2, clip=columns, max_steps=1, **more)
    run.train()
    outcome = run.clipper.outcome
    rows = [row for names in outcome.ids for row in names]
    assert sorted(rows) == list(range(4 * steps)) != rows
    own = [own_loss(model, stacked(examples(kind), [row])).item() for row in rows]
    assert outcome.example_losses.tolist() == pytest.approx(own, rel=1e-5)


class Penalized(BertForSequenceClassification):
    """Adds a penalty to the stock loss."""

    def forward(self, input_ids=None, labels=None):
        outputs = super().forward(input_ids=input_ids, labels=labels)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 100 * outputs.logits.square().mean()
        return outputs


def test_a_custom_loss_is_streamed(tmp_path):
    torch.manual_seed(0)
    model, data, watch = Penalized(bert().config), examples("bert"), Watch()
    run = trainer(tmp_path, model, data, b=2, watch=[watch], **ONE_BATCH)
    run.train()
    assert run.clipper.outcome.engine == "stream"
    for found, parts in zip(watch.gradients, windows(8, 1), strict=True):
        properties.assert_close(found, wanted(model, data, parts, 2), 1e-5)


def test_a_zero_head_does_not_hide_a_custom_loss(tmp_path):
    """All losses agree at first; the second check tells them apart."""
    torch.manual_seed(0)
    model, data = Penalized(bert().config), examples("bert")
    nn.init.zeros_(model.classifier.weight)
    nn.init.zeros_(model.classifier.bias)
    run = trainer(tmp_path, model, data, b=2, learning_rate=0.1, **ONE_BATCH)
    run.train()
    assert run.clipper.outcome.engine == "stream"
    assert run.clipper.outcome.example_losses is None


def test_ignored_labels_add_nothing(tmp_path):
    """An example without labels has a loss of 0, and its micro-batch the loss of the others."""
    data = examples("llama")
    data[0]["labels"] = torch.full_like(data[0]["labels"], -100)
    model, watch = MODELS["llama"](), Watch()
    run = trainer(tmp_path, model, data, b=2, watch=[watch], clip={"engine": "fused"}, **ONE_BATCH)
    run.train()
    twin = wanted(model, data, windows(8, 1)[0], 2)
    properties.assert_close(watch.gradients[0], twin, 1e-5)


@pytest.mark.parametrize(
    ("options", "clip"), [({"label_smoothing_factor": 0.1}, {}), ({}, {"compute_loss_func": True})]
)
def test_other_losses_of_the_trainer_are_streamed(tmp_path, options, clip):
    def doubled(outputs, labels, num_items_in_batch=None):
        return 2 * nn.functional.cross_entropy(outputs.logits, labels)

    clip = {"compute_loss_func": doubled} if clip else {}
    run = trainer(tmp_path, bert(), examples("bert"), b=2, clip=clip, **ONE_BATCH, **options)
    run.train()
    assert run.clipper.outcome.engine == "stream"
