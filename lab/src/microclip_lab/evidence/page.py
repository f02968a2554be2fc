"""The page: what to do, verdicts in plain words, then the evidence. Written from the records."""

from __future__ import annotations

from microclip_lab.evidence.records import Records


def page(records: Records) -> str:
    """Return the page as Markdown."""
    return f"# Where does clipping help?\n\n{len(records)} runs.\n"
