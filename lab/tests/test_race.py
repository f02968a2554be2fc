"""Races: cost, which candidates continue, verdicts; and whole races, killed and resumed."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from microclip.report.runs import read_run
from microclip_lab.jobs.plan import PLAIN, Cell, Job, Result
from microclip_lab.sweep.command import RUNS, plan_of, run_sweep
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.sweep.race import Race, Rung, cost, halvings, rungs
from microclip_lab.sweep.race_report import report_race, variation
from microclip_lab.sweep.setup import ChangedError
from microclip_lab.training.config import SettingError
from microclip_lab.training.train import train

import sweep_recipe
from sweep_recipe import STEPS, TRAP, Line

RECIPE, TRAINING = Line.presets()["default"]
ONE, TWO, FOUR = (Cell("MinNorm", b) for b in (1, 2, 4))


# ----------------------------------------------------------------------------------------- cost


@example(candidates=107, steps=990, budget=2.0, warm_up=0.01)  # no room to delay the first rung
@given(
    candidates=st.integers(1, 300),
    steps=st.integers(1, 10**6),
    budget=st.floats(2.0, 6.0),
    warm_up=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)
def test_a_race_never_costs_more_than_its_budget(candidates, steps, budget, warm_up):
    if steps < candidates * len(halvings(candidates)):
        return  # there may be too few steps
    race = rungs(candidates, steps, budget, round(warm_up * steps))
    assert cost(race) <= budget * steps
    assert race[-1] == Rung(steps, 1)
    assert [rung.field for rung in race] == halvings(candidates)
    reached = [rung.step for rung in race]
    assert reached == sorted(reached)
    assert all(1 <= step <= steps for step in reached)
    below = [step for step in reached if step < steps]
    assert len(below) == len(set(below))


@given(
    candidates=st.integers(2, 64),
    steps=st.integers(10_000, 10**6),
    warm_up=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)
def test_and_hardly_less_than_two_trainings(candidates, steps, warm_up):
    assert cost(rungs(candidates, steps, warm_up=round(warm_up * steps))) > 1.9 * steps


def test_nobody_leaves_during_the_warm_up_if_that_can_be_afforded():
    assert rungs(6, 1000)[0].step == 83
    assert rungs(6, 1000, warm_up=100)[0].step == 150
    # a fifth of the steps for each of five losers is all there is, and three quarters of it is 150
    assert rungs(6, 1000, warm_up=300)[0].step == 150
    assert rungs(16, 1000, warm_up=100)[0].step == 50
    assert rungs(6, 1000, warm_up=10) == rungs(6, 1000)


def test_a_race_by_hand():
    # two: both to the end, which is twice one training
    assert rungs(2, 100) == (Rung(100, 2), Rung(100, 1))
    # three: R = 100 / (2 - 1/3 - 1/2) = 85.7; 85.7 / 3 = 28.6, and 42.9 more
    assert rungs(3, 100) == (Rung(28, 3), Rung(71, 2), Rung(100, 1))
    assert cost(rungs(3, 100)) == 3 * 28 + 2 * 43 + 29
    assert rungs(1, 100) == (Rung(100, 1),)


def test_too_few_steps_are_refused():
    with pytest.raises(SettingError, match="10 steps are too few to race 64 candidates"):
        rungs(64, 10)


# ----------------------------------------------------------------------------------------- plans


def race(sizes=(1, 2, 4), steps=1000, **options):
    """Return a plan in which higher is better."""
    return Race(
        SweepConfig(race=True, microbatch_sizes=sizes, **options), "score", False, 0.1, 7, steps
    )


def run(plan, scores, curve=lambda score: {}):
    """Return the results of a whole race, with these scores by cell."""
    finished = {}
    while jobs := plan.missing(finished):
        for job in jobs:
            score = scores[job.cell]
            finished[job] = Result(job.folder, {"validation_score": score}, curve(score))
    return finished


def test_the_better_half_goes_on():
    plan = race()
    finished = run(plan, {PLAIN: 0.2, ONE: 0.1, TWO: 0.4, FOUR: 0.3})
    laps = plan.laps(finished)
    assert [lap.ranking for lap in laps] == [(TWO, FOUR, PLAIN, ONE), (TWO, FOUR), (TWO,)]
    goals = {cell: [job.until for job in finished if job.cell == cell] for cell in plan.cells}
    first, second, _ = (rung.step for rung in plan.rungs)
    assert goals == {
        PLAIN: [first],
        ONE: [first],
        TWO: [first, second, None],
        FOUR: [first, second],
    }
    assert sum(plan.work(job) for job in finished) == plan.cost <= 2000


def test_a_tie_goes_to_plain_training_then_to_the_larger_size():
    plan = race()
    finished = run(plan, dict.fromkeys(plan.cells, 0.5))
    assert plan.laps(finished)[0].ranking == (PLAIN, FOUR, TWO, ONE)
    assert report_race("hand", plan, finished).winner.cell == PLAIN


def test_who_diverged_comes_last():
    plan = race()
    finished = run(plan, {PLAIN: math.nan, ONE: -1e9, TWO: math.nan, FOUR: -2.0})
    assert plan.laps(finished)[0].ranking == (FOUR, ONE, PLAIN, TWO)


def test_less_is_better_where_the_recipe_says_so():
    plan = replace(race(), lower_is_better=True)
    finished = run(plan, {PLAIN: 3.0, ONE: 1.0, TWO: 2.0, FOUR: 4.0})
    assert plan.laps(finished)[0].ranking == (ONE, TWO, PLAIN, FOUR)


def test_with_a_budget_of_three_plain_training_stays_in():
    plan = race(sizes=(1, 2, 4, 8, 16), budget=3.0)
    finished = run(plan, {cell: float(cell.microbatch_size or 0) for cell in plan.cells})
    laps = plan.laps(finished)
    assert [len(lap.ranking) for lap in laps] == [6, 4, 3, 2]
    assert all(lap.ranking[-1] == PLAIN for lap in laps)
    assert plan.cost <= 3000
    assert sum(plan.work(job) for job in finished) == plan.cost
    assert report_race("hand", plan, finished).winner.cell == Cell("MinNorm", 16)


@pytest.mark.parametrize("seeds", [1, 3])
def test_what_is_expected_at_the_start_is_what_it_comes_to(seeds):
    plan = race(race_seeds=seeds)
    finished = run(plan, {PLAIN: 0.2, ONE: 0.1, TWO: 0.4, FOUR: 0.3})
    assert len(plan.expected({})) == len(plan.expected(finished)) == len(finished)
    assert sum(map(plan.work, plan.expected({}))) == plan.cost
    assert {job.seed for job in finished} == set(range(7, 7 + seeds))


def test_rates_are_the_recipes_unless_a_rule_is_scaled():
    plan = race(sizes=(4,), rules=("MinNorm", "Unit"), rate_scales={"Unit": 0.1})
    assert [plan.rate(cell) for cell in plan.cells] == [0.1, 0.1, 0.01]
    assert race(learning_rates=(0.3,)).rate(FOUR) == 0.3
    with pytest.raises(SettingError, match="one learning rate for all settings, but got"):
        race(learning_rates=(0.1, 0.3))


def test_a_race_with_too_few_steps_is_refused_before_it_starts(tmp_path):
    config = SweepConfig(out=tmp_path, race=True, microbatch_sizes=(1, 2, 4))
    with pytest.raises(SettingError, match="2 steps are too few to race 4 candidates"):
        plan_of(RECIPE, replace(TRAINING, steps=2), config)


# -------------------------------------------------------------------------------------- verdicts


def said(plan, scores, curve):
    return report_race("hand", plan, run(plan, scores, curve)).verdict


def wavy(size):
    """Return curves that oscillate around a score with this amplitude, each differently."""

    def curve(score):
        wave = [math.sin(100 * score * step) for step in range(20)]
        return {50 * step: score + size * wave[step] for step in range(20)}

    return curve


def test_a_lead_within_the_noise_is_said_to_be_no_lead():
    verdict = said(race((4,)), {PLAIN: 0.50, FOUR: 0.51}, wavy(0.1))
    assert verdict.startswith("b = 4 won. At step 1000, the last one both reached, it was ahead of")
    assert "plain by 0.01 of validation_score" in verdict
    assert "does not separate the two" in verdict


def test_a_lead_beyond_the_noise_is_still_one_run():
    verdict = said(race((4,)), {PLAIN: 0.5, FOUR: 0.9}, wavy(0.01))
    assert "more than the noise of one run, but it is a single run" in verdict


def test_with_few_evaluations_nothing_is_said_of_noise():
    verdict = said(race((4,)), {PLAIN: 0.5, FOUR: 0.9}, lambda score: {500: score})
    assert "too few evaluations" in verdict


def test_over_seeds_the_lead_has_an_interval():
    plan = race((4,), race_seeds=3)
    finished = {}
    while jobs := plan.missing(finished):
        for job in jobs:
            score = 0.5 if job.cell == PLAIN else 0.6 + 0.01 * job.seed
            finished[job] = Result(job.folder, {"validation_score": score}, {plan.steps: score})
    verdict = report_race("hand", plan, finished).verdict
    assert "seed by seed +0.180 (+0.155 to +0.205), over 3 seeds" in verdict
    assert "excludes 0" in verdict


def test_it_is_said_where_plain_training_left():
    scores = {PLAIN: 0.2, ONE: 0.1, TWO: 0.4, FOUR: 0.3}
    verdict = said(race(), scores, wavy(0.1))
    step = race().rungs[0].step
    assert verdict.endswith(f"Plain training dropped out at step {step}, 0.2 behind.")
    assert "dropped out" not in said(race((4,)), {PLAIN: 0.5, FOUR: 0.51}, wavy(0.1))


def test_if_all_diverge_there_is_no_winner():
    assert "No winner" in said(race(), dict.fromkeys(race().cells, math.nan), lambda score: {})


def test_variation_is_that_of_noise_whatever_the_trend():
    noise = [math.sin(7 * i * i) for i in range(2000)]
    trend = [0.001 * i + value for i, value in enumerate(noise)]
    assert variation(noise) == pytest.approx(statistics.stdev(noise), rel=0.05)
    assert variation(trend) == pytest.approx(statistics.stdev(noise), rel=0.05)
    assert variation([1.0, 2.0]) is None


# ----------------------------------------------------------------------------------- whole races


def raced(out, training=TRAINING, **options):
    config = SweepConfig(**{"out": out, "race": True, "microbatch_sizes": (1, 2, 4), **options})
    log = Console(file=StringIO(), width=1000)
    path = run_sweep(RECIPE, training, config, console=Console(file=StringIO()), log=log)
    return json.loads(path.read_text()), log.file.getvalue()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "race"
    return out, *raced(out)


def test_a_race_says_its_cost_before_and_keeps_to_it(undisturbed):
    out, found, log = undisturbed
    assert f"{found['cost']} steps in all" in log
    assert found["cost"] <= 2 * STEPS
    steps = [max(read_run(folder).metrics["loss"]) for folder in (out / RUNS / "race").iterdir()]
    assert len(steps) == 4
    assert sum(steps) == found["cost"]


def test_the_winner_is_trained_to_the_end_as_if_there_had_been_no_race(undisturbed, tmp_path):
    out, found, _ = undisturbed
    winner = found["candidates"][0]
    assert winner["won"]
    assert winner["last_step"] == STEPS
    (run,) = winner["runs"]
    alone = replace(
        TRAINING,
        out=tmp_path / "alone",
        microbatch_size=winner["microbatch_size"],
        learning_rate=winner["learning_rate"],
        page=False,
    )
    metrics = train(RECIPE, alone).metrics
    for name in ("validation_error", "test_error"):
        assert run["metrics"][name] == metrics[name]  # to the last bit
    assert (out / "race.html").exists()
    assert "won" in (out / "race.md").read_text()


def test_all_start_alike(undisturbed):
    """The first loss is that of the initial weights, on the same mini-batch."""
    out, _, _ = undisturbed
    settings = [json.loads((f / "run.json").read_text()) for f in (out / RUNS / "race").iterdir()]
    assert {setting["seed"] for setting in settings} == {TRAINING.seed}
    assert {setting["settings"]["learning_rate"] for setting in settings} == {0.1}


def test_a_race_with_other_candidates_is_another_race(undisturbed):
    out, *_ = undisturbed
    with pytest.raises(ChangedError, match=r"sizes was \[1, 2, 4\] and is now \[1, 2\]"):
        raced(out, microbatch_sizes=(1, 2))


def test_a_race_from_a_checkpoint_starts_where_it_was(undisturbed, tmp_path):
    out, found, _ = undisturbed
    (checkpoint,) = (out / RUNS / found["candidates"][0]["runs"][0]["folder"]).glob(
        "checkpoints/best-*"
    )
    again, _ = raced(
        tmp_path / "race", replace(TRAINING, start_from=checkpoint), microbatch_sizes=(4,)
    )
    before = found["candidates"][-1]["validation"][0]["mean"]
    assert max(c["validation"][0]["mean"] for c in again["candidates"]) < before


@pytest.mark.full
def test_a_race_that_is_killed_comes_to_the_same(undisturbed, tmp_path):
    _, found, _ = undisturbed
    trap = tmp_path / "trap"
    killed = tmp_path / "race"
    command = [
        *(sys.executable, "-m", "microclip", "sweep", sweep_recipe.__file__, "--race"),
        *("--microbatch-sizes", "1", "2", "4", "--out", str(killed)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", TRAP: str(trap)}
    trap.write_text("30")
    for expected in (-signal.SIGKILL, 0):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == expected, done.stderr
    assert json.loads((killed / "race.json").read_text()) == found


def test_a_lap_that_was_run_but_not_noted_is_not_run_again(tmp_path):
    """As if killed between writing the checkpoint and updating the queue."""
    plan = plan_of(RECIPE, TRAINING, SweepConfig(race=True, microbatch_sizes=(1, 2, 4)))
    job = plan.missing({})[0]
    assert job == Job("race", PLAIN, 0.1, 0, plan.rungs[0].step)
    folder = tmp_path / "race" / RUNS / job.folder
    train(RECIPE, replace(TRAINING, out=folder, page=False), until=job.until)
    logged = (folder / "metrics.jsonl").read_text()
    found, _ = raced(tmp_path / "race")
    (plain,) = (c for c in found["candidates"] if c["name"] == "plain")
    assert plain["validation"][0]["mean"] == read_run(folder).metrics["validation_error"][job.until]
    assert (folder / "metrics.jsonl").read_text().startswith(logged)
