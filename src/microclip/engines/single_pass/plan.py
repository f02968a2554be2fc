"""Which weights' gradients to write out, one per micro-batch, while there is memory for them.

A weight that multiplies rows offers a choice. Its rows can be kept, and norms come from the
products of all pairs of a micro-batch's rows: R^2 (p + q) products for R rows and a weight of
p x q. Or the gradients are written out, which takes no more arithmetic than a plain step's
gradient does, but p q numbers for each micro-batch, which are written and read again.
"""

from __future__ import annotations

from typing import NamedTuple

from microclip.engines.single_pass.groups import Groups

# products that take as long as writing a number and reading it again
WRITING = 30
WRITING_BESIDE_HALVES = 70  # where no pair of rows is multiplied twice
CALLS = 2**21  # products that take as long as the calls that rows take, and small gradients do not


class Weight(NamedTuple):
    """A weight that multiplied rows, as the forward pass saw it."""

    rows: int  # of an example
    p: int
    q: int
    itemsize: int  # of a written number
    kept: int  # bytes, if its rows are kept
    worth: int = WRITING
    calls: int = 0  # the worth of calls that writing out saves, in products

    def written(self, groups: Groups) -> int:
        """Return the bytes of its gradients."""
        return len(groups) * self.p * self.q * self.itemsize

    def least(self, groups: Groups) -> int:
        """Return the bytes that it takes, if memory is all that counts."""
        return min(self.kept, self.written(groups)) if self.gain(groups) >= 1 else self.kept

    def gain(self, groups: Groups) -> float:
        """Return by how much writing out is faster, for each byte; not so below 1."""
        rows = groups.largest * self.rows
        saved = rows**2 * (self.p + self.q) + self.calls / len(groups)
        return saved / (self.worth * max(1, self.p * self.q))


def least_to_keep(weights: dict[str, Weight], groups: Groups) -> int:
    """Return the bytes that are kept of these weights if nothing is written out for speed alone."""
    return sum([weight.least(groups) for weight in weights.values()])


def to_write_out(weights: dict[str, Weight], groups: Groups, allowance: float) -> set[str]:
    """Return the weights whose gradients are to be written out, the best first.

    Args:
        weights: All that are used once, by name.
        groups: The micro-batches.
        allowance: Bytes that may be kept. Where the least takes more, only that is written out
            which then takes less.
    """
    chosen = set()
    total = 0
    candidates = []
    for name, weight in weights.items():
        gain = weight.gain(groups)
        written, least = weight.written(groups), weight.kept
        if gain >= 1:
            least = min(least, written)
            candidates.append((-gain, name, written - least))
        total += least
    for _, name, more in sorted(candidates):
        if not more or total + more <= allowance:
            chosen.add(name)
            total += more
    return chosen
