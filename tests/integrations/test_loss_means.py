"""Whose labels a loss is the mean over, in transformers' Trainer and TRL's."""

import pytest
import torch
from torch.nn import functional as F

from microclip import Ledger, rules
from microclip.ledger import open_ledger

import properties
import reference
import trl_runs
from trainers import InOrderPlain, Ordered, Watch, bert, examples, gpt2, llama, stacked, trainer

KEEP = rules.Fixed(1e9)  # clips nothing


def sums(model, batch):
    """Return the cross-entropy of each text, and how many labels it has."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].double()
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum(1), (labels != -100).sum(1)


def gradients_of(model, data, pieces, loss_of):
    def loss(rows):
        return loss_of(*sums(model, stacked(data, rows)))

    return reference.microbatch_gradients(loss, list(model.parameters()), pieces)


def means(total, labels):
    """Return how each kind of mean turns sums and counts into the loss of a micro-batch."""
    return {
        "microbatch": lambda s, n: s.sum() / n.sum(),
        "example": lambda s, n: (s / n.clamp(min=1)).mean(),
        "step": lambda s, n: s.mean() * total / labels,
    }


@pytest.mark.sample(5)
@pytest.mark.parametrize("engine", ["stream", "fused", "two_pass"])
@pytest.mark.parametrize("mean", ["microbatch", "example", "step"])
@pytest.mark.parametrize(("size", "steps"), [(8, 1), (4, 2)])
def test_gradients_equal_the_twin(tmp_path, mean, engine, size, steps):
    model, data, watch = llama(), examples("llama"), Watch()
    run = trainer(
        tmp_path, model, data, b=2, watch=[watch], clip={"loss_mean": mean, "engine": engine},
        per_device_train_batch_size=size, gradient_accumulation_steps=steps,
    )  # fmt: skip
    run.train()
    for start, found in zip((0, 8, 16), watch.gradients, strict=True):
        rows = list(range(start, min(start + 8, 22)))
        labels = int((stacked(data, rows)["labels"][:, 1:] != -100).sum())
        pieces = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        each = gradients_of(model.train(), data, pieces, means(len(rows), labels)[mean])
        sizes = [len(piece) for piece in pieces]
        twin = reference.clipped_gradient(each, sizes, reference.WEIGH["MinNorm()"])[0]
        properties.assert_close(found, twin, 1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["stream", "auto"])
@pytest.mark.parametrize(("size", "steps", "b"), [(8, 1, 1), (4, 2, 2), (4, 2, None)])
def test_mean_over_the_step_is_the_stock_trainers(tmp_path, size, steps, b, engine):
    """Without clipping, whatever the micro-batches, and over accumulated batches."""
    weights = []
    for kind in (InOrderPlain, Ordered):
        model = llama()
        clip = {"loss_mean": "step", "rule": KEEP, "engine": engine}
        run = trainer(
            tmp_path, model, examples("llama"), kind=kind, b=b, clip=clip, learning_rate=0.01,
            per_device_train_batch_size=size, gradient_accumulation_steps=steps, optim="sgd",
        )  # fmt: skip
        run.train()
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, other, start in zip(*weights, llama().parameters(), strict=True):
        assert not torch.equal(one, start)
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("b", [1, 3, None])
def test_mean_over_the_step_is_the_stock_sft_trainers(b):
    weights = []
    for clip in (None, {"loss_mean": "step", "rule": KEEP, "microbatch_size": b}):
        net = trl_runs.model("llama")
        run = trl_runs.trainer(
            "sft", net, clip=clip, learning_rate=0.05, optim="sgd",
            per_device_train_batch_size=4, gradient_accumulation_steps=2,
        )  # fmt: skip
        run.train()
        weights.append([p.detach().clone() for p in net.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("engine", ["auto", "fused"])
def test_texts_of_accumulated_batches_record_their_own_means(engine):
    """SFT: a single pass is found whatever the step's other batches are."""
    clip = {"loss_mean": "step", "rule": KEEP, "microbatch_size": 1, "id_column": "id"}
    run = trl_runs.trainer(
        "sft", trl_runs.model("llama"), clip={**clip, "engine": engine},
        per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip
    run.train()
    outcome = run.clipper.outcome
    own = [trl_runs.stock_loss(run, [i - 100]).item() for piece in outcome.ids for i in piece]
    assert outcome.example_losses.tolist() == pytest.approx(own, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor. is deprecated:FutureWarning")
@pytest.mark.parametrize("b", [1, 2])
def test_streamed_shares_are_remembered_as_means(b):
    """Label smoothing has no losses per example: a micro-batch's own mean counts for all in it."""
    seen = {}

    class Watching(rules.LossHistory):
        def remember(self, shown):
            seen.update(zip(shown.keys.tolist(), shown.losses.tolist(), strict=True))
            super().remember(shown)

    run = trl_runs.trainer(
        "sft", trl_runs.model("llama"), label_smoothing_factor=1e-9, clip={
            "loss_mean": "step", "rule": Watching(total_steps=100), "microbatch_size": b,
            "id_column": "id",
        }, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip
    run.train()
    pieces = [[i - i % b + j for j in range(b)] for i in range(14)]
    own = [trl_runs.stock_loss(run, piece).item() for piece in pieces]
    assert [seen[100 + i] for i in range(14)] == pytest.approx(own, rel=1e-5)
    if b == 1:
        assert run.clipper.outcome.example_losses.tolist() == pytest.approx(own[8:], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor. is deprecated:FutureWarning")
@pytest.mark.sample(13)
@pytest.mark.parametrize("rule", ["Fixed", "MinNorm", "LossHistory"])
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("how", ["smoothed", "stream", "fused"])
@pytest.mark.parametrize("domains", [False, True])
def test_the_ledger_has_means_of_microbatches(tmp_path, domains, how, b, rule):
    """Not their shares of the step, whoever computes the loss; the step's loss is the stock one."""
    made = {"Fixed": KEEP, "MinNorm": rules.MinNorm(), "LossHistory": rules.LossHistory(9)}
    clip = {
        "loss_mean": "step", "rule": made[rule], "microbatch_size": b, "id_column": "id",
        "ledger": Ledger(tmp_path), "engine": "auto" if how == "smoothed" else how,
    }  # fmt: skip
    clip |= {"domain_column": "place"} if domains else {}
    options = {"label_smoothing_factor": 1e-9} if how == "smoothed" else {}
    run = trl_runs.trainer(
        "sft", trl_runs.model("llama"), clip=clip, **options,
        per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip
    run.train()
    rows = [r for part in open_ledger(tmp_path).microbatches() for r in part.to_pylist()]
    assert sorted(i for row in rows for i in row["ids"]) == list(range(100, 114))
    for row in rows:
        own = trl_runs.stock_loss(run, [i - 100 for i in row["ids"]]).item()
        assert row["loss"] == pytest.approx(own, rel=1e-5)
    labels = [sum(x != -100 for x in row[1:]) for row in run.train_dataset["labels"][8:]]
    each = [trl_runs.stock_loss(run, [i]).item() for i in range(8, 14)]
    total = sum(n * loss for n, loss in zip(labels, each, strict=True)) / sum(labels)
    assert float(run.clipper.outcome.loss) == pytest.approx(total, rel=1e-5)


def mean_over_the_batch(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def share_of_the_step(outputs, labels, num_items_in_batch=None):
    counted = (labels[:, 1:] != -100).sum()
    return mean_over_the_batch(outputs, labels) * counted / num_items_in_batch


@pytest.mark.filterwarnings("ignore:.*compute_loss_func. is deprecated:FutureWarning")
@pytest.mark.parametrize("stack", ["trainer", "sft"])
def test_losses_that_are_not_shares_of_the_step_are_refused(tmp_path, stack):
    """They would be multiplied by the number of micro-batches."""

    def run_with(loss, size, b):
        clip = {"loss_mean": "step", "rule": KEEP, "compute_loss_func": loss}
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        if stack == "sft":
            clip["microbatch_size"] = b
            run = trl_runs.trainer("sft", trl_runs.model("llama"), clip=clip, **sizes)
        else:
            run = trainer(tmp_path, llama(), examples("llama"), b=b, clip=clip, **sizes)
        run.train()
        return run

    for size, b in ((8, 2), (4, None)):
        with pytest.raises(NotImplementedError, match="does not halve if num_items_in_batch dou"):
            run_with(mean_over_the_batch, size, b)
    assert run_with(mean_over_the_batch, 8, None).clipper.step > 1  # a step is one micro-batch
    assert run_with(share_of_the_step, 4, 2).clipper.step > 1


@pytest.mark.filterwarnings("ignore:.*compute_loss_func. is deprecated:FutureWarning")
@pytest.mark.parametrize("own", [True, False])
def test_domains_cut_a_batch_that_is_the_whole_step(tmp_path, own):
    """Bert ignores num_items_in_batch, so the mean of each domain is not its share of the step."""
    data = [row | {"place": "ab"[i % 3 == 0]} for i, row in enumerate(examples("bert"))]
    clip = {"loss_mean": "step", "rule": KEEP, "domain_column": "place"}
    clip |= {"compute_loss_func": mean_over_classes} if own else {}
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    watch, plain = Watch(), Watch()
    run = trainer(tmp_path, bert(), data, clip=clip, watch=[watch], **sizes)
    if own:
        with pytest.raises(NotImplementedError, match="does not halve if num_items_in_batch dou"):
            run.train()
        return
    run.train()
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in data]
    trainer(tmp_path, bert(), rows, kind=InOrderPlain, watch=[plain], **sizes).train()
    for one, other in zip(watch.gradients, plain.gradients, strict=True):
        properties.assert_close(one, other, 1e-5)


def mean_over_classes(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels)


@pytest.mark.parametrize("mean", ["microbatch", "example", "step"])
def test_rule_and_ledger_see_an_examples_own_mean(tmp_path, mean):
    """Whatever the gradient is the mean over, a long text's loss does not count for more."""
    texts = examples("llama")
    data = [{**text, "number": i} for i, text in enumerate(texts)]
    model, seen = llama(), {}

    class Watching(rules.LossHistory):
        def remember(self, shown):
            seen.update(zip(shown.keys.tolist(), shown.losses.tolist(), strict=True))
            super().remember(shown)

    run = trainer(
        tmp_path, model, data, clip={
            "loss_mean": mean, "id_column": "number", "rule": Watching(total_steps=100),
            "ledger": Ledger(tmp_path / "ledger"),
        },
        per_device_train_batch_size=8, gradient_accumulation_steps=1,
    )  # fmt: skip
    run.train()
    total, labels = sums(model, stacked(texts, range(22)))
    own = (total / labels.clamp(min=1)).tolist()
    assert [seen[i] for i in range(22)] == pytest.approx(own, rel=1e-5)
    rows = [r for part in open_ledger(tmp_path / "ledger").examples() for r in part.to_pylist()]
    recorded = {row["id"]: row["loss"] for row in rows}
    assert [recorded[i] for i in range(22)] == pytest.approx(own, rel=1e-5)


def test_double_precision_stays(tmp_path):
    """Per-example losses of a float64 model are float64; transformers' own are float32."""
    model, data, watch = gpt2().double(), examples("llama"), Watch()
    run = trainer(
        tmp_path, model, data, b=1, watch=[watch], clip={"engine": "fused"},
        per_device_train_batch_size=8, gradient_accumulation_steps=1,
    )  # fmt: skip
    run.train()
    pieces = [[i] for i in range(8)]
    each = gradients_of(model.train(), data, pieces, means(0, 1)["microbatch"])
    twin = reference.clipped_gradient(each, [1] * 8, reference.WEIGH["MinNorm()"])[0]
    properties.assert_close(watch.gradients[0], twin, 1e-12)


def test_two_passes_keep_their_outcome(tmp_path):
    """Restoring what a loss has changed between two passes must not reach the step itself."""
    run = trainer(
        tmp_path, llama(), examples("llama"), b=2, clip={"engine": "two_pass"},
        per_device_train_batch_size=8, gradient_accumulation_steps=1,
    )  # fmt: skip
    run.train()
    assert run.clipper.outcome.sizes.tolist() == [2, 2, 2]
    assert run.clipper.outcome.loss > 2


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="loss_mean must be .*'microbatch', .*'token'"):
        trainer(tmp_path, llama(), examples("llama"), clip={"loss_mean": "token"})
    run = trainer(
        tmp_path, llama(), examples("llama"), b=4, clip={"loss_mean": "example"},
        per_device_train_batch_size=2, gradient_accumulation_steps=4,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="microbatch_size 4 exceeds a batch of 2"):
        run.train()
    smooth = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 1}
    run = trainer(tmp_path, llama(), examples("llama"), clip={"loss_mean": "example"}, **smooth)
    with pytest.raises(NotImplementedError, match="no losses of their own .label smoothing is on"):
        run.train()
    net = bert()
    run = trainer(tmp_path, net, examples("bert"), clip={"loss_mean": "step"})
    run.model_accepts_loss_kwargs = False
    with pytest.raises(NotImplementedError, match="does not count them"):
        run.train()
