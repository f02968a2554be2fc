"""Per-example gradients of a batch, from one backward pass: this engine's interface to others.

`contributions_of` differentiates a batch once and hands over each parameter's per-example gradients
without materializing them: they can only be multiplied with those of another batch, so no table of
examples x parameters is built. Knows nothing about micro-batches, rules or what the products are
for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from microclip.batches import count_examples, tensors_of
from microclip.engines.gradients import LossFn
from microclip.engines.single_pass.contributions import Contribution, Groups
from microclip.engines.single_pass.handlers import HANDLERS, vmap_fallback
from microclip.engines.single_pass.recorder import Recorder
from microclip.engines.single_pass.rows import EmbeddingRows, Rows, sum_of
from microclip.multitensor import widened, widest


class PerExampleGradients:
    """The gradients of all examples of a batch with respect to one parameter, not materialized."""

    def __init__(self, contributions: list[Contribution], groups: Groups) -> None:
        self._contributions = contributions
        self._groups = groups

    @property
    def nbytes(self) -> int:
        """Return the memory held."""
        return sum(each.nbytes for each in self._contributions)

    def inner_products(self, other: PerExampleGradients, block_bytes: int) -> Tensor:
        """Return <g_i, g_k> for every example i of this batch and k of the other.

        Gradients are materialized in blocks of columns, no larger than `block_bytes`. Where there
        are few rows per example, as in an MLP, products of inputs and of output gradients do
        without.
        """
        if len(self._contributions) == len(other._contributions) == 1:
            a, b = self._contributions[0], other._contributions[0]
            if isinstance(a, Rows) and isinstance(b, Rows) and _pairing_pays(a, b):
                return _products_of_pairs(a, b, block_bytes)
        total: Tensor | None = None
        for block in self._blocks(other, block_bytes):
            mine = self._columns(*block)
            product = mine @ (mine if other is self else other._columns(*block)).mT
            # within a block float32 is exact enough; over a whole model it would drift
            product = product.to(widest(product.device))
            total = product if total is None else total + product
        assert total is not None
        return total

    def _columns(self, start: int, stop: int, table_rows: Tensor | None) -> Tensor:
        """Return (examples, columns) of some rows of the parameter."""
        groups = self._groups
        return sum_of([c.columns(groups, start, stop, table_rows) for c in self._contributions])

    def _blocks(
        self, other: PerExampleGradients, block_bytes: int
    ) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield blocks of at most so many bytes, or of one row of the parameter."""
        both = [*self._contributions, *other._contributions]
        shape = both[0].shape
        rows, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        tables = [each for each in both if isinstance(each, EmbeddingRows)]
        table_rows = None
        if len(tables) == len(both):  # only those rows of the table that were looked up
            table_rows = _distinct(torch.cat([each.indices.flatten() for each in tables]))
            rows = len(table_rows)
        examples = max(self._groups.examples, other._groups.examples)
        step = max(1, block_bytes // (examples * width * 8))  # float64, or complex numbers
        for start in range(0, rows, step):
            yield start, min(start + step, rows), table_rows


def contributions_of(
    parameters: dict[str, nn.Parameter],
    loss_fn: LossFn,
    batch: Any,
    on_parameter: Callable[[str, PerExampleGradients], None],
) -> None:
    """Differentiate a batch once, and hand over each parameter's per-example gradients.

    Args:
        parameters: What to differentiate by, by name.
        loss_fn: Returns one loss per example.
        batch: The examples.
        on_parameter: Called with a name as soon as the backward pass has everything of it.

    Raises:
        CannotFuseError: If the model does something that a single pass cannot follow.
    """
    groups = Groups([1] * count_examples(batch))
    leaves = [leaf for _, leaf in tensors_of(batch)]
    recorder = Recorder(parameters, groups, leaves, HANDLERS, vmap_fallback)
    collector = _Collector(recorder, on_parameter)
    with recorder.watching():
        losses = recorder.in_order(loss_fn(batch))
    recorder.is_final = True
    try:
        losses.sum().backward()  # type: ignore[no-untyped-call]
        collector.complete()
    finally:
        recorder.release()


class _Collector:
    """Collects each parameter's contributions; those of derived tensors come at the end."""

    def __init__(
        self, recorder: Recorder, on_parameter: Callable[[str, PerExampleGradients], None]
    ) -> None:
        self._recorder = recorder
        self._on_parameter = on_parameter
        self._of: dict[str, list[Contribution]] = {}
        recorder.on_contribution = self._add

    @torch.no_grad()
    def _add(self, name: str, contribution: Contribution) -> None:
        contributions = self._of.setdefault(name, [])
        contributions.append(contribution)
        derived = self._recorder.derived
        if len(contributions) < self._recorder.expected[name] or self._recorder.has_late_segments:
            return
        if name not in derived.names and not derived.may_reach(name):
            self._deliver(name)

    def _deliver(self, name: str) -> None:
        gradients = PerExampleGradients(self._of.pop(name), self._recorder.groups)
        self._on_parameter(name, gradients)

    @torch.no_grad()
    def complete(self) -> None:
        """Deliver what had to wait for derived tensors."""
        self._recorder.complete(self._of)
        for name in list(self._of):
            self._deliver(name)


def _pairing_pays(one: Rows, other: Rows) -> bool:
    """Whether pairing all rows takes fewer products than materialized gradients."""
    p, q = one.shape
    return one.left.shape[1] * other.left.shape[1] * (p + q) <= p * q


def _products_of_pairs(one: Rows, other: Rows, block_bytes: int) -> Tensor:
    """Return sum_st (left_is . left_kt)(right_is . right_kt)."""
    count = other.left.shape[0] * other.left.shape[1]
    left, right = widened(other.left).flatten(0, 1), widened(other.right).flatten(0, 1)
    each = one.left.shape[1] * count * 2 * left.element_size()
    step = max(1, block_bytes // each)
    found = []
    for start in range(0, len(one.left), step):
        a, b = (widened(side[start : start + step]) for side in (one.left, one.right))
        pairs = (a.flatten(0, 1) @ left.mT).mul_(b.flatten(0, 1) @ right.mT)
        pairs = pairs.view(len(a), a.shape[1], len(other.left), -1)
        found.append(pairs.sum((1, 3), dtype=widest(pairs.device)))
    return torch.cat(found)


def _distinct(values: Tensor) -> Tensor:
    """Return each value once, in ascending order."""
    ordered = values.sort().values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]
