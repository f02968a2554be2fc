"""From run folders to a page: what to read, and which sections in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import microclip
from microclip.report import sections
from microclip.report.blocks import Page, Paragraph, Section
from microclip.report.comparison import compare
from microclip.report.dossier import Dossier, Say, compile_dossier
from microclip.report.gallery import shortened
from microclip.report.media import Room
from microclip.report.page import room_for_media
from microclip.report.runs import Run, read_run

GALLERY = 60  # examples shown, unless asked otherwise
MOST_LEDGERS = 4  # on one page


@dataclass(frozen=True)
class Findings:
    """What runs have to say: sentences that sum it up, and sections by what they are about."""

    runs: Sequence[Run]
    summary: Sequence[str]
    comparisons: Sequence[Section]
    curves: Sequence[Section]
    ledgers: Sequence[Section]  # clipping over time, who is suppressed, who drags
    what_was_run: Section
    dossiers: Sequence[Dossier]

    @property
    def names_with_curves(self) -> list[str]:
        """The runs that logged more than their end."""
        return [run.name for run in self.runs if any(len(c) > 1 for c in run.metrics.values())]


def investigate(
    paths: Sequence[Path], gallery: int = GALLERY, say: Say = lambda _: None
) -> Findings:
    """Read runs and find out all there is to say of them."""
    say(f"reading {len(paths)} run{'' if len(paths) == 1 else 's'}")
    runs = [read_run(path) for path in paths]
    with_ledger = [(run, run.ledger) for run in runs if run.ledger is not None]
    dossiers = [
        compile_dossier(str(place), run, ledger, gallery, say)
        for place, (run, ledger) in enumerate(with_ledger[:MOST_LEDGERS], start=1)
    ]
    comparisons = compare(runs)
    curves = sections.learning_curves(runs, dossiers)
    what = sections.what_was_run(runs)
    if len(with_ledger) > MOST_LEDGERS:
        note = (
            f"{len(with_ledger)} runs have a ledger; those of the first {MOST_LEDGERS} are shown. "
            "Report on the others by themselves."
        )
        what = Section(what.key, what.title, [*what.blocks, Paragraph(note, "note")])
    room = Room(room_for_media())
    return Findings(
        runs=runs,
        summary=sections.summary(runs, comparisons, dossiers),
        comparisons=[
            sections.comparing(comparison, str(place))
            for place, comparison in enumerate(comparisons, start=1)
        ],
        curves=[] if curves is None else [curves],
        ledgers=[
            section
            for dossier in dossiers
            for section in _about(dossier, gallery, room, len(dossiers) > 1)
        ],
        what_was_run=what,
        dossiers=dossiers,
    )


def assemble(findings: Findings, title: str) -> Page:
    """Put the sections in order."""
    return Page(
        title=title,
        verdict=findings.summary,
        sections=[
            *findings.comparisons,
            *findings.curves,
            *findings.ledgers,
            findings.what_was_run,
        ],
        made_by=f"Made by microclip {microclip.__version__} with microclip report.",
    )


def _about(dossier: Dossier, gallery: int, room: Room, several: bool) -> list[Section]:
    after = f": {shortened(dossier.run.name)}" if several else ""
    who = sections.drag(dossier, gallery, room, (f"Who drags?{after}", f"Scores{after}"))
    if dossier.is_plain:
        return [sections.clipping(dossier, f"Gradients{after}"), *who]
    return [
        sections.clipping(dossier, f"What clipping did{after}"),
        sections.suppressed(dossier, f"Who is suppressed?{after}"),
        *who,
    ]
