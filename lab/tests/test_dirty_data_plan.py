"""The plan of the dirty-data benchmark: searches, records, the runner, tables, the command."""

import dataclasses
import json
import math
import multiprocessing
import os
import threading
import time
from functools import partial

import psutil
import pytest

from microclip_lab.dirty_data.arms import ARMS, arms_of
from microclip_lab.dirty_data.catalog import TASKS
from microclip_lab.dirty_data.command import main
from microclip_lab.dirty_data.plan import DEVELOPMENT_SEEDS, Plan, editions
from microclip_lab.dirty_data.records import Record, read_all
from microclip_lab.dirty_data.tables import markdown, summarize
from microclip_lab.dirty_data.task import TUNING_SEEDS
from microclip_lab.tuned_arms.records import Job, append
from microclip_lab.tuned_arms.runner import FailedRunsError, work
from microclip_lab.tuned_arms.search import (
    EVALUATION_SEEDS,
    HIGHEST,
    best_of,
    next_rates,
    rate_of,
    tuned,
)

DIGITS = TASKS["digits-20"]


# ---- tuning


def test_seeds_are_used_for_one_thing_only():
    assert not set(TUNING_SEEDS) & set(EVALUATION_SEEDS)
    assert not set(TUNING_SEEDS) & set(DEVELOPMENT_SEEDS)
    assert not set(EVALUATION_SEEDS) & set(DEVELOPMENT_SEEDS)


@pytest.mark.parametrize("best", [-4, 0, 3, HIGHEST])
def test_the_search_ends_with_both_neighbors_of_the_best(best):
    scores = {}
    for _ in range(20):
        for k in next_rates(scores, 0):
            scores[k] = -abs(k - best)
        if not next_rates(scores, 0):
            break
    assert best_of(scores, 0) == best
    assert {best - 1, best, min(best + 1, HIGHEST)} <= set(scores)
    assert len(scores) <= abs(best) + 3


def test_equal_scores_keep_the_start():
    assert best_of({-1: 5.0, 0: 5.0, 1: 5.0}, 0) == 0
    assert best_of({-1: 5.0, 0: 4.0, 1: 5.0}, 0) == -1


def fake(job, plain_rate=None, *, gains=None, best=None):
    """Return a record whose metric falls with the distance from the best rate."""
    gain = (gains or {}).get(job.arm, 0.0)
    distance = abs(math.log2(job.rate / rate_of((best or {}).get(job.arm, 0))))
    value = 80.0 + job.seed % 7 + gain * (1 + 0.1 * (job.seed % 2)) - distance
    validation = [value - 1, value]
    tested = job.stage == "evaluate"
    test = {1: value + 0.5, 2: value} if tested else {}
    return Record(job.task, job.arm, job.stage, job.rate, job.seed, "1.1", validation, test)


def finished(plan, **options):
    """Return the records of a plan that was done with made-up results, and the order of jobs."""
    records, jobs = {}, []
    while missing := plan.missing(records):
        jobs += missing
        records |= {job: fake(job, **options) for job in missing}
    return records, jobs


def test_plans_tune_plain_first_and_start_the_others_there():
    plan = Plan([DIGITS], ["elr"], 3)
    assert {job.arm for job in plan.missing({})} == {"plain"}
    records, jobs = finished(plan, best={"plain": 2, "elr": 3})
    assert tuned(records, DIGITS, "plain").rate == 0.004
    assert tuned(records, DIGITS, "elr").rate == 0.008
    first = next(job for job in jobs if job.arm == "elr")
    assert first.rate == 0.002  # half of plain's
    assert not tuned(records, DIGITS, "elr").is_at_edge
    assert plan.untuned(records) == []
    assert plan.progress(records).share == 1


def test_no_evaluation_seed_is_tuned_with_and_no_tuning_seed_evaluated():
    _, jobs = finished(Plan([DIGITS, TASKS["mixture-7"]], ["elr", "oracle"], 8))
    assert {job.seed for job in jobs if job.stage == "tune"} == set(TUNING_SEEDS)
    assert {job.seed for job in jobs if job.stage == "evaluate"} == set(range(8))


