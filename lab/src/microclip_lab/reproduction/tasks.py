"""The tasks and their arms: the plan of the reproduction, written before its runs.

Seeds below 100 are left for trying out recipes. Every run has one thread and a fixed engine, so
that it can be repeated bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from microclip_lab.language.recipe import Language
from microclip_lab.speech.recipe import Speech
from microclip_lab.training.config import Training
from microclip_lab.training.recipe import Recipe
from microclip_lab.vision.recipe import Vision

Tuned = Literal["learning_rate", "max_grad_norm", "bound"]
Replayed = Literal["gradient_norm", "bound"]

PLAIN = "plain"


@dataclass(frozen=True)
class Arm:
    """One way to train a task.

    Every arm has one hyperparameter that is tuned on validation data, with separate seeds: its
    learning rate, or a clipping bound at the learning rate of another arm.
    """

    name: str  # part of folder names: lower case, digits and hyphens
    about: str  # its description on the page
    training: Mapping[str, Any] = field(default_factory=dict)  # changes to the task's Training
    recipe: Mapping[str, Any] = field(default_factory=dict)  # changes to its recipe
    tuned: Tuned | None = "learning_rate"
    values: tuple[float, ...] = ()  # the first ones to try; default: the task's rates
    rate_of: str | None = None  # the arm that provides the learning rate, if it is not tuned
    replays: Replayed | None = None  # rescale plain steps to this figure of `source`
    shares_of: str | None = None  # weight losses as this arm weighted its domains
    source: str | None = None  # the replayed arm
    takes_snapshots: bool = False  # of per-example gradients along the way
    keeps_course: bool = False  # record the bound and the gradient norm of every step

    def __post_init__(self) -> None:
        if self.tuned != "learning_rate" and self.rate_of is None:
            raise ValueError(f"The arm {self.name!r} has no learning rate: give it rate_of.")
        if (self.replays is None) != (self.source is None):
            raise ValueError(
                f"The arm {self.name!r} must have both replays and source, or neither."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """The arms that must be finished before this one."""
        return tuple(name for name in (self.rate_of, self.source, self.shares_of) if name)


def clipped(size: int, rule: str = "MinNorm", **changes: Any) -> Arm:
    """Return the arm of a rule at a micro-batch size.

    >>> clipped(4).name, clipped(1, "Unit").name
    ('b4', 'unit-b1')
    """
    name = f"b{size}" if rule == "MinNorm" else f"{rule.lower()}-b{size}"
    about = f"micro-batches of {size}" + ("" if rule == "MinNorm" else f", rule {rule}")
    training = {"microbatch_size": size, "rule": rule, **changes.pop("training", {})}
    return Arm(changes.pop("name", name), changes.pop("about", about), training, **changes)


Scale = Literal["default", "quick", "smallest"]

TUNING_SEED, EVALUATION_SEED = 100, 200  # the first of each kind
LOOKS = 20  # evaluations per run
FEW_LOOKS = 10  # where evaluation takes longer
CHECKPOINT_AT = 5  # evaluations between two checkpoints
SNAPSHOTS_AT = (1, 2, 4, 8, 14, 20)  # evaluations at which snapshots are taken
MIXTURE = (1.0, 0.68, 0.295, 0.175)  # 20 : 4 : 2 : 1 sentences of movie, nyt, tweets, amazon


@dataclass(frozen=True)
class Task:
    """Something to train, and the arms to compare on it."""

    name: str
    about: str
    recipe: Recipe[Any, Any]
    training: Training  # plain
    rates: tuple[float, ...]  # the first ones to try, ascending
    arms: tuple[Arm, ...]  # plain training first
    seeds: int = 5
    tuning_seeds: int = 1
    growth: int = 4  # extra values to try while the best is at the edge
    seconds: float = 60.0  # approximate duration of a run on one core, for progress

    @property
    def figure(self) -> str:
        """What arms are compared by: the test figure of the best checkpoint on validation data."""
        return f"best_test_{self.recipe.headline}"

    def arm(self, name: str) -> Arm:
        """Return the arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)


def tasks(scale: Scale = "default") -> tuple[Task, ...]:
    """Return the tasks; the smaller scales are smoke tests."""
    whole = (
        _digits(),
        _clean_digits(),
        _digits_by_sgd(),
        _cifar(),
        _speech(),
        _mixture(),
        _movie(),
    )
    return whole if scale == "default" else tuple(_shortened(task, scale) for task in whole)


def _training(preset: Training, **changes: Any) -> Training:
    steps, looks = changes.get("steps", preset.steps), changes.pop("looks", LOOKS)
    return replace(
        preset,
        microbatch_size=None,
        by_domain=False,
        engine="fused",
        threads=1,
        evaluate_every=steps // looks,
        checkpoint_every=steps // looks * CHECKPOINT_AT,
        trackers=(),
        ledger=False,
        page=False,
        cpu=True,
        **changes,
    )


