"""Speech: spoken digits, pre-trained on clean voices, fine-tuned on others, with canaries.

Canaries are random words spoken three to five times as fast: right transcripts from which little
can be learned. Voices the network was pre-trained on have two accents; those it is
fine-tuned on and tested on have others, and speak in noise. Features are synthesized once and
cached.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from microclip_lab.dirty_data.speech_tasks import (
    BANDS,
    FRAMES,
    STACK,
    TOKENS,
    Listener,
    transcript_losses,
    word_error_rate,
)
from microclip_lab.dirty_data.task import Data, Part, Task
from microclip_lab.evidence.wording import percent
from microclip_lab.speech.features import extract, make_extractor, with_noise
from microclip_lab.speech.synthesis import ACCENTS, PITCHES, SPEAKERS, Utterance, speak
from microclip_lab.speech.tokens import BLANK
from microclip_lab.training.fetch import cache_folder

EDITION = 1  # increase it when features change
EARLIER, OTHERS, FAST = 2048, 4608, 400  # utterances synthesized: to pre-train, to tune, canaries
TRAINING, VALIDATION, TEST = 512, 512, 3072
CANARIES, MORE = 0.07, 0.2
FASTER = (3.0, 5.0)  # relative speaking rate of canaries
BEFORE, AFTER = ACCENTS[:2], ACCENTS[2:]
QUIET, LOUD = (15.0, 30.0), (0.0, 12.0)  # signal-to-noise ratios in dB
WORDS, RATES = (2, 3), (130, 170)


def _lines(
    count: int, accents: Sequence[str], faster: tuple[float, float], draw: np.random.Generator
) -> list[Utterance]:
    found = []
    for _ in range(count):
        number = int(draw.integers(WORDS[0], WORDS[1] + 1))
        words = [TOKENS.symbols[place] for place in draw.integers(len(TOKENS) - 1, size=number)]
        found.append(
            Utterance(
                " ".join(words),
                SPEAKERS[int(draw.integers(len(SPEAKERS)))],
                accents[int(draw.integers(len(accents)))],
                round(draw.uniform(*RATES) * draw.uniform(*faster)),
                int(draw.integers(*PITCHES)),
            )
        )
    return found


def _recorded(
    lines: Sequence[Utterance], decibels: tuple[float, float], draw: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return features, (utterances, frames, values), and transcripts padded with blanks."""
    extractor = make_extractor(BANDS, STACK)
    features = torch.zeros(len(lines), FRAMES, STACK * BANDS)
    transcripts = torch.full((len(lines), WORDS[1]), BLANK)
    for first in range(0, len(lines), 500):
        block = lines[first : first + 500]
        for row, (line, sound) in enumerate(zip(block, speak(block), strict=True), first):
            noisy = with_noise(sound, draw.uniform(*decibels), draw)
            frames = torch.from_numpy(extract(noisy, extractor)[:FRAMES]).flatten(1)
            features[row, : len(frames)] = frames
            numbers = TOKENS.numbers(line.text)
            transcripts[row, : len(numbers)] = torch.tensor(numbers)
    return features, transcripts


@functools.cache
def recordings() -> dict[str, tuple[Tensor, Tensor]]:
    """Return features and transcripts of what came before, of the task, and of canaries."""
    usual = (1.0, 1.0)
    return {
        "before": _cached(EARLIER, BEFORE, usual, QUIET, 51),
        "after": _cached(OTHERS, AFTER, usual, LOUD, 52),
        "canaries": _cached(FAST, AFTER, FASTER, LOUD, 53),
    }


