"""Spikes: steps that stand out, and the rows behind them."""

import csv

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import microclip
from microclip import Clipper, Ledger, cli, rules, spikes
from microclip.step_spikes.series import stand_out

from ledgers import Row, write  # isort: skip


def plain(path, odd=None, steps=60, size=8):
    """Record steps with losses near 1; `odd` maps a step to the losses of its rows."""
    draw = np.random.default_rng(0)
    with Ledger(path) as ledger:
        for step in range(steps):
            losses = draw.normal(1.0, 0.1, size)
            if odd and step in odd:
                losses[: len(odd[step])] = odd[step]
            ids = [f"{step}:{row}" for row in range(size)]
            ledger.record(ids, torch.tensor(losses))
    return path


class TestSteps:
    def test_nothing_stands_out(self, tmp_path):
        found = spikes(plain(tmp_path))
        assert (len(found), found.steps) == (0, 60)
        assert len(found.table) == 0
        assert found.table.schema.names == spikes(tmp_path, threshold=1e-9).table.schema.names

    def test_one_row_breaks_a_step(self, tmp_path):
        found = spikes(plain(tmp_path, {40: [1.0, 1.0, 30.0]}))
        assert [spike.step for spike in found.found] == [40]
        spike = found[0]
        assert spike.rows["id"][0].as_py() == "40:2"
        assert spike.loss > 4 > 2 > spike.usual_loss
        assert spike.norm is spike.norm_score is None
        assert spike.score == spike.loss_score > 6
        assert "'40:2' has 8" in spike.note

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_not_finite(self, tmp_path, bad):
        spike = spikes(plain(tmp_path, {3: [1.0, bad], 50: [90.0]}))[0]
        assert (spike.step, spike.score) == (3, np.inf)
        assert spike.rows["id"][0].as_py() == "3:1"
        assert spike.rows["loss_share"][0].as_py() == 1.0

    def test_the_worst_come_first(self, tmp_path):
        odd = {20: [20.0], 30: [90.0], 45: [50.0]}
        found = spikes(plain(tmp_path, odd))
        assert [spike.step for spike in found.found] == [30, 45, 20]
        worst = spikes(tmp_path, most=1)
        assert [spike.step for spike in worst.found] == [30]
        assert (worst.total, str(worst)) == (3, "Spikes(1 of 3 in 60 steps)")
        assert len(spikes(tmp_path, threshold=1e6)) == 0

    def test_neighbors_are_one_spike(self, tmp_path):
        spike, other = spikes(
            plain(tmp_path, {30: [50.0], 31: [40.0], 32: [30.0], 34: [9.0]})
        ).found
        assert (spike.step, spike.last) == (30, 32)
        assert other.step == 34

    def test_a_whole_step_is_nobodys_fault(self, tmp_path):
        (spike,) = spikes(plain(tmp_path, {30: [9.0] * 8})).found
        assert "No row of step 30 stands out" in spike.note
        assert "an earlier step probably did the damage" in spike.note

    @pytest.mark.parametrize("losses", [[9.0] * 8, [np.nan] * 8])
    def test_no_step_is_earlier_than_the_first(self, tmp_path, losses):
        (spike,) = spikes(plain(tmp_path, {0: losses})).found
        assert "No row of step 0 stands out, and it is the first step on record" in spike.note
        assert "earlier" not in spike.note

    @pytest.mark.parametrize(
        ("losses", "note"),
        [
            ([1001.0, 1.0], "'30:0' has 100% of the loss, where an even share is 50.0%."),
            ([1001.0, 1.0, 1.0], "'30:0' has 100% of the loss, where an even share is 33.3%."),
            ([1.0, 1001.0, 501.0, 1.0], "'30:1' and 1 more have 100% of the loss, where an even"),
            ([1.0, np.nan, np.nan, 1.0], "'30:1' and 1 more have 100% of the loss"),
            ([9.0, 8.0], "No row of step 30 stands out"),
            ([np.nan] * 4, "No row of step 30 stands out"),
            ([9.0], "No row of step 30 stands out"),
        ],
    )
    def test_steps_of_few_rows(self, tmp_path, losses, note):
        (spike,) = spikes(plain(tmp_path, {30: losses}, size=len(losses))).found
        assert spike.note.startswith(note)

    def test_falling_losses_are_no_spikes(self, tmp_path):
        torch.manual_seed(0)
        with Ledger(tmp_path) as ledger:
            for step in range(200):
                ledger.record(range(4), 3 * torch.rand(4) * 0.98**step + 0.1)
        assert len(spikes(tmp_path)) == 0


