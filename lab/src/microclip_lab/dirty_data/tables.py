"""The result: every arm against tuned plain training, per task and overall. Pure functions.

Differences are paired by seed and have 95 % t-intervals. An arm's share of the headroom is its mean
gain over that of the oracle; it is given where the oracle's interval lies above 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from microclip.report.statistics import Estimate, estimate
from microclip_lab.dirty_data.arms import ARMS, ORACLE, arms_of
from microclip_lab.dirty_data.records import Record, Records
from microclip_lab.dirty_data.task import Purpose, Task
from microclip_lab.tuned_arms.search import PLAIN, evaluated, tuned

Runs = Mapping[int, Record]  # by seed
Figure = Callable[[Record], float]

HEADINGS: dict[Purpose, str] = {
    "noisy": "Noisy tasks",
    "clean": "Clean tasks",
    "failure": "Noisy tasks where we expect no gain",
}


def difference(runs: Runs, figure: Figure, base: Runs, base_figure: Figure) -> Estimate | None:
    """Return how much better some runs are than others of the same seeds; None if any diverged."""
    pairs = [(figure(runs[s]), base_figure(base[s])) for s in sorted(runs.keys() & base.keys())]
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        return None
    return estimate([one - other for one, other in pairs])


def summarize(records: Records, tasks: Sequence[Task], seeds: int) -> dict[str, Any]:
    """Return all figures of the table as JSON."""
    found = [_of_task(records, task, seeds) for task in tasks]
    found = [each for each in found if each["arms"]]
    return {"seeds": seeds, "tasks": found, "overall": _overall(found)}


def _of_task(records: Records, task: Task, seeds: int) -> dict[str, Any]:
    by_arm = {arm.name: evaluated(records, task, arm.name, seeds) for arm in arms_of(task)}
    plain = by_arm[PLAIN]
    headroom = difference(by_arm.get(ORACLE, {}), _last, plain, _last)
    has_headroom = headroom is not None and headroom.low is not None and headroom.low > 0
    arms = {}
    for name, runs in by_arm.items():
        if not runs or not plain:
            continue
        rate = tuned(records, task, name)
        gain = difference(runs, _last, plain, _last)
        share = None
        if has_headroom and gain is not None and headroom is not None:
            share = 100 * gain.mean / headroom.mean
        arms[name] = {
            "rate": rate.rate,
            "rate_at_edge": rate.is_at_edge,
            "seeds": len(runs),
            "diverged": sum(not math.isfinite(run.last) for run in runs.values()),
            "last": _mean(runs, _last),
            "early_stopped": _mean(runs, _early),
            "gain": _json(gain),
            "share": share,
            "gain_over_early_stopped_plain": _json(difference(runs, _last, plain, _early)),
            "gain_early_stopped": _json(difference(runs, _early, plain, _early)),
            "notes": _notes(runs),
            "seconds": statistics.fmean(run.seconds for run in runs.values()),
        }
    return {
        "task": task.name,
        "title": task.title,
        "purpose": task.purpose,
        "kind": task.kind,
        "description": task.description,
        "has_headroom": has_headroom,
        "arms": arms,
    }


def _last(record: Record) -> float:
    return record.last


def _early(record: Record) -> float:
    return record.early_stopped


def _mean(runs: Runs, figure: Figure) -> float | None:
    values = [figure(run) for run in runs.values()]
    return statistics.fmean(values) if all(map(math.isfinite, values)) else None


def _notes(runs: Runs) -> dict[str, float]:
    names = sorted({name for run in runs.values() for name in run.notes})
    return {
        name: statistics.fmean(run.notes[name] for run in runs.values() if name in run.notes)
        for name in names
    }


def _json(found: Estimate | None) -> dict[str, float | int | None] | None:
    if found is None:
        return None
    return {"mean": found.mean, "low": found.low, "high": found.high, "seeds": found.count}


def _overall(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up each arm over all noisy tasks, and over all clean ones."""
    found = {}
    for name in ARMS:
        if name == PLAIN:
            continue
        own = [(task, task["arms"][name]) for task in tasks if name in task["arms"]]
        noisy = [arm for task, arm in own if task["purpose"] == "noisy"]
        clean = [arm for task, arm in own if task["purpose"] == "clean"]
        shares = [arm["share"] for arm in noisy if arm["share"] is not None]
        if own:
            found[name] = {
                "mean_share": statistics.fmean(shares) if shares else None,
                "tasks_with_headroom": len(shares),
                "noisy_tasks": len(noisy),
                "gains": _count(noisy, "gain", is_above),
                "losses": _count(noisy, "gain", is_below),
                "gains_over_early_stopped_plain": _count(
                    noisy, "gain_over_early_stopped_plain", is_above
                ),
                "clean_tasks": len(clean),
                "clean_losses": _count(clean, "gain", is_below),
                "clean_worst": min(
                    (arm["gain"]["mean"] for arm in clean if arm["gain"]), default=None
                ),
            }
    return found


