"""One task and seed of the benchmark of find_issues: train once, let everybody look for wrong
labels, and retrain without what was found.

Tasks, networks and learning rates are those of `microclip_lab.dirty_data`, which tuned the rates on
noisy validation data. Knows nothing about tables.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

import microclip
from microclip_lab.dirty_data.catalog import task_named
from microclip_lab.dirty_data.rivals import mean_of, without
from microclip_lab.dirty_data.speech_tasks import speech_data
from microclip_lab.dirty_data.task import Data, Part, Task, outputs_of
from microclip_lab.dirty_data.training import Backward, Batch, Setup, Start, train
from microclip_lab.dirty_data.vision_tasks import digits_data

Scores = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Record = dict[str, Any]

FOLDS = 5
BINS = 10  # of the calibration error
PREDICTIONS, LOSSES = "microclip, predictions", "microclip, losses only"
DRAGGERS, LAST, WHOLE = "microclip.draggers", "loss in the last epoch", "mean loss of the run"
EL2N, CLEANLAB = "EL2N, 1/4 of the epochs", "cleanlab, 5 folds"

TITLES = {
    "digits-10": "Digits, 10 % wrong",
    "digits-20": "Digits, 20 % wrong",
    "cifar-random1": "CIFAR-10N random1",
    "cifar-worse": "CIFAR-10N worse",
    "vader-rater": "VADER, one rater",
    "vader-flips": "VADER, one rater and 25 % flips",
    "speech-5": "Speech, 5 % wrong transcripts",
    "digits-clean": "Digits, no wrong labels",
    "cifar-clean": "CIFAR-10, true labels",
}
RATES = {  # of plain training, tuned by `benchmarks/dirty_data.py`
    "digits-10": 5e-4,
    "digits-20": 5e-4,
    "cifar-random1": 2.5e-4,
    "cifar-worse": 1.25e-4,
    "vader-rater": 5e-4,
    "vader-flips": 2.5e-4,
    "speech-5": 4e-3,
    "digits-clean": 1e-3,
    "cifar-clean": 5e-4,
}


def task_of(name: str) -> Task:
    """Return one of the lab's tasks, or a variant with fewer errors."""
    if name == "digits-10":
        fewer = partial(digits_data, noise=0.1)
        return replace(task_named("digits-20"), name=name, noise=0.1, make_data=fewer)
    if name == "speech-5":
        fewer = partial(speech_data, noise=0.05)
        return replace(task_named("speech-10"), name=name, noise=0.05, make_data=fewer)
    return task_named(name)


