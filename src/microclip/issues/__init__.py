"""Finding bad data in the record of a training run: one table that says what is probably wrong.

Data flows one way: `history` (what was seen of each example over the run) -> `mixture` (how
probable it is that it is wrong) -> `find` (the verdicts) -> `result` (a table, and its exports).
"""

from importlib.util import find_spec

if find_spec("pyarrow") is None or find_spec("numpy") is None:
    raise ImportError("microclip.issues needs pyarrow and numpy: pip install 'microclip[ledger]'")

from microclip.issues.find import find_issues
from microclip.issues.result import KINDS, Issues

__all__ = ["KINDS", "Issues", "find_issues"]
