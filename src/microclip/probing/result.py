"""What a probe found: a table, the best size and how sure that is, a sentence, a picture."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from microclip.probing.draggers import RESAMPLINGS, Draggers, cosines_to_the_rest, look_at
from microclip.probing.gram import Gram
from microclip.probing.sentence import sentence

SURE = 0.975  # of the resamplings


@dataclass(frozen=True)
class Row:
    """One rule and micro-batch size; means over all simulated steps unless said otherwise."""

    rule: str
    size: int  # b
    microbatches: int  # in a step
    norm_low: float  # a tenth of the micro-batch norms is below
    norm_median: float
    norm_high: float  # a tenth is above
    bound: float
    bound_spread: float  # standard deviation of log10(bound) from step to step: decades
    mean_weight: float
    effective_sample_size: float  # in examples, of B
    alignment: float  # cosine of the clipped step and the held-out mean gradient
    efficiency: float  # eff(b): (g . E U)^2 / (|g|^2 E|U|^2)
    gain: float  # eff(b) / eff(plain); infinite or NaN where plain steps do not point along g
    gain_low: float  # 95 % interval, over resampled examples
    gain_high: float
    first: float  # the share of resamplings in which it is the best

    @property
    def name(self) -> str:
        """Return what sentences call it, without the rule."""
        return f"b = {self.size}"


@dataclass(frozen=True)
class Best:
    """The size with the largest gain, and what the data say against it."""

    rule: str
    size: int
    gain: float
    low: float
    high: float
    first: float  # the share of resamplings in which it stays the best
    over_plain: float  # the share in which it is better than plain training
    rivals: tuple[tuple[str, int], ...]  # rules and sizes that cannot be told from it

    @property
    def helps(self) -> bool:
        """Whether it is clearly better than plain training, at these weights."""
        return self.over_plain >= SURE


@dataclass(frozen=True, eq=False)
class Probe:
    """What `microclip.probe` returns."""

    rows: tuple[Row, ...]
    best: Best | None  # None: nothing can be said
    batch_size: int  # B: examples of the simulated steps
    held_out: int  # examples that each step was judged by
    plain_efficiency: float  # eff of a plain step
    plain_alignment: float
    noise_scale: float  # E|g_i - g|^2 / |g|^2: the batch size at which noise equals signal
    gram: Gram
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return how many examples were looked at."""
        return len(self.gram)

    @property
    def sentence(self) -> str:
        """Say what was found, and no more."""
        return sentence(self)

    @property
    def norms(self) -> Tensor:
        """Return the norm of each example's gradient."""
        return self.gram.matrix.diagonal().clamp(min=0).sqrt()

    @property
    def cosines(self) -> Tensor:
        """Return the cosine of each example's gradient and the mean of all the others'."""
        return cosines_to_the_rest(self.gram.matrix)

    def draggers(
        self, labels: Tensor | list[bool], trim: float = 0.1, resamplings: int = RESAMPLINGS
    ) -> Draggers:
        """Compare examples that are labelled as draggers, one label each, with the others."""
        return look_at(self.gram.matrix, torch.as_tensor(labels), trim, resamplings)

    def row(self, size: int, rule: str | None = None) -> Row:
        """Return one row of the table; of the first rule, if none is named."""
        for row in self.rows:
            if row.size == size and rule in (None, row.rule):
                return row
        known = sorted({row.size for row in self.rows})
        raise KeyError(f"b = {size} with rule {rule} was not probed; there are {known}.")

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the table as comma-separated values, and write it if a path is given."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [field.name for field in fields(Row)]
        writer.writerow(names)
        for row in self.rows:
            writer.writerow([getattr(row, name) for name in names])
        if path is not None:
            Path(path).write_text(text.getvalue())
        return text.getvalue()

    def plot(self, path: str | Path) -> None:
        """Draw the gains, and the norms they come from, against b; needs matplotlib."""
        from microclip.probing.pictures import draw_probe

        draw_probe(self, path)

    def __str__(self) -> str:
        several = len({row.rule for row in self.rows}) > 1
        headings = ["b", "norms 10/50/90 %", "bound (decades)", "weight", "ESS", "cos", "eff"]
        headings += ["gain over plain", "first"]
        table = [(["rule"] if several else []) + headings]
        for row in self.rows:
            cells = [
                str(row.size),
                f"{row.norm_low:.3g} {row.norm_median:.3g} {row.norm_high:.3g}",
                f"{row.bound:.3g} ({row.bound_spread:.2f})",
                f"{row.mean_weight:.3g}",
                f"{row.effective_sample_size:.3g}",
                f"{row.alignment:.3f}",
                f"{row.efficiency:.3g}",
                f"{row.gain:.2f} ({_end(row.gain_low)} to {_end(row.gain_high)})",
                f"{100 * row.first:.0f} %",
            ]
            table.append(([row.rule] if several else []) + cells)
        rule = "" if several or not self.rows else f", {self.rows[0].rule}"
        title = (
            f"{len(self)} examples, steps of B = {self.batch_size} judged by {self.held_out} "
            f"others{rule}; plain: cos {self.plain_alignment:.3f}, eff {self.plain_efficiency:.3g}"
        )
        return "\n".join([title, *_aligned(table), self.sentence, *self.notes])


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]


def _end(value: float) -> str:
    """Return the end of an interval; "?" where the examples do not set one."""
    return f"{value:.2f}" if math.isfinite(value) else "?"
