"""What the records decide of the claims, by the rules that were written down beside them.

An interval on the side of zero where it is expected bears a part out, however small the effect:
some of the paper's own gains are smaller than the margin. An interval that reaches to the other
side, and not as far as the margin on this one, leaves nothing that matters: the part fails.
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
    """A part of a claim, with what came out."""

    part: Part
    effect: Effect | None
    verdict: Verdict

    @property
    def sentence(self) -> str:
        """What came out, in words: the effect with its interval."""
        return f"{self.part.about}: {told(self.effect)}"

    @property
    def expected(self) -> str:
        """What was expected, in words."""
        margin = self.part.margin
        return {
            "above": f"above 0 (margin {margin:g})",
            "below": f"below 0 (margin {margin:g})",
            "near": f"within ± {margin:g}",
            "not below": f"above -{margin:g}",
        }[self.part.expects]

    @property
    def came_out(self) -> str:
        """Whether it is so, in words."""
        return {
            "holds": "as expected",
            "does not hold": "not so",
            "undecided": "undecided",
            "not looked at": NOT_YET,
        }[self.verdict]

    @property
    def answer(self) -> str:
        """What came out, and whether it is as expected."""
        return self.sentence if self.effect is None else f"{self.sentence}: {self.came_out}"


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim, with what came out."""

    claim: Claim
    parts: tuple[PartVerdict, ...]
    also: tuple[PartVerdict, ...]
    verdict: Verdict
    sentence: str


def judge(study: Study, records: Records) -> tuple[ClaimVerdict, ...]:
    """Return the verdict on every claim."""
    return tuple(_judged(study, records, claim) for claim in CLAIMS)


def controls(study: Study, records: Records) -> tuple[PartVerdict, ...]:
    """Return what came of the controls: whether something else explains the gain."""
    return tuple(_part(study, records, part) for part in CONTROLS)


def decide(found: Effect | None, expects: Expectation, margin: float) -> Verdict:
    """Return what an effect decides of an expectation."""
    if found is None:
        return "not looked at"
    known = found.estimate
    if known is None or known.low is None or known.high is None or found.left_out:
        return "undecided"
    if not found.is_complete:  # deciding as soon as an interval looks good would be no decision
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
    """Return what the parts of a claim decide: all must hold, and one that fails is enough."""
    verdicts = {part.verdict for part in parts}
    if verdicts == {"not looked at"}:
        return "not looked at"
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if verdicts == {"holds"} else "undecided"


def told(found: Effect | None) -> str:
    """Return an effect with its interval in words, and what is to be known of its runs.

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
