"""`microclip demo`: train on digits with wrong labels, compare, and name the wrong labels.

An example of the library's parts at work, about what a user would write: a `Clipper` in a training
loop, a `Ledger`, `draggers.score`, and run folders that `write_report` makes a page of.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from microclip.ledger import Ledger

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
TUNING_SEEDS = (100, 101)  # used for nothing else
TRAINING, VALIDATION = 900, 297  # of 1,797 images; the other 600 are for testing
TEST = "test accuracy, %"
MEMORIZED = "wrong labels memorized, %"
PICTURES = 120  # of the most suspicious images


@dataclass(frozen=True)
class DemoConfig:
    """Train on digits with wrong labels, plain and clipped, and find the wrong labels.

    Replaces 20 % of the training labels of scikit-learn's digits with wrong ones and trains a small
    network on them: plain, and with micro-batch clipping. Each gets its own learning rate, tuned on
    validation images. Ends with a comparison on clean test images, the examples whose gradients
    were held back most, and a page that shows both. Takes about a minute on two cores.

    More seeds, narrower intervals:  microclip demo --seeds 20

    Fewer wrong labels, another micro-batch size:  microclip demo --noise 0.05 --microbatch-size 8
    """

    out: Path = Path("demo-output")
    """Folder for the page and the runs; those of an earlier demo are replaced."""
    seeds: int = 8
    """How many times each way is trained for the comparison; 2 or more."""
    steps: int = 400
    """Optimizer steps per training run."""
    microbatch_size: int = 4
    """b, the images that are clipped together, of 32 in a step."""
    noise: float = 0.2
    """The share of the training labels that is wrong."""

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"seeds must be 2 or more for an interval, but got {self.seeds}.")
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, but got {self.steps}.")
        if not 1 <= self.microbatch_size <= BATCH_SIZE:
            raise ValueError(
                f"microbatch_size must be between 1 and {BATCH_SIZE}, but got "
                f"{self.microbatch_size}."
            )
        if not 0 < self.noise < 1:
            raise ValueError(f"noise must be between 0 and 1, but got {self.noise}.")


BATCH_SIZE = 32


class Digits:
    """Scikit-learn's digits, split by seed, some of the training labels made wrong."""

    def __init__(self, seed: int, noise: float) -> None:
        import torch
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=generator)
        self.train, self.validation, self.test = order.split(
            [TRAINING, VALIDATION, len(order) - TRAINING - VALIDATION]
        )
        self.pixels = (pixels / 8 - 1).float()
        self.truth, self.labels = labels, labels.clone()
        chosen = torch.randperm(TRAINING, generator=generator)[: round(noise * TRAINING)]
        self.wrong = self.train[chosen]
        # a shift by 1 to 9 reaches every other class equally often
        shift = torch.randint(1, 10, (len(self.wrong),), generator=generator)
        self.labels[self.wrong] = (labels[self.wrong] + shift) % 10


@dataclass
class Trained:
    """A network and the data it was trained on; accuracies in percent."""

    model: nn.Module
    digits: Digits

    def accuracy(self, rows: Tensor, labels: Tensor) -> float:
        """Return how many of these images are recognized as labelled."""
        import torch

        with torch.no_grad():
            said = self.model(self.digits.pixels[rows]).argmax(1)
        return 100 * float((said == labels[rows]).float().mean())

    @property
    def validation(self) -> float:
        """Accuracy on clean images that learning rates are chosen by."""
        return self.accuracy(self.digits.validation, self.digits.truth)

    @property
    def test(self) -> float:
        """Accuracy on clean images that nothing is chosen by."""
        return self.accuracy(self.digits.test, self.digits.truth)

    @property
    def memorized(self) -> float:
        """How many of the wrong labels the network gives back as it was told them."""
        return self.accuracy(self.digits.wrong, self.digits.labels)


