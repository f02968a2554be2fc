"""Sweeps: which runs come next, and their summary."""

import json
import math
import statistics
from dataclasses import replace

import pytest

from microclip.report.statistics import t_quantile
from microclip_lab.jobs.plan import PLAIN, Cell, Job, Result
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.sweep.grid import Grid, best_rate, rates_to_try
from microclip_lab.sweep.summary import Interval, bootstrap, summarise

FOUR = Cell("MinNorm", 4)


def grid(**options):
    """Return a plan in which higher is better, with two tuning and three evaluation seeds."""
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
    assert "b = 4. Compared with plain training, it changes test_score" in summary.verdict
    assert "(last weights) by +2.0" in summary.verdict
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
    assert any("3 seeds are too few" in note for note in compared([1.0] * 3, [2.0] * 3).notes)
    assert not any("too few" in note for note in compared([1.0] * 10, [2.0] * 10).notes)


def test_a_training_that_diverged_leaves_no_mean():
    summary = compared([1.0, 2.0], [1.0, math.nan])
    assert summary.rows[1].last.mean is None
    assert any("1 of 2 runs of b = 4 diverged" in note for note in summary.notes)
