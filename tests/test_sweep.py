"""Sweeps: plans, the register, statistics; and whole sweeps, interrupted, killed and shared."""

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
from dataclasses import replace
from io import StringIO
from pathlib import Path

import psutil
import pytest
import sqlalchemy
from optuna.trial import TrialState
from rich.console import Console

from microclip.recipes.command import read
from microclip.recipes.config import SettingError
from microclip.recipes.sweep import fleet, worker
from microclip.recipes.sweep.bootstrap import Interval, bootstrap
from microclip.recipes.sweep.command import RUNS, run_sweep
from microclip.recipes.sweep.config import SweepConfig
from microclip.recipes.sweep.crew import TrialError
from microclip.recipes.sweep.grid import Grid, best_rate, rates_to_try
from microclip.recipes.sweep.job import PLAIN, Cell, Job, Result
from microclip.recipes.sweep.pruning import Pruner
from microclip.recipes.sweep.register import GoneError, Register
from microclip.recipes.sweep.setup import ChangedError
from microclip.recipes.sweep.storage import StorageError, open_storage, open_study
from microclip.recipes.sweep.summary import summarise
from microclip.recipes.sweep.workplace import Workplace
from microclip.report.comparison import compare
from microclip.report.runs import read_run
from microclip.report.statistics import t_quantile

import sweep_recipe
from sweep_recipe import MEETING, STEPS, TRAP, Line

RECIPE, TRAINING = Line.presets()["default"]
FOUR = Cell("MinNorm", 4)
FILE = sweep_recipe.__file__
QUIET = Console(file=StringIO())


def sweep(out, recipe=RECIPE, training=TRAINING, **options):
    config = SweepConfig(
        **{
            "out": out,
            "microbatch_sizes": (4,),
            "learning_rates": (0.03, 0.1),
            "growth": 0,
            "tuning_seeds": 1,
            "seeds": 2,
            **options,
        }
    )
    path = run_sweep(recipe, training, config, console=Console(file=StringIO()), log=QUIET)
    return json.loads(path.read_text())


def grid(**options):
    """Return a plan in which more is better, two seeds choose and three compare."""
    config = SweepConfig(
        **{"microbatch_sizes": (4,), "learning_rates": (1.0, 3.0, 9.0), "seeds": 3, **options}
    )
    return Grid(config, "score", False, 3.0, 10, 100)


def result(**metrics):
    return Result("somewhere", metrics, {})


def tuned(plan, cell, by_rate):
    """Return tuning results with these validation scores; None: hopeless."""
    return {
        Job("tuning", cell, rate, seed): (
            Result("somewhere", {}, {}, "hopeless")
            if score is None
            else result(validation_score=score, best_validation_score=-score)
        )
        for rate, score in by_rate.items()
        for seed in plan.tuning_seeds
    }


# ---------------------------------------------------------------------------------------- plans


def test_seeds_that_rates_are_chosen_on_are_not_compared_on():
    plan = grid(tuning_seeds=2, seeds=3)
    assert list(plan.tuning_seeds) == [10, 11]
    assert list(plan.evaluation_seeds) == [12, 13, 14]


def test_a_sweep_begins_with_every_rate_on_every_tuning_seed():
    jobs = grid().missing({})
    assert len(jobs) == len(set(jobs)) == 2 * 3 * 2
    assert {job.stage for job in jobs} == {"tuning"}
    assert {job.cell for job in jobs} == {PLAIN, FOUR}


def test_with_no_rates_given_the_recipes_own_is_in_the_middle():
    assert grid(learning_rates=()).first_rates(FOUR) == (1.0, 3.0, 9.0)


def test_rates_of_a_rule_are_scaled_if_the_user_says_so():
    plan = grid(rules=("MinNorm", "Unit"), rate_scales={"Unit": 0.01})
    assert plan.first_rates(Cell("Unit", 4)) == (0.01, 0.03, 0.09)
    assert plan.first_rates(FOUR) == plan.first_rates(PLAIN) == (1.0, 3.0, 9.0)