def fit(
    config: DemoConfig, size: int | None, rate: float, seed: int, ledger: Ledger | None = None
) -> Trained:
    """Train a network, plain (`size` None) or clipped."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import microclip

    digits = Digits(seed, config.noise)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, config.steps)
    clipper = microclip.Clipper(model, microbatch_size=size, ledger=ledger)
    order = torch.Generator().manual_seed(seed)

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    step = 0
    while step < config.steps:
        for places in torch.randperm(TRAINING, generator=order).split(BATCH_SIZE)[:-1]:
            rows = digits.train[places]
            batch = digits.pixels[rows], digits.labels[rows]
            optimizer.zero_grad()
            clipper.backward(loss_fn, batch, ids=rows)
            optimizer.step()
            schedule.step()
            step += 1
            if step == config.steps:
                break
    return Trained(model, digits)


def tuned_rate(config: DemoConfig, size: int | None) -> float:
    """Return the learning rate with the best validation accuracy, from coarse to fine."""

    def score(rate: float) -> float:
        if rate not in tried:
            runs = [fit(config, size, rate, seed).validation for seed in TUNING_SEEDS]
            tried[rate] = statistics.fmean(runs)
        return tried[rate]

    tried: dict[float, float] = {}
    best = max(RATES[1::2], key=score)
    place = RATES.index(best)
    return max(RATES[max(0, place - 1) : place + 2], key=score)


def run(config: DemoConfig) -> Path:
    """Train, compare, write the page; return where it is."""
    import torch
    from rich.console import Console

    from microclip.report import write_report

    torch.set_num_threads(1)  # these networks are too small for more
    console = Console()
    runs = config.out / "runs"
    if runs.exists():
        shutil.rmtree(runs)
    paths: list[Path] = []
    for size, name in ((None, "plain"), (config.microbatch_size, f"b{config.microbatch_size}")):
        with console.status(f"Tuning the learning rate, {name}"):
            rate = tuned_rate(config, size)
        console.print(f"{name:6} learning rate {rate:g}", highlight=False)
        for seed in range(config.seeds):
            with console.status(f"Training {name}, seed {seed} of {config.seeds}"):
                path = runs / f"{name}-seed-{seed}"
                _record(config, path, size, rate, seed)
                paths.append(path)
    page = config.out / "index.html"
    # the recorded runs first: the page shows curves and examples of those
    paths.sort(key=lambda path: not path.name.endswith("-seed-0"))
    with console.status("Writing the page"):
        written = write_report(paths, page, title="Digits with wrong labels")
    for sentence in written.verdict:
        console.print(sentence, highlight=False)
    console.print(f"\nLook at it: {page.resolve()}", soft_wrap=True, highlight=False)
    return page


def _record(config: DemoConfig, path: Path, size: int | None, rate: float, seed: int) -> None:
    """Train once and write its run folder; that of the first seed with a ledger and pictures."""
    import microclip
    from microclip.report import RunFolder

    wrong = round(config.noise * TRAINING)
    settings: dict[str, Any] = {
        "data": f"scikit-learn's digits, {wrong} of {TRAINING} training labels wrong",
        "optimizer": "AdamW, learning rate falling linearly to 0",
        "learning rate": rate,
        "steps": config.steps,
        "batch size B": BATCH_SIZE,
    }
    about = {"microbatch_size": size, "seed": seed, "settings": settings, "headline": TEST}
    folder = RunFolder(path, group="digits", command="microclip demo", **about)
    if seed == 0 and size is not None:
        with microclip.Ledger(folder.ledger) as ledger:
            trained = fit(config, size, rate, seed, ledger)
        _describe_images(folder, trained.digits)
    else:
        trained = fit(config, size, rate, seed)
    folder.log_all(config.steps, {TEST: trained.test, MEMORIZED: trained.memorized})


def _describe_images(folder: Any, digits: Digits) -> None:
    """Tell the page how each training image is labelled, and show the most suspicious ones."""
    import microclip

    suspects = set(microclip.draggers.score(folder.ledger).top(PICTURES)["id"].to_pylist())
    for row in digits.train.tolist():
        # dark ink on light paper
        picture = (1 - digits.pixels[row].view(8, 8)) / 2 if row in suspects else None
        folder.example(
            row, image=picture, label=int(digits.labels[row]), truth=int(digits.truth[row])
        )
