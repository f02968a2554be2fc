"""What data is given as: examples to train on, to choose by and to test with."""

from __future__ import annotations

from dataclasses import dataclass

from microclip_lab.language.example import Example


@dataclass(frozen=True)
class Splits:
    """Examples to train on, to choose by, and to test with."""

    training: list[Example]
    validation: list[Example]
    test: list[Example]
