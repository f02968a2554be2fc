"""Speaking: lines of text in, sound out. Always the same sound for the same lines.

All lines of a call are spoken by one process of its own; `espeak_child.py` says why.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from microclip_lab.speech.sound import Sound, resampled

CHILD = Path(__file__).with_name("espeak_child.py")


class SpeakingError(RuntimeError):
    """espeak-ng could not speak; the message says what it said instead."""


@dataclass(frozen=True)
class Line:
    """What is said, and how.

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


def speak(lines: Sequence[Line]) -> list[Sound]:
    """Return the sound of every line: 16 kHz, values from -1 to 1."""
    if importlib.util.find_spec("espeakng_loader") is None:
        raise ImportError(
            "Words are spoken by espeak-ng, which is not installed: "
            "pip install microclip-lab brings it."
        )
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps([asdict(line) for line in lines]).encode(),
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise SpeakingError(f"Speaking {len(lines)} lines failed: {said}")
    rate, at, sounds = _integer(done.stdout, 0), 4, []
    for _ in lines:
        count = _integer(done.stdout, at)
        samples = np.frombuffer(done.stdout, "<i2", count, at + 4)
        sounds.append(resampled(samples.astype(np.float32) / 2**15, rate))
        at += 4 + 2 * count
    return sounds


def _integer(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 4], "little")
