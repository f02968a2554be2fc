"""Running one job of the reproduction, from its spec to its record, and the worker that does so.

Knows how arms change a recipe and its training. Which runs there are is defined in `study`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microclip.files import write_whole
from microclip.report.runs import read_run
from microclip.rules import Rule
from microclip_lab.jobs.job_queue import Claim, JobQueue
from microclip_lab.jobs.plan import QueueState, Result, status
from microclip_lab.jobs.progress import Status
from microclip_lab.jobs.worker_loop import wait_for_lock, work
from microclip_lab.reproduction.gradient_snapshots import take_snapshot
from microclip_lab.reproduction.records import (
    Job,
    Record,
    Records,
    RecordStore,
    machine_class,
    versions,
    write,
)
from microclip_lab.reproduction.study import Study, score
from microclip_lab.reproduction.tasks import SNAPSHOTS_AT, Arm, Task
from microclip_lab.training.checkpoints import WEIGHTS, Checkpoints
from microclip_lab.training.config import DivergedError, Training
from microclip_lab.training.recipe import Recipe
from microclip_lab.training.run_logger import FACTS, settings
from microclip_lab.training.train import Finished, Watch, train


class Replay(Rule):
    """A control: rescale the whole gradient to the norm of another run's step.

    If clipping only changed step lengths, this would do as well. It needs one micro-batch per step,
    b = B. The first step gets the first length; checkpoints know which one is next. Zero gradients,
    which have no direction, stay zero.

    >>> rule = Replay([0.5, 2.0])
    >>> rule.weights(torch.tensor([4.0]), torch.tensor([32.0]))
    tensor([0.1250])
    >>> rule.observe(torch.tensor([4.0]), torch.tensor([32.0]))  # the step is finished
    >>> rule.weights(torch.tensor([4.0]), torch.tensor([32.0]))
    tensor([0.5000])

    Args:
        lengths: One per step.
    """

    def __init__(self, lengths: Sequence[float]) -> None:
        self.lengths = tuple(float(length) for length in lengths)
        for step, length in enumerate(self.lengths, start=1):
            if not math.isfinite(length) or length < 0:
                raise ValueError(
                    "Gradient lengths must be finite and 0 or more, but that of step "
                    f"{step} of {len(self.lengths)} is {length}. Replay a run that did not diverge."
                )
        self.step = 0  # finished steps
        self._judged = False  # whether this step's gradient has its weight

    def __repr__(self) -> str:
        return f"Replay({len(self.lengths)} lengths)"

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return length/norm."""
        length = self._length(norms)
        self._judged = True
        return length / norms

    def factor(self, norms: Tensor) -> Tensor:
        """Return 1/norm."""
        return 1 / norms

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the length, whatever the norm."""
        return torch.full_like(norms[0], self._length(norms))

    def observe(self, norms: Tensor, sizes: Tensor) -> None:
        """Advance to the next length."""
        if not self._judged:  # a second domain of the same step
            raise ValueError(
                "Replay rescales the whole gradient of a step, but the mini-batch has several "
                "domains. Train without by_domain, that is without domains=."
            )
        self._judged = False
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        if set(state) != {"step"}:
            raise ValueError(
                f"Replay's state has the entry 'step', but the checkpoint holds {sorted(state)}."
            )
        self.step = int(state["step"])
        self._judged = False

    def _length(self, norms: Tensor) -> float:
        if len(norms) != 1:
            raise ValueError(
                f"Replay rescales the whole gradient of a step, but got {len(norms)} "
                "micro-batches. Set microbatch_size to the batch size, without chunk_size."
            )
        if self.step >= len(self.lengths):
            raise ValueError(
                f"Replay has the lengths of {len(self.lengths)} steps, but this is step "
                f"{self.step + 1}. Train for no more steps than the replayed run."
            )
        return self.lengths[self.step]


COURSE = {"bound": "microclip/bound", "gradient_norm": "gradient_norm"}
SHARE = "microclip/weight_share/"


@dataclass(frozen=True)
class RunSpec:
    """A job, translated for the training loop."""

    task: Task
    arm: Arm
    job: Job
    recipe: Recipe[Any, Any]
    training: Training
    rule: Rule | None  # a rule object without a name


def spec_of(study: Study, job: Job, records: Records) -> RunSpec:
    """Return what to train and how, given the runs it builds on."""
    task = study.task(job.task)
    arm = task.arm(job.arm)
    rate = study.rate(task, arm, job.value, records)
    if rate is None:
        raise ValueError(f"{job.id} has no learning rate: the runs it builds on are missing.")
    changes: dict[str, Any] = {**arm.training, "learning_rate": rate, "seed": job.seed}
    if arm.tuned == "max_grad_norm":
        changes["max_grad_norm"] = job.value
    elif arm.tuned == "bound":
        changes["rule"] = f"Fixed({job.value!r})"
    source = study.source(task, arm, job.seed, records)
    of_recipe = dict(arm.recipe)
    rule: Rule | None = None
    if arm.replays is not None:
        assert source is not None
        rule = Replay(source.course[arm.replays])
        changes["rule"] = f"{arm.replays} of {source.id}"
    if arm.shares_of is not None:
        assert source is not None
        of_recipe["domain_weights"] = tuple(source.domain_weights.values())
    if arm.keeps_course:
        changes["log_every"] = 1
    recipe: Any = task.recipe
    return RunSpec(
        task, arm, job, replace(recipe, **of_recipe), replace(task.training, **changes), rule
    )


def run_job(spec: RunSpec, folder: Path, watch: Watch | None = None) -> Record:
    """Train or resume, with gradient snapshots if the arm takes them, and return the record.

    Args:
        spec: What to do.
        folder: The folder of the run; not needed after the record is written.
        watch: Called after every evaluation on validation data.
    """
    began = time.monotonic()
    training = replace(spec.training, out=folder, resume=True)
    moments: tuple[Mapping[str, Any], ...] = ()
    diverged, finished = "", None
    try:
        if spec.arm.takes_snapshots and spec.job.stage == "evaluation":
            moments = _train_with_snapshots(spec, training, watch)
        finished = train(spec.recipe, training, watch=watch, rule=spec.rule)
    except DivergedError as error:
        # records must not depend on where the folder was
        diverged = str(error).replace(str(folder), "its folder")
    return _record(spec, training, finished, diverged, moments, time.monotonic() - began)


def _train_with_snapshots(
    spec: RunSpec, training: Training, watch: Watch | None
) -> tuple[Mapping[str, Any], ...]:
    """Train to each snapshot and take it; snapshots survive an interruption."""
    assert training.out is not None
    assert training.evaluate_every is not None
    seen = training.out / "moments.json"
    # None where there were too few examples, so that indices stay right
    found: list[Mapping[str, Any] | None] = (
        json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else []
    )
    data = spec.recipe.load(training.seed)
    for number in SNAPSHOTS_AT[len(found) :]:
        step = number * training.evaluate_every
        train(spec.recipe, training, until=step, watch=watch, rule=spec.rule)
        checkpoint = Checkpoints(training.out).last()
        assert checkpoint is not None
        moment = take_snapshot(spec.recipe, data, checkpoint, step, training.seed)
        found.append(None if moment is None else moment.to_json())
        write_whole(seen, json.dumps(found).encode())
    return tuple(moment for moment in found if moment is not None)


def _record(
    spec: RunSpec,
    training: Training,
    finished: Finished | None,
    diverged: str,
    moments: tuple[Mapping[str, Any], ...],
    seconds: float,
) -> Record:
    assert training.out is not None
    run = read_run(training.out)
    facts = json.loads((training.out / FACTS).read_text(encoding="utf-8"))
    return Record(
        job=spec.job,
        settings=settings_of(spec),
        metrics={} if finished is None else dict(finished.metrics),
        curve=dict(run.metrics.get(f"validation_{spec.recipe.headline}", {})),
        best_step=None if finished is None else finished.best_step,
        weights="" if finished is None else fingerprint(training.out),
        diverged=diverged,
        moments=moments,
        course=_course(run.metrics) if spec.arm.keeps_course else {},
        domain_weights=_domain_weights(run.metrics, facts) if training.by_domain else {},
        facts=facts,
        made={**versions(), **machine_class(), "seconds": round(seconds, 1)},
    )


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Return all settings that the results of a run depend on."""
    return {
        "recipe": spec.recipe.name,
        **settings(spec.recipe, spec.training),
        "microbatch_size": spec.training.microbatch_size,
        "seed": spec.training.seed,
    }


