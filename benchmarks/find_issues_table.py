"""Tables of the benchmark of find_issues, in markdown: means over seeds with 95 % t-intervals.

Knows nothing about how records were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from find_issues_trial import (
    CLEANLAB,
    DRAGGERS,
    EL2N,
    LAST,
    LOSSES,
    PREDICTIONS,
    TITLES,
    WHOLE,
)
from microclip.report.statistics import estimate

Record = dict[str, Any]
METHODS = {  # and what each costs beyond the training run, in runs
    PREDICTIONS: "0",
    LOSSES: "0",
    DRAGGERS: "0",
    WHOLE: "0",
    LAST: "0",
    EL2N: "0.01",
    CLEANLAB: "4",
}
FREE = (WHOLE, LAST, EL2N)  # rivals that train nothing
AT_TRUE = "precision at the true number"
NOTHING = "-"


def tables(records: list[Record], costs: list[Record]) -> str:
    """Return the whole page."""
    tuned = [r for r in records if r["factor"] == 1 and r["wrong"]]
    parts = ["# Who finds the wrong examples?", INTRODUCTION]
    parts += _findings(tuned)
    parts += _summary(tuned)
    parts += _retraining(tuned)
    parts += _rates(records)
    parts += _clean([r for r in records if not r["wrong"]])
    if costs:
        parts += _costs(costs[-1])
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """Means over seeds with 95 % t-intervals. *Number*: estimated over true number of
wrong examples, and how often the interval covers the truth. *Calibration error*: the expected
error of probabilities, ten bins. *Cost*: training runs beyond the one that is recorded."""


def _tasks(records: Iterable[Record]) -> list[str]:
    there = {r["task"] for r in records}
    return [task for task in TITLES if task in there]


def _of(records: Iterable[Record], task: str) -> list[Record]:
    return sorted((r for r in records if r["task"] == task), key=lambda r: r["seed"])


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heading) + " |", "|" + " --- |" * len(heading)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _interval(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    if not values:
        return NOTHING
    found = estimate(values)
    half = f" ± {found.high - found.mean:.{digits}f}" if found.high is not None else ""
    return f"{found.mean:{sign}.{digits}f}{half}"


def _values(runs: list[Record], method: str, what: str) -> list[float]:
    found = (run["methods"].get(method, {}).get(what) for run in runs)
    return [float(value) for value in found if value is not None]


def _ratios(runs: list[Record], method: str) -> list[float]:
    there = [r for r in runs if "estimated" in r["methods"].get(method, {})]
    return [r["methods"][method]["estimated"] / r["wrong"] for r in there]


def _findings(records: list[Record]) -> list[str]:
    """One table of all tasks and methods."""
    rows = []
    for task in _tasks(records):
        runs = _of(records, task)
        share = 100 * sum(r["wrong"] / r["examples"] for r in runs) / len(runs)
        title = f"**{TITLES[task]}** ({share:.0f} % of {runs[0]['examples']:,}; {len(runs)} seeds)"
        for method, extra in METHODS.items():
            if not any(method in run["methods"] for run in runs):
                continue
            covers = _values(runs, method, "covers")
            ratio = _interval(_ratios(runs, method), 2)
            cells = (
                *(_interval(_values(runs, method, what)) for what in ("auroc", AT_TRUE)),
                *(_interval(_values(runs, method, what), 2) for what in ("precision", "recall")),
                f"{ratio} ({sum(covers):.0f} of {len(covers)})" if covers else ratio,
                _interval(_values(runs, method, "calibration")),
                extra,
            )
            rows.append((title, method, *cells))
            title = ""
    heading = ("task", "method", "AUROC", AT_TRUE, "precision of the flagged", "recall",
               "number (covered)", "calibration error", "cost")  # fmt: skip
    return [_table(heading, rows)]


def _best(run: Record) -> Record:
    return run["methods"].get(PREDICTIONS) or run["methods"][LOSSES]


def _summary(records: list[Record]) -> list[str]:
    """Paired differences to rivals that cost nothing, and to cleanlab."""
    rows = []
    for task in _tasks(records):
        runs, cells = _of(records, task), [TITLES[task]]
        for rival in (*FREE, CLEANLAB):
            both = [r for r in runs if rival in r["methods"]]
            for what in ("auroc", AT_TRUE):
                differences = [_best(r)[what] - r["methods"][rival][what] for r in both]
                cells.append(_interval(differences, 4 if what == "auroc" else 3, "+"))
        rows.append(cells)
    heading = ["task"]
    for rival in (*FREE, CLEANLAB):
        heading += [f"{rival}: AUROC", AT_TRUE]
    said = "find_issues (with predictions where there are any) minus the other, seed by seed."
    return ["## Differences", said, _table(heading, rows)]


def _retraining(records: list[Record]) -> list[str]:
    rows = []
    names = ("without the flagged", "without the flagged by cleanlab", "without the truly wrong")
    for task in _tasks(records):
        runs = _of(records, task)
        cells = [TITLES[task], _interval([r["points"]["plain"] for r in runs], 2)]
        for name in names:
            both = [r["points"] for r in runs if name in r["points"]]
            cells.append(_interval([p[name] - p["plain"] for p in both], 2, "+"))
        rows.append(cells)
    said = """Test accuracy in percent (speech: minus the word error rate) of plain training on all
examples, and what is gained without some of them, same seeds and rate."""
    return ["## Retraining", said, _table(("task", "all", *names), rows)]


def _rates(records: list[Record]) -> list[str]:
    factors = sorted({r["factor"] for r in records})
    if len(factors) < 2:
        return []
    rows = []
    for task in _tasks(r for r in records if r["wrong"] and r["factor"] != 1):
        runs = _of(records, task)
        for method in (PREDICTIONS, LOSSES):
            cells = [
                _interval(_ratios([r for r in runs if r["factor"] == factor], method), 2)
                for factor in factors
            ]
            if any(cell != NOTHING for cell in cells):
                rows.append((TITLES[task], method, *cells))
    heading = ("task", "method", *(f"rate x {factor:g}" for factor in factors))
    said = "Estimated over true number of wrong examples, at other learning rates than the tuned."
    return ["## Learning rates", said, _table(heading, rows)]


def _clean(records: list[Record]) -> list[str]:
    rows = []
    for task in _tasks(records):
        runs = _of(records, task)
        for method in (PREDICTIONS, LOSSES):
            cells = (
                _interval([100 * r["methods"][method][what] / r["examples"] for r in runs], 2)
                for what in ("flagged", "estimated")
            )
            rows.append((TITLES[task], method, *cells))
    if not rows:
        return []
    heading = ("task", "method", "flagged, %", "estimated to be wrong, %")
    return ["## Without wrong labels", _table(heading, rows)]


def _costs(found: Record) -> list[str]:
    def cell(values: Sequence[float]) -> str:
        return f"{values[0]:.2f} ({values[1]:.2f} to {values[2]:.2f})"

    rows = [
        (way, cell(found["inside the ledger, %"][way]), cell(more))
        for way, more in found["more by the clock, %"].items()
    ]
    step = found["milliseconds of a plain step"]
    said = f"""A small convolutional network, 64 images a step, {step[0]:.1f} ms a plain step on
one core; {found["cycles"]} cycles of 64 steps each way, taking turns, each ending with a flush."""
    heading = ("recorded", "processor time in the ledger, % of a step", "more by the clock, %")
    return ["## Cost of recording", said, _table(heading, rows)]
