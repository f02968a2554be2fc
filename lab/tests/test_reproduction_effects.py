"""Effects and verdicts, from made-up records whose numbers can be checked by hand."""

import math

import pytest

from microclip.report.statistics import Estimate, t_quantile
from microclip_lab.reproduction.claims import CLAIMS, CONTROLS, Part
from microclip_lab.reproduction.effects import (
    CosineGap,
    CosineLevel,
    Effect,
    Gain,
    Rise,
    Slope,
    Speed,
    effect,
)
from microclip_lab.reproduction.verdicts import PartVerdict, controls, decide, judge, together, told

from reproduction_records import everything, moment, plan, record, settled


def runs(name, *values, **more):
    """Return arguments of records, one for each seed, with a test and a validation figure."""
    return [
        {"metrics": {f"best_test_{name}": value, f"best_validation_{name}": value} | more}
        for value in values
    ]


def found(task, values, quantity):
    study = plan(task)
    return effect(study, settled(study, task, values), quantity)


DIVERGED = {"metrics": {}, "diverged": "The loss was not finite."}


def test_a_gain_is_in_points_and_paired_by_seed():
    values = {
        "plain": runs("accuracy", 0.88, 0.89, 0.90),
        "b4": runs("accuracy", 0.90, 0.92, 0.91),
    }
    gain = found("digits", values, Gain("digits", ("b4",)))
    assert gain.values == pytest.approx({200: 2.0, 201: 3.0, 202: 1.0})
    assert gain.unit == "points"
    half = t_quantile(2) / math.sqrt(3)  # their standard deviation is 1
    assert gain.estimate.mean == pytest.approx(2.0)
    assert (gain.estimate.low, gain.estimate.high) == pytest.approx((2 - half, 2 + half))
    assert gain.arm is None  # there was nothing to choose
    assert set(gain.records) == {
        f"digits/{arm}/0.001-seed{seed}" for arm in ("b4", "plain") for seed in (200, 201, 202)
    }
    assert not gain.is_complete  # six seeds are planned
    assert told(gain).endswith("3 of 6 seeds so far")


def test_fewer_errors_are_a_gain():
    values = {"plain": runs("wer", 0.20, 0.30), "b4": runs("wer", 0.15, 0.28)}
    gain = found("speech", values, Gain("speech", ("b4",)))
    assert gain.values == pytest.approx({200: 5.0, 201: 2.0})


def test_a_gain_in_several_figures_is_their_mean():
    def of(tweets, amazon):
        figures = {"best_test_accuracy_tweets": tweets, "best_test_accuracy_amazon": amazon}
        return runs("accuracy", 0.5, 0.5, **figures)

    figures = ("best_test_accuracy_tweets", "best_test_accuracy_amazon")
    values = {"plain": of(0.60, 0.70), "b4": of(0.58, 0.66)}
    gain = found("mixture", values, Gain("mixture", ("b4",), figures=figures))
    assert gain.values == pytest.approx({200: -3.0, 201: -3.0})
    assert (gain.estimate.low, gain.estimate.high) == pytest.approx((-3.0, -3.0))


def test_of_several_arms_validation_data_chooses_and_test_data_does_not():
    def of(validation, test):
        return [{"metrics": {"best_validation_wer": validation, "best_test_wer": test}}] * 2

    values = {
        "plain": of(0.30, 0.30),
        "b2": of(0.25, 0.10),  # best on test data
        "b4": of(0.20, 0.22),  # best on validation data
        "b8": of(0.28, 0.28),
    }
    gain = found("speech", values, Gain("speech", ("b2", "b4", "b8")))
    assert gain.arm == "b4"
    assert gain.values == pytest.approx({200: 8.0, 201: 8.0})
    assert told(gain).startswith("b4, +8.00 points")


def test_nothing_is_chosen_while_an_arm_is_missing():
    values = {"plain": runs("wer", 0.3, 0.3), "b2": runs("wer", 0.2, 0.2)}
    assert found("speech", values, Gain("speech", ("b2", "b4", "b8"))) is None


