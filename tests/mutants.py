"""Broken variants of the core, each of which the default tests must catch.

    python tests/mutants.py            all of them, some minutes each at most
    python tests/mutants.py 3 7        these

A mutant is one changed place in a copy of the sources. It is caught if a test of the default run
fails. What survives is printed, and is a gap in the default run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests/unit", "tests/conformance", "tests/ranks", "tests/integrations")

MUTANTS = {
    "MinNorm takes the mean norm": (
        "        return minimum(norms)\n\n\n@dataclass(frozen=True)\nclass Mean",
        "        return norms.nanmean()\n\n\n@dataclass(frozen=True)\nclass Mean",
    ),
    "streams ignore the sizes of micro-batches": (
        "return sizes * self._factors(norms)",
        "return self._factors(norms) + 0 * sizes",
    ),
    "streams forget the reference": (
        "return share / self._reference if self.scale == 1",
        "return share if self.scale == 1",
    ),
    "coefficients are normalized by the weights": (
        "return shares / self.divisor()",
        "return shares / shares.sum()",
    ),
    "reduction sum divides by the examples": (
        "size = min(self.policy.microbatch_size or largest, examples)",
        "size = examples",
    ),
    "domains are mixed": (
        "    if labels is None:\n        return [(None, range(size))]",
        "    if labels is None or size:\n        return [(None, range(size))]",
    ),
    "rows that cancel out are believed": (
        "squares.masked_fill_(squares < CANCELLED * own, torch.nan)",
        "squares.masked_fill_(squares < 0 * own, torch.nan)",
    ),
    "half of the pairs of long sequences are missing": (
        "both.sum((1, 2)) + of_second + squares",
        "both.sum((1, 2)) + squares",
    ),
    "tokens that occur twice are counted apart": (
        "not (ordered[1:] == ordered[:-1]).any()",
        "not (ordered[1:] == ordered[:-1]).all()",
    ),
    "the second pass draws other dropout masks": (
        "        visit.random_state.restore()\n",
        "",
    ),
    "snapshots restore nothing": (
        "        for restore in self._restores:\n            restore()\n",
        "",
    ),
    "half precision is added up in half precision": (
        "return torch.float32 if tensor.dtype in HALF else tensor.dtype",
        "return tensor.dtype",
    ),
    "skipped gradients are not blanked": (
        "gradient.masked_fill_(~norm.isfinite(), 0.0)",
        "gradient.mul_(1.0)",
    ),
    "the result replaces .grad": (
        "(torch._foreach_add_, held, added)",
        "(torch._foreach_copy_, held, added)",
    ),
    "checks of single passes never fail": (
        "if error > allowed and",
        "if error > 1e30 * allowed and",
    ),
    "selected rows keep the owners of the first ones": (
        "return index(tracker, func, (x, [None] * dim + [numbers.reshape(-1)]), {}, result)",
        "return tracker.state(x)",
    ),
    "ranks know only their own norms": (
        "AllMicrobatches(norms, all_sizes, keys if",
        "AllMicrobatches(0 * norms + norms[mine].min(), all_sizes, keys if",
    ),
}


def main(chosen: list[str]) -> int:
    numbers = [int(number) for number in chosen] or range(1, len(MUTANTS) + 1)
    survivors = []
    for number in numbers:
        name = list(MUTANTS)[number - 1]
        caught = is_caught(*MUTANTS[name])
        print(f"{number:2} {'caught  ' if caught else 'SURVIVED'} {name} {caught}", flush=True)
        survivors += [] if caught else [name]
    print(f"{len(numbers) - len(survivors)} of {len(numbers)} caught")
    return len(survivors)


def is_caught(old: str, new: str) -> str:
    """Return the first test that fails, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "src")
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        places = [path for path in copy.rglob("*.py") if old in path.read_text()]
        if len(places) != 1 or places[0].read_text().count(old) != 1:
            raise ValueError(f"{old!r} is in {len(places)} files; a mutant changes one place.")
        places[0].write_text(places[0].read_text().replace(old, new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "auto", "--dist", "loadgroup"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *FOLDERS],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(copy), "MICROCLIP_C": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return (failed or ["?"])[0][:120] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
