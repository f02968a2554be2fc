"""A small LightningModule, its data, Trainer and expected gradients, for Lightning's tests."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from microclip.integrations.lightning import MicrobatchClip

import properties
import reference

COUNT = 22
LIGHTNING_WARNINGS = [  # Lightning's advice about loaders and loggers, which these tests ignore
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|smaller than the logging)"),
    pytest.mark.filterwarnings("ignore:.*have no logger configured"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`"),
]


class Watched(torch.optim.SGD):
    """Keeps the gradients it is called with, after everything Lightning does to them."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr=lr)
        self.model = model

    def step(self, closure=None):
        loss = None if closure is None else closure()  # with scaled losses Lightning has called it
        found = [p.grad for p in self.model.parameters()]
        self.model.seen.append([None if grad is None else grad.clone() for grad in found])
        super().step()
        return loss


class Model(pl.LightningModule):
    def __init__(self, lr=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.lr, self.seen = lr, []

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return Watched(self, lr=self.lr)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 4, generator=generator)
    return x, torch.randint(0, 3, (COUNT,), generator=generator)


def trainer(folder, callbacks, **options):
    defaults = {"max_epochs": 1, "accumulate_grad_batches": 4, "enable_checkpointing": False}
    options = {**defaults, **options}
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
        default_root_dir=folder, **options,
    )  # fmt: skip


def loader(size, *more):
    """Return batches of this size, in the order of the data, with the tensors in `more` added."""
    return DataLoader(TensorDataset(*data(), *more), batch_size=size)


def clipped(model, pieces, rule="MinNorm()"):
    """Return the clipped gradient of micro-batches, given as lists of rows, by the reference."""
    x, y = data()
    gradients = reference.microbatch_gradients(
        lambda batch: F.cross_entropy(model.net(batch[0]), batch[1]),
        list(model.parameters()),
        [(x[rows], y[rows]) for rows in pieces],
    )
    sizes = [len(rows) for rows in pieces]
    return reference.clipped_gradient(gradients, sizes, reference.WEIGH[rule])[0]


def rows_of(start, stop, b):
    """Return the rows from start to stop in pieces of b."""
    return [list(range(i, min(i + b, stop))) for i in range(start, stop, b)]


def fit(folder, model, size=8, callbacks=(), batches=None, accumulate=1, clip=None, **options):
    """Train with MicrobatchClip(microbatch_size=2, **clip) and return the callback."""
    given = {"microbatch_size": 2, **(clip or {})}
    callback = MicrobatchClip(**{name: each for name, each in given.items() if each is not None})
    run = trainer(folder, [callback, *callbacks], accumulate_grad_batches=accumulate, **options)
    if isinstance(batches, list):
        batches = DataLoader(batches, batch_size=None)
    run.fit(model, loader(size) if batches is None else batches)
    return callback


def assert_steps(model, windows, tolerance=1e-5):
    """Check every optimizer step; `windows` has the rows of its micro-batches."""
    assert len(model.seen) == len(windows)
    for found, pieces in zip(model.seen, windows, strict=True):
        properties.assert_close(found, clipped(model, pieces), tolerance)


def windows_of(size, accumulate, b, count=COUNT):
    """Return, for each optimizer step, the rows of its micro-batches."""
    batches = [rows_of(start, min(start + size, count), b) for start in range(0, count, size)]
    joined = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    return [[piece for batch in window for piece in batch] for window in joined]
