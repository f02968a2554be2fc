"""`microclip demo`: train on digits with wrong labels in three ways, and find those labels.

Plain training, micro-batch clipping, and `LossHistory`, which holds back what stays wrong. Uses the
library the way a user would: a `Clipper` in a training loop, a `Ledger`, `draggers.score`, and run
folders that are turned into a report.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from microclip.ledger import Ledger
    from microclip.report.blocks import Page
    from microclip.rules import Rule

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
TUNING_SEEDS = (100, 101)  # used for nothing else
TRAINING, VALIDATION = 900, 297  # of 1,797 images; the other 600 are for testing
BATCH_SIZE = 32
TEST = "test accuracy (%)"
MEMORIZED = "wrong labels memorized (%)"
PICTURES = 60  # of the most suspicious images
LOSS_HISTORY = "LossHistory"


@dataclass(frozen=True)
class DemoConfig:
    """Train on digits with wrong labels in three ways, and find the wrong labels.

    Replaces 20 % of the training labels of scikit-learn's digits with wrong ones and trains a small
    network on them: with plain training, with micro-batch clipping, and with LossHistory, a rule
    that holds back examples whose loss stays high. Each gets its own learning rate, tuned on
    validation images. Writes a page that compares them on clean test images and shows the training
    images most likely to be mislabeled. Takes about two minutes on two cores.

    More seeds for narrower intervals:  microclip demo --seeds 20

    Fewer wrong labels, another micro-batch size:  microclip demo --noise 0.05 --microbatch-size 8
    """

    out: Path = Path("demo-output")
    """Folder for the page and the runs; replaces those of an earlier demo."""
    seeds: int = 8
    """Number of seeds to train each way with; at least 2."""
    steps: int = 400
    """Optimizer steps per training run."""
    microbatch_size: int = 4
    """b, the number of images clipped together, out of 32 per step."""
    noise: float = 0.2
    """The fraction of training labels to make wrong."""

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"seeds must be 2 or more for an interval, but got {self.seeds}.")
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, but got {self.steps}.")
        if not 1 <= (b := self.microbatch_size) <= BATCH_SIZE:
            raise ValueError(f"microbatch_size must be between 1 and {BATCH_SIZE}, but got {b}.")
        if not 0 < self.noise < 1:
            raise ValueError(f"noise must be between 0 and 1, but got {self.noise}.")


@dataclass(frozen=True)
class Arm:
    """A way to train."""

    name: str
    microbatch_size: int | None = None

    def rule(self, steps: int) -> Rule:
        """Return a new rule for a run of this many steps."""
        from microclip.rules import LossHistory, MinNorm

        return LossHistory(steps) if self.name == LOSS_HISTORY else MinNorm()


PLAIN = Arm("plain")  # one micro-batch per step, which MinNorm leaves alone


def arms(config: DemoConfig) -> tuple[Arm, ...]:
    """Return what is compared, plain training first."""
    b = config.microbatch_size
    return PLAIN, Arm(f"b{b}", b), Arm(LOSS_HISTORY)


class Digits:
    """Scikit-learn's digits, split at random, with some of the training labels made wrong."""

    def __init__(self, seed: int, noise: float) -> None:
        import torch
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=generator)
        self.train, rest = order[:TRAINING], order[TRAINING:]
        self.validation, self.test = rest[:VALIDATION], rest[VALIDATION:]
        self.pixels = (pixels / 8 - 1).float()
        self.truth, self.labels = labels, labels.clone()
        chosen = torch.randperm(TRAINING, generator=generator)[: round(noise * TRAINING)]
        self.wrong = self.train[chosen]
        # a shift by 1 to 9 makes every other class equally likely
        shift = torch.randint(1, 10, (len(self.wrong),), generator=generator)
        self.labels[self.wrong] = (labels[self.wrong] + shift) % 10


@dataclass
class Trained:
    """A trained network and its data."""

    model: nn.Module
    digits: Digits

    def accuracy(self, rows: Tensor, labels: Tensor) -> float:
        """Return for what percentage of these images the network predicts the label."""
        import torch

        with torch.no_grad():
            predicted = self.model(self.digits.pixels[rows]).argmax(1)
        return 100 * float((predicted == labels[rows]).float().mean())

    @property
    def validation(self) -> float:
        """Accuracy on the clean images used to tune learning rates."""
        return self.accuracy(self.digits.validation, self.digits.truth)


