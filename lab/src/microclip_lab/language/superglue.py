"""Any folder in SuperGLUE's layout: BoolQ/train.jsonl, BoolQ/val.jsonl, and so on.

Any of the eight tasks may be present. The labels of test.jsonl are not public, so val.jsonl is
split into halves for validation and testing, the same for every seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from microclip_lab.language.examples import Example, Splits
from microclip_lab.language.superglue_tasks import TASKS, Task, lines
from microclip_lab.training.config import LayoutError

DIAGNOSTICS = ("AX-b", "AX-g")  # part of SuperGLUE, but without training data
EXPECTED = f"folders named {', '.join(TASKS)} (any of them), each with train.jsonl and val.jsonl"


def load(root: Path, seed: int, wanted: Sequence[str] = (), most: int | None = None) -> Splits:
    """Return the tasks of a folder, in proportion to their sizes.

    Args:
        root: The folder.
        seed: Selects training examples where there are more than `most`.
        wanted: Names of tasks, such as "ReCoRD"; default: all in the folder.
        most: Maximum number of training examples per task.
    """
    training: list[Example] = []
    validation: list[Example] = []
    test: list[Example] = []
    for task in _tasks(root, wanted):
        found = _read(root / task.folder / "train.jsonl", task)
        own = [one for examples in found for example in examples for one in _each(task, example)]
        training += _at_most(own, most, seed)
        first, second = _halves(root / task.folder / "val.jsonl", task)
        validation += first
        test += second
    return Splits(training, validation, test)


def _tasks(root: Path, wanted: Sequence[str]) -> list[Task]:
    """Find the tasks in the folder, and check its layout."""
    if not root.is_dir():
        raise LayoutError(
            f'data must be "vader" or a folder with {EXPECTED}, but {root} is not one.'
        )
    folders = sorted(
        entry.name
        for entry in root.iterdir()
        if entry.is_dir() and not entry.name.startswith((".", "__"))
    )
    unknown = [name for name in folders if name not in TASKS and name not in DIAGNOSTICS]
    if unknown:
        raise LayoutError(
            f"{root}: expected {EXPECTED}, but found {', '.join(unknown)}. "
            "Rename it as SuperGLUE does, or move it elsewhere."
        )
    there = [task for task in TASKS.values() if task.folder in folders]
    if not there:
        found = ", ".join(sorted(entry.name for entry in root.iterdir())[:10]) or "nothing"
        raise LayoutError(f"{root}: expected {EXPECTED}, but found {found}.")
    for task in there:
        for file in ("train.jsonl", "val.jsonl"):
            if not (root / task.folder / file).is_file():
                held = sorted(entry.name for entry in (root / task.folder).iterdir())
                raise LayoutError(
                    f"{root / task.folder}: expected train.jsonl and val.jsonl, but found "
                    f"{', '.join(held) or 'nothing'}."
                )
    missing = [name for name in wanted if name not in {task.folder for task in there}]
    if missing:
        raise LayoutError(
            f"{root}: expected the requested tasks, {', '.join(wanted)}, but found only "
            f"{', '.join(task.folder for task in there)}."
        )
    return [task for task in there if not wanted or task.folder in wanted]


def _read(path: Path, task: Task) -> list[list[Example]]:
    """Return the examples of a file, line by line."""
    found = [task.examples(line) for line in lines(path)]
    if not found:
        raise LayoutError(f"{path}: expected a JSON object on every line, but found no line.")
    return found


def _each(task: Task, example: Example) -> Iterable[Example]:
    """Make one training example per right answer, where a task has several, as T5 does."""
    if not task.one_per_answer or len(example.answers) == 1:
        return [example]
    return [
        replace(example, id=f"{example.id}-{i}", target=answer)
        for i, answer in enumerate(example.answers)
    ]


def _at_most(examples: list[Example], most: int | None, seed: int) -> list[Example]:
    if most is None or len(examples) <= most:
        return examples
    rows = np.random.default_rng(seed).choice(len(examples), most, replace=False)
    return [examples[row] for row in sorted(rows)]


def _halves(path: Path, task: Task) -> tuple[list[Example], list[Example]]:
    """Split a file by lines, so that all questions about a paragraph stay together."""
    found = _read(path, task)
    if len(found) < 2:
        raise LayoutError(
            f"{path}: expected at least two lines, half for validation and half for testing, but "
            "found one."
        )
    order = np.random.default_rng(0).permutation(len(found))
    middle = (len(found) + 1) // 2
    first, second = sorted(order[:middle]), sorted(order[middle:])
    return (
        [example for row in first for example in found[row]],
        [example for row in second for example in found[row]],
    )