class TestNorms:
    def steps(self, path, count=40, bad=25, losses=True):
        draw = np.random.default_rng(0)
        found = []
        for step in range(count):
            rows = [
                Row(
                    ids=[f"{step}:{j}:{i}" for i in range(2)],
                    norm=float(draw.normal(2.0, 0.1)) * (50 if (step, j) == (bad, 1) else 1),
                    losses=[1.0 + 0.01 * j, 1.0] if losses else None,
                )
                for j in range(4)
            ]
            found.append(rows)
        return write(path, found)

    def test_a_gradient_stands_out(self, tmp_path):
        (spike,) = spikes(self.steps(tmp_path)).found
        assert spike.step == 25
        assert spike.norm_score > 100 > 6 > spike.loss_score
        assert {one.as_py() for one in spike.rows["id"][:2]} == {"25:1:0", "25:1:1"}
        assert sum(spike.rows["energy_share"].to_pylist()) == pytest.approx(1.0)
        assert "cannot tell its 2 members apart" in spike.note

    def test_norms_alone(self, tmp_path):
        found = spikes(self.steps(tmp_path, losses=False))
        assert found[0].step == 25
        assert found[0].loss is None
        assert "There is no loss per example, so losses cannot be traced to rows." in found.notes

    def test_the_largest_norms(self, tmp_path):
        rows = [[Row([f"{s}:{j}"], 1e200 if (s, j) == (20, 1) else 1e180) for j in range(3)]
                for s in range(30)]  # fmt: skip
        (spike,) = spikes(write(tmp_path, rows)).found
        assert spike.rows["id"][0].as_py() == "20:1"

    def test_one_microbatch_per_step(self, tmp_path):
        rows = [[Row([f"{s}:{i}" for i in range(3)], 50.0 if s == 20 else 1.0)] for s in range(30)]
        found = spikes(write(tmp_path, rows))
        assert found[0].step == 20
        assert "no row can be named" in found[0].note
        assert any("Every step was a single micro-batch" in note for note in found.notes)


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    ),
    "linear": lambda: nn.Linear(64, 10),
}


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("mlp", False),
        ("mlp", True),
        ("convolution", False),
        ("linear", False),
        pytest.param("convolution", True, marks=pytest.mark.full),
        pytest.param("linear", True, marks=pytest.mark.full),
    ],
)
def test_planted_rows_are_found(tmp_path, name, norms):
    """Twenty rows in twenty steps: huge, corrupt, or from elsewhere; the guilty is in the top 3."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(1)
    model = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    planted = {}

    def losses(batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with Ledger(tmp_path) as ledger:
        clipper = Clipper(model, 1, rule=rules.Keep(), ledger=ledger) if norms else None
        for step in range(440):
            rows = torch.randint(len(x), (32,))
            batch, target = x[rows].clone(), y[rows].clone()
            ids = [f"{step}:{row}" for row in range(32)]
            if step >= 40 and step % 20 == 0:
                guilty = step % 32
                planted[step] = ids[guilty]
                kind = step // 20 % 3
                if kind == 0:
                    batch[guilty] *= 100  # bytes that were not scaled
                elif kind == 1:
                    batch[guilty] = 30 * torch.randn(64)  # a corrupt file
                else:
                    batch[guilty] = 10 * (1 - batch[guilty])  # inverted, in another range
                with torch.no_grad():  # a row that happens to be predicted right spoils nothing
                    target[guilty] = model(batch)[guilty].argmin()
            optimizer.zero_grad()
            if clipper is None:
                found = losses((batch, target))
                found.mean().backward()
                ledger.record(ids, found)
            else:
                clipper.backward(losses, (batch, target), ids=ids)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    found = {spike.step: spike for spike in spikes(tmp_path, most=40).found}
    right = sum(
        step in found and one in found[step].rows["id"].to_pylist()[:3]
        for step, one in planted.items()
    )
    assert len(planted) == 20
    assert right >= 18, (right, sorted(found))


class TestScores:
    def test_by_hand(self):
        """Median 1.5, deviation 0.5: 9 lies 7.5 / (1.4826 x 0.5) above."""
        scores, medians = stand_out(np.array([1.0, 2.0] * 10 + [9.0]), 20)
        assert scores[-1] == pytest.approx(7.5 / (1.4826 * 0.5))
        assert medians[-1] == 1.5

    def test_the_first_steps_are_compared_with_those_after(self):
        values = np.concatenate([[50.0], np.tile([1.0, 2.0], 20)])
        assert stand_out(values, 20)[0][0] > 6

    def test_too_few(self):
        assert stand_out(np.array([1.0, 2.0, np.nan]), 20)[0].tolist() == [0.0, 0.0, np.inf]

    def test_constant_values_do_not_stand_out(self):
        values = np.full(40, 0.5)
        values[30] = 0.5001
        assert stand_out(values, 20)[0].max() < 1

    def test_earlier_spikes_in_the_window_do_not_matter(self):
        values = np.random.default_rng(0).uniform(1.0, 2.0, 60)
        values[[20, 25, 30, 35]] = 100.0
        scores, _ = stand_out(values, 20)
        assert np.flatnonzero(scores > 6).tolist() == [20, 25, 30, 35]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "window must be an integer of at least 10, but got 3"),
        ({"most": 0}, "most must be an integer of at least 1, but got 0"),
        ({"threshold": 0}, "threshold must be above 0, but got 0"),
    ],
)
def test_options_that_make_no_sense(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        spikes(plain(tmp_path), **options)


def test_limits_are_said(tmp_path):
    found = spikes(plain(tmp_path / "plain"))
    assert any("Only losses were recorded" in note for note in found.notes)
    with Ledger(tmp_path / "some", every=5) as ledger:
        for _ in range(60):
            ledger.record([0], [1.0])
    assert any("Some steps were not recorded" in n for n in spikes(tmp_path / "some").notes)


class TestCommand:
    def test_prints_rows_and_writes_them(self, tmp_path, capsys):
        path = plain(tmp_path / "run" / "ledger", {40: [1.0, 30.0]})
        where = str(tmp_path / "rows.csv")
        assert cli.main(["spikes", str(path.parent), "--csv", where]) == 0
        said = capsys.readouterr().out
        assert "1 spike in 60 steps." in said
        assert "Step 40: loss 4." in said
        assert "40:1: loss 30 (8" in said
        with open(where, newline="") as file:
            rows = list(csv.DictReader(file))
        assert (len(rows), rows[0]["id"], rows[0]["step"]) == (8, "40:1", "40")

    def test_says_how_many_there_are_besides_the_worst(self, tmp_path, capsys):
        path = plain(tmp_path, {20: [20.0], 30: [90.0], 45: [50.0]})
        assert cli.main(["spikes", str(path), "--most", "2", "--rows", "0"]) == 0
        said = capsys.readouterr().out
        assert "3 spikes in 60 steps. These are the worst 2." in said
        assert "20:0" not in said

    def test_rows_below_zero(self, tmp_path, capsys):
        with pytest.raises(SystemExit):
            cli.main(["spikes", str(tmp_path), "--rows", "-1"])
        assert "rows must be 0 or more, but got -1." in capsys.readouterr().err

    def test_nothing_found(self, tmp_path, capsys):
        assert cli.main(["spikes", str(plain(tmp_path))]) == 0
        assert "No spikes in 60 steps." in capsys.readouterr().out

    def test_mistakes(self, tmp_path, capsys):
        assert cli.main(["spikes", str(tmp_path / "none")]) == 1
        assert "There is no ledger at" in capsys.readouterr().err


def test_exported():
    assert microclip.spikes is spikes
