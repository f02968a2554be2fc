"""Kill a process that writes a ledger, again and again, at random moments: what is left is whole.

    python benchmarks/ledger_faults.py --times 50

The process records steps as fast as it can, flushes often, and makes checkpoints. It dies of
SIGKILL after a random number of steps, or before a random one of its operations on files: while it
starts, while it takes back what was recorded after the checkpoint, or in the middle of a flush.
Each time, every file must be whole, nothing that was flushed may be missing, no row may be there
twice, and no step between others may be missing; nor may rows of an earlier attempt stand behind
those of a later one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from microclip import Ledger, Outcome
from microclip.ledger import open_ledger

MICROBATCHES, SIZE = 3, 2
CHECKPOINT_EVERY, FLUSH_EVERY = 25, 7


def outcome_of(step: int, attempt: int) -> Outcome:
    """Return a step that can be told from all others, and when it was recorded."""
    norms = torch.arange(1, MICROBATCHES + 1) + float(step)
    examples = torch.arange(MICROBATCHES * SIZE) + step * 100
    return Outcome(
        step=step,
        loss=torch.tensor(float(attempt)),
        losses=torch.full((MICROBATCHES,), float(attempt)),
        example_losses=torch.full((MICROBATCHES * SIZE,), float(attempt)),
        norms=norms,
        weights=norms.min() / norms,
        bounds=norms.min().expand(MICROBATCHES),
        sizes=torch.full((MICROBATCHES,), SIZE),
        skipped=torch.zeros(MICROBATCHES, dtype=torch.bool),
        domains=(None,) * MICROBATCHES,
        ids=tuple(tuple(row) for row in examples.view(MICROBATCHES, SIZE).tolist()),
        engine="none",
    )


def die_at(operation: int, folder: Path) -> None:
    """Kill this process before so many-th time that it opens, renames or removes a file there."""
    left = operation

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        touches = event in ("open", "os.rename", "os.remove") and str(folder) in str(args[0])
        left -= touches
        if touches and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def work(folder: Path, start: int, attempt: int, operation: int | None, parent: Connection) -> None:
    """Record steps from a checkpoint on, for ever, telling the parent what was flushed."""
    torch.set_num_threads(1)
    if operation is not None:
        die_at(operation, folder / "ledger")
    checkpoint = folder / "checkpoint"
    parent.send(-1)
    ledger = Ledger(folder / "ledger", flush_every=FLUSH_EVERY)
    flushed = -1
    for step in count(start):
        ledger.record(outcome_of(step, attempt))
        if step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            ledger.flush()
            flushed = step
            checkpoint.with_suffix(".new").write_text(str(step + 1))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
        parent.send(flushed)


def kill_once(
    folder: Path, start: int, attempt: int, messages: int | None, operation: int | None
) -> int:
    """Start the worker and let it die, after so many messages or before so many-th operation.

    Return the last step that is known to have been flushed.
    """
    context = multiprocessing.get_context("forkserver")  # torch is imported once, not every time
    context.set_forkserver_preload(["torch", "microclip.ledger"])
    here, there = context.Pipe(duplex=False)
    worker = context.Process(
        target=work, args=(folder, start, attempt, operation, there), daemon=True
    )
    worker.start()
    there.close()
    told = [here.recv() for _ in range(messages or 0)]
    if messages is not None:
        worker.kill()
    told += _rest(here)
    worker.join()
    assert worker.exitcode == -9, f"the worker ended by itself, with {worker.exitcode}"
    return max(told, default=-1)


def _rest(connection: Connection) -> Iterator[int]:
    """Yield what was said before the end; the last message may be cut short."""
    try:
        while True:
            yield connection.recv()
    except (EOFError, OSError):
        return


def check(ledger: Path, flushed: int) -> int:
    """Look at every file and every row; return the last step that is there, -1 if none."""
    found: dict[str, list[Any]] = {}
    for table in ("microbatches", "examples"):
        columns = ["step", "rank", "microbatch"] + (["id"] if table == "examples" else ["ids"])
        files = sorted((ledger / table).glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
        keys = [tuple(map(str, row.values())) for row in rows]
        assert len(keys) == len(set(keys)), f"a row of {table} is there twice"
        found[table] = rows
    if not found["microbatches"]:
        assert flushed == -1, f"all is lost, though step {flushed} was flushed"
        return -1
    record = open_ledger(ledger)
    last = record.steps.stop - 1
    assert last >= flushed, f"step {flushed} was flushed, but step {last} is the last one there"
    microbatches = [row for batch in record.microbatches() for row in batch.to_pylist()]
    assert [(row["step"], row["microbatch"]) for row in microbatches] == [
        (step, place) for step in range(last + 1) for place in range(MICROBATCHES)
    ], "a step is missing, or not whole"
    for row in microbatches:
        start = 100 * row["step"] + row["microbatch"] * SIZE
        assert row["ids"] == [start, start + 1]
        assert row["norm"] == row["step"] + row["microbatch"] + 1
    attempts = [row["loss"] for row in microbatches]
    assert attempts == sorted(attempts), "rows of an earlier attempt stand behind a later one's"
    examples = [row for batch in record.examples() for row in batch.to_pylist()]
    expected = [(row["step"], i, row["loss"]) for row in microbatches for i in row["ids"]]
    there = [(row["step"], row["id"], row["loss"]) for row in examples]
    assert there == expected, "an example's loss is missing, or another one's"
    return last


def read_checkpoint(folder: Path) -> int:
    """Return the step that training would resume from."""
    checkpoint = folder / "checkpoint"
    return int(checkpoint.read_text()) if checkpoint.exists() else 0


def torment(folder: Path, times: int, seed: int = 0) -> Iterator[str]:
    """Kill so many times, checking each time; yield a line about each."""
    moments = random.Random(seed)
    last = -1
    for attempt in range(times):
        messages = operation = None
        if attempt % 2:
            operation = moments.randrange(1, 40)
        else:
            messages = moments.randrange(1, 120)
        # what was flushed from there on may be taken back, rightly: often in the middle of a file
        start = max(0, read_checkpoint(folder) - moments.choice([0, 3, 12, 40]))
        (folder / "checkpoint").write_text(str(start))  # there is no way to a later one from here
        flushed = max(start - 1, kill_once(folder, start, attempt, messages, operation))
        unfinished = list((folder / "ledger").glob("*/.*.tmp"))
        last = check(folder / "ledger", flushed)
        moment = f"after message {messages}" if messages else f"before operation {operation}"
        more = ", with a file half written" if unfinished else ""
        yield f"{attempt + 1:>3}: from {start}, died {moment}{more}; steps 0 to {last} are whole"
    assert last > 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50, help="how often to kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for line in torment(Path(name), options.times, options.seed):
            print(line, flush=True)


if __name__ == "__main__":
    main()
