"""Text tasks: the sentiment of VADER's sentences, and a character language model of the same text.

Training and validation sentences, drawn with the seed, are from the training split of
`microclip_lab.language.vader`, test sentences from its test split.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip_lab.dirty_data.task import (
    Data,
    Flags,
    Part,
    Purpose,
    Task,
    chosen,
    classification,
    mislabeled,
    mlp,
)
from microclip_lab.language import vader

# ---- sentiment
SENTENCES, VALIDATION = 3072, 1024
VOCABULARY = 1500


@functools.cache
def _sentences() -> tuple[list[vader.Sentence], list[vader.Sentence]]:
    """Return sentences for training and testing."""
    found = list(vader.split(vader.sentences()))
    return [s for s, part in found if part == 0], [s for s, part in found if part == 2]


def _answer(rating: float) -> str:
    return vader.answer(rating, vader.CLEAR)


def _words(sentence: vader.Sentence) -> set[str]:
    return set(re.findall(r"[a-z']+", sentence.text.lower()))


@functools.cache
def _vocabulary() -> dict[str, int]:
    counts = Counter(word for sentence in _sentences()[0] for word in sorted(_words(sentence)))
    return {word: place for place, (word, _) in enumerate(counts.most_common(VOCABULARY))}


def _bags(sentences: Sequence[vader.Sentence]) -> Tensor:
    """Return which words of the vocabulary each sentence has, as rows of the same norm."""
    known, bags = _vocabulary(), torch.zeros(len(sentences), VOCABULARY)
    for row, sentence in enumerate(sentences):
        bags[row, [known[word] for word in _words(sentence) if word in known]] = 1
    return 4 * F.normalize(bags)  # with norm 1, the first layer would learn slowly


@functools.cache
def _tested(neutral: bool) -> Part:
    test = [s for s in _sentences()[1] if neutral or _answer(s.mean) != "neutral"]
    answers = vader.choices(neutral)
    return Part(_bags(test), torch.tensor([answers.index(_answer(s.mean)) for s in test]))


def vader_data(seed: int, flips: float, neutral: bool) -> Data:
    """Return sentences labeled by one rater each, with some of these labels flipped.

    Without neutral sentences, only raters who took a side are asked.
    """
    draw = np.random.default_rng((seed, 17))
    pool = [s for s in _sentences()[0] if neutral or _answer(s.mean) != "neutral"]
    drawn = [pool[row] for row in draw.permutation(len(pool))[: SENTENCES + VALIDATION]]
    answers = vader.choices(neutral)
    raters = [[rating for rating in s.ratings if rating or neutral] for s in drawn]
    said = [ratings[draw.integers(len(ratings))] for ratings in raters]
    given = np.array([answers.index(_answer(rating)) for rating in said])
    given, _ = mislabeled(given, flips, len(answers), draw)
    truth = np.array([answers.index(_answer(s.mean)) for s in drawn])
    bags, labels = _bags(drawn), torch.tensor(given)
    return Data(
        Part(bags[:SENTENCES], labels[:SENTENCES]),
        torch.tensor(given != truth)[:SENTENCES],
        Part(bags[SENTENCES:], labels[SENTENCES:]),
        _tested(neutral),
    )


def _vader(name: str, title: str, flips: float, neutral: bool, noise: float) -> Task:
    answers = "positive, neutral or negative" if neutral else "positive or negative"
    flipped = f", {flips:.0%} of these labels flipped" if flips else ""
    return classification(
        name=name,
        title=title,
        purpose="noisy",
        description=f"{SENTENCES:,} sentences, {answers} by one rater each{flipped} "
        f"({noise:.0%} wrong). Bag of {VOCABULARY:,} words, MLP with 128 hidden units. Accuracy "
        "on sentences labeled by the mean of all raters.",
        noise=noise,
        make_data=partial(vader_data, flips=flips, neutral=neutral),
        make_model=partial(mlp, VOCABULARY, 128, 3 if neutral else 2),
        epochs=12,
        batch_size=64,
        start=-1,
    )


# ---- character language model
Damage = Literal["none", "garbage", "misaligned"]
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz.,'!?"  # a newline stands for whatever precedes the text
LENGTH = 32  # characters of a document
CONTEXT = 6  # characters that the network sees
SHIFT = 2  # by how many characters misaligned targets are late
DOCUMENTS, STREAM, VALIDATION_DOCUMENTS, TESTED_DOCUMENTS = 1024, 12_288, 512, 1000

Codes = npt.NDArray[np.int64]


@functools.cache
def documents() -> tuple[Codes, Codes]:
    """Return documents for training and testing, one per row: pieces of running text."""
    code = {letter: place for place, letter in enumerate(ALPHABET)}
    texts: dict[int, list[str]] = {0: [], 2: []}
    for sentence, part in vader.split(vader.sentences()):
        if part in texts:
            texts[part].append(sentence.text.lower())

    def cut(lines: list[str]) -> Codes:
        letters = re.sub(r"[^a-z.,'!?]+", " ", " ".join(lines))
        width = LENGTH + SHIFT
        whole = len(letters) // width
        codes = np.array([code[letter] for letter in letters[: whole * width]], dtype=np.int64)
        return codes.reshape(whole, width)

    return cut(texts[0]), cut(texts[2])


def _examples(text: Codes, wrong: Flags, damage: Damage) -> Part:
    """Return what the network sees, and what it has to predict."""
    before = np.zeros((len(text), CONTEXT), dtype=np.int64)
    inputs = np.concatenate([before, text[:, : LENGTH - 1]], axis=1)
    targets = text[:, :LENGTH].copy()
    if damage == "misaligned":
        targets[wrong] = text[wrong, SHIFT:]
    return Part(torch.tensor(inputs), torch.tensor(targets))


def language_data(seed: int, noise: float, damage: Damage, count: int) -> Data:
    """Return documents, some of them random or shuffled characters, or with late targets."""
    training, test = documents()
    draw = np.random.default_rng((seed, 18))
    drawn = training[draw.permutation(len(training))[: count + VALIDATION_DOCUMENTS]].copy()
    wrong = np.concatenate([chosen(count, noise, draw), chosen(VALIDATION_DOCUMENTS, noise, draw)])
    if damage == "garbage":
        for row in wrong.nonzero()[0]:
            if draw.random() < 0.5:
                drawn[row] = draw.permutation(drawn[row])
            else:
                drawn[row] = draw.integers(1, len(ALPHABET), size=drawn.shape[1])
    whole = _examples(drawn, wrong, damage)
    tested = test[np.random.default_rng(19).permutation(len(test))[:TESTED_DOCUMENTS]]
    return Data(
        Part(whole.inputs[:count], whole.targets[:count]),
        torch.tensor(wrong[:count]),
        Part(whole.inputs[count:], whole.targets[count:]),
        _examples(tested, np.zeros(len(tested), dtype=np.bool_), "none"),
    )


class NextCharacter(nn.Module):
    """Predicts a character from the six before it; returns (documents, characters, places)."""

    def __init__(self, width: int = 16, hidden: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.inner = nn.Linear(CONTEXT * width, hidden)
        self.outer = nn.Linear(hidden, len(ALPHABET))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits for every character after the first six, and one more."""
        known = self.embedding(inputs)
        places = inputs.shape[1] - CONTEXT + 1
        seen = torch.cat([known[:, k : k + places] for k in range(CONTEXT)], dim=2)
        logits: Tensor = self.outer(F.relu(self.inner(seen)))
        return logits.transpose(1, 2)


