"""Flip single bits in every kind of file that a run leaves behind, then read it and resume the run.

    python benchmarks/bit_flips.py --times 200

A flip is noticed if a reader raises an error or notes it; it is harmless if the result is the same
as before (white space, or the key of a checksum). Anything else was accepted silently, and fails.
"""

# ruff: noqa: E402 (the tests' support modules are not installed)
from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "lab" / "tests" / "support"), str(ROOT / "tests" / "support")]
from microclip.ledger import open_ledger
from microclip.report.folder import RunFolder
from microclip.report.media import ByteBudget, LeftOutError
from microclip.report.run_data import read_examples
from microclip.report.runs import read_run
from microclip_lab.training.train import train

from tiny_recipe import Tiny, forget_accelerate, training, weights

RECIPE = Tiny(dropout=0.5)
STOP, STEPS = 12, 18


def new_run(path: Path) -> Any:
    """Train until it is stopped; return how to resume it."""
    how = training(out=path, steps=STEPS, checkpoint_every=6, engine="fused")
    train(RECIPE, how, until=STOP)
    forget_accelerate()
    folder = RunFolder(path / "described", microbatch_size=4)
    folder.log(1, loss=0.5)
    folder.log(2, loss=0.25)
    for row in range(6):
        folder.example(row, image=[[row, 255]], label="a", truth="b")
    return replace(how, resume=True)


def told(path: Path) -> tuple[Any, list[str]]:
    """Return what a page shows of a run without a ledger, and its notes."""
    run = read_run(path)
    ids = [str(row) for row in range(6)]
    examples = read_examples(path, ids, ids)
    notes = [*run.notes, *examples.notes]
    shown = []
    for content in examples.contents.values():
        try:
            shown.append(
                ByteBudget(10**6).embed(path, content.file or "", content.kind, content.checksum)
            )
        except LeftOutError as error:
            notes.append(str(error))
    return (run.metrics, run.microbatch_size, run.settings, examples.facts, shown), notes


def rows(path: Path) -> tuple[Any, list[str]]:
    """Return everything in a ledger."""
    record = open_ledger(path)
    found = [
        [row for batch in read() for row in batch.to_pylist()]
        for read in (record.microbatches, record.examples)
    ]
    return (found, record.manifest), []


def resumed(how: Any) -> tuple[Any, list[str]]:
    """Resume a copy of a run; return its weights at the end."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "run"
        shutil.copytree(how.out, copy)
        try:
            train(RECIPE, replace(how, out=copy))
        finally:
            forget_accelerate()
        return {key: value.tolist() for key, value in weights(copy).items()}, []


def files(how: Any) -> dict[str, tuple[Path, Callable[[], tuple[Any, list[str]]]]]:
    """Return a file of every kind, with what reads it."""
    run = how.out
    described, last = run / "described", run / "checkpoints" / f"step-{STOP:09d}"
    parts = {table: next((run / "ledger" / table).iterdir()) for table in TABLES}
    found: dict[str, Any] = {
        f"checkpoint, {path.name}": (path, lambda: resumed(how)) for path in sorted(last.iterdir())
    }
    for table, path in parts.items():
        found[f"ledger, {table}"] = path, lambda: rows(run / "ledger")
    found["ledger, ledger.json"] = run / "ledger" / "ledger.json", lambda: rows(run / "ledger")
    for name in ("run.json", "metrics.jsonl", "examples.jsonl", "examples/3.png"):
        found[f"report, {name}"] = described / name, lambda: told(described)
    return found


TABLES = ("microbatches", "examples")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=200, help="flips, over all kinds of files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    draw, silent = random.Random(0), 0
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = files(new_run(Path(name) / "run"))
        each = -(-options.times // len(kinds))
        print("| file | flips | noticed | harmless | silent |\n| --- | --- | --- | --- | --- |")
        for kind, (path, read) in kinds.items():
            whole, content = read()[0], path.read_bytes()
            seen: Counter[str] = Counter()
            for _ in range(each):
                bit = draw.randrange(8 * len(content))
                damaged = bytearray(content)
                damaged[bit // 8] ^= 1 << bit % 8
                path.write_bytes(damaged)
                seen[_judged(read, whole)] += 1
            path.write_bytes(content)
            silent += seen["silent"]
            counts = " | ".join(str(seen[verdict]) for verdict in ("noticed", "harmless", "silent"))
            print(f"| {kind} | {each} | {counts} |", flush=True)
    raise SystemExit(1 if silent else 0)


def _judged(read: Callable[[], tuple[Any, list[str]]], whole: Any) -> str:
    try:
        found, notes = read()
    except (ValueError, OSError):  # what the commands turn into a sentence
        return "noticed"
    if notes:
        return "noticed"
    return "harmless" if found == whole else "silent"


if __name__ == "__main__":
    main()
