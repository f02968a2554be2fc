"""Everything known about a run with a ledger: its timeline, draggers, domains and examples.

Reads and counts; what the page shows, and in which words, is up to `sections` and `gallery`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from microclip import guard
from microclip.draggers import Draggers, score
from microclip.ledger import open_ledger
from microclip.report.examples import Examples, read_examples
from microclip.report.runs import Run
from microclip.report.timeline import Timeline, read_timeline

MOST_GROUPS = 30  # domains, or labels standing in for them

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunData:
    """What is known about a run with a ledger."""

    key: str  # unique on the page
    run: Run
    timeline: Timeline
    draggers: Draggers
    examples: Examples
    domains: guard.Report | None
    grouped_by: str  # what the guard compared: "domain", "label", or "" for nothing
    warnings: tuple[str, ...]

    @cached_property
    def ids(self) -> list[str]:
        """The ids of all examples, the most suspicious first."""
        return [str(one) for one in self.draggers.table["id"].to_pylist()]

    @cached_property
    def wrong(self) -> list[bool | None]:
        """Whether the label of each example is wrong, in the same order; None if unknown."""
        return [
            facts.wrong if (facts := self.examples.facts.get(one)) else None for one in self.ids
        ]

    def column(self, name: str, count: int | None = None) -> list[Any]:
        """Return a column of the draggers table, or its first `count` values."""
        found: list[Any] = self.draggers.table[name].slice(0, count).to_pylist()
        return found

    @property
    def is_plain(self) -> bool:
        """Whether the run was described as plain training and its weights agree."""
        run = self.run
        return run.described and run.microbatch_size is None and self.timeline.mean_weight == 1

    @property
    def measure(self) -> str:
        """The column that says most about an example: its loss, or else its norms."""
        return "log_norm" if self.draggers.losses == "none" else "excess_loss"


def read_run_data(key: str, run: Run, ledger: Path, shown: int, say: Say) -> RunData:
    """Read the ledger of a run, and the contents of its `shown` most suspicious examples."""
    say(f"{run.name}: reading the ledger")
    record = open_ledger(ledger)
    timeline = read_timeline(ledger)
    say(f"{run.name}: scoring {record.rows:,} micro-batches")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        draggers = score(record)
    ids = [str(one) for one in draggers.table["id"].to_pylist()]
    examples = read_examples(run.path, set(ids), set(ids[:shown]))
    say(f"{run.name}: checking domains")
    grouped_by, report = _check_domains(ledger, draggers, examples, ids)
    messages = tuple(str(warning.message) for warning in given)
    return RunData(key, run, timeline, draggers, examples, report, grouped_by, messages)


def _check_domains(
    ledger: Path, draggers: Draggers, examples: Examples, ids: list[str]
) -> tuple[str, guard.Report | None]:
    """Run the guard on the recorded domains, else on those of the examples, else on labels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", guard.DomainWarning)  # findings are shown on the page
        if pc.count_distinct(draggers.table["domain"]).as_py() > 0:
            return "domain", guard.check(ledger)
        for kind in ("domain", "label"):
            known = {one: getattr(facts, kind) for one, facts in examples.facts.items()}
            groups = {known.get(one) for one in ids}
            if None not in groups and 2 <= len(groups) <= MOST_GROUPS:
                return kind, guard.check(ledger, domain_of=lambda one, known=known: known[str(one)])
    return "", None
