"""docs/reproduction.md from the records: the same blocks as the page, in Markdown.

Figures are on the page only, and so are tuning and the list of every run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from microclip.files import write_whole
from microclip.report.blocks import Block, Figure, Paragraph, Section, Table
from microclip_lab.reproduction import appendix
from microclip_lab.reproduction.page import of_the_paper, opening
from microclip_lab.reproduction.record_tables import View
from microclip_lab.reproduction.records import Records
from microclip_lab.reproduction.study import Study

COMMAND = re.compile(  # else two hyphens become a dash
    r"(microclip (?:theory --claims|train \w+ --preset paper --data \w+|reproduce"
    r"(?: --out results)(?: --again ID| --only-page)?))"
)
NOTE = "<!-- Made from the records by microclip_lab.reproduction.document; do not edit by hand. -->"


def write_document(study: Study, records: Records, path: Path, page: Path, results: Path) -> Path:
    """Write the document.

    Args:
        study: The plan.
        records: Its runs.
        path: The file to write.
        page: Where the page is.
        results: Where the file for programs is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    links = [Path(os.path.relpath(target, path.parent)).as_posix() for target in (page, results)]
    write_whole(path, markdown(View(study, records), *links).encode())
    return path


def markdown(view: View, page: str, results: str) -> str:
    """Return the whole text, with links to the page and to the file for programs."""
    parts = [
        NOTE,
        "# The paper, reproduced at a small scale",
        "Does it hold? Every table and figure of *Revisit Micro-batch Clipping* (Lun Wang, ICLR "
        "2025, [arXiv 2408.16204](https://arxiv.org/abs/2408.16204)) at a scale of two cores and a "
        "night, with the controls that a reviewer would ask for. The plan, with what would bear "
        "each claim out, is `microclip_lab.reproduction`, and was written before the runs.",
        *(_text(sentence) for sentence in opening(view)[1:]),
        f"This page is made from the records of the runs. With figures, tuning and every run: "
        f"[the page]({page}). For programs: [results.json]({results}).",
    ]
    chosen = [
        *of_the_paper(view),
        appendix.controls(view),
        appendix.wrong(view),
        appendix.full_scale(view),
        appendix.again(view),
    ]
    for section in chosen:
        parts += _section(section, page)
    return "\n\n".join(parts) + "\n"


def _section(section: Section, page: str) -> Iterable[str]:
    yield f"## {_text(section.title)}"
    for block in section.blocks:
        yield _block(block, page)


def _block(block: Block, page: str) -> str:
    match block:
        case Paragraph():
            return _text(block.text)
        case Figure():
            return f"*{_text(block.title)}*: a figure, on [the page]({page}#{block.key})."
        case Table():
            return _table(block)
    raise TypeError(f"A document has no place for {type(block).__name__}.")


def _table(table: Table) -> str:
    numeric = table.numeric or (False,) * len(table.headings)
    lines = [
        _row(table.headings),
        _row(["---:" if right else "---" for right in numeric]),
    ]
    for cells in table.rows:
        texts = [_text(cell.text) for cell in cells]
        lines.append(
            _row(
                f"**{text}**" if cell.marked else text
                for cell, text in zip(cells, texts, strict=True)
            )
        )
    return f"**{_text(table.caption)}**\n\n" + "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(text: str) -> str:
    """Return a text in which Markdown finds nothing to do.

    >>> _text("|g| < 1, a_b\\nnext")
    '\\\\|g\\\\| &lt; 1, a\\\\_b<br>next'
    """
    found = COMMAND.split(text)  # what is between commands, then a command, and so on
    return "".join(
        f"`{part}`" if place % 2 else _without_marks(part) for place, part in enumerate(found)
    )


def _without_marks(text: str) -> str:
    for character in "\\`*_[]|$":
        text = text.replace(character, f"\\{character}")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("\n", "<br>")
