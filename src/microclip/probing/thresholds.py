"""Thresholds of when to clip, how often they were right, and decisions by kind of data.

Fitted on one half of the tasks of a plan that was committed before its runs, judged on its other
half and on those of an earlier benchmark: docs/evidence.md shows them task by task. This file is
written by benchmarks/evidence.py --publish from results/evidence and results/dirty_data, and a
test of the laboratory compares it with them: do not edit it.
"""

import math

from microclip.probing.forecast import Forecast, Thumb

FORECASTS: tuple[Forecast, ...] = (
    Forecast(
        rule="MinNorm",
        thumb=Thumb("top_decile", -math.inf, 0.594),
        fitted_on=9,
        judged_on=28,
        right=8,
        guess="gain",
        guess_right=17,
        luck=0.996,
    ),
    Forecast(
        rule="Unit",
        thumb=Thumb("top_decile", -math.inf, 0.594),
        fitted_on=10,
        judged_on=29,
        right=9,
        guess="gain",
        guess_right=22,
        luck=1.0,
    ),
)

BY_KIND: tuple[tuple[str, str], ...] = (
    ("Regression, some targets far off", "LossHistory"),
    ("Fine-tuning, some labels wrong", "Unit(), b = 4"),
    ("Fine-tuning, some examples garbage (canaries)", "Unit(), b = 4"),
    ("Fine-tuning, clean data", "plain"),
    ("From scratch, labels wrong at random", "LossHistory"),
    ("From scratch, some examples garbage (canaries)", "Unit(), b = 4"),
    ("Photos, labeled by people in a hurry", "plain training; find the bad examples"),
    ("From scratch, short texts, one rater each", "plain training; find the bad examples"),
    ("Language model, some texts garbage or misaligned", "LossHistory"),
    ("Speech, some transcripts wrong", "LossHistory"),
    ("Bad examples, but five epochs or fewer", "plain training; find the bad examples"),
    ("From scratch, clean data", "plain"),
)
