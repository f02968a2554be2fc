"""Formatting of figures, effects and run ids, for the page and the document."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from microclip.report.statistics import Estimate
from microclip_lab.reproduction.effects import Effect

SEED = re.compile(r"(.*seed)(\d+)", re.DOTALL)
NAMES = {
    "digits": "digits",
    "clean-digits": "clean digits",
    "digits-sgd": "digits by SGD",
    "cifar10n": "CIFAR-10N",
    "speech": "speech",
    "mixture": "mixture",
    "movie": "movie reviews",
}
NOT_YET = "not run yet"


def named(task: str) -> str:
    """Return the name of a task in a sentence.

    >>> named("cifar10n")
    'CIFAR-10N'
    """
    return NAMES.get(task, task)


def capital(text: str) -> str:
    """Return a text with a capital first letter.

    >>> capital("clean digits"), capital("CIFAR-10N")
    ('Clean digits', 'CIFAR-10N')
    """
    return text[:1].upper() + text[1:]


def spread(found: Estimate | None, *, sign: bool = False, places: int | None = None) -> str:
    """Return a mean ± half of its interval.

    >>> spread(Estimate(95.125, 94.5, 95.75, 8)), spread(Estimate(0.5, 0.3, 0.7, 5), sign=True)
    ('95.12 ± 0.62', '+0.50 ± 0.20')
    >>> spread(Estimate(-0.001, -0.201, 0.199, 5))  # no minus sign before a rounded 0
    '0.00 ± 0.20'
    """
    if found is None:
        return "-"
    form = "+z" if sign else "z"
    if found.low is None or found.high is None:
        return f"{found.mean:{form}.{2 if places is None else places}f}"
    half = (found.high - found.low) / 2
    digits = _places(half) if places is None else places
    return f"{found.mean:{form}.{digits}f} ± {half:.{digits}f}"


def percent(found: Estimate | None) -> str:
    """Return an accuracy or an error rate.

    >>> percent(Estimate(95.125, 95.1, 95.15, 8))
    '95.12 ± 0.03'
    """
    return spread(found, places=2)


def gain(found: Effect | None) -> str:
    """Return an effect for a table, with a note on divergence."""
    if found is None:
        return NOT_YET
    said = "no figure" if found.estimate is None else spread(found.estimate, sign=True, places=2)
    return said + (" (diverged)" if found.diverged or found.left_out else "")


def excludes_zero(found: Effect | None) -> bool:
    """Return whether the interval of an effect excludes 0."""
    if found is None or found.estimate is None or found.left_out:
        return False
    low, high = found.estimate.low, found.estimate.high
    return low is not None and high is not None and (low > 0 or high < 0)


def runs(ids: Iterable[str]) -> str:
    """Return run ids, grouping those that differ only in their seed.

    >>> runs(["a/b4/seed200", "a/b4/seed201", "a/b4/seed202", "a/plain/0.1-seed200"])
    'a/b4/seed200…202, a/plain/0.1-seed200'
    """
    groups: dict[str, list[int]] = {}
    for name in dict.fromkeys(ids):
        found = SEED.fullmatch(name)
        assert found is not None, name
        groups.setdefault(found[1], []).append(int(found[2]))
    return ", ".join(
        f"{begin}{first}" if first == last else f"{begin}{first}…{last}"
        for begin, seeds in groups.items()
        for first, last in _ranges(sorted(seeds))
    )


def number(value: float | None) -> str:
    """Return a number in short form.

    >>> number(0.001), number(None), number(12.3456)
    ('0.001', '-', '12.35')
    """
    return "-" if value is None else f"{value:.4g}"


def listed(words: Iterable[str]) -> str:
    """Return words with commas, and "and" before the last.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    every = list(words)
    return ", ".join(every[:-1]) + " and " + every[-1] if len(every) > 1 else "".join(every)


def _ranges(seeds: list[int]) -> list[tuple[int, int]]:
    found = []
    for _, group in itertools.groupby(enumerate(seeds), key=lambda pair: pair[1] - pair[0]):
        members = [seed for _, seed in group]
        found.append((members[0], members[-1]))
    return found


def _places(half: float) -> int:
    """Return the decimals that give half an interval two significant digits; at least two."""
    return next((places for places in range(2, 6) if half * 10**places >= 10), 2)
