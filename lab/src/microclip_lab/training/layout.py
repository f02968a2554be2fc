"""The error of a data folder that is not laid out as it should be. Which layouts there are is each
recipe's own business."""

from __future__ import annotations


class LayoutError(OSError):
    """A folder is not laid out as expected; the message says what was expected and found."""
