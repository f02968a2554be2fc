"""`microclip sweep` from start to finish."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from microclip.files import write_whole
from microclip.report import write_report
from microclip_lab.jobs.job_queue import JobQueue
from microclip_lab.jobs.plan import Job, Result
from microclip_lab.jobs.progress import Status, progress
from microclip_lab.jobs.storage import open_storage, open_study
from microclip_lab.jobs.subprocesses import exit_with_parent, is_worker
from microclip_lab.jobs.worker_loop import supervise
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.sweep.grid import Grid
from microclip_lab.sweep.pruning import Pruner
from microclip_lab.sweep.race import Race
from microclip_lab.sweep.race_report import report_race
from microclip_lab.sweep.setup import check_setup, describe
from microclip_lab.sweep.summary import summarise
from microclip_lab.sweep.table import TextTable, markdown, race_tables, show, sweep_tables
from microclip_lab.sweep.worker import Worker
from microclip_lab.training.components import parse_rule
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.loading import Share
from microclip_lab.training.recipe import Recipe

RUNS, LOGS = "runs", "logs"


def run_sweep(
    recipe: Recipe[Any, Any],
    training: Training,
    config: SweepConfig,
    command: Sequence[str] = (),
    *,
    console: Console | None = None,
    log: Console | None = None,
) -> Path:
    """Run or resume a sweep or a race; return the file with the results.

    Args:
        recipe: What to train.
        training: How to train it, except for what is swept: rule, micro-batch size, learning rate
            and seed. Its seed is the first one.
        config: What to sweep.
        command: The command that starts the same sweep in another process, for several workers.
        console: Where results are printed; default: standard output.
        log: Where progress is shown; default: standard error.
    """
    # results to standard output, progress to standard error, so that each can be redirected
    console, log = console or Console(), log or Console(stderr=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingError(
            "A sweep trains each setting in one process. Start it without accelerate launch or "
            "torchrun; --workers trains several settings at once."
        )
    plan = plan_of(recipe, training, config)
    config.out.mkdir(parents=True, exist_ok=True)
    storage = open_storage(config.storage_url)
    study = open_study(storage, config.study_name, lower_is_better=recipe.lower_is_better)
    setup = describe(recipe, training, config)
    check_setup(study, config.out, setup, "race" if config.race else "sweep")
    queue = JobQueue(study, storage, Job.from_json)

    def worker(report: Callable[[Status], None]) -> Worker:
        pruner = Pruner(queue, plan.steps) if config.prune and not config.race else None
        return Worker(recipe, training, plan, queue, config.out / RUNS, pruner, report)

    if is_worker():
        exit_with_parent()
        worker(lambda _: None).work()
        return config.out
    log.print(_announcement(plan), soft_wrap=True, highlight=False)
    with progress(log) as report:
        if config.workers == 1:
            worker(report).work()
        else:
            logs = config.out / LOGS
            supervise(plan, queue.state, report, command, config.workers, logs)
    queue.close()
    finished = queue.state().finished
    if isinstance(plan, Race):
        return _end_race(recipe, plan, finished, config, setup, console)
    return _end_sweep(recipe, plan, finished, config, setup, console)


def plan_of(recipe: Recipe[Any, Any], training: Training, config: SweepConfig) -> Grid | Race:
    """Return the plan, or raise an error if it cannot work, before anything is trained."""
    for rule in config.rules:
        parse_rule(rule)
    for b in config.sizes:
        Share.of(replace(training, microbatch_size=b), 0, 1)
    steps = training.all_steps(
        1 if training.epochs is None else len(recipe.load(training.seed).training)
    )
    rate, seed = training.learning_rate, training.seed
    if not config.race:
        return Grid(config, recipe.headline, recipe.lower_is_better, rate, seed, steps)
    warm_up = round(training.warmup * steps)
    race = Race(config, recipe.headline, recipe.lower_is_better, rate, seed, steps, warm_up)
    _ = race.rungs  # raises an error if there are too few steps
    return race


def _announcement(plan: Grid | Race) -> str:
    kept = "Ctrl-C is safe: finished runs are kept, and the same command continues."
    count = len(plan.cells)
    if isinstance(plan, Race):
        times = plan.cost / (plan.steps * len(plan.seeds))
        return (
            f"A race of {count} candidates, including plain training, with rungs at steps "
            f"{', '.join(str(rung.step) for rung in plan.rungs)}: {plan.cost:,} steps in all, "
            f"{times:.2f} times one run of {plan.steps:,}"
            f"{f', on each of {len(plan.seeds)} seeds' if len(plan.seeds) > 1 else ''}. "
            f"{_warning(plan)}{kept}"
        )
    jobs = plan.expected({})
    tuning = sum(job.stage == "tuning" for job in jobs)
    return (
        f"{count} settings, including plain training: {tuning} runs to choose learning rates, "
        f"perhaps a few more, and {len(jobs) - tuning} runs to compare settings. {kept}"
    )


def _warning(race: Race) -> str:
    first = race.rungs[0].step
    if first > race.warm_up or len(race.rungs) == 1:
        return ""
    return (
        f"The first rung is within the {race.warm_up} warm-up steps, where candidates hardly "
        "differ: race fewer candidates, or raise --budget. "
    )


def _end_sweep(
    recipe: Recipe[Any, Any],
    grid: Grid,
    finished: Mapping[Job, Result],
    config: SweepConfig,
    setup: Mapping[str, Any],
    console: Console,
) -> Path:
    summary = summarise(recipe.name, grid, finished)
    sentences = (summary.verdict, *summary.notes)
    title = f"Sweep of {recipe.name}"
    path = _write(
        config.out, "sweep", title, summary.to_json(setup), sweep_tables(summary), sentences
    )
    show(sweep_tables(summary), sentences, console)
    # a page shows the ledgers of the first few runs: one of each cell, the best first
    runs = [run.folder for row in summary.rows for run in row.runs.values()]
    best = () if summary.best is None else (summary.best,)
    first = [next(iter(row.runs.values())).folder for row in (*best, *summary.rows[1:]) if row.runs]
    _page(config.out, "sweep", title, list(dict.fromkeys([*first, *runs])), console)
    return path


def _end_race(
    recipe: Recipe[Any, Any],
    race: Race,
    finished: Mapping[Job, Result],
    config: SweepConfig,
    setup: Mapping[str, Any],
    console: Console,
) -> Path:
    report = report_race(recipe.name, race, finished)
    title = f"Race of {recipe.name}"
    sentences = (report.verdict,)
    path = _write(config.out, "race", title, report.to_json(setup), race_tables(report), sentences)
    show(race_tables(report), sentences, console)
    # the others stopped early, so comparing them with the winner's end would mislead
    winner = report.winner
    folders = [run.folder for run in winner.runs.values()]
    _page(config.out, "race", f"{title}: {winner.cell.name}", folders, console)
    return path


def _write(
    out: Path,
    name: str,
    title: str,
    content: Mapping[str, Any],
    tables: Sequence[TextTable],
    sentences: Sequence[str],
) -> Path:
    path = out / f"{name}.json"
    write_whole(out / f"{name}.md", markdown(title, tables, sentences).encode())
    write_whole(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
    return path


def _page(out: Path, name: str, title: str, folders: Sequence[str], console: Console) -> None:
    """Write the page of the runs on this machine, and print where everything is."""
    here = [out / RUNS / folder for folder in folders if (out / RUNS / folder).is_dir()]
    console.print()
    if here:
        page = out / f"{name}.html"
        write_report(here, page, title=title)
        # soft_wrap and no markup: print the path unchanged, however long or odd
        console.print(f"page:    {page}", soft_wrap=True, markup=False, highlight=False)
    if len(here) < len(folders):
        console.print(
            f"{len(folders) - len(here)} runs are on other machines and not on the page. Use a "
            "shared folder for --out.",
            soft_wrap=True,
            highlight=False,
        )
    table = out / f"{name}.md"
    console.print(f"table:   {table}", soft_wrap=True, markup=False, highlight=False)
