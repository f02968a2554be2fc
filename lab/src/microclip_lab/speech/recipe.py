"""The speech recipe: data, model and error rates."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from microclip_lab.speech import canaries, librispeech, synthesis
from microclip_lab.speech.features import frame_count, make_extractor, masked
from microclip_lab.speech.model import Positions, extractor_of, from_checkpoint, new
from microclip_lab.speech.recordings import Heard, Recording, Recordings
from microclip_lab.speech.synthesis import recorded
from microclip_lab.speech.tokens import BLANK, Record, Tokens, error_rates, frames_needed, greedy
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.recipe import Data, Recipe

ESPEAK = "espeak"
LETTERS = " 'abcdefghijklmnopqrstuvwxyz"
log = logging.getLogger(__name__)

Batch = dict[str, Any]


@dataclass(frozen=True)
class Speech(Recipe[Heard, Record]):
    """Speech recognition with a Conformer and CTC, on synthetic speech or your own folder."""

    name: ClassVar[str] = "speech"
    headline: ClassVar[str] = "wer"
    lower_is_better: ClassVar[bool] = True

    data: str = ESPEAK
    """"espeak", words spoken by espeak-ng, or a folder in LibriSpeech's layout."""
    utterances: int = 4000
    """espeak: number of training utterances, without canaries."""
    judged_utterances: int = 300
    """espeak: number of validation utterances, and of test utterances, by separate speakers."""
    decibels: tuple[float, float] = (10.0, 30.0)
    """Signal-to-noise ratio in dB, lowest and highest; also for canaries."""
    canaries: float = 0.05
    """Share of training rows that are canaries: random words, too fast, 1 to 16 copies each."""
    alphabet: str = LETTERS
    """Characters of a folder's transcripts, in lower case. Not used by espeak."""

    mels: int = 40
    """Mel bands."""
    stack: int | None = None
    """Frames of 10 ms to stack. Default: 4 for words, 2 for characters."""
    time_masks: int = 0
    """SpecAugment: number of time masks."""
    longest_mask: int = 10
    """Longest time mask in frames; never more than a fifth of the utterance."""
    band_masks: int = 0
    """SpecAugment: number of frequency masks."""
    widest_mask: int = 8
    """Widest frequency mask in mel bands."""

    hidden_size: int = 64
    """Width of the Conformer."""
    layers: int = 2
    """Conformer blocks."""
    heads: int = 4
    """Attention heads."""
    intermediate_size: int = 128
    """Width of the feed-forward layers."""
    kernel_size: int = 15
    """Kernel size of the convolutions, in frames; odd."""
    positions: Positions | None = "rotary"
    """Position embeddings."""
    dropout: float = 0.0
    """Dropout probability, everywhere in the model."""
    checkpoint: str | None = None
    """Pretrained Wav2Vec2-BERT, a hub name or a folder; replaces the sizes and features."""

    def __post_init__(self) -> None:
        for name in ("utterances", "judged_utterances", "mels", "hidden_size", "layers",
                     "heads", "intermediate_size", "kernel_size"):  # fmt: skip
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("time_masks", "longest_mask", "band_masks", "widest_mask"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        self._check("stack", self.stack is None or self.stack >= 1, "at least 1")
        self._check("canaries", 0 <= self.canaries < 1, "a share of at least 0 and below 1")
        self._check("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")
        self._check("decibels", self.decibels[0] <= self.decibels[1], "two numbers, lower first")
        self._check("kernel_size", self.kernel_size % 2 == 1, "odd")
        self._check("widest_mask", self.widest_mask <= self.mels, f"at most mels = {self.mels}")
        self._check(
            "heads",
            self.hidden_size % self.heads == 0,
            f"a divisor of hidden_size = {self.hidden_size}",
        )
        alphabet = self.alphabet
        self._check(
            "alphabet",
            " " in alphabet
            and alphabet == alphabet.lower()
            and len(set(alphabet)) == len(alphabet),
            "distinct lower-case characters, including the space",
        )

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise SettingError(f"{name} must be {wanted}, but got {getattr(self, name)!r}.")

    @classmethod
    def presets(cls) -> Mapping[str, tuple[Speech, Training]]:
        """Return "default", synthetic speech in minutes, and "paper", LibriSpeech on a cluster."""
        return {
            "default": (
                cls(),
                Training(
                    microbatch_size=4,
                    batch_size=16,
                    steps=1500,
                    learning_rate=8e-3,
                    betas=(0.9, 0.98),
                    warmup=0.2,
                    threads=1,
                ),
            ),
            "paper": (
                cls(
                    data="LibriSpeech",
                    canaries=0.01,
                    mels=80,
                    time_masks=10,
                    longest_mask=20,
                    band_masks=2,
                    widest_mask=27,
                    hidden_size=1024,
                    layers=24,
                    heads=16,
                    intermediate_size=4096,
                    kernel_size=31,
                    positions="relative_key",
                    checkpoint="facebook/w2v-bert-2.0",
                ),
                Training(
                    microbatch_size=4,
                    batch_size=512,
                    chunk_size=32,
                    steps=20_000,
                    learning_rate=5e-5,
                    betas=(0.9, 0.98),
                    warmup=0.1,
                    precision="bf16",
                    evaluate_every=1000,
                    workers=8,
                ),
            ),
        }

    @property
    def tokens(self) -> Tokens:
        """The output vocabulary: words for espeak, characters otherwise."""
        if self.data == ESPEAK:
            return Tokens(synthesis.WORDS, " ")
        return Tokens(tuple(self.alphabet), "")

    @property
    def _stack(self) -> int:
        if self.stack is not None:
            return self.stack
        # with characters, a third of the canaries would be too short at 20 ms, and all at 40 ms
        return 4 if self.data == ESPEAK else 2

    def load(self, seed: int) -> Data[Heard]:
        """Return utterances and canaries; the seed determines synthetic speech."""
        folder = (
            self._recorded_corpus(seed) if self.data == ESPEAK else Path(self.data).expanduser()
        )
        parts = librispeech.find(folder)
        training, test = parts["training"], parts["test"]
        words = sorted({word for recording in training for word in recording.text.split()})
        rows = canaries.rows_for(self.canaries, len(training))
        made = canaries.record(rows, words, synthesis.cast(seed).training, self.decibels, seed)
        inserted = made.copied()
        for recording in (*training, *parts["validation"], *test):
            self._numbers(recording)
        extractor = self._extractor()
        infeasible = self._infeasible([*training, *inserted], extractor.stride)
        return Data(
            Recordings([*training, *inserted], extractor),
            Recordings(parts["validation"], extractor),
            Recordings([*test, *made.inserted, *made.unseen], extractor),
            ids=[recording.name for recording in (*training, *inserted)],
            domains=["speech"] * len(training) + ["canary"] * len(inserted),
            facts={
                "tokens": len(self.tokens),
                "canaries": len(made.inserted),
                "canary rows": len(inserted),
                "training utterances too short for their text": infeasible,
            },
        )

    def _recorded_corpus(self, seed: int) -> Path:
        lines = synthesis.corpus(seed, self.utterances, self.judged_utterances)
        return recorded(lines, self.decibels, seed)

    def _extractor(self) -> Any:
        if self.checkpoint is None:
            return make_extractor(self.mels, self._stack)
        return extractor_of(self.checkpoint)

    def _numbers(self, recording: Recording) -> list[int]:
        try:
            return self.tokens.numbers(recording.text)
        except ValueError as error:
            raise SettingError(
                f"The transcript of {recording.path} cannot be encoded: {error} Give all "
                f"characters with --alphabet; it is {self.alphabet!r}."
            ) from error

    def _infeasible(self, recordings: Sequence[Recording], stack: int) -> int:
        """Count utterances with fewer frames than CTC needs for their text, with a warning."""
        count = sum(
            frame_count(recording.samples, stack) < frames_needed(self._numbers(recording))
            for recording in recordings
        )
        if count:
            log.warning(
                "%d of %d training utterances have fewer frames than CTC needs for their text: "
                "their loss counts as 0, and nothing is learned from them. A smaller stack, now "
                "%d, gives them more.",
                count, len(recordings), stack,
            )  # fmt: skip
        return count

    def build(self, data: Data[Heard]) -> nn.Module:
        """Return the model, new or from the checkpoint."""
        if self.checkpoint is not None:
            return from_checkpoint(self.checkpoint, len(self.tokens))
        return new(
            tokens=len(self.tokens),
            inputs=self.mels * self._stack,
            hidden_size=self.hidden_size,
            layers=self.layers,
            heads=self.heads,
            intermediate_size=self.intermediate_size,
            kernel_size=self.kernel_size,
            positions=self.positions,
            dropout=self.dropout,
        )

    def collate(self, examples: Sequence[Heard], rng: BatchRng | None) -> Batch:
        """Return padded frames and tokens; for evaluation, also the texts."""
        utterances = [example.frames for example in examples]
        if rng is not None and (self.time_masks or self.band_masks):
            utterances = masked(
                utterances,
                time_masks=self.time_masks,
                longest=self.longest_mask,
                band_masks=self.band_masks,
                widest=self.widest_mask,
                rng=rng,
            )
        numbers = [torch.tensor(self.tokens.numbers(example.text)) for example in examples]
        frames = [torch.from_numpy(frames).flatten(1) for frames in utterances]
        lengths = torch.tensor([len(one) for one in frames])
        pad = torch.nn.utils.rnn.pad_sequence
        batch: Batch = {
            "input_features": pad(frames, batch_first=True),
            "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
            "labels": pad(numbers, batch_first=True, padding_value=BLANK),
            "label_lengths": torch.tensor([len(one) for one in numbers]),
        }
        if rng is None:
            batch["texts"] = [example.text for example in examples]
            batch["kinds"] = [example.kind for example in examples]
        return batch

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return CTC losses per token; 0 where there are fewer frames than the text needs."""
        logits, lengths = self._logits(model, batch)
        of_texts: Tensor = F.ctc_loss(
            logits.float().log_softmax(-1).transpose(0, 1),
            batch["labels"],
            lengths,
            batch["label_lengths"],
            blank=BLANK,
            reduction="none",
            zero_infinity=True,
        )
        # per token: otherwise long utterances would dominate their micro-batch
        per_token: Tensor = of_texts / batch["label_lengths"]
        return per_token

    def judge(self, model: nn.Module, batch: Batch) -> Sequence[Record]:
        """Return reference, hypothesis and kind of recording."""
        logits, lengths = self._logits(model, batch)
        understood = greedy(logits, lengths, self.tokens)
        return list(zip(batch["texts"], understood, batch["kinds"], strict=True))

    def _logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        mask = batch["attention_mask"]
        logits = model(input_features=batch["input_features"], attention_mask=mask).logits
        return logits, mask.sum(1)

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return word and character error rates, also of canaries."""
        return error_rates(records)

    def describe(self, data: Data[Heard], row: int) -> Mapping[str, Any]:
        """Return the audio file and its text."""
        assert isinstance(data.training, Recordings)
        recording = data.training.files[row]
        return {"audio": recording.path.read_bytes(), "label": recording.text}
