"""What to do, as Markdown: by kind of data, by rule, and whether one can tell beforehand.

Used by the page, by the guide for users and by the README, so that they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from microclip.probing import Forecast, Thumb
from microclip_lab.evidence.arms import ARMS, ORACLE
from microclip_lab.evidence.by_kind import ADVISED, NAMES, Decision
from microclip_lab.evidence.catalog import Study
from microclip_lab.evidence.plan import effect, outcome_of
from microclip_lab.evidence.records import Records
from microclip_lab.evidence.when_to_clip import Case, commonest
from microclip_lab.evidence.wording import between, bold, percent, table, whole

# ---- by kind


def kinds_table(found: Sequence[Decision]) -> list[str]:
    """Return the decision table: a kind of data, what to do, and the figures it rests on."""
    rows = [(each.kind.title, each.to_do, figures_behind(each)) for each in found if each.known]
    return table(("your data and training", "what to do", "less error than tuned plain"), rows)


def figures_behind(found: Decision) -> str:
    """Return the effects that a decision rests on, each with its task."""
    parts = []
    if found.arm is not None:
        own = [
            f"{whole(each.effects[found.arm].mean)} `{each.task}`"
            for each in found.known
            if found.arm in each.effects
        ]
        parts.append(", ".join(own))
    for arm in ADVISED:
        if arm != found.arm and (told := _clear(found, arm)):
            parts.append(f"{NAMES[arm]}: {told}")
    if not parts:
        tasks = ", ".join(f"`{each.task}`" for each in found.known)
        parts.append(f"no clear effect: {tasks}")
    return ". ".join(parts)


def _clear(found: Decision, arm: str) -> str:
    """Return a rule's clear harms, and its clear gains where the advised one was not run."""
    return ", ".join(
        f"{whole(each.effects[arm].mean)} `{each.task}`"
        for each in found.known
        if each.outcomes.get(arm) == "harm"
        or (each.outcomes.get(arm) == "gain" and found.arm not in each.effects)
    )


def short_list(found: Sequence[Decision]) -> list[str]:
    """Return what to do in a few bullets: the kinds of data that each rule is for."""
    groups: dict[str, list[str]] = {}
    for each in found:
        if each.known:
            groups.setdefault(each.to_do, []).append(_kind_with_range(each))
    order = sorted(groups, key=lambda to_do: (to_do.startswith("plain"), -len(groups[to_do])))
    return [f"* **{_sentence(to_do)}**: {'; '.join(groups[to_do])}." for to_do in order]


def _sentence(to_do: str) -> str:
    return to_do[:1].upper() + to_do[1:]


def _kind_with_range(found: Decision) -> str:
    title = found.kind.title[:1].lower() + found.kind.title[1:]
    if found.arm is None:
        return title
    values = [each.effects[found.arm].mean for each in found.known if found.arm in each.effects]
    tasks = "a task" if len(values) == 1 else f"{len(values)} tasks"
    return f"{title} ({between(values)} on {tasks})"


def all_effects(found: Sequence[Decision]) -> list[str]:
    """Return a table of all effects for each kind."""
    lines = []
    for each in found:
        if not each.known:
            continue
        rows = [
            (one.task, *(bold(one.effects.get(arm), "") for arm in ADVISED)) for one in each.known
        ]
        lines += [
            "",
            f"**{each.kind.title}**",
            "",
            *table(("task", "Unit", "MinNorm", "History"), rows),
        ]
        left = [f"no headroom: {', '.join(each.without_headroom)}"] if each.without_headroom else []
        left += [f"not run: {', '.join(each.not_run)}"] if each.not_run else []
        if left:
            said = "; ".join(left)
            lines += ["", f"{said[:1].upper()}{said[1:]}."]
    return lines


# ---- by rule


def by_rule(records: Records, studies: Sequence[Study]) -> list[str]:
    """Return what came of each rule on the plan's tasks, in a bullet each."""
    lines = []
    rules = ("unit-4", "unit-1", "unit-16", "minnorm-4", "minnorm-1", "minnorm-16", "loss-history")
    for arm in rules:
        tried = [s for s in studies if arm in s.arms and effect(records, s, arm) is not None]
        if tried:
            lines.append(f"* **{ARMS[arm].title}**: {_came(records, tried, arm)}.")
    return lines


