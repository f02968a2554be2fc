"""How long a race lasts: pure arithmetic.

n candidates train to the first rung, the better half of them to the second, and so on; the last
one trains to the end. Every rung costs about the same, and all of it no more than the budget.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from microclip_lab.training.config import SettingError

KEEPS_PLAIN = 3.0  # the budget from which on plain training need not earn its place
PAST_WARM_UP = 1.5  # times the warm-up, before which nobody should have to leave
MOST_FOR_FIRST = 0.75  # of what is there for losers, that may be spent on the first rung


@dataclass(frozen=True)
class Rung:
    """A part of a race."""

    step: int  # where it ends
    field: int  # how many candidates run it, plain training among them or not


def rungs(candidates: int, steps: int, budget: float = 2.0, warm_up: int = 0) -> tuple[Rung, ...]:
    """Return the rungs of a race; the last one is at the end, and the winner's own.

    With s_k the rungs and n_k the candidates that run to s_k, a race costs
    T + sum_k s_k (n_k - n_{k+1}) steps. Rungs of equal cost R end at s_k = sum_{i<=k} R / n_i, and
    R = (budget - 1) T / (K - sum_i 1 / n_i) uses up the budget; rounding down keeps below it.

    While the learning rate warms up, candidates hardly differ. So the first rung is put off until
    after it as far as the budget allows, and the others share what is left in the same way.

    >>> [rung.step for rung in rungs(8, 1000)], cost(rungs(8, 1000))
    ([58, 176, 411, 1000], 1995)
    >>> [rung.step for rung in rungs(8, 1000, warm_up=60)], cost(rungs(8, 1000, warm_up=60))
    ([90, 164, 312, 1000], 2000)
    """
    if candidates < 1 or steps < 1:
        raise SettingError(
            f"A race needs a candidate and a step at least, but got {candidates} candidates and "
            f"{steps} steps."
        )
    fields = halvings(candidates)[:-1]
    spare = (budget - 1) * steps  # for those who will lose
    ends = _equal_rungs(fields, spare)
    if ends and ends[0] < 1:
        raise SettingError(
            f"{steps} steps are too few to race {candidates} candidates: the first rung would "
            "end before the first step. Race fewer of them, or train for longer."
        )
    if ends:
        affordable = MOST_FOR_FIRST * spare / (candidates - 1)
        first = max(ends[0], min(PAST_WARM_UP * warm_up, affordable))
        if first > ends[0]:
            left = spare - first * (candidates - 1)
            ends = [first, *(first + end for end in _equal_rungs(fields[1:], left))]
    # the slack keeps a whole number from being missed by a rounding
    found = [
        Rung(min(steps, math.floor(end * (1 + 1e-12))), field)
        for end, field in zip(ends, fields, strict=True)
    ]
    return (*found, Rung(steps, 1))


def _equal_rungs(fields: list[int], spare: float) -> list[float]:
    """Return where rungs of equal cost end that use up what there is for losers."""
    if not fields:
        return []
    each = spare / (len(fields) - sum(1 / field for field in fields))
    return list(itertools.accumulate(each / field for field in fields))


def halvings(candidates: int) -> list[int]:
    """Return how many are left, rung by rung.

    >>> halvings(11)
    [11, 6, 3, 2, 1]
    """
    fields = [candidates]
    while fields[-1] > 1:
        fields.append(-(-fields[-1] // 2))
    return fields


def cost(race: tuple[Rung, ...]) -> int:
    """Return the steps of all candidates together."""
    before, total = 0, 0
    for rung in race:
        total += rung.field * (rung.step - before)
        before = rung.step
    return total
