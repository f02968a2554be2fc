"""From finished runs to what is reported: means, intervals, and one sentence that follows.

All intervals are 95 % t-intervals over seeds. Differences are paired: setting minus plain
training of the same seed, so that what a seed makes harder for both cancels out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # type: ignore[import-untyped]

from microclip.demo.config import DemoConfig, Setting, label
from microclip.demo.plan import RATES, Finished, chosen_rate, evaluation, tried
from microclip.demo.train import Result

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One setting; accuracies in percent, differences in percentage points."""

    setting: Setting
    name: str
    learning_rate: float
    accuracy: Estimate
    difference: Estimate | None  # None: this is plain training
    validation_accuracy: float


@dataclass(frozen=True)
class Weight:
    """What micro-batches with so many wrong labels got; 1 is the mean over their steps."""

    wrong: int
    microbatches: int
    weight: float


@dataclass(frozen=True)
class Summary:
    """Everything that is reported."""

    config: DemoConfig
    rows: tuple[Row, ...]  # plain training first
    weights: tuple[Weight, ...]  # at the watched micro-batch size
    tuning: dict[Setting, dict[float, float]]  # validation accuracy by learning rate, percent
    verdict: str
    notes: tuple[str, ...]

    @property
    def plain(self) -> Row:
        """The row that the others are compared with."""
        return self.rows[0]


def summarise(config: DemoConfig, finished: Finished) -> Summary:
    """Compute everything that is reported."""
    rows = tuple(_row(config, setting, finished) for setting in config.settings)
    return Summary(
        config=config,
        rows=rows,
        weights=mean_weights(evaluation(config, config.watched, finished)),
        tuning={
            setting: {r: 100 * a for r, a in tried(config, setting, finished).items()}
            for setting in config.settings
        },
        verdict=verdict(rows, config.batch_size),
        notes=tuple(_edge_note(row) for row in rows if row.learning_rate in (RATES[0], RATES[-1])),
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with its t-interval.

    >>> interval = estimate([1.0, 2.0, 3.0])  # 2 -+ 4.303 / sqrt(3)
    >>> interval.mean, round(interval.low, 3), round(interval.high, 3)
    (2.0, -0.484, 4.484)
    """
    mean = statistics.fmean(values)
    t = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def paired(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the mean of the differences, seed by seed, with its t-interval."""
    return estimate([value - base for value, base in zip(values, baseline, strict=True)])


def mean_weights(results: Sequence[Result]) -> tuple[Weight, ...]:
    """Return the mean weight by the number of wrong labels, over all runs; none for none seen."""
    sums = [math.fsum(column) for column in zip(*(r.weights for r in results), strict=True)]
    counts = [sum(column) for column in zip(*(r.microbatches for r in results), strict=True)]
    return tuple(
        Weight(wrong, count, total / count)
        for wrong, (total, count) in enumerate(zip(sums, counts, strict=True))
        if count
    )


def verdict(rows: Sequence[Row], batch_size: int) -> str:
    """Say in a sentence what came out, for the size that is best on *validation* data.

    Naming the best on test data would flatter it: of several sizes one is always lucky.
    """
    best = max(
        (row for row in rows if row.setting is not None and row.setting < batch_size),
        key=lambda row: row.validation_accuracy,
    )
    assert best.difference is not None
    found = (
        f"Best on validation data: {best.name}. Against plain training it makes "
        f"{points(best.difference)} points of test accuracy: "
    )
    if best.difference.low > 0:
        return f"{found}clipping helps here."
    if best.difference.high < 0:
        return f"{found}no b beats plain training here."
    return f"{found}no clear difference, the interval includes 0. More seeds would narrow it."


def points(difference: Estimate) -> str:
    """Return a difference with its interval, as it is printed everywhere."""
    return f"{difference.mean:+z.2f} ({difference.low:+z.2f} to {difference.high:+z.2f})"


def percent(accuracy: Estimate) -> str:
    """Return an accuracy with its interval, as it is printed everywhere."""
    return f"{accuracy.mean:.2f} ({accuracy.low:.2f} to {accuracy.high:.2f})"


def weights_sentence(weights: Sequence[Weight]) -> str:
    """Say what wrong labels did to the weight of their micro-batch."""
    if len(weights) < 2:
        return "All micro-batches have equally many wrong labels: there is nothing to compare."
    clean, worst = weights[0], max(weights[1:], key=lambda weight: weight.microbatches)
    return (
        f"A micro-batch with {worst.wrong} wrong got {worst.weight / clean.weight:.2f} times the "
        f"weight of one with {clean.wrong}."
    )


def _row(config: DemoConfig, setting: Setting, finished: Finished) -> Row:
    rate = chosen_rate(config, setting, finished)
    assert rate is not None
    results = evaluation(config, setting, finished)
    accuracies = [100 * result.test_accuracy for result in results]
    plain = [100 * result.test_accuracy for result in evaluation(config, None, finished)]
    return Row(
        setting=setting,
        name=label(setting, config.batch_size),
        learning_rate=rate,
        accuracy=estimate(accuracies),
        difference=None if setting is None else paired(accuracies, plain),
        validation_accuracy=100 * statistics.fmean(r.validation_accuracy for r in results),
    )


def _edge_note(row: Row) -> str:
    return (
        f"The learning rate of {row.name} is at the end of the ladder ({RATES[0]:g} to "
        f"{RATES[-1]:g}): a better one may lie beyond."
    )
