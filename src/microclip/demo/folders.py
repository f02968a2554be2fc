"""The demo's runs as run folders, which the page is made of; `microclip report` reads them too.

Every run of the comparison has a folder with what it came to. Two of them are trained once more and
watched on the way: one plainly, one clipped with a ledger, so that the page can show which images
were held back. A folder is put in its place whole, and a watched one is kept for the next time.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import microclip
from microclip.demo.cache import RECIPE
from microclip.demo.config import TRAINING_IMAGES, DemoConfig, label
from microclip.demo.data import Digits, load, originals
from microclip.demo.plan import Finished, evaluation_runs
from microclip.demo.train import HIDDEN, SCHEDULE, WEIGHT_DECAY, Result, Run, accuracy, fit
from microclip.report import RunFolder

PICTURES = 120  # of the images with the highest scores; the page shows half of them
EVERY = 10  # steps between two looks
TEST, VALIDATION = "test accuracy, %", "validation accuracy, %"
LEARNT = "wrong labels learnt by heart, %"
LOSS = "training loss"


def write_folders(config: DemoConfig, finished: Finished, command: str) -> list[Path]:
    """Write a folder for each run of the comparison; return them, the watched ones first."""
    place = config.out / "runs"
    place.mkdir(exist_ok=True)
    first = config.evaluation_seeds[0]
    paths: dict[bool, list[Path]] = {True: [], False: []}
    for run in evaluation_runs(config, finished):
        path = place / _folder_name(run)
        watched = run.seed == first and run.setting in (None, config.watched)
        described = _described(run, config, command)
        if not (watched and _is_there(path, described)):
            _write(path, run, finished[run], described, watched)
        paths[watched].append(path)
    return paths[True] + paths[False]


def _write(path: Path, run: Run, result: Result, described: dict[str, Any], watched: bool) -> None:
    building = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    folder = RunFolder(building, **described)
    if watched:
        _watch(run, folder)
    ends = {
        VALIDATION: 100 * result.validation_accuracy,
        TEST: 100 * result.test_accuracy,
    }
    folder.log_all(run.steps, ends)
    if path.exists():
        if not (path / "run.json").exists():
            raise FileExistsError(
                f"{path} is in the way, and is not a run of the demo. Choose another folder: --out."
            )
        shutil.rmtree(path)
    building.rename(path)


def _watch(run: Run, folder: RunFolder) -> None:
    """Train a run once more, looking on."""
    digits = load(run.seed, run.noise)

    def look(step: int, model: nn.Module, loss: float) -> None:
        if step % EVERY == 0 or step == run.steps:
            seen = {LOSS: loss, VALIDATION: 100 * accuracy(model, digits.validation)}
            if digits.wrong.any():
                seen[LEARNT] = 100 * _learnt_by_heart(model, digits)
            folder.log_all(step, seen)

    if run.setting is None:
        fit(run, digits, look=look)
        return
    with microclip.Ledger(folder.ledger) as ledger:
        fit(run, digits, ledger, look)
    _describe_examples(folder, digits)


def _describe_examples(folder: RunFolder, digits: Digits) -> None:
    """Say of every training image how it was labelled; keep pictures of the suspicious ones."""
    found = microclip.draggers.score(folder.ledger)
    suspicious = {int(one) for one in found.top(PICTURES)["id"].to_pylist()}
    pixels, truth = originals()
    for image, given in zip(
        digits.training.places.tolist(), digits.training.labels.tolist(), strict=True
    ):
        # ink is dark and paper light, as on paper; 16 is the darkest
        picture = 1 - pixels[image].reshape(8, 8) / 16 if image in suspicious else None
        folder.example(image, image=picture, label=given, truth=int(truth[image]))


@torch.no_grad()
def _learnt_by_heart(model: nn.Module, digits: Digits) -> float:
    """Return the share of wrong labels that the network gives back as it was told them."""
    images = digits.training
    said = model(images.pixels[digits.wrong]).argmax(1)
    return float((said == images.labels[digits.wrong]).double().mean())


def _described(run: Run, config: DemoConfig, command: str) -> dict[str, Any]:
    wrong = round(run.noise * TRAINING_IMAGES)
    return {
        "name": f"{label(run.setting, run.batch_size)}, seed {run.seed}",
        "microbatch_size": run.setting,
        "seed": run.seed,
        "group": "digits with wrong labels",
        "settings": {
            "data": f"scikit-learn's digits, {wrong} of {TRAINING_IMAGES} labels wrong",
            "network": f"64-{HIDDEN}-{HIDDEN}-10",
            "optimizer": f"AdamW, weight decay {WEIGHT_DECAY:g}, {SCHEDULE}",
            "learning rate": run.learning_rate,
            "steps": run.steps,
            "batch size B": run.batch_size,
            "recipe": RECIPE,
        },
        "command": command,
        "headline": TEST,
    }


def _is_there(path: Path, described: dict[str, Any]) -> bool:
    """Say whether a watched run's folder is of this very run."""
    try:
        said = json.loads((path / "run.json").read_text(encoding="utf-8"))
        microclip.ledger.open_ledger(path / "ledger") if described["microbatch_size"] else None
    except (OSError, ValueError):
        return False
    return all(said.get(key) == json.loads(json.dumps(value)) for key, value in described.items())


def _folder_name(run: Run) -> str:
    setting = "plain" if run.setting is None else f"b{run.setting}"
    return f"{setting}-seed-{run.seed}"
