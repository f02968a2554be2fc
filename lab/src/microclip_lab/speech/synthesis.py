"""Synthetic speech: random words spoken by espeak-ng, cached as files in LibriSpeech's layout.

A cached folder is named after a hash of everything its content depends on, and is never incomplete.
A speaker is a variant of espeak-ng's voices; those of validation and test utterances do not appear
in training, in any accent. All lines of a call are spoken by a separate process; `espeak_child.py`
says why.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from microclip_lab.speech.features import SAMPLING_RATE, Sound, resampled, with_noise
from microclip_lab.training.fetch import cache_folder

CHILD = Path(__file__).with_name("espeak_child.py")


class SpeakingError(RuntimeError):
    """espeak-ng failed; the message has its output."""


@dataclass(frozen=True)
class Utterance:
    """A text and how to speak it.

    Args:
        text: The words.
        speaker: A variant of espeak-ng's voices, as "f3".
        accent: A language of espeak-ng, as "en-us".
        rate: Words per minute.
        pitch: From 0 to 99.
    """

    text: str
    speaker: str
    accent: str
    rate: int
    pitch: int


def speak(lines: Sequence[Utterance]) -> list[Sound]:
    """Return the audio of every line: 16 kHz, values from -1 to 1."""
    if importlib.util.find_spec("espeakng_loader") is None:
        raise ImportError(
            "Synthetic speech needs espeak-ng, which is not installed. Install it with: "
            "pip install espeakng-loader"
        )
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps([asdict(line) for line in lines]).encode(),
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise SpeakingError(f"espeak-ng failed to speak {len(lines)} lines: {said}")
    rate, at, sounds = _integer(done.stdout, 0), 4, []
    for _ in lines:
        count = _integer(done.stdout, at)
        samples = np.frombuffer(done.stdout, "<i2", count, at + 4)
        sounds.append(resampled(samples.astype(np.float32) / 2**15, rate))
        at += 4 + 2 * count
    return sounds


def _integer(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 4], "little")


WORDS = tuple(
    "zero one two three four five six seven eight nine "  # noqa: SIM905 - twenty quotes less
    "yes no up down left right stop go open close".split()
)
LENGTHS = (3, 6)  # words per utterance
ACCENTS = (
    "en", "en-us", "en-us-nyc", "en-029", "en-gb-scotland",
    "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-gb-x-rp",
)  # fmt: skip
# all variants except whispers, robots and monsters, which people do not understand either
SPEAKERS = tuple(
    "Alex Alicia Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee "  # noqa: SIM905
    "Marco Mario Michael Mike Nguyen Reed adam anika antonio aunty belinda benjamin boris caleb "
    "david ed edward edward2 f1 f2 f3 f4 f5 grandma grandpa gustave ian iven iven2 iven3 iven4 "
    "john kaukovalta linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel mike2 norbert pablo "
    "paul pedro quincy rob robert sandro shelby steph steph2 steph3 travis victor zac".split()
)
HELD_BACK = 12  # speakers for validation, and as many for test
RATES = (130, 190)  # words per minute
PITCHES = (25, 75)


@dataclass(frozen=True)
class Cast:
    """The speakers of each split."""

    training: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]


def cast(seed: int) -> Cast:
    """Return the speakers of each split, for a seed."""
    order = [str(name) for name in np.random.default_rng((seed, 1)).permutation(SPEAKERS)]
    validation, test = order[:HELD_BACK], order[HELD_BACK : 2 * HELD_BACK]
    return Cast(tuple(order[2 * HELD_BACK :]), tuple(validation), tuple(test))


def corpus(seed: int, training: int, judged: int) -> dict[str, list[Utterance]]:
    """Return the utterances of each split."""
    speakers = cast(seed)
    parts = {
        "train-espeak": (training, speakers.training),
        "dev-espeak": (judged, speakers.validation),
        "test-espeak": (judged, speakers.test),
    }
    return {
        name: spoken_strings(count, WORDS, voices, np.random.default_rng((seed, 2, place)))
        for place, (name, (count, voices)) in enumerate(parts.items())
    }


def spoken_strings(
    count: int,
    words: Sequence[str],
    speakers: Sequence[str],
    draw: np.random.Generator,
    faster: tuple[float, float] = (1.0, 1.0),
) -> list[Utterance]:
    """Return random word strings by random speakers, at `faster` times the usual rate."""
    lines = []
    for _ in range(count):
        length = draw.integers(LENGTHS[0], LENGTHS[1] + 1)
        text = " ".join(words[place] for place in draw.integers(len(words), size=length).tolist())
        rate = draw.uniform(*RATES) * draw.uniform(*faster)
        lines.append(
            Utterance(
                text,
                speakers[int(draw.integers(len(speakers)))],
                ACCENTS[int(draw.integers(len(ACCENTS)))],
                round(rate),
                int(draw.integers(PITCHES[0], PITCHES[1] + 1)),
            )
        )
    return lines


EDITION = 1  # increase it when the way recordings are made changes
BLOCK = 250  # lines per process; fixed, so that results do not depend on the number of cores


def recorded(
    parts: Mapping[str, Sequence[Utterance]], decibels: tuple[float, float], seed: int
) -> Path:
    """Return a folder with the spoken lines of each split, mixed with noise."""
    content = {
        "parts": {name: [asdict(line) for line in lines] for name, lines in parts.items()},
        "decibels": decibels,
        "seed": seed,
        "edition": EDITION,
        "espeakng-loader": _espeak_version(),
    }
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    folder = cache_folder() / "speech" / key
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".recording-"))
    try:
        for place, (name, lines) in enumerate(parts.items()):
            _record(lines, made / name, decibels, (seed, place))
        try:
            made.rename(folder)
        except OSError:  # another process was faster, with the same result
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def name_of(place: int, line: Utterance) -> str:
    """Return the name of a line's recording."""
    return f"{line.speaker}-0-{place:05d}"


def _record(
    lines: Sequence[Utterance], folder: Path, decibels: tuple[float, float], seed: tuple[int, int]
) -> None:
    transcripts: dict[str, list[str]] = {}
    for place, line in enumerate(lines):
        transcripts.setdefault(line.speaker, []).append(f"{name_of(place, line)} {line.text}\n")
    for speaker, texts in transcripts.items():
        chapter = folder / speaker / "0"
        chapter.mkdir(parents=True)
        (chapter / f"{speaker}-0.trans.txt").write_text("".join(texts), encoding="utf-8")

    def record_block(first: int) -> None:
        import soundfile  # type: ignore[import-untyped]

        block = lines[first : first + BLOCK]
        for place, (line, sound) in enumerate(zip(block, speak(block), strict=True), first):
            draw = np.random.default_rng((*seed, place))
            mixed = with_noise(sound, draw.uniform(*decibels), draw)
            path = folder / line.speaker / "0" / f"{name_of(place, line)}.flac"
            soundfile.write(path, mixed, SAMPLING_RATE, subtype="PCM_16")

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(record_block, range(0, len(lines), BLOCK)))


def _espeak_version() -> str:
    try:
        return version("espeakng-loader")
    except PackageNotFoundError:
        return "none"
