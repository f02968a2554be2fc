"""The plan of the reproduction, with made-up records; and the claims."""

import itertools
import json
import math
import re
from dataclasses import replace

import pytest

from microclip_lab.reproduction.claims import CLAIMS, CONTROLS
from microclip_lab.reproduction.config import TASKS
from microclip_lab.reproduction.effects import Gain, Rise, Slope
from microclip_lab.reproduction.records import (
    Job,
    Record,
    RecordError,
    RecordStore,
    path_of,
    read,
    read_all,
    write,
)
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import (
    EVALUATION_SEED,
    PLAIN,
    TUNING_SEED,
    Arm,
    Task,
    clipped,
    tasks,
)

from tiny_recipe import Tiny, training

RATES = (1.0, 3.0, 9.0)
PLAIN_ARM = Arm(PLAIN, "plain training")
TUNED, COMPARED = (100, 101), (200, 201, 202)
# what the recipes give, by the names of `Recipe.summary`, which other tests see them give
FIGURES = {
    "vision": ("accuracy", "top5_accuracy"),
    "speech": ("wer", "canary_wer", "unseen_canary_wer"),
    "language": ("accuracy", *(f"accuracy_{d}" for d in ("movie", "nyt", "tweets", "amazon"))),
}


def plan(*arms, **changes):
    """Return a study of one task, in which higher is better."""
    task = Task(
        *("tiny", "points", Tiny(), training(), RATES, (PLAIN_ARM, *arms)), seeds=3, tuning_seeds=2
    )
    return Study((replace(task, **changes),))


def record(job, score=0.5, diverged="", **more):
    metrics = {} if diverged else {"best_validation_accuracy": score}
    return Record(job, {}, metrics, {}, None, "", diverged, **more)


def tuned(arm, scores):
    """Return records of the tuning of an arm; None: it diverged."""
    jobs = {Job("tiny", arm, "tuning", v, s): found for v, found in scores.items() for s in TUNED}
    return {
        job: record(job, 0.0 if found is None else found, "" if found is not None else "diverged")
        for job, found in jobs.items()
    }


def evaluated(arm, value, **more):
    jobs = [Job("tiny", arm, "evaluation", value, seed) for seed in COMPARED]
    return {job: record(job, **more) for job in jobs}


def described(jobs):
    return {(job.arm, job.stage, job.value) for job in jobs}


GOOD = {1.0: 0.1, 3.0: 0.8, 9.0: 0.2}  # the best is not at an edge


# ------------------------------------------------------------------------------------ what is next


def test_first_every_value_is_tried_on_every_tuning_seed():
    study = plan(clipped(4))
    jobs = study.missing({})
    assert len(jobs) == len(set(jobs)) == 2 * 3 * 2
    assert {job.seed for job in jobs} == set(TUNED)
    assert len(study.expected({})) == 2 * (3 * 2 + 3)


def test_then_an_arm_is_compared_with_the_value_that_validation_chose():
    study = plan()
    jobs = study.missing(tuned(PLAIN, GOOD))
    assert jobs == [Job("tiny", PLAIN, "evaluation", 3.0, seed) for seed in COMPARED]
    done = tuned(PLAIN, GOOD) | evaluated(PLAIN, 3.0)
    assert study.missing(done) == []
    assert set(study.expected(done)) == set(done)


@pytest.mark.parametrize(("best", "beyond"), [(1.0, 0.3333), (9.0, 27.0)])
def test_a_grid_grows_where_its_best_value_is_at_the_edge_and_not_for_ever(best, beyond):
    study = plan(growth=1)
    scores = dict.fromkeys(RATES, 0.1) | {best: 0.9}
    assert described(study.missing(tuned(PLAIN, scores))) == {(PLAIN, "tuning", beyond)}
    grown = tuned(PLAIN, scores | {beyond: 0.95})
    assert described(study.missing(grown)) == {(PLAIN, "evaluation", beyond)}
    assert set(study.missing(grown)) <= set(study.expected(grown))


def test_where_less_is_better_the_least_is_chosen(monkeypatch):
    monkeypatch.setattr(Tiny, "lower_is_better", True)
    study = plan()
    worst_in_the_middle = {1.0: 0.4, 3.0: 0.1, 9.0: 0.4}
    assert described(study.missing(tuned(PLAIN, worst_in_the_middle))) == {
        (PLAIN, "evaluation", 3.0)
    }