class Trial:
    """A task and a seed, at its tuned rate times a factor."""

    def __init__(self, name: str, seed: int, factor: float = 1.0) -> None:
        self.task, self.seed, self.rate = task_of(name), seed, factor * RATES[name]
        self.data = self.task.make_data(seed)
        self.wrong = self.data.wrong.numpy()
        self.classifies = self.task.kind == "classification"

    def setup(self, data: Data | None = None) -> Setup:
        """Return a fresh network, and what it is trained on."""
        data = data or self.data
        return Setup(self.task, data, self.task.model(self.seed), self.seed, self.rate, self.rate)

    def result(self, *, whole: bool = True) -> Record:
        """Train, search and measure; `whole`: with rivals that train, and retraining."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            watched, methods, scores = self._watch(Path(folder))
        flagged = {"flagged": methods[PREDICTIONS if self.classifies else LOSSES].pop("rows")}
        if self.classifies:
            methods[LOSSES].pop("rows")
            if whole:
                methods[CLEANLAB] = self._cleanlab()
                flagged["flagged by cleanlab"] = methods[CLEANLAB].pop("rows")
        for name, values in scores.items():
            methods[name] = ranking(values, self.wrong)
        points = {"plain": watched}
        if whole:
            chosen = {name: np.isin(np.arange(len(self.wrong)), r) for name, r in flagged.items()}
            chosen["truly wrong"] = self.wrong
            for name, rows in chosen.items():
                points[f"without the {name}"] = self._points(
                    partial(without, torch.from_numpy(rows))
                )
        return {"examples": len(self.wrong), "wrong": int(self.wrong.sum()), "methods": methods,
                "points": points}  # fmt: skip

    def _watch(self, folder: Path) -> tuple[float, dict[str, Record], dict[str, Scores]]:
        """Train plainly once, on record; return its test points and what is found in it."""
        setup, count = self.setup(), len(self.wrong)
        last, total, visits, early = np.zeros(count), np.zeros(count), np.zeros(count), []
        options: dict[str, Any] = {"flush_every": 10**6, "flush_seconds": None}
        with (
            microclip.Ledger(folder / "predictions", **options) as first,
            microclip.Ledger(folder / "losses", **options) as second,
        ):

            def start(setup: Setup) -> Backward:
                def backward(rows: Tensor, batch: Batch) -> None:
                    outputs = setup.model(batch[0])
                    losses = self.task.losses(outputs, batch[1])
                    torch.autograd.backward(losses.mean())
                    if self.classifies:
                        first.record(rows, losses, logits=outputs, labels=batch[1])
                    second.record(rows, losses)
                    last[rows] = losses.detach()
                    total[rows] += last[rows]
                    visits[rows] += 1

                return backward

            def look(epoch: int) -> None:
                if self.classifies and epoch == max(1, self.task.epochs // 4):
                    inputs, labels = self.data.training.inputs, self.data.training.targets
                    errors = F.softmax(outputs_of(setup.model, inputs), 1)
                    errors[torch.arange(count), labels] -= 1
                    early.append(errors.norm(dim=1).double().numpy())

            train(setup, start, look)
        scores = {LAST: last, WHOLE: total / np.maximum(visits, 1)}
        if early:
            scores[EL2N] = early[0]
        table = microclip.draggers.score(folder / "losses").table
        scores[DRAGGERS] = np.zeros(count)
        scores[DRAGGERS][table["id"].to_numpy()] = np.nan_to_num(table["score"].to_numpy())
        methods = {LOSSES: self._issues(folder / "losses")}
        if self.classifies:
            methods = {PREDICTIONS: self._issues(folder / "predictions")} | methods
        return self._tested(setup), methods, scores

    def _issues(self, ledger: Path) -> Record:
        found = microclip.find_issues(ledger)
        ids = found.table["id"].to_numpy()
        scores, probability = np.zeros(len(self.wrong)), np.zeros(len(self.wrong))
        scores[ids] = -np.arange(len(ids), dtype=np.float64)
        probability[ids] = np.nan_to_num(found.table["probability"].to_numpy())
        rows = np.array(found.ids(), dtype=np.int64)
        return ranking(scores, self.wrong) | cut(
            rows, probability, found.wrong, self.wrong, found.interval
        )

    def _cleanlab(self) -> Record:
        """Return what confident learning finds by networks that did not see the example."""
        from cleanlab.count import num_label_issues
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_label_quality_scores

        part = self.data.training
        draw = np.random.default_rng((self.seed, 21))
        folds = torch.from_numpy(draw.permutation(len(part)) % FOLDS)
        answers: list[tuple[Tensor, Tensor]] = []
        for fold in range(FOLDS):
            kept = folds != fold
            fewer = Part(part.inputs[kept], part.targets[kept])
            setup = self.setup(replace(self.data, training=fewer, wrong=self.data.wrong[kept]))
            train(setup, partial(mean_of, self.task.losses))
            outputs = outputs_of(setup.model, part.inputs[~kept])
            answers.append((~kept, F.softmax(outputs.double(), 1)))
        probabilities = np.zeros((len(part), answers[0][1].shape[1]))
        for rows, answer in answers:
            probabilities[rows.numpy()] = answer.numpy()
        labels = part.targets.numpy()
        quality = get_label_quality_scores(labels, probabilities, method="self_confidence")
        flagged = np.flatnonzero(find_label_issues(labels, probabilities, n_jobs=1))
        estimated = int(num_label_issues(labels, probabilities))
        return ranking(1 - quality, self.wrong) | cut(flagged, 1 - quality, estimated, self.wrong)

    def _points(self, start: Start) -> float:
        setup = self.setup()
        train(setup, start)
        return self._tested(setup)

    def _tested(self, setup: Setup) -> float:
        test = self.data.test
        return self.task.test(outputs_of(setup.model, test.inputs), test.targets)


def ranking(scores: Scores, wrong: Flags) -> Record:
    """Return how well scores tell wrong from right; nothing if none are wrong."""
    if not wrong.any():
        return {}
    first = np.argsort(-scores, kind="stable")[: wrong.sum()]
    return {
        "auroc": float(roc_auc_score(wrong, scores)),
        "precision at the true number": float(wrong[first].mean()),
    }


def cut(
    flagged: npt.NDArray[np.int64],
    probability: Scores,
    estimated: int,
    wrong: Flags,
    interval: tuple[int, int] | None = None,
) -> Record:
    """Score the flags, the probabilities and the estimated count."""
    found: Record = {
        "rows": flagged,
        "flagged": len(flagged),
        "estimated": estimated,
        "calibration": calibration_error(probability, wrong),
    }
    if len(flagged) and wrong.any():
        found["precision"] = float(wrong[flagged].mean())
    if wrong.any():
        found["recall"] = float(wrong[flagged].sum() / wrong.sum())
    if interval is not None:
        found["interval"] = list(interval)
        found["covers"] = bool(interval[0] <= wrong.sum() <= interval[1])
    return found


def calibration_error(probability: Scores, wrong: Flags) -> float:
    """Return the expected calibration error over bins of the same width."""
    places = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
    return float(
        sum(
            abs(probability[places == k].mean() - wrong[places == k].mean()) * (places == k).mean()
            for k in np.unique(places)
        )
    )


def expect_cleanlab() -> None:
    """Stop, with what to do, if cleanlab is missing."""
    try:
        import cleanlab  # noqa: F401
    except ImportError:
        sys.exit('cleanlab is not installed: pip install -e ".[bench]"')
