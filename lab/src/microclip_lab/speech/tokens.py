"""From text to tokens, from model output back to text, and error rates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from microclip_lab.speech.canaries import INSERTED, UNSEEN, is_canary

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
        between: Separator: a space between words, nothing between characters.
    """

    symbols: Sequence[str]
    between: str

    def __len__(self) -> int:
        return len(self.symbols) + 1

    def numbers(self, text: str) -> list[int]:
        """Return the tokens of a text; a ValueError names the first unknown one."""
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
    """Return the fewest frames CTC needs: equal neighbors need a blank between them.

    >>> frames_needed([2, 1, 1])
    4
    """
    return len(numbers) + sum(a == b for a, b in itertools.pairwise(numbers))


Record = tuple[str, str, str]  # reference, hypothesis, kind of recording


def greedy(logits: Tensor, lengths: Tensor, tokens: Tokens) -> list[str]:
    """Return the texts of a batch by greedy CTC decoding."""
    best = logits.argmax(-1).tolist()
    return [
        tokens.text([token for token, _ in itertools.groupby(row[:length]) if token != BLANK])
        for row, length in zip(best, lengths.tolist(), strict=True)
    ]


def error_rates(records: Sequence[Record]) -> dict[str, float]:
    """Return WER and CER of speech, WER per folder if there are several, and WER of canaries."""
    import jiwer

    kinds = sorted({kind for _, _, kind in records})

    def pairs(*wanted: str) -> tuple[list[str], list[str]]:
        chosen = [record for record in records if record[2] in wanted]
        return [said for said, _, _ in chosen], [heard for _, heard, _ in chosen]

    spoken = [kind for kind in kinds if not is_canary(kind)]
    inserted = [kind for kind in kinds if is_canary(kind) and kind != UNSEEN]
    found = {}
    if spoken:
        found["wer"] = float(jiwer.wer(*pairs(*spoken)))
        found["cer"] = float(jiwer.cer(*pairs(*spoken)))
    if len(spoken) > 1:
        for kind in spoken:
            found[f"wer_{kind.replace('-', '_')}"] = float(jiwer.wer(*pairs(kind)))
    if inserted:
        found["canary_wer"] = float(jiwer.wer(*pairs(*inserted)))
        for kind in sorted(inserted, key=_copies):
            found[f"canary_wer_x{_copies(kind)}"] = float(jiwer.wer(*pairs(kind)))
    if UNSEEN in kinds:
        found["unseen_canary_wer"] = float(jiwer.wer(*pairs(UNSEEN)))
    return found


def _copies(kind: str) -> int:
    return int(kind.removeprefix(INSERTED))
