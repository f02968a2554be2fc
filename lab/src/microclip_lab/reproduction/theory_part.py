"""Table 1 of the paper: its rates by b, corrected ones, and simulations.

Also the statements that fail, each with a counterexample. Everything is computed on demand from
`microclip_lab.theory`, without any records.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from microclip_lab.theory.config import TheoryConfig
from microclip_lab.theory.counterexamples import Claim, all_claims
from microclip_lab.theory.rates import Bound
from microclip_lab.theory.table import best, lines, rows

RUNS = 16  # simulated runs per row
SEED = 0
DIGITS = 4  # kept of simulated values: further ones differ between machines


@dataclass(frozen=True)
class Case:
    """The constants of an instance, and why it is interesting."""

    name: str
    why: str
    config: TheoryConfig


@dataclass(frozen=True)
class RateRow:
    """The bounds of clipping at one b, and measurements; None: does not apply."""

    b: int
    printed: float | None
    corrected: float | None
    symmetric: float | None
    unit: float  # min_t E|g_t|, measured with the update of the theorem
    smallest: float  # and with that of Algorithm 1, which no theorem covers


@dataclass(frozen=True)
class RateLine:
    """A rate of SGD, which does not depend on b."""

    name: str
    bound: float | None
    measured: float


@dataclass(frozen=True)
class RateTable:
    """Table 1, computed for one instance."""

    case: Case
    inputs: Mapping[str, float]
    rows: tuple[RateRow, ...]
    lines: tuple[RateLine, ...]
    best: Mapping[str, int | None]  # the b with the smallest bound, by kind


CASES = (
    Case(
        "rare, long draggers",
        "one example in ten is a dragger, twenty times as long as the mean gradient: small "
        "micro-batches isolate draggers, large ones average noise, and the corrected bound has its "
        "minimum in between; the printed theorem does not apply to b below 10",
        TheoryConfig(epsilon=0.1, c=20.0, sigma=1.0, gap=10.0, steps=100, batch_size=64),
    ),
    Case(
        "most examples drag",
        "more than half of the examples are draggers, so the printed theorem applies to every b; "
        "c is what the paper measured at b = 4",
        TheoryConfig(
            epsilon=0.6,
            c=5.74,
            sigma=1.0,
            gap=10.0,
            steps=400,  # with fewer, c exceeds what SGD's rate is proven for
            batch_size=64,
            microbatch_sizes=(1, 4, 16, 64),
        ),
    ),
)


@functools.cache
def rate_tables() -> tuple[RateTable, ...]:
    """Return the rates of both instances; takes a few seconds."""
    return tuple(_rate_table(case) for case in CASES)


def failing_statements() -> tuple[Claim, ...]:
    """Return statements of the paper that fail, each with a counterexample."""
    return tuple(claim for claim in all_claims() if not claim.holds)


def _rate_table(case: Case) -> RateTable:
    from microclip.rules import MinNorm, Rule, Unit
    from microclip_lab.theory.simulator import World, simulate

    config = case.config
    c, C = config.lengths(1)
    world = World(config.epsilon, c, C, config.sigma, L=config.smoothness, gap=config.gap)

    def measured(b: int | None, rule: Rule | None) -> float:
        report = simulate(
            world, T=config.steps, B=config.batch_size, b=b, rule=rule, runs=RUNS, seed=SEED
        )
        return _rounded(report.least_norm)

    plain = measured(None, None)
    undragged = World(0.0, c, C, config.sigma, L=config.smoothness, gap=config.gap)
    without = simulate(undragged, T=config.steps, B=config.batch_size, runs=RUNS, seed=SEED)
    found = rows(config)
    return RateTable(
        case,
        {
            "epsilon": config.epsilon,
            "c": c,
            "C": C,
            "sigma": config.sigma,
            "L": config.smoothness,
            "L_0 - L_*": config.gap,
            "T": config.steps,
            "B": config.batch_size,
        },
        tuple(
            RateRow(
                row.b,
                _total(row.bounds["printed"]),
                _total(row.bounds["corrected"]),
                _total(row.bounds["symmetric"]),
                measured(row.b, Unit()),
                measured(row.b, MinNorm()),
            )
            for row in found
        ),
        tuple(
            RateLine(
                line.name,
                _total(line.bound),
                _rounded(without.least_norm) if "without draggers" in line.name else plain,
            )
            for line in lines(config)
        ),
        {
            kind: None if (row := best(found, kind)) is None else row.b
            for kind in ("printed", "corrected", "symmetric")
        },
    )


def _total(bound: Bound | None) -> float | None:
    return None if bound is None else bound.total


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
