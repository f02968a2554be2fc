"""Bias and rate by b: the rows of the table, and sentences that summarize them.

Knows the bounds, but not how they are printed or plotted.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from microclip_lab.theory import corrected, rates
from microclip_lab.theory.config import TheoryConfig
from microclip_lab.theory.rates import Bound

__all__ = ["KINDS", "SgdRate", "TheoryRow", "best", "lines", "rows", "sentences", "write_csv"]

# kinds of bounds, in the order of tables and plots
KINDS = {
    "printed": "as printed in the paper",
    "corrected": "corrected, any noise",
    "symmetric": "corrected, symmetric noise",
}


@dataclass(frozen=True)
class TheoryRow:
    """The bounds at one micro-batch size."""

    b: int
    c: float
    C: float
    bounds: dict[str, Bound | None]  # by kind; None where the theorem does not apply
    measured: float | None = None  # mean gradient norm of a simulated run, if requested
    measured_min: float | None = None  # the same with the rule of Algorithm 1


@dataclass(frozen=True)
class SgdRate:
    """A rate of SGD, which does not depend on b."""

    name: str
    bound: Bound | None


Measure = Callable[[int], tuple[float, float]]


def rows(config: TheoryConfig, measure: Measure | None = None) -> list[TheoryRow]:
    """Return one row for each micro-batch size."""
    found = []
    for b in config.sizes:
        c, C = config.lengths(b)
        at = {
            "T": config.steps,
            "b": b,
            "epsilon": config.epsilon,
            "c": c,
            "C": C,
            "sigma": config.sigma,
            "L": config.smoothness,
            "gap": config.gap,
        }
        bounds = {
            "printed": _if_it_applies(rates.micro_batch_clipping, at),
            "corrected": _if_it_applies(corrected.micro_batch_clipping, at),
            "symmetric": _if_it_applies(corrected.micro_batch_clipping_symmetric, at),
        }
        unit, least = (None, None) if measure is None else measure(b)
        found.append(TheoryRow(b, c, C, bounds, unit, least))
    return found


def lines(config: TheoryConfig) -> list[SgdRate]:
    """Return the rates of SGD for comparison; the last one is the tightest that holds."""
    plain = {
        "T": config.steps,
        "B": config.batch_size,
        "sigma": config.sigma,
        "L": config.smoothness,
        "gap": config.gap,
    }
    drags = plain | {"epsilon": config.epsilon}
    most = drags | {"C": config.lengths(1)[1]}
    return [
        SgdRate("SGD without draggers (Bu et al.)", _if_it_applies(rates.bu_et_al, plain)),
        SgdRate("SGD with draggers, as printed", _if_it_applies(rates.sgd_with_draggers, drags)),
        SgdRate(
            "SGD with draggers, corrected, in the form of Bu et al.",
            _if_it_applies(corrected.sgd_with_draggers_simple, most),
        ),
        # compare with the last one, which lacks the slack of this form
        SgdRate("SGD with draggers, corrected", _if_it_applies(corrected.sgd_with_draggers, most)),
    ]


def best(found: Sequence[TheoryRow], kind: str) -> TheoryRow | None:
    """Return the row with the smallest sum of bias and transient; the smallest b of ties."""
    sums = {row.b: bound.total for row in found if (bound := row.bounds[kind]) is not None}
    return min((row for row in found if row.b in sums), key=lambda row: sums[row.b], default=None)


def sentences(config: TheoryConfig, found: Sequence[TheoryRow]) -> list[str]:
    """Return a summary of the table in words."""
    said = []
    for kind, name in KINDS.items():
        row = best(found, kind)
        if row is None:
            said.append(
                f"Bound {name}: applies to none of these b, since it needs epsilon > 1/(b+1)."
            )
            continue
        bound = row.bounds[kind]
        assert bound is not None
        where = (
            "the largest b requested"
            if row.b == found[-1].b
            else "the smallest b it applies to"
            if row.b == next(other.b for other in found if other.bounds[kind] is not None)
            else "a best b in between"
        )
        said.append(f"Bound {name}: smallest at b = {row.b} ({bound.total:.3g}), {where}.")
    if any(row.bounds["printed"] is None for row in found) and best(found, "printed"):
        limit = max(row.b for row in found if row.bounds["printed"] is None)
        said.append(
            f"The printed theorem says nothing about b <= {limit}: it needs epsilon > 1/(b+1), "
            f"and epsilon is {config.epsilon:g}."
        )
    return said


def write_csv(found: Sequence[TheoryRow]) -> str:
    """Return the whole table as CSV, with full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    parts = [f"{kind}_{part}" for kind in KINDS for part in ("bias", "transient", "total")]
    writer.writerow(["b", "c", "C", *parts, "measured_unit", "measured_min"])
    for row in found:
        cells: list[float | str] = []
        for kind in KINDS:
            bound = row.bounds[kind]
            cells += ["", "", ""] if bound is None else [bound.bias, bound.transient, bound.total]
        measured = ["" if m is None else m for m in (row.measured, row.measured_min)]
        writer.writerow([row.b, row.c, row.C, *cells, *measured])
    return text.getvalue()


def _if_it_applies(rate: Callable[..., Bound], values: dict[str, float]) -> Bound | None:
    """Return the rate, or None where its condition fails; values were checked before."""
    try:
        return rate(**values)
    except ValueError:
        return None
