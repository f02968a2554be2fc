"""Kill `microclip sweep` with SIGKILL at random moments, again and again, and start it again.

    python benchmarks/sweep_faults.py --times 40
    python benchmarks/sweep_faults.py --times 40 --race --workers 2

The sweep is of a recipe that takes milliseconds, so that moments fall into all of its parts: the
job queue, trainings and their checkpoints, the tables. With several workers all of them die at
once, as when a machine loses power. A sweep that comes to its end is compared with one that nobody
disturbed: tables and records must be the same, byte by byte. Then the next one starts.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "lab" / "tests" / "support" / "sweep_recipe.py"
SWEEP = [
    *("--microbatch-sizes", "none", "2", "4", "--learning-rates", "0.03", "0.1", "--growth", "0"),
    *("--tuning-seeds", "1", "--seeds", "5"),
]
RACE = ["--race", "--microbatch-sizes", "1", "2", "4"]
SLOWEST = 120.0  # seconds after which a process counts as stuck


def start(out: Path, options: list[str]) -> subprocess.Popen[str]:
    """Start a sweep, or resume it."""
    return subprocess.Popen(
        [sys.executable, "-m", "microclip", "sweep", str(RECIPE), *options, "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def disturb(out: Path, options: list[str], seconds: float) -> bool:
    """Kill a sweep and its workers after so many seconds; whether it was still running."""
    process = start(out, options)
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    assert process.returncode == 0, errors
    return False


def results(out: Path) -> dict[str, str]:
    """Return the tables of a sweep, and its records for programs."""
    found = sorted([*out.glob("*.json"), *out.glob("*.md")])
    assert found, f"{out} has no tables."
    return {path.name: path.read_text() for path in found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=40, help="how often to kill")
    parser.add_argument("--race", action="store_true", help="a race, and not a sweep")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args()
    options = [*(RACE if given.race else SWEEP), "--workers", str(given.workers)]
    moments = random.Random(given.seed)
    kills = compared = different = killed = 0
    with tempfile.TemporaryDirectory() as name:
        quiet = Path(name) / "quiet"
        begin = time.monotonic()
        if disturb(quiet, options, SLOWEST):
            raise SystemExit(f"The sweep was not over after {SLOWEST:g} seconds.")
        longest = time.monotonic() - begin
        expected = results(quiet)
        out = Path(name) / "loud"
        while kills < given.times or killed:
            last = kills >= given.times  # let it end
            seconds = SLOWEST if last else moments.uniform(0, longest)
            if disturb(out, options, seconds):
                if last:
                    raise SystemExit(f"A sweep was stuck after {killed} kills.")
                kills, killed = kills + 1, killed + 1
                continue
            found = results(out)
            same = found == expected
            compared, different = compared + bool(killed), different + (not same)
            print(f"{kills:>3} kills: ended after {killed} of them, the same: {same}", flush=True)
            if not same:
                names = [n for n in expected if found.get(n) != expected[n]]
                print(f"     {', '.join(names) or sorted(found)} differ", flush=True)
            shutil.rmtree(out)
            killed = 0
    print(f"{kills} kills, {compared} sweeps resumed to their end, {different} differ")
    raise SystemExit(1 if different or not compared else 0)


if __name__ == "__main__":
    main()
