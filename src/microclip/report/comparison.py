"""Comparing runs: the last value of a metric by setting, over seeds, against plain training.

Differences are paired, a setting minus plain training with the same seed, so that whatever makes a
seed harder for both cancels out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from microclip.report.runs import Run
from microclip.report.statistics import Estimate, estimate

LOWER = re.compile(
    r"loss|error|perplexity|(?<![a-z])(wer|cer|ppl|nll|mae|mse|rmse)(?![a-z])", re.IGNORECASE
)
TEST = re.compile(r"test", re.IGNORECASE)
VALIDATION = re.compile(r"valid|(^|[^a-z])(val|dev|eval)([^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ only in their seed."""

    microbatch_size: int | None
    name: str
    runs: tuple[Run, ...]
    rule: str | None = None  # the one that weights examples, if any

    @property
    def is_plain(self) -> bool:
        """Whether this is plain training."""
        return self.microbatch_size is None and self.rule is None

    def values(self, metric: str) -> list[tuple[int | None, float]]:
        """Return the last value of a metric in each run, with its seed."""
        return [
            (run.seed, list(run.metrics[metric].values())[-1])
            for run in self.runs
            if run.metrics.get(metric)
        ]


@dataclass(frozen=True)
class ComparisonRow:
    """The value of one setting, and its difference from plain training."""

    setting: Setting
    value: Estimate
    difference: Estimate | None  # None: plain training itself, or no seeds in common


