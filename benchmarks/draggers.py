"""How well wrong labels are found, against other ways to find them, and what finding them gives.

    python benchmarks/draggers.py --data digits --seeds 5
    python benchmarks/draggers.py --data cifar --seeds 3

Every run is kept in a file of JSON lines as soon as it is finished; started again, the benchmark
resumes from there. Ends with tables in markdown. Clipped runs use the real Clipper and Ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

import microclip
from microclip.report.statistics import Estimate, estimate

from dragger_data import CACHE, Noisy, cifar10n, digits
from dragger_rivals import FOLDS, Watcher, cleanlab, el2n, grand
from dragger_training import CIFAR, DIGITS, Recipe, accuracy, train

NETWORKS = 3  # whose EL2N and GraNd are averaged
OURS = tuple(name for name in microclip.draggers.METHODS if name != "auto")


@dataclass(frozen=True)
class Trial:
    """One seed of one kind of data."""

    name: str
    seed: int
    recipe: Recipe
    data: Noisy
    out: Path

    @property
    def young(self) -> int:
        """The epoch at which networks are not yet done: a quarter of them."""
        return max(1, self.recipe.epochs // 4)

    @property
    def ledgers(self) -> tuple[Path, Path]:
        """Where the clipped run is on record: with a loss per example, and without."""
        folder, name = self.out / "ledgers", f"{self.name}-{self.seed}"
        return folder / name, folder / f"{name}-means"


Result = dict[str, Any]  # scores by name, each a list; "accuracy"; "seconds"


def plain(trial: Trial, _: dict[str, Result]) -> Result:
    watcher, found = Watcher(trial.data), {}
    half, whole = trial.recipe.epochs // 2, trial.recipe.epochs

    def visit(epoch: int, model: torch.nn.Module) -> None:
        for moment, name in ((trial.young, "1/4"), (half, "1/2"), (whole, "end")):
            if epoch == moment:
                found[f"EL2N at {name}"] = el2n(model, trial.data)
                found[f"GraNd at {name}"] = grand(model, trial.data)

    model = train(trial.recipe, trial.data, trial.seed, watch=watcher, visit=visit)
    found["mean loss, plain"], found["forgetting"] = watcher.mean_loss, watcher.forgetting
    return {"scores": _lists(found), "accuracy": accuracy(model, trial.data)}


def clipped(trial: Trial, _: dict[str, Result]) -> Result:
    """A second ledger has only the mean loss of every micro-batch on record."""
    whole, means = trial.ledgers
    for folder in (whole, means):
        shutil.rmtree(folder, ignore_errors=True)
    with microclip.Ledger(whole) as first, microclip.Ledger(means, examples=False) as second:
        model = train(trial.recipe, trial.data, trial.seed, ledger=first, second=second)
    return {"accuracy": accuracy(model, trial.data)}


def ours(trial: Trial) -> dict[str, list[float]]:
    """Our scores, read from the ledgers whenever they are asked for."""
    whole, means = trial.ledgers
    scores = judged(whole, len(trial.data), OURS)
    from_means = judged(means, len(trial.data), ("loss",))
    return scores | {"ours: loss, from means": from_means["ours: loss"]}


def judged(folder: Path, examples: int, methods: tuple[str, ...]) -> dict[str, list[float]]:
    found = {}
    for method in methods:
        table = microclip.draggers.score(folder, method).table
        scores = torch.zeros(examples, dtype=torch.float64)
        scores[torch.tensor(table["id"].to_pylist())] = torch.tensor(
            table["score"].to_pylist(), dtype=torch.float64
        )
        found[f"ours: {method}"] = scores
    return _lists(found)


def several(trial: Trial, _: dict[str, Result]) -> Result:
    """EL2N and GraNd as their authors use them: averaged over networks, early in training."""
    errors, norms = torch.zeros(len(trial.data)), torch.zeros(len(trial.data))
    for number in range(NETWORKS):
        seed = 10_000 + NETWORKS * trial.seed + number
        model = train(trial.recipe, trial.data, seed, epochs=trial.young)
        errors += el2n(model, trial.data) / NETWORKS
        norms += grand(model, trial.data) / NETWORKS
    return {
        "scores": _lists(
            {f"EL2N, {NETWORKS} networks": errors, f"GraNd, {NETWORKS} networks": norms}
        )
    }


def crossed(trial: Trial, _: dict[str, Result]) -> Result:
    return {"scores": _lists({"cleanlab": cleanlab(trial.recipe, trial.data, trial.seed)})}


def retrained(choose: Callable[[Trial, dict[str, Result]], Tensor]) -> Any:
    """Train plainly on what is left when some are taken out, as many as are truly wrong."""

    def run(trial: Trial, before: dict[str, Result]) -> Result:
        kept = torch.ones(len(trial.data), dtype=torch.bool)
        kept[choose(trial, before)] = False
        rows = kept.nonzero().squeeze(1)
        model = train(trial.recipe, trial.data.only(rows), trial.seed)
        wrong = trial.data.wrong[rows].double().mean().item()
        return {"accuracy": accuracy(model, trial.data), "still wrong": 100 * wrong}

    return run


def _worst(name: str, run: str) -> Callable[[Trial, dict[str, Result]], Tensor]:
    def choose(trial: Trial, before: dict[str, Result]) -> Tensor:
        scores = torch.tensor(before[run]["scores"][name])
        return scores.argsort(descending=True)[: int(trial.data.wrong.sum())]

    return choose


def _any(trial: Trial, _: dict[str, Result]) -> Tensor:
    draw = torch.Generator().manual_seed(trial.seed)
    return torch.randperm(len(trial.data), generator=draw)[: int(trial.data.wrong.sum())]


def _truly_wrong(trial: Trial, _: dict[str, Result]) -> Tensor:
    return trial.data.wrong.nonzero().squeeze(1)


def _lists(scores: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in scores.items()}


RUNS: dict[str, Callable[[Trial, dict[str, Result]], Result]] = {
    "plain": plain,
    "clipped": clipped,
    "several": several,
    "crossed": crossed,
    "without found": retrained(_worst("ours: loss", "clipped")),
    "without found by cleanlab": retrained(_worst("cleanlab", "crossed")),
    "without any": retrained(_any),
    "without wrong": retrained(_truly_wrong),
}

# What each costs beyond the one training run that one does anyway, in plain runs of the same
# length: a pass over the data for EL2N is a third of an epoch, for GraNd about one.
COSTS: dict[str, Callable[[Recipe], float]] = {
    **{f"ours: {name}": lambda _: 0.0 for name in OURS},
    "ours: loss, from means": lambda _: 0.0,
    "mean loss, plain": lambda _: 0.0,
    "forgetting": lambda _: 0.0,
    **{f"EL2N at {moment}": lambda r: 1 / 3 / r.epochs for moment in ("1/4", "1/2", "end")},
    **{f"GraNd at {moment}": lambda r: 1 / r.epochs for moment in ("1/4", "1/2", "end")},
    f"EL2N, {NETWORKS} networks": lambda r: NETWORKS * ((r.epochs // 4) + 1 / 3) / r.epochs,
    f"GraNd, {NETWORKS} networks": lambda r: NETWORKS * ((r.epochs // 4) + 1) / r.epochs,
    "cleanlab": lambda _: FOLDS * (FOLDS - 1) / FOLDS,
}


class Kept:
    """Finished runs, in a file of JSON lines; a line that was cut off is passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            self.results[entry["key"]] = entry["result"]

    def add(self, key: str, result: Result) -> None:
        self.results[key] = result
        # after a line that was cut off, begin a new one instead of being lost with it
        whole = not self.path.exists() or self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            line = json.dumps({"key": key, "result": result})
            file.write(f"{line}\n" if whole else f"\n{line}\n")


