"""What is claimed, by the paper and by us, and how it will be decided: written before the runs.

Every part of a claim is a quantity with a 95 % t-interval over paired seeds, and what is expected
of it. A part holds if its interval lies where it is expected, and fails if the interval lies on the
other side, or so near to zero that nothing that matters is left (the margin). A claim holds if all
of its parts do, and does not if one fails; else this scale does not decide it. What stands under
`also` is shown beside it and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microclip_lab.reproduction.effects import (
    CosineGap,
    CosineLevel,
    Gain,
    Quantity,
    Rise,
    Slope,
    Speed,
)

Expectation = Literal["above", "below", "near", "not below"]  # zero; "near": within the margin

POINTS = 0.5  # the smallest difference in accuracy or error rate that matters, in points
SMALL_DOMAINS = ("best_test_accuracy_tweets", "best_test_accuracy_amazon")
MIDDLE = ("b2", "b4", "b8", "b16")  # neither one example nor the whole mini-batch
MIDDLE_OF_16 = ("b2", "b4", "b8")


@dataclass(frozen=True)
class Part:
    """A quantity and what is expected of it."""

    about: str
    quantity: Quantity
    expects: Expectation
    margin: float = POINTS


@dataclass(frozen=True)
class Claim:
    """A claim, whose it is, and what would bear it out."""

    id: str
    title: str
    by: Literal["paper", "microclip"]
    source: str  # where it is made
    there: str  # what was found there
    parts: tuple[Part, ...]
    also: tuple[Part, ...] = ()


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "C1",
        "Draggers' gradients are nearly orthogonal to those of benign examples",
        "paper",
        "Figure 1",
        "cosines of canary and benign pairs about 0, of benign pairs clearly above (a figure; its "
        "data is not published)",
        (
            Part(
                "speech: dragger-benign minus benign-benign cosine",
                CosineGap("speech", "dragger_benign", "benign_benign"),
                "below",
                0.01,
            ),
            Part(
                "speech: dragger-benign cosine",
                CosineLevel("speech", "dragger_benign"),
                "near",
                0.1,
            ),
            Part(
                "CIFAR-10N: dragger-benign minus benign-benign cosine",
                CosineGap("cifar10n", "dragger_benign", "benign_benign"),
                "below",
                0.01,
            ),
            Part(
                "CIFAR-10N: dragger-benign cosine",
                CosineLevel("cifar10n", "dragger_benign"),
                "near",
                0.1,
            ),
        ),
        (
            Part(
                "speech: dragger-dragger cosine, which the theory takes for 1",
                CosineLevel("speech", "dragger_dragger"),
                "above",
                0.1,
            ),
            Part(
                "CIFAR-10N: dragger-dragger cosine, which the theory takes for 1",
                CosineLevel("cifar10n", "dragger_dragger"),
                "above",
                0.1,
            ),
            Part(
                "digits: dragger-benign minus benign-benign cosine",
                CosineGap("digits", "dragger_benign", "benign_benign"),
                "below",
                0.01,
            ),
        ),
    ),
    Claim(
        "C2",
        "Clipping helps at certain micro-batch sizes only",
        "paper",
        "Table 2",
        "WER on test-other 3.99 plain, 4.86 at b = 1, 3.80 at b = 4, 4.03 at b = 512 = B",
        (
            Part(
                "speech: the best size of 2, 4 and 8 against plain",
                Gain("speech", MIDDLE_OF_16),
                "above",
            ),
            Part("speech: b = 1 against plain", Gain("speech", ("b1",)), "below"),
            Part("speech: b = B against plain", Gain("speech", ("b16",)), "near"),
        ),
        (
            Part(
                "digits: the best size of 2, 4, 8 and 16 against plain",
                Gain("digits", MIDDLE),
                "above",
            ),
            Part("digits: b = 1 against plain", Gain("digits", ("b1",)), "below"),
            Part("digits: b = B against plain", Gain("digits", ("b32",)), "near"),
            Part(
                "CIFAR-10N: the best size of 2, 4, 8 and 16 against plain",
                Gain("cifar10n", MIDDLE),
                "above",
            ),
            Part("CIFAR-10N: b = 1 against plain", Gain("cifar10n", ("b1",)), "below"),
        ),
    ),
    Claim(
        "C3",
        "Clipping converges faster",
        "paper",
        "Figure 2",
        "at b = 4 the WER falls faster from the beginning (a figure; its data is not published)",
        (Part("speech: steps saved at b = 4, in halvings", Speed("speech", "b4"), "above", 0.1),),
        (
            Part("digits: steps saved at b = 4, in halvings", Speed("digits", "b4"), "above", 0.1),
            Part(
                "CIFAR-10N: steps saved at b = 4, in halvings",
                Speed("cifar10n", "b4"),
                "above",
                0.1,
            ),
        ),
    ),
    Claim(
        "C4",
        "The ratio of draggers' to benign norms falls as b rises",
        "paper",
        "Table 3",
        "6.18 at b = 1, 5.74 at b = 4, 4.42 at b = 512 = B",
        (
            Part(
                "speech: slope of dragger/benign over b, at the last step",
                Slope("speech", ("b1", "b2", "b4", "b8", "plain"), "dragger_over_benign", "step"),
                "below",
                0.02,
            ),
            Part(
                "speech: slope of dragger/benign over b, at matched loss",
                Slope("speech", ("b1", "b2", "b4", "b8", "plain"), "dragger_over_benign", "loss"),
                "below",
                0.02,
            ),
        ),
        (
            Part(
                "speech: slope of benign/dragger over b, the ratio as the paper prints it",
                Slope("speech", ("b1", "b2", "b4", "b8", "plain"), "benign_over_dragger", "step"),
                "below",
                0.02,
            ),
            Part(
                "digits: slope of dragger/benign over b, at the last step",
                Slope("digits", ("b1", *MIDDLE, "plain"), "dragger_over_benign", "step"),
                "below",
                0.02,
            ),
            Part(
                "CIFAR-10N: slope of dragger/benign over b, at the last step",
                Slope("cifar10n", ("b1", *MIDDLE, "plain"), "dragger_over_benign", "step"),
                "below",
                0.02,
            ),
        ),
    ),
    Claim(
        "C5",
        "Clipping helps in vision, too",
        "paper",
        "Table 4",
        "DeiT-B on ImageNet: top-1 81.8 to 83.3, top-5 95.8 to 96.8",
        (Part("CIFAR-10N: top-1 at b = 4 against plain", Gain("cifar10n", ("b4",)), "above"),),
        (
            Part(
                "CIFAR-10N: top-5 at b = 4 against plain",
                Gain("cifar10n", ("b4",), figures=("best_test_top5_accuracy",)),
                "above",
            ),
            Part(
                "CIFAR-10N: top-1 after the last step, b = 4 against plain",
                Gain("cifar10n", ("b4",), figures=("test_accuracy",)),
                "above",
            ),
            Part("digits: top-1 at b = 4 against plain", Gain("digits", ("b4",)), "above"),
            Part(
                "digits: top-1 after the last step, b = 4 against plain",
                Gain("digits", ("b4",), figures=("test_accuracy",)),
                "above",
            ),
            Part(
                "digits by SGD: top-1 at b = 4 against plain", Gain("digits-sgd", ("b4",)), "above"
            ),
        ),
    ),
    Claim(
        "C6",
        "Clipping helps in language, if all data is of one domain",
        "paper",
        "Table 6",
        "T5 on ReCoRD alone: 84.5 to 84.8",
        (Part("movie reviews alone: b = 4 against plain", Gain("movie", ("b4",)), "above"),),
        (Part("movie reviews alone: b = 8 against plain", Gain("movie", ("b8",)), "above"),),
    ),
    Claim(
        "C7",
        "In unbalanced mixtures, clipping harms the small domains",
        "paper",
        "Table 5",
        "T5 on SuperGLUE: ReCoRD, the largest, 83.9 to 84.3; CB, the smallest, 97.8 to 95.6; six "
        "of seven small ones lose",
        (
            Part(
                "tweets and Amazon reviews: b = 4 against plain",
                Gain("mixture", ("b4",), figures=SMALL_DOMAINS),
                "below",
            ),
        ),
        (
            Part(
                "movie reviews, the largest domain: b = 4 against plain",
                Gain("mixture", ("b4",), figures=("best_test_accuracy_movie",)),
                "above",
            ),
            Part(
                "editorials, the second largest: b = 4 against plain",
                Gain("mixture", ("b4",), figures=("best_test_accuracy_nyt",)),
                "below",
            ),
        ),
    ),
    Claim(
        "M1",
        "A bound for each domain spares the small ones",
        "microclip",
        "an open problem of the paper",
        "",
        (
            Part(
                "tweets and Amazon reviews: bounds by domain against one bound, b = 4",
                Gain("mixture", ("b4-by-domain",), "b4", SMALL_DOMAINS),
                "above",
            ),
            Part(
                "tweets and Amazon reviews: bounds by domain against plain",
                Gain("mixture", ("b4-by-domain",), figures=SMALL_DOMAINS),
                "not below",
            ),
        ),
        (
            Part(
                "movie reviews: bounds by domain against plain",
                Gain("mixture", ("b4-by-domain",), figures=("best_test_accuracy_movie",)),
                "not below",
            ),
            Part(
                "tweets and Amazon reviews: bounds by domain against plain training with the same "
                "weights of domains",
                Gain("mixture", ("b4-by-domain",), "plain-weighted", SMALL_DOMAINS),
                "above",
            ),
        ),
    ),
    Claim(
        "M2",
        "Clipping keeps a model from memorising",
        "microclip",
        "earlier work of the paper's author on speech",
        "",
        (
            Part(
                "speech: error rate on canaries that were trained on, b = 4 against plain",
                Rise("speech", "b4", "best_test_canary_wer"),
                "above",
            ),
        ),
        (
            Part(
                "speech: the same at b = 1",
                Rise("speech", "b1", "best_test_canary_wer"),
                "above",
            ),
            Part(
                "speech: error rate on canaries never heard, b = 4 against plain",
                Rise("speech", "b4", "best_test_unseen_canary_wer"),
                "near",
                2.0,
            ),
        ),
    ),
    Claim(
        "M3",
        "The sweet spot is the rule's: without the smallest norm as its bound, b = 1 does no harm",
        "microclip",
        "an open problem of the paper",
        "",
        (
            Part(
                "digits: Unit at b = 1 against MinNorm at b = 1",
                Gain("digits", ("unit-b1",), "b1"),
                "above",
            ),
            Part("digits: Unit at b = 1 against plain", Gain("digits", ("unit-b1",)), "not below"),
        ),
        (
            Part(
                "digits: Median at b = 1 against plain", Gain("digits", ("median-b1",)), "not below"
            ),
            Part(
                "digits: Automatic at b = 1 against plain",
                Gain("digits", ("automatic-b1",)),
                "not below",
            ),
            Part("speech: Unit at b = 1 against plain", Gain("speech", ("unit-b1",)), "not below"),
            Part(
                "CIFAR-10N: Unit at b = 1 against plain",
                Gain("cifar10n", ("unit-b1",)),
                "not below",
            ),
        ),
    ),
    Claim(
        "M4",
        "On clean data clipping costs something",
        "microclip",
        "a question of users",
        "",
        (Part("clean digits: b = 4 against plain", Gain("clean-digits", ("b4",)), "below"),),
        (
            Part("clean digits: b = 1 against plain", Gain("clean-digits", ("b1",)), "below"),
            Part(
                "clean digits: Unit at b = 1 against plain",
                Gain("clean-digits", ("unit-b1",)),
                "below",
            ),
            Part(
                "speech without canaries: b = 4 against plain",
                Gain("speech", ("oracle-b4",), "oracle"),
                "below",
            ),
            Part(
                "digits without the wrong labels: b = 4 against plain",
                Gain("digits", ("oracle-b4",), "oracle"),
                "below",
            ),
        ),
    ),
)

# What else could explain a gain of b = 4 on digits, each trained and tuned as the arms are.
CONTROLS: tuple[Part, ...] = tuple(
    Part(about, quantity, "above")
    for about, quantity in (
        ("b = 4 against plain steps of the same length", Gain("digits", ("b4",), "as-long")),
        (
            "b = 4 against plain steps as long as its bounds",
            Gain("digits", ("b4",), "bounds-replayed"),
        ),
        ("b = 4 against normalised steps", Gain("digits", ("b4",), "normalised")),
        ("b = 4 against a clipped global norm", Gain("digits", ("b4",), "global-clip")),
        (
            "b = 4 against micro-batches of 4 with a fixed bound",
            Gain("digits", ("b4",), "fixed-b4"),
        ),
        ("b = 4 against examples with a fixed bound", Gain("digits", ("b4",), "fixed-b1")),
        ("b = 4 against plain training without wrong labels", Gain("digits", ("b4",), "oracle")),
        ("b = 1 of 8 against plain of 8", Gain("digits", ("b1-of-8",), "plain-of-8")),
        ("b = 16 of 128 against plain of 128", Gain("digits", ("b16-of-128",), "plain-of-128")),
        ("SGD: b = 4 against plain", Gain("digits-sgd", ("b4",))),
        ("SGD: b = 1 against plain", Gain("digits-sgd", ("b1",))),
        (
            "SGD: b = 4 against plain steps of the same length",
            Gain("digits-sgd", ("b4",), "as-long"),
        ),
        (
            "SGD: b = 4 against plain steps as long as its bounds",
            Gain("digits-sgd", ("b4",), "bounds-replayed"),
        ),
        ("SGD: b = 4 against normalised steps", Gain("digits-sgd", ("b4",), "normalised")),
    )
)
