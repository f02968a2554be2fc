"""One question in text-to-text form. Knows nothing of where it came from, or of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A text that is read, the text that is to be written, and how an answer is judged.

    Args:
        id: Its name, unique among all examples.
        domain: The domain or task that it belongs to.
        source: What the model reads.
        target: What it is trained to write.
        choices: The answers that it is asked to choose from when it is judged.
        answers: Those that are right; often one.
        truth: The right answer, if the one trained on may be a wrong one; else None.
        group: What it is a part of and judged together with; MultiRC's questions have several.
    """

    id: str
    domain: str
    source: str
    target: str
    choices: tuple[str, ...]
    answers: tuple[str, ...]
    truth: str | None = None
    group: str = ""
