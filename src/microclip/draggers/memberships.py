"""Who was in which micro-batch, set aside in a temporary file, and the regression on it.

A micro-batch tells of all its members at once. If its value is about the mean of what its members
bring, y_j = mean of beta_i over i in j, then ridge regression takes the members apart: it gives
the beta that minimise

    sum_j (y_j - mean_{i in j} beta_i)^2 + lambda sum_i beta_i^2

by conjugate gradients, one pass over the file each, so memory goes by the number of examples.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

# lambda, as a share of what the average example has of evidence: XᵀX's mean diagonal entry.
# Whoever was seen often keeps nearly all of it; whoever was seen once is held close to 0.
SHRINKAGE = 0.1
TOLERANCE = 1e-4  # of the residual; ranks do not change any more long before
PASSES = 50


class Memberships:
    """Micro-batches with their members and one value each."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._chunks: list[tuple[int, int]] = []  # micro-batches and memberships of each chunk

    def add(self, examples: Numbers, sizes: Numbers, values: Values) -> None:
        """Set some micro-batches aside; those without a value (NaN) tell nothing."""
        known = ~np.isnan(values) & (sizes > 0)
        examples = examples[np.repeat(known, sizes)]
        sizes, values = sizes[known], values[known]
        if not len(sizes):
            return
        for array in (values, sizes.astype(np.int32), examples.astype(np.int32)):
            self._file.write(array.tobytes())
        self._chunks.append((len(sizes), len(examples)))

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _read(self) -> Iterator[tuple[Numbers, Numbers, Values]]:
        self._file.seek(0)

        def array(count: int, dtype: Any) -> npt.NDArray[Any]:
            return np.frombuffer(self._file.read(count * np.dtype(dtype).itemsize), dtype)

        for rows, count in self._chunks:
            values, sizes = array(rows, np.float64), array(rows, np.int32)
            yield array(count, np.int32), sizes.astype(np.int64), values

    def regress(self, total: int, shrinkage: float = SHRINKAGE) -> Values:
        """Return beta for all examples; NaN for those without a micro-batch that has a value."""
        rows = sum(rows for rows, _ in self._chunks)
        if not rows:
            return np.full(total, np.nan)
        mean = sum(float(values.sum()) for _, _, values in self._read()) / rows
        right, diagonal = np.zeros(total), np.zeros(total)
        for examples, sizes, values in self._read():
            right += _spread(examples, sizes, (values - mean) / sizes, total)
            diagonal += _spread(examples, sizes, 1 / np.square(sizes), total)
        seen = diagonal > 0
        ridge = shrinkage * diagonal[seen].mean()

        def apply(beta: Values) -> Values:
            result: Values = ridge * beta
            for examples, sizes, _ in self._read():
                starts = np.cumsum(sizes) - sizes
                fitted = np.add.reduceat(beta[examples], starts) / sizes
                result += _spread(examples, sizes, fitted / sizes, total)
            return result

        beta = conjugate_gradients(apply, right, diagonal + ridge)
        return np.where(seen, beta, np.nan)


def _spread(examples: Numbers, sizes: Numbers, values: Values, total: int) -> Values:
    """Add every micro-batch's value to each of its members."""
    spread = np.bincount(examples, np.repeat(values, sizes), minlength=total)
    return spread.astype(np.float64, copy=False)


def conjugate_gradients(apply: Any, right: Values, diagonal: Values) -> Values:
    """Solve A x = right, A symmetric and positive, preconditioned by its diagonal.

    >>> A = np.array([[4.0, 1.0], [1.0, 3.0]])
    >>> conjugate_gradients(lambda x: A @ x, np.array([1.0, 2.0]), np.diag(A)) * 11
    array([1., 7.])
    """
    x = np.zeros_like(right)
    residual = right.copy()
    direction = ahead = residual / diagonal
    strength = float(residual @ ahead)
    target = TOLERANCE**2 * strength
    for _ in range(PASSES):
        if strength <= target:
            break
        image = apply(direction)
        length = strength / float(direction @ image)
        x += length * direction
        residual -= length * image
        ahead = residual / diagonal
        before, strength = strength, float(residual @ ahead)
        direction = ahead + strength / before * direction
    return x
