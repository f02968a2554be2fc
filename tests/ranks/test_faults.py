"""A rank that dies: the others raise, and the run resumes from its checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import faults

SUPPORT = Path(__file__).parents[1] / "support"


def torchrun(folder, *options):
    """Train 30 steps on two ranks, under torchrun's own supervision."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node=2", "--max-restarts=1", str(SUPPORT / "rank_train.py")]
    done = subprocess.run(
        [*command, str(folder), "--steps=30", *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, torch.load(folder / "final.pt")


@pytest.mark.full
def test_torchrun_starts_again_from_the_checkpoint(tmp_path):
    (tmp_path / "quiet").mkdir()
    (tmp_path / "loud").mkdir()
    _, wanted = torchrun(tmp_path / "quiet")
    told, found = torchrun(tmp_path / "loud", "--die=0.0", "--once")
    assert "rank 0 goes on at step" in told
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.full
def test_the_other_rank_ends_with_an_error(tmp_path):
    told = faults.disturb(tmp_path, 10_000, 0.05)
    assert "OutOfStepError" in told
    assert "could not exchange gradients with the others in step" in told
    assert torch.load(tmp_path / "checkpoint.pt")["clipper"]["step"] > 0  # and is whole
