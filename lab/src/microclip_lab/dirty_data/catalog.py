"""All tasks, by name: first the noisy ones, then clean ones, then those where we expect no gain."""

from __future__ import annotations

from microclip_lab.dirty_data.speech_tasks import SPEECH_TASKS
from microclip_lab.dirty_data.synthetic_tasks import SYNTHETIC_TASKS
from microclip_lab.dirty_data.task import Purpose, Task
from microclip_lab.dirty_data.text_tasks import TEXT_TASKS
from microclip_lab.dirty_data.vision_tasks import VISION_TASKS

PURPOSES: tuple[Purpose, ...] = ("noisy", "clean", "failure")

TASKS: dict[str, Task] = {
    task.name: task
    for purpose in PURPOSES
    for task in (*VISION_TASKS, *TEXT_TASKS, *SPEECH_TASKS, *SYNTHETIC_TASKS)
    if task.purpose == purpose
}


def task_named(name: str) -> Task:
    """Return the task of this name; if there is none, the error lists all tasks."""
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}. The tasks are: {', '.join(TASKS)}.")
    return TASKS[name]