def test_the_rate_inside_the_grid_is_taken_and_then_compared_on_the_same_seeds():
    plan = grid()
    finished = {
        **tuned(plan, PLAIN, {1.0: 0.2, 3.0: 0.8, 9.0: 0.4}),
        **tuned(plan, FOUR, {1.0: 0.2, 3.0: 0.7, 9.0: 0.1}),
    }
    jobs = plan.missing(finished)
    assert jobs == [Job("evaluation", c, 3.0, s) for c in (PLAIN, FOUR) for s in (12, 13, 14)]
    assert plan.missing({**finished, **dict.fromkeys(jobs, result())}) == []


@pytest.mark.parametrize(
    ("scores", "next_rates"),
    [
        ({1.0: 0.9, 3.0: 0.5, 9.0: 0.1}, [0.3333]),
        ({1.0: 0.1, 3.0: 0.5, 9.0: 0.9}, [27.0]),
        ({1.0: 0.1, 3.0: 0.5, 9.0: 0.9, 27.0: 0.8}, []),
        ({0.3333: 0.95, 1.0: 0.9, 3.0: 0.5, 9.0: 0.1}, [0.1111]),
        ({1.0: 0.5, 3.0: 0.5, 9.0: 0.5}, [0.3333]),  # of equals the smallest
        ({1.0: -math.inf, 3.0: -math.inf, 9.0: -math.inf}, [0.3333]),  # all diverged: smaller
        ({1.0: 0.5}, [3.0, 9.0]),
    ],
)
def test_a_grid_grows_where_its_best_rate_is_at_the_edge(scores, next_rates):
    assert rates_to_try((1.0, 3.0, 9.0), scores, growth=4) == next_rates


@pytest.mark.parametrize("growth", [0, 1, 3])
def test_a_grid_grows_no_further_than_it_may_and_says_that_it_is_at_the_edge(growth):
    plan = grid(growth=growth)
    scores = {}
    while rates := rates_to_try((1.0, 3.0, 9.0), scores, growth):
        scores |= {rate: rate for rate in rates}  # more is better, without end
    assert len(scores) == 3 + growth
    finished = tuned(plan, FOUR, scores)
    assert plan.chosen_rate(FOUR, finished) == best_rate(scores) == 9 * 3**growth
    assert plan.is_at_edge(FOUR, finished)


def test_a_rate_that_is_hopeless_on_one_seed_needs_no_other():
    plan = grid()
    finished = tuned(plan, FOUR, {1.0: 0.2, 3.0: 0.8})
    finished[Job("tuning", FOUR, 9.0, 10)] = Result("somewhere", {}, {}, "it had diverged")
    assert plan.chosen_rate(FOUR, finished) == 3.0
    assert Job("tuning", FOUR, 9.0, 11) not in plan.missing(finished)
    assert Job("tuning", FOUR, 9.0, 11) not in plan.expected(finished)


def test_a_cell_that_diverges_at_every_rate_is_lost_and_not_compared():
    plan = grid(growth=0)
    finished = tuned(plan, FOUR, dict.fromkeys((1.0, 3.0, 9.0)))
    assert plan.is_lost(FOUR, finished)
    assert plan.chosen_rate(FOUR, finished) is None
    assert FOUR not in {job.cell for job in plan.missing(finished)}
    assert "evaluation" not in {j.stage for j in plan.expected(finished) if j.cell == FOUR}


def test_one_rate_leaves_nothing_to_choose():
    plan = grid(learning_rates=(3.0,))
    assert {job.stage for job in plan.missing({})} == {"evaluation"}
    assert {job.learning_rate for job in plan.missing({})} == {3.0}


def test_what_is_chosen_by_is_what_is_judged_by():
    last, best = grid(judge_by="last"), grid(judge_by="best")
    finished = tuned(last, FOUR, {1.0: 0.8, 3.0: 0.9, 9.0: 0.8})  # the best look says the contrary
    assert last.chosen_rate(FOUR, finished) == 3.0
    assert best.scores(FOUR, finished) == {1.0: -0.8, 3.0: -0.9, 9.0: -0.8}


def test_less_is_better_where_the_recipe_says_so():
    plan = replace(grid(), lower_is_better=True)
    finished = tuned(plan, FOUR, {1.0: 5.0, 3.0: 2.0, 9.0: 5.0})
    assert plan.chosen_rate(FOUR, finished) == 3.0


# ----------------------------------------------------------------------------------- statistics


