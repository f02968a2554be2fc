"""From run folders to an HTML file: what to read, which sections in which order, and writing it.

What the sections say is up to `sections`; how a page looks is up to `page`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import microclip
from microclip.files import require_file_name, write_whole
from microclip.report import sections
from microclip.report.blocks import Page, Paragraph, Section
from microclip.report.comparison import compare
from microclip.report.gallery import shortened
from microclip.report.held_back import held_back_sections
from microclip.report.media import ByteBudget
from microclip.report.page import media_budget, render
from microclip.report.run_data import RunData, Say, read_run_data
from microclip.report.runs import Run, read_run
from microclip.report.suspects import headline, suspects_section

GALLERY = 60  # examples shown by default
MOST_LEDGERS = 4  # on one page


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    title: str = "",
    gallery: int = GALLERY,
    say: Say = lambda _: None,
) -> Page:
    """Write a page about some runs, as `microclip report` does, and return its content.

    Args:
        runs: Folders of runs (`RunFolder`) or ledgers.
        output: The file to write, atomically.
        title: The heading; by default made from the names of the runs.
        gallery: How many of the most suspicious examples to show.
        say: Called with a line of progress now and then, while ledgers are read.
    """
    if isinstance(runs, str | os.PathLike):
        raise TypeError(f"runs must be a list of folders, but got the single {str(runs)!r}.")
    if not runs:
        raise ValueError("runs must name at least one folder.")
    if gallery < 0:
        raise ValueError(f"gallery must be 0 or more, but got {gallery}.")
    require_file_name(output)
    paths = list({Path(path).resolve(): Path(path) for path in runs}.values())
    findings = read_findings(paths, gallery, say)
    page = assemble(findings, title or default_title(findings.runs))
    write_page(page, output)
    return page


def write_page(page: Page, path: str | os.PathLike[str]) -> None:
    """Render a page and write it atomically."""
    write_whole(path, render(page))


@dataclass(frozen=True)
class Findings:
    """What there is to say about some runs: a summary, and sections by topic."""

    runs: Sequence[Run]
    headlines: Sequence[str]
    suspects: Sequence[Section]
    summary: Sequence[str]
    comparisons: Sequence[Section]
    curves: Sequence[Section]
    ledgers: Sequence[Section]  # clipping over time, what was held back, which examples drag
    what_was_run: Section
    data: Sequence[RunData]


def read_findings(
    paths: Sequence[Path], gallery: int = GALLERY, say: Say = lambda _: None
) -> Findings:
    """Read runs and write all sections about them."""
    say(f"reading {len(paths)} run{'' if len(paths) == 1 else 's'}")
    runs = [read_run(path) for path in paths]
    with_ledger = [(run, run.ledger) for run in runs if run.ledger is not None]
    data = [
        read_run_data(str(place), run, ledger, gallery, say)
        for place, (run, ledger) in enumerate(with_ledger[:MOST_LEDGERS], start=1)
    ]
    comparisons = compare(runs)
    curves = sections.learning_curves(runs, data)
    what = sections.what_was_run(runs)
    if len(with_ledger) > MOST_LEDGERS:
        note = (
            f"{len(with_ledger)} runs have a ledger; only the first {MOST_LEDGERS} are shown. "
            "Write separate reports for the others."
        )
        what = Section(what.key, what.title, [*what.blocks, Paragraph(note, "note")])
    budget = ByteBudget(media_budget())
    several = len(data) > 1
    return Findings(
        runs=runs,
        headlines=[line for one in data if (line := headline(one, several))],
        suspects=[
            section
            for one in data
            if (section := suspects_section(one, budget, _suffix(one, several))) is not None
        ],
        summary=sections.summary(runs, comparisons, data),
        comparisons=[
            sections.comparing(comparison, str(place))
            for place, comparison in enumerate(comparisons, start=1)
        ],
        curves=[] if curves is None else [curves],
        ledgers=[
            section
            for one in data
            for section in _ledger_sections(one, gallery, budget, _suffix(one, several))
        ],
        what_was_run=what,
        data=data,
    )


def assemble(findings: Findings, title: str) -> Page:
    """Put the sections in order."""
    return Page(
        title=title,
        verdict=findings.summary,
        headlines=findings.headlines,
        sections=[
            *findings.suspects,
            *findings.comparisons,
            *findings.curves,
            *findings.ledgers,
            findings.what_was_run,
        ],
        made_by=f"Made by microclip {microclip.__version__} with microclip report.",
    )


def _ledger_sections(data: RunData, gallery: int, budget: ByteBudget, suffix: str) -> list[Section]:
    titles = (f"Which examples drag?{suffix}", f"Scores{suffix}")
    examples = sections.drag(data, gallery, budget, titles)
    what = "What clipping did" if data.is_clipped else "Gradients"
    if data.held is not None:
        held = held_back_sections(data, gallery, budget, suffix)
        return [*held, sections.clipping(data, f"{what}{suffix}"), *examples]
    if not data.timeline.has_norms:
        return examples
    if data.is_plain:
        return [sections.clipping(data, f"{what}{suffix}"), *examples]
    return [
        sections.clipping(data, f"What clipping did{suffix}"),
        sections.held_back(data, f"Held back most{suffix}"),
        *examples,
    ]


def _suffix(data: RunData, several: bool) -> str:
    return f" ({shortened(data.run.name)})" if several else ""


def default_title(runs: Sequence[Run]) -> str:
    """Return a heading made from the names of the runs."""
    more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"microclip: {runs[0].name[:80]}{more}"
