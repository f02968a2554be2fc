"""VADER's sentences with a single rater's labels, on a pre-trained encoder; also by domain."""

from __future__ import annotations

import functools
from functools import partial

import numpy as np
import torch
from torch import Tensor

from microclip_lab.dirty_data.task import Data, Part, Task, classification, mislabeled, mlp
from microclip_lab.evidence.minilm import HIDDEN, LastBlock, encoded
from microclip_lab.evidence.wording import percent
from microclip_lab.language import vader

SENTENCES, VALIDATION = 1024, 1024
CHOICES = vader.choices(True)


# encoding takes a while, so only so many sentences of each domain are used: training, test
USED = {"movie": (2400, 800), "nyt": (800, 700), "tweets": (600, 600), "amazon": (600, 600)}


@functools.cache
def _sentences() -> tuple[list[vader.Sentence], list[int]]:
    """Return sentences with their split: 0 training, 2 test."""
    left = {(domain, part): USED[domain][part // 2] for domain in USED for part in (0, 2)}
    found = []
    for sentence, part in vader.split(vader.sentences()):
        if left.get((sentence.domain, part), 0):
            left[sentence.domain, part] -= 1
            found.append((sentence, part))
    return [sentence for sentence, _ in found], [part for _, part in found]


@functools.cache
def _encoded() -> Tensor:
    return encoded([sentence.text for sentence in _sentences()[0]])


def _number(rating: float) -> int:
    return CHOICES.index(vader.answer(rating, vader.CLEAR))


def _labels(rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
    sentences = _sentences()[0]
    return torch.tensor([_number(sentences[row].mean) for row in rows])


def _rated(
    rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]], draw: np.random.Generator
) -> Tensor:
    """Return the label that one rater gave to each sentence."""
    ratings = [_sentences()[0][row].ratings for row in rows]
    return torch.tensor([_number(each[draw.integers(len(each))]) for each in ratings])


def _places(part: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.flatnonzero(np.array(_sentences()[1]) == part)


def rater_data(seed: int, by_one: bool, flips: float) -> Data:
    """Return sentences labeled by one rater each, or by the mean of all, some of them flipped."""
    draw = np.random.default_rng((seed, 35))
    rows = draw.permutation(_places(0))[: SENTENCES + VALIDATION]
    truth, tested = _labels(rows), _places(2)
    given = _rated(rows, draw) if by_one else truth
    given = torch.tensor(mislabeled(given.numpy(), flips, len(CHOICES), draw)[0])
    inputs = _encoded()[rows]
    return Data(
        Part(inputs[:SENTENCES], given[:SENTENCES]),
        (given != truth)[:SENTENCES],
        Part(inputs[SENTENCES:], given[SENTENCES:]),
        Part(_encoded()[tested], _labels(tested)),
        Part(inputs[SENTENCES:], truth[SENTENCES:]),
    )


def raters_in_words(by_one: bool, noise: float, flips: float) -> str:
    """Say whose labels they are, and how many are wrong.

    >>> raters_in_words(False, 0.0, 0.0), raters_in_words(True, 0.35, 0.25)
    ('labels by all raters', 'labels by one rater, 25 % of them flipped (35 % wrong)')
    """
    if not by_one:
        return "labels by all raters"
    flipped = f", {percent(flips)} of them flipped" if flips else ""
    return f"labels by one rater{flipped} ({percent(noise)} wrong)"


def _raters(name: str, by_one: bool, noise: float, flips: float = 0.0) -> Task:
    said = raters_in_words(by_one, noise, flips)
    return classification(
        name=name,
        title=f"MiniLM on VADER, {said}",
        purpose="noisy" if by_one else "clean",
        description=f"{SENTENCES:,} sentences, positive, neutral or negative, {said}. The last "
        "feed-forward block of a pre-trained MiniLM is fine-tuned, with a new classifier. Error "
        "on sentences labeled by the mean of all raters.",
        noise=noise,
        make_data=partial(rater_data, by_one=by_one, flips=flips),
        make_model=partial(LastBlock, len(CHOICES)),
        epochs=6,
        start=-3,
    )


# ---- domains of very different sizes
SIZES = {"movie": 1600, "nyt": 200, "tweets": 120, "amazon": 80}
SMALL = ("tweets", "amazon")


def domain_data(seed: int, by_one: bool) -> Data:
    """Return sentences of four domains, one large, with their domain."""
    draw = np.random.default_rng((seed, 36))
    sentences, pool = _sentences()[0], _places(0)
    of = np.array([vader.DOMAINS.index(sentence.domain) for sentence in sentences])
    training, validation = [], []
    for domain, size in SIZES.items():
        own = draw.permutation(pool[of[pool] == vader.DOMAINS.index(domain)])
        training.append(own[:size])
        validation.append(own[size : size + 250])
    rows, others, tested = np.concatenate(training), np.concatenate(validation), _places(2)
    truth, right = _labels(rows), _labels(others)
    given = _rated(rows, draw) if by_one else truth
    checked = _rated(others, draw) if by_one else right
    return Data(
        Part(_encoded()[rows], given),
        given != truth,
        Part(_encoded()[others], checked),
        Part(_encoded()[tested], _labels(tested)),
        Part(_encoded()[others], right),
        torch.tensor(of[rows]),
        torch.tensor(of[tested]),
    )


def _domains(name: str, by_one: bool) -> Task:
    said = "labels by one rater" if by_one else "labels by all raters"
    sizes = ", ".join(f"{count:,} {domain}" for domain, count in SIZES.items())
    return classification(
        name=name,
        title=f"Four domains of VADER, {said}",
        purpose="noisy" if by_one else "clean",
        description=f"Sentences of four domains ({sizes}), {said}, as features of a pre-trained "
        f"MiniLM. MLP {HIDDEN}-64-3. Error on sentences labeled by the mean of all raters, "
        "by domain.",
        noise=0.15 if by_one else 0.0,
        make_data=partial(domain_data, by_one=by_one),
        make_model=partial(mlp, HIDDEN, 64, len(CHOICES)),
        epochs=6,
        start=0,
    )


TEXT_TASKS = (
    _raters("raters", True, 0.15),
    _raters("raters-flips", True, 0.35, flips=0.25),
    _raters("raters-clean", False, 0.0),
)
DOMAIN_TASKS = (_domains("domains", True), _domains("domains-clean", False))
