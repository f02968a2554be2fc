"""One training run: the same seed gives the same data, network and order to every setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

import microclip
from microclip.demo.config import Setting
from microclip.demo.data import CLASSES, Digits, Images, load

if TYPE_CHECKING:
    from microclip.ledger import Ledger

HIDDEN = 128
WEIGHT_DECAY = 0.01
SCHEDULE = "learning rate falling linearly to 0"

Look = Callable[[int, nn.Module, float], None]


@dataclass(frozen=True)
class Run:
    """Everything that a run depends on."""

    setting: Setting
    learning_rate: float
    seed: int
    steps: int
    batch_size: int
    noise: float

    @property
    def work(self) -> int:
        """How long it takes, roughly, in backward passes."""
        microbatches = 0 if self.setting is None else self.batch_size // self.setting
        return self.steps * (1 + microbatches)


@dataclass(frozen=True)
class Result:
    """What a run came to, after its last step.

    `weights` and `microbatches` are indexed by the number of wrong labels in a micro-batch: the
    weights are added up, each as a multiple of the mean weight in its step.
    """

    validation_accuracy: float
    test_accuracy: float
    weights: tuple[float, ...] = ()
    microbatches: tuple[int, ...] = ()


class WeightTally:
    """Adds up what weight micro-batches got, by the number of wrong labels in them."""

    def __init__(self, microbatch_size: int) -> None:
        self.size = microbatch_size
        self.weights = torch.zeros(microbatch_size + 1, dtype=torch.float64)
        self.microbatches = torch.zeros(microbatch_size + 1, dtype=torch.int64)

    def add(self, weights: Tensor, wrong: Tensor) -> None:
        """Take note of a step: a weight per micro-batch, and which of its examples are wrong."""
        relative = (weights / weights.mean()).double()
        if not relative.isfinite().all():  # a run that diverged has no weights to speak of
            return
        counts = wrong.view(-1, self.size).sum(1)
        self.weights.index_add_(0, counts, relative)
        self.microbatches.index_add_(0, counts, torch.ones_like(counts))


def carry_out(run: Run) -> Result:
    """Train and measure."""
    digits = load(run.seed, run.noise)
    model, tally = fit(run, digits)
    return Result(
        validation_accuracy=accuracy(model, digits.validation),
        test_accuracy=accuracy(model, digits.test),
        weights=() if tally is None else tuple(tally.weights.tolist()),
        microbatches=() if tally is None else tuple(tally.microbatches.tolist()),
    )


def fit(
    run: Run, digits: Digits, ledger: Ledger | None = None, look: Look | None = None
) -> tuple[nn.Module, WeightTally | None]:
    """Train a network; with clipping, also return who got which weight.

    Images are known to the ledger by their place in scikit-learn's digits. `look` is called after
    every step, with the number of steps done, the network and the loss.
    """
    model = network(run.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.learning_rate, weight_decay=WEIGHT_DECAY
    )
    # Without it, what is measured is mostly on which of its last steps a run happened to end.
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=run.steps
    )
    pixels, labels = digits.training.pixels, digits.training.labels

    # One loss per example instead of their mean leaves the clipper every choice of engine.
    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    clipper = tally = None
    if run.setting is not None:
        clipper = microclip.Clipper(model, microbatch_size=run.setting, ledger=ledger)
        tally = WeightTally(run.setting)
    for step, rows in enumerate(batches(len(labels), run), start=1):
        optimizer.zero_grad()
        batch = pixels[rows], labels[rows]
        if clipper is None or tally is None:
            loss = loss_fn(batch).mean()
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            ids = None if ledger is None else digits.training.places[rows]
            outcome = clipper.backward(loss_fn, batch, ids=ids)
            tally.add(outcome.weights, digits.wrong[rows])
            assert outcome.loss is not None
            loss = outcome.loss
        optimizer.step()
        schedule.step()
        if look is not None:
            look(step, model, loss.item())
    return model, tally


def network(seed: int) -> nn.Module:
    """Return the network as it is before training, leaving the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )


def batches(examples: int, run: Run) -> Tensor:
    """Return the row numbers of each step's batch: shuffled epochs of complete batches."""
    generator = torch.Generator().manual_seed(run.seed)
    per_epoch = examples // run.batch_size
    epochs = [
        torch.randperm(examples, generator=generator)[: per_epoch * run.batch_size]
        for _ in range(-(-run.steps // per_epoch))
    ]
    return torch.cat(epochs).view(-1, run.batch_size)[: run.steps]


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Return the share of the images that are recognised."""
    hits: Tensor = model(images.pixels).argmax(1) == images.labels
    return hits.double().mean().item()
