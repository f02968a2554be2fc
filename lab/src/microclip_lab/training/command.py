"""Reading `microclip train` and `microclip sweep`: a recipe, a preset, and options over it."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.recipe import Recipe
from microclip_lab.training.recipe_lookup import OURS, find_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from microclip_lab.sweep.config import SweepConfig

TRAIN = """Train a model with micro-batch clipping, or plainly, and get a page of what came out.

usage: microclip train RECIPE [--preset NAME] [options]

The recipes:

  vision      images: digits with wrong labels (embedded), CIFAR-10 as people labelled it, or a
              folder of images by class
  speech      speech recognition: words spoken by espeak-ng (embedded), or a folder laid out as
              LibriSpeech is
  language    texts: four domains of sentiment ratings (fetched), or a folder laid out as
              SuperGLUE is
  FILE.py     a recipe of your own: a small class in a Python file

Examples:

  microclip train vision                                   # digits, b = 4, about a minute
  microclip train vision --microbatch-size none            # the same, plainly
  microclip train speech --resume                          # go on after Ctrl-C
  microclip train vision --preset paper --data imagenet/   # the paper's scale
  accelerate launch --num_processes 2 -m microclip train language

What a recipe's options are:  microclip train vision --help"""

SWEEP = """Which micro-batch size? Train a recipe at several, and compare them.

usage: microclip sweep RECIPE [--preset NAME] [options]

RECIPE is vision, speech, language or FILE.py, as for `microclip train`.

Examples:

  microclip sweep vision --microbatch-sizes 1 4 16 --seeds 5 --workers 2
  microclip sweep vision --race                            # for the cost of about two trainings

All options:  microclip sweep vision --help"""

SET_BY_SWEEPS = ("resume", "seed", "microbatch_size", "rule", "learning_rate", "page")


@dataclass(frozen=True)
class Order:
    """What was asked for."""

    recipe: Recipe[Any, Any]
    training: Training
    sweep: SweepConfig | None = None


def read(verb: str, arguments: Sequence[str]) -> Order | None:
    """Return what the arguments after `microclip train` or `sweep` ask for; None: only for help."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(TRAIN if verb == "train" else SWEEP)
        return None
    name, *rest = arguments
    if name.startswith("-"):
        raise SettingError(
            f"microclip {verb} needs to know what to train before its options: "
            f"microclip {verb} {next(iter(OURS))} {shlex.join(arguments)}"
        )
    cls = find_recipe(name)
    if not is_dataclass(cls):
        raise SettingError(f"{cls.__name__} must be a dataclass: its fields are the options.")
    preset, rest = _take_preset(rest)
    presets = cls.presets()
    if preset not in presets:
        raise SettingError(
            f"The recipe {name} has the presets {', '.join(presets)}, but not {preset!r}."
        )
    recipe, training = presets[preset]
    return _parse(verb, name, preset, list(presets), recipe, training, rest)


def train(arguments: Sequence[str]) -> None:
    """Carry out `microclip train`."""
    from rich.console import Console

    order = read("train", arguments)
    if order is not None:
        # of several processes, the first one speaks
        console = Console(quiet=os.environ.get("RANK", "0") != "0")
        carry_out_train(order, ["microclip", "train", *arguments], console)


def sweep(arguments: Sequence[str]) -> None:
    """Carry out `microclip sweep`."""
    order = read("sweep", arguments)
    if order is not None:
        carry_out_sweep(order, arguments)


def carry_out_train(order: Order, command: Sequence[str], console: Console) -> None:
    """Train; say where to look."""
    from microclip_lab.training import train as training
    from microclip_lab.training.run_logger import PAGE

    finished = training.train(
        order.recipe, order.training, command=shlex.join(command), console=console
    )
    said = ", ".join(f"{name} {value:.4g}" for name, value in finished.metrics.items())
    console.print(f"{said}\n", soft_wrap=True, highlight=False)
    page = finished.path / PAGE
    if page.exists():
        console.print(f"Look at it: {page.resolve()}", soft_wrap=True, highlight=False)


def carry_out_sweep(order: Order, arguments: Sequence[str]) -> None:
    """Sweep, or race."""
    from microclip_lab.sweep.command import run_sweep

    assert order.sweep is not None
    again = [sys.executable, "-m", "microclip", "sweep", *arguments]
    run_sweep(order.recipe, order.training, order.sweep, again)


def _take_preset(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the preset's name and the other arguments; options are read on top of the preset."""
    preset, rest, given = "default", [], iter(arguments)
    for argument in given:
        if argument == "--preset":
            preset = next(given, "")
        elif argument.startswith("--preset="):
            preset = argument.partition("=")[2]
        else:
            rest.append("None" if argument == "none" else argument)
    return preset, rest


def _parse(
    verb: str,
    name: str,
    preset: str,
    presets: Sequence[str],
    recipe: Recipe[Any, Any],
    training: Training,
    arguments: Sequence[str],
) -> Order:
    import tyro

    flat: Any = tyro.conf.OmitArgPrefixes
    groups: list[tuple[str, type, Any]] = [("recipe", type(recipe), recipe)]
    if verb == "sweep":
        from microclip_lab.sweep.config import SweepConfig

        hidden = {field.name for field in fields(SweepConfig)} | set(SET_BY_SWEEPS)
        shown = _without(hidden & {field.name for field in fields(Training)})
        values = {field.name: getattr(training, field.name) for field in fields(Training)}
        groups += [("sweep", SweepConfig, SweepConfig()), ("training", shown, shown(**values))]
    else:
        groups.append(("training", Training, training))
    options: Any = make_dataclass("Options", [(group, flat[cls]) for group, cls, _ in groups])
    about = inspect.getdoc(type(recipe)) or ""
    with warnings.catch_warnings():
        # what kinds of examples and records a recipe has is of no interest here
        warnings.filterwarnings("ignore", "Could not resolve type parameter")
        chosen = tyro.cli(
            options,
            args=list(arguments),
            default=options(*(value for _, _, value in groups)),
            prog=f"microclip {verb} {name}",
            description=f"{about}\n\nPresets (--preset NAME): {', '.join(presets)}. The defaults "
            f"below are those of {preset!r}.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    values = {field.name: getattr(chosen.training, field.name) for field in fields(Training)}
    return Order(chosen.recipe, Training(**values), getattr(chosen, "sweep", None))


def _without(names: set[str]) -> Any:
    """Return Training with some of its options taken from the command line."""
    import tyro

    fixed: Any = tyro.conf.Fixed
    suppressed: Any = tyro.conf.Suppress
    types = get_type_hints(Training)  # as texts they would be read in this module
    return make_dataclass(
        "SweptTraining",
        [
            (field.name, suppressed[fixed[types[field.name]]], field.default)
            for field in fields(Training)
            if field.name in names
        ],
        bases=(Training,),
        frozen=True,
    )
