"""The arms: plain training, an oracle, both rules at three sizes, the rule with memory, baselines.

All stand on `dirty_data`'s; what differs is which task they are run on, which the plan says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

import microclip
from microclip import rules
from microclip_lab.dirty_data import rivals
from microclip_lab.dirty_data.arms import ORACLE, clipped, oracle, plain, rule_named
from microclip_lab.dirty_data.training import Backward, Batch, Setup, Start
from microclip_lab.tuned_arms.search import PLAIN

__all__ = ["ARMS", "BASELINES", "ORACLE", "PLAIN", "Arm"]


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Args:
        name: For records and the command line.
        title: For tables.
        start: Sets it up for a run.
        weight_decay: Of AdamW; None: the task's.
        edition: Increase it when the arm changes; older records no longer count.
    """

    name: str
    title: str
    start: Start
    weight_decay: float | None = None
    edition: int = 1


def by_domain(make_rule: Callable[[], Any], microbatch_size: int, setup: Setup) -> Backward:
    """Clip within each domain."""
    clipper = microclip.Clipper(
        setup.model, microbatch_size=microbatch_size, rule=make_rule(), engine=setup.engine
    )
    domains = setup.data.domains
    if domains is None:
        raise ValueError(f"{setup.task.name} has no domains, so there is nothing to clip within.")

    def backward(rows: Tensor, batch: Batch) -> None:
        clipper.backward(setup.losses, batch, domains=domains[rows].tolist())

    return backward


def _sizes(name: str, title: str, make_rule: Callable[[Setup], Any]) -> list[Arm]:
    return [
        Arm(f"{name}-{b}", f"{title}, b = {b}", partial(clipped, make_rule, b)) for b in (1, 4, 16)
    ]


def _whole(setup: Setup) -> Backward:
    return clipped(lambda _: rules.MinNorm(), setup.task.batch_size, setup)


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(PLAIN, "plain", plain),
        Arm(ORACLE, "oracle", oracle),
        *_sizes("minnorm", "MinNorm", lambda _: rules.MinNorm()),
        *_sizes("unit", "Unit", lambda _: rules.Unit()),
        Arm("minnorm-whole", "MinNorm, b = B", _whole),
        Arm(
            "loss-history",
            "LossHistory",
            partial(clipped, lambda s: rule_named("LossHistory")(total_steps=s.steps), 1),
        ),
        Arm("decay-0.1", "weight decay 0.1", plain, weight_decay=0.1),
        Arm("decay-1", "weight decay 1", plain, weight_decay=1.0),
        Arm(
            "smoothing",
            "label smoothing 0.1",
            partial(rivals.mean_of, rivals.smoothed_cross_entropy),
        ),
        Arm("averaging", "weight averaging", rivals.weight_averaging),
        Arm("minnorm-4-domains", "MinNorm, b = 4, by domain", partial(by_domain, rules.MinNorm, 4)),
        Arm("unit-4-domains", "Unit, b = 4, by domain", partial(by_domain, rules.Unit, 4)),
    )
}
BASELINES = (PLAIN, "decay-0.1", "decay-1", "smoothing", "averaging")  # nobody clips here