def test_what_test_data_says_plays_no_part():
    study = plan()
    records = tuned(PLAIN, GOOD)
    for job, found in records.items():
        best = {"best_test_accuracy": 1.0 if job.value == 9.0 else 0.0}
        records[job] = replace(found, metrics={**found.metrics, **best})
    assert study.chosen(study.tasks[0], PLAIN_ARM, records) == 3.0


def test_one_value_is_not_tuned():
    study = plan(clipped(4, values=(2.0,)))
    assert ("b4", "evaluation", 2.0) in described(study.missing({}))
    assert ("b4", "tuning", 2.0) not in described(study.missing({}))


def test_an_arm_waits_for_those_whose_rate_it_has_or_whose_steps_it_replays():
    same = clipped(16, tuned=None, rate_of=PLAIN)
    replay = clipped(
        16, name="as-long", tuned=None, rate_of="b4", replays="gradient_norm", source="b4"
    )
    study = plan(same, clipped(4), replay)
    assert {job.arm for job in study.missing({})} == {PLAIN, "b4"}
    records = tuned(PLAIN, GOOD) | tuned("b4", GOOD)
    assert {job.arm for job in study.missing(records)} == {PLAIN, "b16", "b4"}
    one = Job("tiny", "b4", "evaluation", 3.0, 201)
    records[one] = record(one)
    replays = [job for job in study.missing(records) if job.arm == "as-long"]
    assert replays == [Job("tiny", "as-long", "evaluation", None, 201)]  # seed by seed
    task = study.tasks[0]
    assert study.rate(task, same, None, records) == 3.0


def test_a_run_that_diverged_is_not_replayed_nor_waited_for():
    replay = clipped(16, name="as-long", tuned=None, rate_of="b4", replays="bound", source="b4")
    study = plan(clipped(4), replay)
    records = tuned(PLAIN, GOOD) | tuned("b4", GOOD) | evaluated(PLAIN, 3.0)
    records |= evaluated("b4", 3.0, diverged="the loss was not finite")
    assert study.missing(records) == []
    assert set(study.expected(records)) == set(records)


def test_an_arm_that_diverges_with_every_value_is_lost_with_those_that_need_it():
    of_plain = Arm("global", "", tuned="max_grad_norm", values=(0.3, 1.0), rate_of=PLAIN)
    study = plan(of_plain, clipped(16, tuned=None, rate_of=PLAIN), growth=0)
    records = tuned(PLAIN, dict.fromkeys(RATES))
    assert study.missing(records) == []
    assert study.chosen(study.tasks[0], PLAIN_ARM, records) is None
    assert {job.arm for job in study.expected(records) if job not in records} <= {"global"}
    assert not [job for job in study.expected(records) if job.stage == "evaluation"]


def test_a_value_that_diverges_on_one_seed_is_not_chosen():
    study = plan()
    records = tuned(PLAIN, GOOD)
    bad = Job("tiny", PLAIN, "tuning", 3.0, 100)
    records[bad] = record(bad, diverged="the loss was not finite")
    assert study.chosen(study.tasks[0], PLAIN_ARM, records) == 9.0


def test_work_counts_by_steps():
    other = clipped(4, training={"steps": 80})
    study = plan(other, seconds=100.0)
    jobs = {job.arm: job for job in study.missing({})}
    assert study.work_done(jobs[PLAIN], 10) == 25.0
    assert study.work_done(jobs["b4"], 10) == 12.5
    assert study.work_done(jobs["b4"], 1000) == study.work(jobs["b4"]) == 100.0


# --------------------------------------------------------------------------------- the plan itself


@pytest.fixture(scope="module")
def whole():
    return {task.name: task for task in tasks()}


def parts():
    of_claims = [part for claim in CLAIMS for part in (*claim.parts, *claim.also)]
    return [*of_claims, *CONTROLS]


def test_every_claim_asks_for_arms_and_figures_that_there_are(whole):
    for part in parts():
        asked = part.quantity
        task = whole[asked.task]
        names = {arm.name for arm in task.arms}
        of_it = set(getattr(asked, "arms", ()) or (asked.arm,))
        against = {asked.against} if hasattr(asked, "against") else set()
        assert of_it | against <= names, part.about
        figures = asked.figures if isinstance(asked, Gain) else ()
        figures += (asked.figure,) if isinstance(asked, Rise) else ()
        given = {
            prefix + name
            for prefix in ("test_", "best_test_")
            for name in FIGURES[task.recipe.name]
        }
        assert {*figures, task.figure} <= given, part.about


