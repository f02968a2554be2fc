"""The job queue that workers share: which jobs are done, running or free.

Every job is a trial of an Optuna study. A worker claims a job by changing its state from waiting to
running, which only one worker can do. Of several trials of one job, the first that has not failed
counts, so it does no harm if two workers add the same job at once. If a worker dies, its trial
fails and the job is free again: at once if it was on this machine, otherwise after a timeout. What
a job is about is not known here.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import optuna
import psutil  # type: ignore[import-untyped]
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from microclip_lab.jobs.plan import QueueItem, QueueState, Result
from microclip_lab.jobs.storage import BEAT


@dataclass(frozen=True)
class WorkerId:
    """A process, identified by machine, process id and start time, since ids are reused."""

    machine: str
    process: int
    began: float

    @classmethod
    def here(cls) -> WorkerId:
        """Return the id of this process."""
        return cls(_machine(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> WorkerId:
        """Return the id that `to_json` wrote."""
        return cls(**said)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @property
    def is_gone(self) -> bool:
        """Whether its process has certainly ended; unknown for other machines."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.process)
            ended: bool = process.status() == psutil.STATUS_ZOMBIE
            return ended or abs(float(process.create_time()) - self.began) > 1
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:  # pragma: no cover (another user's process, so it exists)
            return False