def test_bootstrap_intervals_by_hand():
    assert bootstrap([1.0]) is None
    assert bootstrap([0.0, 2.0]) == Interval(0.0, 2.0)  # 0, 1, 1, 2
    # the mean of three is 1 with probability 1/27 = 3.7 %, more than the 2.5 % that are cut off
    assert bootstrap([0.0, 0.0, 1.0]) == Interval(0.0, 1.0)
    # and that of four is 1 with probability 1/256, and 3/4 or more with 13/256 = 5.1 %
    assert bootstrap([0.0, 0.0, 0.0, 1.0]) == Interval(0.0, 0.75)
    assert bootstrap([5.0] * 8) == Interval(5.0, 5.0)


def test_with_many_seeds_bootstrap_and_normal_theory_agree():
    values = [math.sin(17 * i) for i in range(200)]
    found = bootstrap(values)
    half = 1.96 * statistics.stdev(values) / math.sqrt(200)
    assert found.low == pytest.approx(statistics.fmean(values) - half, abs=half / 20)
    assert found.high == pytest.approx(statistics.fmean(values) + half, abs=half / 20)
    assert bootstrap(values) == found


def compared(plain, clipped, validation=(0.5, 0.6)):
    """Return the summary of two cells with these test scores."""
    plan = grid(learning_rates=(3.0,), seeds=len(plain))
    finished = {}
    for cell, scores, seen in ((PLAIN, plain, validation[0]), (FOUR, clipped, validation[1])):
        for job, score in zip(plan.evaluation(cell, 3.0), scores, strict=True):
            finished[job] = result(
                test_score=score, best_test_score=score + 1, validation_score=seen
            )
    return summarise("hand", plan, finished)


def test_paired_differences_by_hand():
    summary = compared([10.0, 20.0, 30.0], [11.0, 22.0, 33.0])  # +1, +2, +3
    plain, four = summary.rows
    assert plain.last.difference is None
    assert plain.last.mean.mean == 20.0
    assert four.last.difference.mean == 2.0
    half = t_quantile(2) / math.sqrt(3)  # their deviation is 1
    assert four.last.difference.low == pytest.approx(2 - half)
    assert four.last.difference.high == pytest.approx(2 + half)
    assert four.last.bootstrap == Interval(1.0, 3.0)  # all three alike: 1/27 on either side
    assert four.best.difference == four.last.difference
    assert four.best.mean.mean == 23.0
    assert "b = 4. Against plain training it makes +2.0" in summary.verdict
    assert "no clear difference" in summary.verdict


@pytest.mark.parametrize(
    ("clipped", "said"),
    [
        ([11.0, 21.1, 31.0], "clipping helps here"),
        ([9.0, 18.9, 29.0], "plain training is better here"),
        ([math.nan, 1.0, 1.0], "nothing to compare"),
    ],
)
def test_the_verdict_follows_the_interval(clipped, said):
    summary = compared([10.0, 20.0, 30.0], clipped)
    assert said in summary.verdict
    json.dumps(summary.to_json({}), allow_nan=False)


def test_few_seeds_are_said_to_be_few():
    assert any("3 seeds are few" in note for note in compared([1.0] * 3, [2.0] * 3).notes)
    assert not any("are few" in note for note in compared([1.0] * 10, [2.0] * 10).notes)


def test_a_training_that_diverged_leaves_no_mean():
    summary = compared([1.0, 2.0], [1.0, math.nan])
    assert summary.rows[1].last.mean is None
    assert any("1 of 2 trainings of b = 4 diverged" in note for note in summary.notes)


# ------------------------------------------------------------------------------------- register


@pytest.fixture
def register(tmp_path):
    return opened(tmp_path)


def opened(folder):
    storage = open_storage(f"sqlite:///{folder / 'trials.db'}")
    return Register(open_study(storage, "study", lower_is_better=True), storage, Job.from_json)


def jobs(count, stage="evaluation"):
    return [Job(stage, FOUR, 0.1, seed) for seed in range(count)]


def test_no_job_is_given_to_two_workers(tmp_path):
    """Optuna alone does not see to it on SQLite, which knows no locks of rows."""
    wanted = jobs(24)
    opened(tmp_path).claim([])
    workers, got = [opened(tmp_path) for _ in range(4)], []
    start = threading.Barrier(len(workers))

    def claim_all(register):
        start.wait()
        while (claim := register.claim(wanted)) is not None:
            got.append(claim.job)

    threads = [threading.Thread(target=claim_all, args=(w,)) for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job.seed for job in got) == list(range(24))


