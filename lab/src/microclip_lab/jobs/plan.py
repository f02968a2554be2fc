"""Jobs, their results, and plans: which jobs come next, given the finished ones.

Pure data: knows nothing of queues, workers or how a job is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from microclip_lab.jobs.progress import Status

Stage = Literal["tuning", "evaluation", "race"]


@dataclass(frozen=True)
class Cell:
    """A setting to compare: a rule at a micro-batch size."""

    rule: str
    microbatch_size: int | None  # None: plain training, which ignores the rule

    @property
    def is_plain(self) -> bool:
        """Whether this is plain training, the baseline."""
        return self.microbatch_size is None

    @property
    def name(self) -> str:
        """Its name in tables; the paper's rule is not mentioned.

        >>> PLAIN.name, Cell("MinNorm", 4).name, Cell("Unit", 4).name
        ('plain', 'b = 4', 'Unit, b = 4')
        """
        if self.is_plain:
            return "plain"
        rule = "" if self.rule == PLAIN.rule else f"{self.rule}, "
        return f"{rule}b = {self.microbatch_size}"

    @property
    def slug(self) -> str:
        """Its name in folder names.

        >>> Cell("Quantile(0.2)", 4).slug, PLAIN.slug
        ('Quantile-0.2-b4', 'plain')
        """
        if self.is_plain:
            return "plain"
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', self.rule).strip('-')}-b{self.microbatch_size}"


PLAIN = Cell("MinNorm", None)


@dataclass(frozen=True)
class Job:
    """A training run; equal jobs are the same run."""

    stage: Stage
    cell: Cell
    learning_rate: float
    seed: int
    until: int | None = None  # the step at which a race pauses; None: the last one

    @property
    def folder(self) -> str:
        """Its folder below the sweep's; the laps of a race share one."""
        return f"{self.stage}/{self.cell.slug}-lr{self.learning_rate!r}-seed{self.seed}"

    @property
    def parameters(self) -> dict[str, int | float]:
        """Its numbers, for Optuna; 0 stands for plain training."""
        return {
            "microbatch_size": self.cell.microbatch_size or 0,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
        }

    @property
    def labels(self) -> dict[str, str]:
        """Its other attributes, for Optuna."""
        return {"rule": self.cell.rule}

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Job:
        """Return the job that `to_json` wrote."""
        return cls(**{**said, "cell": Cell(**said["cell"])})

    def __str__(self) -> str:
        goal = "" if self.until is None else f", to step {self.until}"
        return (
            f"{self.stage} of {self.cell.name}, rate {self.learning_rate:g}, seed {self.seed}{goal}"
        )


@dataclass(frozen=True)
class Result:
    """The result of a job."""

    folder: str  # below the sweep's folder
    metrics: Mapping[str, float]  # validation_*, best_validation_*; at the end also (best_)test_*
    curve: Mapping[int, float]  # the validation headline by step
    hopeless: str | None = None  # why it was stopped early


def cells(
    rules: tuple[str, ...], sizes: tuple[int, ...], of_examples: Callable[[str], bool]
) -> tuple[Cell, ...]:
    """Return plain training, then every rule at every size.

    Rules for which `of_examples` is true have b = 1 only, because they weight single examples.
    """
    found = [
        Cell(rule, b)
        for rule in dict.fromkeys(rules)
        for b in ((1,) if of_examples(rule) else sizes)
    ]
    return PLAIN, *found


class QueueItem(Hashable, Protocol):
    """What a queue can hold; equal items are the same job."""

    @property
    def parameters(self) -> Mapping[str, int | float]:
        """Its numbers, by the names of `job_queue.PARAMETERS`."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Its other attributes."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""


J = TypeVar("J", bound=QueueItem)
R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)


@dataclass(frozen=True)
class QueueState(Generic[J, R]):
    """The state of all jobs at some moment."""

    finished: Mapping[J, R]  # with their results
    running: Mapping[J, int]  # with the last step reported
    broken: Mapping[J, str]  # failed since this worker started, with the error


class Plan(Protocol[J, R_contra]):
    """A plan of any kind of jobs."""

    def missing(self, finished: Mapping[J, R_contra]) -> list[J]:
        """Return the jobs to run next; empty when all are done."""

    def expected(self, finished: Mapping[J, R_contra]) -> list[J]:
        """Return all jobs that are known so far."""

    def work(self, job: J) -> float:
        """Return the amount of work of a job."""

    def work_done(self, job: J, step: int) -> float:
        """Return how much of it is done after this many steps."""


class Sweep(Plan[Job, Result], Protocol):
    """The plan of a sweep (`Grid`) or of a race (`Race`)."""

    @property
    def headline(self) -> str:
        """The recipe's name of the figure to select by."""

    @property
    def steps(self) -> int:
        """Steps of one run."""


def status(plan: Plan[J, R], state: QueueState[J, R]) -> Status:
    """Return the progress of a plan; running jobs count by the steps they have taken."""
    finished, running = state.finished, state.running
    jobs = plan.expected(finished)
    done = [job for job in jobs if job in finished]
    work_done = sum(plan.work(job) for job in done)
    for job in jobs:
        if job in running and job not in finished:
            work_done += plan.work_done(job, running[job])
    return Status(len(done), len(jobs), work_done, sum(plan.work(job) for job in jobs))
