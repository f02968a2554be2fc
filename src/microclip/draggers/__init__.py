"""Who drags: from a ledger, a score for every example, with the evidence for it.

Data flows one way: `source` (files) -> `steps` (whole steps) -> `evidence` (`roster`, `relative`,
`series`, `memberships`) -> `methods` (scores) -> `result` (a table) -> `export`.
"""

from importlib.util import find_spec

if find_spec("pyarrow") is None or find_spec("numpy") is None:
    raise ImportError("Draggers are found with pyarrow and numpy: pip install 'microclip[ledger]'")

from microclip.draggers.methods import METHODS
from microclip.draggers.result import Draggers
from microclip.draggers.scoring import score
from microclip.draggers.trajectory import trajectories

__all__ = ["METHODS", "Draggers", "score", "trajectories"]