def test_tuning_does_not_depend_on_evaluation_records():
    plan = Plan([DIGITS], [], 3, evaluating=False)
    records, _ = finished(plan, best={"plain": 1})
    before = tuned(records, DIGITS, "plain")
    for rate, seed in ((rate_of(5), 0), (rate_of(5), 1)):
        job = Job("digits-20", "plain", "evaluate", rate, seed)
        records[job] = Record(*dataclasses.astuple(job), "1.1", [999.0], {1: 999.0})
    assert tuned(records, DIGITS, "plain") == before


# ---- records and the runner


def only_one(job, plain_rate, ends_at):
    if job.rate == ends_at:
        raise RuntimeError("the machine is on fire")
    return fake(job)


def test_finished_runs_are_kept_when_others_fail_and_resuming_does_the_rest(tmp_path):
    plan, records = Plan([DIGITS], [], 2), {}
    with pytest.raises(FailedRunsError, match=r"2 runs failed.*on fire"):
        work(plan, records, tmp_path, 1, lambda _: None, partial(only_one, ends_at=0.002))
    kept = read_all(tmp_path, editions(TASKS.values()))
    assert kept.keys() == records.keys()
    assert {job.rate for job in kept} == {0.0005, 0.001}
    work(plan, kept, tmp_path, 1, lambda _: None, partial(only_one, ends_at=None))
    lines = (tmp_path / "digits-20.jsonl").read_text().splitlines()
    assert len(lines) == len(kept) == 3 * 2 + 2  # nothing was run twice
    assert not plan.missing(kept)
    assert multiprocessing.active_children() == []


def endless(job, plain_rate, told):
    (told / "pid").write_text(str(os.getpid()))
    threading.Event().wait()


def work_forever(folder):
    work(Plan([DIGITS], [], 2), {}, folder, 1, lambda _: None, partial(endless, told=folder))


@pytest.mark.full
def test_workers_end_when_their_parent_is_killed(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=work_forever, args=(tmp_path,))
    parent.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert parent.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    worker = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.join()
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_line_that_was_cut_off_costs_one_run(tmp_path):
    jobs = [Job("digits-20", "plain", "tune", 0.001, seed) for seed in TUNING_SEEDS]
    for job in jobs:
        append(tmp_path, fake(job))
    path = tmp_path / "digits-20.jsonl"
    path.write_text(path.read_text()[:-40])
    known = editions(TASKS.values())
    assert list(read_all(tmp_path, known)) == jobs[:1]
    append(tmp_path, fake(jobs[1]))
    assert list(read_all(tmp_path, known)) == jobs


def test_records_of_an_older_edition_do_not_count(tmp_path):
    job = Job("digits-20", "plain", "tune", 0.001, 100)
    append(tmp_path, dataclasses.replace(fake(job), edition="0.1"))
    assert read_all(tmp_path, editions(TASKS.values())) == {}


def test_a_record_survives_its_file(tmp_path):
    record = fake(Job("digits-20", "plain", "evaluate", 0.001, 5))
    append(tmp_path, record)
    (found,) = read_all(tmp_path, editions(TASKS.values())).values()
    assert found == record


# ---- tables