@pytest.mark.parametrize("wrong", [DIVERGED, {"metrics": {"best_test_accuracy": math.nan}}])
def test_a_run_that_diverged_has_accuracy_0(wrong):
    values = {"plain": runs("accuracy", 0.8, 0.8), "b4": [*runs("accuracy", 0.9), wrong]}
    gain = found("digits", values, Gain("digits", ("b4",)))
    assert gain.values == pytest.approx({200: 10.0, 201: -80.0})
    assert gain.diverged == ("digits/b4/0.001-seed201",)
    assert "1 run diverged and counted as the worst" in told(gain)


def test_a_run_that_diverged_has_an_error_rate_of_100():
    values = {"plain": [DIVERGED, *runs("wer", 0.3)], "b4": runs("wer", 0.2, 0.2)}
    gain = found("speech", values, Gain("speech", ("b4",)))
    assert gain.values == pytest.approx({200: 80.0, 201: 10.0})


def test_one_seed_is_no_effect_and_neither_is_a_task_that_is_not_there():
    values = {"plain": runs("accuracy", 0.8, 0.8), "b4": runs("accuracy", 0.9)}
    assert found("digits", values, Gain("digits", ("b4",))) is None
    assert found("digits", values, Gain("speech", ("b4",))) is None
    assert effect(plan("digits"), {}, Gain("digits", ("b4",))) is None


def test_a_figure_that_runs_do_not_have_is_no_effect():
    values = {"plain": runs("accuracy", 0.8, 0.8), "b4": runs("accuracy", 0.9, 0.9)}
    assert found("digits", values, Gain("digits", ("b4",), figures=("test_accuracy",))) is None


def test_what_is_neither_accuracy_nor_error_rate_has_no_points():
    values = {
        "plain": runs("accuracy", 0.8, 0.8, test_loss=1.0),
        "b4": runs("accuracy", 0.9, 0.9, test_loss=1.0),
    }
    with pytest.raises(ValueError, match="'test_loss' is none of them"):
        found("digits", values, Gain("digits", ("b4",), figures=("test_loss",)))


def test_an_arm_that_diverged_with_every_value_is_not_compared():
    study = plan("digits")
    records = settled(study, "digits", {"plain": runs("accuracy", 0.8, 0.8)})
    while jobs := [job for job in study.missing(records) if job.arm == "b4"]:
        records |= {job: record(job, **DIVERGED) for job in jobs}
    assert effect(study, records, Gain("digits", ("b4",))) is None


def test_a_rise_is_higher_whatever_is_better():
    def of(*values):
        return [{"metrics": {"best_test_canary_wer": value}} for value in values]

    values = {"plain": of(0.10, 0.20, 0.30), "b4": of(0.50, 0.70, 0.60)}
    rise = found("speech", values, Rise("speech", "b4", "best_test_canary_wer"))
    assert rise.values == pytest.approx({200: 40.0, 201: 50.0, 202: 30.0})


def test_a_model_that_diverged_has_not_kept_from_memorising():
    def of(*values):
        return [{"metrics": {"best_test_canary_wer": value}} for value in values]

    values = {"plain": of(0.1, 0.2, 0.3), "b4": [*of(0.5, 0.6), DIVERGED]}
    rise = found("speech", values, Rise("speech", "b4", "best_test_canary_wer"))
    assert rise.values == pytest.approx({200: 40.0, 201: 40.0})
    assert rise.left_out == {202: "speech/b4/0.008-seed202 diverged"}
    assert decide(rise, "above", 0.5) == "undecided"  # though its interval is far above 0
    assert "1 of 5 seeds left out" in told(rise)