def test_what_looks_inside_is_asked_of_arms_that_do(whole):
    for part in parts():
        asked = part.quantity
        if isinstance(asked, Slope):
            assert all(whole[asked.task].arm(name).takes_snapshots for name in asked.arms)
        elif type(asked).__name__.startswith("Cosine"):
            assert whole[asked.task].arm(asked.arm).takes_snapshots


def test_what_is_replayed_is_kept(whole):
    for task in whole.values():
        needed = {name for arm in task.arms for name in (arm.source, arm.shares_of) if name}
        assert all(task.arm(name).keeps_course for name in needed), task.name


def test_ids_of_claims_are_their_own():
    ids = [claim.id for claim in CLAIMS]
    assert len(ids) == len(set(ids)) == 7 + 4


@pytest.mark.parametrize("scale", ["default", "quick", "smallest"])
def test_ids_of_runs_are_their_own_and_safe_as_names_of_files(scale):
    study = Study(tasks(scale))
    ids = [job.id for job in study.expected({})]
    assert len({id.lower() for id in ids}) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+/[a-z0-9.+-]+", id) for id in ids)
    assert [task.name for task in study.tasks] == list(TASKS)


def test_no_seed_chooses_and_compares(whole):
    most = max(task.tuning_seeds for task in whole.values())
    assert TUNING_SEED + most <= EVALUATION_SEED
    assert all(task.seeds >= 5 for task in whole.values())


@pytest.mark.parametrize("scale", ["default", "quick", "smallest"])
def test_every_scale_has_all_arms_and_one_thread(scale, whole):
    for task in tasks(scale):
        assert [arm.name for arm in task.arms] == [arm.name for arm in whole[task.name].arms]
        assert task.training.threads == 1
        assert task.training.engine == "fused"


# ----------------------------------------------------------------------------------------- records

FULL = Record(
    Job("digits", "b4", "evaluation", 0.001, 203),
    settings={"betas": (0.9, 0.999), "steps": 20},
    metrics={"test_accuracy": 0.1 + 0.2, "test_loss": math.nan},
    curve={10: 0.5, 20: math.inf},
    best_step=10,
    weights="ab" * 32,
    moments=({"step": 10, "dragger_benign": [0.1, None, 0.2]},),
    course={"bound": (1.0, 2.0, 1e-300)},
    domain_weights={"near": 1.5},
    facts={"points": 96},
    made={"seconds": 1.5},
)


def test_records_come_back_as_they_were(tmp_path):
    path = write(tmp_path, FULL)
    assert path == path_of(tmp_path, FULL.job)
    assert path.relative_to(tmp_path).as_posix() == "runs/digits/b4/0.001-seed203.json"
    found = read(path)
    assert found.job == FULL.job
    assert found.metrics["test_accuracy"] == 0.1 + 0.2  # to the last bit
    assert math.isnan(found.metrics["test_loss"])
    assert math.isnan(found.curve[20])  # JSON has no word for infinity
    assert found.course == FULL.course
    assert found.moments == FULL.moments
    assert found.settings == {"betas": [0.9, 0.999], "steps": 20}
    assert found.to_json() == json.loads(path.read_text())
    write(tmp_path / "again", found)
    assert path_of(tmp_path / "again", FULL.job).read_bytes() == path.read_bytes()


def test_figures_that_are_not_there_are_not_numbers():
    assert math.isnan(FULL.figure("test_top5_accuracy"))


def test_long_rows_of_numbers_take_a_line(tmp_path):
    long = replace(FULL, course={"bound": tuple(itertools.repeat(0.5, 1000))})
    text = write(tmp_path, long).read_text()
    assert len(text.splitlines()) < 60
    assert read(path_of(tmp_path, long.job)).course == long.course


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"job": 3}', '{"job": {"task": "x"}}'])
def test_a_file_that_is_no_record_is_named(tmp_path, text):
    path = write(tmp_path, FULL)
    path.write_text(text)
    with pytest.raises(RecordError, match=r"0\.001-seed203\.json should be the record of a run"):
        read_all(tmp_path)


def test_the_shelf_sees_what_others_bring_and_take(tmp_path):
    store = RecordStore(tmp_path)
    assert store.records() == {}
    path = write(tmp_path, FULL)
    assert set(store.records()) == {FULL.job}
    assert store.has(FULL.job)
    first = store.records()[FULL.job]
    assert store.records()[FULL.job] is first  # read once
    path.unlink()
    assert store.records() == {}
    assert not store.has(FULL.job)
