"""Canaries: random word strings, spoken too fast, inserted into the training data on purpose.

A model can only memorize them, since they contain nothing that helps elsewhere. So its error rate
on canaries it was trained on, compared with unseen ones of the same kind, measures memorization.
They are also draggers that are known exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from microclip_lab.speech.librispeech import in_split
from microclip_lab.speech.recordings import Recording
from microclip_lab.speech.synthesis import name_of, recorded, spoken_strings

FASTER = (2.0, 4.0)  # relative speaking rate
COPIES = (1, 2, 4, 8, 16)  # how often a canary is inserted
INSERTED = "canary x"  # followed by the number of copies
UNSEEN = "unseen canary"


@dataclass(frozen=True)
class Canaries:
    """Recorded canaries."""

    inserted: Sequence[Recording]  # each with "canary x4", its number of copies, as its kind
    unseen: Sequence[Recording]  # as many others, which are not in the training data
    copies: Sequence[int]  # of each inserted one

    def copied(self) -> list[Recording]:
        """Return all copies for the training data, each with its own name."""
        return [
            replace(canary, name=f"canary-{number:04d}-copy-{copy:02d}-of-{copies:02d}")
            for number, (canary, copies) in enumerate(zip(self.inserted, self.copies, strict=True))
            for copy in range(1, copies + 1)
        ]


def rows_for(share: float, others: int) -> int:
    """Return how many canary rows make up this share, given the number of other rows."""
    return round(share * others / (1 - share))


def copies_of(rows: int) -> list[int]:
    """Return the copies per canary that add up to this many rows.

    >>> copies_of(40)
    [1, 2, 4, 8, 16, 1, 2, 4, 2]
    """
    found: list[int] = []
    for copies in itertools.cycle(COPIES):
        left = rows - sum(found)
        if left <= 0:
            break
        found.append(max(each for each in COPIES if each <= min(copies, left)))
    return found


def is_canary(kind: str) -> bool:
    """Return whether a kind of recording is a canary."""
    return kind.startswith(INSERTED) or kind == UNSEEN


def record(
    rows: int,
    words: Sequence[str],
    speakers: Sequence[str],
    decibels: tuple[float, float],
    seed: int,
) -> Canaries:
    """Return canaries with this many training rows, of these words, by these speakers."""
    copies = copies_of(rows)
    if not copies:
        return Canaries((), (), ())
    lines = {
        part: spoken_strings(
            len(copies), words, speakers, np.random.default_rng((seed, 3, place)), FASTER
        )
        for place, part in enumerate(("inserted", "unseen"))
    }
    folder = recorded(lines, decibels, seed)
    found = {}
    for part, spoken in lines.items():
        by_name = {recording.name: recording for recording in in_split(folder / part)}
        found[part] = [by_name[name_of(place, line)] for place, line in enumerate(spoken)]
    return Canaries(
        [
            replace(recording, kind=f"{INSERTED}{count}")
            for recording, count in zip(found["inserted"], copies, strict=True)
        ],
        [replace(recording, kind=UNSEEN) for recording in found["unseen"]],
        copies,
    )
