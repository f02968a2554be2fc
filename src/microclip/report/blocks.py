"""What a page is made of: sections of paragraphs, figures, tables and galleries. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Tone = Literal["plain", "note", "finding"]


@dataclass(frozen=True)
class Paragraph:
    """A few sentences; a note is small, a finding stands out."""

    text: str
    tone: Tone = "plain"
    block: str = "paragraph"


@dataclass(frozen=True)
class Drawing:
    """What plotly draws: traces and a layout. Colors are style sheet names: var(--ink)."""

    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A figure, or several to choose from by name."""

    key: str
    title: str
    how_to_read: str
    choices: Mapping[str, Drawing]
    choose: str = ""  # label of the selector
    height: int = 340  # pixels
    block: str = "figure"


@dataclass(frozen=True)
class Sparkline:
    """How an example developed, early, middle and late, on a scale from 0 to 1."""

    values: Sequence[float | None]
    level: float  # the median of all examples
    description: str  # the same in words


@dataclass(frozen=True)
class Cell:
    """An entry of a table, and its sort key if that is not its text."""

    text: str
    sort: float | str | None = None
    marked: bool = False
    sparkline: Sparkline | None = None


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its name."""

    key: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[bool] = ()
    sortable: bool = False
    filterable: bool = False
    sorted_by: int = -1  # the column that rows are sorted by at first
    download: str = ""  # a data URI
    wide: bool = False  # do not break words; scroll sideways if necessary
    block: str = "table"


@dataclass(frozen=True)
class Tile:
    """An example in a gallery."""

    id: str
    rank: int
    score: float | None
    facts: Sequence[tuple[str, str]]  # names and values to list
    kind: str = ""  # "image", "audio", "text", or "" if there is nothing to show
    uri: str = ""
    pixelated: bool = False
    text: str = ""
    note: str = ""
    label: str | None = None
    truth: str | None = None
    domain: str | None = None
    appearances: int = 0
    weight: float | None = None
    sparkline: Sparkline | None = None

    @property
    def wrong(self) -> bool:
        """Whether its label is known to be wrong."""
        return self.truth is not None and self.label is not None and self.label != self.truth


@dataclass(frozen=True)
class Gallery:
    """Examples to look at."""

    key: str
    tiles: Sequence[Tile]
    how_to_read: str
    block: str = "gallery"

    @property
    def labels(self) -> list[str]:
        """All labels, sorted."""
        return sorted({tile.label for tile in self.tiles if tile.label is not None})

    @property
    def domains(self) -> list[str]:
        """All domains, sorted."""
        return sorted({tile.domain for tile in self.tiles if tile.domain is not None})


@dataclass(frozen=True)
class Suspect:
    """An example that is probably wrong, to be reviewed."""

    id: int | str
    probability: float | None
    flagged: bool
    kind: str
    evidence: str
    given: str | None = None  # label, as in Suspects.labels
    suggested: str | None = None
    truth: str | None = None
    domain: str | None = None
    shows: str = ""  # "image", "audio", "text", or "" if there is nothing to show
    uri: str = ""
    pixelated: bool = False
    text: str = ""
    note: str = ""


@dataclass(frozen=True)
class Suspects:
    """Examples to review in the page: keep, relabel or drop."""

    key: str
    storage: str  # under which the browser saves the review of this run
    run: str
    rows: Sequence[Suspect]  # the most probable first
    labels: Mapping[str, str]  # names of the labels to choose from, by what is exported
    fixed_labels: bool  # whether others are refused
    integer_ids: bool
    listed: Table  # the first of them, for printing and for browsers without scripts
    block: str = "suspects"


Block = Paragraph | Figure | Table | Gallery | Suspects


@dataclass(frozen=True)
class Section:
    """A part of the page, with a heading."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    made_by: str = ""
    headlines: Sequence[str] = ()  # without full stops
