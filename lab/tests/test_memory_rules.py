"""Rules that remember examples, in recipes and sweeps: told, resumed, shared by processes."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import microclip
from microclip.report.runs import read_run
from microclip.rules import ExampleRule, LossHistory
from microclip.state_files import read_state
from microclip_lab.sweep.command import run_sweep
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.training.config import SettingError
from microclip_lab.training.train import train

import corners_recipe
from corners_recipe import Corners, training
from tiny_recipe import forget_accelerate, weights

QUIET = Console(file=StringIO())


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    forget_accelerate()
    yield
    forget_accelerate()


def saved_rule(run):
    """Return the rule as the last checkpoint has it."""
    last = max((run / "checkpoints").glob("step-*"))
    rule = LossHistory()
    rule.load_state_dict(read_state(last / "training.safetensors")["clipper"]["rule"])
    return rule


@pytest.mark.parametrize("b", [None, 4])
def test_wrong_examples_are_held_back_whatever_the_micro_batch_size(tmp_path, b):
    finished = train(Corners(), training(out=tmp_path / "run", microbatch_size=b))
    rule = saved_rule(finished.path)
    assert rule.phase == "holding", rule.phase
    names = [f"point {row}" for row in range(48)]
    held = rule.weigh(microclip.rules.example_table.keys_of(names)[0], None) < 0.5
    assert held.nonzero().flatten().tolist() == list(range(8))
    run = read_run(finished.path)
    logged = run.metrics["microclip/held_back"]
    assert logged[1] == 0
    assert sum(logged[step] for step in (118, 119, 120)) == 8
    assert run.settings["rule"] == "loss-history"
    assert finished.metrics["test_accuracy"] == 1
    if b is None:  # examples are weighted in one pass either way
        train(Corners(), training(out=tmp_path / "other", microbatch_size=4))
        assert all(torch.equal(a, c) for a, c in both(tmp_path / "run", tmp_path / "other"))


def both(one, other):
    found, wanted = weights(one), weights(other)
    return [(found[name], wanted[name]) for name in wanted]


@pytest.mark.parametrize(
    "rule", [pytest.param("loss-history", marks=pytest.mark.full), "LossHistory(clip=Unit)"]
)
@pytest.mark.parametrize(
    "stop", [pytest.param(9, marks=pytest.mark.full), 50, pytest.param(100, marks=pytest.mark.full)]
)
def test_resumed_runs_are_bit_for_bit_the_same(tmp_path, rule, stop):
    """Before anything is held back, and after."""
    options = {"rule": rule, "microbatch_size": 4, "learning_rate": 0.1 if "Unit" in rule else 0.5}
    train(Corners(), training(out=tmp_path / "whole", **options))
    train(Corners(), training(out=tmp_path / "parts", **options), until=stop)
    before = saved_rule(tmp_path / "parts")
    assert before.is_holding == (stop > 9), before.phase
    forget_accelerate()
    train(Corners(), training(out=tmp_path / "parts", **options, resume=True))
    assert all(torch.equal(a, b) for a, b in both(tmp_path / "parts", tmp_path / "whole"))
    one, other = saved_rule(tmp_path / "parts"), saved_rule(tmp_path / "whole")
    assert one.fingerprint() == other.fingerprint()
    held = [read_run(tmp_path / n).metrics["microclip/held_back"] for n in ("parts", "whole")]
    assert held[0] == held[1]


def test_a_run_cannot_be_resumed_with_another_rule(tmp_path):
    train(Corners(), training(out=tmp_path / "run", steps=60), until=5)
    with pytest.raises(SettingError, match="rule was 'loss-history' and is now 'LossHistory"):
        train(
            Corners(),
            training(out=tmp_path / "run", steps=60, resume=True, rule="LossHistory(most=0.9)"),
        )


class Watching(ExampleRule):
    """Keeps what it is shown."""

    def __init__(self, **given):
        super().__init__(**given)
        self.seen = []

    def weigh(self, keys, losses):
        return torch.ones(len(keys))

    def remember(self, seen):
        self.seen.append(seen)


def test_an_object_is_told_the_steps_the_ids_and_the_domains(tmp_path):
    rule = Watching()
    options = {"epochs": 2.0, "microbatch_size": None, "rule": "mine", "chunk_size": 8}
    train(
        Corners(domains=True),
        training(out=tmp_path / "run", **options, by_domain=True),
        rule=rule,
    )
    assert rule.total_steps == 6
    assert [len(seen.keys) for seen in rule.seen] == [16] * 6
    first = torch.cat([seen.keys for seen in rule.seen[:3]])
    assert len(first.unique()) == 48  # an epoch
    assert len(torch.cat([seen.domains for seen in rule.seen]).unique()) == 3
    told = Watching(total_steps=99)
    train(Corners(), training(out=tmp_path / "told", steps=3), rule=told)
    assert told.total_steps == 99


def test_plain_training_is_still_plain(tmp_path):
    """And equal to a rule that remembers, while it holds nothing back."""
    options = {"steps": 9, "microbatch_size": None}
    train(Corners(), training(out=tmp_path / "plain", rule="MinNorm", **options))
    run = read_run(tmp_path / "plain")
    assert not any(name.startswith("microclip/") for name in run.metrics)
    assert run.settings["rule"] == "null"
    train(Corners(), training(out=tmp_path / "rule", **options), rule=LossHistory(1000))
    assert all(torch.equal(a, b) for a, b in both(tmp_path / "rule", tmp_path / "plain"))


def test_norm_history_needs_single_examples(tmp_path):
    with pytest.raises(SettingError, match="--microbatch-size 1 instead of 4"):
        train(Corners(), training(out=tmp_path / "no", rule="NormHistory", microbatch_size=4))
    options = {"rule": "NormHistory", "microbatch_size": 1, "engine": "fused", "steps": 60}
    finished = train(Corners(), training(out=tmp_path / "run", **options))
    assert "microclip/held_back" in read_run(finished.path).metrics


def test_a_rule_that_remembers_is_an_arm_of_a_sweep(tmp_path):
    """Once, since it does not depend on the micro-batch size."""
    config = SweepConfig(
        out=tmp_path, microbatch_sizes=(4, 8), rules=("LossHistory(clip=Unit)", "loss-history"),
        learning_rates=(0.5,), seeds=1, tuning_seeds=1,
    )  # fmt: skip
    path = run_sweep(Corners(), training(), config, console=Console(file=StringIO()), log=QUIET)
    said = json.loads(Path(path).read_text())
    names = [cell["name"] for cell in said["cells"]]
    clipped = "LossHistory(clip=Unit), b = "
    assert names == ["plain", f"{clipped}4", f"{clipped}8", "loss-history, b = 1"]
    plain, *_, ours = said["cells"]
    for cell in (plain, ours):
        assert all(math.isfinite(run["metrics"]["test_accuracy"]) for run in cell["runs"])
    held = [
        sum(read_run(tmp_path / "runs" / run["folder"]).metrics["microclip/held_back"].values())
        for run in ours["runs"]
    ]
    assert all(count > 100 for count in held)


def test_a_race_pauses_and_continues_a_rule_that_remembers(tmp_path):
    config = SweepConfig(
        out=tmp_path, microbatch_sizes=(4,), rules=("loss-history",), learning_rates=(0.5,),
        race=True,
    )  # fmt: skip
    run_sweep(
        Corners(), replace(training(), evaluate_every=20), config,
        console=Console(file=StringIO()), log=QUIET,
    )  # fmt: skip
    folders = [p.parent.name for p in tmp_path.rglob("run.json")]
    assert any("loss-history-b1" in folder for folder in folders), folders


def launch(out, processes):
    """Train on several processes, as users do."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc_per_node", str(processes), "-m", "microclip", "train"]
    done = subprocess.run(
        [*launcher, corners_recipe.__file__, "--dropout", "0", "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return saved_rule(out)


@pytest.mark.full
def test_two_processes_remember_what_one_does(tmp_path):
    one, two = launch(tmp_path / "one", 1), launch(tmp_path / "two", 2)
    for a, b in both(tmp_path / "two", tmp_path / "one"):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
    assert one.phase == two.phase == "holding"
    rows, others = (rule.table.find(one.table.keys()) for rule in (one, two))
    assert len(rows) == 48
    assert torch.equal(one.table["visits"][rows], two.table["visits"][others])
    close = torch.allclose(one.table["average"][rows], two.table["average"][others], rtol=1e-2)
    assert close
    assert torch.equal(one.table["held"][rows], two.table["held"][others])
