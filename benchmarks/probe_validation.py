"""Does the probe know which micro-batch size trains best? On digits with wrong labels, by seed.

    python benchmarks/probe_validation.py --out results/probe

Plain training and every micro-batch size get the learning rate that is best on clean validation
images, on seeds that are used for nothing else. With it they are trained on the evaluation seeds
and probed early, in the middle and late. Steps are judged by other training examples (a fifth of
them mislabeled) and by clean validation images. The output compares the ranking of sizes by gain
with the one by test accuracy. Finished runs are cached in runs.jsonl, so that the same command
continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import microclip
from microclip.report.statistics import estimate
from microclip_lab.vision.digit_splits import CLASSES, Digits, Images, load

MOMENTS = {"early": 30, "middle": 200, "late": 370}  # steps
BATCHES = 8
JUDGES = ("training examples", "clean images")

B, STEPS, HIDDEN, WEIGHT_DECAY = 32, 400, 128, 0.01
SIZES = (None, 1, 2, 4, 8, 16)  # None: plain training, the same as b = B
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FIRST_RATES = (1e-3, 3e-3, 1e-2)
TUNING_SEEDS = (0, 1)


class Runs:
    """Training runs, cached in a file of JSON lines."""

    def __init__(self, path: Path, steps: int, noise: float) -> None:
        self.path, self.steps, self.noise = path, steps, noise
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {tuple(entry["run"]): entry for entry in map(json.loads, lines)}

    def __call__(self, b: int | None, rate: float, seed: int, probing: bool) -> dict[str, Any]:
        """Return the result of a run, training it unless it is cached."""
        key = (b, rate, seed, probing, self.steps, self.noise)
        if key not in self.known:
            found = json.dumps(
                {"run": key, **train(b, rate, seed, self.steps, self.noise, probing)}
            )
            with self.path.open("a") as file:
                file.write(found + "\n")
            self.known[key] = json.loads(found)
            print(f"{len(self.known)} runs", end="\r", flush=True)
        return self.known[key]

    def best_rate(self, b: int | None) -> float:
        """Return the learning rate with the best validation accuracy; the grid grows as needed."""
        scores: dict[float, float] = {}
        rates = list(FIRST_RATES)
        while rates:
            for rate in rates:
                tuned = (self(b, rate, seed, False)["validation"] for seed in TUNING_SEEDS)
                scores[rate] = statistics.fmean(tuned)
            best = max(sorted(scores), key=lambda rate: scores[rate])
            place = RATES.index(best)
            rates = [rate for rate in RATES[max(0, place - 1) : place + 2] if rate not in scores]
        return best


def train(
    b: int | None, rate: float, seed: int, steps: int, noise: float, probing: bool
) -> dict[str, Any]:
    """Train; return accuracies in percent, and what the probe found along the way."""
    digits, model = load(seed, noise), network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    clipper = microclip.Clipper(model, microbatch_size=b or B)
    pixels, labels = digits.training.pixels, digits.training.labels

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    generator = torch.Generator().manual_seed(1000 + seed)
    probes: list[dict[str, Any]] = []
    for step, rows in enumerate(batches(len(labels), seed, steps)):
        for moment, when in MOMENTS.items():
            if probing and step == when:
                found = probe(model, loss_fn, digits, generator, seed)
                probes += [
                    {"trajectory": b, "seed": seed, "moment": moment, **one} for one in found
                ]
        optimizer.zero_grad()
        clipper.backward(loss_fn, (pixels[rows], labels[rows]))
        optimizer.step()
        schedule.step()
    return {
        "validation": accuracy(model, digits.validation),
        "test": accuracy(model, digits.test),
        "probes": probes,
    }


def probe(
    model: nn.Module, loss_fn: Any, digits: Digits, generator: torch.Generator, seed: int
) -> list[dict[str, Any]]:
    pixels, labels = digits.training.pixels, digits.training.labels
    chosen = torch.randperm(len(labels), generator=generator)[: BATCHES * B]
    given = [(pixels[part], labels[part]) for part in chosen.split(B)]
    clean = [(digits.validation.pixels, digits.validation.labels)]
    found = []
    for judge, held_out in zip(JUDGES, (None, clean), strict=True):
        probed = microclip.probe(model, loss_fn, given, held_out=held_out, seed=seed)
        found.append(
            {
                "judge": judge,
                "best": probed.best and probed.best.size,
                "helps": bool(probed.best and probed.best.helps),
                "gains": {str(row.size): row.gain for row in probed.rows},
            }
        )
    return found


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def batches(examples: int, seed: int, steps: int) -> Tensor:
    """Return the rows of each step: shuffled epochs of complete batches."""
    generator = torch.Generator().manual_seed(seed)
    per_epoch = examples // B
    epochs = [
        torch.randperm(examples, generator=generator)[: per_epoch * B]
        for _ in range(-(-steps // per_epoch))
    ]
    return torch.cat(epochs).view(-1, B)[:steps]


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    hits: Tensor = model(images.pixels).argmax(1) == images.labels
    return 100 * hits.double().mean().item()


def agreement(gains: dict[int, float], accuracies: dict[int, float]) -> float:
    """Return Kendall's tau of two rankings of the sizes."""
    sizes = [b for b in gains if b in accuracies and not math.isnan(gains[b])]
    signs = [
        math.copysign(1, (gains[a] - gains[b]) * (accuracies[a] - accuracies[b]))
        for i, a in enumerate(sizes)
        for b in sizes[:i]
    ]
    return statistics.fmean(signs) if signs else math.nan


