"""Examples in text-to-text form, and splits of them. Knows nothing of files or tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """An input text, its target, and the data for evaluation.

    Args:
        id: Unique among all examples.
        domain: Its domain or task.
        source: The input text.
        target: The training target.
        choices: The answers to choose from in evaluation.
        answers: The right ones; often just one.
        truth: The right answer, if the target may be wrong; otherwise None.
        group: Examples of one group are scored together, such as the answers to a MultiRC question.
    """

    id: str
    domain: str
    source: str
    target: str
    choices: tuple[str, ...]
    answers: tuple[str, ...]
    truth: str | None = None
    group: str = ""


@dataclass(frozen=True)
class Splits:
    """Examples for training, validation and testing."""

    training: list[Example]
    validation: list[Example]
    test: list[Example]
