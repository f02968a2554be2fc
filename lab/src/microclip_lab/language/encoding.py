"""From texts to tokens, and from tokens to batches. Knows nothing of files or models.

A tokenizer comes from a checkpoint or is trained on the texts; training depends on the texts and
their order alone, so every process and every resumed run gets the same one. Texts are tokenized
once, when data is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from microclip_lab.language import superglue_tasks, vader
from microclip_lab.language.examples import Example
from microclip_lab.language.metrics import best_f1, is_exact
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import SettingError

PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN = "<pad>", "</s>", "<unk>"  # ids 0, 1 and 2, as in T5


def train_tokenizer(texts: Sequence[str], size: int) -> Any:
    """Return a lower-case tokenizer with at most `size` tokens, trained on texts."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token=UNKNOWN_TOKEN))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("contiguous")]
    )
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        texts,
        BpeTrainer(
            vocab_size=size,
            special_tokens=[PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN],
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"$A {END_TOKEN}", special_tokens=[(END_TOKEN, made.token_to_id(END_TOKEN))]
    )
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(
        tokenizer_object=made, pad_token=PAD_TOKEN, eos_token=END_TOKEN, unk_token=UNKNOWN_TOKEN
    )


def load_tokenizer(checkpoint: str) -> Any:
    """Return the tokenizer of a checkpoint, a hub name or a folder."""
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, ImportError) as error:
        raise SettingError(
            f"The tokenizer of {checkpoint} could not be loaded: {error} Give the hub name of "
            "a T5 checkpoint, or a folder with tokenizer.json; one that has only spiece.model "
            "needs `pip install sentencepiece`."
        ) from error
    if loaded.pad_token_id != 0:
        raise SettingError(
            f"A T5 tokenizer has padding as token 0, but {checkpoint} has {loaded.pad_token_id}."
        )
    return loaded


Tokens = npt.NDArray[np.int32]
Batch = dict[str, Tensor]

PAD, END, UNKNOWN = 0, 1, 2  # T5's ids; decoders start with PAD
IGNORED = -100  # a label to ignore
DOMAINS = (*vader.DOMAINS, *superglue_tasks.NAMES)


@dataclass(frozen=True)
class Encoded:
    """A tokenized example; the fields for evaluation are empty in training."""

    source: Tokens
    target: Tokens
    domain: int  # index in DOMAINS
    group: int
    choices: tuple[Tokens, ...] = ()
    exact: tuple[float, ...] = ()  # of each choice
    f1: tuple[float, ...] = ()


@dataclass(frozen=True)
class Encoder:
    """Tokenizes examples; long texts are truncated, keeping the end token."""

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
        """Return examples for evaluation: with choices and their scores."""
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
    rng: BatchRng,
    word_dropout: float,
    source_length: int,
    domain_weights: Mapping[str, float],
) -> Batch:
    """Return a training batch, with word dropout and, if given, domain weights."""
    source, mask = _padded([example.source for example in examples], PAD)
    if word_dropout:
        # drawn for the maximum length: what is drawn for a word must not depend on the other
        # examples in this part of the mini-batch
        drawn = torch.from_numpy(rng.random(source_length))[:, : source.shape[1]]
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
    """Return an evaluation batch; choices are (examples, choices, tokens)."""
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
    """Return padded rows and their mask."""
    lengths = np.array([len(row) for row in rows])
    there = np.arange(lengths.max())[None] < lengths[:, None]
    padded = np.full(there.shape, filler, dtype=np.int64)
    padded[there] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(there.astype(np.int64))


def _worth(rows: Sequence[Sequence[float]], most: int) -> Tensor:
    return torch.tensor([[*row, *[0.0] * (most - len(row))] for row in rows])
