"""The demo: its data, its training, and the page it writes."""

import re

import pytest
import torch

import microclip
from microclip import demo
from microclip.cli import main
from microclip.demo import LOSS_HISTORY, PLAIN, TRAINING, Arm, DemoConfig, Digits, fit, tuned_rate
from microclip.ledger import open_ledger
from microclip.report.runs import read_run

SHORT = DemoConfig(steps=20, seeds=2)


class TestData:
    def test_the_share_of_wrong_labels_is_exact(self):
        digits = Digits(0, 0.2)
        wrong = digits.labels != digits.truth
        assert wrong.sum() == 180
        assert set(wrong.nonzero().flatten().tolist()) == set(digits.wrong.tolist())
        assert set(digits.wrong.tolist()) <= set(digits.train.tolist())

    def test_the_splits_do_not_overlap(self):
        digits = Digits(1, 0.2)
        everything = torch.cat([digits.train, digits.validation, digits.test])
        assert sorted(everything.tolist()) == list(range(1797))
        assert len(digits.train) == TRAINING

    def test_a_seed_decides_everything(self):
        one, same, other = Digits(3, 0.2), Digits(3, 0.2), Digits(4, 0.2)
        assert torch.equal(one.labels, same.labels)
        assert not torch.equal(one.train, other.train)


def test_plain_is_plain_training():
    """One micro-batch per step, or a hand-written loop: the same weights, bit for bit."""
    trained = fit(SHORT, PLAIN, 2e-3, seed=0)
    digits = Digits(0, SHORT.noise)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)),
        *(torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 20)
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(0))
    for places in order.split(32)[:20]:
        rows = digits.train[places]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(digits.pixels[rows]), digits.labels[rows])
        loss.backward()
        optimizer.step()
        schedule.step()
    for one, other in zip(trained.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_rate_is_tuned_without_the_test_images(monkeypatch):
    def score(config, arm, rate, seed):
        assert seed in demo.TUNING_SEEDS
        return type("Run", (), {"validation": -abs(rate - 4e-3)})

    monkeypatch.setattr(demo, "fit", score)
    assert tuned_rate(SHORT, PLAIN) == 4e-3


def test_the_default_length_is_enough_for_the_rule(tmp_path):
    """It holds examples back until the end, most of them wrong, with the right label suggested."""
    with microclip.Ledger(tmp_path) as ledger:
        trained = fit(DemoConfig(), Arm(LOSS_HISTORY), 4e-3, seed=0, ledger=ledger)
    said = [note for _, note in open_ledger(tmp_path).notes]
    assert len(said) == 2
    assert said[0].startswith("LossHistory starts to hold examples back")
    assert said[1].startswith("LossHistory keeps holding back")
    rows = microclip.draggers.score(tmp_path).table.to_pylist()
    held = {row["id"] for row in rows if row["held_back_since"] is not None}
    wrong = set(trained.digits.wrong.tolist())
    assert len(held & wrong) >= 170
    assert len(held - wrong) <= 40
    flagged = microclip.find_issues(tmp_path).flagged.to_pylist()
    suggested = {row["id"]: row["suggested_label"] for row in flagged}
    right = [row for row in wrong if suggested.get(row) == trained.digits.truth[row]]
    assert len(right) >= 150  # predictions are on record, although the run was clipped


@pytest.mark.parametrize("out", ["file", "file/inside"])
def test_a_file_instead_of_a_folder_is_refused_before_training(tmp_path, capsys, out):
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / out)]) == 1
    said = capsys.readouterr()
    assert f"--out must be a folder, new or old, but {tmp_path / out} is a file" in said.err
    assert said.out == ""  # no learning rate was tuned


@pytest.mark.filterwarnings("ignore:LossHistory holds nothing back:RuntimeWarning")  # too short
def test_the_demo_ends_with_a_page(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--steps", "30", "--seeds", "2"]) == 0
    page = tmp_path / "index.html"
    said = capsys.readouterr().out
    assert str(page.resolve()) in said.replace("\n", "")
    assert "plain" in said
    assert page.stat().st_size > 100_000
    assert "180 of 900 training images have a wrong label." in said
    for name in ("b = 4", "LossHistory"):
        assert f"{name}: its test accuracy (%) differs from plain training by" in (
            " ".join(said.split())
        )
    assert re.search(r"the rule held none of 8\d\d examples back", " ".join(said.split()))
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", page.read_text())
    assert titles[:3] == ["What helps?", "Which examples drag?", "Held back"]
    runs = {path.name: read_run(path) for path in (tmp_path / "runs").iterdir()}
    arms = ("LossHistory", "b4", "plain")
    assert sorted(runs) == [f"{arm}-seed-{seed}" for arm in arms for seed in (0, 1)]
    for run in runs.values():
        assert list(run.metrics[demo.TEST]) == [30]
    with_ledger = [name for name, run in runs.items() if run.ledger is not None]
    assert with_ledger == ["LossHistory-seed-0"]
