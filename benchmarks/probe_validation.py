"""Does the probe know which micro-batch size trains best? On the demo's digits, seed by seed.

    python benchmarks/probe_validation.py --out results/probe    goes on where it was interrupted

First the demo's sweep: every setting with its own learning rate, test accuracy after training.
Then every setting is trained once more per seed and probed along the way, early, in the middle
and late: on the plain run's trajectory and on each size's own. Steps are judged twice, by other
training examples (a fifth of them mislabelled) and by clean validation images. At the end: which
size came first where, and how the ranking of sizes by gain agrees with that by accuracy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
from microclip.demo.cache import Cache
from microclip.demo.config import DemoConfig, Setting
from microclip.demo.experiment import carry_out_all
from microclip.demo.plan import chosen_rate
from microclip.demo.summary import summarise
from microclip.demo.train import WEIGHT_DECAY, Run, batches, load, network
from torch.nn import functional as F

import microclip

MOMENTS = {"early": 30, "middle": 200, "late": 370}
BATCHES = 8
JUDGES = ("training examples", "clean images")


def trajectory(config: DemoConfig, setting: Setting, rate: float, seed: int) -> list[dict]:
    """Train as the demo does, and probe at each moment."""
    run = Run(setting, rate, seed, config.steps, config.batch_size, config.noise)
    digits, model = load(seed, config.noise), network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, run.steps)
    pixels, labels = digits.training.pixels, digits.training.labels

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    clipper = microclip.Clipper(model, microbatch_size=setting or config.batch_size)
    generator = torch.Generator().manual_seed(1000 + seed)
    found = []
    for step, rows in enumerate(batches(len(labels), run)):
        for name, when in MOMENTS.items():
            if step != when:
                continue
            chosen = torch.randperm(len(labels), generator=generator)
            parts = chosen[: BATCHES * config.batch_size].split(config.batch_size)
            given = [(pixels[part], labels[part]) for part in parts]
            clean = [(digits.validation.pixels, digits.validation.labels)]
            for judge, held_out in zip(JUDGES, (None, clean), strict=True):
                probed = microclip.probe(model, loss_fn, given, held_out=held_out, seed=seed)
                best = probed.best
                found.append(
                    {
                        "trajectory": setting,
                        "seed": seed,
                        "moment": name,
                        "judge": judge,
                        "best": best and best.size,
                        "helps": bool(best and best.helps),
                        "gains": {row.size: row.gain for row in probed.rows},
                        "effs": {row.size: row.efficiency for row in probed.rows},
                        "spreads": {row.size: row.bound_spread for row in probed.rows},
                    }
                )
        optimizer.zero_grad()
        clipper.backward(loss_fn, (pixels[rows], labels[rows]))
        optimizer.step()
        schedule.step()
    return found


def collect(config: DemoConfig, rates: dict[Setting, float], path: Path, seeds: int) -> list[dict]:
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(entry["trajectory"], entry["seed"]) for entry in known}
    for seed in list(config.evaluation_seeds)[:seeds]:
        for setting, rate in rates.items():
            if setting == config.batch_size or (setting, seed) in done:
                continue
            found = trajectory(config, setting, rate, seed)
            with path.open("a") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in found)
            known += [json.loads(json.dumps(entry)) for entry in found]
    return known


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
    print("\n| weights of | moment | judged by | first, seed by seed | helps | median gain of b = "
          + ", ".join(map(str, sizes)) + " | tau, all b | tau, b >= 2 |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting in sorted({e["trajectory"] for e in known}, key=lambda s: s or 0):
        for judge in JUDGES:
            for moment in MOMENTS:
                here = [
                    e for e in known
                    if (e["trajectory"], e["moment"], e["judge"]) == (setting, moment, judge)
                ]  # fmt: skip
                gains = {b: statistics.median(gain(e, b) for e in here) for b in sizes}
                taus = [agreement({b: gain(e, b) for b in sizes}, accuracies) for e in here]
                rest = {b: a for b, a in accuracies.items() if b >= 2}
                others = [agreement({b: gain(e, b) for b in rest}, rest) for e in here]
                name = "plain" if setting is None else f"b = {setting}"
                firsts = " ".join(str(e["best"] or "-") for e in here)
                helps = f"{sum(e['helps'] for e in here)} of {len(here)}"
                print(
                    f"| {name} | {moment} | {judge} | {firsts} | {helps} | "
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
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    config = DemoConfig(
        out=options.out, noise=options.noise, seeds=options.seeds, workers=options.workers
    )
    finished = carry_out_all(config, Cache(options.out / "runs.jsonl"), lambda status: None)
    summary = summarise(config, finished)
    print(f"noise {options.noise}, {options.seeds} seeds: test accuracy, against plain")
    for row in summary.rows:
        d = row.difference
        against = "" if d is None else f"{d.mean:+.2f} ({d.low:+.2f} to {d.high:+.2f})"
        print(f"  {row.name:16} {row.learning_rate:g} {row.accuracy.mean:.2f} {against}")
    rates = {setting: chosen_rate(config, setting, finished) for setting in config.settings}
    known = collect(config, rates, options.out / "probes.jsonl", options.seeds)
    accuracies = {row.setting: row.accuracy.mean for row in summary.rows if row.setting}
    report(known, accuracies)


if __name__ == "__main__":
    main()
