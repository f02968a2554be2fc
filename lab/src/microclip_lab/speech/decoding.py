"""From what the model says of every frame to a text, and from texts to error rates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from microclip_lab.speech.canaries import INSERTED, UNSEEN, is_canary
from microclip_lab.speech.tokens import BLANK, Tokens

Record = tuple[str, str, str]  # what was said, what was understood, the kind of recording


def greedy(logits: Tensor, lengths: Tensor, tokens: Tokens) -> list[str]:
    """Return a batch's texts: each frame's likeliest token, without repeats and blanks."""
    best = logits.argmax(-1).tolist()
    return [
        tokens.text([token for token, _ in itertools.groupby(row[:length]) if token != BLANK])
        for row, length in zip(best, lengths.tolist(), strict=True)
    ]


def error_rates(records: Sequence[Record]) -> dict[str, float]:
    """Return WER and CER of speech, by folder if there are several, and WER of canaries."""
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
