"""The page's last part: every task with every arm, and how it was decided."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from microclip_lab.evidence.arms import ARMS, BASELINES, ORACLE, PLAIN
from microclip_lab.evidence.catalog import Study
from microclip_lab.evidence.plan import (
    AT_CLEAN_RATE,
    HEADROOM,
    clean_rate,
    compared,
    effect,
    gate,
    last_error,
)
from microclip_lab.evidence.records import LAST, Record, Records
from microclip_lab.evidence.sequential import ALPHA
from microclip_lab.evidence.wording import bold, percent, shown, table
from microclip_lab.tuned_arms.search import evaluated, is_tuned, scores_of, tuned

RULES = ("minnorm-1", "minnorm-4", "minnorm-16", "unit-1", "unit-4", "unit-16", "loss-history")


def method() -> list[str]:
    """Say how it was decided."""
    return [
        "",
        "## How it was decided",
        "",
        "* **Gate.** A task with draggers counts only if an oracle, which weights them 0 in the "
        f"same batches, has an error at least {HEADROOM:.0f} % below plain training's, with an "
        "interval above 0.",
        "* **Tuning.** Every arm has its own learning rate, in factors of 2, by noisy validation "
        "data at the last step, four tuning seeds, until both neighbors of the best are worse.",
        "* **Effects** are relative to plain training's error, paired by seed (same data, initial "
        "weights and batches), on clean test data at the last step.",
        "* **Seeds** are added in blocks until an interval is above 0, below 0, or within half of "
        "the paper's effect. Intervals hold at all looks together (Bonferroni, "
        f"{percent(1 - ALPHA)}); claims are not corrected for their number. Amended after 15 "
        "tasks: they are also added while a claim about the arm is undecided, up to the same last "
        "look.",
        "* **Refuted** means that the interval includes 0, or lies on the other side of it, and "
        "ends below half of the effect that the paper reports.",
        "* **Amended after 15 tasks**, too: an effect that is clearly there, but clearly less than "
        "half of the paper's, is called so; by the plan it counts as *holds*. A gate that no look "
        "decided is called undecided, not *no headroom*, and an arm that diverged counts as harm.",
        "* **Added after the first 23 tasks**, before their own runs: `speech-scratch`, `t5`, "
        "`t5-flips` and `t5-clean`, and `LossHistory` on all tasks that had been planned without "
        "it. They have no part in fitting forecasts.",
        "* The gate uses plain training's own runs. By simulation, a useless arm on a task that "
        "barely passes is called a gain in up to one case of five; from 10 % headroom on, as "
        "rarely as intended.",
        "* Every figure comes from `results/evidence/TASK.jsonl`. "
        "`benchmarks/evidence.py --rerun` repeats a random run and compares it bit for bit, with "
        "each engine in turn: a clipped run took the one that was faster at the time, and they "
        "differ in the last bits.",
    ]


def task_section(records: Records, study: Study) -> list[str]:
    """Show a task: its gate, every arm, the best baseline, and the paper's protocol."""
    plain = evaluated(records, study, PLAIN)
    lines = ["", f"### {study.task.title}", "", f"`{study.name}`. {study.task.description}", ""]
    lines.append(_gate_words(records, study, list(plain.values())))
    rows, checkpoints = [], []
    for arm in study.arms:
        runs = evaluated(records, study, arm)
        if not runs:
            continue
        found = effect(records, study, arm)
        seeds = range(found.count) if found else runs
        error = statistics.fmean(last_error(runs[seed]) for seed in seeds)
        beside = statistics.fmean(last_error(plain[seed]) for seed in seeds if seed in plain)
        said = "-" if arm == PLAIN else f"{bold(found)}, {found.count if found else 0} seeds"
        rate = tuned(records, study, arm)
        edge = ", at the edge" if rate.is_at_edge else ""
        rows.append(
            (f"{ARMS[arm].title} ({rate.rate:g}{edge})", f"{error:.2f} / {beside:.2f}", said)
        )
        if arm != PLAIN:
            checkpoints.append((ARMS[arm].title, *_best(records, study, arm)))
    lines += [
        "",
        *table(("arm (rate)", "error / plain's, same seeds", "less than plain's, last step"), rows),
    ]
    if checkpoints:
        lines += [
            "",
            "Less error than plain training at the checkpoint that is best on validation data:",
            "",
            *table(("arm", "noisy data", "clean data"), checkpoints),
        ]
    return lines + _baseline(records, study) + _clean_rate(records, study)


def _gate_words(records: Records, study: Study, plain: Sequence[Record]) -> str:
    if ORACLE not in study.arms:
        return "Not gated: no claim about draggers is tested on it."
    said = f"Gate: **{gate(records, study)}**; oracle {shown(effect(records, study, ORACLE))}."
    for name, when in (("first/share", "after one epoch"), ("early/share", "after a quarter")):
        shares = [run.notes[name] for run in plain if name in run.notes]
        if shares:
            said += f" Draggers' share of the gradient energy {when}: "
            said += f"S = {statistics.fmean(shares):.2f}."
    return said


def _best(records: Records, study: Study, arm: str) -> list[str]:
    return [
        shown(effect(records, study, arm, figure=lambda run, name=name: run.test[name]))  # type: ignore[misc]
        for name in ("best_noisy", "best_clean")
    ]


def _baseline(records: Records, study: Study) -> list[str]:
    """Compare the rules with the best of plain, decay, smoothing and averaging, by validation."""
    ready = [arm for arm in BASELINES if arm in study.arms and is_tuned(records, study, arm)]
    if len(ready) < 2:
        return []
    best = max(ready, key=lambda arm: max(scores_of(records, study, arm).values()))
    if best == PLAIN:
        return ["", "No regularized baseline is better than plain training on validation data."]
    told = [
        f"{ARMS[arm].title} {bold(found)}"
        for arm in RULES
        if arm in study.arms and (found := effect(records, study, arm, best)) is not None
    ]
    against = f"Against the best baseline on validation data, {ARMS[best].title}: "
    return ["", f"{against}{'; '.join(told)}."] if told else []


def _clean_rate(records: Records, study: Study) -> list[str]:
    """Compare at the clean task's rate, as the paper did."""
    rate = clean_rate(records, study)
    if rate is None:
        return []
    plain = evaluated(records, study, PLAIN, rate=rate)
    told = []
    for arm in AT_CLEAN_RATE[1:]:
        found, _ = compared(plain, evaluated(records, study, arm, rate=rate), study.looks)
        if found is not None:
            told.append(f"{ARMS[arm].title} {bold(found)}")
    if not told:
        return []
    error = statistics.fmean(run.test[LAST] for run in plain.values())
    return ["", f"All at the clean task's rate, {rate:g} (plain {error:.2f}): {'; '.join(told)}."]
