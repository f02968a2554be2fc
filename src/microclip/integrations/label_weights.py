"""Which labels were seen to count alike.

A loss with class weights is a mean over examples as long as their labels are the same. Two parts of
a batch whose losses are weighted by their numbers of labels say that their weights are the same on
average: one equation. Labels that all solutions agree on were tested.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from torch import Tensor

from microclip.integrations.example_losses import IGNORED

FEW = 64  # with more kinds of labels than this, they are words, and have no weights


class LabelWeights:
    """Collects equations between the weights that labels may have in a loss."""

    def __init__(self) -> None:
        self._columns: dict[int, int] = {}
        self._equations: list[dict[int, float]] = []

    def add(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        """Note that two parts have labels of the same weight on average."""
        equation: dict[int, float] = {}
        for sign, part in ((1.0, one), (-1.0, other)):
            counts = Counter(labels_of(part))
            for label, count in counts.items():
                share = sign * count / sum(counts.values())
                equation[label] = equation.get(label, 0.0) + share
        for label in equation:
            self._columns.setdefault(label, len(self._columns))
        if any(abs(value) > 1e-9 for value in equation.values()):
            self._equations.append(equation)

    def are_new(self, inputs: dict[str, Any]) -> bool:
        """Whether a batch has labels that were not tested."""
        return not self.tell(set(labels_of(inputs)))

    def tell(self, labels: set[int]) -> bool:
        """Whether some labels must have the same weight."""
        if len(labels) < 2:
            return True
        if not labels <= set(self._columns):
            return False
        matrix = np.zeros((len(self._equations), len(self._columns)))
        for row, equation in enumerate(self._equations):
            for label, value in equation.items():
                matrix[row, self._columns[label]] = value
        _, sizes, vectors = np.linalg.svd(matrix)
        free = vectors[int((sizes > 1e-9).sum()) :, [self._columns[label] for label in labels]]
        return bool((np.ptp(free, axis=1) < 1e-6).all())


def labels_of(inputs: dict[str, Any]) -> list[int]:
    """Return the examples' labels that count, if each has one."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 1:
        return []
    return [label for label in labels.tolist() if label != IGNORED]


def tokens_of(inputs: dict[str, Any]) -> set[int]:
    """Return the labels of tokens or pixels, if there are only a few."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
        return set()
    found = set(labels.flatten().tolist())
    return found if len(found) <= FEW else set()
