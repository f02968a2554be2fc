"""Canaries: random word strings, spoken too fast, put among the training utterances on purpose.

What a model knows of them it can only have memorised: they tell nothing that would help with
anything else. So how well it writes down those it was trained on, against others of the same kind
that it never met, measures memorisation; and as draggers they are known by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from microclip_lab.speech.librispeech import in_split
from microclip_lab.speech.recordings import Recording
from microclip_lab.speech.script import spoken_strings
from microclip_lab.speech.studio import name_of, recorded

FASTER = (2.0, 4.0)  # times as fast as the others
COPIES = (1, 2, 4, 8, 16)  # how many times one is inserted
INSERTED = "canary x"  # and the number of copies
UNSEEN = "unseen canary"


@dataclass(frozen=True)
class Canaries:
    """Canaries that were recorded."""

    inserted: Sequence[Recording]  # each with "canary x4", its number of copies, as its kind
    unseen: Sequence[Recording]  # as many again, which are in no training data
    copies: Sequence[int]  # of each that is inserted

    def copied(self) -> list[Recording]:
        """Return what goes into the training data: every copy under a name of its own."""
        return [
            replace(canary, name=f"canary-{number:04d}-copy-{copy:02d}-of-{copies:02d}")
            for number, (canary, copies) in enumerate(zip(self.inserted, self.copies, strict=True))
            for copy in range(1, copies + 1)
        ]


def rows_for(share: float, others: int) -> int:
    """Return how many rows canaries must have to be that share of all, beside so many others."""
    return round(share * others / (1 - share))


def copies_of(rows: int) -> list[int]:
    """Return the numbers of copies of canaries that have so many rows together.

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
    """Say whether a recording's kind is one of those that are made here."""
    return kind.startswith(INSERTED) or kind == UNSEEN


def record(
    rows: int,
    words: Sequence[str],
    speakers: Sequence[str],
    decibels: tuple[float, float],
    seed: int,
) -> Canaries:
    """Return canaries that have so many training rows, made of these words by these speakers."""
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
