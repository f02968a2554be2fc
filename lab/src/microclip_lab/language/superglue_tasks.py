"""The eight tasks of SuperGLUE as text to text: input, target and right answers.

The formats are T5's, with two exceptions. BoolQ's question comes first, so that truncation does not
remove it; and WSC asks whether two marked spans mean the same, True or False, so that it has fixed
choices. Knows the lines of SuperGLUE's files, but not where the files are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microclip_lab.language.examples import Example
from microclip_lab.training.config import LayoutError

SHOWN = 80  # characters of the found value that an error shows


class JsonObject:
    """A JSON object that knows its place in a file, with checked access."""

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        self.content, self.place = content, place

    def text(self, key: str) -> str:
        """Return a text."""
        return str(self._of_kind(key, str, "a text"))

    def name(self, key: str) -> str:
        """Return an id, a number or a text."""
        return str(self._of_kind(key, (int, str), "a number or text"))

    def number(self, key: str) -> int:
        """Return a whole number."""
        return int(self._of_kind(key, int, "a whole number"))

    def inside(self, key: str) -> JsonObject:
        """Return the object under a key."""
        return JsonObject(self._of_kind(key, dict, "an object"), f"{self.place}, {key}")

    def several(self, key: str) -> list[JsonObject]:
        """Return the objects of the list under a key; there must be at least one."""
        found = self._of_kind(key, list, "a list of objects")
        for one in found or (None,):
            if not isinstance(one, dict):
                raise self._wrong(f"a list of objects under {key!r}", found)
        return [JsonObject(one, f"{self.place}, {key}[{i}]") for i, one in enumerate(found)]

    def answer(self, key: str, words: Mapping[Any, str]) -> str:
        """Return the word for a label, which must be one of the keys of `words`."""
        label = self._under(key)
        for known, word in words.items():
            # 1 == True in Python, but they are different labels
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


def lines(path: Path) -> Iterator[JsonObject]:
    """Yield the objects of a file; empty lines are skipped."""
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
            yield JsonObject(content, place)


YES_NO = {True: "True", False: "False"}
ONE_ZERO = {1: "True", 0: "False"}
MULTIRC_CHOICES = ("False", "True")


@dataclass(frozen=True)
class Task:
    """A task: the folder that it is in, and how a line of its files becomes examples."""

    folder: str
    examples: Callable[[JsonObject], list[Example]]
    one_per_answer: bool = False  # in training, a question with several right answers is several

    @property
    def name(self) -> str:
        """Its name among domains."""
        return self.folder.lower()


def boolq(line: JsonObject) -> list[Example]:
    """Read a question about a passage."""
    source = f"boolq question: {line.text('question')} passage: {line.text('passage')}"
    return [_closed("boolq", line, source, YES_NO)]


def cb(line: JsonObject) -> list[Example]:
    """Read a premise and what may follow from it."""
    source = f"cb hypothesis: {line.text('hypothesis')} premise: {line.text('premise')}"
    words = {word: word for word in ("entailment", "contradiction", "neutral")}
    return [_closed("cb", line, source, words)]


def copa(line: JsonObject) -> list[Example]:
    """Read a premise and two possible causes or effects."""
    source = (
        f"copa choice1: {line.text('choice1')} choice2: {line.text('choice2')} "
        f"premise: {line.text('premise')} question: {line.text('question')}"
    )
    return [_closed("copa", line, source, {0: "choice1", 1: "choice2"})]


def multirc(line: JsonObject) -> list[Example]:
    """Read a paragraph: several questions, several answers to each, each right or wrong."""
    found = []
    passage = line.inside("passage")
    paragraph = re.sub(r"<br>|</?b>", " ", passage.text("text"))
    for question in passage.several("questions"):
        group = f"multirc-{line.name('idx')}-{question.name('idx')}"
        for answer in question.several("answers"):
            word = answer.answer("label", ONE_ZERO)
            found.append(
                Example(
                    id=f"{group}-{answer.name('idx')}",
                    domain="multirc",
                    source=f"multirc question: {question.text('question')} "
                    f"answer: {answer.text('text')} paragraph: {' '.join(paragraph.split())}",
                    target=word,
                    choices=MULTIRC_CHOICES,
                    answers=(word,),
                    group=group,
                )
            )
    return found


def record(line: JsonObject) -> list[Example]:
    """Read a passage whose entities are the answers, and queries with a gap."""
    passage = line.inside("passage")
    text = passage.text("text")
    entities = tuple(
        dict.fromkeys(_spelled(text, entity) for entity in passage.several("entities"))
    )
    shown = re.sub(r"(\.|\?|\!|\"|\')\n@highlight\n", r"\1 ", text)
    shown = " ".join(re.sub(r"\n@highlight\n", ". ", shown).split())
    found = []
    for query in line.several("qas"):
        answers = tuple(dict.fromkeys(answer.text("text") for answer in query.several("answers")))
        found.append(
            Example(
                id=f"record-{line.name('idx')}-{query.name('idx')}",
                domain="record",
                source=f"record query: {query.text('query')} entities: {', '.join(entities)} "
                f"passage: {shown}",
                target=answers[0],
                choices=entities,
                answers=answers,
            )
        )
    return found


def rte(line: JsonObject) -> list[Example]:
    """Read a premise and what may follow from it, or not."""
    source = f"rte hypothesis: {line.text('hypothesis')} premise: {line.text('premise')}"
    return [_closed("rte", line, source, {w: w for w in ("entailment", "not_entailment")})]


def wic(line: JsonObject) -> list[Example]:
    """Read two sentences with the same word, which may mean the same."""
    source = (
        f"wic sentence1: {line.text('sentence1')} sentence2: {line.text('sentence2')} "
        f"word: {line.text('word')}"
    )
    return [_closed("wic", line, source, YES_NO)]


def wsc(line: JsonObject) -> list[Example]:
    """Read a text with a noun and a pronoun, both marked, which may mean the same."""
    target, words = line.inside("target"), line.text("text").split()
    for key, mark in (("span1", "*"), ("span2", "#")):
        span, first = target.text(f"{key}_text"), target.number(f"{key}_index")
        last = first + max(1, len(span.split())) - 1
        if not 0 <= first <= last < len(words):
            raise LayoutError(
                f"{target.place}: expected {key}_index to count the words of the text, of which "
                f"there are {len(words)}, but found {first} for {span!r}."
            )
        words[first] = mark + words[first]
        words[last] += mark
    return [_closed("wsc", line, f"wsc: {' '.join(words)}", YES_NO)]


TASKS = {
    task.folder: task
    for task in (
        Task("BoolQ", boolq),
        Task("CB", cb),
        Task("COPA", copa),
        Task("MultiRC", multirc),
        Task("ReCoRD", record, one_per_answer=True),
        Task("RTE", rte),
        Task("WiC", wic),
        Task("WSC", wsc),
    )
}
NAMES = tuple(task.name for task in TASKS.values())


def _closed(name: str, line: JsonObject, source: str, words: dict[Any, str]) -> Example:
    """Return a question with a fixed set of answers."""
    word = line.answer("label", words)
    return Example(
        id=f"{name}-{line.name('idx')}",
        domain=name,
        source=source,
        target=word,
        choices=tuple(words.values()),
        answers=(word,),
    )


def _spelled(text: str, entity: JsonObject) -> str:
    """Return the words of an entity, whose last letter is at `end`."""
    start, end = entity.number("start"), entity.number("end")
    if not 0 <= start <= end < len(text):
        raise LayoutError(
            f"{entity.place}: expected start and end to be places in the passage of {len(text)} "
            f"letters, but found {start} and {end}."
        )
    return text[start : end + 1]
