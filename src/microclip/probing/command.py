"""`microclip probe`: finds the function that builds model and data, probes, prints the result."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from microclip.probing.config import ProbeConfig
from microclip.probing.result import Probe
from microclip.probing.run_probe import probe
from microclip.rule_names import parse_rule


def run(config: ProbeConfig) -> Probe:
    """Probe, print the table and the sentence, write the requested files."""
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


def find_task(name: str) -> tuple[Any, Any, Any]:
    """Call module:function; the module may be in the current folder."""
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name}.")
    made = function()
    if not isinstance(made, tuple) or len(made) != 3:
        raise ValueError(
            f"{name} must return (model, loss_fn, batches), but returned a {type(made).__name__}."
        )
    return made
