"""Adaptive micro-batch clipping for PyTorch: train better on data that is not clean."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from microclip import rules
from microclip.clipper import Clipper
from microclip.outcome import Outcome

if TYPE_CHECKING:
    from microclip import draggers, guard, ledger, report, theory
    from microclip.ledger import Ledger
    from microclip.probing import ProbeEvery, probe

__version__ = "0.1.0.dev1"
__all__ = [
    "Clipper",
    "Ledger",
    "Outcome",
    "ProbeEvery",
    "draggers",
    "guard",
    "ledger",
    "probe",
    "report",
    "rules",
    "theory",
]

# What needs an extra is imported when it is asked for: a module, and perhaps a name in it.
_LATER = {
    "Ledger": ("microclip.ledger", "Ledger"),
    "draggers": ("microclip.draggers", None),
    "guard": ("microclip.guard", None),
    "ledger": ("microclip.ledger", None),
    "ProbeEvery": ("microclip.probing", "ProbeEvery"),
    "probe": ("microclip.probing", "probe"),
    "report": ("microclip.report", None),
    "theory": ("microclip.theory", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'microclip' has no attribute {name!r}")
    module, inner = _LATER[name]
    found = import_module(module)
    return found if inner is None else getattr(found, inner)
