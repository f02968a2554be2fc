"""The arms of the benchmark: plain training, an oracle, our rules, and their rivals.

An arm is a name and a function that sets it up: given a `Setup`, it returns what to call on each
batch in place of `loss.backward()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import microclip
from microclip import rules
from microclip_lab.dirty_data import rivals
from microclip_lab.dirty_data.task import Kind, Purpose, Task
from microclip_lab.dirty_data.training import Backward, Batch, Setup, Start
from microclip_lab.tuned_arms.search import PLAIN

ORACLE = "oracle"
EVERY: tuple[Kind, ...] = ("classification", "regression", "language", "speech")
LABELS: tuple[Kind, ...] = ("classification",)


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Args:
        name: For the command line and records.
        title: For tables.
        start: Sets it up for a run.
        kinds: The kinds of task it can be used on.
        purposes: The purposes it is run for; without "clean" if it would be plain training there.
        only: The names of the only tasks it is run on; empty: all that fit.
        told: What it knows beyond the noisy data.
        edition: Increase it when the arm changes; older records no longer count.
    """

    name: str
    title: str
    start: Start
    kinds: tuple[Kind, ...] = EVERY
    purposes: tuple[Purpose, ...] = ("noisy", "clean", "failure")
    only: tuple[str, ...] = ()
    told: str = ""
    edition: int = 1

    def applies_to(self, task: Task) -> bool:
        """Return whether it is run on a task."""
        known = task.kind in self.kinds and task.purpose in self.purposes
        return known and (not self.only or task.name in self.only)


def plain(setup: Setup) -> Backward:
    """Train on the mean of the task's losses."""
    return rivals.mean_of(setup.task.losses, setup)


def oracle(setup: Setup) -> Backward:
    """Leave out the wrong examples."""
    return rivals.without(setup.data.wrong, setup)


def clipped(make_rule: Callable[[Setup], Any], microbatch_size: int, setup: Setup) -> Backward:
    """Train with one of the library's rules."""
    clipper = microclip.Clipper(
        setup.model,
        microbatch_size=microbatch_size,
        rule=make_rule(setup),
        engine=setup.engine,
    )

    def backward(rows: Tensor, batch: Batch) -> None:
        outcome = clipper.backward(setup.losses, batch, ids=rows)
        if outcome.example_weights is not None:
            if setup.held is None:
                setup.held = torch.zeros(len(setup.data.training), dtype=torch.bool)
            setup.held[rows] = outcome.example_weights < 0.5

    return backward


def rule_named(name: str) -> Any:
    """Return one of the library's rules; if there is none of this name, say what to do."""
    try:
        return getattr(rules, name)
    except AttributeError:
        raise ImportError(
            f"microclip.rules has no {name}: this arm needs a later version of microclip. Update "
            "it, or leave the arm out with --arms."
        ) from None


def _history(name: str, setup: Setup, **options: Any) -> Any:
    return rule_named(name)(total_steps=setup.steps, **options)


def _clipped(title: str, name: str, make_rule: Callable[[Setup], Any], b: int, **more: Any) -> Arm:
    return Arm(name, title, partial(clipped, make_rule, b), **more)


def _loss(name: str, title: str, objective: rivals.Objective, *kinds: Kind) -> Arm:
    return Arm(name, title, partial(rivals.mean_of, objective), kinds)


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(PLAIN, "plain", plain),
        Arm(ORACLE, "oracle", oracle, purposes=("noisy", "failure"), told="which are wrong"),
        _clipped("MinNorm, b = 4", "minnorm", lambda _: rules.MinNorm(), 4),
        _clipped("Unit, b = 4", "unit", lambda _: rules.Unit(), 4),
        _clipped("LossHistory", "loss-history", lambda s: _history("LossHistory", s), 1),
        _clipped("NormHistory", "norm-history", lambda s: _history("NormHistory", s), 1),
        _clipped(
            "LossHistory + Unit, b = 4",
            "loss-history-unit",
            lambda s: _history("LossHistory", s, clip=rules.Unit()),
            4,
        ),
        _clipped(
            "LossWeight",
            "loss-weight",
            lambda _: rule_named("LossWeight")(),
            1,
            only=("lm-stream", "lm-garbage", "digits-20", "mixture-7", "regression-20"),
        ),
        _loss("gce", "GCE 0.7", rivals.generalized_cross_entropy, *LABELS),
        _loss("sce", "symmetric CE", rivals.symmetric_cross_entropy, *LABELS),
        Arm("elr", "ELR", rivals.elr, LABELS),
        _loss(
            "smoothing",
            "label smoothing 0.1",
            rivals.smoothed_cross_entropy,
            "classification",
            "language",
        ),
        Arm("averaging", "weight averaging", rivals.weight_averaging),
        Arm(
            "co-teaching",
            "co-teaching",
            rivals.co_teaching,
            purposes=("noisy", "failure"),
            told="the share of wrong examples",
        ),
        Arm("cleaning", "confident learning, then retrain", rivals.clean_then_train, LABELS),
        _loss("huber", "Huber", rivals.huber, "regression"),
        _loss("l1", "L1", rivals.absolute_error, "regression"),
    )
}


def arms_of(task: Task) -> list[Arm]:
    """Return the arms that are run on a task, plain training first."""
    return [arm for arm in ARMS.values() if arm.applies_to(task)]
