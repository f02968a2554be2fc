"""The paper's convergence theory, computed, checked and corrected.

`rates`, `conditions`, `lemmas` and `steps` are the paper's statements as printed;
`counterexamples` shows where they fail, `corrected` what holds instead; `simulator` trains under
the assumptions of the theorems, to see bounds hold or fail. `symbols` explains the letters.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from microclip_lab.theory import (
    conditions,
    corrected,
    counterexamples,
    lemmas,
    rates,
    steps,
    symbols,
)
from microclip_lab.theory.rates import Bound

if TYPE_CHECKING:
    from microclip_lab.theory import simulator

__all__ = [
    "Bound",
    "conditions",
    "corrected",
    "counterexamples",
    "lemmas",
    "rates",
    "simulator",
    "steps",
    "symbols",
]


def __getattr__(name: str) -> Any:
    # the formulas need no torch, so the simulator is imported on demand
    if name == "simulator":
        return import_module("microclip_lab.theory.simulator")
    raise AttributeError(f"module 'microclip_lab.theory' has no attribute {name!r}")