def test_cosines_are_means_over_all_moments_but_the_first():
    def run(*cosines):
        moments = [moment(step, 1.0, 2.0, each) for step, each in enumerate(cosines, start=1)]
        return {"moments": moments[::-1]}  # in whatever order

    values = {
        "plain": [
            run((0.9, 0.9, 0.9), (0.1, 0.4, 0.2), (0.3, 0.6, 0.2)),
            run((0.9, 0.9, 0.9), (0.0, 0.2, 0.0), (0.0, 0.2, 0.2)),
        ]
    }
    level = found("speech", values, CosineLevel("speech", "dragger_benign"))
    assert level.values == pytest.approx({200: 0.2, 201: 0.0})
    gap = found("speech", values, CosineGap("speech", "dragger_benign", "benign_benign"))
    assert gap.values == pytest.approx({200: -0.3, 201: -0.2})
    assert gap.unit == "cosine"


def test_a_run_that_was_not_looked_into_is_said_to_be_left_out():
    moments = [moment(1, 1.0, 2.0), moment(2, 1.0, 2.0)]
    values = {"plain": [{"moments": moments}, {"moments": moments}, {"moments": moments[:1]}]}
    level = found("speech", values, CosineLevel("speech", "dragger_benign"))
    assert list(level.values) == [200, 201]
    assert "often enough" in level.left_out[202]


def test_speed_is_counted_to_the_worse_of_both_bests():
    def run(*curve):
        return {"curve": {50 * place: value for place, value in enumerate(curve, start=1)}}

    values = {
        # plain comes down to 0.2 after 200 steps; b4 is there after 100, then after 50, then 400
        "plain": [run(0.8, 0.5, 0.3, 0.2, 0.2, 0.25, 0.3, 0.3)] * 3,
        "b4": [
            run(0.6, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1),
            run(0.1, math.nan, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1),
            run(0.9, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3),  # its best is 0.3: plain after 150
        ],
    }
    speed = found("speech", values, Speed("speech", "b4"))
    assert speed.values == pytest.approx({200: 1.0, 201: 2.0, 202: math.log2(150 / 400)})
    assert speed.unit == "halvings"


def test_speed_of_accuracy_counts_upwards():
    values = {
        "plain": [{"curve": {75: 0.5, 150: 0.7, 225: 0.8}}] * 2,
        "b4": [{"curve": {75: 0.8, 150: 0.9, 225: 0.9}}] * 2,
    }
    speed = found("digits", values, Speed("digits", "b4"))
    assert speed.values == pytest.approx({200: math.log2(3)} | {201: math.log2(3)})


def test_slope_at_the_last_step():
    def run(b):
        return [{"moments": [moment(50, 2.0, 7.0), moment(1000, 1.0, 8 * b**-0.5)]}] * 2

    values = {"b1": run(1), "b4": run(4), "plain": run(16)}  # plain is b = B = 16
    arms = ("b1", "b4", "plain")
    slope = found("speech", values, Slope("speech", arms, "dragger_over_benign", "step"))
    assert slope.values == pytest.approx({200: -0.5, 201: -0.5})
    other = found("speech", values, Slope("speech", arms, "benign_over_dragger", "step"))
    assert other.values == pytest.approx({200: 0.5, 201: 0.5})


def test_slope_at_matched_loss_interpolates_between_moments():
    values = {
        # ends with the highest loss, 1: there its ratio is 8
        "b1": [{"moments": [moment(50, 3.0, 9.0), moment(100, 1.0, 8.0)]}] * 2,
        # comes through 1 half way between 1.5 (ratio 4) and 0.5 (ratio 1): the ratio is 2
        "plain": [{"moments": [moment(50, 1.5, 4.0), moment(100, 0.5, 1.0)]}] * 2,
    }
    arms = ("b1", "plain")
    slope = found("speech", values, Slope("speech", arms, "dragger_over_benign", "loss"))
    assert slope.values == pytest.approx({200: -0.5, 201: -0.5})  # log(2/8) / log(16)