def sweet_spot(records: Records, studies: Sequence[Study]) -> str:
    """Say on which tasks the paper's rule gains at a size above 1 and harms at b = 1."""
    there, tried = [], 0
    for study in studies:
        found = {b: effect(records, study, f"minnorm-{b}") for b in (1, 4, 16)}
        one = found.pop(1)
        larger = {b: each for b, each in found.items() if each is not None}
        if one is None or not larger or ORACLE not in study.arms:
            continue
        tried += 1
        b, best = max(larger.items(), key=lambda pair: pair[1].mean)
        if best.low > 0 and one.high < 0:
            there.append(f"`{study.name}` (b = {b} {whole(best.mean)}, b = 1 {whole(one.mean)})")
    said = (
        "**The paper's sweet spot**, a clear gain of `MinNorm` at a size above 1 (the better of 4 "
        f"and 16) and a clear harm at b = 1, appears on {len(there)} of the {tried} tasks with bad "
        "examples on which b = 1 and a larger size were run"
    )
    return f"{said}: {', '.join(there)}." if there else f"{said}."


def counts(records: Records, studies: Sequence[Study], arm: str) -> str:
    """Return on how many of the plan's tasks a rule gained and harmed."""
    came = [
        outcome_of(records, study, arm)
        for study in studies
        if arm in study.arms and effect(records, study, arm) is not None
    ]
    gains, harms = came.count("gain"), came.count("harm")
    name = ARMS[arm].title.replace(",", " at")
    return f"{name} gained on {gains} of the plan's {len(came)} tasks and harmed {harms}"


def _came(records: Records, tried: Sequence[Study], arm: str) -> str:
    words = {"gain": "gained", "harm": "harmed", "nothing": "no difference", "undecided": "unclear"}
    parts = []
    for came, said in words.items():
        own = [study for study in tried if outcome_of(records, study, arm) == came]
        if own and came in ("gain", "harm"):
            told = ", ".join(_with_effect(records, study, arm) for study in own)
            parts.append(f"{said} on {len(own)} of {len(tried)} ({told})")
        elif own:
            parts.append(f"{said} on {len(own)} ({', '.join(study.name for study in own)})")
    return "; ".join(parts)


def _with_effect(records: Records, study: Study, arm: str) -> str:
    found = effect(records, study, arm)
    return study.name if found is None else f"{study.name} {whole(found.mean)}"


# ---- beforehand


def forecast_lines(forecasts: Sequence[Forecast]) -> list[str]:
    """Return what each rule of thumb says, and its record."""
    return [f"* **{each.rule}, b = 4**: {_forecast(each)}" for each in forecasts]


def _forecast(found: Forecast) -> str:
    if found.thumb is None:
        return (
            f"no rule of thumb yet: {found.fitted_on} tasks with a clear result to fit one on are "
            "too few."
        )
    return f"{thumb_words(found.thumb)} Fitted on {found.fitted_on} tasks. It was {found.record}."


def thumb_words(thumb: Thumb) -> str:
    """Return a rule of thumb in a sentence."""
    figure = {
        "top_decile": "the top tenth's share of the gradient energy",
        "min_over_mean_4": "the smallest over the mean micro-batch norm",
        "rise_of_top_decile": "the rise of the top tenth's share since the first epoch",
    }[thumb.figure]
    if thumb.gain_from == -math.inf:
        return "expect a gain, whatever the figures."
    parts = []
    if thumb.gain_from < math.inf:
        parts.append(f"a gain from {thumb.gain_from:.2f} up")
    if thumb.harm_below > -math.inf:
        limit = "whatever the figures" if thumb.harm_below == math.inf else ""
        parts.append(f"harm {limit or f'below {thumb.harm_below:.2f}'}")
    return f"by {figure}, expect {', '.join(parts) or 'nothing, whatever its value'}."


def cases_tables(known: Sequence[Case], forecasts: Sequence[Forecast]) -> list[str]:
    """Return a table for each rule: the figures of every task, what they predict, what came."""
    lines = []
    for each in forecasts:
        own = [case for case in known if ARMS[case.rule].title.startswith(f"{each.rule},")]
        rows = []
        for case in own:
            said = "-" if each.thumb is None else str(each.thumb.predicts(case.figures))
            seen = "fit" if case.half == "fit" else said
            figures = percent(case.figures["top_decile"]), f"{case.figures['min_over_mean_4']:.2f}"
            rows.append((case.task, *figures, seen, case.came))
        headings = ("task", "top 10 %", "min", "said", "came")
        lines += ["", f"**{each.rule}, b = 4**{_planned(own, each)}", "", *table(headings, rows)]
    return lines


def _planned(own: Sequence[Case], found: Forecast) -> str:
    """Compare as it was planned: with the most common outcome of the tasks to fit on."""
    fit = [case for case in own if case.half == "fit"]
    rest = [case for case in own if case.half != "fit"]
    if found.thumb is None or not rest:
        return ""
    usual = commonest(fit)
    right = sum(case.came == usual for case in rest)
    return (
        f": right on {found.right} of {len(rest)}. Always saying the most common outcome of the "
        f'tasks it was fitted on, "{usual}", is right on {right}; the best constant answer, '
        f'"{found.guess}", on {found.guess_right}.'
    )
