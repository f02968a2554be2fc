"""Reading run folders: what was run, and its metrics. A bare ledger counts as a run too.

A folder that cannot be used as a whole is an error; a single unreadable line is skipped and noted.
`run_data` reads the examples and the ledger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from microclip.files import is_intact
from microclip.report.folder import (
    CHECKSUM,
    FORMAT,
    LEDGER,
    METRICS,
    RESUMED,
    RUN,
    VERSION,
    WITHOUT_CHECKSUMS,
    crc32,
)
from microclip.report.media import OutsideError, safe_open
from microclip.rules import ExampleRule, parse_rule

LONGEST_RUN_FILE = 16_000_000  # bytes
LONGEST_LINE = 16_000_000
MOST_METRICS = 40
LONGEST_RULE = 200  # characters

Curve = dict[int, float]  # by step


class RunError(ValueError):
    """A folder cannot be read as a run; the message says why and what to do."""


@dataclass(frozen=True, eq=False)
class Run:
    """The content of a run folder."""

    path: Path
    name: str
    microbatch_size: int | None
    seed: int | None
    group: str | None
    settings: dict[str, str]
    described: bool = True  # False: a ledger without a run.json
    command: str | None = None
    headline: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    ledger: Path | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def example_rule(self) -> ExampleRule | None:
        """The rule that weights examples, if the settings name one as "rule"."""
        text = self.settings.get("rule", "")
        try:
            found = parse_rule(text[:LONGEST_RULE])
        except (TypeError, ValueError, RecursionError):
            return None
        return found if isinstance(found, ExampleRule) else None

    @property
    def is_plain(self) -> bool:
        """Whether it was described as plain training."""
        return self.described and self.microbatch_size is None and self.example_rule is None


def read_run(path: Path) -> Run:
    """Read the folder of a run or a ledger."""
    if not path.exists():
        raise RunError(f"There is no run at {path}: the folder does not exist.")
    if not path.is_dir():
        raise RunError(f"A run is a folder, but {path} is a file.")
    ledger = find_ledger(path)
    if not (path / RUN).exists():
        if ledger is None:
            raise RunError(
                f"{path} is not a run: it has neither a {RUN} nor a ledger. Write one with "
                "microclip.report.RunFolder, or pass the folder of a microclip.Ledger."
            )
        own = path.resolve()
        name = own.parent.name if own.name == LEDGER and own.parent.name else own.name
        return Run(path, name, None, None, None, {}, described=False, ledger=ledger)
    content = _read_description(path)
    metrics, notes = _read_metrics(path)
    if content["version"] == VERSION and not is_intact(content):
        changed = f"{RUN} has been edited or damaged since it was written: do not rely on it."
        notes = (changed, *notes)
    if metrics and ledger is not None and not any(ledger.glob("*/*.parquet")):
        notes = (*notes, "Its ledger is empty: nothing has been written yet, or it was deleted.")
        ledger = None
    run = Run(
        path=path,
        name=_text(content.get("name")) or path.resolve().name,
        microbatch_size=_size(path, content.get("microbatch_size")),
        seed=content["seed"] if _whole(content.get("seed")) else None,
        group=_text(content.get("group")),
        settings=dict(_flat(content.get("settings"))),
        command=_text(content.get("command")),
        headline=_text(content.get("headline")),
        versions=dict(_flat(content.get("versions"))),
        metrics=metrics,
        ledger=ledger,
        notes=notes,
    )
    if not run.metrics and run.ledger is None:
        raise RunError(
            f"The run {path} is empty: it has no ledger and no metric in {METRICS}. Log some with "
            "RunFolder.log(step, loss=...), or let it train a little longer."
        )
    return run


def find_ledger(path: Path) -> Path | None:
    """Return the folder of the ledger; whether it is complete is checked when it is opened."""
    for place in (path / LEDGER, path):
        if (place / "ledger.json").exists() or (place / "microbatches").is_dir():
            return place
    return None


def _read_description(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, RUN) as file:
            text = file.read(LONGEST_RUN_FILE + 1)
        if len(text) > LONGEST_RUN_FILE:
            raise RunError(f"{path / RUN} is longer than {LONGEST_RUN_FILE:,} bytes.")
        content = json.loads(text)
    except OutsideError as error:
        raise RunError(f"The run {path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path / RUN} is damaged ({error}). Restore it from a backup.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunError(f'{path / RUN} does not say "format": "{FORMAT}": this is not a run.')
    if content.get("version") not in (VERSION, WITHOUT_CHECKSUMS):
        raise RunError(
            f"{path / RUN} has version {content.get('version')!r}, but this microclip reads "
            f"version {VERSION}. Use the microclip version that wrote it."
        )
    return content


def _read_metrics(path: Path) -> tuple[dict[str, Curve], tuple[str, ...]]:
    curves: dict[str, Curve] = {}
    torn = odd = 0
    resumed = False
    if not (path / METRICS).exists():
        return {}, ()
    empty = True
    for line, complete in lines(path, METRICS):
        empty = False
        entry = parsed(line)
        if entry is None:
            torn += complete or not is_being_written(line)
            continue
        if entry.get(RESUMED) is True:
            resumed = True
            continue
        step = entry.pop("step", None)
        if not _whole(step):
            odd += 1
            continue
        if resumed:  # training went back to this step: what came after it never happened
            # keep the step itself: a finished run that is resumed there logs only its final
            # metrics again
            curves = {n: {s: v for s, v in c.items() if s <= step} for n, c in curves.items()}
            resumed = False
        for name, value in entry.items():
            number = _number(value)
            if number is not None:
                curves.setdefault(name, {})[step] = number
    notes = []
    if empty:
        notes.append(f"{METRICS} is empty: what it held was lost.")
    if torn or odd:
        notes.append(
            f"Skipped {count_lines(torn + odd)} of {METRICS} that could not be read as metrics."
        )
    curves = {name: dict(sorted(curve.items())) for name, curve in curves.items() if curve}
    if len(curves) > MOST_METRICS:
        notes.append(f"It has {len(curves)} metrics; the first {MOST_METRICS} are shown.")
        curves = dict(list(curves.items())[:MOST_METRICS])
    return curves, tuple(notes)


def lines(path: Path, name: str) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines of a file and whether they are complete; overlong lines become empty."""
    try:
        with safe_open(path, name) as file:
            while line := file.readline(LONGEST_LINE + 1):
                complete = line.endswith(b"\n")
                if len(line) > LONGEST_LINE:
                    while not complete and (rest := file.readline(LONGEST_LINE)):
                        complete = rest.endswith(b"\n")
                    yield b"", True
                    continue
                yield line, complete
    except OutsideError as error:
        raise RunError(f"The run {path} cannot be read: {error}") from error


def count_lines(count: int) -> str:
    """Return "1 line", "2 lines" and so on."""
    return f"{count} line{'' if count == 1 else 's'}"


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if there is none, or not the one that was written."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    written = entry.pop(CHECKSUM, None)
    if written is not None and written != crc32(json.dumps(entry).encode()):
        return None
    return entry


def is_being_written(line: bytes) -> bool:
    """Return whether a last line that cannot be read may be one that is still being written."""
    return line.startswith(b"{") and b"\0" not in line and parsed(line[:-1]) is None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _size(path: Path, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**53:
        raise RunError(
            f"microbatch_size in {path / RUN} must be a positive integer, or null for plain "
            f"training, but is {json.dumps(value)[:80]}."
        )
    return value


def _text(value: object) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)


def _flat(settings: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings one by one, names joined by dots."""
    if not isinstance(settings, dict):
        return
    for name, value in settings.items():
        if isinstance(value, dict) and value and before.count(".") < 5:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value)
