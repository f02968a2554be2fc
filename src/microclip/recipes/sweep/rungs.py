"""How long a race lasts: pure arithmetic.

n candidates train to the first rung, the better half of them to the second, and so on; the last
one trains to the end. Every rung costs about the same, and all of it no more than the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from microclip.recipes.config import SettingError

KEEPS_PLAIN = 3.0  # the budget from which on plain training need not earn its place


@dataclass(frozen=True)
class Rung:
    """A part of a race."""

    step: int  # where it ends
    field: int  # how many candidates run it, plain training among them or not


def rungs(candidates: int, steps: int, budget: float = 2.0) -> tuple[Rung, ...]:
    """Return the rungs of a race; the last one is at the end, and the winner's own.

    With s_k the rungs and n_k the candidates that run to s_k, a race costs
    T + sum_k s_k (n_k - n_{k+1}) steps. Rungs of equal cost R end at s_k = sum_{i<=k} R / n_i, and
    R = (budget - 1) T / (K - sum_i 1 / n_i) uses up the budget; rounding down keeps below it.

    >>> rungs(8, 1000)
    (Rung(step=58, field=8), Rung(step=176, field=4), Rung(step=411, field=2), Rung(step=1000, field=1))
    >>> cost(rungs(8, 1000))
    1995
    """  # noqa: E501 (a doctest shows what comes out)
    if candidates < 1 or steps < 1:
        raise SettingError(
            f"A race needs a candidate and a step at least, but got {candidates} candidates and "
            f"{steps} steps."
        )
    fields = halvings(candidates)[:-1]
    found = []
    if fields:
        each = (budget - 1) * steps / (len(fields) - sum(1 / field for field in fields))
        if each < fields[0]:
            raise SettingError(
                f"{steps} steps are too few to race {candidates} candidates: the first rung would "
                "end before the first step. Race fewer of them, or train for longer."
            )
        reached = 0.0
        for field in fields:
            reached += each / field
            # the sum of floats may miss a whole number by a rounding
            found.append(Rung(min(steps, math.floor(reached * (1 + 1e-12))), field))
    return (*found, Rung(steps, 1))


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