def document_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy per character of each document."""
    return F.cross_entropy(outputs, targets, reduction="none").mean(1)


def median_loss(outputs: Tensor, targets: Tensor) -> float:
    """Return the median document's loss, times -100: which garbage does not dominate."""
    return -100 * float(document_losses(outputs, targets).median())


def mean_loss(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean loss per character, times -100."""
    return -100 * float(document_losses(outputs, targets).mean())


def _language(
    name: str,
    title: str,
    purpose: Purpose,
    noise: float,
    damage: Damage,
    count: int = DOCUMENTS,
    epochs: int = 15,
) -> Task:
    said = {
        "none": "",
        "garbage": f", {noise:.0%} of them random or shuffled characters",
        "misaligned": f", {noise:.0%} of them with targets {SHIFT} characters late",
    }
    passes = "seen once" if epochs == 1 else f"{epochs} epochs"
    return Task(
        name=name,
        title=title,
        purpose=purpose,
        kind="language",
        description=f"{count:,} documents of {LENGTH} characters of English{said[damage]}, "
        f"{passes}. MLP over the last {CONTEXT} characters. Points are -100 x nats per character "
        "on clean documents; on validation data, -100 x the median document's.",
        noise=noise,
        make_data=partial(language_data, noise=noise, damage=damage, count=count),
        make_model=NextCharacter,
        losses=document_losses,
        validate=median_loss,
        test=mean_loss,
        epochs=epochs,
        start=1,
    )


TEXT_TASKS = (
    _vader("vader-rater", "VADER, one rater", 0.0, True, 0.18),
    _vader("vader-flips", "VADER, one rater and 25 % flips", 0.25, False, 0.28),
    _language("lm-garbage", "Characters, 25 % garbage", "noisy", 0.25, "garbage"),
    _language("lm-clean", "Characters", "clean", 0.0, "none"),
    _language("lm-misaligned", "Characters, 25 % misaligned", "failure", 0.25, "misaligned"),
    _language(
        "lm-stream", "Characters, 25 % garbage, one epoch", "failure", 0.25, "garbage", STREAM, 1
    ),
)
