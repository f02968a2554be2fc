"""The command `microclip`: finds out what is asked for and hands over; it does no work itself.

What a command needs beyond torch is imported when the command is used, and what is not installed
is answered with the line that installs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import microclip
from microclip.demo.config import DemoConfig
from microclip.probing.config import ProbeConfig
from microclip.recipes.config import DivergedError, SettingError, SweepOptions, TrainOptions
from microclip.report.config import ReportConfig
from microclip.reproduction.config import ReproduceConfig
from microclip.theory.config import TheoryConfig

ABOUT = """Adaptive micro-batch clipping for PyTorch: train better on data that is not clean.

See it at work, in about two minutes:  microclip demo

Train a speech, vision or language model, or your own:  microclip train vision

Which micro-batch size to use, by trial:  microclip sweep vision --race

The paper's experiments once more, and what holds:  microclip reproduce --quick

What the theory says of each micro-batch size:  microclip theory

What each micro-batch size would do to your model:  microclip probe --task module:function

A page of what clipping did to your data:  microclip report RUN...

What a command does and which options it takes:  microclip demo --help

The version:  microclip --version"""

# What each extra brings that is looked for here, by the name it is imported with.
EXTRAS = {
    "cli": ("tyro", "rich"),
    "demo": ("sklearn", "scipy", "matplotlib", "pyarrow", "jinja2", "plotly"),
    "plot": ("matplotlib",),
    "recipes": (
        *("transformers", "accelerate", "sklearn", "pyarrow", "jinja2", "plotly", "numpy"),
        *("optuna", "jiwer", "soundfile", "tensorboard", "PIL", "espeakng_loader", "psutil"),
    ),
    "report": ("jinja2", "plotly", "pyarrow", "numpy"),
}


@dataclass(frozen=True)
class Command:
    """A command: its options, a dataclass whose docstrings are the help, and who carries it out."""

    options: type
    extra: str  # what must be installed for it
    carry_out: Callable[[Any], None]
    positional: bool = False  # whether what must be given needs no name
    by_itself: bool = False  # whether it reads its arguments itself: options depend on the first


def demo(config: DemoConfig) -> None:
    """Carry out `microclip demo`."""
    from microclip.demo.show import show

    show(config)


def probe(config: ProbeConfig) -> None:
    """Carry out `microclip probe`."""
    if config.plot is not None:
        require("plot")
    from microclip.probing.command import show

    show(config)


def report(config: ReportConfig) -> None:
    """Carry out `microclip report`."""
    from microclip.report.command import show

    show(config)


def reproduce(config: ReproduceConfig) -> None:
    """Carry out `microclip reproduce`."""
    from microclip.reproduction.command import show

    show(config)


def theory(config: TheoryConfig) -> None:
    """Carry out `microclip theory`."""
    from microclip.theory.command import show

    show(config)


def train(arguments: Sequence[str]) -> None:
    """Carry out `microclip train`."""
    from rich.console import Console

    from microclip.recipes.command import carry_out_train, read

    order = read("train", arguments)
    if order is None:
        return
    # of several processes, the first one speaks
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    carry_out_train(order, ["microclip", "train", *arguments], console)


def sweep(arguments: Sequence[str]) -> None:
    """Carry out `microclip sweep`."""
    from microclip.recipes.command import carry_out_sweep, read

    order = read("sweep", arguments)
    if order is None:
        return
    carry_out_sweep(order, arguments)


COMMANDS = {
    "demo": Command(DemoConfig, "demo", demo),
    "probe": Command(ProbeConfig, "cli", probe),
    "report": Command(ReportConfig, "report", report, positional=True),
    "reproduce": Command(ReproduceConfig, "recipes", reproduce),
    "sweep": Command(SweepOptions, "recipes", sweep, by_itself=True),
    "theory": Command(TheoryConfig, "plot", theory),
    "train": Command(TrainOptions, "recipes", train, by_itself=True),
}


class MissingExtraError(Exception):
    """Something that a command needs is not installed; the message says how to get it."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process; return its exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments == ["--version"]:
        print(f"microclip {microclip.__version__}")
        return 0
    try:
        require("cli")
        command, options = parse(arguments)
        # of the many that recipes bring, each one is imported where it is used
        require(command.extra, only_look=command.extra == "recipes")
        command.carry_out(options)
    except (MissingExtraError, OSError, SettingError, DivergedError) as error:
        return _fail(str(error))
    except KeyboardInterrupt as interruption:
        said = str(interruption) or (
            "Interrupted. What was finished is kept: the same command goes on from there."
        )
        return _fail(said, getattr(interruption, "exit_code", 130))
    return 0


def parse(arguments: Sequence[str]) -> tuple[Command, Any]:
    """Return the command and its options; `--help` and mistakes end in SystemExit, as usual."""
    import tyro

    named = COMMANDS.get(arguments[0]) if arguments else None
    if named is not None and named.by_itself:
        return named, arguments[1:]
    app = tyro.extras.SubcommandApp()  # keeps the name of a command even if it is the only one
    for name, command in COMMANDS.items():
        positional: Any = tyro.conf.PositionalRequiredArgs
        app.command(name=name)(
            positional[command.options] if command.positional else command.options
        )
    chosen = app.cli(
        prog="microclip",
        description=ABOUT,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return next(c for c in COMMANDS.values() if isinstance(chosen, c.options)), chosen


def require(extra: str, only_look: bool = False) -> None:
    """Import what an extra brings, or only look for it, or say how to install it."""
    for name in EXTRAS[extra]:
        try:
            if not only_look:
                import_module(name)
            elif find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        except ImportError as error:
            raise MissingExtraError(
                f"This command needs {error.name or name}, which cannot be imported. "
                f'Install it with: pip install "microclip[{extra}]"'
            ) from error


def _fail(message: str, code: int = 1) -> int:
    print(f"microclip: {message}", file=sys.stderr)
    return code
