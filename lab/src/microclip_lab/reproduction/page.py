"""The page of the reproduction: one file that needs nothing else, verdicts first."""

from __future__ import annotations

from pathlib import Path

import microclip
from microclip.files import write_whole
from microclip.report.blocks import Page
from microclip.report.page import render
from microclip_lab.reproduction import appendix, sections
from microclip_lab.reproduction.records import Records
from microclip_lab.reproduction.results import progress
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.view import View, is_the_plan
from microclip_lab.reproduction.wording import listed

FILE = "reproduction.html"
TITLE = "Micro-batch clipping, reproduced at a small scale"

VERDICTS = {  # of one claim, and of several
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "undecided": ("is undecided", "are undecided"),
    "not looked at": ("is not run yet", "are not run yet"),
}


def write_page(study: Study, records: Records, out: Path) -> Path:
    """Write out/reproduction.html."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    write_whole(path, render(assemble(View(study, records))))
    return path


def assemble(view: View) -> Page:
    """Put the sections in order; those whose runs are missing say so."""
    return Page(
        title=TITLE,
        verdict=opening(view),
        sections=[
            *sections.of_the_paper(view),
            appendix.controls(view),
            appendix.tuning(view),
            appendix.wrong(view),
            appendix.full_scale(view),
            appendix.again(view),
            appendix.every_run(view),
        ],
        made_by=f"Made by microclip {microclip.__version__} with microclip reproduce.",
    )


def opening(view: View) -> list[str]:
    """Return the sentences that stand above everything."""
    said = [
        "Revisit Micro-batch Clipping (Lun Wang, ICLR 2025, arXiv 2408.16204), its experiments at "
        "the scale of two cores and a night, with controls. Null results are results."
    ]
    for by, whose in (("paper", "The paper's claims"), ("microclip", "Our own")):
        found: dict[str, list[str]] = {}
        for one in view.claims:
            if one.claim.by == by:
                found.setdefault(one.verdict, []).append(one.claim.id)
        words = [
            f"{listed(found[v])} {VERDICTS[v][len(found[v]) > 1]}" for v in VERDICTS if v in found
        ]
        said.append(f"{whose}, at this scale: {'; '.join(words)}.")
    runs = progress(view.study, view.records)
    if runs["done"] < runs["expected"]:
        said.append(
            f"{runs['done']} of {runs['expected']} runs are done: everything here is preliminary."
        )
    if not is_the_plan(view.study):
        said.append(
            "These runs are shorter than the plan's, only to show that everything works: the "
            "verdicts mean nothing."
        )
    return said
