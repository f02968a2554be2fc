"""One run of one arm on one task: training, checkpoints, errors, and a look at the gradients."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import time

import torch
from torch import nn

from microclip_lab.dirty_data.task import Data, Part, Task, is_better, outputs_of
from microclip_lab.dirty_data.training import Engine, Setup, train
from microclip_lab.evidence.arms import ARMS, PLAIN
from microclip_lab.evidence.records import LAST, Record
from microclip_lab.evidence.snapshots import snapshot
from microclip_lab.tuned_arms.records import Stage

LOOKED_AT = 8  # seeds whose gradients are looked at


@functools.lru_cache(maxsize=12)
def data_of(task: Task, seed: int) -> Data:
    """Return the data of a seed, made once for all arms."""
    return task.make_data(seed)


def error_of(task: Task, metric: float) -> float:
    """Return the error in points: 100 - accuracy, a word error rate, an error of regression x 100.

    Metrics are higher when better; errors are what relative effects are relative to.
    """
    if not math.isfinite(metric):
        return math.inf
    return 100 - metric if task.kind == "classification" else -metric


class Checkpoints:
    """Follows the metrics of both kinds of validation data and keeps the best weights of each."""

    def __init__(self, task: Task, data: Data) -> None:
        self.task, self.parts = task, {"noisy": data.validation, "clean": data.clean_validation}
        self.curves: dict[str, list[float]] = {"noisy": [], "clean": []}
        self.best: dict[str, tuple[float, nn.Module]] = {}

    def look(self, model: nn.Module) -> None:
        """Measure, and keep the model where it is the best so far."""
        kept: nn.Module | None = None
        for name, part in self.parts.items():
            if part is None:
                continue
            value = self.task.validate(outputs_of(model, part.inputs), part.targets)
            self.curves[name].append(value)
            if is_better(value, self.best[name][0] if name in self.best else math.nan):
                kept = copy.deepcopy(model) if kept is None else kept
                self.best[name] = (value, kept)


def run(
    task: Task,
    arm: str,
    seed: int,
    rate: float,
    stage: Stage = "evaluate",
    engine: Engine = "auto",
) -> Record:
    """Train once and return the record; the engine decides on nothing but the last bits."""
    made = ARMS[arm]
    if made.weight_decay is not None:
        task = dataclasses.replace(task, weight_decay=made.weight_decay)
    data = data_of(task, seed)
    setup = Setup(task, data, task.model(seed), seed, rate, rate, engine=engine)
    tested = stage == "evaluate"
    looked_at = tested and seed < LOOKED_AT
    checkpoints = Checkpoints(task, data)
    notes: dict[str, float] = {}
    moments = {1: "first", max(2, task.epochs // 4): "early"} if arm == PLAIN else {}

    def after_epoch(epoch: int) -> None:
        checkpoints.look(setup.evaluated or setup.model)
        if looked_at and epoch in moments:
            notes.update({f"{moments[epoch]}/{k}": v for k, v in snapshot(setup).items()})

    began = time.process_time()  # unlike a clock, it does not count other processes
    train(setup, made.start, after_epoch)
    model = setup.evaluated or setup.model
    test: dict[str, float] = {}
    if tested:
        test[LAST] = _error(task, model, data.test)
        for name, (_, best) in checkpoints.best.items():
            test[f"best_{name}"] = _error(task, best, data.test)
        test.update(_by_domain(task, data, model))
        notes.update(memorized(task, data, model))
    if looked_at:
        notes.update({f"end/{k}": v for k, v in snapshot(setup).items()})
    return Record(
        task=task.name,
        arm=arm,
        stage=stage,
        rate=rate,
        seed=seed,
        edition=f"{task.edition}.{made.edition}",
        noisy=checkpoints.curves["noisy"],
        clean=checkpoints.curves["clean"],
        test=test,
        notes=notes,
        weights=checksum_of(model),
        seconds=round(time.process_time() - began, 3),
    )


def _error(task: Task, model: nn.Module, part: Part) -> float:
    return error_of(task, task.test(outputs_of(model, part.inputs), part.targets))


def _by_domain(task: Task, data: Data, model: nn.Module) -> dict[str, float]:
    """Return the error on the test data of every domain."""
    if data.test_domains is None:
        return {}
    found = {}
    for domain in sorted(set(data.test_domains.tolist())):
        rows = data.test_domains == domain
        part = Part(data.test.inputs[rows], data.test.targets[rows])
        found[f"{LAST}/{domain}"] = _error(task, model, part)
    return found


def memorized(task: Task, data: Data, model: nn.Module) -> dict[str, float]:
    """Return the error on the given targets of the training data, draggers and others apart."""
    found = {}
    for name, rows in (("dragger_error", data.wrong), ("benign_error", ~data.wrong)):
        if rows.any():
            part = Part(data.training.inputs[rows], data.training.targets[rows])
            found[name] = _error(task, model, part)
    return found


def checksum_of(model: nn.Module) -> str:
    """Return a checksum of all weights, to compare a repeated run by."""
    found = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(weight.detach().contiguous().to(torch.float32).numpy().tobytes())
    return found.hexdigest()[:16]
