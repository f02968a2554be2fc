"""Examples as tokens, and tokens as batches. Knows nothing of where texts come from, or of models.

Everything is tokenized once, when data is loaded: a batch is then only put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from microclip_lab.language import tasks, vader
from microclip_lab.language.example import Example
from microclip_lab.language.metrics import best_f1, is_exact
from microclip_lab.training.batch_rng import Draws

Tokens = npt.NDArray[np.int32]
Batch = dict[str, Tensor]

PAD, END, UNKNOWN = 0, 1, 2  # T5's numbers; a decoder begins with PAD
IGNORED = -100  # a label that is not there
DOMAINS = (*vader.DOMAINS, *tasks.NAMES)


@dataclass(frozen=True)
class Encoded:
    """An example in tokens; what is only for judging is empty in training."""

    source: Tokens
    target: Tokens
    domain: int  # place in DOMAINS
    group: int
    choices: tuple[Tokens, ...] = ()
    exact: tuple[float, ...] = ()  # of each choice
    f1: tuple[float, ...] = ()


@dataclass(frozen=True)
class Encoder:
    """Tokenizes examples; what is too long is cut off, its end kept."""

    tokenizer: Any
    source_length: int
    target_length: int

    def training(self, examples: Sequence[Example]) -> list[Encoded]:
        """Return examples to train on."""
        sources = self._tokens([example.source for example in examples], self.source_length)
        targets = self._tokens([example.target for example in examples], self.target_length)
        return [
            Encoded(source, target, DOMAINS.index(example.domain), 0)
            for example, source, target in zip(examples, sources, targets, strict=True)
        ]

    def judged(self, examples: Sequence[Example]) -> list[Encoded]:
        """Return examples to be judged: with their choices, and what each is worth."""
        names = {example.group or example.id for example in examples}
        groups = {name: number for number, name in enumerate(sorted(names))}
        answers = sorted({choice for example in examples for choice in example.choices})
        known = dict(zip(answers, self._tokens(answers, self.target_length), strict=True))
        return [
            Encoded(
                encoded.source,
                encoded.target,
                encoded.domain,
                groups[example.group or example.id],
                tuple(known[choice] for choice in example.choices),
                tuple(float(is_exact(choice, example.answers)) for choice in example.choices),
                tuple(best_f1(choice, example.answers) for choice in example.choices),
            )
            for example, encoded in zip(examples, self.training(examples), strict=True)
        ]

    def _tokens(self, texts: list[str], length: int) -> list[Tokens]:
        found = self.tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        return [np.array(tokens, dtype=np.int32) for tokens in found]


def training_batch(
    examples: Sequence[Encoded],
    draws: Draws,
    word_dropout: float,
    source_length: int,
    domain_weights: Mapping[str, float],
) -> Batch:
    """Return a batch to train on, some of its tokens unknown; with weights, if domains have any."""
    source, mask = _padded([example.source for example in examples], PAD)
    if word_dropout:
        # drawn for the longest text there may be: what is drawn for a word must not depend on
        # which other examples are in the same part of the mini-batch
        drawn = torch.from_numpy(draws.random(source_length))[:, : source.shape[1]]
        source = torch.where((drawn < word_dropout) & (source > UNKNOWN), UNKNOWN, source)
    batch = {
        "input_ids": source,
        "attention_mask": mask,
        "labels": _padded([example.target for example in examples], IGNORED)[0],
    }
    if domain_weights:
        weights = [domain_weights[DOMAINS[example.domain]] for example in examples]
        batch["weights"] = torch.tensor(weights, dtype=torch.float32)
    return batch


def judged_batch(examples: Sequence[Encoded]) -> Batch:
    """Return a batch to be judged: choices are (examples, choices, tokens)."""
    source, mask = _padded([example.source for example in examples], PAD)
    most = max(len(example.choices) for example in examples)
    nothing = np.zeros(0, dtype=np.int32)
    rows = [
        choice
        for example in examples
        for choice in (*example.choices, *[nothing] * (most - len(example.choices)))
    ]
    return {
        "input_ids": source,
        "attention_mask": mask,
        "choices": _padded(rows, IGNORED)[0].view(len(examples), most, -1),
        "exact": _worth([example.exact for example in examples], most),
        "f1": _worth([example.f1 for example in examples], most),
        "domain": torch.tensor([example.domain for example in examples]),
        "group": torch.tensor([example.group for example in examples]),
    }


def _padded(rows: Sequence[Tokens], filler: int) -> tuple[Tensor, Tensor]:
    """Return rows of one length, and where there is something in them."""
    lengths = np.array([len(row) for row in rows])
    there = np.arange(lengths.max())[None] < lengths[:, None]
    padded = np.full(there.shape, filler, dtype=np.int64)
    padded[there] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(there.astype(np.int64))


def _worth(rows: Sequence[Sequence[float]], most: int) -> Tensor:
    return torch.tensor([[*row, *[0.0] * (most - len(row))] for row in rows])
