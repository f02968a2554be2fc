"""Recording: lines become files in LibriSpeech's layout, once, and are found again after that.

A folder of recordings is named after all that they depend on, and is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from microclip_lab.speech.espeak import Line, speak
from microclip_lab.speech.sound import SAMPLING_RATE, with_noise
from microclip_lab.training.fetch import cache_folder

EDITION = 1  # whoever changes how recordings are made counts it up
BLOCK = 250  # lines that one process speaks; fixed, so that cores change nothing but the time


def recorded(parts: Mapping[str, Sequence[Line]], decibels: tuple[float, float], seed: int) -> Path:
    """Return a folder with the lines of each part, spoken, with noise that far below the voice."""
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
        except OSError:  # another process was faster; what it made is the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def name_of(place: int, line: Line) -> str:
    """Return the name that the recording of a part's line goes by."""
    return f"{line.speaker}-0-{place:05d}"


def _record(
    lines: Sequence[Line], folder: Path, decibels: tuple[float, float], seed: tuple[int, int]
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
