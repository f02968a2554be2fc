"""Random numbers for a mini-batch that do not depend on which process computes which part of it.

Every rank and every chunk draws for the whole mini-batch and keeps only its own part. So an example
is augmented in the same way on one process as on eight, and after a restart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class BatchRng:
    """Draws one number or array for each of several consecutive examples of a mini-batch.

    >>> whole = BatchRng(seed=0, step=7, size=8).random()
    >>> part = BatchRng(seed=0, step=7, size=8, first=4, count=2).random()
    >>> bool((whole[4:6] == part).all())
    True

    Args:
        seed: The seed of the run.
        step: The optimizer step that the mini-batch belongs to.
        size: B, the number of examples in the whole mini-batch.
        first: Index in the mini-batch of the first example to draw for.
        count: How many examples to draw for; None means all from `first` on.
    """

    def __init__(
        self, seed: int, step: int, size: int, first: int = 0, count: int | None = None
    ) -> None:
        self.size = size
        self._part = slice(first, size if count is None else first + count)
        self._generator = np.random.default_rng((seed, step))

    def random(self, *shape: int) -> Array:
        """Return uniform numbers in [0, 1): one array of this shape per example."""
        return self._generator.random((self.size, *shape))[self._part]

    def normal(self, *shape: int) -> Array:
        """Return standard normal numbers."""
        return self._generator.standard_normal((self.size, *shape))[self._part]

    def integers(self, low: int, high: int, *shape: int) -> Array:
        """Return integers from `low` (included) to `high` (excluded)."""
        return self._generator.integers(low, high, (self.size, *shape))[self._part]

    def beta(self, a: float, b: float, *shape: int) -> Array:
        """Return numbers from a beta distribution."""
        return self._generator.beta(a, b, (self.size, *shape))[self._part]
