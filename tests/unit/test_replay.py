"""Running a recorded step again: the same numbers from the same state, and what differs if not."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import microclip
from microclip import Clipper, Ledger, cli, replay, rules

COUNT, STEP = 40, 3


def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 4, generator=draw)
    return TensorDataset(x, torch.randint(3, (COUNT,), generator=draw))


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), *more, nn.Linear(16, 3))


def loss_fn_of(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(path, model=None, steps=6, names=None, norms=True, size=2, domains=None, **options):
    """Return the model as it was before STEP."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data().tensors
    before = None
    with Ledger(path) as ledger:
        options = {"rule": rules.MinNorm(), "engine": "stream", **options}
        clipper = Clipper(model, size, ledger=ledger, **options) if norms else None
        for step in range(steps):
            if step == STEP:
                before = copy.deepcopy(model)
            torch.manual_seed(step)
            rows = torch.randperm(COUNT)[:9]
            ids = rows if names is None else [names[row] for row in rows]
            optimizer.zero_grad()
            if clipper is None:
                losses = loss_fn_of(model)((x[rows], y[rows]))
                losses.mean().backward()
                ledger.record(ids, losses)
            else:
                own = None if domains is None else [domains[row] for row in rows]
                clipper.backward(loss_fn_of(model), (x[rows], y[rows]), ids=ids, domains=own)
            optimizer.step()
    return before


def again(path, model, dataset=None, step=STEP, **options):
    return replay(path, step, model, loss_fn_of(model), dataset or data(), **options)


class TestTheSameState:
    @pytest.mark.parametrize("engine", ["stream", "fused"])
    @pytest.mark.parametrize("size", [1, 2, None])
    def test_bit_for_bit(self, tmp_path, engine, size):
        model = train(tmp_path, size=size, engine=engine)
        found = again(tmp_path, model, engine=engine)
        assert (found.same, found.exact, len(found)) == (True, True, 9)
        assert found.notes == ("Everything on record came out again, up to rounding.",)
        for row in found.table.to_pylist():
            assert np.float32(row["loss"]) == np.float32(row["recorded_loss"])
            assert row["norm"] == row["recorded_norm"]

    def test_with_domains(self, tmp_path):
        model = train(tmp_path, domains=["b", "a", "c"] * 14)
        assert again(tmp_path, model).exact

    def test_norms_of_rows(self, tmp_path):
        """Recorded micro-batches have four rows; replayed, each has its own norm."""
        model = train(tmp_path, size=4)
        dataset = data()
        for row in again(tmp_path, model).table.to_pylist():
            x, y = (part[None] for part in dataset[row["id"]])
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            norm = torch.cat([g.flatten() for g in gradients]).norm().item()
            assert row["row_norm"] == pytest.approx(norm, rel=1e-5)
        shares = again(tmp_path, model).table["energy_share"].to_pylist()
        assert sum(shares) == pytest.approx(1.0)

    def test_plain_training(self, tmp_path):
        model = train(tmp_path, norms=False)
        found = again(tmp_path, model)
        assert found.exact
        assert any("Norms were not recorded" in note for note in found.notes)
        assert set(found.table["recorded_norm"].to_pylist()) == {None}
        assert min(found.table["row_norm"].to_pylist()) > 0

    def test_rules_that_weight_examples(self, tmp_path):
        model = train(tmp_path, rule=rules.LossWeight(), size=None)
        found = again(tmp_path, model)
        assert found.same
        assert any("those of weighted gradients" in note for note in found.notes)

    def test_the_model_is_left_alone(self, tmp_path):
        model = train(tmp_path, model=network(nn.BatchNorm1d(16)), size=3)
        before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        found = again(tmp_path, model)
        assert found.same
        assert any("BatchNorm mixes the rows" in note for note in found.notes)
        assert set(found.table["row_norm"].to_pylist()) == {None}
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), numbers)


