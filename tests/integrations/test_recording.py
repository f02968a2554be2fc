"""RecordingTrainer: plain training, step for step, with every example's loss on record."""

import pathlib

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import microclip
from microclip import Ledger, rules
from microclip.integrations.recording import RecordingTrainer
from microclip.integrations.transformers import ClippedTrainer
from microclip.ledger import open_ledger

import processes
import stack_cells
import trainers


def in_full(value):
    return pytest.param(value, marks=pytest.mark.full)


def arguments(path, **more):
    given = {
        "per_device_train_batch_size": 8, "num_train_epochs": 2, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2,
        **more,
    }  # fmt: skip
    return TrainingArguments(str(path / "trainer"), **given)


def with_names(kind):
    return [{**one, "id": f"row {i}"} for i, one in enumerate(trainers.examples(kind))]


def train(path, model, data, **more):
    options = {key: more.pop(key) for key in ("losses", "id_column") if key in more}
    with Ledger(path / "ledger") as ledger:
        trainer = RecordingTrainer(
            model, arguments(path, **more), train_dataset=data, ledger=ledger, **options
        )
        trainer.train()
    return trainer


def rows_of(path):
    return [row for batch in open_ledger(path / "ledger").examples() for row in batch.to_pylist()]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["bert", in_full("llama"), in_full("gpt2"), "ctc"])
def test_training_is_not_changed(tmp_path, kind):
    make = trainers.MODELS.get(kind, trainers.gpt2)
    plain = Trainer(make(), arguments(tmp_path), train_dataset=trainers.examples(kind))
    plain.train()
    found = train(tmp_path, make(), with_names(kind))
    for one, other in zip(plain.model.parameters(), found.model.parameters(), strict=True):
        assert torch.equal(one, other)
    rows = rows_of(tmp_path)
    assert len(rows) == 2 * trainers.COUNT
    assert {row["id"] for row in rows} == {f"row {i}" for i in range(trainers.COUNT)}


@pytest.mark.parametrize("steps", [in_full(1), 2])
@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2", "ctc"])
def test_losses_are_those_of_each_example_alone(tmp_path, kind, steps):
    """With a rate of 0 the model stays what it is."""
    model = trainers.MODELS.get(kind, trainers.gpt2)()
    data = trainers.examples(kind)
    more = {"learning_rate": 0.0, "num_train_epochs": 1, "gradient_accumulation_steps": steps}
    train(tmp_path, model, with_names(kind), **more)
    found = {row["id"]: row["loss"] for row in rows_of(tmp_path)}
    for i, one in enumerate(data):
        batch = {name: value[None] for name, value in one.items()}
        assert found[f"row {i}"] == pytest.approx(model(**batch).loss.item(), rel=1e-4), i


def test_predictions_of_a_classifier(tmp_path):
    model = trainers.bert()
    train(tmp_path, model, with_names("bert"), learning_rate=0.0, num_train_epochs=1)
    for i, one in enumerate(trainers.examples("bert")):
        row = next(row for row in rows_of(tmp_path) if row["id"] == f"row {i}")
        logits = model(input_ids=one["input_ids"][None]).logits[0]
        assert row["label"] == one["labels"]
        expected = F.softmax(logits, 0)[one["labels"]].item()
        assert row["label_probability"] == pytest.approx(expected, rel=1e-4)
    assert open_ledger(tmp_path / "ledger").classes == 3


def test_with_ids_and_evaluation(tmp_path):
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return trainers.COUNT

        def __getitem__(self, i):
            return trainers.examples("bert")[i]

    with Ledger(tmp_path / "ledger") as ledger:
        trainer = RecordingTrainer(
            trainers.bert(),
            arguments(tmp_path),
            train_dataset=microclip.with_ids(Data()),
            eval_dataset=microclip.with_ids(Data()),
            ledger=ledger,
        )
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
        assert len(trainer.predict(Data()).predictions) == trainers.COUNT
    assert {row["id"] for row in rows_of(tmp_path)} == set(range(trainers.COUNT))
    assert len(rows_of(tmp_path)) == 2 * trainers.COUNT


def test_own_losses(tmp_path):
    def losses(outputs, batch):
        return outputs.logits.detach().abs().sum(1)

    train(tmp_path, trainers.bert(), with_names("bert"), losses=losses)
    assert all(row["loss"] > 0 and row["label"] is None for row in rows_of(tmp_path))


def test_resumed_training_continues_the_record(tmp_path):
    data = with_names("bert")
    more = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    train(tmp_path, trainers.bert(), data, max_steps=2, **more)
    before = open_ledger(tmp_path / "ledger").steps
    with Ledger(tmp_path / "ledger") as ledger:
        trainer = RecordingTrainer(
            trainers.bert(),
            arguments(tmp_path, max_steps=4, **more),
            train_dataset=data,
            ledger=ledger,
        )
        trainer.train(resume_from_checkpoint=True)
    after = open_ledger(tmp_path / "ledger").steps
    assert before.start == after.start == 0
    assert len(after) > len(before)


def test_without_ids(tmp_path):
    with pytest.raises(ValueError, match="column 'id'"):
        train(tmp_path, trainers.bert(), trainers.examples("bert"))


class TestClippedTrainer:
    """Predictions of clipped training; the losses and the gradient are those of ClippedTrainer."""

    def train(self, path, kind, **options):
        make = trainers.MODELS[kind]
        with Ledger(path / "ledger") as ledger:
            trainer = ClippedTrainer(
                make(),
                arguments(path, learning_rate=0.0, num_train_epochs=1),
                train_dataset=with_names(kind),
                microbatch_size=2,
                id_column="id",
                ledger=ledger,
                **options,
            )
            trainer.train()
        return trainer.model

    @pytest.mark.parametrize(
        "rule", [rules.MinNorm(), pytest.param(rules.LossWeight(), marks=pytest.mark.full)]
    )
    def test_a_classifier(self, tmp_path, rule):
        model = self.train(tmp_path, "bert", rule=rule)
        rows = {row["id"]: row for row in rows_of(tmp_path)}
        for i, one in enumerate(trainers.examples("bert")):
            row, label = rows[f"row {i}"], int(one["labels"])
            p = model(input_ids=one["input_ids"][None]).logits[0].softmax(0)
            assert row["label"] == label
            assert row["label_probability"] == pytest.approx(p[label].item(), rel=1e-4)
            assert row["loss"] == pytest.approx(-p[label].log().item(), rel=1e-4)
        assert open_ledger(tmp_path / "ledger").classes == 3

    def test_a_language_model_has_none(self, tmp_path):
        self.train(tmp_path, "llama")
        assert {row["label"] for row in rows_of(tmp_path)} == {None}


def work(rank, folder):
    """Return the parameters of a Trainer, and of one that records."""
    stack_cells.launched(rank, 2)
    path, more = pathlib.Path(folder), {"ddp_backend": "gloo", "per_device_train_batch_size": 4}
    plain = Trainer(
        trainers.bert(), arguments(path, **more), train_dataset=trainers.examples("bert")
    )
    plain.train()
    found = train(path, trainers.bert(), with_names("bert"), **more)
    return [[p.detach() for p in trainer.model.parameters()] for trainer in (plain, found)]


@pytest.mark.full
def test_two_ranks(tmp_path):
    for plain, found in processes.run(work, 2, tmp_path, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    rows = rows_of(tmp_path)
    assert {row["rank"] for row in rows} == {0, 1}
    assert {row["id"] for row in rows} == {f"row {i}" for i in range(trainers.COUNT)}
