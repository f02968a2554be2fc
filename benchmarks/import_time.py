"""What `import microclip` adds to `import torch`, in fresh interpreters, interleaved."""

from __future__ import annotations

import statistics
import subprocess
import sys

ADDED = """
import time, torch
start = time.perf_counter()
import microclip
print(time.perf_counter() - start)
"""


def main() -> None:
    runs = [
        float(subprocess.run([sys.executable, "-c", ADDED], capture_output=True, check=True).stdout)
        for _ in range(9)
    ]
    low, middle, high = statistics.quantiles(runs, n=4)
    print(
        f"import microclip after import torch: {middle * 1e3:.1f} ms "
        f"(quartiles {low * 1e3:.1f}-{high * 1e3:.1f}, {len(runs)} fresh interpreters)"
    )


if __name__ == "__main__":
    main()