def test_what_is_finished_is_known_to_all_and_never_given_out_again(register, tmp_path):
    (job,) = jobs(1)
    claim = register.claim([job])
    done = Result("here", {"validation_error": 0.5}, {4: 0.7, 8: 0.5})
    register.complete(claim, done, 0.5)
    other = opened(tmp_path)
    assert other.standing().finished == {job: done}
    assert other.claim([job]) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_figures_that_are_not_finite_can_be_kept(register, value):
    claim = register.claim(jobs(1))
    register.note(claim, 4, value)
    register.complete(claim, Result("here", {"validation_error": value}, {}), value)
    (found,) = register.standing().finished.values()
    assert str(found.metrics["validation_error"]) == str(value)


def test_a_job_whose_worker_was_killed_on_this_machine_is_free_at_once(register, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = psutil.Process(process.pid).create_time()
    register.here = Workplace(Workplace.here().machine, process.pid, began)
    register.claim(jobs(1))
    other = opened(tmp_path)
    other.release_abandoned()
    assert other.claim(jobs(1)) is None
    process.kill()
    process.communicate()
    other.release_abandoned()
    assert other.claim(jobs(1)) is not None


def test_a_job_whose_worker_is_elsewhere_is_free_after_a_silence(register, tmp_path):
    register.here = Workplace("another machine", 1, 0.0)
    claim = register.claim(jobs(1))
    other = opened(tmp_path)
    other.release_abandoned()
    assert other.claim(jobs(1)) is None
    with register.storage.engine.begin() as connection:
        connection.execute(
            sqlalchemy.text("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')")
        )
    other.release_abandoned()
    assert other.claim(jobs(1)) is not None
    with pytest.raises(GoneError):  # should it come back, it hears of it
        register.note(claim, 4, 0.5)
    with pytest.raises(GoneError):
        register.complete(claim, result(), 0.5)


def test_of_a_job_that_was_written_down_twice_one_is_done(register, tmp_path):
    other = opened(tmp_path)
    (job,) = jobs(1)
    register._write_down(job)
    other._write_down(job)
    register.complete(register.claim([job]), result(), 0.5)
    assert other.claim([job]) is None
    register.close()
    states = [trial.state for trial in register.study.trials]
    assert states == [TrialState.COMPLETE, TrialState.FAIL]


def test_errors_count_since_one_came_and_are_tried_again_after_that(register, tmp_path):
    (job,) = jobs(1)
    register.give_up(register.claim([job]), "the disk is on fire")
    assert register.standing().broken == {job: "the disk is on fire"}
    other = opened(tmp_path)
    assert other.standing().broken == {}
    assert other.claim([job]) is not None


def test_a_storage_that_is_none_is_refused():
    with pytest.raises(StorageError, match="nonsense"):
        open_storage("nonsense://here")


# -------------------------------------------------------------------------------------- pruning


def pruned(register, curves, curve, stage="tuning", cell=FOUR):
    """Return the verdict on a curve, given those of finished trainings of other rates."""
    for place, values in enumerate(curves):
        claim = register.claim([Job("tuning", FOUR, 1.0 + place, 0)])
        register.complete(claim, Result("here", {}, values), 0.0)
    claim = register.claim([Job(stage, cell, 0.5, 0)])
    for step, value in curve.items():
        register.note(claim, step, value)
    return Pruner(register, 100).verdict(claim)


GOOD = [{20: 8.0, 40: 4.0, 60: 2.0, 80: 1.0}, {20: 9.0, 40: 5.0, 60: 3.0, 80: 2.0}]


def test_what_stands_still_while_others_learn_is_hopeless(register):
    said = pruned(register, GOOD, {20: 8.5, 40: 8.5, 60: 8.5})
    assert said == "by step 60 it had come 0% as far as other learning rates"


def test_what_is_only_a_little_behind_is_not(register):
    assert pruned(register, GOOD, {20: 9.0, 40: 6.0, 60: 4.0}) is None


def test_nothing_is_hopeless_in_the_first_half(register):
    assert pruned(register, GOOD, {20: 99.0, 40: 99.0}) is None


def test_what_diverged_is_hopeless_at_once(register):
    assert pruned(register, [], {20: math.nan}) == "it had diverged by step 20"


@pytest.mark.parametrize(("stage", "cell"), [("evaluation", FOUR), ("tuning", PLAIN)])
def test_neither_comparisons_nor_other_cells_are_ended(register, stage, cell):
    assert pruned(register, GOOD, {20: 99.0, 40: 99.0, 60: 99.0}, stage, cell) is None


def test_one_rival_is_too_few(register):
    assert pruned(register, GOOD[:1], {20: 8.5, 40: 8.5, 60: 8.5}) is None


# ---------------------------------------------------------------------------------- whole sweeps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A sweep with two rules: its folder, and what it says."""
    out = tmp_path_factory.mktemp("undisturbed") / "sweep"
    return out, sweep(out, rules=("MinNorm", "Unit"), seeds=2)


def test_a_sweep_tells_everything(undisturbed):
    out, said = undisturbed
    assert [cell["name"] for cell in said["cells"]] == ["plain", "b = 4", "Unit, b = 4"]
    assert said["evaluation_seeds"] == [1, 2]
    for cell in said["cells"]:
        assert {run["seed"] for run in cell["runs"]} == {1, 2}
        for run in cell["runs"]:
            assert {"test_error", "best_test_error", "validation_error"} <= run["metrics"].keys()
            logged = read_run(out / RUNS / run["folder"]).metrics["test_error"]
            assert logged == {STEPS: run["metrics"]["test_error"]}
    plain, four, unit = said["cells"]
    by_hand = statistics.fmean(
        ours["metrics"]["test_error"] - theirs["metrics"]["test_error"]
        for ours, theirs in zip(four["runs"], plain["runs"], strict=True)
    )
    assert four["last"]["difference"]["mean"] == pytest.approx(by_hand)
    assert unit["rule"] == "Unit"
    text = (out / "sweep.md").read_text()
    assert "| Unit, b = 4 |" in text
    assert said["verdict"] in text


def test_the_page_of_a_sweep_tells_rules_apart(undisturbed):
    out, said = undisturbed
    assert (out / "sweep.html").stat().st_size > 1_000_000
    folders = [run["folder"] for cell in said["cells"] for run in cell["runs"]]
    (comparison,) = compare([read_run(out / RUNS / folder) for folder in folders])
    assert [len(setting.runs) for setting in comparison.settings] == [2, 2, 2]
    plain, *clipped = (setting.name for setting in comparison.settings)
    assert plain == "plain training"
    assert ["Unit" in name for name in clipped] != ["MinNorm" in name for name in clipped]
    assert comparison.headline == "test_error"


def test_given_again_a_finished_sweep_trains_nothing(undisturbed, monkeypatch):
    out, said = undisturbed
    monkeypatch.setattr(worker, "train", None)
    assert sweep(out, rules=("MinNorm", "Unit"), seeds=2) == said


def test_a_sweep_that_grows_keeps_what_was_done(undisturbed, tmp_path, monkeypatch):
    out, said = undisturbed
    trained = []
    real = worker.train

    def counted(recipe, training, **options):
        trained.append((training.microbatch_size, training.seed))
        return real(recipe, training, **options)

    monkeypatch.setattr(worker, "train", counted)
    grown = sweep(out, rules=("MinNorm", "Unit"), seeds=3)
    assert trained == [(None, 3), (4, 3), (4, 3)]
    assert [cell["runs"][:2] for cell in grown["cells"]] == [c["runs"] for c in said["cells"]]


@pytest.mark.parametrize(
    ("recipe", "training", "options", "said"),
    [
        (RECIPE, replace(TRAINING, steps=40), {}, "steps was 20 and is now 40"),
        (RECIPE, TRAINING, {"judge_by": "best"}, "judge_by was 'last' and is now 'best'"),
        (Line(contrary=True), TRAINING, {}, "contrary was False and is now True"),
    ],
)
def test_a_sweep_is_not_gone_on_with_in_another_way(undisturbed, recipe, training, options, said):
    out, _ = undisturbed
    with pytest.raises(ChangedError, match=said):
        sweep(out, recipe, training, **options)


def test_nor_in_the_same_folder_with_another_storage(undisturbed, tmp_path):
    out, _ = undisturbed
    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    with pytest.raises(ChangedError, match="steps was 20 and is now 40"):
        sweep(out, training=replace(TRAINING, steps=40), storage=elsewhere)


def test_rates_are_chosen_on_validation_data_even_if_test_data_says_otherwise(tmp_path):
    said = sweep(tmp_path / "sweep", Line(contrary=True), seeds=1, learning_rates=(0.001, 0.03))
    for cell in said["cells"]:
        tried = {t["learning_rate"]: t["validation"] for t in cell["tried"]}
        assert cell["learning_rate"] == min(tried, key=tried.get) == 0.03
    # what test data says can be read in the folder of a rate that was not chosen
    (slow,) = (tmp_path / "sweep" / RUNS / "tuning").glob("MinNorm-b4-lr0.001-*")
    (fast,) = (tmp_path / "sweep" / RUNS / "tuning").glob("MinNorm-b4-lr0.03-*")
    tested = [list(read_run(f).metrics["test_error"].values())[-1] for f in (slow, fast)]
    assert tested[0] < tested[1]


def test_a_rate_that_diverges_is_ended_and_its_folder_kept(tmp_path):
    said = sweep(tmp_path / "sweep", learning_rates=(0.03, 0.1, 1e20), seeds=1)
    assert all(c["tried"][2] == {"learning_rate": 1e20, "validation": None} for c in said["cells"])
    assert all(c["learning_rate"] < 1 for c in said["cells"])
    kept = list((tmp_path / "sweep" / RUNS / "tuning").glob("*lr1e+20*"))
    assert len(kept) == 2
    assert all((folder / "run.json").exists() for folder in kept)


def test_a_broken_training_stops_no_other_and_is_named(tmp_path):
    recipe = Line(broken=2)
    with pytest.raises(TrialError, match="seed 2: RuntimeError: the disk is on fire"):
        sweep(tmp_path / "sweep", recipe, learning_rates=(0.1,), seeds=3)
    storage = open_storage(f"sqlite:///{tmp_path / 'sweep' / 'trials.db'}")
    register = Register(open_study(storage, "sweep", lower_is_better=True), storage, Job.from_json)
    assert {job.seed for job in register.standing().finished} == {1, 3}


def test_an_interrupted_training_goes_on_from_its_checkpoint(undisturbed, tmp_path, monkeypatch):
    _, said = undisturbed
    left = [50]

    def interrupt():
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sweep_recipe, "_fall_into_trap", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "sweep", rules=("MinNorm", "Unit"))
    again = sweep(tmp_path / "sweep", rules=("MinNorm", "Unit"))
    assert again["cells"] == said["cells"]


