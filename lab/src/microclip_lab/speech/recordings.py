"""Recordings: where an utterance lies and what is said in it; heard when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from microclip_lab.speech.features import Frames, extract
from microclip_lab.speech.sound import read

KEPT = 2**30  # bytes of frames that are kept in memory, so as not to be made again


@dataclass(frozen=True)
class Recording:
    """An utterance in a file.

    Args:
        name: What it is known by.
        path: Its FLAC or WAV file.
        text: What is said, in lower case.
        samples: How long it is, at 16 kHz.
        kind: Where it comes from: the folder it was in, or "canary x4", "unseen canary".
    """

    name: str
    path: Path
    text: str
    samples: int
    kind: str


@dataclass(frozen=True)
class Heard:
    """An utterance as the model gets it: frames, and what is said in them."""

    frames: Frames
    text: str
    kind: str


@dataclass(frozen=True)
class Recordings(Sequence[Heard]):
    """Utterances that are read, and turned into frames, when they are asked for."""

    files: Sequence[Recording]
    extractor: Any
    _kept: dict[Path, Frames] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, row: int) -> Heard: ...
    @overload
    def __getitem__(self, row: slice) -> Recordings: ...
    def __getitem__(self, row: int | slice) -> Heard | Recordings:
        if isinstance(row, slice):
            return Recordings(self.files[row], self.extractor)
        file = self.files[row]
        frames = self._kept.get(file.path)
        if frames is None:
            frames = extract(read(file.path), self.extractor)
            if (len(self._kept) + 1) * frames.nbytes <= KEPT:  # about: they differ in length
                self._kept[file.path] = frames
        return Heard(frames, file.text, file.kind)
