"""All attacks on the single pass, one module for each kind of cause."""

from importlib import import_module

from attack_cases.base import ATTACKS, Attack, attempt, found_to_mix

CAUSES = (
    "reordering",
    "masking",
    "routing",
    "layout",
    "copies",
    "constants",
    "parameters",
    "in_place",
    "attention",
    "transforms",
    "hooks",
    "checkpoints",
    "mixing",
    "later",
    "vision",
    "losses",
)

for cause in CAUSES:  # each adds its own to ATTACKS, in this order
    import_module(f"attack_cases.{cause}")

__all__ = ["ATTACKS", "Attack", "attempt", "found_to_mix"]
