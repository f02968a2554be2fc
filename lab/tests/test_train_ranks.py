"""Training on several processes, and killing one: the final weights are the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import microclip

import train_faults
from tiny_recipe import weights

TINY = str(Path(__file__).with_name("support") / "tiny_recipe.py")


def launch(out, *options, processes=1):
    """Train with Accelerate's launcher, as users do; return the last weights."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    # with --cpu it starts one process, whatever is asked for; the recipe says cpu itself
    launcher += ["--multi_gpu"] if processes > 1 else ["--cpu"]
    launcher += ["--num_processes", str(processes), "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "microclip"]
    done = subprocess.run(
        [*launcher, "train", TINY, "--no-page", "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 40 of 40") == 1, "one process speaks"
    assert json.loads((out / "facts.json").read_text())["processes"] == processes
    return weights(out)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--microbatch-size", "none"),
        ("--chunk-size", "4", "--max-grad-norm", "0.05"),
    ],
)
def test_two_processes_give_the_result_of_one(tmp_path, options):
    """Each has half of every batch; micro-batches, augmentation and figures are the same."""
    one = launch(tmp_path / "one", *options)
    two = launch(tmp_path / "two", *options, processes=2)
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-6), name
    ledgers = [microclip.ledger.open_ledger(tmp_path / name / "ledger") for name in ("one", "two")]
    assert ledgers[0].steps == ledgers[1].steps
    per_step = 1 if "none" in options else 4
    assert ledgers[0].rows == 40 * (4 if "--chunk-size" in options else per_step)
    figures = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("one", "two")]
    looks = [
        [line for line in told.splitlines() if "validation_accuracy" in line] for told in figures
    ]
    assert looks[0] == looks[1]


@pytest.mark.full
def test_killed_and_taken_up_again(tmp_path):
    """Three times here; twenty in benchmarks/train_faults.py."""
    run = [TINY, "--preset", "dropping", "--steps", "800", "--checkpoint-every", "7"]
    run += ["--engine", "fused"]  # "auto" goes by the clock, which two runs need not agree on
    run += ["--no-page", "--evaluate-every", "200", "--log-every", "5"]
    for seconds in (0.0, 0.3, 0.1):
        assert train_faults.disturb(tmp_path / "loud", run, seconds)
    found = train_faults.finish(tmp_path / "loud", run)
    wanted = train_faults.finish(tmp_path / "quiet", run)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    loud, quiet = (microclip.ledger.open_ledger(tmp_path / n / "ledger") for n in ("loud", "quiet"))
    assert loud.rows == quiet.rows
    assert loud.steps == quiet.steps == range(800)
