"""Worker processes on this machine: the same command, started several times.

An environment variable tells each process that it is a worker. When the parent process ends, for
whatever reason, the workers write a checkpoint and exit.
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
STOP_TIMEOUT = 60  # seconds for a worker to write its checkpoint
TAIL = 2000  # characters of a log to show


@dataclass(frozen=True)
class WorkerProcess:
    """A worker process and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def failure(self) -> str | None:
        """The end of its log, if it failed."""
        if self.is_running or self.process.returncode == 0:
            return None
        said = self.log.read_text(encoding="utf-8", errors="replace").strip()[-TAIL:]
        return f"{self.log} (exit code {self.process.returncode}): {said or 'no output'}"


@contextmanager
def start_workers(
    command: Sequence[str], count: int, logs: Path, threads: int | None = None
) -> Iterator[list[WorkerProcess]]:
    """Start workers, and stop them at the end of the block.

    Args:
        command: The command that starts a worker.
        count: How many workers.
        logs: A folder for their output.
        threads: Threads for each; default: OMP_NUM_THREADS, or its share of the cores.
    """
    if not command:
        raise SettingError(
            f"{count} workers were requested, but no command to start them: pass `command`, or "
            "use one worker."
        )
    logs.mkdir(parents=True, exist_ok=True)
    processes: list[WorkerProcess] = []
    try:
        for number in range(count):
            log = logs / f"worker-{number + 1}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # closed when this process ends: see exit_with_parent
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=_environment(number, count, threads),
                    # only this process gets Ctrl-C, and stops the others
                    start_new_session=True,
                )
            processes.append(WorkerProcess(process, log))
        yield processes
    finally:
        _stop(processes)


def is_worker() -> bool:
    """Return whether this process was started by `start_workers`."""
    return os.environ.get(IS_WORKER) == "1"


def exit_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends."""

    def listen() -> None:
        # not sys.stdin: a thread that holds its lock would abort the exiting process
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
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # pragma: no cover (macOS and Windows)


def _stop(processes: Sequence[WorkerProcess]) -> None:
    for worker in processes:
        if worker.is_running:
            worker.process.terminate()
    for worker in processes:
        try:
            worker.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        if worker.process.stdin is not None:
            worker.process.stdin.close()
