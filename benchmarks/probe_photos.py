"""Does the probe know, on photographs? CIFAR-10 with the labels of people, seed by seed.

    python benchmarks/probe_photos.py --out results/photos       resumes where it was interrupted

A small CNN on 4,000 images of which 17 % have a wrong label. Every micro-batch size gets the
learning rate that was best for it on clean validation images (two seeds, used for nothing else);
then five seeds are trained with it, and probed on the way: as `probe_validation.py` does on digits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import microclip
from microclip.report.statistics import estimate

from dragger_data import Noisy, cifar10n
from dragger_training import small_cnn
from probe_validation import BATCHES, JUDGES, MOMENTS, report

B, STEPS, SIZE, VALIDATION = 32, 400, 4000, 500
SIZES = (None, 1, 2, 4, 8, 16)  # None: plain training
RATES = (0.0003, 0.001, 0.003, 0.01)
TUNING_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)

Task = tuple[int | None, float, int]  # size, learning rate, seed


def carry_out(task: Task, probing: bool) -> dict[str, Any]:
    """Train; return accuracies, and what the probe said on the way."""
    setting, rate, seed = task
    torch.set_num_threads(1)
    data = cifar10n(seed, SIZE)
    torch.manual_seed(seed)
    model = small_cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    clipper = microclip.Clipper(model, setting or B)
    draw = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.randperm(SIZE, generator=draw) for _ in range(-(-STEPS * B // SIZE))])

    def loss_fn(batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    probes = []
    for step, chosen in enumerate(rows[: STEPS * B].view(STEPS, B)):
        for moment, when in MOMENTS.items():
            if probing and step == when:
                probes += probe(model, loss_fn, data, seed, moment)
        optimizer.zero_grad()
        clipper.backward(loss_fn, (data.images[chosen], data.labels[chosen]))
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        hits = (model(data.test_images).argmax(1) == data.test_labels).double() * 100
    return {
        "task": task,
        "probing": probing,
        "validation": hits[:VALIDATION].mean().item(),
        "test": hits[VALIDATION:].mean().item(),
        "probes": [{"trajectory": setting, **found} for found in probes],
    }


def probe(model: Any, loss_fn: Any, data: Noisy, seed: int, moment: str) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1000 + seed)
    chosen = torch.randperm(SIZE, generator=draw)[: BATCHES * B]
    given = [(data.images[part], data.labels[part]) for part in chosen.split(B)]
    clean = [(data.test_images[:VALIDATION], data.test_labels[:VALIDATION])]
    found = []
    for judge, held_out in zip(JUDGES, (None, clean), strict=True):
        probed = microclip.probe(model, loss_fn, given, held_out=held_out, seed=seed)
        best = probed.best
        found.append(
            {
                "seed": seed,
                "moment": moment,
                "judge": judge,
                "best": best and best.size,
                "helps": bool(best and best.helps),
                "gains": {str(row.size): row.gain for row in probed.rows},
            }
        )
    return found


def all_of(tasks: list[Task], probing: bool, path: Path, pool: Any) -> dict[Task, dict[str, Any]]:
    """Return what came of all tasks, those that are on file included."""
    lines = path.read_text().splitlines() if path.exists() else []
    known = {tuple(e["task"]): e for e in map(json.loads, lines) if e["probing"] == probing}
    missing = [task for task in tasks if task not in known]
    for found in pool.imap_unordered(partial(carry_out, probing=probing), missing):
        with path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        known[found["task"]] = json.loads(json.dumps(found))
        print(f"{len(known)} of {len(tasks)}", end="\r", flush=True)
    return {task: known[task] for task in tasks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("probe-photos"))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "runs.jsonl"
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        tuning = [(b, rate, seed) for b in SIZES for rate in RATES for seed in TUNING_SEEDS]
        tuned = all_of(tuning, False, path, pool)
        rates = {
            b: max(
                RATES, key=lambda rate: sum(tuned[b, rate, s]["validation"] for s in TUNING_SEEDS)
            )
            for b in SIZES
        }
        tasks = [(b, rates[b], seed) for b in SIZES for seed in SEEDS]
        found = all_of(tasks, True, path, pool)

    test = {b: [found[b, rates[b], seed]["test"] for seed in SEEDS] for b in SIZES}
    print(f"\ntest accuracy over {len(SEEDS)} seeds, and against plain")
    for b in SIZES:
        gain = estimate([own - plain for own, plain in zip(test[b], test[None], strict=True)])
        against = "" if b is None else f"{gain.mean:+.2f} ({gain.low:+.2f} to {gain.high:+.2f})"
        name = "plain" if b is None else f"b = {b}"
        print(f"  {name:8} rate {rates[b]:g}: {statistics.fmean(test[b]):.2f}  {against}")
    accuracies = {b: statistics.fmean(test[b]) for b in SIZES if b is not None}
    report([entry for e in found.values() for entry in e["probes"]], accuracies)


if __name__ == "__main__":
    main()
