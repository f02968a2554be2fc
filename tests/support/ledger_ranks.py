"""What each rank does when several write one ledger; in a module, so that ranks can import it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from microclip import Clipper, Ledger

import processes


def train(rank: int, folder: Path, start: int, steps: int) -> list[list[float]]:
    """Record some steps, with a different number of examples per rank; return the norms."""
    model = DistributedDataParallel(processes.Net(torch.float64))
    ledger = Ledger(folder, flush_every=3)
    clipper = Clipper(model, 2, engine="stream", ledger=ledger)
    clipper.step = start
    norms = []
    for step in range(start, start + steps):
        size = 6 - 2 * rank
        batch = processes.batch(10 * step + rank, size, torch.float64)
        ids = [100 * step + 10 * rank + row for row in range(size)]
        norms.append(clipper.backward(processes.losses(model), batch, ids=ids).norms.tolist())
    ledger.close()
    return norms
