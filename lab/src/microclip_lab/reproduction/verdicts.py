"""Verdicts: what the records say about the claims, by the criteria written down with them.

A part holds if its interval is on the expected side of zero, however small the effect: some of the
paper's own gains are smaller than the margin. It fails if its interval reaches the other side, and
not as far as the margin on the expected one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microclip.report.comparison import signed
from microclip_lab.reproduction.claims import CLAIMS, CONTROLS, Claim, Expectation, Part
from microclip_lab.reproduction.effects import Effect, effect
from microclip_lab.reproduction.records import Records
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.wording import NOT_YET

Verdict = Literal["holds", "does not hold", "undecided", "not looked at"]


@dataclass(frozen=True)
class PartVerdict:
    """A part of a claim, with its effect and verdict."""

    part: Part
    effect: Effect | None
    verdict: Verdict

    @property
    def sentence(self) -> str:
        """The effect with its interval, in words."""
        return f"{self.part.about}: {told(self.effect)}"

    @property
    def expected(self) -> str:
        """The expectation, in words."""
        margin = self.part.margin
        return {
            "above": f"above 0 (margin {margin:g})",
            "below": f"below 0 (margin {margin:g})",
            "near": f"within ± {margin:g}",
            "not below": f"above -{margin:g}",
        }[self.part.expects]

    @property
    def came_out(self) -> str:
        """The verdict, in words."""
        return {
            "holds": "as expected",
            "does not hold": "not as expected",
            "undecided": "undecided",
            "not looked at": NOT_YET,
        }[self.verdict]

    @property
    def answer(self) -> str:
        """The effect, and whether it is as expected."""
        return self.sentence if self.effect is None else f"{self.sentence}: {self.came_out}"


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim and its verdict."""

    claim: Claim
    parts: tuple[PartVerdict, ...]
    also: tuple[PartVerdict, ...]
    verdict: Verdict
    sentence: str


def judge(study: Study, records: Records) -> tuple[ClaimVerdict, ...]:
    """Return the verdict on every claim."""
    return tuple(_judged(study, records, claim) for claim in CLAIMS)


def controls(study: Study, records: Records) -> tuple[PartVerdict, ...]:
    """Return the controls: whether something else explains the gain."""
    return tuple(_part(study, records, part) for part in CONTROLS)


def decide(found: Effect | None, expects: Expectation, margin: float) -> Verdict:
    """Return the verdict of an effect on an expectation."""
    if found is None:
        return "not looked at"
    known = found.estimate
    if known is None or known.low is None or known.high is None or found.left_out:
        return "undecided"
    if not found.is_complete:  # no optional stopping
        return "undecided"
    low, high = known.low, known.high
    match expects:
        case "above":
            holds, fails = low > 0, high < margin
        case "below":
            holds, fails = high < 0, low > -margin
        case "near":
            holds, fails = -margin < low and high < margin, low > margin or high < -margin
        case "not below":
            holds, fails = low > -margin, high < -margin
    return "holds" if holds else "does not hold" if fails else "undecided"


def together(parts: tuple[PartVerdict, ...]) -> Verdict:
    """Return the verdict of all parts: all must hold, and one failure is enough."""
    verdicts = {part.verdict for part in parts}
    if verdicts == {"not looked at"}:
        return "not looked at"
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if verdicts == {"holds"} else "undecided"


def told(found: Effect | None) -> str:
    """Return an effect with its interval in words, with notes on its runs.

    >>> told(None)
    'not run yet'
    """
    if found is None:
        return NOT_YET
    taken = f"{found.arm}, " if found.arm else ""
    if found.estimate is None:
        said = f"{taken}no figure"
    else:
        number, _, interval = signed(found.estimate).partition(" ")
        said = " ".join(word for word in (f"{taken}{number}", _unit(found), interval) if word)
    notes = []
    if found.diverged:
        notes.append(f"{_runs(len(set(found.diverged)))} diverged and counted as the worst")
    if found.left_out:
        notes.append(f"{len(found.left_out)} of {found.seeds} seeds left out")
    if not found.is_complete:
        notes.append(f"{len(found.values) + len(found.left_out)} of {found.seeds} seeds so far")
    return "; ".join([said, *notes])


def _judged(study: Study, records: Records, claim: Claim) -> ClaimVerdict:
    parts = tuple(_part(study, records, part) for part in claim.parts)
    also = tuple(_part(study, records, part) for part in claim.also)
    verdict = together(parts)
    return ClaimVerdict(claim, parts, also, verdict, _sentence(parts, verdict))


def _part(study: Study, records: Records, part: Part) -> PartVerdict:
    found = effect(study, records, part.quantity)
    return PartVerdict(part, found, decide(found, part.expects, part.margin))


def _sentence(parts: tuple[PartVerdict, ...], verdict: Verdict) -> str:
    if verdict == "not looked at":
        return "Not run yet."
    begin = {
        "holds": "Holds at this scale",
        "does not hold": "Does not hold at this scale",
        "undecided": "Undecided at this scale",
    }[verdict]
    return f"{begin}. {'. '.join(part.sentence for part in parts)}."


def _unit(found: Effect) -> str:
    return "points" if found.unit == "points" else ""  # the others are said in what it is about


def _runs(count: int) -> str:
    return f"{count} run" + ("" if count == 1 else "s")