class TestAnotherState:
    def test_other_weights(self, tmp_path):
        train(tmp_path)
        found = again(tmp_path, network())
        assert not found.same
        assert not found.exact
        assert "9 of 9 losses differ: the model is not in the state" in found.notes[0]

    def test_one_row_has_changed(self, tmp_path):
        model = train(tmp_path)
        dataset = data()
        torch.manual_seed(STEP)
        row = torch.randperm(COUNT)[4].item()
        dataset.tensors[0][row] *= 100
        found = again(tmp_path, model, dataset)
        assert f"Only 1 of 9 losses differs, that of {row}:" in found.notes[0]
        assert found.table["id"][0].as_py() == row

    def test_other_parameters_are_trained(self, tmp_path):
        model = train(tmp_path)
        model[0].requires_grad_(False)
        assert "All losses on record came out again, but 5 norms" in again(tmp_path, model).notes[0]

    def test_dropout_is_named(self, tmp_path):
        model = train(tmp_path, model=network(nn.Dropout(0.5)))
        assert any("masks are not on record" in note for note in again(tmp_path, model).notes)


class TestFindingRows:
    NAMES = tuple(f"file {row}" for row in range(COUNT))

    @pytest.mark.parametrize("kind", ["with_ids", "mapping", "function"])
    def test_names(self, tmp_path, kind):
        model, rows = train(tmp_path, names=self.NAMES), data()
        named = dict(zip(self.NAMES, rows, strict=True))
        dataset = {
            "with_ids": microclip.with_ids(rows, self.NAMES),
            "mapping": named,
            "function": lambda name: named[name],
        }[kind]
        assert again(tmp_path, model, dataset).same

    @pytest.mark.parametrize("names", [None, NAMES])
    def test_a_part_of_a_data_set_keeps_its_ids(self, tmp_path, names):
        model = train(tmp_path, names=names)
        part = Subset(microclip.with_ids(data(), names), list(reversed(range(COUNT))))
        assert again(tmp_path, model, part).same
        with pytest.raises(ValueError, match=r"The ConcatDataset wraps .* or a function that"):
            again(tmp_path, model, ConcatDataset([part]))

    def test_unknown(self, tmp_path):
        model = train(tmp_path, names=self.NAMES)
        with pytest.raises(ValueError, match="The TensorDataset has no example 'file"):
            again(tmp_path, model)

    def test_no_data_set(self, tmp_path):
        with pytest.raises(TypeError, match="dataset must be a data set with positions"):
            again(tmp_path, train(tmp_path), iter([1]))


class TestMistakes:
    def test_a_step_that_is_not_there(self, tmp_path):
        model = train(tmp_path)
        with pytest.raises(ValueError, match="has no step 77: it has steps from 0 to 5"):
            again(tmp_path, model, step=77)
        with pytest.raises(ValueError, match="the number of a recorded step, but got '3'"):
            again(tmp_path, model, step="3")

    def test_a_mean_loss(self, tmp_path):
        model = train(tmp_path)
        with pytest.raises(ValueError, match=r"one loss for each of the 9 rows .* returned \(\)"):
            replay(tmp_path, STEP, model, lambda b: F.cross_entropy(model(b[0]), b[1]), data())


TASK = """
import torch, sys
sys.path.insert(0, {tests!r})
import test_replay as t

def last():
    model = t.network()
    model.load_state_dict(torch.load({weights!r}))
    return model, t.loss_fn_of(model), t.data()
"""


class TestCommand:
    def test_prints_the_step(self, tmp_path, capsys, monkeypatch):
        from pathlib import Path

        model = train(tmp_path / "ledger")
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        task = TASK.format(tests=str(Path(__file__).parent), weights=str(tmp_path / "weights.pt"))
        (tmp_path / "replay_task.py").write_text(task)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        arguments = ["spikes", "ledger", "--step", str(STEP), "--replay", "replay_task:last"]
        assert cli.main(arguments) == 0
        said = capsys.readouterr().out
        assert "Step 3, run again:" in said
        assert "Everything on record came out again" in said

    def test_no_spike_to_replay(self, tmp_path):
        train(tmp_path)
        with pytest.raises(SystemExit, match="There is no spike to run again: name a step"):
            cli.main(["spikes", str(tmp_path), "--replay", "tasks:last"])


def test_printed(tmp_path):
    said = str(again(tmp_path, train(tmp_path, size=1)))
    assert said.startswith("Step 3, run again:\n  ")
    assert "% of the gradient energy" in said
