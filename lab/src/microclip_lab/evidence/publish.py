"""Hands what the records say to those who need it: one command writes it all.

    benchmarks/evidence.py --publish

writes, from `results/evidence` and `results/dirty_data`,

* `src/microclip/probing/thresholds.py`: thresholds, their record on tasks that they were not fitted
  on, and what to do by kind of data, for `microclip probe` and `microclip report`,
* `docs/evidence.md`: the page,
* the tables in `docs/when-to-use.md` and `README.md`, between comments that say so.

A test compares all four with the committed records, so run it after adding records, and commit what
it writes with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from microclip.probing import Forecast, Thumb
from microclip_lab.dirty_data import records as dirty_records
from microclip_lab.evidence.by_kind import Decision, decisions
from microclip_lab.evidence.catalog import STUDIES
from microclip_lab.evidence.page import page
from microclip_lab.evidence.page_advice import counts, forecast_lines, kinds_table, short_list
from microclip_lab.evidence.plan import gate
from microclip_lab.evidence.records import Records
from microclip_lab.evidence.when_to_clip import RULES, cases, forecast

THRESHOLDS = Path("src/microclip/probing/thresholds.py")
PAGE = Path("docs/evidence.md")
GUIDE = Path("docs/when-to-use.md")
README = Path("README.md")
BY = "written by benchmarks/evidence.py --publish"
SOURCE_HEAD = f'''\
"""Thresholds of when to clip, how often they were right, and decisions by kind of data.

Fitted on one half of the tasks of a plan that was committed before its runs, judged on its other
half and on those of an earlier benchmark: docs/evidence.md shows them task by task. This file is
{BY} from results/evidence and results/dirty_data, and a
test of the laboratory compares it with them: do not edit it.
"""'''


def published(records: Records, outside: dirty_records.Records, root: Path) -> dict[Path, str]:
    """Return the text of every file, by its path in the repository at `root`."""
    decided = decisions(records, outside)
    known = cases(records, outside)
    forecasts = [forecast(rule, known) for rule in RULES]
    guide = _read(root / GUIDE)
    guide = replaced(guide, "by kind", kinds_table(decided), GUIDE)
    guide = replaced(guide, "beforehand", forecast_lines(forecasts), GUIDE)
    judged = [s for s in STUDIES if gate(records, s) in ("passed", "none needed")]
    by_rule = [counts(records, judged, arm) for arm in ("unit-4", "loss-history", "minnorm-4")]
    lines = [f"{'; '.join(by_rule)}.", "", *_for_readme(decided, forecasts)]
    readme = replaced(_read(root / README), "by kind", lines, README)
    return {
        THRESHOLDS: thresholds_source(forecasts, decided),
        PAGE: page(records, outside),
        GUIDE: guide,
        README: readme,
    }


def replaced(text: str, name: str, lines: Sequence[str], path: Path) -> str:
    """Return a text with other lines between the two comments of this name.

    >>> old = f"a\\n<!-- by kind: {BY} -->\\nold\\n<!-- by kind: end -->\\nz\\n"
    >>> replaced(old, "by kind", ["new"], Path("x.md")).splitlines()[2:4]
    ['', 'new']
    """
    begin, end = f"<!-- {name}: {BY} -->\n", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path} must have the lines {begin.strip()} and {end} once each.")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    return "\n".join([f"{before}{begin}", *lines, "", f"{end}{after}"])


def thresholds_source(forecasts: Sequence[Forecast], decided: Sequence[Decision]) -> str:
    """Return the library's module of thresholds."""
    lines = [
        *SOURCE_HEAD.splitlines(),
        "",
        *(["import math", ""] if "math." in "".join(map(_source, forecasts)) else []),
        "from microclip.probing.forecast import Forecast, Thumb"
        if any(each.thumb for each in forecasts)
        else "from microclip.probing.forecast import Forecast",
        "",
        "FORECASTS: tuple[Forecast, ...] = (",
        *(line for each in forecasts for line in _source(each).splitlines()),
        ")",
        "",
        "BY_KIND: tuple[tuple[str, str], ...] = (",
        *(_pair(each) for each in decided if each.known),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _source(found: Forecast) -> str:
    fields = {
        "rule": _quoted(found.rule),
        "thumb": _thumb(found.thumb),
        "fitted_on": found.fitted_on,
        "judged_on": found.judged_on,
        "right": found.right,
        "guess": _quoted(found.guess),
        "guess_right": found.guess_right,
        "luck": found.luck,
    }
    inner = "".join(f"        {name}={value},\n" for name, value in fields.items())
    return f"    Forecast(\n{inner}    ),"


def _thumb(thumb: Thumb | None) -> str:
    if thumb is None:
        return "None"
    limits = (_number(thumb.harm_below), _number(thumb.gain_from))
    return f"Thumb({_quoted(thumb.figure)}, {', '.join(limits)})"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "math.inf" if value > 0 else "-math.inf"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _pair(found: Decision) -> str:
    to_do = found.to_do.replace("`", "").replace("[", "").split("](")[0]
    return f'    ("{found.kind.title}", "{to_do}"),'


def _for_readme(decided: Sequence[Decision], forecasts: Sequence[Forecast]) -> list[str]:
    there = "(find-bad-data.md)", "(docs/find-bad-data.md)"
    listed = [line.replace(*there) for line in short_list(decided)]
    told = [f"{each.rule} at b = 4: {each.record}" for each in forecasts if each.thumb]
    if not told:
        told = ["too few tasks have a clear result to fit a forecast on"]
    return [
        *listed,
        "",
        "Percentages are less error than plain training that was tuned as carefully. Can one tell "
        f"beforehand, from gradient norms alone? {'. '.join(told)}.",
    ]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
