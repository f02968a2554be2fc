"""What claims are about: effects, speeds, cosines, ratios of norms. Each gives one interval.

Positive is good for the arm, unless the quantity's words say otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from microclip_lab.evidence.arms import ARMS, PLAIN
from microclip_lab.evidence.catalog import Study
from microclip_lab.evidence.plan import Runs, compared, last_error
from microclip_lab.evidence.records import LAST, Record, Records
from microclip_lab.evidence.sequential import Interval, interval
from microclip_lab.language import vader
from microclip_lab.tuned_arms.search import evaluated, is_tuned, scores_of


class Quantity(Protocol):
    """Something that records give an interval for."""

    def of(self, records: Records, study: Study) -> Interval | None:
        """Return the interval at the last finished look; None without runs."""

    def words(self, records: Records, study: Study) -> str:
        """Return what is measured."""

    def arms_of(self, records: Records, study: Study) -> frozenset[str]:
        """Return the arms of which more seeds would narrow the interval."""

    @property
    def unit(self) -> str:
        """What it is measured in."""


@dataclass(frozen=True)
class Effect:
    """By how much an arm's error is below another's, in percent of it."""

    arm: str
    base: str = PLAIN
    domains: tuple[str, ...] = ()
    unit = "%"

    def of(self, records: Records, study: Study) -> Interval | None:
        """Return the relative effect at the last step."""
        runs = evaluated(records, study, self.base), evaluated(records, study, self.arm)
        return compared(*runs, study.looks, self._error if self.domains else last_error)[0]

    def arms_of(self, records: Records, study: Study) -> frozenset[str]:
        """Return both arms."""
        return frozenset({self.arm, self.base} - {PLAIN})

    def _error(self, record: Record) -> float:
        places = [vader.DOMAINS.index(domain) for domain in self.domains]
        return statistics.fmean(record.test[f"{LAST}/{place}"] for place in places)

    def words(self, records: Records, study: Study) -> str:
        """Return what is measured."""
        where = f", {' and '.join(self.domains)}" if self.domains else ""
        return f"{ARMS[self.arm].title} against {ARMS[self.base].title}{where}"


@dataclass(frozen=True)
class BestSize:
    """The effect of the arm that did best on validation data while tuning."""

    arms: tuple[str, ...]
    unit = "%"

    def _chosen(self, records: Records, study: Study) -> str | None:
        ready = [arm for arm in self.arms if arm in study.arms and is_tuned(records, study, arm)]
        if not ready or len(ready) < sum(arm in study.arms for arm in self.arms):
            return None
        return max(ready, key=lambda arm: max(scores_of(records, study, arm).values()))

    def of(self, records: Records, study: Study) -> Interval | None:
        """Return its relative effect."""
        arm = self._chosen(records, study)
        return None if arm is None else Effect(arm).of(records, study)

    def arms_of(self, records: Records, study: Study) -> frozenset[str]:
        """Return the arm that was chosen."""
        arm = self._chosen(records, study)
        return frozenset() if arm is None else frozenset({arm})

    def words(self, records: Records, study: Study) -> str:
        """Return what is measured."""
        arm = self._chosen(records, study)
        if arm is None:
            return "the best size above 1 against plain"
        return f"{ARMS[arm].title}, the better size above 1 on validation data, against plain"


@dataclass(frozen=True)
class Seen:
    """A figure of plain training's gradients, or the difference of two."""

    name: str
    minus: str = ""
    unit = ""

    def of(self, records: Records, study: Study) -> Interval | None:
        """Return its mean over the seeds that were looked at."""
        runs = evaluated(records, study, PLAIN).values()
        values = [
            run.notes[self.name] - (run.notes[self.minus] if self.minus else 0.0)
            for run in runs
            if self.name in run.notes
        ]
        return interval(values)

    def arms_of(self, records: Records, study: Study) -> frozenset[str]:
        """Return none: gradients are looked at in the first seeds only."""
        return frozenset()

    def words(self, records: Records, study: Study) -> str:
        """Return what is measured."""
        said = {
            "early/cosine_dragger_benign": "cosine of a dragger and a benign example",
            "early/cosine_benign_benign": "that of two benign examples",
        }
        first = said.get(self.name, self.name)
        return f"{first} minus {said.get(self.minus, self.minus)}" if self.minus else first


