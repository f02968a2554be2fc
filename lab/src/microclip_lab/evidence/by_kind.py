"""What to do, by kind of data and training: a decision for each kind, and the figures behind it.

A rule is advised if it clearly gained on more than half of the tasks of a kind on which it was run,
and clearly harmed none; of several, the one with the largest mean effect on the tasks they share.
Otherwise plain training is. Effects are of this plan and of the dirty-data benchmark, relative to
the error of plain training that was tuned alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from microclip_lab.dirty_data import catalog as dirty_catalog
from microclip_lab.dirty_data import records as dirty_records
from microclip_lab.evidence.arms import ORACLE, PLAIN
from microclip_lab.evidence.catalog import BY_NAME
from microclip_lab.evidence.plan import effect, gate
from microclip_lab.evidence.records import Records
from microclip_lab.evidence.run import error_of
from microclip_lab.evidence.sequential import Interval, Outcome, outcome, relative
from microclip_lab.tuned_arms.search import evaluated

# here, and in the dirty-data benchmark
ADVISED = {"unit-4": "unit", "minnorm-4": "minnorm", "loss-history": "loss-history"}
NAMES = {"unit-4": "Unit", "minnorm-4": "MinNorm", "loss-history": "LossHistory"}
TO_DO = {
    "unit-4": "`Unit()`, b = 4",
    "minnorm-4": "`MinNorm()`, b = 4",
    "loss-history": "`LossHistory`",
}
OUTSIDE_MARGIN = 2.4


@dataclass(frozen=True)
class Kind:
    """A kind of data and training, and the tasks that stand for it."""

    title: str
    data: Literal["noisy", "clean"]
    tasks: tuple[str, ...]


KINDS = (
    Kind(
        "Regression, some targets far off",
        "noisy",
        (
            *("outliers-7-10", "outliers-2-10", "outliers-20-10", "outliers-7-3"),
            *("regression-7", "regression-20", "regression-skewed"),
        ),
    ),
    Kind(
        "Fine-tuning, some labels wrong",
        "noisy",
        ("tuned-labels", "raters", "raters-flips", "finetune-20"),
    ),
    Kind(
        "Fine-tuning, some examples garbage (canaries)",
        "noisy",
        ("tuned-canaries", "speech-tuned", "speech-tuned-20", "speech-tuned-128"),
    ),
    Kind(
        "Fine-tuning, clean data",
        "clean",
        ("tuned-clean", "raters-clean", "speech-tuned-clean", "finetune-clean"),
    ),
    Kind(
        "From scratch, labels wrong at random",
        "noisy",
        ("digits-20", "digits-40", "digits-pairs", "mixture-7", "t5-flips"),
    ),
    Kind(
        "From scratch, some examples garbage (canaries)",
        "noisy",
        ("scratch-canaries", "speech-scratch", "speech-scratch-20"),
    ),
    Kind(
        "Photos, labeled by people in a hurry",
        "noisy",
        ("photos-worse", "photos-random1", "cifar-worse", "cifar-random1"),
    ),
    Kind(
        "From scratch, short texts, one rater each",
        "noisy",
        ("domains", "vader-rater", "vader-flips", "t5"),
    ),
    Kind(
        "Language model, some texts garbage or misaligned", "noisy", ("lm-garbage", "lm-misaligned")
    ),
    Kind("Speech, some transcripts wrong", "noisy", ("speech-10",)),
    Kind("Bad examples, but five epochs or fewer", "noisy", ("digits-short", "lm-stream")),
    Kind(
        "From scratch, clean data",
        "clean",
        (
            *("scratch-clean", "outliers-none", "photos-clean", "domains-clean", "digits-clean"),
            *("cifar-clean", "lm-clean", "mixture-clean", "regression-clean", "t5-clean"),
        ),
    ),
)


@dataclass(frozen=True)
class Known:
    """The effect of each rule on a task."""

    task: str
    effects: dict[str, Interval]  # by arm
    outcomes: dict[str, Outcome]


@dataclass(frozen=True)
class Decision:
    """What to do with a kind of data, and the tasks that say so."""

    kind: Kind
    known: tuple[Known, ...]
    without_headroom: tuple[str, ...]
    not_run: tuple[str, ...]

    @cached_property
    def arm(self) -> str | None:
        """The advised rule; None: plain training, or nothing is known yet."""
        fit = [arm for arm in ADVISED if self._gains_without_harm(arm)]
        if len(fit) < 2:
            return fit[0] if fit else None
        shared = [each for each in self.known if all(arm in each.effects for arm in fit)]
        return max(fit, key=lambda arm: _mean(shared or self.known, arm))

    def _gains_without_harm(self, arm: str) -> bool:
        came = self.came(arm)
        return bool(came) and "harm" not in came and 2 * came.count("gain") > len(came)

    def came(self, arm: str) -> list[Outcome]:
        """Return what came of a rule, task by task."""
        return [each.outcomes[arm] for each in self.known if arm in each.outcomes]

    @property
    def to_do(self) -> str:
        """The decision in a few words, as Markdown."""
        if not self.known:
            return "not known yet"
        if self.arm is not None:
            return TO_DO[self.arm]
        bad = self.kind.data == "noisy"
        return "plain training; [find the bad examples](find-bad-data.md)" if bad else "plain"


def _mean(known: Sequence[Known], arm: str) -> float:
    return statistics.fmean(each.effects[arm].mean for each in known if arm in each.effects)


def decisions(records: Records, outside: dirty_records.Records) -> list[Decision]:
    """Return what to do with every kind, as far as the records tell."""
    found = []
    for kind in KINDS:
        known, without, missing = [], [], []
        for task in kind.tasks:
            if _has_no_headroom(records, outside, task):
                without.append(task)
                continue
            effects = {arm: own for arm in ADVISED if (own := _effect(records, outside, task, arm))}
            if effects:
                margin = BY_NAME[task].margin if task in BY_NAME else OUTSIDE_MARGIN
                came = {arm: outcome(own, margin) for arm, own in effects.items()}
                known.append(Known(task, effects, came))
            else:
                missing.append(task)
        found.append(Decision(kind, tuple(known), tuple(without), tuple(missing)))
    return found


def _effect(
    records: Records, outside: dirty_records.Records, task: str, arm: str
) -> Interval | None:
    if task in BY_NAME:
        study = BY_NAME[task]
        if ORACLE in study.arms and gate(records, study) != "passed":
            return None
        return effect(records, study, arm) if arm in study.arms else None
    return outside_effect(outside, task, ADVISED[arm])


def _has_no_headroom(records: Records, outside: dirty_records.Records, task: str) -> bool:
    if task in BY_NAME:
        return gate(records, BY_NAME[task]) in ("no headroom", "undecided")
    if dirty_catalog.TASKS[task].purpose == "clean":
        return False
    found = outside_effect(outside, task, ORACLE)
    return found is not None and found.low <= 0


def outside_effect(records: dirty_records.Records, task: str, arm: str) -> Interval | None:
    """Return an arm's effect in the dirty-data benchmark, in percent of plain training's error."""
    its = dirty_catalog.TASKS[task]
    runs = [evaluated(records, its, name) for name in (PLAIN, arm)]
    seeds = sorted(runs[0].keys() & runs[1].keys())
    base, other = ([error_of(its, own[seed].last) for seed in seeds] for own in runs)
    return relative(base, other)
