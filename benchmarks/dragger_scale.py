"""Scoring a very long run: memory and time by the number of rows, with the real ledger.

    python benchmarks/dragger_scale.py --rows 10000000

Writes a ledger of micro-batches of 4 examples with norms and one loss per example, then scores it
and checks it with the guard, each in a process of its own, whose peak memory is what is printed.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

B, MICROBATCHES = 4, 64  # examples in a micro-batch, micro-batches in a step


def write(folder: Path, rows: int, examples: int, losses: bool) -> None:
    from microclip import Ledger, Outcome

    draw = torch.Generator().manual_seed(0)
    size = B * MICROBATCHES
    ones = torch.ones(MICROBATCHES, dtype=torch.float64)
    with Ledger(folder) as ledger:
        for step in range(rows // MICROBATCHES):
            place = step % (examples // size) * size
            if not place:  # another epoch, another order
                order = torch.randperm(examples, generator=draw)
            ids = order[place : place + size].view(MICROBATCHES, B)
            drags = (ids % 10 == 0).double()
            norms = torch.exp(drags.sum(1) + torch.randn(MICROBATCHES, generator=draw)).double()
            each = drags.flatten() + torch.rand(size, generator=draw)
            ledger.record(
                Outcome(
                    step=step,
                    loss=each.mean(),
                    losses=each.view(MICROBATCHES, B).mean(1),
                    example_losses=each if losses else None,
                    norms=norms,
                    weights=norms.min() / norms,
                    bounds=norms.min() * ones,
                    sizes=B * ones.long(),
                    skipped=ones < 0,
                    domains=(None,) * MICROBATCHES,
                    ids=tuple(map(tuple, ids.tolist())),
                    engine="stream",
                ),
                rank=0,
            )


def score(folder: Path, method: str) -> None:
    from microclip import draggers

    found = draggers.score(folder, method)
    first = [one % 10 == 0 for one in found.ids(fraction=0.1)]
    print(f"{found!r}: {sum(first) / len(first):.3f} of the first tenth are draggers", end="")


def check(folder: Path, _: str) -> None:
    from microclip import guard

    found = guard.check(folder, lambda one: "x" if one % 2 else "y")
    print(f"guard: {found}", end="")


def apart(what: str, folder: Path, *more: str) -> None:
    """Do something in a process of its own, and say what it took."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--apart", what, "--folder", str(folder), *more]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(f"{what} {' '.join(more)}: {told} ({time.monotonic() - start:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--examples", type=int, default=1_000_000, help="different ones")
    parser.add_argument("--means", action="store_true", help="no loss per example")
    parser.add_argument("--folder", type=Path, help="keep the ledger, or use the one that is there")
    parser.add_argument("--apart", help=argparse.SUPPRESS)
    parser.add_argument("--method", default="auto", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.apart:
        torch.set_num_threads(1)
        if options.apart == "write":
            write(options.folder, options.rows, options.examples, not options.means)
        else:
            {"score": score, "check": check}[options.apart](options.folder, options.method)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"; peak memory {peak:.2f} GiB", end="")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "ledger"
        if not folder.exists():
            means = ["--means"] if options.means else []
            size = [f"--rows={options.rows}", f"--examples={options.examples}"]
            apart("write", folder, *size, *means)
        for method in ("group", "refined", "loss", "combined"):
            apart("score", folder, "--method", method)
        apart("check", folder)


if __name__ == "__main__":
    main()
