"""Which micro-batch size, and why: a look at the per-example gradients at one point of training.

`gram` computes the inner products of all examples' gradients, `simulation` draws random steps from
them and says what any size and rule would make of them and how good those steps are, `draggers` how
labeled examples differ. `run_probe` ties them together, once or repeatedly in training; `result`
and `plot` show what came out, and `command` is `microclip probe`. `inequality` measures what
`forecast` and `advice` go by, which say whether clipping is likely to pay; `thresholds` is written
by a command.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microclip.probing.draggers import Draggers, Estimate, compare_draggers
    from microclip.probing.forecast import FIGURES, Expected, Forecast, Thumb
    from microclip.probing.gram import Gram, gram_of
    from microclip.probing.inequality import smallest_over_mean, top_tenth_share
    from microclip.probing.result import Best, Probe, Row
    from microclip.probing.run_probe import Moment, ProbeEvery, probe

__all__ = [
    "FIGURES",
    "Best",
    "Draggers",
    "Estimate",
    "Expected",
    "Forecast",
    "Gram",
    "Moment",
    "Probe",
    "ProbeEvery",
    "Row",
    "Thumb",
    "compare_draggers",
    "gram_of",
    "probe",
    "smallest_over_mean",
    "top_tenth_share",
]

# imported on first use: the single-pass engine comes with it, which takes a moment
_MODULES = {
    "FIGURES": "forecast",
    "Best": "result",
    "Draggers": "draggers",
    "Estimate": "draggers",
    "Expected": "forecast",
    "Forecast": "forecast",
    "Gram": "gram",
    "Moment": "run_probe",
    "Probe": "result",
    "ProbeEvery": "run_probe",
    "Row": "result",
    "Thumb": "forecast",
    "compare_draggers": "draggers",
    "gram_of": "gram",
    "probe": "run_probe",
    "smallest_over_mean": "inequality",
    "top_tenth_share": "inequality",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'microclip.probing' has no attribute {name!r}")
    return getattr(import_module(f"microclip.probing.{_MODULES[name]}"), name)