def is_above(gain: Mapping[str, Any] | None) -> bool:
    """Return whether an interval is above 0."""
    return gain is not None and gain["low"] is not None and gain["low"] > 0


def is_below(gain: Mapping[str, Any] | None) -> bool:
    """Return whether an interval is below 0."""
    return gain is not None and gain["high"] is not None and gain["high"] < 0


def _count(arms: Sequence[Mapping[str, Any]], name: str, test: Callable[[Any], bool]) -> int:
    return sum(test(arm[name]) for arm in arms)


# ---- Markdown


def markdown(summary: Mapping[str, Any]) -> str:
    """Return the tables as a page of Markdown."""
    counts = {arm["seeds"] for task in summary["tasks"] for arm in task["arms"].values()}
    fewest, most = min(counts, default=0), max(counts, default=0)
    seeds = f"{most}" if fewest == most else f"{fewest} to {most}"
    lines = [
        "# What helps on dirty data?",
        "",
        f"Points over tuned plain training with 95 % intervals over {seeds} seeds, at "
        "the last step; bold: the interval excludes 0. In parentheses the share of what an oracle "
        "gains, where it gains anything.",
        "",
        "## Overall",
        "",
        *_overall_table(summary["overall"]),
    ]
    for purpose, heading in HEADINGS.items():
        own = [task for task in summary["tasks"] if task["purpose"] == purpose]
        if own:
            lines += ["", f"## {heading}"]
        for task in own:
            lines += ["", f"### {task['title']}", "", task["description"], "", *_task_table(task)]
    return "\n".join(lines) + "\n"


def _overall_table(overall: Mapping[str, Any]) -> list[str]:
    rows = [
        "| arm | mean share of headroom | gains on noisy tasks | harms | above early-stopped plain "
        "| clean tasks harmed | worst on clean tasks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in overall.items():
        share = "-" if own["mean_share"] is None else f"{own['mean_share']:.0f} %"
        worst = "-" if own["clean_worst"] is None else f"{own['clean_worst']:+.2f}"
        rows.append(
            f"| {ARMS[name].title} | {share} ({own['tasks_with_headroom']} tasks) "
            f"| {own['gains']} of {own['noisy_tasks']} | {own['losses']} "
            f"| {own['gains_over_early_stopped_plain']} "
            f"| {own['clean_losses']} of {own['clean_tasks']} | {worst} |"
        )
    return rows


def _task_table(task: Mapping[str, Any]) -> list[str]:
    rows = [
        "| arm | rate | last step | over plain | over early-stopped plain | best noisy checkpoint, "
        "over plain's | wrong labels learned |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, arm in task["arms"].items():
        share = "" if arm["share"] is None or name == PLAIN else f" ({arm['share']:.0f} %)"
        learned = arm["notes"].get("wrong_fitted")
        gain = "-" if name == PLAIN else f"{_formatted(arm['gain'])}{share}"
        early = "-" if name == PLAIN else _formatted(arm["gain_early_stopped"])
        edge = " (edge)" if arm["rate_at_edge"] else ""
        last = "diverged" if arm["last"] is None else f"{arm['last']:.2f}"
        rows.append(
            f"| {ARMS[name].title} | {arm['rate']:g}{edge} | {last} | {gain} "
            f"| {_formatted(arm['gain_over_early_stopped_plain'])} | {early} "
            f"| {'-' if learned is None else f'{learned:.0f} %'} |"
        )
    return rows


def _formatted(gain: Mapping[str, Any] | None) -> str:
    """Return "+1.23 ± 0.45", bold if the interval excludes 0."""
    if gain is None:
        return "diverged"
    if gain["low"] is None:
        return f"{gain['mean']:+.2f}"
    text = f"{gain['mean']:+.2f} ± {gain['high'] - gain['mean']:.2f}"
    return f"**{text}**" if is_above(gain) or is_below(gain) else text
