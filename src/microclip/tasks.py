"""Functions of yours that commands call, named on the command line as module:function.

Knows nothing about what they return, except that it is three things.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def expect_task(option: str, name: str) -> None:
    """Raise an error unless this is written as module:function; imports nothing.

    Args:
        option: The name of the option, for messages.
        name: Its value.
    """
    module, _, function = name.partition(":")
    is_file = module.endswith(".py") and Path(module).is_file()
    if is_file or not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ValueError(
            f"{option} must be written as module:function, as in tasks:digits for the function "
            f"digits in tasks.py, but got {name!r}."
        )


def find_task(option: str, name: str, returns: str) -> tuple[Any, Any, Any]:
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
                f"function digits in tasks.py, run this in its folder with --{option} tasks:digits."
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
