"""Files of one JSON object per line: what is not as expected is said, with the number of its line.

Knows nothing of what the lines are about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from microclip_lab.training.layout import LayoutError

SHOWN = 80  # characters of what was found that a message shows


class Line:
    """An object of a file, or one inside of it, that knows where it stands."""

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        self.content, self.place = content, place

    def text(self, key: str) -> str:
        """Return a text."""
        return str(self._of_kind(key, str, "a text"))

    def name(self, key: str) -> str:
        """Return a number or text that things are told apart by."""
        return str(self._of_kind(key, (int, str), "a number or text"))

    def number(self, key: str) -> int:
        """Return a whole number."""
        return int(self._of_kind(key, int, "a whole number"))

    def inside(self, key: str) -> Line:
        """Return the object under a key."""
        return Line(self._of_kind(key, dict, "an object"), f"{self.place}, {key}")

    def several(self, key: str) -> list[Line]:
        """Return the objects of the list under a key; there must be at least one."""
        found = self._of_kind(key, list, "a list of objects")
        for one in found or (None,):
            if not isinstance(one, dict):
                raise self._wrong(f"a list of objects under {key!r}", found)
        return [Line(one, f"{self.place}, {key}[{i}]") for i, one in enumerate(found)]

    def answer(self, key: str, words: Mapping[Any, str]) -> str:
        """Return the word for a label, which must be one of the keys of `words`."""
        label = self._under(key)
        for known, word in words.items():
            # 1 and true are equal to Python, but not the same label
            if label == known and isinstance(label, bool) == isinstance(known, bool):
                return word
        allowed = ", ".join(json.dumps(known) for known in words)
        raise self._wrong(f"one of {allowed} under {key!r}", label)

    def _of_kind(self, key: str, kind: type | tuple[type, ...], named: str) -> Any:
        value = self._under(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._wrong(f"{named} under {key!r}", value)
        return value

    def _under(self, key: str) -> Any:
        if key not in self.content:
            raise LayoutError(
                f"{self.place}: expected {key!r}, but found only "
                f"{', '.join(map(repr, self.content)) or 'nothing'}."
            )
        return self.content[key]

    def _wrong(self, expected: str, found: Any) -> LayoutError:
        shown = json.dumps(found)
        shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
        return LayoutError(f"{self.place}: expected {expected}, but found {shown}.")


def lines(path: Path) -> Iterator[Line]:
    """Yield the objects of a file; empty lines are passed over."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            place = f"{path}, line {number}"
            try:
                content = json.loads(text)
            except ValueError as error:
                raise LayoutError(
                    f"{place}: expected a JSON object, but found {text.strip()[:SHOWN]!r}: {error}."
                ) from None
            if not isinstance(content, dict):
                raise LayoutError(
                    f"{place}: expected a JSON object, but found {text.strip()[:SHOWN]!r}."
                )
            yield Line(content, place)
