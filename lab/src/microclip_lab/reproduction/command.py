"""`microclip reproduce`, from beginning to end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from microclip_lab.jobs.job_queue import Register
from microclip_lab.jobs.progress import Status, progress
from microclip_lab.jobs.storage import open_storage, open_study
from microclip_lab.jobs.subprocesses import cores, is_worker, leave_with_parent
from microclip_lab.jobs.worker_loop import TrialError, oversee
from microclip_lab.reproduction.config import WORK, ReproduceConfig
from microclip_lab.reproduction.jobs import Job
from microclip_lab.reproduction.plan_check import check
from microclip_lab.reproduction.record_store import Shelf
from microclip_lab.reproduction.records import FOLDER, Records
from microclip_lab.reproduction.rerun import do_again
from microclip_lab.reproduction.run_job import tidy_up
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import tasks
from microclip_lab.reproduction.worker import Worker
from microclip_lab.training.config import SettingError

LOGS = "logs"
REPORT_EVERY = 10.0  # seconds; looking through hundreds of runs takes a moment


def reproduce(
    config: ReproduceConfig, console: Console | None = None, log: Console | None = None
) -> None:
    """Do what is asked for.

    Args:
        config: What that is.
        console: Where results are printed; standard output unless given.
        log: Where progress is shown; standard error unless given.
    """
    # results to standard output, progress to standard error: one can be redirected alone
    console, log = console or Console(), log or Console(stderr=True)
    study, out = study_of(config), config.folder
    if config.again is not None:
        do_again(study, Shelf(out).records(), config.again, console, log)
        return
    if not config.only_page:
        again = [sys.executable, "-m", "microclip", "reproduce", *config.arguments]
        try:
            run_missing(study, out, config.storage_url, config.workers or cores(), again, log)
        except TrialError as error:
            raise TrialError(f"{error}\nA page of the runs that are there: --only-page") from error
        if is_worker():
            return
    records = Shelf(out).records()
    if not records:
        raise SettingError(f"{out} holds no records, so there is nothing to make a page of.")
    publish(study, records, out, console, config.document)


def study_of(config: ReproduceConfig) -> Study:
    """Return the plan, or those of its tasks that are asked for."""
    chosen = [task for task in tasks(config.scale) if not config.tasks or task.name in config.tasks]
    return Study(tuple(chosen))


def run_missing(
    study: Study, out: Path, storage_url: str, workers: int, again: Sequence[str], log: Console
) -> None:
    """Do the runs that are missing, alone or with workers, or as one of them.

    Args:
        study: The plan.
        out: The folder of the records.
        storage_url: Where it is kept who does which.
        workers: How many runs are done side by side.
        again: The command that starts a worker; none is started if there is to be one only.
        log: Where progress is shown.
    """
    shelf, work = Shelf(out), out / WORK
    records = shelf.records()
    check(study, records)
    work.mkdir(parents=True, exist_ok=True)
    if is_worker():
        leave_with_parent()
        _worker(study, shelf, storage_url, _nobody).work()
        return
    log.print(announcement(study, records, workers), soft_wrap=True, highlight=False)
    if study.missing(records):
        with progress(log) as report:
            worker = _worker(study, shelf, storage_url, report)
            if workers == 1:
                worker.work()
            else:
                oversee(
                    *(study, worker.look, report, again, workers, work / LOGS),
                    threads=1,  # more add up in another order, and records must come out the same
                    report_every=REPORT_EVERY,
                )
        worker.register.close()
    for job in shelf.records():  # of runs that were killed just after their record was written
        tidy_up(work / FOLDER / job.id)


def announcement(study: Study, records: Records, workers: int) -> str:
    """Say what is to be done, before it is."""
    jobs = study.expected(records)
    left = [job for job in jobs if job not in records]
    if not left:
        return f"All {len(jobs)} runs have their records; nothing is to be trained."
    hours = sum(study.work(job) for job in left) / 3600
    names = ", ".join(task.name for task in study.tasks)
    more = ", and some more if the best learning rates are the last ones tried"
    grows = any(task.growth for task in study.tasks)
    done = f" {len(jobs) - len(left)} of them have their records already." if records else ""
    return (
        f"{len(jobs)} runs{more if grows else ''}, of {names}.{done} What is left takes about "
        f"{hours:.2g} core-hours; {workers} side by side. Ctrl-C is safe: what is finished is "
        "kept, and the same command goes on."
    )


def publish(
    study: Study, records: Records, out: Path, console: Console, document: Path | None = None
) -> None:
    """Write the page, the file for programs and maybe the document; print the verdicts."""
    from microclip_lab.reproduction.document import write_document
    from microclip_lab.reproduction.page import write_page
    from microclip_lab.reproduction.results import write_results
    from microclip_lab.reproduction.verdicts import judge

    check(study, records)
    results = write_results(study, records, out)
    page = write_page(study, records, out)
    table = Table(title="What holds at this scale", title_justify="left", show_lines=True)
    for heading in ("", "claim", "verdict", "why"):
        table.add_column(heading)
    for judged in judge(study, records):
        table.add_row(judged.claim.id, judged.claim.title, judged.verdict, judged.sentence)
    console.print(table)
    # soft_wrap and no markup: a path must come out as it is, however long or odd
    written = {"page:    ": page, "results: ": results}
    if document is not None:
        written["document:"] = write_document(study, records, document, page, results)
    for name, path in written.items():
        console.print(f"{name} {path}", soft_wrap=True, markup=False, highlight=False)


def _worker(
    study: Study, shelf: Shelf, storage_url: str, report: Callable[[Status], None]
) -> Worker:
    storage = open_storage(storage_url)
    # the figure of a trial is how good it was: more is better, whatever its task measures
    trials = open_study(storage, shelf.folder.resolve().name, lower_is_better=False)
    register = Register(trials, storage, Job.from_json, shelf.has)
    return Worker(study, register, shelf, shelf.folder / WORK / FOLDER, report)


def _nobody(status: Status) -> None:
    """Hear of progress, and say nothing."""
