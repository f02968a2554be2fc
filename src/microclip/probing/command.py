"""`microclip probe`: its options, and what it runs.

Finds the function that builds model and data, probes, and prints the result. The probe itself is
imported once the options are known, so `--help` does not wait for torch.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microclip.probing.result import Probe


@dataclass(frozen=True)
class ProbeConfig:
    """Predict what each micro-batch size would do to a model, from its per-example gradients.

    Needs a model and data: a function of yours that returns (model, loss_fn, batches). loss_fn
    returns one loss per example, and batches is a list of two to four batches, as they are trained
    on. Prints a table and a sentence. It looks one step ahead, from these weights.

    With a function digits in tasks.py, in the current folder:
      microclip probe --task tasks:digits

    Some sizes only, other rules, and a plot:
      microclip probe --task tasks:digits --sizes 2 4 8 --rules MinNorm Unit --plot probe.png
    """

    task: str
    """Where the function is, as module:function."""
    sizes: tuple[int, ...] = ()
    """The micro-batch sizes b; by default powers of two up to the batch size."""
    rules: tuple[str, ...] = ("MinNorm",)
    """Rules from microclip.rules, written as in Python: MinNorm, Median, Quantile(0.25), ..."""
    batch_size: int | None = None
    """B, the examples of a simulated step; by default the largest batch."""
    draws: int = 256
    """How many steps to simulate."""
    seed: int = 0
    """The seed of the simulation."""
    csv: Path | None = None
    """Where to write the table."""
    plot: Path | None = None
    """Where to save a plot; the file extension sets the format."""

    def __post_init__(self) -> None:
        module, _, function = self.task.partition(":")
        if not all(name.isidentifier() for name in (*module.split("."), function)):
            raise ValueError(
                "task must be written as module:function, as in tasks:digits for the function "
                f"digits in tasks.py, but got {self.task!r}."
            )


def run(config: ProbeConfig) -> Probe:
    """Probe, print the table and the sentence, write the requested files."""
    from microclip.probing.run_probe import probe
    from microclip.rules import parse_rule

    try:
        model, loss_fn, batches = find_task(config.task)
        found = probe(
            model,
            loss_fn,
            batches,
            config.sizes or None,
            [parse_rule(name) for name in config.rules],
            batch_size=config.batch_size,
            draws=config.draws,
            seed=config.seed,
        )
        if config.plot is not None:
            found.plot(config.plot)
    except (ImportError, ValueError, TypeError, NotImplementedError) as error:
        raise SystemExit(f"microclip: {error}") from error
    if config.csv is not None:
        found.to_csv(config.csv)
    print(found)
    return found


def find_task(name: str, returns: str = "(model, loss_fn, batches)") -> tuple[Any, Any, Any]:
    """Call module:function, which returns three things; it may be in the current folder."""
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = import_module(module_name)
    except ImportError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"There is no module {module_name!r}, neither in {folder} nor installed. For the "
                "function digits in tasks.py, run this in its folder with --task tasks:digits."
            ) from error
        raise ValueError(f"The module {module_name!r} cannot be imported: {error}.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"The module {module_name!r} has no function {function_name!r}.")
    if not _takes_no_arguments(function):
        raise ValueError(
            f"{name} is called without arguments, but needs some. Give them default values, or "
            f"name a function that returns {returns} without any."
        )
    made = function()
    if not isinstance(made, tuple) or len(made) != 3:
        raise ValueError(f"{name} must return {returns}, but returned a {type(made).__name__}.")
    return made


def _takes_no_arguments(function: Any) -> bool:
    """Whether a function can be called without arguments, as far as Python can tell."""
    try:
        inspect.signature(function).bind()
    except ValueError:  # some built-in functions have no signature
        return True
    except TypeError:
        return False
    return True
