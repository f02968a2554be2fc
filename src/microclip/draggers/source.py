"""Where evidence comes from: the files of a ledger, rank by rank, and how far training went."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from microclip.draggers.roster import Numbers
from microclip.draggers.steps import vanished
from microclip.ledger import Ledger, Record, open_ledger
from microclip.ledger.parts import NAME, read
from microclip.ledger.schema import EXAMPLES, MICROBATCHES

LedgerLike = str | os.PathLike[str] | Ledger | Record
Parts = dict[int, Sequence[Path]]


@dataclass(frozen=True)
class Source:
    """A ledger, opened."""

    path: Path
    integers: bool  # whether ids are to be read as integers
    steps: range
    microbatches: Parts
    examples: Parts  # none: no loss was recorded for single examples

    @classmethod
    def open(cls, ledger: LedgerLike) -> Source:
        """Open a ledger, given as a folder, as what is being written, or as what is being read."""
        if isinstance(ledger, Ledger):
            ledger.flush()
            ledger = ledger.path
        if not isinstance(ledger, str | os.PathLike | Record):
            raise TypeError(
                f"Draggers are found in a ledger: give its folder, a microclip.Ledger or what "
                f"open_ledger() returned, but not a {type(ledger).__name__}."
            )
        record = ledger if isinstance(ledger, Record) else open_ledger(ledger)
        return cls(
            record.path,
            record.ids_are_integers,
            record.steps,
            _by_rank(record, MICROBATCHES),
            _by_rank(record, EXAMPLES) if record.has_examples else {},
        )

    @cached_property
    def has_losses(self) -> bool:
        """Whether any loss was recorded: of single examples, or of micro-batches."""
        if self.examples:
            return True
        files = (file for files in self.microbatches.values() for file in files)
        return any(_has_values(file) for file in files)

    def thirds(self, steps: Numbers) -> Numbers:
        """Return in which third of training steps are: 0, 1 or 2."""
        return np.minimum(3 * (steps - self.steps.start) // max(len(self.steps), 1), 2)


def _has_values(file: Path) -> bool:
    column = read(file, ["loss"])["loss"]
    return bool(column.null_count < len(column))


def _by_rank(record: Record, table: str) -> Parts:
    files: dict[int, list[Path]] = {}
    try:
        names = record.dataset(table).files
    except FileNotFoundError as error:
        raise vanished(Path(str(error))) from error
    for name in names:
        match = NAME.fullmatch(Path(name).name)
        assert match is not None
        files.setdefault(int(match[1]), []).append(Path(name))
    return dict(files)
