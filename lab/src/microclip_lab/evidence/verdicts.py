"""Verdicts: what the records say about each claim, task by task, and overall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microclip_lab.evidence.catalog import BY_NAME
from microclip_lab.evidence.claims import CLAIMS, Claim, Expectation, Test
from microclip_lab.evidence.plan import gate
from microclip_lab.evidence.quantities import BestSize, Effect
from microclip_lab.evidence.records import Records
from microclip_lab.evidence.sequential import Interval, seeds_needed

Verdict = Literal["holds", "refuted", "undecided", "no headroom", "not run"]


def decide(found: Interval | None, expects: Expectation, margin: float) -> Verdict:
    """Return the verdict on one quantity.

    >>> decide(Interval(5, 2, 8, 8, 1), "above", 2.4)
    'holds'
    >>> decide(Interval(0, -2, 2, 8, 1), "above", 2.4)  # less than half of the paper's effect
    'refuted'
    >>> decide(Interval(0, -2, 3, 8, 1), "above", 2.4)
    'undecided'
    """
    if found is None:
        return "not run"
    low, high = found.low, found.high
    if expects == "below":
        low, high = -high, -low
    if expects in ("above", "below"):
        return "holds" if low > 0 else "refuted" if high <= margin else "undecided"
    if expects == "not below":
        return "holds" if low > -margin else "refuted" if high < -margin else "undecided"
    if -margin < low and high < margin:
        return "holds"
    return "refuted" if low > margin or high < -margin else "undecided"


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
        for verdict in ("no headroom", "not run", "refuted", "undecided"):
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
        found = self.by_task.values()
        held, refuted = sum(v == "holds" for v in found), sum(v == "refuted" for v in found)
        if held and refuted:
            return f"depends: holds on {held}, refuted on {refuted}"
        if held or refuted:
            said = "holds" if held else "refuted"
            left = sum(v == "undecided" for v in found)
            return f"{said} on {held or refuted}" + (f", undecided on {left}" if left else "")
        for verdict in ("undecided", "no headroom"):
            if verdict in found:
                return verdict
        return "not run yet"


def tested(records: Records, test: Test) -> Tested:
    """Return what the records say about a test."""
    study = BY_NAME[test.task]
    words = test.quantity.words(records, study)
    judges_gains = isinstance(test.quantity, Effect | BestSize) and gate(records, study) != "passed"
    if judges_gains and gate(records, study) == "no headroom":
        return Tested(test, None, "no headroom", words)
    found = test.quantity.of(records, study)
    verdict = decide(found, test.expects, test.margin)
    needed = None
    if verdict == "undecided" and found is not None and test.margin:
        needed = seeds_needed(found.deviation, 2 * test.margin, len(study.looks))
    return Tested(test, found, verdict, words, needed)


def verdicts(records: Records) -> list[ClaimVerdict]:
    """Return the verdict on every claim."""
    return [
        ClaimVerdict(claim, tuple(tested(records, test) for test in claim.tests))
        for claim in CLAIMS
    ]
