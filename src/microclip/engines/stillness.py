"""Holding randomness still: dropout lets everything through, so that two engines can be compared.

Engines ask for random numbers in different orders, and would draw different masks from one seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from microclip.engines.fused.record import is_composite, without_dispatch

DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
}


class Still(TorchFunctionMode):
    """Inside the block, dropout does nothing."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return kwargs["input"] if "input" in kwargs else args[0]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if is_composite(func):
            with self:  # look inside
                return without_dispatch(func)(*args, **kwargs)
        return func(*args, **kwargs)
