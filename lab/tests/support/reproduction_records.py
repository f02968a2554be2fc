"""Made-up records of the reproduction, with figures that can be checked by hand."""

import math
from dataclasses import replace

import numpy as np

from microclip_lab.reproduction.records import Job, Record
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import SNAPSHOTS_AT, tasks

MADE = {
    "python": "3.13.0",
    "microclip": "0.1",
    "torch": "2.13.0",
    "transformers": "5.0",
    "accelerate": "1.0",
    "numpy": "2.0",
    "system": "Linux",
    "architecture": "x86_64",
    "processor": "Made-up Processor",
    "instructions": "AVX2",
    "seconds": 60.0,
}
DOMAINS = ("movie", "nyt", "tweets", "amazon")
DRAGS_LESS = {"b1": -0.04, "b2": 0.01, "b4": 0.02, "b8": 0.01, "b16": 0.005, "unit-b1": 0.02}


def plan(*names: str) -> Study:
    """Return the default plan, whose arms the claims refer to, or some of its tasks."""
    return Study(tuple(task for task in tasks() if not names or task.name in names))


def record(job: Job, metrics=None, curve=None, moments=(), diverged="", **more) -> Record:
    """Return a record with these figures and nothing else."""
    return Record(
        job=job,
        settings={},
        metrics=metrics or {},
        curve=curve or {},
        best_step=None if diverged else 1,
        weights="" if diverged else "0" * 64,
        diverged=diverged,
        moments=tuple(moments),
        made=dict(MADE),
        **more,
    )


def moment(step: int, loss: float, ratio: float, cosines=(0.0, 0.2, 0.05)) -> dict:
    """Return a snapshot in the format of records: c-hat, its inverse, and the three cosines."""
    dragger_benign, benign_benign, dragger_dragger = ([c, c - 0.01, c + 0.01] for c in cosines)
    return {
        "step": step,
        "draggers": 64,
        "benign": 128,
        "left_out": 0,
        "loss_draggers": 2 * loss,
        "loss_benign": loss,
        "dragger_benign": dragger_benign,
        "benign_benign": benign_benign,
        "dragger_dragger": dragger_dragger,
        "dragger_benign_spread": 0.1,
        "benign_benign_spread": 0.2,
        "dragger_dragger_spread": 0.1,
        "dragger_to_mean": [0.0, -0.02, 0.02],
        "benign_to_mean": [0.3, 0.28, 0.32],
        "dragger_over_benign": [ratio, 0.9 * ratio, 1.1 * ratio],
        "benign_over_dragger": [1 / ratio, 0.9 / ratio, 1.1 / ratio],
        "dragger_over_mean": [3 * ratio, 2.9 * ratio, 3.1 * ratio],
    }


def settled(study: Study, task: str, values: dict[str, list[dict]]) -> dict[Job, Record]:
    """Return records of a task in which each arm was tuned and then left these for its seeds.

    `values` has a list of arguments of `record` by arm, one for each evaluation seed.
    """
    found: dict[Job, Record] = {}
    known = study.task(task)
    wanted = set(values)
    while needed := {n for name in wanted for n in known.arm(name).needs} - wanted:
        wanted |= needed
    while True:
        jobs = [job for job in study.missing(found) if job.task == task and job.arm in wanted]
        jobs = [
            job
            for job in jobs
            if job.stage == "tuning" or job.seed - 200 < len(values.get(job.arm, ()))
        ]
        if not jobs:
            return found
        for job in jobs:
            if job.stage == "tuning":
                found[job] = record(job, {_validated(study, job): _tuned(study, job)})
            else:
                found[job] = record(job, **values[job.arm][job.seed - 200])


def everything(study: Study) -> dict[Job, Record]:
    """Return records for the whole plan."""
    found: dict[Job, Record] = {}
    while jobs := study.missing(found):
        for job in jobs:
            found[job] = _made_up(study, job)
    return found


def _validated(study: Study, job: Job) -> str:
    return f"best_validation_{study.task(job.task).recipe.headline}"


def _tuned(study: Study, job: Job) -> float:
    """Return a validation figure that is best for the second of the first values."""
    task = study.task(job.task)
    values = task.arm(job.arm).values or task.rates
    assert job.value is not None
    distance = abs(math.log(job.value / values[1]))
    return 0.1 + 0.05 * distance if task.recipe.lower_is_better else 0.9 - 0.05 * distance


def _made_up(study: Study, job: Job) -> Record:
    task = study.task(job.task)
    arm = task.arm(job.arm)
    draw = np.random.default_rng([*job.id.encode()])
    lower = task.recipe.lower_is_better
    worth = 0.85 + DRAGS_LESS.get(arm.name, 0.0) + 0.002 * draw.standard_normal()
    if job.stage == "tuning":
        worth = 1 - _tuned(study, job) if lower else _tuned(study, job)
    every = int(arm.training.get("evaluate_every") or task.training.evaluate_every)
    steps = int(arm.training.get("steps", task.training.steps))
    curve = {
        step: (1 - worth * (1 - math.exp(-4 * step / steps)))
        if lower
        else worth * (1 - math.exp(-4 * step / steps))
        for step in range(every, steps + 1, every)
    }
    figure = 1 - worth if lower else worth
    metrics = {f"best_validation_{task.recipe.headline}": figure}
    for prefix, change in (("validation_", -0.02), ("test_", -0.03), ("best_test_", -0.01)):
        value = figure + (-change if lower else change)
        metrics |= _figures(task.name, prefix, value)
    moments = []
    if arm.takes_snapshots and job.stage == "evaluation":
        b = int(arm.training.get("microbatch_size") or task.training.batch_size)
        for place, look in enumerate(SNAPSHOTS_AT):
            loss = 2.0 / (place + 1) + (0.2 if b == 1 else 0.0)
            ratio = 3 * b**-0.1 * math.exp(0.02 * draw.standard_normal())
            noise = 0.01 * draw.standard_normal()
            moments.append(moment(look * every, loss, ratio, (0.01 + noise, 0.2, 0.06)))
    course = {"bound": (1.0,) * steps, "gradient_norm": (1.0,) * steps} if arm.keeps_course else {}
    weights = dict.fromkeys(DOMAINS, 1.0) if arm.training.get("by_domain") else {}
    return replace(
        record(job, metrics, curve, moments, course=course, domain_weights=weights),
        best_step=steps - every,
    )


def _figures(task: str, prefix: str, value: float) -> dict[str, float]:
    if task == "speech":
        return {
            prefix + "wer": value,
            prefix + "cer": value / 2,
            prefix + "canary_wer": 5 * value,
            prefix + "unseen_canary_wer": 0.9,
        }
    if task in ("mixture", "movie"):
        domains = DOMAINS if task == "mixture" else DOMAINS[:1]
        return {prefix + "accuracy": value} | {
            f"{prefix}accuracy_{domain}": value - 0.01 * place
            for place, domain in enumerate(domains)
        }
    return {prefix + "accuracy": value, prefix + "top5_accuracy": (1 + value) / 2}
