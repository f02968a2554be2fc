"""Finding draggers: a score for every example in a ledger, with the evidence behind it.

Data flows one way: `source` (files, whole steps, single appearances) -> `evidence` (what was seen
of each example, with `statistics`) -> `scoring` (scores) -> `result` (a table, and its exports).
"""

from importlib.util import find_spec

if find_spec("pyarrow") is None or find_spec("numpy") is None:
    raise ImportError("microclip.draggers needs pyarrow and numpy: pip install 'microclip[ledger]'")

from microclip.draggers.result import Draggers
from microclip.draggers.scoring import METHODS, score
from microclip.draggers.source import trajectories

__all__ = ["METHODS", "Draggers", "score", "trajectories"]
