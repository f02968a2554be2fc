"""Reading rules that are written as text, as on a command line or in a settings file."""

from __future__ import annotations

import ast
from typing import Any

from microclip.rules import norms
from microclip.rules.examples import LossWeight
from microclip.rules.history import LossHistory, NormHistory
from microclip.rules.norms import Rule

KNOWN: dict[str, type[Rule]] = {
    kind.__name__: kind
    for kind in (
        norms.Automatic,
        norms.Fixed,
        norms.Keep,
        norms.Mean,
        norms.Median,
        norms.MinNorm,
        norms.Quantile,
        norms.Unit,
        LossHistory,
        LossWeight,
        NormHistory,
    )
}


def parse_rule(text: str) -> Rule:
    """Return the rule for a text such as Quantile(0.25), LossHistory(clip=Unit) or loss-history.

    >>> parse_rule("MinNorm"), parse_rule("Quantile(0.25)"), parse_rule("median(rescale=True)")
    (MinNorm(), Quantile(q=0.25, rescale=False), Median(rescale=True))
    """
    name, bracket, rest = text.strip().partition("(")
    try:
        return _rule(ast.parse(_class_name(name) + bracket + rest, mode="eval").body, text)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a rule; write it like Quantile(0.25).") from error


def _rule(node: ast.expr, text: str) -> Rule:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = _class_name(call.func.id) if isinstance(call.func, ast.Name) else ""
    if name not in KNOWN:
        raise ValueError(f"There is no rule {text!r}; there are {', '.join(KNOWN)}.")
    values = [_value(value, text) for value in call.args]
    named = {str(word.arg): _value(word.value, text) for word in call.keywords}
    try:
        return KNOWN[name](*values, **named)
    except TypeError as error:
        raise ValueError(f"{text!r} is not a rule: {error}.") from error


def _value(node: ast.expr, text: str) -> Any:
    """Return an argument: a number, a string, or another rule."""
    if isinstance(node, ast.Name | ast.Call):
        return _rule(node, text)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(
            f"{ast.unparse(node)!r} in {text!r} is neither a number, a string nor a rule."
        ) from error


def _class_name(name: str) -> str:
    """Return LossHistory for loss-history."""
    plain = name.strip().replace("-", "").replace("_", "").lower()
    return next((known for known in KNOWN if known.lower() == plain), name)
