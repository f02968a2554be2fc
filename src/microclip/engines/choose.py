"""Choosing an engine for a step."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn

from microclip.engines.fused.engine import Fused
from microclip.engines.gradients import trainable
from microclip.engines.stream import Stream
from microclip.engines.tally import Tally
from microclip.engines.two_pass import TwoPass
from microclip.rules import Rule

EngineName = Literal["auto", "stream", "two_pass", "fused"]
ENGINES: tuple[str, ...] = get_args(EngineName)
Engine = Stream | TwoPass | Fused


def check(name: EngineName, rule: Rule) -> None:
    """Refuse a pair of engine and rule that cannot work together."""
    if name == "stream" and not rule.streams:
        raise ValueError(
            f'{rule!r} needs all norms before it can weight any gradient, which engine="stream" '
            'cannot give it. Use engine="two_pass" or "auto"'
            + (", or rescale=True." if hasattr(rule, "rescale") else ".")
        )


def choose(
    name: EngineName,
    model: nn.Module,
    tally: Tally,
    scaler: torch.amp.GradScaler | None,
    alone: bool,
) -> Engine:
    """Make the engine for one step; `alone`: the step consists of one micro-batch.

    One micro-batch needs no second pass and no second buffer: streaming it is a plain backward.
    """
    parameters = trainable(model)
    if alone or name == "stream" or (name == "auto" and tally.policy.rule.streams):
        return Stream(parameters, tally, scaler)
    if name == "fused":
        return Fused(model, parameters, tally, scaler)
    return TwoPass(model, parameters, tally, scaler)
