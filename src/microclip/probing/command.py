"""`microclip probe`: finds the function that makes the model and the data, probes, prints."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from microclip import rules
from microclip.probing.config import ProbeConfig
from microclip.probing.inquiry import probe
from microclip.probing.result import Probe
from microclip.rules import Rule


def run(config: ProbeConfig) -> Probe:
    """Probe, print the table and the sentence, write what was asked for."""
    try:
        model, loss_fn, batches = find_task(config.task)
        found = probe(
            model,
            loss_fn,
            batches,
            config.sizes or None,
            [find_rule(name) for name in config.rules],
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
    """Call module:function, where the module may be in the current folder."""
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


def find_rule(text: str) -> Rule:
    """Return the rule that is written like Quantile(0.25) or Median(rescale=True)."""
    known = [name for name in rules.__all__ if name != "Rule"]
    try:
        parsed = ast.parse(text, mode="eval").body
        call = parsed if isinstance(parsed, ast.Call) else None
        named = call.func if call else parsed
        if not isinstance(named, ast.Name) or named.id not in known:
            raise ValueError(f"There is no rule {text!r}; there are {', '.join(known)}.")
        positional = [ast.literal_eval(value) for value in call.args] if call else []
        keywords = {k.arg or "": ast.literal_eval(k.value) for k in call.keywords} if call else {}
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no rule; write one as in Quantile(0.25).") from error
    made: Rule = getattr(rules, named.id)(*positional, **keywords)
    return made
