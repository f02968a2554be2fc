"""Which runs the demo consists of, given those that are finished. Pure functions; nothing runs.

First every setting is trained with a few learning rates on seeds that are used for nothing else.
The rate with the best mean validation accuracy is taken, but never one on the edge of what was
tried: then the grid grows in that direction. Test accuracy plays no part in it. With its own rate
each setting is trained on the evaluation seeds, the same ones for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from microclip.demo.config import TUNING_SEEDS, DemoConfig, Setting
from microclip.demo.train import Result, Run

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FIRST_RATES = (1e-3, 3e-3, 1e-2)

Finished = Mapping[Run, Result]


def missing(config: DemoConfig, finished: Finished) -> list[Run]:
    """Return the runs that can and must be done next, the longest first; none: all is done."""
    runs = [
        run
        for setting in config.settings
        for run in _next_runs(config, setting, finished)
        if run not in finished
    ]
    # the longest first, so that no core waits for a long one at the end
    return sorted(runs, key=lambda run: -run.work)


def expected(config: DemoConfig, finished: Finished) -> list[Run]:
    """Return all runs of the demo as far as they are known by now; grids may still grow."""
    runs: list[Run] = []
    for setting in config.settings:
        tuning = _tuning(config, setting, {*FIRST_RATES, *tried(config, setting, finished)})
        rate = chosen_rate(config, setting, finished)
        runs += tuning + _evaluation(config, setting, FIRST_RATES[0] if rate is None else rate)
    return runs


def tried(config: DemoConfig, setting: Setting, finished: Finished) -> dict[float, float]:
    """Return the mean validation accuracy of each rate whose tuning runs are all finished."""
    accuracies = {}
    for rate in RATES:
        results = [finished.get(run) for run in _tuning(config, setting, [rate])]
        found = [result.validation_accuracy for result in results if result is not None]
        if len(found) == len(results):
            accuracies[rate] = sum(found) / len(found)
    return accuracies


def chosen_rate(config: DemoConfig, setting: Setting, finished: Finished) -> float | None:
    """Return a setting's learning rate, or None as long as there are rates to be tried."""
    accuracies = tried(config, setting, finished)
    return None if rates_to_try(accuracies) else best_rate(accuracies)


def rates_to_try(accuracies: Mapping[float, float]) -> list[float]:
    """Return the rates still to be tried: the first few, then the neighbours of the best."""
    first = [rate for rate in FIRST_RATES if rate not in accuracies]
    if first:
        return first
    place = RATES.index(best_rate(accuracies))
    return [rate for rate in RATES[max(0, place - 1) : place + 2] if rate not in accuracies]


def best_rate(accuracies: Mapping[float, float]) -> float:
    """Return the rate with the best accuracy; of equals the smallest."""
    return max(sorted(accuracies), key=lambda rate: accuracies[rate])


def evaluation(config: DemoConfig, setting: Setting, finished: Finished) -> list[Result]:
    """Return a setting's results on the evaluation seeds, in their order."""
    rate = chosen_rate(config, setting, finished)
    assert rate is not None, "the runs are not finished"
    return [finished[run] for run in _evaluation(config, setting, rate)]


def evaluation_runs(config: DemoConfig, finished: Finished) -> list[Run]:
    """Return the runs of the comparison, setting by setting."""
    runs: list[Run] = []
    for setting in config.settings:
        rate = chosen_rate(config, setting, finished)
        assert rate is not None, "the runs are not finished"
        runs += _evaluation(config, setting, rate)
    return runs


def _next_runs(config: DemoConfig, setting: Setting, finished: Finished) -> list[Run]:
    rate = chosen_rate(config, setting, finished)
    if rate is not None:
        return _evaluation(config, setting, rate)
    return _tuning(config, setting, rates_to_try(tried(config, setting, finished)))


def _tuning(config: DemoConfig, setting: Setting, rates: Iterable[float]) -> list[Run]:
    return [_run(config, setting, rate, seed) for rate in sorted(rates) for seed in TUNING_SEEDS]


def _evaluation(config: DemoConfig, setting: Setting, rate: float) -> list[Run]:
    return [_run(config, setting, rate, seed) for seed in config.evaluation_seeds]


def _run(config: DemoConfig, setting: Setting, rate: float, seed: int) -> Run:
    return Run(setting, rate, seed, config.steps, config.batch_size, config.noise)