def _sizes(*sizes: int, **changes: Any) -> list[Arm]:
    return [clipped(size, **changes) for size in sizes]


def _plain(**changes: Any) -> Arm:
    return Arm(PLAIN, "plain training", **changes)


def _whole_batch(size: int) -> Arm:
    return clipped(size, tuned=None, rate_of=PLAIN, about="one micro-batch: the same as plain")


def _digits() -> Task:
    recipe, preset = Vision.presets()["default"]
    training = _training(preset)
    size = training.batch_size
    few, many = 8, 128  # mini-batches with 8 micro-batches of 1 and 16, as 32 has of 4
    arms: list[Arm] = [
        _plain(takes_snapshots=True),
        *_sizes(1, 2, 8, 16, takes_snapshots=True),
        clipped(4, takes_snapshots=True, keeps_course=True),
        _whole_batch(size),
        clipped(1, "Unit"),
        clipped(4, "Unit"),
        clipped(1, "Median"),
        clipped(1, "Automatic"),
        clipped(
            size,
            "Unit",
            name="normalised",
            about="normalised steps: the whole gradient at length 1",
        ),
        Arm(
            "global-clip",
            "the norm of the whole gradient clipped, its bound tuned",
            tuned="max_grad_norm",
            values=(0.3, 1.0, 3.0),
            rate_of=PLAIN,
        ),
        clipped(
            4,
            "Fixed",
            name="fixed-b4",
            about="micro-batches of 4 clipped to one bound for all steps, tuned",
            tuned="bound",
            values=(0.3, 1.0, 3.0),
            rate_of="b4",
        ),
        clipped(
            1,
            "Fixed",
            name="fixed-b1",
            about="examples clipped one by one to one bound for all steps, tuned",
            tuned="bound",
            values=(0.3, 1.0, 3.0),
            rate_of="b4",
        ),
        *_replays("b4", size),
        Arm("oracle", "plain training without the wrong labels", recipe={"drop_wrong": True}),
        clipped(
            4,
            name="oracle-b4",
            about="micro-batches of 4, without the wrong labels",
            recipe={"drop_wrong": True},
        ),
    ]
    for batch, b in ((few, 1), (many, 16)):
        steps = training.steps * size // batch
        other = {"batch_size": batch, "steps": steps, "evaluate_every": steps // LOOKS}
        other["checkpoint_every"] = other["evaluate_every"] * CHECKPOINT_AT
        arms += [
            Arm(f"plain-of-{batch}", f"plain training, mini-batches of {batch}", other),
            clipped(
                b,
                name=f"b{b}-of-{batch}",
                about=f"mini-batches of {batch} in 8 micro-batches of {b}",
                training=other,
            ),
        ]
    return Task(
        "digits",
        "Handwritten digits, a fifth of the training labels wrong; a small ViT",
        recipe,
        training,
        (3e-4, 1e-3, 3e-3),
        tuple(arms),
        seeds=6,
        tuning_seeds=2,
        seconds=45,
    )


def _replays(source: str, size: int) -> list[Arm]:
    return [
        clipped(
            size,
            name="as-long",
            about=f"plain steps, each as long as that of {source} with the same seed",
            tuned=None,
            rate_of=source,
            replays="gradient_norm",
            source=source,
        ),
        clipped(
            size,
            name="bounds-replayed",
            about=f"plain steps, each as long as the bound of {source} with the same seed",
            tuned=None,
            rate_of=source,
            replays="bound",
            source=source,
        ),
    ]


def _clean_digits() -> Task:
    digits = _digits()
    assert isinstance(digits.recipe, Vision)
    return replace(
        digits,
        name="clean-digits",
        about="The same digits with all labels right: what clipping costs when nothing drags",
        recipe=replace(digits.recipe, noise=0.0),
        arms=(_plain(), *_sizes(1, 4), clipped(1, "Unit")),
        tuning_seeds=1,
    )


def _digits_by_sgd() -> Task:
    digits = _digits()
    training = replace(digits.training, optimizer="sgd", learning_rate=0.1)
    return replace(
        digits,
        name="digits-sgd",
        about="Digits with wrong labels again, by SGD with momentum instead of AdamW",
        training=training,
        rates=(0.03, 0.1, 0.3),
        arms=(
            _plain(),
            *_sizes(1),
            clipped(4, keeps_course=True),
            clipped(1, "Unit", values=(0.01, 0.03, 0.1)),
            clipped(
                training.batch_size,
                "Unit",
                name="normalised",
                about="normalised steps: the whole gradient at length 1",
                values=(0.01, 0.03, 0.1),
            ),
            *_replays("b4", training.batch_size),
        ),
        tuning_seeds=1,
    )


def _cifar() -> Task:
    recipe, preset = Vision.presets()["cifar10n"]
    assert isinstance(recipe, Vision)
    return Task(
        "cifar10n",
        "CIFAR-10 with the labels that people gave it, of which 17 % are wrong; a small ViT",
        replace(recipe, patch_size=4, layers=3),
        _training(preset),
        (3e-4, 1e-3, 3e-3),
        (
            _plain(takes_snapshots=True),
            *_sizes(1, 2, 4, 8, 16, takes_snapshots=True),
            clipped(1, "Unit"),
        ),
        seconds=60,
    )


def _speech() -> Task:
    recipe, preset = Speech.presets()["default"]
    assert isinstance(recipe, Speech)
    training = _training(preset, steps=1000)
    return Task(
        "speech",
        "Connected words spoken by espeak-ng, one row in fourteen a canary; a small Conformer "
        "with CTC",
        replace(recipe, canaries=0.07),  # 52 different ones, which make 1,326 pairs
        training,
        (2.7e-3, 8e-3, 2.4e-2),
        (
            _plain(takes_snapshots=True),
            *_sizes(1, 2, 4, 8, takes_snapshots=True),
            _whole_batch(training.batch_size),
            clipped(1, "Unit"),
            Arm("oracle", "plain training without canaries", recipe={"canaries": 0.0}),
            clipped(
                4,
                name="oracle-b4",
                about="micro-batches of 4, without canaries",
                recipe={"canaries": 0.0},
            ),
        ),
        seconds=120,
    )


def _mixture() -> Task:
    recipe, preset = Language.presets()["default"]
    assert isinstance(recipe, Language)
    training = _training(preset, steps=800, looks=FEW_LOOKS)
    return Task(
        "mixture",
        "VADER's four domains in very different numbers, each sentence with the label of one "
        "rater; a small T5",
        replace(recipe, labels="rater", training_shares=MIXTURE),
        training,
        (1e-3, 3e-3, 9e-3),
        (
            _plain(),
            clipped(4),
            clipped(
                4,
                name="b4-by-domain",
                about="micro-batches of 4, clipped within each domain",
                training={"by_domain": True},
                keeps_course=True,
            ),
            Arm(
                "plain-weighted",
                "plain training, its domains weighted as b4-by-domain did on average",
                tuned=None,
                rate_of=PLAIN,
                shares_of="b4-by-domain",
            ),
        ),
        seconds=120,
    )


def _movie() -> Task:
    mixture = _mixture()
    assert isinstance(mixture.recipe, Language)
    return replace(
        mixture,
        name="movie",
        about="VADER's largest domain alone, each sentence with the label of one rater",
        recipe=replace(mixture.recipe, training_shares=(), domains=("movie",)),
        arms=(_plain(), *_sizes(4, 8)),
    )


def _shortened(task: Task, scale: Scale) -> Task:
    """Return a version of a task that takes seconds: few steps, little data, little tuning."""
    quick = scale == "quick"
    steps = LOOKS
    # evaluating thousands of texts dominates the time, and no snapshots are needed
    looks = 2 if isinstance(task.recipe, Language) else LOOKS
    of_data: dict[type, dict[str, Any]] = {
        Vision: {"judged_pictures": 50}
        | ({"training_pictures": 400} if task.name.startswith("cifar") else {}),
        Speech: {"utterances": 100, "judged_utterances": 10, "canaries": 0.2},
        Language: {"vocabulary": 500, "training_shares": (0.05,) * _domains(task)}
        | {"source_length": 16, "width": 16, "feed_forward": 32, "heads": 2},
    }
    recipe: Any = task.recipe
    recipe = replace(recipe, **of_data[type(recipe)])
    return replace(
        task,
        recipe=recipe,
        training=replace(task.training, **_short(steps, looks)),
        rates=task.rates[1:] if quick else task.rates[1:2],
        arms=tuple(_shortened_arm(arm, steps, quick) for arm in task.arms),
        seeds=2,
        tuning_seeds=1,
        growth=0,
        seconds=3,
    )


def _shortened_arm(arm: Arm, steps: int, quick: bool) -> Arm:
    training = dict(arm.training)
    if "steps" in training:
        training |= _short(steps, LOOKS)
    return replace(
        arm,
        training=training,
        values=arm.values[1:] if quick else arm.values[1:2],
        takes_snapshots=arm.takes_snapshots and (quick or arm.name in (PLAIN, "b4")),
    )


def _short(steps: int, looks: int) -> dict[str, Any]:
    every = steps // looks
    return {"steps": steps, "evaluate_every": every, "checkpoint_every": every * CHECKPOINT_AT}


def _domains(task: Task) -> int:
    named = getattr(task.recipe, "domains", ())
    return len(named) or len(MIXTURE)
