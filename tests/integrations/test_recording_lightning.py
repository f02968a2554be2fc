"""RecordExamples: Lightning trains as before, bit for bit, with every example's loss on record."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import microclip
from microclip import Ledger, rules
from microclip.integrations.lightning import MicrobatchClip, RecordExamples
from microclip.ledger import open_ledger

import processes
from lightning_runs import COUNT, LIGHTNING_WARNINGS, Model, data, trainer

pytestmark = LIGHTNING_WARNINGS


def loader(size=8, ids=None):
    """Return shuffled batches, the same ones every time it is called."""
    dataset = microclip.with_ids(TensorDataset(*data()), ids)
    order = torch.Generator().manual_seed(3)
    return DataLoader(dataset, batch_size=size, shuffle=True, generator=order)


def rows_of(path):
    return [row for batch in open_ledger(path).examples() for row in batch.to_pylist()]


def fit(path, model, callbacks=(), batches=None, checkpoint=None, **options):
    options = {"max_epochs": 2, "accumulate_grad_batches": 1, **options}
    run = trainer(path, list(callbacks), **options)
    run.fit(model, loader() if batches is None else batches, ckpt_path=checkpoint)
    return run


def recorded(path, model, batches=None, name="ledger", **options):
    with Ledger(path / name) as ledger:
        return fit(path, model, [RecordExamples(ledger)], batches, **options)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_not_changed(tmp_path, accumulate):
    plain, found = Model(lr=0.1), Model(lr=0.1)
    fit(tmp_path, plain, accumulate_grad_batches=accumulate)
    recorded(tmp_path, found, accumulate_grad_batches=accumulate)
    assert same(plain, found)
    assert len(plain.seen) == len(found.seen) > 2
    rows = rows_of(tmp_path / "ledger")
    assert sorted(row["id"] for row in rows) == sorted([*range(COUNT)] * 2)
    assert {row["step"] for row in rows} == set(range(6))  # three batches in each of two epochs


def test_losses_and_predictions_of_each_example(tmp_path):
    model = Model(lr=0.0)
    recorded(tmp_path, model, max_epochs=1)
    x, y = data()
    logits = model.net(x)
    losses = F.cross_entropy(logits, y, reduction="none").tolist()
    p = logits.softmax(1)
    for row in rows_of(tmp_path / "ledger"):
        i = row["id"]
        assert row["loss"] == pytest.approx(losses[i], rel=1e-5)
        assert row["label"] == y[i]
        assert row["label_probability"] == pytest.approx(p[i, y[i]].item(), rel=1e-5)
    assert open_ledger(tmp_path / "ledger").classes == 3


class Returns(Model):
    """Computes something that torch has no function for, and returns it."""

    def training_step(self, batch, batch_idx):
        batch.pop("id")
        logits = self.net(batch["x"])
        losses = -logits.log_softmax(1).gather(1, batch["y"][:, None]).squeeze(1)
        return {"loss": losses.mean(), "losses": losses, "logits": logits}


def test_losses_that_training_step_returns(tmp_path):
    x, y = data()
    samples = [{"x": x[i], "y": y[i]} for i in range(COUNT)]
    dataset = microclip.with_ids(samples, [f"row {i}" for i in range(COUNT)])
    model = Returns()
    recorded(tmp_path, model, DataLoader(dataset, batch_size=8), max_epochs=1)
    expected = F.cross_entropy(model.net(x), y, reduction="none")
    for row in rows_of(tmp_path / "ledger"):
        i = int(row["id"].split()[1])
        assert row["loss"] == pytest.approx(expected[i].item(), rel=1e-5)
        assert (row["label"], row["other"]) == (None, model.net(x)[i].argmax())


def test_ids_and_domains_that_functions_find(tmp_path):
    x, y = data()
    batches = DataLoader(TensorDataset(torch.arange(COUNT) + 100, x, y), batch_size=8)

    class Third(Model):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[1]), batch[2])

    with Ledger(tmp_path / "ledger") as ledger:
        callback = RecordExamples(
            ledger, ids=lambda batch: batch[0], domains=lambda batch: batch[0] % 2
        )
        fit(tmp_path, Third(), [callback], batches, max_epochs=1)
    assert sorted(row["id"] for row in rows_of(tmp_path / "ledger")) == [*range(100, 100 + COUNT)]
    record = open_ledger(tmp_path / "ledger")
    rows = [row for batch in record.microbatches() for row in batch.to_pylist()]
    assert all({str(i % 2) for i in row["ids"]} == {row["domain"]} for row in rows)


class Manual(Model):
    """Steps by itself, except for batch 1."""

    def __init__(self, function, returns=False):
        super().__init__(lr=0.1)
        self.automatic_optimization = False
        self.function, self.returns = function, returns

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.function(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        return loss if self.returns else None


@pytest.mark.parametrize("returns", [True, False])
def test_manual_optimization_and_skipped_batches(tmp_path, returns):
    recorded(tmp_path, Manual(F.cross_entropy, returns), max_epochs=1)
    assert len(rows_of(tmp_path / "ledger")) == COUNT - 8


def test_a_call_that_is_not_part_of_the_loss(tmp_path):
    """Such as one that is only logged; constant factors do not matter."""

    class Logs(Model):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            F.l1_loss(logits, torch.zeros_like(logits))
            return {"loss": 3 * F.cross_entropy(logits, batch[1]) + 1}

    recorded(tmp_path, Logs(), max_epochs=1)
    assert {row["label"] for row in rows_of(tmp_path / "ledger")} == {0, 1, 2}


def test_examples_without_targets_are_left_out(tmp_path):
    class Ignores(Model):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=2)

    recorded(tmp_path, Ignores(), max_epochs=1)
    found = sorted(row["id"] for row in rows_of(tmp_path / "ledger"))
    assert found == (data()[1] != 2).nonzero().flatten().tolist()


def test_a_batch_that_is_evaluated_again_is_recorded_once(tmp_path):
    class Lbfgs(Model):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    recorded(tmp_path, Lbfgs(), max_epochs=1)
    assert sorted(row["id"] for row in rows_of(tmp_path / "ledger")) == [*range(COUNT)]


def test_resumed_training_continues_the_record(tmp_path):
    """Whole, and stopped after an epoch: the same rows, and the same model."""
    whole = Model(lr=0.1)
    recorded(tmp_path, whole, name="whole", max_epochs=3)
    ledger = Ledger(tmp_path / "parts")
    first = fit(tmp_path, Model(lr=0.1), [RecordExamples(ledger)], loader(), max_epochs=1)
    first.save_checkpoint(tmp_path / "one.ckpt")
    # steps after the checkpoint, which are lost
    fit(tmp_path, Model(lr=0.1), [RecordExamples(ledger)], loader(), max_epochs=1)
    ledger.close()
    batches = loader()
    list(batches)  # the loader's own state is not Lightning's: skip the first epoch
    rest = Model(lr=0.1)
    with Ledger(tmp_path / "parts") as ledger:
        path = tmp_path / "one.ckpt"
        fit(tmp_path, rest, [RecordExamples(ledger)], batches, path, max_epochs=3)
    assert same(whole, rest)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


class TestMistakes:
    def test_no_ids(self, tmp_path):
        batches = DataLoader(TensorDataset(data()[0]), batch_size=8)
        with pytest.raises(ValueError, match=r"no ids in the last entry .* pass ids="):
            recorded(tmp_path, Model(), batches)

    def test_no_loss_function(self, tmp_path):
        class Own(Model):
            def training_step(self, batch, batch_idx):
                return self.net(batch[0]).square().mean()

        message = r'losses of 8 examples .* none was called.*{"loss": loss, "losses": losses}'
        with pytest.raises(ValueError, match=message):
            recorded(tmp_path, Own())
        own = Manual(lambda logits, y: logits.square().mean())
        with pytest.raises(ValueError, match="none was called"):
            recorded(tmp_path, own, name="manual")

    @pytest.mark.parametrize("own", [False, True], ids=["two functions", "one of its own"])
    def test_several_losses(self, tmp_path, own):
        class Several(Model):
            def training_step(self, batch, batch_idx):
                logits = self.net(batch[0])
                main = F.cross_entropy(logits, batch[1])
                if own:
                    main = -logits.log_softmax(1).gather(1, batch[1][:, None]).mean()
                return main + 0.01 * F.mse_loss(logits, torch.zeros_like(logits))

        seen = "also has parts that do not" if own else "cross_entropy of 8 rows, mse_loss of 8"
        with pytest.raises(ValueError, match=rf'{seen}.* return .*"losses": losses'):
            recorded(tmp_path, Several())

    def test_several_losses_of_manual_optimization(self, tmp_path):
        both = Manual(lambda logits, y: F.cross_entropy(logits, y) + F.cross_entropy(-logits, y))
        with pytest.raises(ValueError, match=r'cross_entropy of 8 rows, .*"losses": losses'):
            recorded(tmp_path, both)

    @pytest.mark.parametrize("copied", [False, True])
    def test_labels_instead_of_ids(self, tmp_path, copied):
        class Copies(Model):
            def training_step(self, batch, batch_idx):
                y = batch[1].clone() if copied else batch[1]
                return F.cross_entropy(self.net(batch[0]), y)

        batches = DataLoader(TensorDataset(*data()), batch_size=8)
        with pytest.raises(ValueError, match="the target of the loss. Use a loader of microclip"):
            recorded(tmp_path, Copies(), batches)

    def test_ids_that_repeat(self, tmp_path):
        x, y = data()
        batches = DataLoader(TensorDataset(x, y, torch.arange(COUNT) // 2), batch_size=8)
        with pytest.warns(RuntimeWarning, match="several times in one batch") as warned:
            recorded(tmp_path, Model(), batches)
        assert sum("several times" in str(each.message) for each in warned) == 1
        assert len(rows_of(tmp_path / "ledger")) == 2 * COUNT

    def test_with_clipping(self, tmp_path):
        with Ledger(tmp_path / "ledger") as ledger:
            callbacks = [RecordExamples(ledger), MicrobatchClip(microbatch_size=2)]
            with pytest.raises(ValueError, match="MicrobatchClip records what it clips by itself"):
                fit(tmp_path, Model(), callbacks)

    def test_a_path(self):
        with pytest.raises(TypeError, match="needs a microclip.Ledger, but got 'runs/first'"):
            RecordExamples("runs/first")


def work(rank, folder, records):
    """Train on two ranks; return the parameters."""
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Here(LightningEnvironment):
        creates_processes_externally = True

        def global_rank(self):
            return rank

        def local_rank(self):
            return rank

        def world_size(self):
            return 2

        def set_global_rank(self, rank):
            pass

        def set_world_size(self, size):
            pass

    warnings.simplefilter("ignore")
    model = Model(lr=0.1)
    ledger = Ledger(folder + "/ledger")
    run = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(cluster_environment=Here()),
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[RecordExamples(ledger)] if records else [],
        default_root_dir=folder,
    )  # fmt: skip
    run.fit(model, DataLoader(microclip.with_ids(TensorDataset(*data())), batch_size=4))
    ledger.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.full
def test_two_ranks(tmp_path):
    for name in ("plain", "recorded"):
        (tmp_path / name).mkdir()
    plain = processes.run(work, 2, tmp_path / "plain", str(tmp_path / "plain"), False)
    found = processes.run(work, 2, tmp_path / "recorded", str(tmp_path / "recorded"), True)
    for one, other in zip(plain, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    rows = rows_of(tmp_path / "recorded" / "ledger")
    assert sorted(row["id"] for row in rows) == sorted([*range(COUNT)] * 2)
    assert {row["rank"] for row in rows} == {0, 1}


def test_predictions_of_clipped_training(tmp_path):
    """training_step records them itself, and returns the losses that a rule weights."""

    class Records(Model):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            ledger.record_predictions(logits, batch[1])
            return F.cross_entropy(logits, batch[1], reduction="none")

    model = Records(lr=0.0)
    with Ledger(tmp_path / "ledger") as ledger:
        callback = MicrobatchClip(rules.LossWeight(), ids=lambda batch: batch[2], ledger=ledger)
        fit(tmp_path, model, [callback], max_epochs=1)
    x, y = data()
    p = model.net(x).softmax(1)
    rows = rows_of(tmp_path / "ledger")
    assert sorted(row["id"] for row in rows) == [*range(COUNT)]
    for row in rows:
        assert row["label"] == y[row["id"]]
        expected = p[row["id"], row["label"]].item()
        assert row["label_probability"] == pytest.approx(expected, rel=1e-5)
