"""The plan's tasks, in the order they are run: arms, margins, looks, and what each is for.

The last four tasks, and `LossHistory` where it had not been planned, were added after the others
had been run, and committed before their own runs; none of them has a part in fitting forecasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microclip_lab.dirty_data.task import Task
from microclip_lab.evidence.arms import BASELINES, ORACLE, PLAIN
from microclip_lab.evidence.speech_tasks import SPEECH_TASKS
from microclip_lab.evidence.synthetic_tasks import MIXTURE_TASKS, OUTLIER_TASKS
from microclip_lab.evidence.t5_tasks import T5_TASKS
from microclip_lab.evidence.text_tasks import DOMAIN_TASKS, TEXT_TASKS
from microclip_lab.evidence.vision_tasks import PHOTO_TASKS

MINNORM = ("minnorm-1", "minnorm-4", "minnorm-16")
UNIT = ("unit-1", "unit-4", "unit-16")
RULES = (*MINNORM, *UNIT, "loss-history")
NOISY = (PLAIN, ORACLE, *RULES, *BASELINES[1:])
CLEAN = (PLAIN, "minnorm-1", "minnorm-4", "minnorm-16", "unit-1", "unit-4", "loss-history")
NO_LABELS = (PLAIN, ORACLE, *RULES, "decay-0.1", "decay-1", "averaging")  # nothing to smooth

TUNING_SEEDS = (100, 101, 102, 103)

# Half of what the paper reports, relative to plain's error: an effect whose interval ends below
# this is refuted.
SPEECH_MARGIN = 100 * (3.99 - 3.80) / 3.99 / 2  # WER on test-other, b = 4: 2.4 %
VISION_MARGIN = 100 * (83.3 - 81.8) / (100 - 81.8) / 2  # top-1 on ImageNet: 4.1 %
TEXT_MARGIN = 100 * (84.8 - 84.5) / (100 - 84.5) / 2  # ReCoRD alone: 1.0 %


@dataclass(frozen=True)
class Study:
    """A task and how it is studied.

    Args:
        task: The task.
        arms: What is run on it, if it passes the gate.
        margin: Half of the paper's relative effect in this field, in percent.
        looks: Evaluation seeds after each look.
        half: Which half the predictor of gains uses it for; "none": neither.
        clean_twin: The name of the same task without draggers; plain training and the rules are
            also compared at its rate.
    """

    task: Task
    arms: tuple[str, ...]
    margin: float
    looks: tuple[int, ...] = (8, 16, 32)
    half: Literal["fit", "judge", "none"] = "fit"
    clean_twin: str = ""

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task.name

    @property
    def start(self) -> int:
        """Where the search of plain training's rate starts."""
        return self.task.start

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """The seeds that every learning rate is tried with."""
        return TUNING_SEEDS


_TASKS = {
    task.name: task
    for task in (
        *OUTLIER_TASKS,
        *MIXTURE_TASKS,
        *PHOTO_TASKS,
        *TEXT_TASKS,
        *DOMAIN_TASKS,
        *SPEECH_TASKS,
        *T5_TASKS,
    )
}
_BY_DOMAIN = (PLAIN, "minnorm-4", "minnorm-4-domains", "unit-4", "unit-4-domains", "loss-history")
_FEW = (PLAIN, ORACLE, *RULES)
_T5 = (PLAIN, ORACLE, "minnorm-1", "minnorm-4", "unit-4", "loss-history")
_FEW_CLEAN = (PLAIN, "minnorm-4", "unit-4", "loss-history")

STUDIES: tuple[Study, ...] = (
    Study(_TASKS["outliers-7-10"], (*NO_LABELS, "minnorm-whole"), SPEECH_MARGIN, half="fit"),
    Study(_TASKS["tuned-canaries"], NOISY, SPEECH_MARGIN, half="judge"),
    Study(_TASKS["tuned-clean"], CLEAN, SPEECH_MARGIN, half="fit"),
    Study(_TASKS["scratch-canaries"], NOISY, SPEECH_MARGIN, half="fit"),
    Study(_TASKS["scratch-clean"], CLEAN, SPEECH_MARGIN, half="judge"),
    Study(_TASKS["outliers-none"], CLEAN, SPEECH_MARGIN, half="judge"),
    Study(_TASKS["photos-clean"], _FEW_CLEAN, VISION_MARGIN, (8, 16)),
    Study(
        _TASKS["photos-worse"],
        (PLAIN, ORACLE, "minnorm-1", "minnorm-4", "minnorm-16", "unit-4", "loss-history"),
        VISION_MARGIN,
        (8, 16),
        "judge",
        clean_twin="photos-clean",
    ),
    Study(_TASKS["domains"], _BY_DOMAIN, TEXT_MARGIN, (16, 32, 64), "fit"),
    Study(_TASKS["domains-clean"], _BY_DOMAIN, TEXT_MARGIN, (16, 32, 64)),
    Study(_TASKS["tuned-labels"], NOISY, SPEECH_MARGIN, half="fit"),
    Study(_TASKS["outliers-7-3"], _FEW, SPEECH_MARGIN, half="judge"),
    Study(_TASKS["outliers-2-10"], _FEW, SPEECH_MARGIN, half="fit"),
    Study(_TASKS["outliers-20-10"], _FEW, SPEECH_MARGIN, half="judge"),
    Study(_TASKS["raters-flips"], (*_FEW, "smoothing", "averaging"), TEXT_MARGIN, half="judge"),
    Study(_TASKS["raters"], (PLAIN, ORACLE, *RULES, "smoothing", "averaging"), TEXT_MARGIN),
    Study(_TASKS["raters-clean"], _FEW_CLEAN, TEXT_MARGIN, half="judge"),
    Study(
        _TASKS["photos-random1"],
        (PLAIN, ORACLE, "minnorm-1", "minnorm-4", "unit-4", "loss-history"),
        VISION_MARGIN,
        (8, 16),
        "fit",
        clean_twin="photos-clean",
    ),
    Study(_TASKS["speech-tuned"], _FEW, SPEECH_MARGIN, half="judge"),
    Study(_TASKS["speech-tuned-20"], _FEW, SPEECH_MARGIN, half="judge"),
    Study(_TASKS["speech-tuned-clean"], _FEW_CLEAN, SPEECH_MARGIN, half="fit"),
    Study(_TASKS["speech-scratch-20"], _FEW, SPEECH_MARGIN, half="fit"),
    Study(
        _TASKS["speech-tuned-128"],
        (PLAIN, ORACLE, "minnorm-4", "unit-4", "loss-history"),
        SPEECH_MARGIN,
        half="judge",
    ),
    Study(_TASKS["speech-scratch"], _FEW, SPEECH_MARGIN, half="judge"),
    Study(_TASKS["t5"], _T5, TEXT_MARGIN, (8, 16), "judge"),
    Study(_TASKS["t5-clean"], _FEW_CLEAN, TEXT_MARGIN, (8, 16), "judge"),
    Study(_TASKS["t5-flips"], _T5, TEXT_MARGIN, (8, 16), "judge"),
)
BY_NAME = {study.name: study for study in STUDIES}


def study_named(name: str) -> Study:
    """Return the study of a task; if there is none, the error lists all."""
    if name not in BY_NAME:
        raise ValueError(f"There is no task {name!r}. The tasks are: {', '.join(BY_NAME)}.")
    return BY_NAME[name]