# -------------------------------------------------------------------------------------- commands

OPTIONS = [
    *("--microbatch-sizes", "none", "4", "--learning-rates", "0.03", "0.1", "--growth", "0"),
    *("--tuning-seeds", "1", "--seeds", "2"),
]


def command(out, *options, **environment):
    return subprocess.run(
        [sys.executable, "-m", "microclip", "sweep", FILE, *OPTIONS, "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def trials(out):
    storage = open_storage(f"sqlite:///{out / 'trials.db'}")
    return open_study(storage, "sweep", lower_is_better=True).trials


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a sweep that one process has made without interruption."""
    out = tmp_path_factory.mktemp("whole") / "sweep"
    assert command(out).returncode == 0
    return out


@pytest.mark.slow
def test_a_sweep_that_is_killed_loses_nothing_and_comes_to_the_same(whole, tmp_path):
    killed, trap = tmp_path / "sweep", tmp_path / "trap"
    done = []
    for moment in (27, 74):  # in the middle of a plain training, and of a clipped one
        trap.write_text(str(moment))
        assert command(killed, **{TRAP: str(trap)}).returncode == -signal.SIGKILL
        finished = [t for t in trials(killed) if t.state == TrialState.COMPLETE]
        assert done == [(t.number, t.datetime_complete) for t in finished[: len(done)]]
        done = [(t.number, t.datetime_complete) for t in finished]
    assert len(done) == 4
    assert command(killed).returncode == 0
    assert (killed / "sweep.json").read_text() == (whole / "sweep.json").read_text()
    assert (killed / "sweep.md").read_text() == (whole / "sweep.md").read_text()
    resumed = [f for f in (killed / RUNS).glob("*/*/metrics.jsonl") if "resumed" in f.read_text()]
    assert len(resumed) == 2


@pytest.mark.slow
def test_two_workers_share_the_work_and_come_to_the_same(whole, tmp_path):
    shared, meeting = tmp_path / "sweep", tmp_path / "meeting"
    meeting.mkdir()
    done = command(shared, "--workers", "2", **{MEETING: str(meeting)})
    assert done.returncode == 0, done.stderr
    assert "ended early" not in done.stderr
    completed = [t for t in trials(shared) if t.state == TrialState.COMPLETE]
    assert len({t.user_attrs["worker"]["process"] for t in completed}) == 2
    seen = [json.dumps(t.user_attrs["job"]) for t in completed]
    assert len(seen) == len(set(seen))
    assert not [f for f in (shared / RUNS).glob("*/*/metrics.jsonl") if "resumed" in f.read_text()]
    assert (shared / "sweep.json").read_text() == (whole / "sweep.json").read_text()


def test_options_on_the_command_line():
    order = read(
        "sweep",
        [
            *(FILE, "--microbatch-sizes", "none", "2", "--rules", "MinNorm", "Quantile(0.2)"),
            *("--rate-scales", "Quantile(0.2)", "0.5", "--no-prune", "--workers", "3", "--race"),
        ],
    )
    assert order.sweep.microbatch_sizes == (None, 2)
    assert order.sweep.sizes == (2,)
    assert order.sweep.rate_scales == {"Quantile(0.2)": 0.5}
    assert order.sweep.race
    assert not order.sweep.prune
    assert order.training.workers == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatch_sizes": (None,)}, "nothing to compare plain training with"),
        ({"microbatch_sizes": (0,)}, "must be positive, or none for plain training, but got 0"),
        ({"rules": ()}, "at least one rule"),
        ({"learning_rates": (-1.0,)}, "positive and finite, but got -1.0"),
        ({"rate_scales": {"Unit": 0.1}}, "names Unit, which is not among the rules"),
        ({"seeds": 0}, "seeds must be between 1 and 10,000, but got 0"),
        ({"budget": 1.5}, "budget must be 2 or more, but got 1.5"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(SettingError, match=said):
        SweepConfig(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatch_sizes": (3,)}, "cannot be cut into micro-batches of 3"),
        ({"rules": ("Nonsense",)}, "rule must be one of"),
        ({"workers": 2}, "not by which command"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is(tmp_path, options, said):
    with pytest.raises(SettingError, match=said):
        sweep(tmp_path / "sweep", **options)
    assert not list(tmp_path.glob("sweep/runs/*"))


def test_several_processes_per_training_are_not_for_sweeps(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="without accelerate launch"):
        sweep(tmp_path)


def test_a_worker_that_ends_badly_is_quoted(tmp_path):
    code = "import sys; sys.exit('no memory')"
    with fleet.fleet([sys.executable, "-c", code], 1, tmp_path) as (hand,):
        hand.process.wait()
        assert hand.complaint.endswith("worker-1.log (exit code 1): no memory")


def test_workers_are_gone_when_their_block_is_left(tmp_path):
    code = "from microclip.recipes.sweep.fleet import *; assert is_worker(); input()"
    with fleet.fleet([sys.executable, "-c", code], 2, tmp_path) as hands:
        pass
    assert not any(hand.works for hand in hands)


def test_workers_end_with_the_process_that_started_them_even_if_it_is_killed(tmp_path):
    child = "from microclip.recipes.sweep.fleet import *; leave_with_parent(); signal.pause()"
    parent = f"""
import os, signal, sys
from pathlib import Path
from microclip.recipes.sweep.fleet import fleet
with fleet([sys.executable, "-c", {child!r}], 1, Path({str(tmp_path)!r})) as (hand,):
    print(hand.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=60)  # raises if it does not end


def test_folders_are_named_by_what_is_trained():
    job = Job("tuning", Cell("Quantile(0.2)", 4), 1e-05, 7)
    assert Path(job.folder).as_posix() == "tuning/Quantile-0.2-b4-lr1e-05-seed7"
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
