"""The way in: from a ledger to its draggers."""

from __future__ import annotations

import warnings

import numpy as np

from microclip.draggers.evidence import Evidence
from microclip.draggers.methods import judge
from microclip.draggers.result import Draggers, tabulate
from microclip.draggers.source import LedgerLike, Source


def score(ledger: LedgerLike, method: str = "auto") -> Draggers:
    """Return every example that a ledger knows, with a score: how much it drags.

    Args:
        ledger: The folder of a ledger, or a `microclip.Ledger`, or what `open_ledger` returned.
        method: "auto", the best there is for what was recorded: mean loss if there are losses,
            else "refined". Or one of "group", "refined" (norms alone), "loss", "late_loss",
            "raw_loss", "combined"; see `microclip.draggers.methods`.
    """
    judged = judge(Source.open(ledger), method)
    if _are_places(judged.evidence):
        last, steps = len(judged.evidence) - 1, judged.evidence.steps
        warnings.warn(
            f"The ids 0 to {last} are in every one of the {steps} steps: these look like places "
            "in the mini-batch, not like examples. Give backward() the ids of your examples, ids=.",
            UserWarning,
            stacklevel=2,
        )
    return tabulate(judged)


def _are_places(evidence: Evidence) -> bool:
    """Say whether ids are what a Clipper makes up when it is given none: 0, 1, ... in each step."""
    if evidence.steps < 2 or not (evidence.appearances == evidence.steps).all():
        return False
    ids = evidence.roster.ids.to_numpy(zero_copy_only=False)
    return ids.dtype == np.int64 and bool((np.sort(ids) == np.arange(len(ids))).all())
