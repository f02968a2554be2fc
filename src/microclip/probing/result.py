"""The result of a probe: a table, the best size and how sure that is, a sentence, a plot."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from microclip.probing.advice import WHERE, by_kind, is_trusted, suggestions
from microclip.probing.draggers import RESAMPLINGS, Draggers, compare_draggers, cosines_to_the_rest
from microclip.probing.gram import Gram

SURE = 0.975  # of the resamplings
RACES = 3  # sizes worth comparing by training


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
        """Return its name in sentences, without the rule."""
        return f"b = {self.size}"


@dataclass(frozen=True)
class Best:
    """The size with the largest gain, and how sure that is."""

    rule: str
    size: int
    gain: float
    low: float
    high: float
    first: float  # the share of resamplings in which it stays the best
    over_plain: float  # the share in which it is better than plain training
    rivals: tuple[tuple[str, int], ...]  # rules and sizes that cannot be distinguished from it

    @property
    def helps(self) -> bool:
        """Whether it is clearly better than plain training, at these weights."""
        return self.over_plain >= SURE


@dataclass(frozen=True, eq=False)
class Probe:
    """What `microclip.probe` returns."""

    rows: tuple[Row, ...]
    best: Best | None  # None: the data do not tell
    batch_size: int  # B: examples of the simulated steps
    held_out: int  # examples that each step is judged by
    plain_efficiency: float  # eff of a plain step
    plain_alignment: float
    noise_scale: float  # E|g_i - g|^2 / |g|^2: the batch size at which noise equals signal
    gram: Gram
    notes: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)  # how unequal the gradients are

    def __len__(self) -> int:
        """Return how many examples were probed."""
        return len(self.gram)

    @property
    def sentence(self) -> str:
        """Say what was found, what it does not tell, and what to do next."""
        return summary(self)

    @property
    def suggestions(self) -> list[str]:
        """Say what the figures suggest, for each clipping rule, and how often that was right."""
        return suggestions(self.figures)

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
        """Compare the examples labeled as draggers with the others; labels has one per example."""
        return compare_draggers(self.gram.matrix, torch.as_tensor(labels), trim, resamplings)

    def row(self, size: int, rule: str | None = None) -> Row:
        """Return one row of the table; by default of the first rule."""
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
        """Plot the gains, and the norms behind them, against b; needs matplotlib."""
        from microclip.probing.plot import draw_probe

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
        first = self.suggestions if self.figures else []
        first += [WHERE] if is_trusted() else []
        kinds = [] if is_trusted() else ["By kind of data:", *(f"  {line}" for line in by_kind())]
        return "\n".join([*first, title, *_aligned(table), self.sentence, *self.notes, *kinds])


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]


def _end(value: float) -> str:
    """Return the end of an interval; "?" where the examples do not determine it."""
    return f"{value:.2f}" if math.isfinite(value) else "?"


# ---- the sentence
#
# A probe looks one step ahead from the weights it is given. It does not know where training with a
# size ends up, so no sentence recommends a size without saying so.


def summary(probe: Probe) -> str:
    """Return what was found, what it does not tell, and what to do next."""
    best = probe.best
    if best is None and not probe.norms.any():
        return (
            "No answer: the gradients of all examples are 0. Check loss_fn, or probe before "
            "training is over."
        )
    if best is None:
        return (
            f"No answer: the gradient that {probe.held_out} held-out examples have in common "
            "drowns in their noise, so no step can be judged by it. Probe more batches at once."
        )
    return " ".join(
        part
        for part in (_finding(probe, best), _caution(probe, best), _advice(probe, best))
        if part
    )


def _finding(probe: Probe, best: Best) -> str:
    name = _name(probe, best.rule, best.size)
    if best.size == probe.batch_size or best.gain <= 1:
        if best.rivals:
            return (
                "No b clearly helps here: no size is better than plain training, though "
                f"{_rivals(probe, best)} cannot be distinguished from it."
            )
        return "No b helps here: every size is worse than plain training at these weights."
    if not best.helps:
        return (
            f"No b clearly helps here: {name} ranks first{_worth(best)}, but in "
            f"{100 - 100 * best.over_plain:.0f} % of the resamplings a plain step is better."
        )
    found = f"{name}: at these weights one step is better than a plain one{_worth(best)}."
    if best.rivals:
        rivals = f" {_rivals(probe, best)} cannot be distinguished from it."
        found += rivals.replace(" all", " All", 1)
    return found


def _caution(probe: Probe, best: Best) -> str:
    spread = probe.row(best.size, best.rule).bound_spread
    if best.size == 1 and spread > 0.1:
        return (
            "Caution: b = 1 often ranks first at weights that another size trained. Its bound, the "
            f"norm of the easiest example, already varies by {spread:.1f} decades from step to "
            "step, and shrinks as training with it goes on."
        )
    return ""


def _advice(probe: Probe, best: Best) -> str:
    ranked = sorted(
        (row for row in probe.rows if row.size < probe.batch_size and row.gain_high > 1),
        key=lambda row: -row.gain,
    )
    racers = [(row.rule, row.size) for row in ranked[:RACES]]
    limits = "This looks one step ahead and cannot tell where training with a size ends up:"
    if not racers:
        return f"{limits} probe again later in training."
    names = _names(probe, tuple(racers))
    return f"{limits} probe again later, and race {names} against plain training before deciding."


def _names(probe: Probe, settings: tuple[tuple[str, int], ...]) -> str:
    names = [_name(probe, rule, size) for rule, size in settings]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _name(probe: Probe, rule: str, size: int) -> str:
    several = len({row.rule for row in probe.rows}) > 1
    return f"b = {size}" + (f" with {rule}" if several else "")


def _rivals(probe: Probe, best: Best) -> str:
    others = len(probe.rows) - 1
    if others > 1 and len(best.rivals) == others:
        return "all other sizes"
    return _names(probe, best.rivals) if len(best.rivals) < 5 else f"{len(best.rivals)} others"


def _worth(best: Best) -> str:
    if not math.isfinite(best.gain):
        return ", which does not even point along the gradient of the held-out examples"
    if math.isfinite(best.low) and math.isfinite(best.high):
        return f", worth {best.gain:.2f} times as much ({best.low:.2f} to {best.high:.2f})"
    if math.isfinite(best.low):
        return f", worth at least {best.low:.2f} times as much"
    return ", though so few examples do not tell by how much"
