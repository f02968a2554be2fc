"""A recorded run of plain training with wrong labels, for tests of finding and reviewing them."""

from pathlib import Path

import numpy as np
import torch

from microclip import Ledger
from microclip.report import RunFolder

COUNT = 300
CLASSES = ("ant", "bee", "cat")
WRONG = range(0, COUNT, 10)  # ids whose label is that of the next class


def recorded(path: Path, epochs: int = 6, name=int, classes=CLASSES, text: str = "") -> RunFolder:
    """Record a model that learns the true class of every example; ids are made by `name`."""
    run = RunFolder(path, name="three classes")
    record(run, epochs, name)
    for i in range(COUNT):
        shown = {"text": f"{text}example {i}"} if i % 20 else {"image": np.full((8, 8), i / COUNT)}
        label, truth = classes[label_of(i)], classes[i % 3]
        run.example(name(i), label=label, truth=truth, **shown)
    run.log(1, accuracy=0.5)
    return run


def label_of(i: int) -> int:
    return (i + (i in WRONG)) % 3


def record(run: RunFolder, epochs: int, name=int, first: int = 0) -> None:
    """Record some epochs of batches of 50; the model gets surer from epoch to epoch."""
    with Ledger(run.ledger) as ledger:
        for epoch in range(first, first + epochs):
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(COUNT, generator=generator)
            for step, rows in enumerate(order.split(50)):
                logits = torch.randn(50, 3, generator=generator) * 0.5
                logits[range(50), rows % 3] += 1.0 + epoch
                labels = torch.tensor([label_of(int(i)) for i in rows])
                losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
                ids = [name(int(i)) for i in rows]
                number = epoch * 6 + step
                ledger.record(ids, losses, logits=logits, labels=labels, step=number)