def report(known: list[dict], accuracies: dict[int, float]) -> None:
    sizes = sorted(accuracies)
    print("\n| weights of | moment | judged by | best, by seed | helps | median gain of b = "
          + ", ".join(map(str, sizes)) + " | tau, all b | tau, b >= 2 |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting in sorted({e["trajectory"] for e in known}, key=lambda s: s or 0):
        for judge in JUDGES:
            for moment in MOMENTS:
                here = [
                    e for e in known
                    if (e["trajectory"], e["moment"], e["judge"]) == (setting, moment, judge)
                ]  # fmt: skip
                if not here:  # of fewer steps
                    continue
                gains = {b: statistics.median(gain(e, b) for e in here) for b in sizes}
                taus = [agreement({b: gain(e, b) for b in sizes}, accuracies) for e in here]
                rest = {b: a for b, a in accuracies.items() if b >= 2}
                others = [agreement({b: gain(e, b) for b in rest}, rest) for e in here]
                name = "plain" if setting is None else f"b = {setting}"
                bests = " ".join(str(e["best"] or "-") for e in here)
                helps = f"{sum(e['helps'] for e in here)} of {len(here)}"
                print(
                    f"| {name} | {moment} | {judge} | {bests} | {helps} | "
                    + ", ".join(f"{gains[b]:.2f}" for b in sizes)
                    + f" | {mean(taus)} | {mean(others)} |"
                )


def gain(entry: dict, b: int) -> float:
    value = entry["gains"][str(b)]
    return 1e3 if value == math.inf else value


def mean(values: list[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return "-"
    half = 2 * statistics.stdev(known) / math.sqrt(len(known))
    return f"{statistics.fmean(known):+.2f} +- {half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("probe-validation"))
    parser.add_argument("--noise", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(options.out / "runs.jsonl", options.steps, options.noise)
    seeds = range(len(TUNING_SEEDS), len(TUNING_SEEDS) + options.seeds)
    rates = {b: runs.best_rate(b) for b in SIZES}
    found = {b: [runs(b, rates[b], seed, True) for seed in seeds] for b in SIZES}

    test = {b: [result["test"] for result in found[b]] for b in SIZES}
    print(f"noise {options.noise}, {options.seeds} seeds: test accuracy, and difference from plain")
    for b in SIZES:
        gain = estimate([own - plain for own, plain in zip(test[b], test[None], strict=True)])
        against = f"{gain.mean:+.2f}" if b is not None else ""
        if b is not None and gain.low is not None:
            against += f" ({gain.low:+.2f} to {gain.high:+.2f})"
        name = "plain" if b is None else f"b = {b}"
        print(f"  {name:8} rate {rates[b]:g}: {statistics.fmean(test[b]):.2f}  {against}")
    accuracies = {b or B: statistics.fmean(test[b]) for b in SIZES}
    report([entry for results in found.values() for one in results for entry in one["probes"]],
           accuracies)  # fmt: skip


if __name__ == "__main__":
    main()