def _machine() -> str:
    """Return an id of this machine, boot and container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    inside = Path("/proc/self/ns/pid")
    return " ".join(
        (
            platform.node(),
            boot.read_text().strip() if boot.exists() else f"{psutil.boot_time():.0f}",
            os.readlink(inside) if inside.exists() else "",
        )
    ).strip()


# for Optuna's own tools; 0 stands for plain training
PARAMETERS: dict[str, BaseDistribution] = {
    "microbatch_size": IntDistribution(0, 2**31),
    "learning_rate": FloatDistribution(1e-300, 1e300, log=True),
    "value": FloatDistribution(1e-300, 1e300, log=True),  # of what a job's arm tunes
    "seed": IntDistribution(0, 2**53),
}
JOB, WORKER = "job", "worker"
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
FOLDER, METRICS, REASON, ERROR = "folder", "metrics", "reason", "error"


J = TypeVar("J", bound=QueueItem)
R = TypeVar("R")


class LostClaimError(RuntimeError):
    """The job was given to another worker, because this one seemed dead."""


@dataclass(frozen=True)
class Claim(Generic[J]):
    """A job that this worker has claimed, until it reports how it ended."""

    trial_id: int
    job: J


class JobQueue(Generic[J]):
    """The jobs of a study, as one worker sees them.

    Args:
        study: The Optuna study whose trials are the jobs.
        storage: Its storage.
        read: Restores a job from what its `to_json` returned.
        is_kept: Whether the result of a finished job still exists; if results are stored elsewhere
            and were lost, the job is free again.
    """

    def __init__(
        self,
        study: optuna.Study,
        storage: RDBStorage,
        read: Callable[[Mapping[str, Any]], J],
        is_kept: Callable[[J], bool] = lambda job: True,
    ) -> None:
        self.study, self.storage = study, storage
        self._read, self._is_kept = read, is_kept
        self.here = WorkerId.here()
        self._study_id = storage.get_study_id_from_name(study.study_name)
        # jobs that failed before this worker started are tried again; later failures are not
        self._news_from = len(self._trials())

    def state(self) -> QueueState[J, Result]:
        """Return the current state of all jobs."""
        trials = self._trials()
        first = self._first(trials)
        finished: dict[J, Result] = {}
        for job, trial in first.items():
            if trial.state in DONE:
                said = trial.user_attrs
                finished[job] = Result(
                    folder=said[FOLDER],
                    metrics=said[METRICS],
                    curve=dict(sorted(trial.intermediate_values.items())),
                    hopeless=said[REASON] if trial.state == TrialState.PRUNED else None,
                )
        return QueueState(
            finished=finished,
            running={
                job: trial.last_step or 0
                for job, trial in first.items()
                if trial.state == TrialState.RUNNING
            },
            broken={
                job: trial.user_attrs[ERROR]
                for trial in trials[self._news_from :]
                if trial.state == TrialState.FAIL
                and ERROR in trial.user_attrs
                and (job := self._job(trial)) not in first
            },
        )

    def release_abandoned(self) -> None:
        """Free the jobs of dead workers."""
        for trial in self._trials(TrialState.RUNNING):
            said = trial.user_attrs.get(WORKER)
            if said is not None and WorkerId.from_json(said).is_gone:
                self._fail(self._id(trial), REASON, "its worker is gone")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)

    def claim(self, jobs: Sequence[J]) -> Claim[J] | None:
        """Claim the first free one of these jobs; None if other workers have all of them."""
        first = self._first(self._trials())
        for job in jobs:
            if job not in first:
                self._write_down(job)
                first = self._first(self._trials())
            trial = first.get(job)  # it may have been cancelled meanwhile
            if trial is not None and trial.state == TrialState.WAITING and self._take(trial):
                return Claim(self._id(trial), job)
        return None

    @contextmanager
    def heartbeat(self, claim: Claim[J]) -> Iterator[None]:
        """Send heartbeats while the block runs."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT):
                self.storage.record_heartbeat(claim.trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def note(self, claim: Claim[J], step: int, value: float) -> None:
        """Record the validation figure after a step."""
        try:
            self.storage.set_trial_intermediate_value(claim.trial_id, step, value)
        except UpdateFinishedTrialError as error:
            raise LostClaimError(f"{claim.job} was given to another worker.") from error

    def complete(self, claim: Claim[J], result: Result, value: float) -> None:
        """Record the result of a job, unless it was given to another worker meanwhile."""
        state = TrialState.COMPLETE if result.hopeless is None else TrialState.PRUNED
        try:
            for step, figure in result.curve.items():
                self.storage.set_trial_intermediate_value(claim.trial_id, step, figure)
            self.storage.set_trial_user_attr(claim.trial_id, FOLDER, result.folder)
            self.storage.set_trial_user_attr(claim.trial_id, METRICS, dict(result.metrics))
            if result.hopeless is not None:
                self.storage.set_trial_user_attr(claim.trial_id, REASON, result.hopeless)
            worst = math.inf if self.study.direction.name == "MINIMIZE" else -math.inf
            values = [worst if math.isnan(value) else value]  # Optuna accepts no NaN
            self.storage.set_trial_state_values(claim.trial_id, state, values)
        except UpdateFinishedTrialError as error:
            raise LostClaimError(f"{claim.job} was given to another worker.") from error

    def release(self, claim: Claim[J], reason: str) -> None:
        """Free a job that was interrupted."""
        self._fail(claim.trial_id, REASON, reason)

    def fail(self, claim: Claim[J], error: str) -> None:
        """Record that a job ended in an error."""
        self._fail(claim.trial_id, ERROR, error)

    def close(self) -> None:
        """Cancel waiting jobs that are no longer needed."""
        for trial in self._trials(TrialState.WAITING):
            self._fail(self._id(trial), REASON, "it is not needed")

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _write_down(self, job: J) -> None:
        parameters = dict(job.parameters)
        trial = optuna.create_trial(
            state=TrialState.WAITING,
            params=parameters,
            distributions={name: PARAMETERS[name] for name in parameters},
            user_attrs={JOB: job.to_json(), **job.labels},
        )
        self.study.add_trial(trial)

    def _take(self, trial: FrozenTrial) -> bool:
        trial_id = self._id(trial)
        # heartbeat first: a trial without any would never time out
        self.storage.record_heartbeat(trial_id)
        try:
            if not self.storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                return False
            self.storage.set_trial_user_attr(trial_id, WORKER, self.here.to_json())
        except UpdateFinishedTrialError:
            return False
        return True

    def _fail(self, trial_id: int, key: str, said: str) -> None:
        try:
            self.storage.set_trial_user_attr(trial_id, key, said)
            self.storage.set_trial_state_values(trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            pass  # another worker was first

    def _id(self, trial: FrozenTrial) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)

    def _first(self, trials: Sequence[FrozenTrial]) -> dict[J, FrozenTrial]:
        """Return the trial that counts for each job; `trials` are in the order of their numbers."""
        found: dict[J, FrozenTrial] = {}
        for trial in trials:
            if trial.state == TrialState.FAIL:
                continue
            job = self._job(trial)
            if job not in found and (trial.state not in DONE or self._is_kept(job)):
                found[job] = trial
        return found

    def _job(self, trial: FrozenTrial) -> J:
        return self._read(trial.user_attrs[JOB])
