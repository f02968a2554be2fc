"""Which micro-batch size, and why: a look at the per-example gradients at one point of training.

`gram` computes the inner products of all examples' gradients, `simulation` draws random steps from
them and says what any size and rule would make of them and how good those steps are, `draggers` how
labeled examples differ. `run_probe` ties them together, once or repeatedly in training; `result`
and `plot` show what came out, and `command` is `microclip probe`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microclip.probing.draggers import Draggers, Estimate, compare_draggers
    from microclip.probing.gram import Gram, gram_of
    from microclip.probing.result import Best, Probe, Row
    from microclip.probing.run_probe import Moment, ProbeEvery, probe

__all__ = [
    "Best",
    "Draggers",
    "Estimate",
    "Gram",
    "Moment",
    "Probe",
    "ProbeEvery",
    "Row",
    "compare_draggers",
    "gram_of",
    "probe",
]

# imported on first use: the single-pass engine comes with it, which takes a moment
_MODULES = {
    "Best": "result",
    "Draggers": "draggers",
    "Estimate": "draggers",
    "Gram": "gram",
    "Moment": "run_probe",
    "Probe": "result",
    "ProbeEvery": "run_probe",
    "Row": "result",
    "compare_draggers": "draggers",
    "gram_of": "gram",
    "probe": "run_probe",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'microclip.probing' has no attribute {name!r}")
    return getattr(import_module(f"microclip.probing.{_MODULES[name]}"), name)
