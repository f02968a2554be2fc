"""Plain steps in a process of their own, which has not heard of microclip.

Single passes ask the process's allocator to hold on to freed memory, and plain steps of the same
process gain by that as well. These here are what training costs without anything of ours.

    python benchmarks/untouched.py gpt 32      two steps for each line that comes in

Of the two the second is timed, so that changing from one process to the other costs nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

import torch

from models import TASKS


class Untouched:
    """Runs plain steps of a task elsewhere, one at a time."""

    def __init__(self, task: str, batch_size: int) -> None:
        program = [sys.executable, __file__, task, str(batch_size)]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> float:
        """Run a step, and return how long it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The other process ended with {self._process.wait()}.")
        return float(answer)

    def __enter__(self) -> Untouched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()  # closes its input, at which it ends


def main(name: str, batch_size: int) -> None:
    torch.manual_seed(0)
    task = TASKS[name](batch_size)
    for _ in sys.stdin:
        for _ in range(2):
            start = time.perf_counter()
            task.model.zero_grad()
            task.losses(task.batch).mean().backward()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
