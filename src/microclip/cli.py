"""The command `microclip`: finds out what is asked for and hands over; it does no work itself.

What a command needs beyond torch is imported when the command is used, and what is not installed
is answered with the line that installs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import microclip
from microclip.demo.config import DemoConfig
from microclip.probing.config import ProbeConfig
from microclip.report.config import ReportConfig
from microclip.theory.config import TheoryConfig

ABOUT = """Adaptive micro-batch clipping for PyTorch: train better on data that is not clean.

See it at work, in about two minutes:  microclip demo

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
    "report": ("jinja2", "plotly", "pyarrow", "numpy"),
}


@dataclass(frozen=True)
class Command:
    """A command: its options, a dataclass whose docstrings are the help, and who carries it out."""

    options: type
    extra: str  # what must be installed for it
    carry_out: Callable[[Any], None]
    positional: bool = False  # whether what must be given needs no name


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


def theory(config: TheoryConfig) -> None:
    """Carry out `microclip theory`."""
    from microclip.theory.command import show

    show(config)


COMMANDS = {
    "demo": Command(DemoConfig, "demo", demo),
    "probe": Command(ProbeConfig, "cli", probe),
    "report": Command(ReportConfig, "report", report, positional=True),
    "theory": Command(TheoryConfig, "plot", theory),
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
        require(command.extra)
        command.carry_out(options)
    except (MissingExtraError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail(
            "Interrupted. What was finished is kept: the same command goes on from there.", 130
        )
    return 0


def parse(arguments: Sequence[str]) -> tuple[Command, Any]:
    """Return the command and its options; `--help` and mistakes end in SystemExit, as usual."""
    import tyro

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


def require(extra: str) -> None:
    """Import what an extra brings, or say how to install it."""
    for name in EXTRAS[extra]:
        try:
            import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"This command needs {error.name or name}, which cannot be imported. "
                f'Install it with: pip install "microclip[{extra}]"'
            ) from error


def _fail(message: str, code: int = 1) -> int:
    print(f"microclip: {message}", file=sys.stderr)
    return code