def fit(
    config: DemoConfig, arm: Arm, rate: float, seed: int, ledger: Ledger | None = None
) -> Trained:
    """Train a network."""
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
    rule = arm.rule(config.steps)
    clipper = microclip.Clipper(model, arm.microbatch_size, rule=rule, ledger=ledger)
    order = torch.Generator().manual_seed(seed)

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        if ledger is not None:
            ledger.record_predictions(logits, batch[1])
        return F.cross_entropy(logits, batch[1], reduction="none")

    for step in range(config.steps):
        start = step % (TRAINING // BATCH_SIZE) * BATCH_SIZE
        if start == 0:  # a new epoch
            shuffled = digits.train[torch.randperm(TRAINING, generator=order)]
        rows = shuffled[start : start + BATCH_SIZE]
        optimizer.zero_grad()
        clipper.backward(loss_fn, (digits.pixels[rows], digits.labels[rows]), ids=rows)
        optimizer.step()
        schedule.step()
    return Trained(model, digits)


def tuned_rate(config: DemoConfig, arm: Arm) -> float:
    """Return the learning rate with the best validation accuracy, searching coarse to fine."""

    def score(rate: float) -> float:
        if rate not in tried:
            runs = [fit(config, arm, rate, seed).validation for seed in TUNING_SEEDS]
            tried[rate] = statistics.fmean(runs)
        return tried[rate]

    tried: dict[float, float] = {}
    best = max(RATES[1::2], key=score)
    place = RATES.index(best)
    return max(RATES[max(0, place - 1) : place + 2], key=score)


def run(config: DemoConfig) -> Path:
    """Train, compare and write the page; return its path."""
    import torch
    from rich.console import Console

    from microclip.report.write import write_page

    torch.set_num_threads(1)  # these networks are too small to use more
    console = Console()
    try:  # before training
        config.out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"--out must be a folder, new or old, but {config.out} is a file, or inside one. "
            "Choose another name."
        ) from error
    runs = config.out / "runs"
    if runs.exists():
        shutil.rmtree(runs)
    paths: list[Path] = []
    for arm in arms(config):
        with console.status(f"Tuning the learning rate, {arm.name}"):
            rate = tuned_rate(config, arm)
        console.print(f"{arm.name:12} learning rate {rate:g}", highlight=False)
        for seed in range(config.seeds):
            with console.status(f"Training {arm.name}, seed {seed} of {config.seeds}"):
                path = runs / f"{arm.name}-seed-{seed}"
                _record(config, path, arm, rate, seed)
                paths.append(path)
    path = config.out / "index.html"
    with console.status("Writing the page"):
        page = _page(config, paths)
        write_page(page, path)
    for sentence in page.verdict:
        console.print(sentence, highlight=False)
    console.print(f"\npage: {path.resolve()}", soft_wrap=True, highlight=False)
    return path


def _record(config: DemoConfig, path: Path, arm: Arm, rate: float, seed: int) -> None:
    """Train once and write the run folder; the first with LossHistory has a ledger and pictures."""
    import microclip
    from microclip.report import RunFolder
    from microclip.report.run_data import ids_to_describe

    wrong = round(config.noise * TRAINING)
    run = RunFolder(
        path,
        microbatch_size=arm.microbatch_size,
        seed=seed,
        command="microclip demo",
        headline=TEST,
        settings={
            "data": f"scikit-learn's digits, {wrong} of {TRAINING} training labels wrong",
            "optimizer": "AdamW, learning rate falling linearly to 0",
            "learning rate": rate,
            "steps": config.steps,
            "batch size B": BATCH_SIZE,
            "rule": "" if arm == PLAIN else type(arm.rule(config.steps)).__name__,
        },
    )
    if seed > 0 or arm.name != LOSS_HISTORY:
        trained = fit(config, arm, rate, seed)
    else:
        with microclip.Ledger(run.ledger) as ledger:
            trained = fit(config, arm, rate, seed, ledger)
        shown = ids_to_describe(run.ledger, PICTURES)
        for row in trained.digits.train.tolist():
            # dark ink on light paper
            picture = (1 - trained.digits.pixels[row].view(8, 8)) / 2 if row in shown else None
            label, truth = int(trained.digits.labels[row]), int(trained.digits.truth[row])
            run.example(row, image=picture, label=label, truth=truth)
    digits = trained.digits
    accuracy = trained.accuracy(digits.test, digits.truth)
    memorized = trained.accuracy(digits.wrong, digits.labels)
    run.log_all(config.steps, {TEST: accuracy, MEMORIZED: memorized})


def _page(config: DemoConfig, paths: list[Path]) -> Page:
    """Return the usual report, with the wrong labels and the comparison on top."""
    from microclip.report.sections import truth_sentences
    from microclip.report.write import assemble, read_findings

    findings = read_findings(paths, PICTURES)
    *compared, held_back = findings.summary[:3]
    setup = (
        f"{round(config.noise * TRAINING)} of {TRAINING} training images have a wrong label. The "
        "same network was trained plainly, with micro-batch clipping (b = "
        f"{config.microbatch_size}), and with LossHistory, which holds back examples whose loss "
        f"stays high; each with its own tuned learning rate and {config.seeds} seeds. The test "
        "images have correct labels."
    )
    found = " ".join(truth_sentences(findings.data[0], PICTURES))
    found += " They are based on losses: a ledger of plain training would do about as well."
    page = assemble(findings, "Digits with wrong labels")
    first = ("suspects", "comparison", "gallery", "held")
    sections = sorted(page.sections, key=lambda one: _place(one.key, first))
    return replace(page, verdict=[setup, *compared, held_back, found], sections=sections)


def _place(key: str, first: tuple[str, ...]) -> int:
    """Return where a section goes: those whose key starts with one of `first`, then the others."""
    return next((place for place, start in enumerate(first) if key.startswith(start)), len(first))
