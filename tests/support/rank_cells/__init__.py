"""What two ranks do in the tests of mistakes with ranks; child processes import it by name.

A cell is a function of the rank. It returns what it found, or raises, and the test looks at both.
"""

from importlib import import_module

from rank_cells.base import CELLS, WORLD, Net, batch, losses, work

KINDS = ("wrappers", "averaged", "differences", "communication", "faults", "rank_clip")

for kind in KINDS:  # each adds its own to CELLS, in this order
    import_module(f"rank_cells.{kind}")

__all__ = ["CELLS", "WORLD", "Net", "batch", "losses", "work"]
