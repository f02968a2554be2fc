"""Carrying the runs out: several processes side by side, each run kept as soon as it is finished.

What to do next is asked of `plan` whenever a run ends, so going on after an interruption is the
same as beginning.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import torch

from microclip.demo.cache import Cache
from microclip.demo.config import DemoConfig
from microclip.demo.plan import expected, missing
from microclip.demo.progress import Status
from microclip.demo.train import Result, Run, carry_out


def carry_out_all(
    config: DemoConfig, cache: Cache, report: Callable[[Status], None]
) -> dict[Run, Result]:
    """Do every run that is not in the cache; return all of them."""
    finished = cache.load()
    report(_status(config, finished))
    if not missing(config, finished):
        return finished
    with _pool(config.processes) as pool:
        under_way: dict[Future[Result], Run] = {}
        while True:
            with _interrupts_held_off():
                for run in missing(config, finished):
                    if run not in under_way.values():
                        under_way[pool.submit(carry_out, run)] = run
            if not under_way:
                return finished
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                run = under_way.pop(future)
                finished[run] = future.result()
                cache.add(run, finished[run])
                report(_status(config, finished))


def _status(config: DemoConfig, finished: dict[Run, Result]) -> Status:
    runs = expected(config, finished)
    done = [run for run in runs if run in finished]
    return Status(len(done), len(runs), sum(r.work for r in done), sum(r.work for r in runs))


@contextlib.contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of processes that is gone at once, not after its runs, if something happens."""
    others = multiprocessing.active_children()
    # spawn: a forked copy of a process that has used torch's threads may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare_worker)
    try:
        yield pool
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ChildProcessError(
                f"One of the {processes} training processes was killed, perhaps for want of "
                "memory. What was finished is kept; try again with --workers 1."
            ) from error
        raise
    finally:
        pool.shutdown()


@contextlib.contextmanager
def _interrupts_held_off() -> Iterator[None]:
    """Let processes that are started meanwhile not hear Ctrl-C: ending them is left to the pool.

    A terminal sends it to all of them, and each would print where it was interrupted. Blocked, not
    ignored: a Ctrl-C that comes just now reaches this process as soon as the block is left.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield  # not on this system; the processes will print more than they should
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker() -> None:
    torch.set_num_threads(1)  # the runs are what is done in parallel
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this process when the one that started it is gone, even if it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
