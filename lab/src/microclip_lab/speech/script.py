"""Who says what in the embedded corpus: words, speakers, how fast, how high. Nothing is heard here.

A speaker is a variant of espeak-ng's voices. Those of the validation and test utterances say
nothing in training, in any accent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from microclip_lab.speech.espeak import Line

WORDS = tuple(
    "zero one two three four five six seven eight nine "  # noqa: SIM905 - twenty quotes less
    "yes no up down left right stop go open close".split()
)
LENGTHS = (3, 6)  # words of an utterance
ACCENTS = (
    "en", "en-us", "en-us-nyc", "en-029", "en-gb-scotland",
    "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-gb-x-rp",
)  # fmt: skip
# all variants but whispers, robots and monsters, which people find hard to understand, too
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
    """The speakers of each part of the data."""

    training: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]


def cast(seed: int) -> Cast:
    """Return who speaks in which part, for a seed."""
    order = [str(name) for name in np.random.default_rng((seed, 1)).permutation(SPEAKERS)]
    validation, test = order[:HELD_BACK], order[HELD_BACK : 2 * HELD_BACK]
    return Cast(tuple(order[2 * HELD_BACK :]), tuple(validation), tuple(test))


def corpus(seed: int, training: int, judged: int) -> dict[str, list[Line]]:
    """Return the lines of each part: so many for training, and for validation and test each."""
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
) -> list[Line]:
    """Return strings of random words, each said by some speaker, at `faster` times the rate."""
    lines = []
    for _ in range(count):
        length = draw.integers(LENGTHS[0], LENGTHS[1] + 1)
        text = " ".join(words[place] for place in draw.integers(len(words), size=length).tolist())
        rate = draw.uniform(*RATES) * draw.uniform(*faster)
        lines.append(
            Line(
                text,
                speakers[int(draw.integers(len(speakers)))],
                ACCENTS[int(draw.integers(len(ACCENTS)))],
                round(rate),
                int(draw.integers(PITCHES[0], PITCHES[1] + 1)),
            )
        )
    return lines
