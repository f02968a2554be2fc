"""The queue that workers share, and pruning."""

import math
import subprocess
import sys
import threading

import psutil
import pytest
import sqlalchemy
from optuna.trial import TrialState

from microclip_lab.jobs.job_queue import JobQueue, LostClaimError, WorkerId
from microclip_lab.jobs.plan import PLAIN, Cell, Job, Result
from microclip_lab.jobs.storage import StorageError, open_storage, open_study
from microclip_lab.sweep.pruning import Pruner

FOUR = Cell("MinNorm", 4)


def result(**metrics):
    return Result("somewhere", metrics, {})


# ------------------------------------------------------------------------------------- queue


@pytest.fixture
def queue(tmp_path):
    return opened(tmp_path)


def opened(folder):
    storage = open_storage(f"sqlite:///{folder / 'trials.db'}")
    return JobQueue(open_study(storage, "study", lower_is_better=True), storage, Job.from_json)


def jobs(count, stage="evaluation"):
    return [Job(stage, FOUR, 0.1, seed) for seed in range(count)]


def test_no_job_is_given_to_two_workers(tmp_path):
    """Optuna alone does not guarantee it on SQLite, which has no row locks."""
    wanted = jobs(24)
    opened(tmp_path).claim([])
    workers, got = [opened(tmp_path) for _ in range(4)], []
    start = threading.Barrier(len(workers))

    def claim_all(queue):
        start.wait()
        while (claim := queue.claim(wanted)) is not None:
            got.append(claim.job)

    threads = [threading.Thread(target=claim_all, args=(w,)) for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job.seed for job in got) == list(range(24))


def test_what_is_finished_is_known_to_all_and_never_given_out_again(queue, tmp_path):
    (job,) = jobs(1)
    claim = queue.claim([job])
    done = Result("here", {"validation_error": 0.5}, {4: 0.7, 8: 0.5})
    queue.complete(claim, done, 0.5)
    other = opened(tmp_path)
    assert other.state().finished == {job: done}
    assert other.claim([job]) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_figures_that_are_not_finite_can_be_kept(queue, value):
    claim = queue.claim(jobs(1))
    queue.note(claim, 4, value)
    queue.complete(claim, Result("here", {"validation_error": value}, {}), value)
    (found,) = queue.state().finished.values()
    assert str(found.metrics["validation_error"]) == str(value)


def test_a_job_whose_worker_was_killed_on_this_machine_is_free_at_once(queue, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = psutil.Process(process.pid).create_time()
    queue.here = WorkerId(WorkerId.here().machine, process.pid, began)
    queue.claim(jobs(1))
    other = opened(tmp_path)
    other.release_abandoned()
    assert other.claim(jobs(1)) is None
    process.kill()
    process.communicate()
    other.release_abandoned()
    assert other.claim(jobs(1)) is not None


def test_a_job_whose_worker_is_elsewhere_is_free_after_a_silence(queue, tmp_path):
    queue.here = WorkerId("another machine", 1, 0.0)
    claim = queue.claim(jobs(1))
    other = opened(tmp_path)
    other.release_abandoned()
    assert other.claim(jobs(1)) is None
    with queue.storage.engine.begin() as connection:
        connection.execute(
            sqlalchemy.text("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')")
        )
    other.release_abandoned()
    assert other.claim(jobs(1)) is not None
    with pytest.raises(LostClaimError):  # should it come back, it hears of it
        queue.note(claim, 4, 0.5)
    with pytest.raises(LostClaimError):
        queue.complete(claim, result(), 0.5)


def test_of_a_job_that_was_written_down_twice_one_is_done(queue, tmp_path):
    other = opened(tmp_path)
    (job,) = jobs(1)
    queue._write_down(job)
    other._write_down(job)
    queue.complete(queue.claim([job]), result(), 0.5)
    assert other.claim([job]) is None
    queue.close()
    states = [trial.state for trial in queue.study.trials]
    assert states == [TrialState.COMPLETE, TrialState.FAIL]


def test_errors_count_since_one_came_and_are_tried_again_after_that(queue, tmp_path):
    (job,) = jobs(1)
    queue.fail(queue.claim([job]), "the disk is on fire")
    assert queue.state().broken == {job: "the disk is on fire"}
    other = opened(tmp_path)
    assert other.state().broken == {}
    assert other.claim([job]) is not None


def test_a_storage_that_is_none_is_refused():
    with pytest.raises(StorageError, match="nonsense"):
        open_storage("nonsense://here")


# -------------------------------------------------------------------------------------- pruning


def pruned(queue, curves, curve, stage="tuning", cell=FOUR):
    """Return the verdict on a curve, given finished runs at other rates."""
    for place, values in enumerate(curves):
        claim = queue.claim([Job("tuning", FOUR, 1.0 + place, 0)])
        queue.complete(claim, Result("here", {}, values), 0.0)
    claim = queue.claim([Job(stage, cell, 0.5, 0)])
    for step, value in curve.items():
        queue.note(claim, step, value)
    return Pruner(queue, 100).verdict(claim)


GOOD = [{20: 8.0, 40: 4.0, 60: 2.0, 80: 1.0}, {20: 9.0, 40: 5.0, 60: 3.0, 80: 2.0}]


def test_what_stands_still_while_others_learn_is_hopeless(queue):
    said = pruned(queue, GOOD, {20: 8.5, 40: 8.5, 60: 8.5})
    assert said == "by step 60 it had come 0% as far as other learning rates"


def test_what_is_only_a_little_behind_is_not(queue):
    assert pruned(queue, GOOD, {20: 9.0, 40: 6.0, 60: 4.0}) is None


def test_nothing_is_hopeless_in_the_first_half(queue):
    assert pruned(queue, GOOD, {20: 99.0, 40: 99.0}) is None


def test_what_diverged_is_hopeless_at_once(queue):
    assert pruned(queue, [], {20: math.nan}) == "it had diverged by step 20"


@pytest.mark.parametrize(("stage", "cell"), [("evaluation", FOUR), ("tuning", PLAIN)])
def test_neither_comparisons_nor_other_cells_are_ended(queue, stage, cell):
    assert pruned(queue, GOOD, {20: 99.0, 40: 99.0, 60: 99.0}, stage, cell) is None


def test_one_rival_is_too_few(queue):
    assert pruned(queue, GOOD[:1], {20: 8.5, 40: 8.5, 60: 8.5}) is None
