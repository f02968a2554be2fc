"""Reading a run's folder: what was run, and its metrics. A ledger by itself is a run too.

Whatever is wrong with a folder as a whole is an error; a line that cannot be read is passed over
and noted. Examples are read by `examples`, ledgers by `course` and `microclip.draggers`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from microclip.report.folder import FORMAT, LEDGER, METRICS, RESUMED, RUN, VERSION
from microclip.report.inside import OutsideError, opened

LONGEST_RUN_FILE = 16_000_000  # bytes
LONGEST_LINE = 16_000_000
MOST_METRICS = 40

Curve = dict[int, float]  # by step


class RunError(ValueError):
    """A folder is not a run that can be reported on; the message says why, and what to do."""


@dataclass(frozen=True, eq=False)
class Run:
    """What a run's folder says."""

    path: Path
    name: str
    microbatch_size: int | None
    seed: int | None
    group: str | None
    settings: dict[str, str]
    described: bool = True  # False: a ledger without a run.json, of which little is known
    command: str | None = None
    headline: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    ledger: Path | None = None
    notes: tuple[str, ...] = ()


def read_run(path: Path) -> Run:
    """Read a run's folder, or a ledger's."""
    if not path.exists():
        raise RunError(f"There is no run at {path}: the folder does not exist.")
    if not path.is_dir():
        raise RunError(f"A run is a folder, but {path} is a file.")
    ledger = _find_ledger(path)
    if not (path / RUN).exists():
        if ledger is None:
            raise RunError(
                f"{path} is not a run: it has neither a {RUN} nor a ledger. Write one with "
                "microclip.report.RunFolder, or give the folder of a microclip.Ledger."
            )
        own = path.resolve()
        name = own.parent.name if own.name == LEDGER and own.parent.name else own.name
        return Run(path, name, None, None, None, {}, described=False, ledger=ledger)
    said = _read_description(path)
    metrics, notes = _read_metrics(path)
    if metrics and ledger is not None and not any(ledger.glob("*/*.parquet")):
        notes = (*notes, "Its ledger is empty: no step was written yet, or all of it was deleted.")
        ledger = None
    run = Run(
        path=path,
        name=_text(said.get("name")) or path.resolve().name,
        microbatch_size=_size(path, said.get("microbatch_size")),
        seed=said["seed"] if _whole(said.get("seed")) else None,
        group=_text(said.get("group")),
        settings=dict(_flat(said.get("settings"))),
        command=_text(said.get("command")),
        headline=_text(said.get("headline")),
        versions=dict(_flat(said.get("versions"))),
        metrics=metrics,
        ledger=ledger,
        notes=notes,
    )
    if not run.metrics and run.ledger is None:
        raise RunError(
            f"The run {path} is empty: it has no ledger, and no metric in {METRICS}. Log some with "
            "RunFolder.log(step, loss=...), or let it train a little longer."
        )
    return run


def _find_ledger(path: Path) -> Path | None:
    """Return the ledger's folder; whether it is whole is for whoever opens it to say."""
    for place in (path / LEDGER, path):
        if (place / "ledger.json").exists() or (place / "microbatches").is_dir():
            return place
    return None


def _read_description(path: Path) -> dict[str, Any]:
    try:
        with opened(path, RUN) as file:
            text = file.read(LONGEST_RUN_FILE + 1)
        if len(text) > LONGEST_RUN_FILE:
            raise RunError(f"{path / RUN} is longer than {LONGEST_RUN_FILE:,} bytes.")
        said = json.loads(text)
    except OutsideError as error:
        raise RunError(f"The run {path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path / RUN} is damaged ({error}). Take it from a copy.") from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise RunError(f'{path / RUN} does not say "format": "{FORMAT}": this is not a run.')
    if said.get("version") != VERSION:
        raise RunError(
            f"{path / RUN} is of version {said.get('version')!r}, but this microclip reads version "
            f"{VERSION}. Use the microclip that wrote it."
        )
    return said


def _read_metrics(path: Path) -> tuple[dict[str, Curve], tuple[str, ...]]:
    curves: dict[str, Curve] = {}
    torn = odd = 0
    resumed = False
    if not (path / METRICS).exists():
        return {}, ()
    for line, complete in lines(path, METRICS):
        entry = parsed(line)
        if entry is None:
            torn += complete  # a last line that is not complete is still being written
            continue
        if entry.get(RESUMED) is True:
            resumed = True
            continue
        step = entry.pop("step", None)
        if not _whole(step):
            odd += 1
            continue
        if resumed:  # training went back to this step: what came after it never happened
            # at the step itself not everything need be measured again: a run that had ended says
            # once more what came of it, and no more than that
            curves = {n: {s: v for s, v in c.items() if s <= step} for n, c in curves.items()}
            resumed = False
        for name, value in entry.items():
            number = _number(value)
            if number is not None:
                curves.setdefault(name, {})[step] = number
    notes = []
    if torn or odd:
        notes.append(
            f"{torn + odd} lines of {METRICS} are no metrics of a step, and were passed over."
        )
    curves = {name: dict(sorted(curve.items())) for name, curve in curves.items() if curve}
    if len(curves) > MOST_METRICS:
        notes.append(f"It has {len(curves)} metrics; the first {MOST_METRICS} are shown.")
        curves = dict(list(curves.items())[:MOST_METRICS])
    return curves, tuple(notes)


def lines(path: Path, name: str) -> Iterator[tuple[bytes, bool]]:
    """Give the lines of a run's file, and whether they are complete; very long ones are empty."""
    try:
        with opened(path, name) as file:
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


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object that a line is, None if it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


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
            f"{path / RUN} must say a positive microbatch_size, or null for plain training, but "
            f"says {json.dumps(value)[:80]}."
        )
    return value


def _text(value: object) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)


def _flat(settings: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Give nested settings one by one, their names joined by dots."""
    if not isinstance(settings, dict):
        return
    for name, value in settings.items():
        if isinstance(value, dict) and value and before.count(".") < 5:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value)
