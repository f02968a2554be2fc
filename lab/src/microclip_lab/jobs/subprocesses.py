"""Several workers on this machine: the same command, started again as often as asked for.

Each process hears from its environment that it is one of them. When the first process is gone,
however it ended, they end as well, with a checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from microclip_lab.training.config import SettingError

IS_WORKER = "MICROCLIP_SWEEP_WORKER"
FAREWELL = 60  # seconds that a worker has to write its checkpoint
TAIL = 2000  # characters of a log that are shown


@dataclass(frozen=True)
class Hand:
    """A process that works for this one."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def works(self) -> bool:
        """Whether it is still there."""
        return self.process.poll() is None

    @property
    def complaint(self) -> str | None:
        """What it said before it ended badly, if it did."""
        if self.works or self.process.returncode == 0:
            return None
        said = self.log.read_text(encoding="utf-8", errors="replace").strip()[-TAIL:]
        return f"{self.log} (exit code {self.process.returncode}): {said or 'nothing was said'}"


@contextmanager
def fleet(
    again: Sequence[str], count: int, logs: Path, threads: int | None = None
) -> Iterator[list[Hand]]:
    """Start so many workers; when the block is left, none of them is.

    Args:
        again: The command that starts one.
        count: How many.
        logs: A folder for what they say.
        threads: That each may use; unless given, what the environment says, or its share of cores.
    """
    if not again:
        raise SettingError(
            f"{count} workers are asked for, but not by which command they are started: give "
            "`again`, or ask for one worker."
        )
    logs.mkdir(parents=True, exist_ok=True)
    hands: list[Hand] = []
    try:
        for number in range(count):
            log = logs / f"worker-{number + 1}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    again,
                    stdin=subprocess.PIPE,  # it ends with this process: see leave_with_parent
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=_environment(number, count, threads),
                    # Ctrl-C comes to this process alone, which then tells the others
                    start_new_session=True,
                )
            hands.append(Hand(process, log))
        yield hands
    finally:
        _dismiss(hands)


def is_worker() -> bool:
    """Say whether this process was started by `fleet`."""
    return os.environ.get(IS_WORKER) == "1"


def leave_with_parent() -> None:
    """End this process as SIGTERM would when the one that started it is gone."""

    def listen() -> None:
        # not through sys.stdin: its lock, held by a thread, would abort a process that ends
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()


def _environment(number: int, count: int, threads: int | None) -> Mapping[str, str]:
    environment = {**os.environ, IS_WORKER: "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    devices = _accelerators()
    if len(devices) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
    return environment


def _accelerators() -> list[str]:
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        return [device for device in said.split(",") if device]
    import torch

    return [str(place) for place in range(torch.cuda.device_count())]


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # pragma: no cover (macOS and Windows)


def _dismiss(hands: Sequence[Hand]) -> None:
    for hand in hands:
        if hand.works:
            hand.process.terminate()
    for hand in hands:
        try:
            hand.process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            hand.process.kill()
            hand.process.wait()
        if hand.process.stdin is not None:
            hand.process.stdin.close()
