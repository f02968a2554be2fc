"""`microclip reproduce` from start to finish."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from microclip_lab.jobs.job_queue import JobQueue
from microclip_lab.jobs.progress import Status, progress
from microclip_lab.jobs.storage import open_storage, open_study
from microclip_lab.jobs.subprocesses import cores, exit_with_parent, is_worker
from microclip_lab.jobs.worker_loop import TrialError, supervise
from microclip_lab.reproduction.config import WORK, ReproduceConfig
from microclip_lab.reproduction.record_checks import check, rerun
from microclip_lab.reproduction.records import FOLDER, Job, Records, RecordStore
from microclip_lab.reproduction.run_job import Worker, tidy_up
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import tasks
from microclip_lab.training.config import SettingError

LOGS = "logs"
REPORT_EVERY = 10.0  # seconds; checking hundreds of runs takes a moment


def reproduce(
    config: ReproduceConfig, console: Console | None = None, log: Console | None = None
) -> None:
    """Run `microclip reproduce`.

    Args:
        config: Its options.
        console: Where results are printed; default: standard output.
        log: Where progress is shown; default: standard error.
    """
    # results to standard output, progress to standard error, so that each can be redirected
    console, log = console or Console(), log or Console(stderr=True)
    study, out = study_of(config), config.folder
    if config.again is not None:
        rerun(study, RecordStore(out).records(), config.again, console, log)
        return
    if not config.only_page:
        command = [sys.executable, "-m", "microclip", "reproduce", *config.arguments]
        try:
            run_missing(study, out, config.storage_url, config.workers or cores(), command, log)
        except TrialError as error:
            raise TrialError(f"{error}\nFor a page of the finished runs: --only-page") from error
        if is_worker():
            return
    records = RecordStore(out).records()
    if not records:
        raise SettingError(f"{out} has no records, so there is nothing to report.")
    publish(study, records, out, console, config.document)


def study_of(config: ReproduceConfig) -> Study:
    """Return the plan, with the requested tasks."""
    chosen = [task for task in tasks(config.scale) if not config.tasks or task.name in config.tasks]
    return Study(tuple(chosen))


def run_missing(
    study: Study, out: Path, storage_url: str, workers: int, command: Sequence[str], log: Console
) -> None:
    """Do the missing runs: in this process, with workers, or as one of the workers.

    Args:
        study: The plan.
        out: The folder of the records.
        storage_url: Storage of the job queue.
        workers: Number of parallel runs.
        command: The command that starts a worker; unused with a single one.
        log: Where progress is shown.
    """
    store, work = RecordStore(out), out / WORK
    records = store.records()
    check(study, records)
    work.mkdir(parents=True, exist_ok=True)
    if is_worker():
        exit_with_parent()
        _worker(study, store, storage_url, _no_report).work()
        return
    log.print(announcement(study, records, workers), soft_wrap=True, highlight=False)
    if study.missing(records):
        with progress(log) as report:
            worker = _worker(study, store, storage_url, report)
            if workers == 1:
                worker.work()
            else:
                supervise(
                    *(study, worker.look, report, command, workers, work / LOGS),
                    threads=1,  # more would sum in another order, and records must be reproducible
                    report_every=REPORT_EVERY,
                )
        worker.queue.close()
    for job in store.records():  # leftovers of runs killed just after writing their record
        tidy_up(work / FOLDER / job.id)


def announcement(study: Study, records: Records, workers: int) -> str:
    """Describe what is going to be done."""
    jobs = study.expected(records)
    left = [job for job in jobs if job not in records]
    if not left:
        return f"All {len(jobs)} runs have records; there is nothing to train."
    hours = sum(study.work(job) for job in left) / 3600
    names = ", ".join(task.name for task in study.tasks)
    more = ", perhaps a few more to extend learning rate grids"
    grows = any(task.growth for task in study.tasks)
    done = f" {len(jobs) - len(left)} of them already have records." if records else ""
    return (
        f"{len(jobs)} runs{more if grows else ''}: {names}.{done} The rest takes about "
        f"{hours:.2g} core-hours, with {workers} runs in parallel. Ctrl-C is safe: finished runs "
        "are kept, and the same command continues."
    )


def publish(
    study: Study, records: Records, out: Path, console: Console, document: Path | None = None
) -> None:
    """Write the page, results.json and perhaps the document; print the verdicts."""
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
    # soft_wrap and no markup: print the path unchanged, however long or odd
    written = {"page:    ": page, "results: ": results}
    if document is not None:
        written["document:"] = write_document(study, records, document, page, results)
    for name, path in written.items():
        console.print(f"{name} {path}", soft_wrap=True, markup=False, highlight=False)


def _worker(
    study: Study, store: RecordStore, storage_url: str, report: Callable[[Status], None]
) -> Worker:
    storage = open_storage(storage_url)
    # the value of a trial is its score: higher is better, whatever its task measures
    trials = open_study(storage, store.folder.resolve().name, lower_is_better=False)
    queue = JobQueue(trials, storage, Job.from_json, store.has)
    return Worker(study, queue, store, store.folder / WORK / FOLDER, report)


def _no_report(status: Status) -> None:
    """Ignore progress."""
