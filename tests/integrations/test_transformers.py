"""transformers' real Trainer: its gradients equal those of the slow reference."""

import json
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainingArguments

from microclip import Ledger
from microclip.integrations.transformers import ClippedTrainerMixin
from microclip.ledger import open_ledger

import properties
import reference
from trainers import (
    MODELS,
    InOrder,
    InOrderPlain,
    Ordered,
    OrderedSeq2Seq,
    Watch,
    bert,
    examples,
    trainer,
    wanted,
    windows,
)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("size", "steps", "b"),
    [(8, 1, 2), (8, 1, None), (4, 2, None), (4, 2, 2), (4, 2, 3), (4, 2, 8), (2, 4, 4), (2, 4, 6)],
)
def test_gradients_equal_the_reference(tmp_path, kind, size, steps, b):
    model, data, watch = MODELS[kind](), examples(kind), Watch()
    run = trainer(
        tmp_path, model, data, kind=OrderedSeq2Seq if kind == "t5" else Ordered, b=b, watch=[watch],
        per_device_train_batch_size=size, gradient_accumulation_steps=steps,
    )  # fmt: skip
    run.train()
    steps_taken = windows(size, steps)
    assert len(watch.gradients) == len(steps_taken) == 3
    for found, parts in zip(watch.gradients, steps_taken, strict=True):
        properties.assert_close(found, wanted(model, data, parts, b), 1e-5)


@pytest.mark.parametrize("most", [None, 0.01])
def test_max_grad_norm_acts_on_the_clipped_gradient(tmp_path, most):
    """And not on the last micro-batch alone, as with callbacks. None: the default."""
    model, data, watch = bert(), examples("bert"), Watch()
    if most is None:
        most = TrainingArguments(str(tmp_path)).max_grad_norm
        with torch.no_grad():  # a head whose gradients exceed that
            model.classifier.weight.mul_(1000)
    run = trainer(tmp_path, model, data, b=2, watch=[watch], max_grad_norm=most)
    run.train()
    for found, parts in zip(watch.gradients, windows(4, 2), strict=True):
        twin = wanted(model, data, parts, 2)
        scale = most / (reference.norm(twin) + 1e-6)
        assert scale < 1
        properties.assert_close(found, [None if g is None else scale * g for g in twin], 1e-5)


def test_one_microbatch_is_plain_training(tmp_path):
    """b = B gives the same weights as the stock Trainer, bit for bit."""
    weights = []
    for kind in (InOrderPlain, Ordered):
        model = bert()
        run = trainer(
            tmp_path, model, examples("bert"), kind=kind, learning_rate=0.01,
            per_device_train_batch_size=8, gradient_accumulation_steps=1, max_grad_norm=1.0,
        )  # fmt: skip
        run.train()
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def test_resuming_gives_the_same_weights(tmp_path):
    arguments = {"learning_rate": 0.01, "save_strategy": "steps", "save_steps": 2}
    model = bert()
    whole = trainer(tmp_path, model, examples("bert"), b=2, num_train_epochs=2, **arguments)
    whole.train()
    assert whole.clipper.step == 6
    again = bert()
    rest = trainer(tmp_path, again, examples("bert"), b=2, num_train_epochs=2, **arguments)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rest.clipper.step == 6
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_metrics_are_logged(tmp_path):
    run = trainer(
        tmp_path, bert(), examples("bert"), b=2, logging_strategy="steps", logging_steps=1
    )
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(logged) == 3
    for entry in logged:
        assert 0 < entry["microclip/mean_weight"] <= 1
        assert entry["microclip/bound"] > 0
        assert entry["loss"] == pytest.approx(1.1, abs=0.3)


def test_domains_and_ids(tmp_path):
    data = [{**e, "place": i % 2, "number": 100 + i} for i, e in enumerate(examples("bert"))]
    run = trainer(
        tmp_path, bert(), data, b=2, clip={"domain_column": "place", "id_column": "number"}
    )
    run.train()
    outcome = run.clipper.outcome
    assert set(outcome.domains) == {0, 1}
    assert sorted(i for ids in outcome.ids for i in ids) == list(range(116, 122))


