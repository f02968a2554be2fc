"""Warnings that point at the user's line, however deep inside the library they arise."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

# the second calls our context managers
INSIDE = f"{Path(__file__).parent}{os.sep}", contextlib.__file__


def warn(message: str | Warning, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, and name the innermost line outside this package."""
    frame: Any = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
