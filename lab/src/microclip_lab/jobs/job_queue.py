"""The register of a plan: which jobs are done, by whom, and which are free to be taken.

Every job is a trial of an Optuna study; what it is about is not known here. Who takes one changes
its state from waiting to running, which only one can do. Of several trials of one job the first
that has not failed counts, so it does no harm if two workers write the same job down at once. A
trial whose worker has gone fails, and its job is free again: at once, if the worker was on this
machine; else after some silence.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from microclip_lab.jobs.job import Result
from microclip_lab.jobs.storage import BEAT
from microclip_lab.jobs.worker_id import Workplace

# for whoever looks at the study with Optuna's own tools; 0 stands for plain training
PARAMETERS: dict[str, BaseDistribution] = {
    "microbatch_size": IntDistribution(0, 2**31),
    "learning_rate": FloatDistribution(1e-300, 1e300, log=True),
    "value": FloatDistribution(1e-300, 1e300, log=True),  # of whatever a job's arm is tuned by
    "seed": IntDistribution(0, 2**53),
}
JOB, WORKER = "job", "worker"
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
FOLDER, METRICS, REASON, ERROR = "folder", "metrics", "reason", "error"


class Listed(Hashable, Protocol):
    """What can be written into a register; two that are equal are the same job."""

    @property
    def parameters(self) -> Mapping[str, int | float]:
        """The numbers of it, by the names of `PARAMETERS`."""

    @property
    def labels(self) -> Mapping[str, str]:
        """What else there is to say of it."""

    def to_json(self) -> dict[str, Any]:
        """Return what it can be read back from."""


J = TypeVar("J", bound=Listed)
R = TypeVar("R")


class GoneError(RuntimeError):
    """A job was given to another worker, since nothing had been heard of this one."""


@dataclass(frozen=True)
class Standing(Generic[J, R]):
    """How the jobs of a study are at some moment."""

    finished: Mapping[J, R]  # with what came of them
    under_way: Mapping[J, int]  # what somebody does right now, with the last step known
    broken: Mapping[J, str]  # what ended in an error since this worker began, and what it said


@dataclass(frozen=True)
class Claim(Generic[J]):
    """A job that is this worker's own, until it says how it ended."""

    trial_id: int
    job: J


class Register(Generic[J]):
    """The jobs of a study, as one worker sees them.

    Args:
        study: What they are trials of.
        storage: Where that is kept.
        read: Gives a job back from what its `to_json` returned.
        is_kept: Says of a finished job whether what came of it is still there; where results are
            kept elsewhere, they may be lost, and the job is then free again.
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
        self.here = Workplace.here()
        self._study_id = storage.get_study_id_from_name(study.study_name)
        # what failed before this worker came is tried again; what fails meanwhile is not
        self._news_from = len(self._trials())

    def standing(self) -> Standing[J, Result]:
        """Return how things are."""
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
        return Standing(
            finished=finished,
            under_way={
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
        """Free the jobs whose workers have gone."""
        for trial in self._trials(TrialState.RUNNING):
            said = trial.user_attrs.get(WORKER)
            if said is not None and Workplace.from_json(said).is_gone:
                self._fail(self._id(trial), REASON, "its worker has gone")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)

    def claim(self, jobs: Sequence[J]) -> Claim[J] | None:
        """Take the first of these jobs that nobody has; None: others are at work on all of them."""
        first = self._first(self._trials())
        for job in jobs:
            if job not in first:
                self._write_down(job)
                first = self._first(self._trials())
            trial = first.get(job)  # somebody may have crossed it out at once
            if trial is not None and trial.state == TrialState.WAITING and self._take(trial):
                return Claim(self._id(trial), job)
        return None

    @contextmanager
    def beating(self, claim: Claim[J]) -> Iterator[None]:
        """Give signs of life while the block runs."""
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
        """Note the validation figure after a step."""
        try:
            self.storage.set_trial_intermediate_value(claim.trial_id, step, value)
        except UpdateFinishedTrialError as error:
            raise GoneError(f"{claim.job} was given to another worker.") from error

    def complete(self, claim: Claim[J], result: Result, value: float) -> None:
        """Keep what came of a job: for good, unless it was given to another worker meanwhile."""
        state = TrialState.COMPLETE if result.hopeless is None else TrialState.PRUNED
        try:
            for step, figure in result.curve.items():
                self.storage.set_trial_intermediate_value(claim.trial_id, step, figure)
            self.storage.set_trial_user_attr(claim.trial_id, FOLDER, result.folder)
            self.storage.set_trial_user_attr(claim.trial_id, METRICS, dict(result.metrics))
            if result.hopeless is not None:
                self.storage.set_trial_user_attr(claim.trial_id, REASON, result.hopeless)
            worst = math.inf if self.study.direction.name == "MINIMIZE" else -math.inf
            values = [worst if math.isnan(value) else value]  # Optuna takes no NaN
            self.storage.set_trial_state_values(claim.trial_id, state, values)
        except UpdateFinishedTrialError as error:
            raise GoneError(f"{claim.job} was given to another worker.") from error

    def give_back(self, claim: Claim[J], reason: str) -> None:
        """Free a job that could not be finished now."""
        self._fail(claim.trial_id, REASON, reason)

    def give_up(self, claim: Claim[J], error: str) -> None:
        """Say that a job ended in an error."""
        self._fail(claim.trial_id, ERROR, error)

    def close(self) -> None:
        """Cross out what was written down and is not needed any more."""
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
        # first a sign of life: of a trial without any, silence would never be noticed
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
            pass  # somebody else said so first

    def _id(self, trial: FrozenTrial) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)

    def _first(self, trials: Sequence[FrozenTrial]) -> dict[J, FrozenTrial]:
        """Return for each job the trial that counts, of all in the order of their numbers."""
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
