"""One run of one arm on one task, in memory: data, training, metrics after every epoch.

To try a variant of a rule quickly, pass a function instead of an arm's name:

    def variant(setup):
        rule = MyRule(total_steps=setup.steps)
        clipper = microclip.Clipper(setup.model, microbatch_size=1, rule=rule)
        return lambda rows, batch: clipper.backward(setup.losses, batch, ids=rows)

    record = run("digits-20", variant, seed=1000, rate=1e-3)

Development seeds are 1000 and up; those below 100 are for evaluation only.
"""

from __future__ import annotations

import functools
import math
import time

import torch

from microclip_lab.dirty_data.arms import ARMS
from microclip_lab.dirty_data.catalog import task_named
from microclip_lab.dirty_data.records import Record
from microclip_lab.dirty_data.task import Data, Task, is_better, outputs_of
from microclip_lab.dirty_data.training import Setup, Start, train


@functools.lru_cache(maxsize=16)
def data_of(task: Task, seed: int) -> Data:
    """Return the data of a seed, made once for all arms."""
    return task.make_data(seed)


def run(
    task: str | Task,
    arm: str | Start,
    seed: int,
    rate: float,
    *,
    plain_rate: float | None = None,
    tested: bool = True,
) -> Record:
    """Train once and return the record.

    Args:
        task: A task or its name.
        arm: An arm's name, or a function that gets a `Setup` and returns `backward(rows, batch)`.
        seed: Of data, network and batches.
        rate: The learning rate.
        plain_rate: The tuned rate of plain training, at which cross-validated networks are trained;
            default: `rate`.
        tested: Whether to use the test data. Tuning does not.
    """
    task = task_named(task) if isinstance(task, str) else task
    if isinstance(arm, str) and arm not in ARMS:
        raise ValueError(f"There is no arm {arm!r}. The arms are: {', '.join(ARMS)}.")
    name, start = (arm, ARMS[arm].start) if isinstance(arm, str) else ("variant", arm)
    data = data_of(task, seed)
    setup = Setup(task, data, task.model(seed), seed, rate, plain_rate or rate)
    validation: list[float] = []
    test: dict[int, float] = {}
    best = math.nan

    def evaluate(epoch: int) -> None:
        nonlocal best
        model = setup.evaluated or setup.model
        part = data.validation
        validation.append(task.validate(outputs_of(model, part.inputs), part.targets))
        is_best = is_better(validation[-1], best)
        best = validation[-1] if is_best else best
        if tested and (is_best or epoch % task.test_every == 0 or epoch == task.epochs):
            part = data.test
            test[epoch] = task.test(outputs_of(model, part.inputs), part.targets)

    began = time.process_time()  # unlike a clock, it does not count other processes
    train(setup, start, evaluate)
    model = setup.evaluated or setup.model
    return Record(
        task=task.name,
        arm=name,
        stage="evaluate" if tested else "tune",
        rate=rate,
        seed=seed,
        edition=f"{task.edition}.{ARMS[name].edition if name in ARMS else 0}",
        validation=validation,
        test=test,
        notes={**setup.notes, **_held(setup), **_memorized(task, data, model)},
        seconds=round(time.process_time() - began, 3),
    )


def _held(setup: Setup) -> dict[str, float]:
    """Return the share of wrong and of right examples held back at their last visit, in percent."""
    if setup.held is None:
        return {}
    wrong = setup.data.wrong
    parts = {"wrong_held": setup.held[wrong], "right_held": setup.held[~wrong]}
    return {name: round(100 * float(p.float().mean()), 2) for name, p in parts.items() if len(p)}


def _memorized(task: Task, data: Data, model: torch.nn.Module) -> dict[str, float]:
    """Return the accuracy in percent on the given training labels, wrong and right ones apart."""
    if task.kind != "classification":
        return {}
    part, found = data.training, {}
    for name, rows in (("wrong_fitted", data.wrong), ("right_fitted", ~data.wrong)):
        if rows.any():
            answers = outputs_of(model, part.inputs[rows]).argmax(1)
            found[name] = round(100 * float((answers == part.targets[rows]).float().mean()), 2)
    return found