def _cached(
    count: int,
    accents: tuple[str, ...],
    faster: tuple[float, float],
    decibels: tuple[float, float],
    seed: int,
) -> tuple[Tensor, Tensor]:
    key = repr((EDITION, count, accents, faster, decibels, WORDS, RATES, FRAMES, seed))
    path = cache_folder() / f"spoken-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
    if not path.exists():
        draw = np.random.default_rng(seed)
        made = _recorded(_lines(count, accents, faster, draw), decibels, draw)
        part = path.with_suffix(f".{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, part)
        part.replace(path)
    features, transcripts = torch.load(path, weights_only=True)
    return features, transcripts


def spoken_data(seed: int, share: float) -> Data:
    """Return utterances of shifted voices, a share of them canaries."""
    found = recordings()
    features, transcripts = found["after"]
    fast_features, fast_transcripts = found["canaries"]
    draw = np.random.default_rng((seed, 52))
    order = torch.from_numpy(draw.permutation(len(features)))
    fast = torch.from_numpy(draw.permutation(len(fast_features)))

    def part(first: int, count: int, canaries: Tensor) -> tuple[Part, Part, Tensor]:
        rows = order[first : first + count]
        right = Part(features[rows], transcripts[rows])
        inputs, targets = right.inputs.clone(), right.targets.clone()
        wrong = torch.zeros(count, dtype=torch.bool)
        wrong[torch.from_numpy(draw.permutation(count)[: len(canaries)].copy())] = True
        inputs[wrong], targets[wrong] = fast_features[canaries], fast_transcripts[canaries]
        return Part(inputs, targets), right, wrong

    first, second = round(share * TRAINING), round(share * VALIDATION)
    training, _, wrong = part(0, TRAINING, fast[:first])
    validation, right, _ = part(TRAINING, VALIDATION, fast[first : first + second])
    rows = order[TRAINING + VALIDATION : TRAINING + VALIDATION + TEST]
    return Data(training, wrong, validation, Part(features[rows], transcripts[rows]), right)


@functools.cache
def pretrained_on_speech() -> dict[str, Tensor]:
    """Return weights trained on clean voices: a checkpoint, the same for all seeds."""
    features, transcripts = recordings()["before"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(53)
        model = Listener(hidden=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
        for epoch in range(10):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * (1 - epoch / 10)
            for rows in torch.split(torch.randperm(len(features)), 64):
                optimizer.zero_grad()
                loss = transcript_losses(model(features[rows]), transcripts[rows]).mean()
                torch.autograd.backward(loss)
                optimizer.step()
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def tuned_listener() -> nn.Module:
    """Return the pre-trained network."""
    model = Listener(hidden=64)
    model.load_state_dict(pretrained_on_speech())
    return model


def _speech(name: str, share: float, *, tuned: bool, batch_size: int = 32) -> Task:
    what = f"{percent(share)} canaries" if share else "clean"
    how = "fine-tuned" if tuned else "from scratch"
    many = f", {batch_size // 4} micro-batches of 4" if batch_size > 100 else ""
    return Task(
        name=name,
        title=f"Speech, {how}, {what}{many}",
        purpose="noisy" if share else "clean",
        kind="speech",
        description=f"{TRAINING:,} strings of two or three digits by espeak-ng, {what}; B = "
        f"{batch_size}. A small network with CTC over words, "
        + (f"pre-trained on {EARLIER:,} clean utterances of other accents" if tuned else how)
        + f". Word error rate on {TEST:,} clean utterances.",
        noise=share,
        make_data=partial(spoken_data, share=share),
        make_model=tuned_listener if tuned else partial(Listener, hidden=64),
        losses=transcript_losses,
        validate=word_error_rate,
        test=word_error_rate,
        epochs=12 if batch_size == 32 else 48,
        batch_size=batch_size,
        start=0 if tuned else 2,
    )


SPEECH_TASKS = (
    _speech("speech-tuned", CANARIES, tuned=True),
    _speech("speech-tuned-20", MORE, tuned=True),
    _speech("speech-scratch-20", MORE, tuned=False),
    _speech("speech-tuned-clean", 0.0, tuned=True),
    _speech("speech-tuned-128", MORE, tuned=True, batch_size=512),
    _speech("speech-scratch", CANARIES, tuned=False),
)