def test_losses_that_cannot_be_matched_decide_nothing():
    values = {
        "b1": [{"moments": [moment(50, 3.0, 9.0), moment(100, 2.0, 8.0)]}] * 2,
        "plain": [{"moments": [moment(50, 1.5, 4.0), moment(100, 0.5, 1.0)]}] * 2,
    }
    arms = ("b1", "plain")
    slope = found("speech", values, Slope("speech", arms, "dragger_over_benign", "loss"))
    assert slope.estimate is None
    assert "lower loss than 2" in slope.left_out[200]
    assert decide(slope, "below", 0.02) == "undecided"
    assert told(slope) == "no figure; 2 of 5 seeds left out; 2 of 5 seeds so far"


@pytest.mark.parametrize(
    ("expects", "low", "high", "verdict"),
    [
        ("above", 0.1, 2.0, "holds"),
        ("above", 0.1, 0.3, "holds"),  # small, but the seeds agree on it
        ("above", 0.0, 2.0, "undecided"),  # 0 itself is no gain
        ("above", -0.1, 0.5, "undecided"),  # as much as matters is not ruled out
        ("above", -0.1, 0.49, "does not hold"),  # nothing that matters is left
        ("above", -3.0, 0.49, "does not hold"),
        ("above", -3.0, -0.1, "does not hold"),
        ("above", -3.0, 3.0, "undecided"),
        ("below", -2.0, -0.1, "holds"),
        ("below", -2.0, 0.0, "undecided"),
        ("below", -0.5, 0.1, "undecided"),
        ("below", -0.49, 0.1, "does not hold"),
        ("below", 0.1, 3.0, "does not hold"),
        ("near", 0.0, 0.0, "holds"),
        ("near", -0.49, 0.49, "holds"),
        ("near", -0.5, 0.49, "undecided"),
        ("near", 0.4, 0.6, "undecided"),
        ("near", 0.51, 0.9, "does not hold"),
        ("near", -0.9, -0.51, "does not hold"),
        ("not below", -0.49, 3.0, "holds"),
        ("not below", -0.5, 3.0, "undecided"),
        ("not below", -3.0, -0.5, "undecided"),
        ("not below", -3.0, -0.51, "does not hold"),
    ],
)
def test_the_rules_at_their_edges(expects, low, high, verdict):
    interval = Estimate((low + high) / 2, low, high, 5)
    values = dict.fromkeys(range(5), interval.mean)
    assert decide(Effect(values, interval, (), "points", 5), expects, 0.5) == verdict
    # as long as a seed is missing, nothing is decided: waiting for a good moment would be no test
    assert decide(Effect(values, interval, (), "points", 6), expects, 0.5) == "undecided"


def test_nothing_is_decided_by_what_was_not_run():
    assert decide(None, "above", 0.5) == "not looked at"
    found = judge(plan(), {})
    assert [claim.verdict for claim in found] == ["not looked at"] * len(CLAIMS)
    assert {claim.sentence for claim in found} == {"Not run yet."}
    assert {part.verdict for part in controls(plan(), {})} == {"not looked at"}


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "undecided"], "undecided"),
        (["holds", "does not hold"], "does not hold"),
        (["undecided", "does not hold"], "does not hold"),
        (["not looked at", "does not hold"], "does not hold"),
        (["not looked at", "holds"], "undecided"),
        (["not looked at", "not looked at"], "not looked at"),
    ],
)
def test_all_parts_must_hold_and_one_that_fails_is_enough(parts, verdict):
    part = Part("", Gain("digits", ("b4",)), "above")
    assert together(tuple(PartVerdict(part, None, each) for each in parts)) == verdict


def test_every_part_of_the_plan_can_be_computed():
    study = plan()
    records = everything(study)
    for claim in judge(study, records):
        for part in (*claim.parts, *claim.also):
            assert part.effect is not None, part.part.about
            assert part.effect.is_complete
            assert part.effect.estimate is not None
        assert all(part.sentence in claim.sentence for part in claim.parts)
    known = {record.id for record in records.values()}
    found = controls(study, records)
    assert len(found) == len(CONTROLS)
    assert {name for part in found for name in part.effect.records} <= known
