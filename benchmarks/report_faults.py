"""Kill processes that write report pages with SIGKILL at random moments: a page is never half done.

    python benchmarks/report_faults.py --times 60

Each process writes pages about two runs to the same file by turns, as fast as it can. It dies at a
random moment, or before a random one of its operations on files. After every kill the file must be
one of the two pages, byte by byte, and after the first it must not be missing; the runs that the
pages are about must not have changed. What is left of unfinished pages is counted. Leave the code
alone meanwhile: another version writes another page.
"""

# ruff: noqa: E402 (the tests' support modules are not installed)
from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]
from microclip.report import write_report

import report_runs

FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}  # names of audit events


def pages(folder: Path) -> list[list[Path]]:
    """Return the runs of each page; they are written if they are not there yet."""
    if not folder.exists():
        report_runs.described(folder / "one")
        report_runs.sweep(folder / "several")
    return [[folder / "one"], sorted((folder / "several").iterdir())]


def write(folder: Path, output: Path, operations: int) -> None:
    """Write pages until killed; by its own hand before so many operations on files."""
    left = operations

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if operations and event in FILES and "page" in str(arguments[0]):
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    print("ready", flush=True)
    while True:
        for runs in pages(folder):
            write_report(runs, output)


def digest(folder: Path) -> str:
    """Return a digest of all files in a folder."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(str(path).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def kill_one(folder: Path, output: Path, chance: random.Random) -> None:
    """Start a process that writes, and wait until it is dead."""
    operations = chance.choice([0, chance.randint(1, 12)])
    process = subprocess.Popen(
        [sys.executable, __file__, "--write", str(folder), str(output), str(operations)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    if not operations:
        time.sleep(chance.uniform(0, 4))
        process.kill()
    _, errors = process.communicate(timeout=120)
    assert ready, errors
    assert process.returncode == -signal.SIGKILL, errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=60, help="how often to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name) / "runs", Path(name) / "out" / "page.html"
        output.parent.mkdir()
        whole = []
        for runs in pages(folder):
            write_report(runs, output)
            whole.append(output.read_bytes())
        before, seen = digest(folder), [0, 0]
        for turn in range(given.times):
            kill_one(folder, output, chance)
            found = output.read_bytes()
            if found not in whole:
                raise SystemExit(f"Kill {turn + 1} left a page of {len(found)} bytes, not whole.")
            seen[whole.index(found)] += 1
            if digest(folder) != before:
                raise SystemExit(f"Kill {turn + 1} changed a run.")
        rest = [path.name for path in output.parent.iterdir() if path != output]
        write_report(pages(folder)[0], output)
        after = [path.name for path in output.parent.iterdir() if path != output]
    print(f"{given.times} kills: the page was the one {seen[0]} times, the other {seen[1]} times,")
    print(f"never half a page; {len(rest)} unfinished files were left, {len(after)} after the next")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
