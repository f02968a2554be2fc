"""`make test-gpu` and `benchmarks/gpu.py`: what they say without a GPU, and the file for us."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HAS_GPU = torch.accelerator.current_accelerator(check_available=True) is not None
without_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a GPU")


def run(*arguments, cwd=ROOT, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


@without_gpu
def test_tests_for_a_gpu_say_that_there_is_none():
    assert "python tests/support/gpu_tests.py\n" in (ROOT / "Makefile").read_text()
    found = run(ROOT / "tests/support/gpu_tests.py")
    assert found.returncode == 1
    assert found.stderr.startswith(f"torch {torch.__version__} finds no GPU (CUDA, MPS or XPU)")
    assert len(found.stderr.splitlines()) == 1


@without_gpu
def test_the_benchmark_says_that_there_is_none(tmp_path):
    found = run(ROOT / "benchmarks/gpu.py", cwd=tmp_path)
    assert found.returncode == 1
    assert found.stderr.startswith(f"torch {torch.__version__} finds no GPU")
    assert "Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_the_benchmark_writes_a_file_that_can_be_sent(tmp_path):
    output = tmp_path / "found.md"
    options = "--device", "cpu", "--quick", "--output", output
    found = run(ROOT / "benchmarks/gpu.py", *options, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    text = output.read_text()
    data = json.loads(text.split("```json\n")[1].split("```")[0])
    assert data["facts"]["torch"] == torch.__version__
    assert data["facts"]["kind"] == "cpu"
    figures = data["table"]["conv"]["figures"]
    engines = {"accumulate", "stream", "two_pass", "fused", "tight", "auto"}
    assert {each["name"] for each in figures if each["b"] == 1} >= engines
    assert all(each["time"] > 0 and each["memory"] > 0 for each in figures)
    assert data["table"]["conv"]["difference"] < 1e-5
    for private in (str(ROOT), str(Path.home()), str(tmp_path)):
        assert private not in text