@dataclass(frozen=True)
class Comparison:
    """The settings of a group."""

    group: str | None
    settings: tuple[Setting, ...]  # plain first, then by b, then rules that weight examples
    metrics: tuple[str, ...]  # that all settings have, the one to judge by first

    @property
    def headline(self) -> str:
        """The metric to judge runs by."""
        return self.metrics[0]

    @property
    def is_curve(self) -> bool:
        """Whether there is one setting per b, so that a line can join them."""
        sizes = [setting.microbatch_size for setting in self.settings]
        return len(sizes) == len(set(sizes)) and not self.has_rules

    @property
    def has_rules(self) -> bool:
        """Whether some settings weight examples."""
        return any(setting.rule is not None for setting in self.settings)

    def rows(self, metric: str) -> list[ComparisonRow]:
        """Return a row for every setting."""
        plain = [setting for setting in self.settings if setting.is_plain]
        baseline = plain[0] if len(plain) == 1 else None
        return [
            ComparisonRow(
                setting,
                estimate([value for _, value in setting.values(metric)]),
                None if baseline in (None, setting) else _paired(setting, baseline, metric),
            )
            for setting in self.settings
        ]


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Return a comparison for each group with at least two settings and a common metric."""
    groups: dict[str | None, list[Run]] = {}
    for run in runs:
        if run.described:
            groups.setdefault(run.group, []).append(run)
    found = []
    for group, members in groups.items():
        settings = settings_of(members)
        metrics = _common_metrics(settings)
        if len(settings) > 1 and metrics:
            found.append(Comparison(group, settings, metrics))
    return found


def verdicts(comparison: Comparison) -> list[str]:
    """Sum up the result: a sentence for clipping, and one for each rule that weights examples."""
    rows: dict[str | None, list[ComparisonRow]] = {}
    for row in comparison.rows(comparison.headline):
        if row.difference is not None:
            rows.setdefault(row.setting.rule, []).append(row)
    return [_verdict(comparison, alike) for alike in rows.values()]


def _verdict(comparison: Comparison, rows: Sequence[ComparisonRow]) -> str:
    """Return a sentence on the setting that is best on *validation* data.

    Choosing the best size by the metric it is then judged by would flatter it: among several sizes,
    one is always lucky.
    """
    metric = comparison.headline
    judge = next((m for m in comparison.metrics if VALIDATION.search(m) and m != metric), metric)
    judged = {row.setting: row.value.mean for row in comparison.rows(judge)}
    judge_sign = -1 if lower_is_better(judge) else 1
    # where nothing is left out, b = B is plain training: not a choice, unless it is the only one
    choices = [row for row in rows if _differs(row)] or rows
    best = max(choices, key=lambda row: judge_sign * judged[row.setting])
    assert best.difference is not None
    seeds = f"{best.difference.count} seed{'s' if best.difference.count > 1 else ''}"
    only = len(rows) == 1
    named = f"{best.setting.name}: its" if only else f"Best by {judge}: {best.setting.name}. Its"
    found = (
        f"{named} {metric} differs from plain training by {signed(best.difference)}, over {seeds}: "
    )
    if best.difference.low is None or best.difference.high is None:
        return found + "one seed says little. Train with more seeds."
    sign = -1 if lower_is_better(metric) else 1
    low, high = sorted((sign * best.difference.low, sign * best.difference.high))
    if low > 0:
        end = "clipping helps here." if best.setting.rule is None else "it helps here."
    elif high < 0:
        no_size = not only and best.setting.rule is None
        end = "no b beats plain training here." if no_size else "plain training is better here."
    else:
        end = "no clear difference, since the interval includes 0. More seeds would narrow it."
    if judge == metric and not only:
        end += (
            f" The best {'b' if best.setting.rule is None else 'setting'} was chosen by the same "
            "metric that it is judged by, which flatters it; log a validation metric to choose by."
        )
    return found + end


def lower_is_better(metric: str) -> bool:
    """Return whether a metric should fall, judging by its name."""
    return bool(LOWER.search(metric))


def signed(difference: Estimate) -> str:
    """Format a difference with its interval, as it is printed everywhere.

    >>> signed(Estimate(0.5, 0.25, 0.75, 8))
    '+0.50 (+0.25 to +0.75)'
    """
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+z.{_places(difference.mean)}f}"
    places = _places(difference.high - difference.low)
    return (
        f"{difference.mean:+z.{places}f} ({difference.low:+z.{places}f} to "
        f"{difference.high:+z.{places}f})"
    )


def unsigned(value: Estimate) -> str:
    """Format a value with its interval.

    >>> unsigned(Estimate(95.123, 94.5, 95.75, 8))
    '95.12 (94.50 to 95.75)'
    """
    if value.low is None or value.high is None:
        return f"{value.mean:.{_places(value.mean) + 1}f}"
    places = _places(value.high - value.low)
    return f"{value.mean:.{places}f} ({value.low:.{places}f} to {value.high:.{places}f})"


def _places(width: float) -> int:
    """Return how many decimals show two significant digits of the width; at least two."""
    size = abs(width)
    return next((places for places in range(2, 9) if size * 10**places >= 10), 2)


def _differs(row: ComparisonRow) -> bool:
    assert row.difference is not None
    found = (row.difference.mean, row.difference.low, row.difference.high)
    return any(value not in (0, None) for value in found)


def settings_of(runs: Sequence[Run]) -> tuple[Setting, ...]:
    """Group runs that differ only in their seed, and name each setting by what sets it apart."""
    alike: dict[tuple[int | None, str | None, tuple[tuple[str, str], ...]], list[Run]] = {}
    for run in runs:
        settings = tuple(sorted(run.settings.items()))
        alike.setdefault((run.microbatch_size, _rule_name(run), settings), []).append(run)
    found = []
    for (size, rule, settings), members in alike.items():
        name = "plain training" if size is None else f"b = {size}"
        if rule is not None:
            name = rule
        others = [dict(s) for b, other, s in alike if (b, other) == (size, rule)]
        if len(others) > 1:
            name += "".join(
                f", {key} {value[:40]}"
                for key, value in settings
                if len({other.get(key) for other in others}) > 1
            )
        found.append(Setting(size, name, tuple(members), rule))
    return tuple(
        sorted(found, key=lambda one: (one.rule is not None, one.microbatch_size or 0, one.name))
    )


def _rule_name(run: Run) -> str | None:
    """Return the name of a rule that weights examples, with b if it matters."""
    rule = run.example_rule
    if rule is None:
        return None
    name = repr(rule).replace(f"total_steps={rule.total_steps}", "").replace("(, ", "(")
    name, size = name.removesuffix("()"), run.microbatch_size
    return name if rule.is_one_pass or size is None else f"{name}, b = {size}"


def by_interest(name: str) -> tuple[bool, bool, bool]:
    """Sort key for metrics: results first, then losses, then internals.

    >>> sorted(["learning_rate", "loss", "microclip/bound", "val_acc"], key=by_interest)
    ['val_acc', 'loss', 'learning_rate', 'microclip/bound']
    """
    judged = bool(VALIDATION.search(name) or TEST.search(name))
    internal = "/" in name or "learning_rate" in name
    return not judged, internal, lower_is_better(name)


def _common_metrics(settings: Sequence[Setting]) -> tuple[str, ...]:
    names = [{name for run in setting.runs for name in run.metrics} for setting in settings]
    first = [name for run in settings[0].runs for name in run.metrics]
    common = [name for name in dict.fromkeys(first) if all(name in each for each in names)]
    wanted = {run.headline for setting in settings for run in setting.runs}

    def order(name: str) -> tuple[bool, bool, bool, bool]:
        test, validation = bool(TEST.search(name)), bool(VALIDATION.search(name))
        return name not in wanted, not test, not validation, lower_is_better(name)

    return tuple(sorted(common, key=order))


def _paired(setting: Setting, plain: Setting, metric: str) -> Estimate | None:
    ours, theirs = setting.values(metric), plain.values(metric)
    by_seed, baseline = dict(ours), dict(theirs)
    if len(by_seed) < len(ours) or len(baseline) < len(theirs):  # a seed occurs twice
        return None
    common = [seed for seed in by_seed if seed is not None and seed in baseline]
    if not common:
        return None
    return estimate([by_seed[seed] - baseline[seed] for seed in common])
