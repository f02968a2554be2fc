"""The command line of `microclip train` and `microclip sweep`: a recipe, a preset, options."""

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
from microclip_lab.training.recipe_lookup import BUILT_IN, find_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from microclip_lab.sweep.config import SweepConfig

TRAIN = """Train a model with or without micro-batch clipping, and get a report page.

usage: microclip train RECIPE [--preset NAME] [options]

Recipes:

  vision      images: digits with wrong labels (included), CIFAR-10 with human labels
              (downloaded), or a folder of images by class
  speech      speech recognition: words spoken by espeak-ng (included), or a folder in
              LibriSpeech's layout
  language    text: sentiment ratings from four domains (downloaded), or a folder in
              SuperGLUE's layout
  FILE.py     your own recipe: a small class in a Python file

Examples:

  microclip train vision                                   # digits, b = 4, about a minute
  microclip train vision --microbatch-size none            # the same without clipping
  microclip train speech --resume                          # continue after Ctrl-C
  microclip train vision --preset paper --data imagenet/   # the paper's scale
  accelerate launch --num_processes 2 -m microclip train language

The options of a recipe:  microclip train vision --help"""

SWEEP = """Train a recipe at several micro-batch sizes and compare them.

usage: microclip sweep RECIPE [--preset NAME] [options]

RECIPE is vision, speech, language or FILE.py, as in `microclip train`.

Examples:

  microclip sweep vision --microbatch-sizes 1 4 16 --seeds 5 --workers 2
  microclip sweep vision --race                            # at the cost of about two runs

All options:  microclip sweep vision --help"""

SET_BY_SWEEPS = ("resume", "seed", "microbatch_size", "rule", "learning_rate", "page")


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    recipe: Recipe[Any, Any]
    training: Training
    sweep: SweepConfig | None = None


def read(verb: str, arguments: Sequence[str]) -> Request | None:
    """Parse the arguments after `microclip train` or `sweep`; None if they only ask for help."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(TRAIN if verb == "train" else SWEEP)
        return None
    name, *rest = arguments
    if name.startswith("-"):
        raise SettingError(
            f"microclip {verb} takes a recipe before its options: "
            f"microclip {verb} {next(iter(BUILT_IN))} {shlex.join(arguments)}"
        )
    cls = find_recipe(name)
    if not is_dataclass(cls):
        raise SettingError(f"{cls.__name__} must be a dataclass: its fields become options.")
    preset, rest = _take_preset(rest)
    presets = cls.presets()
    if preset not in presets:
        raise SettingError(
            f"The recipe {name} has no preset {preset!r}. Its presets: {', '.join(presets)}."
        )
    recipe, training = presets[preset]
    return _parse(verb, name, preset, list(presets), recipe, training, rest)


def train(arguments: Sequence[str]) -> None:
    """Run `microclip train`."""
    from rich.console import Console

    request = read("train", arguments)
    if request is not None:
        # only the first of several processes prints
        console = Console(quiet=os.environ.get("RANK", "0") != "0")
        run_train(request, ["microclip", "train", *arguments], console)


def sweep(arguments: Sequence[str]) -> None:
    """Run `microclip sweep`."""
    request = read("sweep", arguments)
    if request is not None:
        run_sweep_command(request, arguments)


def run_train(request: Request, command: Sequence[str], console: Console) -> None:
    """Train, then print the figures and where the page is."""
    from microclip_lab.training import train as training
    from microclip_lab.training.run_logger import PAGE

    finished = training.train(
        request.recipe, request.training, command=shlex.join(command), console=console
    )
    said = ", ".join(f"{name} {value:.4g}" for name, value in finished.metrics.items())
    console.print(f"{said}\n", soft_wrap=True, highlight=False)
    page = finished.path / PAGE
    if page.exists():
        console.print(f"Page: {page.resolve()}", soft_wrap=True, highlight=False)


def run_sweep_command(request: Request, arguments: Sequence[str]) -> None:
    """Run a sweep or a race."""
    from microclip_lab.sweep.command import run_sweep

    assert request.sweep is not None
    command = [sys.executable, "-m", "microclip", "sweep", *arguments]
    run_sweep(request.recipe, request.training, request.sweep, command)


def _take_preset(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the preset, and the arguments that override it."""
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
) -> Request:
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
        # a recipe's type parameters do not matter here
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
    return Request(chosen.recipe, Training(**values), getattr(chosen, "sweep", None))


def _without(names: set[str]) -> Any:
    """Return Training with some of its options hidden from the command line."""
    import tyro

    fixed: Any = tyro.conf.Fixed
    suppressed: Any = tyro.conf.Suppress
    types = get_type_hints(Training)  # as strings they would be resolved in this module
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
