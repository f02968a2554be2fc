"""Speech: short strings of spoken digits with wrong transcripts, a tiny network, and CTC.

Synthesized by espeak-ng, once per process. Words are the tokens, so a few seconds of training are
enough.
"""

from __future__ import annotations

import functools
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip_lab.dirty_data.task import Data, Part, Task, chosen
from microclip_lab.speech.features import extract, make_extractor, with_noise
from microclip_lab.speech.synthesis import (
    ACCENTS,
    PITCHES,
    SPEAKERS,
    WORDS,
    Utterance,
    speak,
)
from microclip_lab.speech.tokens import BLANK, Tokens, greedy

UTTERANCES, VALIDATION, TESTED = 512, 384, 640
TOKENS = Tokens(WORDS[:10], " ")
LENGTHS = (2, 3)  # words
RATES = (130, 170)  # words per minute
DECIBELS = (5.0, 20.0)  # signal-to-noise ratio
BANDS, STACK = 16, 4  # mel bands, and frames of 10 ms seen at once
FRAMES = 28  # longer utterances are cut, shorter ones end in silence


@functools.cache
def recordings() -> tuple[Tensor, Tensor]:
    """Return features and transcripts: (utterances, frames, bands), and words padded with 0."""
    draw = np.random.default_rng(20)
    lines = []
    for _ in range(UTTERANCES + VALIDATION + TESTED):
        count = int(draw.integers(LENGTHS[0], LENGTHS[1] + 1))
        words = [TOKENS.symbols[place] for place in draw.integers(len(TOKENS) - 1, size=count)]
        speaker, accent = SPEAKERS[draw.integers(len(SPEAKERS))], ACCENTS[draw.integers(2)]
        rate, pitch = draw.integers(*RATES), draw.integers(*PITCHES)
        lines.append(Utterance(" ".join(words), speaker, accent, int(rate), int(pitch)))
    extractor = make_extractor(BANDS, STACK)
    features = torch.zeros(len(lines), FRAMES, STACK * BANDS)
    transcripts = torch.full((len(lines), LENGTHS[1]), BLANK)
    for row, (line, sound) in enumerate(zip(lines, speak(lines), strict=True)):
        noisy = with_noise(sound, draw.uniform(*DECIBELS), draw)
        frames = torch.from_numpy(extract(noisy, extractor)[:FRAMES]).flatten(1)
        features[row, : len(frames)] = frames
        numbers = TOKENS.numbers(line.text)
        transcripts[row, : len(numbers)] = torch.tensor(numbers)
    return features, transcripts


def speech_data(seed: int, noise: float) -> Data:
    """Return utterances, some with the transcript of another."""
    features, transcripts = recordings()
    draw = np.random.default_rng((seed, 21))
    order = torch.from_numpy(draw.permutation(len(features)))
    parts = order.split_with_sizes([UTTERANCES, VALIDATION, TESTED])

    def dirty(rows: Tensor) -> tuple[Part, Tensor]:
        wrong = chosen(len(rows), noise, draw)
        given = transcripts[rows].clone()
        for row in wrong.nonzero()[0]:
            differ = (transcripts != given[row]).any(1).nonzero().squeeze(1)
            given[row] = transcripts[differ[draw.integers(len(differ))]]
        return Part(features[rows], given), torch.tensor(wrong)

    training, wrong = dirty(parts[0])
    validation, _ = dirty(parts[1])
    return Data(training, wrong, validation, Part(features[parts[2]], transcripts[parts[2]]))


class Listener(nn.Module):
    """Two layers over windows of frames, then words; returns (utterances, frames, tokens)."""

    def __init__(self, hidden: int = 96, windows: tuple[int, int] = (3, 5)) -> None:
        super().__init__()
        self.windows = windows
        self.inner = nn.Linear(windows[0] * STACK * BANDS, hidden)
        self.middle = nn.Linear(windows[1] * hidden, hidden)
        self.outer = nn.Linear(hidden, len(TOKENS))
        self.first_norm, self.second_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        with torch.no_grad():
            self.outer.bias[BLANK] = -2  # otherwise, CTC predicts only blanks for long

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of every frame."""
        heard = F.relu(self.first_norm(self.inner(_windows(inputs, self.windows[0]))))
        heard = F.relu(self.second_norm(self.middle(_windows(heard, self.windows[1]))))
        logits: Tensor = self.outer(heard)
        return logits


def _windows(frames: Tensor, width: int) -> Tensor:
    """Return each frame with its neighbors."""
    padded = F.pad(frames, (0, 0, width // 2, width // 2))
    return torch.cat([padded[:, k : k + frames.shape[1]] for k in range(width)], dim=2)


def transcript_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the CTC loss of each utterance, per word."""
    lengths = (targets != BLANK).sum(1)
    frames = torch.full((len(outputs),), outputs.shape[1])
    log_probabilities = F.log_softmax(outputs, 2).transpose(0, 1)
    each = F.ctc_loss(log_probabilities, targets, frames, lengths, BLANK, reduction="none")
    return each / lengths


def word_error_rate(outputs: Tensor, targets: Tensor) -> float:
    """Return the word error rate in percent, times -1, by greedy decoding."""
    import jiwer

    heard = greedy(outputs, torch.full((len(outputs),), outputs.shape[1]), TOKENS)
    said = [TOKENS.text([number for number in row if number]) for row in targets.tolist()]
    return -100 * float(jiwer.wer(said, heard))


NOISE = 0.1
SPEECH_TASKS = (
    Task(
        name="speech-10",
        title="Speech, 10 % wrong transcripts",
        purpose="noisy",
        kind="speech",
        description=f"{UTTERANCES:,} strings of two or three digits spoken by espeak-ng in noise, "
        f"{NOISE:.0%} with the transcript of another. A network of three layers with CTC over "
        f"words. Points are -100 x the word error rate on {TESTED} clean utterances.",
        noise=NOISE,
        make_data=partial(speech_data, noise=NOISE),
        make_model=Listener,
        losses=transcript_losses,
        validate=word_error_rate,
        test=word_error_rate,
        epochs=36,
        start=2,
    ),
)
