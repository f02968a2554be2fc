"""A small T5 from scratch on VADER's largest domain, labels by one rater: text to text.

An answer is one token, so the decoder makes a single step: its logits over all tokens are the
output, and the answer's cross-entropy is the loss.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from microclip_lab.dirty_data.task import Data, Part, Task, classification, mislabeled
from microclip_lab.evidence.text_tasks import raters_in_words
from microclip_lab.language import t5, vader
from microclip_lab.language.encoding import PAD, train_tokenizer

DOMAIN = "movie"
SENTENCES, VALIDATION = 3072, 1024
LONGEST, VOCABULARY = 32, 2000
SIZE = t5.Size(width=64, feed_forward=128, heads=4, encoder_layers=1, decoder_layers=1)
ANSWERS = vader.choices(False)


@functools.cache
def _sentences() -> tuple[list[vader.Sentence], list[vader.Sentence]]:
    """Return sentences to train on and to test on, without neutral ones."""
    found: tuple[list[vader.Sentence], ...] = ([], [], [])
    for sentence, part in vader.split(vader.sentences()):
        if sentence.domain == DOMAIN and vader.answer(sentence.mean, vader.CLEAR) in ANSWERS:
            found[part].append(sentence)
    return found[0], found[2]


@functools.cache
def _tokenizer() -> Any:
    texts = [sentence.text for sentence in _sentences()[0]]
    return train_tokenizer([*texts, *ANSWERS * len(texts)], VOCABULARY)  # answers: a token each


@functools.cache
def _tokens(part: int) -> Tensor:
    """Return the tokens of every sentence, padded."""
    texts = [sentence.text for sentence in _sentences()[part]]
    found = _tokenizer()(texts, truncation=True, max_length=LONGEST)["input_ids"]
    tokens = torch.full((len(found), LONGEST), PAD)
    for row, own in enumerate(found):
        tokens[row, : len(own)] = torch.tensor(own)
    return tokens


@functools.cache
def _answer_tokens() -> tuple[int, ...]:
    found = []
    for answer in ANSWERS:
        token, _end = _tokenizer()(answer)["input_ids"]
        found.append(int(token))
    return tuple(found)


def _number(rating: float) -> int:
    """Return the number of an answer; a rater's slight opinion counts as one."""
    return ANSWERS.index("positive" if rating > 0 else "negative")


def sentence_data(seed: int, by_one: bool, flips: float) -> Data:
    """Return sentences labeled by one rater each, or by the mean of all, some of them flipped.

    Raters who took no side are not asked.
    """
    draw = np.random.default_rng((seed, 37))
    training, tested = _sentences()
    rows = draw.permutation(len(training))[: SENTENCES + VALIDATION]
    truth = np.array([_number(training[row].mean) for row in rows])
    given = truth
    if by_one:
        sides = [[rating for rating in training[row].ratings if rating] for row in rows]
        given = np.array([_number(own[draw.integers(len(own))]) for own in sides])
    given = mislabeled(given, flips, len(ANSWERS), draw)[0]
    tokens, answers = _tokens(0)[rows], torch.tensor(_answer_tokens())
    return Data(
        Part(tokens[:SENTENCES], answers[given[:SENTENCES]]),
        torch.from_numpy(given != truth)[:SENTENCES],
        Part(tokens[SENTENCES:], answers[given[SENTENCES:]]),
        Part(_tokens(1), answers[[_number(sentence.mean) for sentence in tested]]),
        Part(tokens[SENTENCES:], answers[truth[SENTENCES:]]),
    )


class Answering(nn.Module):
    """A T5 that answers with one token: returns that token's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.t5 = t5.small(SIZE, len(_tokenizer()), dropout=0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the answer."""
        start = tokens.new_full((len(tokens), 1), PAD)
        logits: Tensor = self.t5(
            input_ids=tokens,
            attention_mask=(tokens != PAD).long(),
            decoder_input_ids=start,
            use_cache=False,
        ).logits
        return logits[:, 0]


def _t5(name: str, by_one: bool, noise: float, flips: float = 0.0) -> Task:
    said = raters_in_words(by_one, noise, flips)
    return classification(
        name=name,
        title=f"T5 from scratch on movie reviews, {said}",
        purpose="noisy" if by_one else "clean",
        description=f"{SENTENCES:,} sentences of VADER's movie reviews, positive or negative, "
        f"{said}. A T5 of one layer each and width {SIZE.width}, without dropout. Error on "
        "sentences labeled by the mean of all raters.",
        noise=noise,
        make_data=partial(sentence_data, by_one=by_one, flips=flips),
        make_model=Answering,
        epochs=10,
        start=0,
    )


T5_TASKS = (
    _t5("t5", True, 0.08),
    _t5("t5-flips", True, 0.26, flips=0.2),
    _t5("t5-clean", False, 0.0),
)
