"""Writing a run folder: what was run, its metrics, its examples, and where its ledger goes.

Needs only the standard library, unless it is given pixels. `runs` reads the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from microclip.files import append_line, sealed, write_whole

FORMAT = "microclip-run"
VERSION = 2
WITHOUT_CHECKSUMS = 1  # the version before checksums, which is read too
RUN, METRICS, EXAMPLES, LEDGER = "run.json", "metrics.jsonl", "examples.jsonl", "ledger"
MEDIA = "examples"
CHECKSUM = "crc32"  # of the rest of a line, in metrics and examples
FILE_CHECKSUM = "file_crc32"  # of the file that a line names
RESUMED = "resumed"  # marks a restart: lines after it may replace lines before it
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
ENDINGS = {"image": "png", "audio": "wav"}  # readers go by a file's first bytes, not by its name


class RunFolder:
    """A folder for one run, which `microclip report` turns into a page.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> run = RunFolder(folder.name, microbatch_size=4, seed=0, settings={"lr": 0.1})
    >>> run.log(10, loss=0.5, validation_accuracy=0.9)
    >>> run.example(17, text="It was a dark and stormy night.", label="weather")
    >>> sorted(path.name for path in run.path.iterdir())
    ['examples.jsonl', 'metrics.jsonl', 'run.json']
    >>> folder.cleanup()

    An existing folder is continued: once a step is logged again, it replaces everything that was
    logged for later steps.

    Args:
        path: The folder, created if it does not exist.
        name: The name of the run on the page; by default that of the folder.
        microbatch_size: b, or None for plain training.
        seed: Runs that differ in nothing but their seed are averaged.
        group: Runs of the same group are compared with each other.
        settings: Anything worth recording: numbers, texts, lists, nested mappings.
        command: The command that reproduces the run.
        headline: The metric to judge runs by; "test_accuracy" and the like are found
            automatically.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        microbatch_size: int | None = None,
        seed: int | None = None,
        group: str | None = None,
        settings: Mapping[str, Any] | None = None,
        command: str | None = None,
        headline: str | None = None,
    ) -> None:
        if microbatch_size is not None and (
            isinstance(microbatch_size, bool)
            or not isinstance(microbatch_size, int)
            or microbatch_size < 1
        ):
            raise ValueError(
                "microbatch_size must be a positive integer, or None for plain training, but got "
                f"{microbatch_size!r}."
            )
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        described = {
            "format": FORMAT,
            "version": VERSION,
            "name": name or self.path.resolve().name,
            "microbatch_size": microbatch_size,
            "seed": seed,
            "group": group,
            "settings": dict(settings or {}),
            "command": command,
            "headline": headline,
            "versions": _versions(),
        }
        text = json.dumps(sealed(described), indent=2, default=str) + "\n"
        write_whole(self.path / RUN, text.encode())
        if (self.path / METRICS).exists():
            self._append(METRICS, {RESUMED: True})

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def ledger(self) -> Path:
        """Where to put the ledger of this run: `microclip.Ledger(run.ledger)`."""
        return self.path / LEDGER

    def log(self, step: int, **metrics: Any) -> None:
        """Log metrics after this many steps; values that are not finite are logged as unknown."""
        self.log_all(step, metrics)

    def log_all(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Like `log`, for metric names that are not valid keyword arguments."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be 0 or a positive integer, but got {step!r}.")
        for taken in ("step", CHECKSUM):
            if taken in metrics:
                raise ValueError(f"A metric cannot be called {taken}: that name is taken.")
        values = {name: float(value) for name, value in metrics.items()}
        known = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._append(METRICS, {"step": step, **known})

    def example(
        self,
        id: int | str,
        *,
        image: Any = None,
        audio: bytes | None = None,
        text: str | None = None,
        label: object = None,
        truth: object = None,
        domain: object = None,
        value_range: tuple[float, float] | None = None,
    ) -> None:
        """Describe an example so that the page can show it; a later description replaces it.

        Args:
            id: The id that was passed to the `Clipper` in ids=, or to `Ledger.record`.
            image: The bytes of an image file, or pixels: height x width (x channels), or channels
                x height x width.
            audio: The bytes of a sound file.
            text: A text.
            label: The label it was trained with.
            truth: The correct label, if known.
            domain: Where it comes from.
            value_range: Which values of pixels are black and white. By default 0 and 1, -1 and 1,
                0 and 255 or those of 16 bits, judging by type and values; anything else is
                stretched.
        """
        shown = {"image": image, "audio": audio, "text": text}
        given = [kind for kind, content in shown.items() if content is not None]
        if len(given) > 1:
            raise ValueError(
                f"An example has one kind of content, but {id!r} was given {' and '.join(given)}."
            )
        line: dict[str, Any] = {"id": id}
        for kind in given:
            line["kind"] = kind
            if kind == "text":
                line["text"] = text
            else:
                line["file"], line[FILE_CHECKSUM] = self._keep(id, kind, shown[kind], value_range)
        facts = {"label": label, "truth": truth, "domain": domain}
        line |= {name: str(value) for name, value in facts.items() if value is not None}
        self._append(EXAMPLES, line)

    def _keep(
        self, id: int | str, kind: str, content: Any, value_range: tuple[float, float] | None
    ) -> tuple[str, str]:
        if not isinstance(content, bytes):
            from microclip.report.media import png

            content = png(content, value_range)
        (self.path / MEDIA).mkdir(exist_ok=True)
        stem = str(id)
        if not PLAIN_NAME.fullmatch(stem):  # an id may be anything, a file name may not
            stem = hashlib.sha256(stem.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        name = f"{MEDIA}/{stem}.{ENDINGS[kind]}"
        write_whole(self.path / name, content)
        return name, crc32(content)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, allow_nan=False)
        append_line(self.path / name, json.dumps({**line, CHECKSUM: crc32(text.encode())}))


def crc32(content: bytes) -> str:
    """Return the checksum of a line or a file.

    >>> crc32(b"hello")
    '3610a686'
    """
    return f"{zlib.crc32(content):08x}"


def _versions() -> dict[str, str]:
    import platform

    import torch

    from microclip import __version__

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "microclip": __version__,
    }
