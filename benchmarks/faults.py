"""Kill one of two ranks in the middle of training, again and again, at random moments.

    python benchmarks/faults.py --times 20

Each time the other rank must end with an error within the time-out, and both are started again
from the last checkpoint. At the end the weights must be those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "rank_train.py"
TIMEOUT = 20.0


def start(folder: Path, steps: int, *more: str) -> list[subprocess.Popen[str]]:
    """Start two ranks that train, or go on training."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, str(SCRIPT), str(folder), f"--steps={steps}", f"--timeout={TIMEOUT}"]
    path = os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [*command, *more],
            env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def disturb(folder: Path, steps: int, seconds: float) -> str:
    """Start two ranks, let one die, and return how the other took it; "" if both were done."""
    first, second = start(folder, steps, f"--die={seconds}")
    second.communicate()
    died = time.monotonic()
    _, errors = first.communicate(timeout=3 * TIMEOUT)
    waited = time.monotonic() - died
    if second.returncode == 0:
        return ""
    assert second.returncode == -9, f"the second rank ended with {second.returncode}"
    assert first.returncode > 0, f"the first rank ended with {first.returncode}"
    assert waited < TIMEOUT + 5, f"the first rank waited for {waited:.1f} s"
    last = errors.strip().splitlines()[-1]
    assert "OutOfStepError" in errors, last
    return f"ended {waited:.1f} s later: {last[:120]}"


def weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Let a run come to its end, and return its weights."""
    for process in start(folder, steps):
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return torch.load(folder / "final.pt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20, help="how often to kill a rank")
    parser.add_argument("--steps", type=int, default=4000, help="of the whole run")
    options = parser.parse_args()
    moments = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        quiet, loud = Path(name) / "quiet", Path(name) / "loud"
        quiet.mkdir()
        loud.mkdir()
        for turn in range(options.times):
            told = disturb(loud, options.steps, moments.uniform(0, 0.5))
            if not told:
                raise SystemExit("The run was over before it could be disturbed: more --steps.")
            step = torch.load(loud / "checkpoint.pt")["clipper"]["step"]
            print(f"{turn + 1:>3}: killed near step {step}; the other rank {told}", flush=True)
        disturbed, undisturbed = weights(loud, options.steps), weights(quiet, options.steps)
    same = all(torch.equal(disturbed[key], undisturbed[key]) for key in undisturbed)
    print(f"weights after {options.steps} steps equal an undisturbed run's, bit for bit: {same}")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
