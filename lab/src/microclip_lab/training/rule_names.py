"""Rules as people write them on a command line."""

from __future__ import annotations

import ast
import inspect

from microclip import rules
from microclip.rules import Rule
from microclip_lab.training.config import SettingError

KNOWN = {
    name: rule
    for name, rule in vars(rules).items()
    if inspect.isclass(rule)
    and issubclass(rule, Rule)
    and rule is not Rule
    and not name.startswith("_")
}


def named(text: str) -> Rule:
    """Return the rule of this name, with what is in brackets after it.

    >>> named("MinNorm"), named("Quantile(0.2)"), named("Median(rescale=True)")
    (MinNorm(), Quantile(q=0.2, rescale=False), Median(rescale=True))
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            call = ast.Call(call, [], [])
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("it is not a name with numbers in brackets")
        rule: Rule = KNOWN[call.func.id](
            *(ast.literal_eval(value) for value in call.args),
            **{str(word.arg): ast.literal_eval(word.value) for word in call.keywords},
        )
    except (SyntaxError, TypeError, ValueError, KeyError) as error:
        raise SettingError(
            f"rule must be one of {', '.join(KNOWN)}, with what it needs in brackets, such as "
            f'"Quantile(0.2)" or "Fixed(1.0)", but got {text!r} ({error}).'
        ) from error
    return rule
