"""What each operation does to the owners of its inputs: one rule for a family of operations.

A rule gets the tracker, the operation, its arguments and its result, and returns the state of the
result, or a list with one state for each result. Integers that say *where* something goes (indices,
lengths, offsets) may come from anywhere: they carry no gradient.
"""

from microclip.engines.single_pass.propagation import indexing, layers, pointwise, views
from microclip.engines.single_pass.propagation.registry import combined, rule_for

__all__ = ["combined", "indexing", "layers", "pointwise", "rule_for", "views"]
