"""Which micro-batch size, and why: looking at the per-example gradients of one moment.

`gram` gets the inner products of all examples' gradients, `sampling` draws random steps from them,
`regroup` says what any size and rule would make of those, `merit` what that is worth, `draggers`
what labelled examples look like. `inquiry` ties them together, `result`, `sentence` and `pictures`
show what came out, and `callback` repeats it during training.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microclip.probing.callback import Moment, ProbeEvery
    from microclip.probing.draggers import Draggers, Estimate
    from microclip.probing.gram import Gram, gram_of
    from microclip.probing.inquiry import probe
    from microclip.probing.result import Best, Probe, Row

__all__ = [
    "Best",
    "Draggers",
    "Estimate",
    "Gram",
    "Moment",
    "Probe",
    "ProbeEvery",
    "Row",
    "gram_of",
    "probe",
]

# where each name lives; the single pass comes with it, which takes a moment to import
_ROOMS = {
    "Best": "result",
    "Draggers": "draggers",
    "Estimate": "draggers",
    "Gram": "gram",
    "Moment": "callback",
    "Probe": "result",
    "ProbeEvery": "callback",
    "Row": "result",
    "gram_of": "gram",
    "probe": "inquiry",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'microclip.probing' has no attribute {name!r}")
    return getattr(import_module(f"microclip.probing.{_ROOMS[name]}"), name)
