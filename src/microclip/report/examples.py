"""Reading the examples of a run: labels for all of them, contents for those to show.

Lines are read one by one and contents kept only for the requested examples, so the file may have
any length.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from microclip.report.folder import EXAMPLES
from microclip.report.runs import count_lines, lines, parsed

KINDS = ("image", "audio", "text")
LONGEST_FACT = 300  # characters of a label or domain that are kept


@dataclass(frozen=True)
class Facts:
    """What is known about an example, besides its content."""

    label: str | None = None
    truth: str | None = None
    domain: str | None = None

    @property
    def wrong(self) -> bool | None:
        """Whether its label is wrong; None if unknown."""
        if self.truth is None or self.label is None:
            return None
        return self.label != self.truth


@dataclass(frozen=True)
class Content:
    """The content of an example: a text, or the name of a file."""

    kind: str
    text: str | None = None
    file: str | None = None


@dataclass
class Examples:
    """What a run says about its examples, by id as text."""

    facts: dict[str, Facts] = field(default_factory=dict)
    contents: dict[str, Content] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_examples(path: Path, known: Collection[str], shown: Collection[str]) -> Examples:
    """Read the examples of a run.

    Args:
        path: The folder of the run.
        known: All ids in its ledger.
        shown: The ids whose contents to keep.
    """
    found = Examples()
    if not (path / EXAMPLES).exists():
        return found
    unreadable = 0
    unknown: dict[str, None] = {}
    for line, complete in lines(path, EXAMPLES):
        entry = parsed(line)
        one = None if entry is None else _id(entry.get("id"))
        if entry is None or one is None:
            unreadable += complete
            continue
        if one not in known:
            unknown[one[:LONGEST_FACT]] = None
            continue
        found.facts[one] = Facts(*(_fact(entry.get(key)) for key in ("label", "truth", "domain")))
        if one in shown:
            content = _content(entry)
            if content is None:
                found.contents.pop(one, None)
            else:
                found.contents[one] = content
    if unreadable:
        found.notes.append(
            f"Skipped {count_lines(unreadable)} of {EXAMPLES} that could not be read as examples."
        )
    if unknown:
        some = ", ".join(repr(one[:40]) for one in list(unknown)[:3])
        found.notes.append(
            f"{len(unknown)} ids in {EXAMPLES} are not in the ledger, for instance {some}: these "
            "examples were never trained on, or the Clipper got other ids for them."
        )
    return found


def _id(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    return str(value)


def _fact(value: Any) -> str | None:
    if value is None or isinstance(value, dict | list):
        return None
    text = str(value)
    if len(text) <= LONGEST_FACT:
        return text
    return f"{text[:LONGEST_FACT]}… ({len(text):,} characters)"


def _content(entry: dict[str, Any]) -> Content | None:
    kind, text, file = entry.get("kind"), entry.get("text"), entry.get("file")
    if kind not in KINDS:
        kind = "text" if isinstance(text, str) else None
    if kind == "text":
        return Content("text", text=text) if isinstance(text, str) else None
    if kind is None or not isinstance(file, str):
        return None
    return Content(kind, file=file)
