"""Rules written as text, as on a command line: "MinNorm", "Quantile(0.25)"."""

from __future__ import annotations

import ast

from microclip import rules
from microclip.rules import Rule

KNOWN: dict[str, type[Rule]] = {
    name: getattr(rules, name) for name in rules.__all__ if name != "Rule"
}


def parse_rule(text: str) -> Rule:
    """Return the rule that is written like Quantile(0.25) or Median(rescale=True).

    >>> parse_rule("MinNorm"), parse_rule("Quantile(0.25)"), parse_rule("Median(rescale=True)")
    (MinNorm(), Quantile(q=0.25, rescale=False), Median(rescale=True))
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a rule; write one as in Quantile(0.25).") from error
    if isinstance(call, ast.Name):
        call = ast.Call(call, [], [])
    named = call.func if isinstance(call, ast.Call) else None
    if not isinstance(call, ast.Call) or not isinstance(named, ast.Name) or named.id not in KNOWN:
        raise ValueError(f"There is no rule {text!r}; there are {', '.join(KNOWN)}.")
    return KNOWN[named.id](
        *(ast.literal_eval(value) for value in call.args),
        **{str(word.arg): ast.literal_eval(word.value) for word in call.keywords},
    )
