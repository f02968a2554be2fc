"""Adaptive micro-batch clipping for PyTorch, and a record that finds bad data."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microclip import draggers, guard, issues, ledger, losses, packing, report, rules
    from microclip.clipper import Clipper
    from microclip.dataset_ids import with_ids
    from microclip.issues import find_issues
    from microclip.ledger import Ledger
    from microclip.noise_scale import NoiseScale
    from microclip.outcome import Outcome
    from microclip.probing import ProbeEvery, probe
    from microclip.review import read_review
    from microclip.step_spikes import replay, spikes
    from microclip.trackers import Tracker, track

__version__ = "0.1.0.dev1"
__all__ = [
    "Clipper",
    "Ledger",
    "NoiseScale",
    "Outcome",
    "ProbeEvery",
    "Tracker",
    "draggers",
    "find_issues",
    "guard",
    "issues",
    "ledger",
    "losses",
    "packing",
    "probe",
    "read_review",
    "replay",
    "report",
    "rules",
    "spikes",
    "track",
    "with_ids",
]

# Imported when first used, so that `microclip --help` does not wait for torch, and what needs an
# extra is not imported without it: a module, and perhaps a name in it.
_LAZY = {
    "Clipper": ("microclip.clipper", "Clipper"),
    "Ledger": ("microclip.ledger", "Ledger"),
    "NoiseScale": ("microclip.noise_scale", "NoiseScale"),
    "Outcome": ("microclip.outcome", "Outcome"),
    "ProbeEvery": ("microclip.probing", "ProbeEvery"),
    "Tracker": ("microclip.trackers", "Tracker"),
    "draggers": ("microclip.draggers", None),
    "find_issues": ("microclip.issues", "find_issues"),
    "guard": ("microclip.guard", None),
    "issues": ("microclip.issues", None),
    "ledger": ("microclip.ledger", None),
    "losses": ("microclip.losses", None),
    "packing": ("microclip.packing", None),
    "probe": ("microclip.probing", "probe"),
    "read_review": ("microclip.review", "read_review"),
    "replay": ("microclip.step_spikes", "replay"),
    "report": ("microclip.report", None),
    "rules": ("microclip.rules", None),
    "spikes": ("microclip.step_spikes", "spikes"),
    "track": ("microclip.trackers", "track"),
    "with_ids": ("microclip.dataset_ids", "with_ids"),
}


def __getattr__(name: str) -> Any:
    if name == "theory":
        return _theory()
    if name not in _LAZY:
        raise AttributeError(f"module 'microclip' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = import_module(module)
    return found if attribute is None else getattr(found, attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _theory() -> Any:
    try:
        theory = import_module("microclip_lab.theory")
    except ImportError as error:
        raise ImportError(
            "microclip.theory is now microclip_lab.theory: pip install microclip-lab"
        ) from error
    warnings.warn(
        "microclip.theory has moved to microclip_lab.theory, and this name will go away.",
        DeprecationWarning,
        stacklevel=3,
    )
    return theory
