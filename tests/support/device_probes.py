"""Whether the stand-in device is as strict as a real one: each probe tries what should fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from microclip import multitensor


def mixes(device: str, counting: Callable[[], Any]) -> dict[str, Any]:
    """Return which mixes of devices were accepted; those with a number are all right."""
    x, here = torch.randn(3, 3).to(device), torch.randn(3, 3)
    index, mask = torch.tensor([0, 2]), torch.tensor([True, False, True])
    attempts: dict[str, Callable[[], Any]] = {
        "add": lambda: x + here,
        "add in place": lambda: x.add_(here),
        "write into the host": lambda: here.add_(x),
        "matmul": lambda: x @ here,
        "cat": lambda: torch.cat([x, here]),
        "where": lambda: torch.where(x > 0, x, here),
        "linear": lambda: F.linear(x, here),
        "index_select": lambda: x.index_select(0, index),
        "gather": lambda: x.gather(0, index[None]),
        "mask": lambda: x.masked_fill(mask, 0.0),
        "foreach": lambda: torch._foreach_add([x], [here]),
        "number": lambda: x + torch.tensor(2.0),
    }
    return {"accepted": [name for name, attempt in attempts.items() if _works(attempt)]}


def _works(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except RuntimeError as error:
        if "same device" not in str(error):
            raise
        return False
    return True


def ways_to_read(device: str, counting: Callable[[], Any]) -> dict[str, int]:
    """Return how many reads were counted for each way to read, and for none."""
    x, found = torch.randn(4).to(device), {}
    repeats = torch.tensor([1, 2, 0, 1]).to(device)
    ways: dict[str, Callable[[], Any]] = {
        "nothing": lambda: (x * 2 + 1).sort().values.cumsum(0).clone(),
        "upload": lambda: torch.tensor([1.0, 2.0], device=device),
        "item": lambda: x[0].item(),
        "float": lambda: float(x.sum()),
        "bool": lambda: bool((x > 0).any()),
        "tolist": lambda: x.tolist(),
        "cpu": lambda: x.cpu(),
        "to": lambda: x.to("cpu", torch.float16),
        "copy_": lambda: torch.empty(4).copy_(x),
        "equal": lambda: torch.equal(x, x + 1),
        "nonzero": lambda: (x > 0).nonzero(),
        "mask": lambda: x[x > 0],
        "masked_select": lambda: x.masked_select(x > 0),
        "unique": lambda: repeats.unique(),
        "repeat_interleave": lambda: x.repeat_interleave(repeats),
        "if": lambda: 1 if x[0] > 0 else 0,
    }
    for name, way in ways.items():
        with counting() as counts:
            way()
        found[name] = counts.total
    return found


def makes_float64(device: str, counting: Callable[[], Any]) -> dict[str, Any]:
    """Return which ways to make a float64 tensor worked."""
    x, made = torch.randn(3).to(device), []
    ways: dict[str, Callable[[], Any]] = {
        "double": lambda: x.double(),
        "zeros": lambda: torch.zeros(2, dtype=torch.float64, device=device),
        "sum": lambda: x.sum(dtype=torch.float64),
        "upload": lambda: torch.randn(3, dtype=torch.float64).to(device),
    }
    for name, way in ways.items():
        try:
            way()
        except TypeError:
            continue
        made.append(name)
    return {"made": made, "widest": str(multitensor.widest(torch.device(device)))}


PROBES = {each.__name__: each for each in (mixes, ways_to_read, makes_float64)}