def carry_out(kept: Kept, trial: Trial, recipe_key: str) -> dict[str, Result]:
    """Do the runs of a seed that are not there yet; return all of them."""
    results: dict[str, Result] = {}
    for name, run in RUNS.items():
        key = f"{recipe_key} | seed {trial.seed} | {name}"
        gone = name == "clipped" and not all(folder.exists() for folder in trial.ledgers)
        if key not in kept.results or gone:
            start = time.monotonic()
            result = run(trial, results)
            result["seconds"] = time.monotonic() - start
            kept.add(key, result)
            print(f"{key}: {result['seconds']:.0f} s", flush=True)
        results[name] = kept.results[key]
        if name == "clipped":
            results[name] = results[name] | {"scores": ours(trial)}
    return results


def detection(trials: list[Trial], results: list[dict[str, Result]]) -> str:
    """The table of how well each score tells wrong labels from right ones."""
    seeds = [
        {name: s for run in result.values() for name, s in run.get("scores", {}).items()}
        for result in results
    ]
    lines = [
        "| score | AUROC | average precision | recall at the true rate | extra cost, runs |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = []
    for name, cost in COSTS.items():
        measured = [
            measures(trial.data.wrong, torch.tensor(scores[name]))
            for trial, scores in zip(trials, seeds, strict=True)
        ]
        columns = [estimate(list(column)) for column in zip(*measured, strict=True)]
        cells = " | ".join(interval(column) for column in columns)
        extra = cost(trials[0].recipe)
        rows.append((columns[0].mean, f"| {name} | {cells} | {extra:.2f} |"))
    return "\n".join(lines + [line for _, line in sorted(rows, reverse=True)])


def measures(wrong: Tensor, scores: Tensor) -> tuple[float, float, float]:
    """Return AUROC, average precision, and recall among as many as are truly wrong."""
    truth, found = wrong.numpy(), scores.nan_to_num(nan=-1e9).numpy()
    first = scores.argsort(descending=True)[: int(wrong.sum())]
    return (
        float(roc_auc_score(truth, found)),
        float(average_precision_score(truth, found)),
        wrong[first].double().mean().item(),
    )


def differences(trials: list[Trial], results: list[dict[str, Result]]) -> str:
    """Say by how much the default score is above others, seed by seed."""
    lines = []
    ours = [r["clipped"]["scores"]["ours: loss"] for r in results]
    for name in COSTS:
        if name == "ours: loss":
            continue
        theirs = [
            next(run["scores"][name] for run in r.values() if name in run.get("scores", {}))
            for r in results
        ]

        def auroc(scores: list[list[float]]) -> list[float]:
            return [
                measures(t.data.wrong, torch.tensor(s))[0]
                for t, s in zip(trials, scores, strict=True)
            ]

        lines.append(f"{name}: {interval(paired(auroc(ours), auroc(theirs)), sign='+')}")
    return "AUROC of `ours: loss` minus that of\n" + "\n".join(lines)


def retraining(results: list[dict[str, Result]]) -> str:
    """The table of what training without the found ones gives."""
    lines = [
        "| trained on | labels still wrong, % | test accuracy, % | against plain, points |",
        "| --- | --- | --- | --- |",
    ]
    baseline = [result["plain"]["accuracy"] for result in results]
    for name in ("plain", "clipped", *(run for run in RUNS if run.startswith("without"))):
        accuracies = [result[name]["accuracy"] for result in results]
        left = [result[name].get("still wrong") for result in results]
        share = "all" if None in left else f"{sum(left) / len(left):.1f}"
        against = "" if name == "plain" else interval(paired(accuracies, baseline), 2, "+")
        lines.append(f"| {name} | {share} | {interval(estimate(accuracies), 2)} | {against} |")
    return "\n".join(lines)


def paired(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the mean of the differences, seed by seed."""
    return estimate([value - base for value, base in zip(values, baseline, strict=True)])


def interval(found: Estimate, digits: int = 3, sign: str = "") -> str:
    low, high = (f"{value:{sign}.{digits}f}" for value in (found.low, found.high))
    return f"{found.mean:{sign}.{digits}f} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("digits", "cifar"), default="digits")
    parser.add_argument("--seeds", type=int, default=5, help="2 or more")
    parser.add_argument("--size", type=int, default=5000, help="training images of CIFAR-10N")
    parser.add_argument("--out", type=Path, default=CACHE / "draggers", help="where runs are kept")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    options.out.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.out / f"{options.data}.jsonl")
    recipe = DIGITS if options.data == "digits" else CIFAR
    trials, results = [], []
    for seed in range(options.seeds):
        data = digits(seed) if options.data == "digits" else cifar10n(seed, options.size)
        trial = Trial(options.data, seed, recipe, data, options.out)
        key = f"{options.data} {len(data)} {recipe.network.__name__} {recipe.epochs} epochs"
        trials.append(trial)
        results.append(carry_out(kept, trial, key))
    share = 100 * sum(t.data.wrong.double().mean().item() for t in trials) / len(trials)
    print(f"\n{key}, {options.seeds} seeds, {share:.1f} % of the labels wrong\n")
    print(detection(trials, results), differences(trials, results), retraining(results), sep="\n\n")


if __name__ == "__main__":
    main()
