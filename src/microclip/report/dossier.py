"""All that a ledger and its run say together: the course, the draggers, the domains, the examples.

Reads, and counts; what is shown of it, and in which words, is for `sections` and `gallery`.
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
from microclip.report.course import Course, follow
from microclip.report.examples import Examples, read_examples
from microclip.report.runs import Run

MOST_GROUPS = 30  # domains, or labels in their place, that are told apart

Say = Callable[[str], None]


@dataclass(frozen=True)
class Dossier:
    """What is known of a run that has a ledger."""

    key: str  # a word that no other run on the page has
    run: Run
    course: Course
    draggers: Draggers
    examples: Examples
    domains: guard.Report | None
    grouped_by: str  # what stands for domains: "domain", "label", or nothing
    warnings: tuple[str, ...]

    @cached_property
    def ids(self) -> list[str]:
        """The ids of all examples, the most suspicious first."""
        return [str(one) for one in self.draggers.table["id"].to_pylist()]

    @cached_property
    def wrong(self) -> list[bool | None]:
        """Whether each example's label is wrong, in the same order; None: nobody knows."""
        return [
            facts.wrong if (facts := self.examples.facts.get(one)) else None for one in self.ids
        ]

    def column(self, name: str, count: int | None = None) -> list[Any]:
        """Return a column of the draggers' table, or its beginning, in the same order."""
        found: list[Any] = self.draggers.table[name].slice(0, count).to_pylist()
        return found

    @property
    def is_plain(self) -> bool:
        """Whether the run says that it was plain training, and its weights do not belie it."""
        run = self.run
        return run.described and run.microbatch_size is None and self.course.mean_weight == 1

    @property
    def measure(self) -> str:
        """The column that tells best how an example fared: its loss, or else its norms."""
        return "log_norm" if self.draggers.losses == "none" else "excess_loss"


def compile_dossier(key: str, run: Run, ledger: Path, shown: int, say: Say) -> Dossier:
    """Read a run's ledger; the contents of the `shown` most suspicious examples with it."""
    say(f"{run.name}: reading the ledger")
    record = open_ledger(ledger)
    course = follow(ledger)
    say(f"{run.name}: scoring {record.rows:,} micro-batches")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        draggers = score(record)
    ids = [str(one) for one in draggers.table["id"].to_pylist()]
    examples = read_examples(run.path, set(ids), set(ids[:shown]))
    say(f"{run.name}: looking at its domains")
    grouped_by, report = _check_domains(ledger, draggers, examples, ids)
    told = tuple(str(warning.message) for warning in given)
    return Dossier(key, run, course, draggers, examples, report, grouped_by, told)


def _check_domains(
    ledger: Path, draggers: Draggers, examples: Examples, ids: list[str]
) -> tuple[str, guard.Report | None]:
    """Ask the guard: by recorded domains, else by those of the examples, else by labels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", guard.DomainWarning)  # a finding is shown, not said twice
        if pc.count_distinct(draggers.table["domain"]).as_py() > 0:
            return "domain", guard.check(ledger)
        for kind in ("domain", "label"):
            known = {one: getattr(facts, kind) for one, facts in examples.facts.items()}
            groups = {known.get(one) for one in ids}
            if None not in groups and 2 <= len(groups) <= MOST_GROUPS:
                return kind, guard.check(ledger, domain_of=lambda one, known=known: known[str(one)])
    return "", None
