"""From blocks to a single HTML file that works offline.

Everything that comes from data is escaped: texts by jinja, figures as JSON in which no tag can
begin or end. As a second line of defense, the page's Content-Security-Policy allows only its own
scripts, by hash, and no network requests (a page that is being watched may ask its own server).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from microclip.report.blocks import Cell, Figure, Page, Suspects
from microclip.report.gallery import shortened
from microclip.report.suspects import review_data

LARGEST_PAGE = 8_000_000  # bytes
RESERVED = 1_000_000  # bytes of it for text, tables and figures
HIDDEN_IN_JSON = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def render(page: Page, version: int | None = None) -> bytes:
    """Return the whole file.

    Args:
        page: Its content.
        version: Of a page that is served, and asks for newer versions of itself; None for a file.
    """
    environment = Environment(
        loader=PackageLoader("microclip.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shortened": shortened, "sort_key": sort_key}
    names = ["page.js", "review.js", *(["watch.js"] if version is not None else [])]
    scripts = [plotly_script(), *map(_asset, names)]
    html = environment.get_template("page.html.jinja").render(
        page=page,
        policy=_policy(scripts, "'none'" if version is None else "'self'"),
        version=version,
        style=Markup(_asset("style.css")),
        figures=Markup(_figures(page)),
        reviews=Markup(_reviews(page)),
        scripts=[Markup(script) for script in scripts],
    )
    content = html.encode("utf-8", "replace")  # a lone surrogate cannot be encoded
    if len(content) > LARGEST_PAGE:
        raise ValueError(
            f"The page would have {len(content):,} bytes, more than {LARGEST_PAGE:,}. Report on "
            "fewer runs, or show fewer examples."
        )
    return content


def media_budget() -> int:
    """Return how many bytes images, sounds and texts of examples may take."""
    return LARGEST_PAGE - RESERVED - len(plotly_script())


@cache
def plotly_script() -> str:
    """Return the plotly.js that ships with the Python package."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def sort_key(cell: Cell) -> str:
    """Return the sort key of a cell as text; empty if unknown."""
    key = cell.sort if cell.sort is not None or cell.sparkline else cell.text
    return "" if key is None else str(key)


def embedded(value: Any) -> str:
    """Return JSON that is safe inside a script element.

    >>> embedded({"a": "</script>"})
    '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    for character, hidden in HIDDEN_IN_JSON.items():
        text = text.replace(character, hidden)
    return text


def _figures(page: Page) -> str:
    found = {
        block.key: [
            {"data": drawing.data, "layout": drawing.layout} for drawing in block.choices.values()
        ]
        for section in page.sections
        for block in section.blocks
        if isinstance(block, Figure)
    }
    return embedded(found)


def _reviews(page: Page) -> str:
    found = {
        block.key: review_data(block)
        for section in page.sections
        for block in section.blocks
        if isinstance(block, Suspects)
    }
    return embedded(found)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _policy(scripts: Sequence[str], connect: str) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"media-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _asset(name: str) -> str:
    return (files("microclip.report") / name).read_text(encoding="utf-8")
