"""Adding a Gram matrix up: parameter by parameter, batch against batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microclip import multitensor
from microclip.engines.losses import LossFn
from microclip.engines.randomness import RandomState
from microclip.probing.columns import Uses, products
from microclip.probing.visit import Parameters, single_pass

BLOCK_BYTES = 2**24  # of gradients written out at once; larger blocks are no faster


class Totals:
    """The matrix while it is being added up."""

    def __init__(self, parameters: Parameters, sizes: tuple[int, ...]) -> None:
        self.devices = {parameter.device for parameter in parameters.values()}
        self._device = next(iter(parameters.values())).device
        wide = multitensor.widest(self._device)
        self.matrix = torch.zeros(sum(sizes), sum(sizes), dtype=wide, device=self._device)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def add(self, one: int, other: int, ones: Uses, others: Uses) -> None:
        """Add what a parameter contributes to the products of two batches' examples."""
        found = products(ones, others, BLOCK_BYTES).to(self._device)
        here, there = self._spans[one], self._spans[other]
        self.matrix[here, there] += found
        if one != other:
            self.matrix[there, here] += found.mT

    def add_rows(self, rows: Tensor) -> None:
        """Add what some columns contribute to the products of all examples."""
        for columns in torch.split(rows, max(1, BLOCK_BYTES // (8 * len(rows))), dim=1):
            self.matrix += (columns @ columns.mT).to(self._device, self.matrix.dtype)


def in_single_passes(
    parameters: Parameters, loss_fn: LossFn, batches: list[Any], totals: Totals, budget: float
) -> None:
    """Visit each batch, holding on to what earlier ones left as far as the budget goes.

    Where it does not reach for all, the batches are visited again for each portion of them that
    is held; random numbers are replayed, so that they are the same gradients.
    """
    first, last = 0, len(batches) - 1
    states: dict[int, RandomState] = {}
    while first <= last:
        held: dict[int, dict[str, Uses]] = {}
        room, holding = budget, True
        for number in range(first, len(batches)):
            if number in states:
                states[number].restore()
            new = number not in states
            states[number] = RandomState.now(totals.devices)
            mine: dict[str, Uses] = {}
            holding = holding and number < last and (not held or room > 0)

            def on_parameter(
                name: str,
                uses: Uses,
                number: int = number,
                new: bool = new,
                mine: dict[str, Uses] | None = mine if holding else None,
                held: dict[int, dict[str, Uses]] = held,
            ) -> None:
                if new:
                    totals.add(number, number, uses, uses)
                for other, theirs in held.items():
                    if name in theirs:
                        totals.add(other, number, theirs[name], uses)
                if mine is not None:
                    mine[name] = uses

            single_pass(parameters, loss_fn, batches[number], on_parameter)
            if holding:
                held[number] = mine
                taken = sum(use.nbytes for uses in mine.values() for use in uses)
                room = room - taken if room >= 2 * taken else 0.0  # the next takes as much again
        first += len(held)
        if first == last:  # it has met all the others
            break