def fingerprint(run: Path) -> str:
    """Return the SHA-256 of a run's last weights: names, dtypes, shapes and values."""
    from safetensors.torch import load_file

    last = Checkpoints(run).last()
    assert last is not None, "a finished run has a checkpoint"
    digest = hashlib.sha256()
    for name, weight in sorted(load_file(last / WEIGHTS).items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


def tidy_up(folder: Path) -> None:
    """Delete a run's folder, after its record is written."""
    shutil.rmtree(folder, ignore_errors=True)


def _course(metrics: Mapping[str, Mapping[int, float]]) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(value for _, value in sorted(metrics[logged].items()))
        for name, logged in COURSE.items()
        if logged in metrics
    }


def _domain_weights(
    metrics: Mapping[str, Mapping[int, float]], facts: Mapping[str, Any]
) -> dict[str, float]:
    """Return the mean weight of an example of each domain; the overall average is 1."""
    sizes: Mapping[str, int] = facts["training examples by domain"]
    steps = len(metrics["loss"])
    return {
        domain: sum(metrics.get(SHARE + domain, {}).values()) / steps / (size / sum(sizes.values()))
        for domain, size in sizes.items()
    }


@dataclass(frozen=True)
class Worker:
    """Runs the jobs of a study. The record store is the truth; the queue only assigns jobs."""

    study: Study
    queue: JobQueue[Job]
    store: RecordStore
    runs: Path  # parent of temporary run folders
    report: Callable[[Status], None]

    def work(self) -> None:
        """Run jobs, together with other workers, until the plan is complete."""
        work(self.study, self.queue, self.look, self._do, self.report)

    def look(self) -> QueueState[Job, Record]:
        """Return the current state of all jobs."""
        state = self.queue.state()
        return QueueState(self.store.records(), state.running, state.broken)

    def _do(self, claim: Claim[Job], state: QueueState[Job, Record]) -> tuple[Result, float]:
        job = claim.job
        if self.store.has(job):  # another worker finished it meanwhile
            record = self.store.records()[job]
        else:
            record = self._run_job(claim, state)
            write(self.store.folder, record)
            tidy_up(self.runs / job.id)
        value = score(self.study.task(job.task), record)
        return Result(job.id, record.metrics, record.curve), value

    def _run_job(self, claim: Claim[Job], state: QueueState[Job, Record]) -> Record:
        job = claim.job
        spec = spec_of(self.study, job, state.finished)
        headline = f"validation_{spec.recipe.headline}"

        def watch(step: int, figures: dict[str, float]) -> None:
            self.queue.note(claim, step, figures[headline])
            # the jobs of others are updated when this one ends
            running = {**state.running, job: step}
            self.report(status(self.study, replace(state, running=running)))

        return wait_for_lock(lambda: run_job(spec, self.runs / job.id, watch))
