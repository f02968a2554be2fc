"""Random numbers for a mini-batch that do not depend on which process computes which part of it.

Every rank and every chunk draws for the whole mini-batch and keeps what is its own. So the same
example is augmented in the same way on one process as on eight, and again after a restart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Draws:
    """Draws one number, or one array, for each of some consecutive examples of a mini-batch.

    >>> whole = Draws(seed=0, step=7, size=8).random()
    >>> part = Draws(seed=0, step=7, size=8, first=4, count=2).random()
    >>> bool((whole[4:6] == part).all())
    True

    Args:
        seed: The run's.
        step: The optimizer step that the mini-batch belongs to.
        size: B, the examples of the whole mini-batch.
        first: The place in the mini-batch of the first example that is drawn for here.
        count: How many examples are drawn for here; None: all from `first` on.
    """

    def __init__(
        self, seed: int, step: int, size: int, first: int = 0, count: int | None = None
    ) -> None:
        self.size = size
        self._part = slice(first, size if count is None else first + count)
        self._generator = np.random.default_rng((seed, step))

    def random(self, *shape: int) -> Array:
        """Return numbers from 0 to 1: one array of this shape for each example."""
        return self._generator.random((self.size, *shape))[self._part]

    def normal(self, *shape: int) -> Array:
        """Return numbers with mean 0 and deviation 1."""
        return self._generator.standard_normal((self.size, *shape))[self._part]

    def integers(self, low: int, high: int, *shape: int) -> Array:
        """Return integers from `low` up to, and without, `high`."""
        return self._generator.integers(low, high, (self.size, *shape))[self._part]

    def beta(self, a: float, b: float, *shape: int) -> Array:
        """Return numbers of a beta distribution."""
        return self._generator.beta(a, b, (self.size, *shape))[self._part]
