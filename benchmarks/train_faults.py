"""Kill `microclip train` with SIGKILL at random moments, again and again, and let it go on.

    python benchmarks/train_faults.py --times 20
    python benchmarks/train_faults.py --times 20 -- speech --steps 200 --checkpoint-every 9

At the end the weights must be those of a run that nobody disturbed, bit for bit, and the ledger
must hold every step once.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import microclip

# "auto" goes by the clock: two runs need not come to the same engine
RUN = ["vision", "--steps", "400", "--checkpoint-every", "7", "--engine", "fused", "--no-page"]
LONGEST = 4.0  # seconds of training before a kill


def start(out: Path, run: list[str]) -> subprocess.Popen[str]:
    """Start a run, or resume it."""
    return subprocess.Popen(
        [sys.executable, "-m", "microclip", "train", *run, "--out", str(out), "--resume"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(out: Path, run: list[str]) -> dict[str, torch.Tensor]:
    """Let a run come to its end; return its weights."""
    process = start(out, run)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return weights(out)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's last checkpoint."""
    last = max((out / "checkpoints").glob("step-*"))
    return load_file(last / "model.safetensors")


def disturb(out: Path, run: list[str], seconds: float) -> bool:
    """Kill a run so long after its first metrics of this start; whether it was still running."""
    told = out / "metrics.jsonl"
    before = told.stat().st_size if told.exists() else 0
    process = start(out, run)
    while process.poll() is None and (not told.exists() or told.stat().st_size <= before):
        time.sleep(0.01)
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    assert process.returncode == 0, errors
    return False


def last_step(out: Path) -> int:
    """Return the step of the last checkpoint, 0 if there is none."""
    found = sorted((out / "checkpoints").glob("step-*"))
    return int(found[-1].name.partition("-")[2]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20, help="how often to kill the run")
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds before a kill")
    parser.add_argument("run", nargs="*", default=RUN, help="what comes after `microclip train`")
    options = parser.parse_args()
    moments = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        quiet, loud = Path(name) / "quiet", Path(name) / "loud"
        for turn in range(options.times):
            if not disturb(loud, options.run, moments.uniform(0, options.longest)):
                raise SystemExit("The run was over before it could be disturbed: more --steps.")
            print(f"{turn + 1:>3}: killed, the last checkpoint is of step {last_step(loud)}")
            sys.stdout.flush()
        disturbed, undisturbed = finish(loud, options.run), finish(quiet, options.run)
        records = [microclip.ledger.open_ledger(path / "ledger") for path in (loud, quiet)]
        rows = [(record.rows, record.steps) for record in records]
    same = all(torch.equal(disturbed[key], undisturbed[key]) for key in undisturbed)
    print(f"weights after {rows[1][1].stop} steps equal an undisturbed run's, bit for bit: {same}")
    print(f"rows of the ledger: {rows[0][0]}, undisturbed {rows[1][0]}")
    raise SystemExit(0 if same and rows[0] == rows[1] else 1)


if __name__ == "__main__":
    main()
