"""All tasks, by name."""

from __future__ import annotations

from microclip_lab.dirty_data.synthetic_tasks import SYNTHETIC_TASKS
from microclip_lab.dirty_data.task import Task
from microclip_lab.dirty_data.vision_tasks import VISION_TASKS

TASKS: dict[str, Task] = {task.name: task for task in (*VISION_TASKS, *SYNTHETIC_TASKS)}


def task_named(name: str) -> Task:
    """Return a task; an error lists all if there is none of this name."""
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}. The tasks are: {', '.join(TASKS)}.")
    return TASKS[name]
