"""The command `microclip`: finds the subcommand, reads its options, and hands over.

A subcommand is a `Command`. The library's own are listed here; other packages add theirs through
the entry-point group `microclip.commands`. Nothing heavy is imported before a subcommand runs, so
`--help` is quick, and a package that is not installed is answered with the line that installs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, cast

import microclip

GROUP = "microclip.commands"

ABOUT = """Adaptive micro-batch clipping for PyTorch, and a record that finds bad data.

usage: microclip COMMAND [options]

{commands}

Start here, it takes about two minutes:  microclip demo
The options of a command:                microclip demo --help
The version:                             microclip --version"""

# Commands of the laboratory, so that they can be named where it is not installed.
LAB = ("reproduce", "sweep", "theory", "train")


@dataclass(frozen=True)
class Command:
    """A subcommand, described without importing what it needs."""

    summary: str
    """One line for `microclip --help`."""
    run: str
    """What carries it out, as "module:function": called with the options, or with the arguments."""
    options: str | None = None
    """A dataclass whose docstrings are the help, as "module:Class"; without it `run` gets the
    arguments as they are."""
    positional: bool = False
    """Whether required options are given without their names."""
    resumes: bool = False
    """Whether the same command continues what was interrupted."""
    needs: tuple[str, ...] = ()
    """Modules that must be importable."""
    install: str = "microclip[cli]"
    """What to install if one of them is missing."""


class CommandError(Exception):
    """A command cannot be carried out; the message says why, and what to do about it."""


COMMANDS = {
    "apply": Command(
        "turn a review of suspects into lists of ids and labels to train by",
        "microclip.review.command:run",
        "microclip.review.command:ApplyConfig",
        positional=True,
        needs=("pyarrow", "numpy"),
        install="microclip[ledger]",
    ),
    "demo": Command(
        "train on digits with wrong labels; ends with a page that names them",
        "microclip.demo:run",
        "microclip.demo:DemoConfig",
        needs=("sklearn", "pyarrow", "jinja2", "plotly"),
        install="microclip[demo]",
    ),
    "issues": Command(
        "which examples of a recorded run are probably wrong",
        "microclip.issues.command:run",
        "microclip.issues.command:IssuesConfig",
        positional=True,
        needs=("pyarrow", "numpy"),
        install="microclip[ledger]",
    ),
    "probe": Command(
        "what each micro-batch size would do to your model",
        "microclip.probing.command:run",
        "microclip.probing.command:ProbeConfig",
    ),
    "report": Command(
        "a page about one run or several, with the most suspicious examples",
        "microclip.report.command:run",
        "microclip.report.command:ReportConfig",
        positional=True,
        needs=("jinja2", "plotly", "pyarrow", "numpy"),
        install="microclip[report]",
    ),
    "spikes": Command(
        "steps of a recorded run that stand out, and the rows behind them",
        "microclip.step_spikes.command:run",
        "microclip.step_spikes.command:SpikesConfig",
        positional=True,
        needs=("pyarrow", "numpy"),
        install="microclip[ledger]",
    ),
    "track": Command(
        "log a recorded run to TensorBoard, Weights & Biases, MLflow or Trackio",
        "microclip.trackers.command:run",
        "microclip.trackers.command:TrackConfig",
        positional=True,
        needs=("pyarrow", "numpy"),
        install="microclip[ledger]",
    ),
    "watch": Command(
        "serve the page of a run on this machine while it trains",
        "microclip.report.watch_command:run",
        "microclip.report.watch_command:WatchConfig",
        positional=True,
        needs=("jinja2", "plotly", "pyarrow", "numpy"),
        install="microclip[report]",
    ),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process; return its exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments == ["--version"]:
        print(f"microclip {microclip.__version__}")
        return 0
    commands = all_commands()
    if arguments and arguments[0] in ("-h", "--help"):
        print(ABOUT.format(commands=_listed(commands)))
        return 0
    if not arguments or arguments[0] not in commands:
        return _fail(_unknown(arguments, commands), 2)
    name, *rest = arguments
    command = commands[name]
    try:
        _carry_out(name, command, rest)
    except BrokenPipeError:  # whoever read the output has left, as `head` does
        sys.stdout = None
        return 141
    except (CommandError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt as interruption:
        said = str(interruption) or "Interrupted."
        if command.resumes and not str(interruption):
            said += " Finished work is kept: run the same command again to continue."
        return _fail(said, getattr(interruption, "exit_code", 130))
    return 0


def all_commands() -> dict[str, Command]:
    """Return the library's commands and those that other packages add."""
    found = dict(COMMANDS)
    for entry in entry_points(group=GROUP):
        try:
            found[entry.name] = entry.load()
        except ImportError as error:  # a broken package must not take the other commands along
            about = f"(cannot be loaded: {error})"
            found[entry.name] = Command(about, f"{entry.module}:{entry.attr}")
    return dict(sorted(found.items()))


def require(modules: Sequence[str], install: str) -> None:
    """Raise a `CommandError` that says what to install if a module is missing."""
    for name in modules:
        if name in sys.modules:
            found = sys.modules[name] is not None
        else:
            found = find_spec(name) is not None
        if not found:
            raise CommandError(
                f"This command needs {name}, which is not installed. "
                f'Install it with: pip install "{install}"'
            )


def options_of(name: str, command: Command, arguments: Sequence[str]) -> Any:
    """Return a command's options; `--help` and mistakes end in SystemExit, as usual."""
    if command.options is None:
        return list(arguments)
    import tyro

    kind, positional = _load(command.options), cast(Any, tyro.conf.PositionalRequiredArgs)
    return tyro.cli(
        positional[kind] if command.positional else kind,
        prog=f"microclip {name}",
        args=list(arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _carry_out(name: str, command: Command, arguments: Sequence[str]) -> None:
    require(("tyro", "rich"), "microclip[cli]")
    options = options_of(name, command, arguments)
    require(command.needs, command.install)
    try:
        run = _load(command.run)
    except ImportError as error:
        raise CommandError(f"The command {name!r} cannot be loaded: {error}.") from error
    run(options)


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _listed(commands: dict[str, Command]) -> str:
    width = max(map(len, commands)) + 3
    return "\n".join(f"  {name:{width}}{command.summary}" for name, command in commands.items())


def _unknown(arguments: Sequence[str], commands: dict[str, Command]) -> str:
    if arguments and arguments[0] in LAB:
        return (
            f'The command "{arguments[0]}" comes with microclip-lab. '
            "Install it with: pip install microclip-lab"
        )
    named = f"There is no command {arguments[0]!r}." if arguments else "Name a command."
    return f"{named} There are: {', '.join(commands)}. See: microclip --help"


def _fail(message: str, code: int = 1) -> int:
    print(f"microclip: {message}", file=sys.stderr)
    return code
