"""When to clip: a rule of thumb from one figure of the gradients, and how often it was right.

The figures need no knowledge of bad examples. Thresholds are in `thresholds`, which a command
writes; how figures are measured is up to `inequality`, for a probe, or to a report, for a ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Expected = Literal["gain", "harm", "nothing"]

TOP_TENTH = "top_decile"  # the share of the gradient energy that the top tenth of examples holds
SMALLEST = "min_over_mean_4"  # the smallest over the mean micro-batch norm, b = 4
RISE = "rise_of_top_decile"  # of the top tenth's share, since the first epoch
FIGURES = (TOP_TENTH, SMALLEST, RISE)

LUCK = 0.05  # a predictor that luck makes this good more often is not called better
TABLE = "https://github.com/microclip/microclip/blob/main/docs/when-to-use.md"
WORDS: dict[Expected, str] = {
    "gain": "expect a gain",
    "harm": "expect harm",
    "nothing": "expect no difference",
}


@dataclass(frozen=True)
class Thumb:
    """A figure and two thresholds: a gain from the upper one up, harm below the lower one."""

    figure: str
    harm_below: float
    gain_from: float

    def predicts(self, figures: Mapping[str, float]) -> Expected:
        """Return what to expect.

        >>> thumb = Thumb("top_decile", 0.2, 0.6)
        >>> [thumb.predicts({"top_decile": value}) for value in (0.1, 0.4, 0.6)]
        ['harm', 'nothing', 'gain']
        """
        value = figures[self.figure]
        if value >= self.gain_from:
            return "gain"
        return "harm" if value < self.harm_below else "nothing"


@dataclass(frozen=True)
class Forecast:
    """What a rule of thumb is worth: how it did on tasks that it was not fitted on.

    Args:
        rule: The clipping rule, at b = 4.
        thumb: The rule of thumb; None if there were too few tasks to fit one.
        fitted_on: How many tasks it was fitted on.
        judged_on: How many others it was judged on.
        right: On how many of these it was right.
        guess: The one answer that is right most often on them, whatever the figures.
        guess_right: On how many of them that is.
        luck: The chance that a coin picks the right one at least as often where only one of the two
            is right.
    """

    rule: str
    thumb: Thumb | None
    fitted_on: int
    judged_on: int = 0
    right: int = 0
    guess: Expected = "nothing"
    guess_right: int = 0
    luck: float = 1.0

    @property
    def beats_guessing(self) -> bool:
        """Whether it was right more often than the best constant answer."""
        return self.thumb is not None and self.right > self.guess_right

    @property
    def record(self) -> str:
        """How often it was right, and how often the constant answer, in words."""
        how = "no better than guessing"
        if self.beats_guessing:
            how = "better than guessing"
            if self.luck > LUCK:
                how = f"perhaps better than guessing, perhaps luck (p = {self.luck:.2f})"
        return (
            f"right on {self.right} of {self.judged_on} tasks that it was not fitted on, where "
            f'always saying "{self.guess}" is right on {self.guess_right}: {how}'
        )

    def sentence(self, figures: Mapping[str, float]) -> str:
        """Return what the figures suggest for this rule, with its record.

        >>> thumb = Thumb("min_over_mean_4", 0.1, 0.2)
        >>> forecast = Forecast("MinNorm", thumb, 6, 20, 15, "gain", 11, 0.04)
        >>> forecast.sentence({thumb.figure: 0.3})[:52]
        'MinNorm at b = 4: expect a gain. This forecast was r'
        >>> forecast.record[-40:]
        'in" is right on 11: better than guessing'
        """
        start = f"{self.rule} at b = 4:"
        if self.thumb is None:
            return (
                f"{start} no forecast, since only {self.fitted_on} tasks with a clear result were "
                f"there to fit one on. Go by your kind of data: {TABLE}."
            )
        if not self.beats_guessing:
            return f"{start} these figures do not tell. A forecast by them was {self.record}."
        if self.thumb.figure not in figures:
            return (
                f"{start} a forecast needs {NAMES[self.thumb.figure]}, which is not known here. "
                f"It was {self.record}."
            )
        said = WORDS[self.thumb.predicts(figures)]
        return f"{start} {said}. This forecast was {self.record}."


NAMES = {
    TOP_TENTH: "the top tenth's share of the gradient energy",
    SMALLEST: "the smallest over the mean micro-batch norm at b = 4",
    RISE: "the rise of the top tenth's share since the first epoch (probe twice: ProbeEvery)",
}


def described(figures: Mapping[str, float]) -> str:
    """Return the figures in a sentence.

    >>> described({"top_decile": 0.75, "min_over_mean_4": 0.33})
    'The top tenth of the examples holds 75 % of the gradient energy; at b = 4, the smallest \
micro-batch norm is 0.33 of the mean.'
    """
    parts = []
    if TOP_TENTH in figures:
        told = f"the top tenth of the examples holds {100 * figures[TOP_TENTH]:.0f} % of the "
        told += "gradient energy"
        if RISE in figures:
            told += f" ({100 * figures[RISE]:+.0f} points since the first look)"
        parts.append(told)
    if SMALLEST in figures:
        parts.append(
            f"at b = 4, the smallest micro-batch norm is {figures[SMALLEST]:.2f} of the mean"
        )
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
