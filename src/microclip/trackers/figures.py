"""The figures of a step, from a ledger or an outcome, under the names that integrations use.

Knows nothing about where they go.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from microclip.draggers.source import Parts, Source, whole_steps
from microclip.draggers.statistics import Values
from microclip.integrations.metrics import PREFIX, metrics
from microclip.ledger.storage import PART_NAME
from microclip.outcome import Outcome

COLUMNS = ("step", "size", "norm", "weight", "bound", "loss", "skipped")
QUANTILES = {"norm_q10": 0.1, "norm_q50": 0.5, "norm_q90": 0.9}
LONGEST_NAME = 60  # characters of a domain in the name of a figure

Figures = dict[str, float]
Steps = Iterator[tuple[int, Figures]]


def of_ledger(source: Source, first: int, last: int, every: int) -> Steps:
    """Yield steps and their figures, over all ranks, in the order of steps.

    Args:
        source: An open ledger.
        first: Leave out the steps before this one.
        last: Leave out the steps after this one.
        every: Leave out the steps whose number is no multiple of it.
    """
    held_back = _held_back(source, first) if source.has_example_weights else None
    for table in whole_steps(_since(source.microbatches, first), COLUMNS):
        steps = table["step"].to_numpy()
        chosen = (steps >= first) & (steps <= last) & (steps % every == 0)
        kept = table.filter(pa.array(chosen)).sort_by("step")
        numbers, starts = np.unique(kept["step"].to_numpy(), return_index=True)
        ends = [*starts[1:], len(kept)]
        columns = {name: _numbers(kept[name]) for name in COLUMNS[1:]}
        known = {name: pc.is_valid(kept[name]).to_numpy() for name in ("norm", "loss")}
        for step, start, end in zip(numbers.tolist(), starts, ends, strict=True):
            rows = slice(int(start), int(end))
            figures = _figures(
                {name: values[rows] for name, values in columns.items()},
                {name for name, there in known.items() if there[rows].all()},
            )
            if held_back is not None:
                figures["held_back"] = held_back.get(step, 0)
            yield step, {PREFIX + name: float(value) for name, value in figures.items()}


def of_outcome(outcome: Outcome) -> Figures:
    """Return the figures of one step; this reads the device."""
    found = {plain_name(name): value for name, value in metrics(outcome).items()}
    norms = outcome.norms[~outcome.skipped]
    if len(norms):
        found[f"{PREFIX}norm_min"] = float(norms.min())
        found[f"{PREFIX}norm_mean"] = float(norms.mean())
    if outcome.loss is not None:
        found[f"{PREFIX}loss"] = float(outcome.loss)
    if outcome.noise_scale is not None:
        found[f"{PREFIX}noise_scale"] = float(outcome.noise_scale)
    return found


def plain_name(name: str) -> str:
    """Return a figure's name that every tracker accepts; domains may be called anything.

    >>> plain_name("microclip/weight_share/chat")
    'microclip/weight_share/chat'
    >>> plain_name("microclip/weight_share/../<b>")
    'microclip/weight_share/.._b_-b11fe392'
    """
    room, _, rest = name.partition("/")
    kind, slash, domain = rest.partition("/")
    if not slash:
        return name
    plain = re.sub(r"[^\w.-]+", "_", domain)[:LONGEST_NAME]
    if plain != domain or not plain.strip("."):  # two domains must not become one
        plain += f"-{zlib.crc32(domain.encode('utf-8', 'surrogatepass')):08x}"
    return f"{room}/{kind}/{plain}"


def _figures(columns: dict[str, Values], known: set[str]) -> dict[str, float]:
    """Return the figures of a step from its micro-batches."""
    weights, counted = columns["weight"], columns["skipped"] == 0
    sizes, found = columns["size"] * counted, {}
    total = float(sizes.sum()) or np.nan
    with np.errstate(all="ignore"):
        if "loss" in known:
            found["loss"] = (columns["loss"] * sizes)[counted].sum() / total
        mean = (weights * sizes)[counted].sum() / total
        square = (weights**2 * sizes)[counted].sum() / total
        found["mean_weight"] = mean
        found["effective_sample_size"] = total * mean**2 / square
        if "norm" in known:
            norms = columns["norm"]
            found["bound"] = columns["bound"].min()
            found["skipped"] = (~counted).sum()
            found["norm_min"] = norms[counted].min() if counted.any() else np.nan
            found["norm_mean"] = norms[counted].sum() / counted.sum()
            found["update_kept"] = np.nansum(norms * weights) / np.nansum(norms)
            there = norms[~np.isnan(norms)]
            for name, level in QUANTILES.items():
                found[name] = np.quantile(there, level) if len(there) else np.nan
    return found


def _held_back(source: Source, first: int) -> dict[int, int]:
    """Return how many examples of each step have less than half their weight."""
    found: dict[int, int] = {}
    for table in whole_steps(_since(source.examples, first), ("step", "weight")):
        steps = table.filter(pc.less(table["weight"], 0.5))["step"].to_numpy()
        numbers, counts = np.unique(steps, return_counts=True)
        found |= dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    return found


def _numbers(column: pa.ChunkedArray) -> Values:
    found: Values = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
    return found


def _since(parts: Parts, first: int) -> Parts:
    """Return the files that hold this step or later ones."""
    found = {rank: [f for f in files if _last(f) >= first] for rank, files in parts.items()}
    return {rank: files for rank, files in found.items() if files}


def _last(file: Path) -> int:
    match = PART_NAME.fullmatch(file.name)
    assert match is not None
    return int(match[3])
