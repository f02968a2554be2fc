"""What is claimed, by the paper and by us, where it is tested, and what would decide it.

Written before the runs. Every test is a quantity on one task, with an interval that may be looked
at several times. "above": holds if the interval is above 0, and is refuted if it ends below the
margin, which is half of the paper's effect. "below" is the mirror image. "within": inside the
margin on both sides. "not below": not more than the margin below 0. A task that failed its gate
decides nothing about gains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microclip_lab.evidence.catalog import SPEECH_MARGIN, TEXT_MARGIN, VISION_MARGIN
from microclip_lab.evidence.quantities import (
    BestSize,
    Effect,
    Memorized,
    Quantity,
    Seen,
    Slope,
    Speed,
)
from microclip_lab.evidence.text_tasks import SMALL

Expectation = Literal["above", "below", "within", "not below"]

HARM_MARGIN = 100 * (4.86 - 3.99) / 3.99 / 2  # b = 1 in the paper: half of 21.8 %
# errors of the seven small tasks of SuperGLUE, on average: 9.87 to 11.17, half of 13.2 %
DOMAIN_MARGIN = 100 * (11.17 - 9.87) / 9.87 / 2
SLOPE_MARGIN = 0.02  # ln(6.18 / 4.42) over 9 doublings is 0.037
COSINE_MARGIN = 0.05
SPEED_MARGIN = 0.1  # halvings of the steps; the paper has a figure only
MEMORY_MARGIN = 2.0  # points


@dataclass(frozen=True)
class Test:
    """A quantity on a task, and what is expected of it."""

    __test__ = False  # not for pytest

    task: str
    quantity: Quantity
    expects: Expectation
    margin: float


@dataclass(frozen=True)
class Claim:
    """A claim in plain words, whose it is, and its tests."""

    id: str
    title: str
    by: Literal["the paper", "us"]
    there: str  # what the paper found
    tests: tuple[Test, ...]


_CANARIES = (
    "tuned-canaries",
    "scratch-canaries",
    "speech-tuned",
    "speech-tuned-20",
    "speech-scratch-20",
    "speech-scratch",
)
_DRAGGERS = (*_CANARIES, "outliers-7-10", "photos-worse")

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "C1",
        "Draggers' gradients are nearly orthogonal to those of benign examples",
        "the paper",
        "cosines of canary and benign pairs about 0, those of benign pairs above (a figure)",
        tuple(
            test
            for task in _DRAGGERS
            for test in (
                Test(task, Seen("early/cosine_dragger_benign"), "within", COSINE_MARGIN),
                Test(
                    task,
                    Seen("early/cosine_dragger_benign", "early/cosine_benign_benign"),
                    "below",
                    0.0,
                ),
            )
        ),
    ),
    Claim(
        "C2",
        "Clipping helps at some micro-batch sizes, and harms at b = 1",
        "the paper",
        "word error rate 3.99 plain, 4.86 at b = 1, 3.80 at b = 4",
        tuple(
            test
            for task in _DRAGGERS
            for test in (
                Test(task, BestSize(("minnorm-4", "minnorm-16")), "above", SPEECH_MARGIN),
                Test(task, Effect("minnorm-1"), "below", HARM_MARGIN),
            )
        ),
    ),
    Claim(
        "C3",
        "Clipping converges faster",
        "the paper",
        "at b = 4 the error falls faster from the beginning (a figure)",
        tuple(Test(task, Speed("minnorm-4"), "above", SPEED_MARGIN) for task in _DRAGGERS),
    ),
    Claim(
        "C4",
        "The ratio of draggers' to benign norms falls as b rises",
        "the paper",
        "6.18 at b = 1, 5.74 at b = 4, 4.42 at b = B = 512",
        tuple(Test(task, Slope(), "below", SLOPE_MARGIN) for task in _DRAGGERS),
    ),
    Claim(
        "C5",
        "Clipping helps in vision",
        "the paper",
        "top-1 error on ImageNet 18.2 to 16.7: 8.2 % less",
        tuple(
            Test(task, BestSize(("minnorm-4", "minnorm-16")), "above", VISION_MARGIN)
            for task in ("photos-worse", "photos-random1")
        ),
    ),
    Claim(
        "C6",
        "Clipping helps in language, if all data is of one domain",
        "the paper",
        "error on ReCoRD 15.5 to 15.2: 1.9 % less",
        tuple(
            Test(task, BestSize(("minnorm-4", "minnorm-16")), "above", TEXT_MARGIN)
            for task in ("raters", "raters-flips", "t5", "t5-flips")
        ),
    ),
    Claim(
        "C7",
        "In unbalanced mixtures, clipping harms the small domains",
        "the paper",
        "error on the seven small tasks of SuperGLUE 9.9 to 11.2: 13 % more",
        (Test("domains", Effect("minnorm-4", domains=SMALL), "below", DOMAIN_MARGIN),),
    ),
    Claim(
        "M1",
        "A bound for each domain spares the small domains",
        "us",
        "",
        (
            Test(
                "domains",
                Effect("minnorm-4-domains", "minnorm-4", domains=SMALL),
                "above",
                DOMAIN_MARGIN,
            ),
            Test("domains", Effect("minnorm-4-domains", domains=SMALL), "not below", 2.0),
        ),
    ),
    Claim(
        "M2",
        "Clipping keeps a model from memorizing draggers",
        "us",
        "",
        tuple(
            Test(task, Memorized("minnorm-4"), "above", MEMORY_MARGIN)
            for task in (*_CANARIES, "photos-worse")
        ),
    ),
    Claim(
        "M3",
        "The harm at b = 1 is the rule's: Unit at b = 1 does none",
        "us",
        "",
        tuple(
            test
            for task in _CANARIES
            for test in (
                Test(task, Effect("unit-1", "minnorm-1"), "above", SPEECH_MARGIN),
                Test(task, Effect("unit-1"), "not below", SPEECH_MARGIN),
            )
        ),
    ),
    Claim(
        "M4",
        "On clean data the paper's rule costs something at b = 4",
        "us",
        "",
        tuple(
            Test(task, Effect("minnorm-4"), "below", margin)
            for task, margin in (
                ("tuned-clean", SPEECH_MARGIN),
                ("scratch-clean", SPEECH_MARGIN),
                ("outliers-none", SPEECH_MARGIN),
                ("photos-clean", VISION_MARGIN),
                ("domains-clean", TEXT_MARGIN),
                ("raters-clean", TEXT_MARGIN),
                ("speech-tuned-clean", SPEECH_MARGIN),
                ("t5-clean", TEXT_MARGIN),
            )
        ),
    ),
)
