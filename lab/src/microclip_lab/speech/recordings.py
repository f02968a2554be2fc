"""Recordings: audio files with transcripts, decoded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from microclip_lab.speech.features import Frames, extract, read

KEPT = 2**30  # bytes of features that are cached in memory


@dataclass(frozen=True)
class Recording:
    """An utterance in a file.

    Args:
        name: Its id.
        path: Its FLAC or WAV file.
        text: The transcript, in lower case.
        samples: Its length at 16 kHz.
        kind: Where it comes from: the folder it was in, or "canary x4", "unseen canary".
    """

    name: str
    path: Path
    text: str
    samples: int
    kind: str


@dataclass(frozen=True)
class Heard:
    """An utterance as the model gets it: frames and transcript."""

    frames: Frames
    text: str
    kind: str


@dataclass(frozen=True)
class Recordings(Sequence[Heard]):
    """Utterances that are decoded and turned into frames on demand."""

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
