"""What the model writes with: the blank of CTC, then words, or characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

BLANK = 0


@dataclass(frozen=True)
class Tokens:
    """Words or characters, numbered from 1; 0 is the blank.

    >>> words = Tokens(("go", "stop"), " ")
    >>> words.numbers("stop go go")
    [2, 1, 1]
    >>> words.text([2, 1, 1])
    'stop go go'

    Args:
        symbols: The words or characters.
        between: What stands between two of them: a blank between words, nothing between characters.
    """

    symbols: Sequence[str]
    between: str

    def __len__(self) -> int:
        return len(self.symbols) + 1

    def numbers(self, text: str) -> list[int]:
        """Return a text's tokens; a ValueError names the first that there is none for."""
        known = {symbol: number for number, symbol in enumerate(self.symbols, 1)}
        pieces = text.split(self.between) if self.between else text
        for piece in pieces:
            if piece not in known:
                raise ValueError(f"There is no token for {piece!r} of {text!r}.")
        return [known[piece] for piece in pieces]

    def text(self, numbers: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.between.join(self.symbols[number - 1] for number in numbers)


def frames_needed(numbers: Sequence[int]) -> int:
    """Return the fewest frames that CTC can write this with: a blank must part two that are alike.

    >>> frames_needed([2, 1, 1])
    4
    """
    return len(numbers) + sum(a == b for a, b in itertools.pairwise(numbers))
