"""What the page says about domains: whether a whole domain is held back, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from microclip.report import figures
from microclip.report.blocks import Block, Cell, Figure, Paragraph, Table
from microclip.report.gallery import number, shortened
from microclip.report.run_data import RunData

MOST_ROWS = 200


def domain_sentence(data: RunData, section: str) -> str:
    """Return whether a domain is held back as a whole, for the summary; "" without domains."""
    found = data.domains.findings if data.domains is not None else ()
    if found:
        held = ", ".join(shortened(one.domain, 40) for one in found[:3])
        return f" It holds back whole {data.grouped_by}s: {held}. See “{section}”."
    return "" if data.domains is None else f" No {data.grouped_by} is held back as a whole."


def domain_blocks(data: RunData) -> list[Block]:
    """Show the weight of each domain against its number of examples."""
    report, kind = data.domains, data.grouped_by
    if report is None:
        return [
            Paragraph(
                "No domains were recorded. To see whether a whole domain is held back, pass "
                "domains= to the Clipper, or describe the examples with a domain.",
                "note",
            )
        ]
    rows = report.domains.to_pylist()
    shown = [row["domain"] for row in rows[:10]]
    blocks: list[Block] = [Paragraph(found.message, "finding") for found in report.findings]
    if not report.findings:
        blocks.append(Paragraph(f"None of the {len(rows)} {kind}s is held back as a whole."))
    if kind == "label":
        blocks.append(Paragraph("No domains were recorded; labels stand in for them here.", "note"))
    if any(row["ratio"] is not None for row in rows):
        over_time = figures.domains_over_time(report.over_time.to_pylist(), shown)
        blocks += [
            Figure(
                f"domains-{data.key}",
                f"{kind.capitalize()}s",
                f"Each dot is the share of the weight that a {kind} has, divided by its share of "
                "the examples, with a 95 % interval. At 1, its weight matches its number of "
                "examples; if the whole interval lies below 0.8, it is held back systematically.",
                {"": figures.domain_ratios(rows[:25])},
                "",
                min(120 + 26 * min(len(rows), 25), 700),
            ),
            Figure(
                f"domains-time-{data.key}",
                f"{kind.capitalize()}s over time",
                f"The same ratio for each tenth of training: where a line is below 1, that {kind} "
                "was held back."
                + (" Only the ten with the lowest ratio are drawn." if len(rows) > 10 else ""),
                {"": over_time},
            ),
        ]
    blocks.append(_domain_table(data, rows))
    return blocks


def _domain_table(data: RunData, rows: Sequence[dict[str, float | str | None]]) -> Table:
    def percent(value: object) -> Cell:
        return Cell(f"{100 * value:.1f}", value) if isinstance(value, float) else Cell("")

    def plain(value: object) -> Cell:
        return Cell(number(value), value) if isinstance(value, float) else Cell("")

    held = _held_back_now(data)
    more = ["% held back now"] if held else []
    headings = ["% of examples", "% of weight", "ratio", "from", "to", "suppression", *more]
    return Table(
        f"domain-table-{data.key}",
        f"{data.grouped_by.capitalize()}s, the one held back most first",
        (data.grouped_by, *headings),
        [
            [
                Cell(shortened(str(row["domain"]))),
                percent(row["example_share"]),
                percent(row["weight_share"]),
                *(plain(row[name]) for name in ("ratio", "low", "high", "suppression")),
                *([percent(held.get(str(row["domain"])))] if held else []),
            ]
            for row in rows[:MOST_ROWS]
        ],
        numeric=(False, *[True] * len(headings)),
        sortable=True,
        sorted_by=3,
    )


def _held_back_now(data: RunData) -> dict[str, float]:
    """Return the share of each domain's examples that is held back, for rules that do so."""
    counts: dict[str, list[int]] = {}
    if data.held is not None:
        for name, since in zip(data.groups, data.column("held_back_since"), strict=True):
            if name is not None:
                counts.setdefault(name, []).append(since is not None)
    return {name: sum(each) / len(each) for name, each in counts.items()}
