"""Verdicts: what the records say about each claim, task by task, and overall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microclip_lab.evidence.catalog import BY_NAME, Study
from microclip_lab.evidence.claims import CLAIMS, Claim, Expectation, Test
from microclip_lab.evidence.plan import gate
from microclip_lab.evidence.quantities import BestSize, Effect
from microclip_lab.evidence.records import Records
from microclip_lab.evidence.sequential import Interval, seeds_needed

Verdict = Literal["holds", "smaller", "refuted", "undecided", "no headroom", "not run"]
SMALLER = "real, but small, on"


def decide(found: Interval | None, expects: Expectation, margin: float) -> Verdict:
    """Return the verdict on one quantity.

    >>> decide(Interval(5, 2, 8, 8, 1), "above", 2.4)
    'holds'
    >>> decide(Interval(0, -2, 2, 8, 1), "above", 2.4)  # less than half of the paper's effect
    'refuted'
    >>> decide(Interval(0, -2, 3, 8, 1), "above", 2.4)
    'undecided'
    >>> decide(Interval(1, 0.5, 1.5, 8, 1), "above", 2.4)  # there is an effect, but a small one
    'smaller'
    """
    if found is None:
        return "not run"
    low, high = found.low, found.high
    if expects == "below":
        low, high = -high, -low
    if expects in ("above", "below"):
        if low > 0:
            return "smaller" if high <= margin else "holds"
        return "refuted" if high <= margin else "undecided"
    if expects == "not below":
        return "holds" if low > -margin else "refuted" if high < -margin else "undecided"
    if -margin < low and high < margin:
        return "holds"
    return "refuted" if low > margin or high < -margin else "undecided"


def distance_to_decision(effect: float, expects: Expectation, margin: float) -> float:
    """Return how far an effect of this size is from where its verdict would change.

    >>> distance_to_decision(2.0, "above", 2.5), distance_to_decision(0.5, "above", 2.5)
    (2.0, 2.0)
    >>> distance_to_decision(-1.0, "not below", 2.5), distance_to_decision(1.0, "within", 2.5)
    (1.5, 1.5)
    """
    if expects == "within":
        return abs(margin - abs(effect))
    if expects == "not below":
        return abs(effect + margin)
    effect = -effect if expects == "below" else effect
    return max(effect, margin - effect)  # it holds, or it is refuted


@dataclass(frozen=True)
class Tested:
    """A test, what came out, and how many seeds a decision would take if there is none."""

    test: Test
    found: Interval | None
    verdict: Verdict
    words: str
    needed: int | None = None


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim with all of its tests."""

    claim: Claim
    tests: tuple[Tested, ...]

    def of_task(self, task: str) -> Verdict:
        """Return the verdict on one task: all tests hold, or one is refuted."""
        own = [tested.verdict for tested in self.tests if tested.test.task == task]
        for verdict in ("no headroom", "not run", "refuted", "undecided", "smaller"):
            if verdict in own:
                return verdict
        return "holds"

    @property
    def by_task(self) -> dict[str, Verdict]:
        """The verdict of every task."""
        return {tested.test.task: self.of_task(tested.test.task) for tested in self.tests}

    @property
    def overall(self) -> str:
        """In plain words: holds, is refuted, or depends on the task."""
        found = list(self.by_task.values())
        said = {"holds": "holds on", "smaller": SMALLER, "refuted": "refuted on"}
        parts = [f"{words} {found.count(v)}" for v, words in said.items() if v in found]
        if parts:
            depends = "depends: " if len(parts) > 1 else ""
            left = found.count("undecided")
            return depends + ", ".join(parts) + (f", undecided on {left}" if left else "")
        for verdict in ("undecided", "no headroom"):
            if verdict in found:
                return verdict
        return "not run yet"


def tested(records: Records, test: Test) -> Tested:
    """Return what the records say about a test."""
    study = BY_NAME[test.task]
    words = test.quantity.words(records, study)
    found = test.quantity.of(records, study)
    has_none = gate(records, study) in ("no headroom", "undecided")
    if has_none and (found is None or isinstance(test.quantity, Effect | BestSize)):
        return Tested(test, None, "no headroom", words)
    verdict = decide(found, test.expects, test.margin)
    needed = None
    if verdict == "undecided" and found is not None:
        distance = distance_to_decision(found.mean, test.expects, test.margin)
        needed = seeds_needed(found.deviation, distance, len(study.looks))
    return Tested(test, found, verdict, words, needed)


def open_arms(records: Records, study: Study) -> frozenset[str]:
    """Return the arms of a study of which more seeds may decide a claim."""
    return frozenset(
        arm
        for claim in CLAIMS
        for test in claim.tests
        if test.task == study.name and tested(records, test).verdict == "undecided"
        for arm in test.quantity.arms_of(records, study)
    )


def verdicts(records: Records) -> list[ClaimVerdict]:
    """Return the verdict on every claim."""
    return [
        ClaimVerdict(claim, tuple(tested(records, test) for test in claim.tests))
        for claim in CLAIMS
    ]
