"""Doing one run of the reproduction, from its job to its record.

Knows how arms change a recipe and its training; which runs there are, and who does them, is the
business of other rooms.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from microclip.files import write_whole
from microclip.report.runs import read_run
from microclip.rules import Rule
from microclip_lab.reproduction.arms import Arm
from microclip_lab.reproduction.gradient_snapshots import look
from microclip_lab.reproduction.jobs import Job
from microclip_lab.reproduction.machine import machine_class, versions
from microclip_lab.reproduction.records import Record, Records
from microclip_lab.reproduction.replay import Replay
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import INSIDE, Task
from microclip_lab.training.checkpoints import WEIGHTS, Checkpoints
from microclip_lab.training.config import DivergedError, Training
from microclip_lab.training.recipe import Recipe
from microclip_lab.training.run_logger import FACTS, settings
from microclip_lab.training.train import Finished, Watch, train

COURSE = {"bound": "microclip/bound", "gradient_norm": "gradient_norm"}
SHARE = "microclip/weight_share/"


@dataclass(frozen=True)
class Order:
    """A job in the terms of the training program."""

    task: Task
    arm: Arm
    job: Job
    recipe: Recipe[Any, Any]
    training: Training
    rule: Rule | None  # one that has no name


def order_of(study: Study, job: Job, records: Records) -> Order:
    """Return what is to be trained, and how, given the runs that it builds on."""
    task = study.task(job.task)
    arm = task.arm(job.arm)
    rate = study.rate(task, arm, job.value, records)
    if rate is None:
        raise ValueError(f"{job.id} has no learning rate: the runs that it builds on are missing.")
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
    return Order(
        task, arm, job, replace(recipe, **of_recipe), replace(task.training, **changes), rule
    )


def carry_out(order: Order, folder: Path, watch: Watch | None = None) -> Record:
    """Train, looking inside on the way if the arm wants that; go on if it was begun before.

    Args:
        order: What is to be done.
        folder: Of the run; it is of no use any more when the record is written.
        watch: Hears of every look at the validation data.
    """
    began = time.monotonic()
    training = replace(order.training, out=folder, resume=True)
    moments: tuple[Mapping[str, Any], ...] = ()
    diverged, finished = "", None
    try:
        if order.arm.looks_inside and order.job.stage == "evaluation":
            moments = _along_the_way(order, training, watch)
        finished = train(order.recipe, training, watch=watch, rule=order.rule)
    except DivergedError as error:
        # where the folder was is nobody's business, and another place no difference
        diverged = str(error).replace(str(folder), "its folder")
    return _record(order, training, finished, diverged, moments, time.monotonic() - began)


def _along_the_way(
    order: Order, training: Training, watch: Watch | None
) -> tuple[Mapping[str, Any], ...]:
    """Train up to each moment and look at gradients; what was seen survives a break."""
    assert training.out is not None
    assert training.evaluate_every is not None
    seen = training.out / "moments.json"
    # None where there was too little to see: it has its place, so that no step is mistaken
    found: list[Mapping[str, Any] | None] = (
        json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else []
    )
    data = order.recipe.load(training.seed)
    for number in INSIDE[len(found) :]:
        step = number * training.evaluate_every
        train(order.recipe, training, until=step, watch=watch, rule=order.rule)
        checkpoint = Checkpoints(training.out).last()
        assert checkpoint is not None
        moment = look(order.recipe, data, checkpoint, step, training.seed)
        found.append(None if moment is None else moment.to_json())
        write_whole(seen, json.dumps(found).encode())
    return tuple(moment for moment in found if moment is not None)


def _record(
    order: Order,
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
        job=order.job,
        settings=settings_of(order),
        metrics={} if finished is None else dict(finished.metrics),
        curve=dict(run.metrics.get(f"validation_{order.recipe.headline}", {})),
        best_step=None if finished is None else finished.best_step,
        weights="" if finished is None else fingerprint(training.out),
        diverged=diverged,
        moments=moments,
        course=_course(run.metrics) if order.arm.keeps_course else {},
        domain_weights=_domain_weights(run.metrics, facts) if training.by_domain else {},
        facts=facts,
        made={**versions(), **machine_class(), "seconds": round(seconds, 1)},
    )


def settings_of(order: Order) -> dict[str, Any]:
    """Return everything that a run is done with, but for what nothing depends on."""
    return {
        "recipe": order.recipe.name,
        **settings(order.recipe, order.training),
        "microbatch_size": order.training.microbatch_size,
        "seed": order.training.seed,
    }


def fingerprint(run: Path) -> str:
    """Return the SHA-256 of a run's last weights: names, kinds and numbers."""
    from safetensors.torch import load_file

    last = Checkpoints(run).last()
    assert last is not None, "a finished run has a checkpoint"
    digest = hashlib.sha256()
    for name, weight in sorted(load_file(last / WEIGHTS).items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


def tidy_up(folder: Path) -> None:
    """Throw a run's folder away, after its record is written."""
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
    """Return what an example of each domain weighed on average; 1 is the average example."""
    sizes: Mapping[str, int] = facts["training examples by domain"]
    steps = len(metrics["loss"])
    return {
        domain: sum(metrics.get(SHARE + domain, {}).values()) / steps / (size / sum(sizes.values()))
        for domain, size in sizes.items()
    }