def test_the_table_on_made_up_records():
    gains = {"oracle": 4.0, "elr": 2.0, "gce": -1.0}
    plan = Plan([DIGITS], ["oracle", "elr", "gce"], 4)
    records, _ = finished(plan, gains=gains)
    summary = summarize(records, [DIGITS], 4)
    (task,) = summary["tasks"]
    # gains of elr: 2, 2.2, 2, 2.2; their mean 2.1, deviation 0.11547, t(3) = 3.1824
    half = 3.182446 * 0.1154701 / 2
    elr = task["arms"]["elr"]["gain"]
    assert (elr["mean"], elr["low"], elr["high"]) == pytest.approx((2.1, 2.1 - half, 2.1 + half))
    assert task["has_headroom"]
    assert task["arms"]["elr"]["share"] == pytest.approx(50)
    assert task["arms"]["gce"]["share"] == pytest.approx(-25)
    # plain at its best noisy checkpoint, the last, is what it is at the last step
    assert task["arms"]["elr"]["gain_over_early_stopped_plain"]["mean"] == pytest.approx(2.1)
    overall = summary["overall"]
    assert overall["elr"]["mean_share"] == pytest.approx(50)
    assert (overall["elr"]["gains"], overall["gce"]["gains"], overall["gce"]["losses"]) == (1, 0, 1)
    text = markdown(json.loads(json.dumps(summary, allow_nan=False)))
    assert "| ELR | 0.001 | 83.60 | **+2.10 ± 0.18** (50 %) |" in text


def test_early_stopping_takes_the_epoch_that_is_best_on_noisy_data():
    validation, test = [5.0, 9.0, 9.0, 7.0], {2: 1.0, 4: 3.0}
    record = Record("t", "plain", "evaluate", 1e-3, 0, "1.1", validation, test)
    assert (record.best_epoch, record.early_stopped, record.last) == (2, 1.0, 3.0)


def test_no_share_without_headroom_and_no_interval_of_diverged_runs():
    plan = Plan([DIGITS], ["oracle", "elr"], 4)
    records, _ = finished(plan)
    job = Job("digits-20", "elr", "evaluate", 0.001, 2)
    records[job] = dataclasses.replace(records[job], test={1: math.nan, 2: math.nan})
    (task,) = summarize(records, [DIGITS], 4)["tasks"]
    assert not task["has_headroom"]
    assert task["arms"]["elr"]["share"] is None
    assert task["arms"]["elr"]["gain"] is None
    assert task["arms"]["elr"]["diverged"] == 1
    assert "diverged" in markdown(summarize(records, [DIGITS], 4))


# ---- the whole


def test_every_task_has_its_arms():
    assert {task.purpose for task in TASKS.values()} == {"noisy", "clean", "failure"}
    assert sum(task.purpose == "noisy" for task in TASKS.values()) == 14
    assert sum(task.purpose == "clean" for task in TASKS.values()) == 6
    for task in TASKS.values():
        names = [arm.name for arm in arms_of(task)]
        assert names[0] == "plain"
        assert ("oracle" in names) is (task.purpose != "clean")
        assert {"minnorm", "unit", "loss-history", "norm-history"} <= set(names)
        assert ("elr" in names) is (task.kind == "classification")
        assert ("l1" in names) is (task.kind == "regression")
    known = {name for arm in ARMS.values() for name in arm.only}
    assert known <= set(TASKS)


def test_the_command_refuses_what_makes_no_sense(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    for arguments, said in (
        (["--tasks", "digit"], "There is no task 'digit'"),
        (["--arms", "erl"], "there is no arm 'erl'"),
        (["--seeds", "1"], "--seeds must be from 2 to 100, but got 1"),
        (["--workers", "0"], "--workers must be 1 or more"),
        (["--stage", "evaluate", "--tasks", "digits-20"], "run --stage tune first"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, *out])
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
    main(["--stage", "table", *out])
    assert "no table" in capsys.readouterr().out
    main(["--list"])
    assert "co-teaching: co-teaching" in capsys.readouterr().out


@pytest.mark.full
def test_the_command_from_end_to_end(tmp_path):
    arguments = ["--tasks", "digits-short", "--arms", "elr", "--seeds", "2", "--out", str(tmp_path)]
    main([*arguments, "--workers", "1"])
    before = (tmp_path / "digits-short.jsonl").read_text()
    main([*arguments, "--workers", "2"])
    assert (tmp_path / "digits-short.jsonl").read_text() == before
    table = json.loads((tmp_path / "table.json").read_text())
    assert set(table["tasks"][0]["arms"]) == {"plain", "elr"}
    assert "ELR" in (tmp_path / "table.md").read_text()