@dataclass(frozen=True)
class Memorized:
    """By how much the error on draggers in the training data is above plain training's."""

    arm: str
    unit = "points"

    def of(self, records: Records, study: Study) -> Interval | None:
        """Return the rise in points."""
        return _paired(records, study, self.arm, lambda run: run.notes["dragger_error"])

    def arms_of(self, records: Records, study: Study) -> frozenset[str]:
        """Return the arm."""
        return frozenset({self.arm})

    def words(self, records: Records, study: Study) -> str:
        """Return what is measured."""
        return f"error on draggers that were trained on, {ARMS[self.arm].title} minus plain"


LEVEL = 0.9  # of the way from the first epoch's error to the last one's, of plain training


@dataclass(frozen=True)
class Speed:
    """How much earlier an arm gets where plain training gets late, in halvings of the epochs."""

    arm: str
    unit = "halvings"

    def of(self, records: Records, study: Study) -> Interval | None:
        """Return log2(plain's epochs / the arm's), by clean validation data."""
        runs = evaluated(records, study, PLAIN), evaluated(records, study, self.arm)
        values = []
        for seed in _seeds(*runs, study):
            plain, other = runs[0][seed].clean, runs[1][seed].clean
            level = plain[0] + LEVEL * (plain[-1] - plain[0])
            values.append(math.log2(_reaches(plain, level) / _reaches(other, level)))
        return interval(values, len(study.looks))

    def arms_of(self, records: Records, study: Study) -> frozenset[str]:
        """Return the arm."""
        return frozenset({self.arm})

    def words(self, records: Records, study: Study) -> str:
        """Return what is measured."""
        return f"epochs saved until plain training's level, {ARMS[self.arm].title}"


def _reaches(curve: Sequence[float], level: float) -> float:
    """Return the epoch at which a curve gets to a level, between epochs too; one more if never."""
    for place, value in enumerate(curve):
        if value >= level:
            if not place:
                return 1.0
            before = curve[place - 1]
            return place + (level - before) / max(value - before, 1e-9)
    return len(curve) + 1.0


@dataclass(frozen=True)
class Slope:
    """How ln(dragger norm / benign norm) at the last step changes per doubling of b."""

    arms = (("minnorm-1", 1), ("minnorm-4", 4), ("minnorm-16", 16))
    unit = "per doubling"

    def of(self, records: Records, study: Study) -> Interval | None:
        """Return the slope over b = 1, 4, 16 and B, by seed."""
        sizes = {arm: b for arm, b in self.arms if arm in study.arms}
        sizes[PLAIN] = study.task.batch_size
        runs = {arm: evaluated(records, study, arm) for arm in sizes}
        values = []
        for seed, run in runs[PLAIN].items():
            pairs = [
                (math.log2(b), math.log(max(own.notes["end/ratio"], 1e-9)))
                for arm, b in sizes.items()
                if (own := runs[arm].get(seed)) is not None and "end/ratio" in own.notes
            ]
            if "end/ratio" in run.notes and len(pairs) == len(sizes):
                values.append(statistics.linear_regression(*zip(*pairs, strict=True)).slope)
        return interval(values)

    def arms_of(self, records: Records, study: Study) -> frozenset[str]:
        """Return none: norms are looked at in the first seeds only."""
        return frozenset()

    def words(self, records: Records, study: Study) -> str:
        """Return what is measured."""
        return "slope of ln(dragger norm / benign norm) over log2 b, last step"


def _seeds(base: Runs, other: Runs, study: Study) -> range:
    """Return the seeds of the last finished look."""
    both = base.keys() & other.keys()
    return range(max((n for n in study.looks if set(range(n)) <= both), default=0))


def _paired(
    records: Records, study: Study, arm: str, figure: Callable[[Record], float]
) -> Interval | None:
    base, other = evaluated(records, study, PLAIN), evaluated(records, study, arm)
    seeds = _seeds(base, other, study)
    if any("dragger_error" not in base[s].notes for s in seeds):
        return None
    return interval([figure(other[s]) - figure(base[s]) for s in seeds], len(study.looks))
