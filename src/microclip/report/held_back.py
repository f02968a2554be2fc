"""What the page says about rules that weight examples: who was held back when, and who is now.

An example is held back while its weight is below one half. Knows nothing about how rules decide.
"""

from __future__ import annotations

from microclip.report import figures
from microclip.report.blocks import Block, Figure, Paragraph, Section
from microclip.report.domains import domain_blocks
from microclip.report.gallery import gallery_of
from microclip.report.media import ByteBudget
from microclip.report.run_data import HELD_SHOWN, RunData, held_back_rows

HELD_BACK = "Held back"  # the title of the section
MOST_NOTES = 50
SINCE = (
    "“Held back” counts the visits at which its weight was below one half; “since” is the first "
    "step of the latest such stretch. The other figures are explained under “Which examples drag?”."
)
UNTIL = (
    "“Held back” counts the visits at which its weight was below one half; “until” is the last "
    "such step. The other figures are explained under “Which examples drag?”."
)


def held_back_text(data: RunData) -> str:
    """Return how many examples the rule holds back now, to follow the words "the rule"."""
    now, released = (len(held_back_rows(data.draggers, now=each)) for each in (True, False))
    total = len(data.draggers)
    if not now and not released:
        return f"held none of {total:,} examples back."
    count = f"{now:,}" if now else "none"
    found = f"holds {count} of {total:,} examples back after {data.timeline.recorded:,} steps"
    found += f", and has released {released:,} that it held back before." if released else "."
    return found + _truth(data)


def held_back_sections(data: RunData, count: int, budget: ByteBudget, suffix: str) -> list[Section]:
    """Show when examples were held back, by domain too, then those held back now or released."""
    assert data.held is not None
    blocks: list[Block] = [Paragraph(f"The rule {held_back_text(data)}")]
    notes = data.held.notes
    blocks += [Paragraph(note) for _, note in notes[:MOST_NOTES]]
    if len(notes) > MOST_NOTES:
        blocks.append(Paragraph(f"The first {MOST_NOTES} of {len(notes):,} notes.", "note"))
    blocks += [Paragraph(warning, "finding") for warning in dict.fromkeys(data.warnings)]
    if any(data.held.counts):
        blocks.append(_over_time(data))
    blocks += domain_blocks(data)
    sections = [Section(f"held-{data.key}", f"{HELD_BACK}{suffix}", blocks)]
    for now in (True, False):
        if (section := _shown(data, now, count, budget, suffix)) is not None:
            sections.append(section)
    return sections


def _over_time(data: RunData) -> Figure:
    assert data.held is not None
    counts = {"held back": data.held.counts}
    how = "How many examples had less than half their weight when they were last visited."
    if any(data.wrong):
        others = [n - w for n, w in zip(data.held.counts, data.held.wrong, strict=True)]
        right = "label correct or unknown" if None in data.wrong else "label correct"
        counts = {right: others, "label wrong": data.held.wrong}
        how += " The rule does not know which labels are wrong."
    drawing = figures.held_back(data.held.steps, counts)
    return Figure(f"held-time-{data.key}", "Held back over time", how, {"": drawing}, "", 300)


def _shown(data: RunData, now: bool, count: int, budget: ByteBudget, suffix: str) -> Section | None:
    """Show the examples with the highest scores that are held back, or were released."""
    rows = held_back_rows(data.draggers, now)
    shown = min(HELD_SHOWN, count, len(rows))
    if not shown:
        return None
    name = "now" if now else "released"
    key, how = f"held-{name}-{data.key}", SINCE if now else UNTIL
    found, notes = gallery_of(data, rows.slice(0, shown), budget, key, how)
    text = f"{len(rows):,} examples had less than half their weight when they were last visited."
    if not now:
        text = f"{len(rows):,} examples were held back earlier, but had their weight in the end."
    if shown < len(rows):
        text += f" Shown are the {shown} with the highest scores."
    blocks: list[Block] = [Paragraph(text), found]
    blocks += [Paragraph(note, "note") for note in notes]
    title = "Held back now" if now else "Released again"
    return Section(f"held-{name}-section-{data.key}", f"{title}{suffix}", blocks)


def _truth(data: RunData) -> str:
    """Return how many of those held back are really wrong, where the truth is known."""
    since = data.column("held_back_since")
    known = [(s is not None, wrong) for s, wrong in zip(since, data.wrong, strict=True)]
    held = [wrong for is_held, wrong in known if is_held and wrong is not None]
    others = [wrong for is_held, wrong in known if not is_held and wrong is not None]
    if not held or not any(held + others):
        return ""
    return (
        f" Of the {len(held):,} held back{_partly(len(held), sum(h for h, _ in known))}, "
        f"{sum(held):,} have a wrong label; {sum(others):,} wrong labels are not held back."
    )


def _partly(known: int, total: int) -> str:
    return "" if known == total else " whose truth is known"
