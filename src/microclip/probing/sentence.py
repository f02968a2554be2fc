"""Saying what a probe found, and only as surely as it was found.

A probe looks one step ahead from the weights it is given. It does not know where training with a
size ends up, so no sentence here recommends one without saying so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microclip.probing.result import Best, Probe

RACES = 3  # sizes worth comparing by training


def sentence(probe: Probe) -> str:
    """Return what was found, what it does not tell, and what to do next."""
    best = probe.best
    if best is None:
        return (
            f"No answer: the gradient that {probe.held_out} held-out examples have in common "
            "is lost in their noise, so no step can be judged by it. Probe more batches at once."
        )
    return " ".join(
        part
        for part in (_finding(probe, best), _caution(probe, best), _advice(probe, best))
        if part
    )


def _finding(probe: Probe, best: Best) -> str:
    name = _name(probe, best.rule, best.size)
    if best.size == probe.batch_size or best.gain <= 1:
        if best.rivals:
            return (
                "No b is seen to help here: no size is better than plain training, though "
                f"{_rivals(probe, best)} cannot be told from it."
            )
        return "No b helps here: every size is worse than plain training at these weights."
    if not best.helps:
        return (
            f"No b is seen to help here: {name} comes first{_worth(best)}, but in "
            f"{100 - 100 * best.over_plain:.0f} % of the resamplings a plain step is better."
        )
    found = f"{name}: at these weights one step is better than a plain one{_worth(best)}."
    if best.rivals:
        found += f" {_rivals(probe, best)} cannot be told from it.".replace(" all", " All", 1)
    return found


def _caution(probe: Probe, best: Best) -> str:
    spread = probe.row(best.size, best.rule).bound_spread
    if best.size == 1 and spread > 0.1:
        return (
            "Beware: b = 1 often comes first at weights that it did not train itself. Its bound, "
            f"the norm of the easiest example, spreads over {spread:.1f} decades from step to "
            "step already, and shrinks as it trains."
        )
    return ""


def _advice(probe: Probe, best: Best) -> str:
    ranked = sorted(
        (row for row in probe.rows if row.size < probe.batch_size and row.gain_high > 1),
        key=lambda row: -row.gain,
    )
    racers = [(row.rule, row.size) for row in ranked[:RACES]]
    limits = "This looks one step ahead and cannot tell where training with a size ends up:"
    if not racers:
        return f"{limits} probe again later in training."
    names = _names(probe, tuple(racers))
    return f"{limits} probe again later, and race {names} against plain training before settling."


def _names(probe: Probe, settings: tuple[tuple[str, int], ...]) -> str:
    names = [_name(probe, rule, size) for rule, size in settings]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _name(probe: Probe, rule: str, size: int) -> str:
    several = len({row.rule for row in probe.rows}) > 1
    return f"b = {size}" + (f" with {rule}" if several else "")


def _rivals(probe: Probe, best: Best) -> str:
    others = len(probe.rows) - 1
    if others > 1 and len(best.rivals) == others:
        return "all other sizes"
    return _names(probe, best.rivals) if len(best.rivals) < 5 else f"{len(best.rivals)} others"


def _worth(best: Best) -> str:
    if not math.isfinite(best.gain):
        return ", which does not even point along the gradient of the held-out examples"
    if math.isfinite(best.low) and math.isfinite(best.high):
        return f", worth {best.gain:.2f} times as much ({best.low:.2f} to {best.high:.2f})"
    if math.isfinite(best.low):
        return f", worth at least {best.low:.2f} times as much"
    return ", by how much cannot be told from so few examples"
