"""What a random network works on: rows of features, and how they lie.

A module gets a `Flow`: features (..., D), and beside them a `key` (..., 3) that goes through the
same detours: a number that orders and routes are drawn from, whether the position is within its
example's length, and the example's number. How the leading dimensions have come about is known
when a program is made, as groups of axes: (("B",), ("T",)) is where it begins, (("T",), ("B",)) is
time first, (("T", "B"),) is that in one dimension, and "R" stands for rows in any order.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

DEPTH = 3  # of detours within detours
WORDS = 6  # that are looked up


class Flow(NamedTuple):
    """Features of some rows, and what is known of them."""

    h: Tensor
    key: Tensor
    examples: int

    @property
    def number(self):
        return self.key[..., 0]

    @property
    def kept(self):
        return self.key[..., 1] > 0

    @property
    def owner(self):
        return self.key[..., 2].long()


class Block(nn.ModuleList):
    """Modules one after the other; each gives the features anew, in the shape they had."""

    segment = None  # checkpoints a module, if set

    def forward(self, flow):
        for module in self:
            run = partial(self._run, module, flow)
            h = run(flow.h) if self.segment is None else self.segment(run, flow.h)
            flow = flow._replace(h=h)
        return flow.h

    @staticmethod
    def _run(module, flow, h):
        return module(flow._replace(h=h))


def has_rows(groups):
    """Whether there are rows of several examples."""
    return any(name in ("B", "R") for group in groups for name in group)


def row_places(groups):
    return [i for i, group in enumerate(groups) if any(name in ("B", "R") for name in group)]


def time_place(groups):
    """Where an example's positions have a dimension of their own, or None."""
    return groups.index(("T",)) if ("T",) in groups else None


def shape_of(groups, key, sizes, examples):
    """Sizes of the groups' axes; "R" is as long as it is, and "S3" is three long."""
    named = {**sizes, "B": examples}
    return [
        [key.shape[i]] if "R" in group else [named.get(n) or int(n[1:]) for n in group]
        for i, group in enumerate(groups)
    ]


def along(order, like, dim):
    """An order along one dimension, as gather wants it."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return order.view(shape).expand_as(like)


def tilted(t, dim):
    """Make equal rows differ: rounding would decide which of them is the largest."""
    shape = [1] * t.dim()
    shape[dim] = -1
    return t * torch.linspace(1, 1.3, t.shape[dim]).view(shape)