def test_ids_of_a_microbatch_over_several_batches(tmp_path):
    data = [{**e, "number": 100 + i} for i, e in enumerate(examples("bert"))]
    run = trainer(tmp_path, bert(), data, b=3, per_device_train_batch_size=2,
                  gradient_accumulation_steps=4, clip={"id_column": "number"})  # fmt: skip
    run.train()
    assert run.clipper.outcome.ids == ((116, 117, 118), (119, 120, 121))


def test_domains_need_small_microbatches(tmp_path):
    data = [{**e, "place": i % 2} for i, e in enumerate(examples("bert"))]
    run = trainer(tmp_path, bert(), data, b=8, clip={"domain_column": "place"})
    with pytest.raises(ValueError, match="microbatch_size 8 is larger than the 4 examples"):
        run.train()


def test_a_short_last_batch_is_still_one_batch(tmp_path):
    """b is the size of a batch, and larger than the last batch of the epoch."""
    data = [{**e, "place": i % 2} for i, e in enumerate(examples("bert"))]
    run = trainer(tmp_path, bert(), data, b=4, clip={"domain_column": "place"})
    run.train()
    assert run.clipper.outcome.domains == (0, 1, 0, 1)
    assert run.clipper.outcome.sizes.tolist() == [2, 2, 1, 1]


def test_bf16(tmp_path):
    model, data, watch = bert(), examples("bert"), Watch()
    trainer(tmp_path, model, data, b=2, watch=[watch], bf16=True).train()
    for found, parts in zip(watch.gradients, windows(4, 2), strict=True):
        properties.assert_close(found, wanted(model, data, parts, 2), 0.05)


def test_the_mixin_keeps_what_a_trainer_does(tmp_path):
    class Doubling(InOrder, Trainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    class Clipped(ClippedTrainerMixin, Doubling):
        pass

    model, data, watch = bert(), examples("bert"), Watch()
    trainer(tmp_path, model, data, kind=Clipped, b=2, watch=[watch]).train()
    twin = wanted(model, data, windows(4, 2)[0], 2)
    properties.assert_close(watch.gradients[0], [None if g is None else 2 * g for g in twin], 1e-5)


def test_trackers_get_the_metrics(tmp_path, monkeypatch):
    """Read back from the files that TensorBoard writes."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    options = {"logging_strategy": "steps", "logging_steps": 1, "report_to": "tensorboard"}
    trainer(tmp_path, bert(), examples("bert"), b=2, **options).train()
    (folder,) = {path.parent for path in (tmp_path / "board").rglob("events.*")}
    board = EventAccumulator(str(folder)).Reload()
    for name in ("bound", "mean_weight", "norm_q50", "effective_sample_size", "update_kept"):
        (tag,) = [tag for tag in board.Tags()["scalars"] if tag.endswith(f"microclip/{name}")]
        assert [event.step for event in board.Scalars(tag)] == [1, 2, 3]


def test_training_arguments_are_unchanged(tmp_path):
    """Our options are not in them, so whatever reads or stores them keeps working."""
    run = trainer(tmp_path, bert(), examples("bert"), b=2)
    assert json.loads(run.args.to_json_string())["per_device_train_batch_size"] == 4
    assert pickle.loads(pickle.dumps(run.args)).to_dict() == run.args.to_dict()


def test_deepspeed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(NotImplementedError, match="DeepSpeed .* Use DDP or FSDP2"):
        trainer(tmp_path, bert(), examples("bert"), b=2)


def test_data_parallel_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(NotImplementedError, match="DataParallel .* Start with torchrun"):
        trainer(tmp_path, bert(), examples("bert"), b=2)


def test_a_ledger_records_the_examples(tmp_path):
    data = [{**e, "number": 100 + i} for i, e in enumerate(examples("bert"))]
    ledger = Ledger(tmp_path / "ledger")
    run = trainer(tmp_path, bert(), data, b=2, clip={"id_column": "number", "ledger": ledger})
    run.train()
    rows = [r for part in open_ledger(ledger.path).microbatches() for r in part.to_pylist()]
    assert sorted(i for row in rows for i in row["ids"]) == list(range(100, 122))
    assert {row["step"] for row in rows} == {0, 1, 2}
