"""The language recipe: text to text. Ties data, tokens, model and metrics together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip_lab.language import metrics, superglue, t5, vader
from microclip_lab.language.encoding import (
    DOMAINS,
    IGNORED,
    PAD,
    Batch,
    Encoded,
    Encoder,
    judged_batch,
    load_tokenizer,
    train_tokenizer,
    training_batch,
)
from microclip_lab.language.examples import Example, Splits
from microclip_lab.language.metrics import Verdict, majority
from microclip_lab.language.superglue_tasks import TASKS
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.recipe import Data, Recipe

VADER = "vader"


@dataclass(frozen=True)
class Texts(Data[Encoded]):
    """Tokenized data, with the texts and the tokenizer."""

    examples: Sequence[Example] = ()  # the training examples as text
    tokenizer: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Language(Recipe[Encoded, Verdict]):
    """Text classification with T5, on sentences from four domains (VADER) or SuperGLUE tasks."""

    name: ClassVar[str] = "language"
    headline: ClassVar[str] = "accuracy"

    data: str = VADER
    """"vader", or a folder in SuperGLUE's layout: BoolQ/train.jsonl, BoolQ/val.jsonl, ..."""

    labels: vader.Labels = "mean"
    """VADER: training labels, the mean of all raters or a single, perhaps wrong rater."""
    neutral: bool = False
    """VADER: keep sentences that are neither positive nor negative, as a third class."""
    domains: tuple[str, ...] = ()
    """VADER: domains to use, such as movie. Default: all."""
    training_shares: tuple[float, ...] = ()
    """VADER: share of the training sentences to keep per domain, in the order movie, nyt, tweets,
    amazon (or that of domains), drawn with the seed. Default: all."""
    domain_weights: tuple[float, ...] = ()
    """VADER: weight of the training losses per domain, in the same order. Default: 1."""

    tasks: tuple[str, ...] = ()
    """SuperGLUE: tasks to use, such as ReCoRD. Default: all in the folder."""
    most_per_task: int | None = None
    """SuperGLUE: maximum number of training examples per task."""

    checkpoint: str | None = None
    """Pretrained T5 with its tokenizer, a hub name or a folder. Default: a small new one."""
    pretrained: bool = True
    """Use the checkpoint's weights; otherwise only its configuration and tokenizer."""
    source_length: int = 56
    """Maximum number of input tokens."""
    target_length: int = 16
    """Maximum number of answer tokens."""
    dropout: float | None = 0.1
    """Dropout probability; none uses the checkpoint's."""
    word_dropout: float = 0.0
    """Share of input tokens to hide in training."""

    vocabulary: int = 8000
    """Vocabulary size of the tokenizer trained on the data."""
    width: int = 64
    """Width of the small T5."""
    feed_forward: int = 128
    """Width of its feed-forward layers."""
    heads: int = 4
    """Attention heads."""
    encoder_layers: int = 1
    """Encoder layers."""
    decoder_layers: int = 1
    """Decoder layers."""

    def __post_init__(self) -> None:
        for name in (
            *("source_length", "target_length", "vocabulary", "width", "feed_forward", "heads"),
            *("encoder_layers", "decoder_layers", "most_per_task"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} must be 1 or more, but got {value}.")
        for name in ("dropout", "word_dropout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise SettingError(f"{name} must be at least 0 and below 1, but got {value}.")
        if self.width % self.heads:
            raise SettingError(
                f"width must be a multiple of heads, but got {self.width} and {self.heads}."
            )
        if self.checkpoint is None and (not self.pretrained or self.dropout is None):
            option = "--no-pretrained" if not self.pretrained else "--dropout none"
            raise SettingError(f"{option} needs a checkpoint: --checkpoint NAME_OR_FOLDER.")
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise SettingError(
                f"tasks must be among {', '.join(TASKS)}, but got {', '.join(unknown)}."
            )
        self._check_domains()

    def _check_domains(self) -> None:
        for name in ("domains", "training_shares", "domain_weights"):
            if getattr(self, name) and self.data != VADER:
                raise SettingError(
                    f"{name} works with vader only, but the data is {self.data}. Leave it out; to "
                    "choose the tasks of a folder, use --tasks and --most-per-task."
                )
        unknown = [domain for domain in self.domains if domain not in vader.DOMAINS]
        if unknown or len(set(self.domains)) < len(self.domains):
            raise SettingError(
                f"domains must be among {', '.join(vader.DOMAINS)}, without duplicates, but got "
                f"{', '.join(self.domains)}."
            )
        taken = self._domains_taken
        for name in ("training_shares", "domain_weights"):
            values = getattr(self, name)
            if values and len(values) != len(taken):
                raise SettingError(
                    f"{name} must have one number for each of {', '.join(taken)}, in this order, "
                    f"but got {len(values)}: {', '.join(f'{value:g}' for value in values)}."
                )
        for share in self.training_shares:
            if not 0 < share <= 1:
                raise SettingError(
                    f"training_shares must be above 0 and up to 1, but got {share}. To leave a "
                    "domain out, name the others with --domains."
                )
        for weight in self.domain_weights:
            if not 0 < weight < math.inf:
                raise SettingError(f"domain_weights must be finite and above 0, but got {weight}.")

    @property
    def _domains_taken(self) -> tuple[str, ...]:
        return self.domains or vader.DOMAINS

    @classmethod
    def presets(cls) -> Mapping[str, tuple[Recipe[Any, Any], Training]]:
        """Return the presets."""
        small = Training(
            microbatch_size=4,
            by_domain=True,
            batch_size=32,
            steps=1300,
            learning_rate=3e-3,
            warmup=0.05,
            evaluate_every=130,
            threads=1,
        )
        tasks = cls(
            data="superglue",
            source_length=128,
            width=128,
            feed_forward=256,
            encoder_layers=2,
            decoder_layers=2,
        )
        paper = cls(
            data="superglue",
            checkpoint="google/t5-v1_1-base",
            source_length=512,
            target_length=64,
        )
        # as many examples as T5's own fine-tuning saw: 262,144 steps of 128
        large = Training(
            microbatch_size=16,
            batch_size=2048,
            chunk_size=128,
            steps=16_384,
            optimizer="adafactor",
            learning_rate=1e-3,
            weight_decay=0.0,
            schedule="constant",
        )
        return {
            "default": (cls(), small),
            "noisy": (cls(labels="rater", neutral=True), small),
            "superglue": (
                tasks,
                replace(small, learning_rate=1e-3, steps=10_000, evaluate_every=1000),
            ),
            "paper": (paper, large),
        }

    def load(self, seed: int) -> Texts:
        """Read and tokenize the texts."""
        splits = self._splits(seed)
        if self.checkpoint is None:
            texts = [example.source for example in splits.training]
            answers = [a for example in splits.training for a in (example.target, *example.choices)]
            used = train_tokenizer([*texts, *answers], self.vocabulary)
        else:
            used = load_tokenizer(self.checkpoint)
        encoder = Encoder(used, self.source_length, self.target_length)
        return Texts(
            training=encoder.training(splits.training),
            validation=encoder.judged(splits.validation),
            test=encoder.judged(splits.test),
            ids=[example.id for example in splits.training],
            domains=[example.domain for example in splits.training],
            facts=_facts(splits),
            examples=splits.training,
            tokenizer=used,
        )

    def _splits(self, seed: int) -> Splits:
        if self.data == VADER:
            whole = vader.load(vader.sentences(), seed, self.labels, self.neutral)
            return self._mixture(whole, seed)
        return superglue.load(Path(self.data), seed, self.tasks, self.most_per_task)

    def _mixture(self, whole: Splits, seed: int) -> Splits:
        """Return the chosen domains in the chosen shares."""
        taken = self._domains_taken
        shares = self.training_shares or (1.0,) * len(taken)
        chosen = vader.only(whole, taken)
        return vader.thinned(chosen, dict(zip(taken, shares, strict=True)), seed)

    def build(self, data: Data[Encoded]) -> nn.Module:
        """Return a T5."""
        if self.checkpoint is not None:
            return t5.of_checkpoint(self.checkpoint, self.pretrained, self.dropout)
        assert isinstance(data, Texts)
        assert self.dropout is not None
        size = t5.Size(
            self.width, self.feed_forward, self.heads, self.encoder_layers, self.decoder_layers
        )
        return t5.small(size, len(data.tokenizer), self.dropout)

    def collate(self, examples: Sequence[Encoded], rng: BatchRng | None) -> Batch:
        """Return a batch: with answers for training, with all choices for evaluation."""
        if rng is None:
            return judged_batch(examples)
        weights = dict(zip(self._domains_taken, self.domain_weights, strict=False))
        return training_batch(examples, rng, self.word_dropout, self.source_length, weights)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of each example's answer, over its tokens.

        With `domain_weights`, multiplied by the weight of its domain: a control for clipping by
        domain is plain training with the same weights of domains.
        """
        labels = batch["labels"]
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=_shifted(labels),
            use_cache=False,  # no generation, so no cache
        ).logits
        losses = -_log_likelihoods(logits, labels) / (labels != IGNORED).sum(1)
        return losses * batch["weights"] if "weights" in batch else losses

    def judge(self, model: nn.Module, batch: Batch) -> list[Verdict]:
        """Choose the most likely answer for each example."""
        chosen = choose(model, batch)
        rows = torch.arange(len(chosen), device=chosen.device)
        said = zip(
            batch["domain"].tolist(),
            batch["group"].tolist(),
            chosen.tolist(),
            batch["exact"].argmax(1).tolist(),
            batch["exact"][rows, chosen].tolist(),
            batch["f1"][rows, chosen].tolist(),
            strict=True,
        )
        return [Verdict(DOMAINS[domain], *others) for domain, *others in said]

    def summary(self, records: Sequence[Verdict]) -> dict[str, float]:
        """Return accuracies and the metrics of tasks."""
        return metrics.summary(records)

    def describe(self, data: Data[Encoded], row: int) -> Mapping[str, Any]:
        """Return a text, its training label, and the right one if it is known."""
        assert isinstance(data, Texts)
        example = data.examples[row]
        said = {"text": example.source, "label": example.target, "domain": example.domain}
        return said if example.truth is None else {**said, "truth": example.truth}


def choose(model: nn.Module, batch: Batch) -> Tensor:
    """Return the index of the most likely choice for each example.

    Texts are encoded once. Choices are scored one after the other, since a passage may have dozens.
    """
    choices, mask = batch["choices"], batch["attention_mask"]
    likelihoods = torch.full(choices.shape[:2], -torch.inf, device=choices.device)
    states: Tensor | None = None
    for column in range(choices.shape[1]):
        rows = (choices[:, column, 0] != IGNORED).nonzero().squeeze(1)
        labels = choices[rows, column]
        given: dict[str, Any] = (
            {"input_ids": batch["input_ids"]}  # every example has a first choice
            if states is None
            else {"encoder_outputs": (states[rows],)}
        )
        outputs = model(
            **given, attention_mask=mask[rows], decoder_input_ids=_shifted(labels), use_cache=False
        )
        states = outputs.encoder_last_hidden_state if states is None else states
        likelihoods[rows, column] = _log_likelihoods(outputs.logits, labels)
    return likelihoods.argmax(1)


def _log_likelihoods(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-likelihood of each answer, in 32 bits."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -losses.view(labels.shape).sum(1)


def _shifted(labels: Tensor) -> Tensor:
    """Return decoder inputs: labels shifted by one; T5 starts with padding."""
    return F.pad(labels.masked_fill(labels == IGNORED, PAD), (1, -1), value=PAD)


def _facts(splits: Splits) -> dict[str, Any]:
    """Return facts about the data: sizes, majority accuracy, wrong labels."""
    tests = _by_domain(splits.test)
    facts: dict[str, Any] = {
        "training examples by domain": {d: len(o) for d, o in _by_domain(splits.training).items()},
        "test examples by domain": {domain: len(own) for domain, own in tests.items()},
        "majority accuracy by domain": {
            domain: majority([example.answers[0] for example in own])
            for domain, own in tests.items()
            if len({example.choices for example in own})
            == 1  # otherwise there is no majority class
        },
    }
    if all(example.truth is not None for example in splits.training):
        facts["wrong training labels by domain"] = {
            domain: fmean(example.target != example.truth for example in own)
            for domain, own in _by_domain(splits.training).items()
        }
    return facts


def _by_domain(examples: Sequence[Example]) -> dict[str, list[Example]]:
    found: dict[str, list[Example]] = {}
    for example in examples:
        found.setdefault(example.domain, []).append(example)
    return found
