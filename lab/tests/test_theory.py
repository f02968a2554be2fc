"""The paper's formulas by numbers worked out by hand, and the statements that fail.

Every expected value is derived in the comment beside it, from the formula as the paper prints it,
without the code under test.
"""

import math
import random
import re
import subprocess
import sys

import pytest

import microclip
from microclip_lab import theory
from microclip_lab.theory import conditions, corrected, counterexamples, lemmas, rates, steps
from microclip_lab.theory.binomial import binomial
from microclip_lab.theory.rates import Bound
from microclip_lab.theory.symbols import check


class TestRates:
    def test_bu_et_al(self):
        # T^(-1/4) = 1/3; 2 * 2 * 1 + 25/5 = 9
        bound = rates.bu_et_al(T=81, B=5, sigma=5, L=2, gap=1)
        assert bound.bias == 0
        assert bound.total == pytest.approx(1)

    def test_sgd_with_draggers(self):
        # T^(-1/4) = 1/3; 4 * .8 / .64 = 5; 2 * 16 / (.8 * 10) = 4; sqrt(9) / 3
        bound = rates.sgd_with_draggers(T=81, B=10, epsilon=0.2, sigma=4, L=1, gap=0.8)
        assert bound.bias == 0
        assert bound.total == pytest.approx(1)

    def test_micro_batch_clipping(self):
        # bias: (3 * .5 - .5) (1 + 2) = 3 below 6.
        # transient: 1/20 * 3/(3 - 1) * 2 * 2 (1 + 4)/.5 * (.75 + 1/4) = 1/20 * 1.5 * 40
        bound = rates.micro_batch_clipping(
            T=400, b=9, epsilon=0.5, c=2, C=4, sigma=6, L=2, gap=0.75
        )
        assert bound.bias == pytest.approx(2)
        assert bound.transient == pytest.approx(3)
        assert bound.total == pytest.approx(5)

    def test_micro_batch_clipping_with_many_draggers(self):
        # bias: 3 / ((2 * .8 - .4) * 5) = 3/6.
        # transient: 1/60 * sqrt(3.2)/(sqrt(3.2) - sqrt(.2)) = 4/3; 2 (1 + 8)/.2 = 90; 1
        bound = rates.micro_batch_clipping(
            T=3600, b=4, epsilon=0.8, c=4, C=5, sigma=3, L=1, gap=0.5
        )
        assert bound.bias == pytest.approx(0.5)
        assert bound.transient == pytest.approx(2)

    def test_the_printed_bias_falls_with_b_and_with_c(self):
        def bias(**changes):
            at = {"T": 1, "b": 8, "epsilon": 0.3, "c": 2, "C": 9, "sigma": 1, "L": 1, "gap": 1}
            return rates.micro_batch_clipping(**at | changes).bias

        assert bias(b=16) < bias() < bias(b=4)
        assert bias(c=3) < bias() < bias(c=1)
        assert bias(epsilon=0.4) < bias() < bias(epsilon=0.2)  # more draggers: said to be better

    @pytest.mark.parametrize(("b", "epsilon"), [(1, 0.5), (4, 0.2), (3, 0.25), (4, 0.1), (9, 0.1)])
    def test_its_condition_on_epsilon_is_strict(self, b, epsilon):
        with pytest.raises(ValueError, match=r"needs epsilon > 1/\(b\+1\)") as error:
            rates.micro_batch_clipping(T=1, b=b, epsilon=epsilon, c=1, C=1, sigma=1, L=1, gap=1)
        needed = conditions.smallest_b(epsilon)
        assert f"b must be at least {needed}" in str(error.value)
        rates.micro_batch_clipping(T=1, b=needed, epsilon=epsilon, c=1, C=1, sigma=1, L=1, gap=1)

    def test_without_draggers_it_says_nothing(self):
        with pytest.raises(ValueError, match="but got epsilon = 0 with b = 512."):
            rates.micro_batch_clipping(T=1, b=512, epsilon=0, c=1, C=1, sigma=1, L=1, gap=1)


class TestConditions:
    def test_on_epsilon(self):
        assert conditions.smallest_epsilon(512) == 1 / 513
        # 1/.2 = 5 examples and one more for strictness, less one
        assert conditions.smallest_b(0.2) == 5
        assert conditions.smallest_b(0.5) == 2
        assert conditions.smallest_b(0.51) == 1
        assert conditions.smallest_b(0.1) == 10
        with pytest.raises(ValueError, match="Without draggers"):
            conditions.smallest_b(0)

    def test_on_the_length_of_draggers(self):
        # sqrt((2 * .8 * 5 - .64) / .04) = sqrt(7.36 * 25) = sqrt(184); printed: .96 for .64
        assert conditions.dragger_limit(25, 0.2) == pytest.approx(math.sqrt(184))
        assert conditions.dragger_limit(25, 0.2, as_printed=True) == pytest.approx(math.sqrt(176))
        assert conditions.chosen_dragger_limit(25, 0.2) == pytest.approx(math.sqrt(92))
        assert conditions.dragger_limit(25, 0) == math.inf

    def test_chosen_limit_grows_like_the_fourth_root(self):
        # T^(1/4) sqrt(1-epsilon)/epsilon at T = 10^12: 1000 * sqrt(.75)/.25
        assert conditions.chosen_dragger_limit(10**12, 0.25) == pytest.approx(
            1000 * math.sqrt(0.75) / 0.25, rel=1e-5
        )

    def test_after_one_step_some_draggers_are_allowed(self):
        # 2 * .5 - .25 over .25; printed 2 * .5 - .75 over .25
        assert conditions.dragger_limit(1, 0.5) == pytest.approx(math.sqrt(0.75 / 0.25))
        assert conditions.dragger_limit(1, 0.5, as_printed=True) == pytest.approx(1)

    def test_needed_fall_of_c(self):
        # (sqrt(64) * .8 - .4) / (sqrt(4) * .8 - .4) = 6/1.2
        assert conditions.needed_fall_of_c(b=4, B=64, epsilon=0.8) == pytest.approx(5)
        with pytest.raises(ValueError, match="but got epsilon = 0.2 with b = 4."):
            conditions.needed_fall_of_c(b=4, B=64, epsilon=0.2)

    @pytest.mark.parametrize("epsilon", [0.21, 0.3, 0.5, 0.8, 0.99])
    def test_the_measured_c_is_no_reason_for_a_small_b(self, epsilon):
        # Table 3: (1 + 5.74)/(1 + 4.42) = 1.24; the least that is needed is at epsilon -> 1,
        # sqrt(512)/sqrt(4) = 11.3
        assert conditions.needed_fall_of_c(b=4, B=512, epsilon=epsilon) > 11.3 > 6.74 / 5.42
        assert not counterexamples.sweet_spot_from_measured_c(epsilon=epsilon).holds


class TestLemmas:
    def test_expected_deviation(self):
        # .2 * .8 * (9 + 16) + .8 * 5 = 4 + 4 = 8, over b = 2
        found = lemmas.expected_deviation(g=3, mu=4, b=2, epsilon=0.2, sigma=math.sqrt(5))
        assert found == pytest.approx(2)

    def test_expected_deviation_is_the_variance_of_two_outcomes(self):
        # b = 1, no noise: the gradient is g = (3, 0) or mu = (0, 4), evenly. Its mean is (1.5, 2),
        # both are 2.5 away from it.
        found = lemmas.expected_deviation(g=3, mu=4, b=1, epsilon=0.5, sigma=0)
        assert found == pytest.approx(2.5)

    def test_star(self):
        # (1-epsilon) g + epsilon mu = (2, 3). + Delta (2, 0): (4, 3), length 5; the numerator is
        # .5 * 16 + 8 = 16. - Delta: (0, 3), 8 - 8 = 0.
        assert lemmas.star([4, 0], [0, 6], [2, 0], 0.5) == pytest.approx(16 / 5)
        # Delta (6, 0): (8, 3): (8 + 24)/sqrt(73); (-4, 3): (8 - 24)/5
        assert lemmas.star([4, 0], [0, 6], [6, 0], 0.5) == pytest.approx(32 / math.sqrt(73) - 3.2)

    def test_star_sides(self):
        # (4 * 6)^2;  .25 * 16 * 36 + 16 * 36
        assert lemmas.star_sides([4, 0], [0, 6], [6, 0], 0.5) == (576, 720)

    def test_the_lemma_and_its_inequality_are_equivalent(self):
        """For Delta in the positive half-space, beside mu, star >= 0 and so are the sides apart."""
        draw = random.Random(0)
        for _ in range(2000):
            g, along, beside = draw.uniform(0.1, 3), draw.uniform(0, 30), draw.uniform(-3, 3)
            vectors = ([g, 0, 0], [0, 0, draw.uniform(0, 9)], [along, beside, 0])
            epsilon = draw.uniform(0, 0.99)
            left, right = lemmas.star_sides(*vectors, epsilon)
            assert left <= right + 1e-9
            assert lemmas.star(*vectors, epsilon) >= -1e-9

    def test_star_floor(self):
        # .5 * 16 / (2 + 3 + 3)
        assert lemmas.star_floor([4, 0], [0, 6], [3, 0], 0.5) == pytest.approx(1)

    def test_one_step_drift(self):
        # .2 / (2 (1 + 16)) * (.5 * 2 - 8.8/(.8 * 11)) = .2/34 * 0
        assert lemmas.one_step_drift(g=2, b=1, epsilon=0.8, c=10, C=10, sigma=8.8) == pytest.approx(
            0
        )
        # .5 / (2 * 5) * ((1 - 1/3) * 3 - 6/(3 * .5 * 4)) = .05 * 1
        assert lemmas.one_step_drift(g=3, b=9, epsilon=0.5, c=3, C=4, sigma=6) == pytest.approx(
            0.05
        )

    def test_symmetric_pair(self):
        # u = (3, 4), n = (9, 0): (12/sqrt(160) - 6/sqrt(52)) / 2, and a floor of 0 as |n| > |u|
        expected = (12 / math.sqrt(160) - 6 / math.sqrt(52)) / 2
        assert lemmas.symmetric_pair([2, 0], [3, 4], [9, 0]) == pytest.approx(expected)
        assert lemmas.symmetric_pair_floor([2, 0], [3, 4], [9, 0]) == 0
        # n = (1, 0): (4/sqrt(32) + 2/sqrt(20)) / 2 = .577; 3/5 * (1 - 1/5) = .48
        assert lemmas.symmetric_pair([2, 0], [3, 4], [1, 0]) == pytest.approx(0.5771602)
        assert lemmas.symmetric_pair_floor([2, 0], [3, 4], [1, 0]) == pytest.approx(0.48)
        assert lemmas.symmetric_pair_floor([2, 0], [0, 0], [1, 0]) == 0

    def test_half_of_star_is_a_symmetric_pair(self):
        g, mu, delta = [4, 0], [0, 6], [6, 0]
        pair = lemmas.symmetric_pair(g, [2, 3], delta)
        assert lemmas.star(g, mu, delta, 0.5) == pytest.approx(2 * 4 * pair)


class TestSteps:
    def test_sgd_coefficient_is_zero_at_the_limit(self):
        # eta = .1, epsilon = .5, C^2 = 39: .00125 - .05 + .04875
        C = math.sqrt(39)
        assert steps.sgd_coefficient(eta=0.1, epsilon=0.5, C=C, L=1) == pytest.approx(0)
        assert conditions.dragger_limit(100, 0.5) == pytest.approx(C)

    def test_sgd_coefficient_at_the_chosen_limit(self):
        # the telescoping sum has (1-epsilon) eta/2 - (1-epsilon)^2 L eta^2/4 = .025 - .000625
        C = conditions.chosen_dragger_limit(100, 0.5)
        assert steps.sgd_coefficient(eta=0.1, epsilon=0.5, C=C, L=1) == pytest.approx(-0.024375)

    def test_sgd_step(self):
        # .5 * .04 * (.64 + .16) - .16 = -.144, times 25 = -3.6; .8 * .04 * 9/(2 * 2) = .072
        found = steps.sgd_step(g=5, eta=0.2, B=2, epsilon=0.2, C=2, sigma=3, L=1)
        assert found == pytest.approx(-3.528)

    def test_telescoping_sgd_steps_gives_the_rate(self):
        """T steps at a constant |g| spend exactly the gap, if |g| is what the end solves to."""
        T, B, epsilon, sigma, L, gap = 400, 8, 0.25, 2.0, 3.0, 1.5
        C = conditions.chosen_dragger_limit(T, epsilon)
        # the coefficient is at least (1-epsilon)^2/(4 L sqrt T): that step alone is not exact
        floor = (1 - epsilon) ** 2 / (4 * L * math.sqrt(T))
        exact = -steps.sgd_coefficient(eta=1 / (L * math.sqrt(T)), epsilon=epsilon, C=C, L=L)
        assert exact >= floor
        noise = (1 - epsilon) * sigma**2 / (2 * L * B)
        squared = (gap + noise) / (T * floor)
        bound = rates.sgd_with_draggers(T=T, B=B, epsilon=epsilon, sigma=sigma, L=L, gap=gap)
        assert bound.total == pytest.approx(math.sqrt(squared))

    def test_drift_before_simplifying(self):
        # .5 * 4 / (2 (2 + 6)) = .125; E|Delta|^2 = (.25 * (4 + 36) + .5 * 12)/4 = 4; 1 - 2/4
        found = steps.drift_before_simplifying(g=2, mu=6, b=4, epsilon=0.5, sigma=math.sqrt(12))
        assert found == pytest.approx(0.0625)

    def test_simplifying_only_lowers_it(self):
        draw = random.Random(1)
        for _ in range(500):
            b, epsilon = draw.randint(1, 40), draw.uniform(0.05, 0.95)
            at = {"g": draw.uniform(0.1, 5), "b": b, "epsilon": epsilon}
            at["sigma"] = draw.uniform(0, 3)
            ratio = draw.uniform(0, 20)
            long = steps.drift_before_simplifying(mu=ratio * at["g"], **at)
            if long < 0:
                continue  # the prefactor is exchanged for a smaller one, which needs a sign
            assert lemmas.one_step_drift(c=ratio, C=ratio, **at) <= long + 1e-12

    def test_without_draggers_the_printed_drift_is_undefined(self):
        with pytest.raises(ValueError, match="must not be 0 here"):
            lemmas.one_step_drift(g=1, b=4, epsilon=0, c=1, C=1, sigma=1)
        with pytest.raises(ValueError, match="must not be 0 here"):
            steps.drift_before_simplifying(g=1, mu=1, b=4, epsilon=0, sigma=1)

    def test_clipping_step(self):
        # -.1 * .05 (the drift of TestLemmas) + 2 * .01/2
        found = steps.clipping_step(g=3, eta=0.1, b=9, epsilon=0.5, c=3, C=4, sigma=6, L=2)
        assert found == pytest.approx(0.005)

    def test_telescoping_clipping_steps_gives_the_rate(self):
        """At |g| = the bound, T steps spend exactly the gap: the theorem's algebra is right."""
        at = {"b": 9, "epsilon": 0.5, "c": 2, "C": 4, "sigma": 6, "L": 2}
        bound = rates.micro_batch_clipping(T=400, gap=0.75, **at)
        change = steps.clipping_step(g=bound.total, eta=1 / (2 * 20), **at)
        assert 400 * change == pytest.approx(-0.75)


class TestCorrected:
    def test_second_moment(self):
        # .64 + .16/4 + 9 (.04 + .04)
        assert corrected.second_moment(B=4, epsilon=0.2, C=3) == pytest.approx(1.4)

    def test_sgd(self):
        # K = 1.4, T = 49: .8 - 1.4/14 = .7; L gap + .8 * 4/8 = 2.4 + .4; sqrt(2.8/.7)/sqrt(7)
        bound = corrected.sgd_with_draggers(T=49, B=4, epsilon=0.2, C=3, sigma=2, L=2, gap=1.2)
        assert bound == Bound(0, pytest.approx(2 / math.sqrt(7)))

    def test_sgd_simple(self):
        # K = 1.4 <= .8 * 9; 2 * 3.2/.8 + 4/4 = 9; 3/3
        bound = corrected.sgd_with_draggers_simple(
            T=81, B=4, epsilon=0.2, C=3, sigma=2, L=1, gap=3.2
        )
        assert bound.total == pytest.approx(1)

    def test_sgd_says_when_it_need_not_converge(self):
        at = {"T": 4, "B": 1, "epsilon": 0.5, "sigma": 1, "L": 1, "gap": 1}
        # K = .5 + .5 C^2; 2 * .5 * 2 = 2 at C = sqrt(3), .5 * 2 = 1 at C = 1
        assert corrected.dragger_limit(T=4, B=1, epsilon=0.5) == pytest.approx(1)
        corrected.sgd_with_draggers_simple(C=0.99, **at)
        with pytest.raises(ValueError, match="Take more steps, a larger B, or a smaller C; or use"):
            corrected.sgd_with_draggers_simple(C=1.01, **at)
        corrected.sgd_with_draggers(C=1.73, **at)
        with pytest.raises(ValueError, match="SGD need not converge here: K_B = "):
            corrected.sgd_with_draggers(C=1.74, **at)
        assert corrected.dragger_limit(T=1, B=1, epsilon=0.5) == 0
        assert corrected.dragger_limit(T=4, B=1, epsilon=0.0) == math.inf

    def test_sgd_without_draggers_is_bu_et_al(self):
        at = {"T": 50, "B": 4, "sigma": 2, "L": 3, "gap": 1.2}
        assert corrected.sgd_with_draggers_simple(epsilon=0, C=7, **at) == rates.bu_et_al(**at)

    def test_sgd_is_below_what_is_printed(self):
        draw = random.Random(2)
        for _ in range(300):
            at = {
                "T": draw.randint(200, 9999),
                "B": draw.randint(1, 64),
                "epsilon": draw.uniform(0, 0.8),
                "sigma": draw.uniform(0, 9),
                "L": draw.uniform(0.1, 9),
                "gap": draw.uniform(0.1, 9),
            }
            C = corrected.dragger_limit(T=at["T"], B=at["B"], epsilon=at["epsilon"])
            C = min(C, 99) * (1 - 1e-9)
            simple = corrected.sgd_with_draggers_simple(C=C, **at).total
            assert corrected.sgd_with_draggers(C=C, **at).total <= simple * (1 + 1e-12)
            assert simple <= rates.sgd_with_draggers(**at).total

    def test_isolation(self):
        # b = 2, epsilon = .2: .64 * 1 + .32 * 1/sqrt(1 + C^2) with C = 3/4
        assert corrected.isolation(b=2, epsilon=0.2, C=0.75) == pytest.approx(0.64 + 0.32 * 0.8)
        # one example is clean or it is not; without draggers nothing is lost
        assert corrected.isolation(b=1, epsilon=0.2, C=99) == pytest.approx(0.8)
        assert corrected.isolation(b=7, epsilon=0, C=99) == pytest.approx(1)

    def test_isolation_of_large_micro_batches(self):
        # .9 / sqrt(.81 + .01 * 81) = 1/sqrt(2)
        found = corrected.isolation(b=20_000, epsilon=0.1, C=9)
        assert found == pytest.approx(math.sqrt(0.5), rel=1e-3)

    def test_averaging(self):
        # 2 (.64 sqrt(1/2) + .32 sqrt(1/4) / sqrt(.25 + .25 * .5625)); the root is .625
        found = corrected.averaging(b=2, epsilon=0.2, c=0.75)
        assert found == pytest.approx(2 * (0.64 * math.sqrt(0.5) + 0.32 * 0.5 / 0.625))
        # b = 1: 2 (1-epsilon); no draggers: 2/sqrt(b)
        assert corrected.averaging(b=1, epsilon=0.2, c=5) == pytest.approx(1.6)
        assert corrected.averaging(b=16, epsilon=0, c=5) == pytest.approx(0.5)

    def test_micro_batch_clipping(self):
        # A = .896 and beta = 2 (.4525483 + .256) = 1.4170967 of the two tests above
        bound = corrected.micro_batch_clipping(
            T=100, b=2, epsilon=0.2, c=0.75, C=0.75, sigma=3, L=2, gap=0.646
        )
        assert bound.bias == pytest.approx(3 * 1.4170967 / 0.896, rel=1e-6)
        assert bound.transient == pytest.approx(1.792 / 0.896 / 10)  # 2 * .646 + .5 = 1.792

    def test_symmetric_takes_the_best_micro_batches(self):
        # b = 2, epsilon = .5, c = 0, C = 3/4: p A r = .25 * 1 * sqrt(.5) clean, and with one
        # dragger .5 * .8 * sqrt(.25)/.5 = .4. With both: A = .65. Start: .5/sqrt(T).
        at = {"b": 2, "epsilon": 0.5, "c": 0.0, "C": 0.75, "sigma": 1.0, "L": 1.0, "gap": 0.0}
        clean = 0.25 * math.sqrt(0.5)
        both = corrected.micro_batch_clipping_symmetric(T=1, **at)  # (.5768 + .5)/.65 = 1.66
        assert both.bias == pytest.approx((clean + 0.4) / 0.65)
        assert both.transient == pytest.approx(0.5 / 0.65)
        # after many steps the start is nothing, and the clean ones alone have the smaller noise
        later = corrected.micro_batch_clipping_symmetric(T=10**8, **at)
        assert later.bias == pytest.approx(math.sqrt(0.5))
        assert later.transient == pytest.approx(0.5e-4 / 0.25)

    def test_symmetric_at_one_example(self):
        # whatever draggers do, a clean example is .2 of all and its noise is sigma
        bound = corrected.micro_batch_clipping_symmetric(
            T=100, b=1, epsilon=0.8, c=10, C=10, sigma=3, L=1, gap=0.5
        )
        assert bound == Bound(pytest.approx(3), pytest.approx(0.1 / 0.2))

    def test_symmetry_always_helps(self):
        draw = random.Random(3)
        for _ in range(300):
            c = draw.uniform(0, 20)
            at = {
                "T": draw.randint(1, 10**6),
                "b": draw.choice([1, 2, 3, 5, 8, 64, 300]),
                "epsilon": draw.uniform(0, 0.95),
                "c": c,
                "C": c * draw.uniform(1, 3),
                "sigma": draw.uniform(0, 9),
                "L": draw.uniform(0.1, 9),
                "gap": draw.uniform(0, 9),
            }
            symmetric = corrected.micro_batch_clipping_symmetric(**at).total
            assert symmetric <= corrected.micro_batch_clipping(**at).total * (1 + 1e-9)

    @pytest.mark.parametrize(
        ("T", "sigma", "smallest"), [(100, 0.1, 1), (100, 1.0, 4), (1000, 0.1, 2), (10**4, 0.1, 4)]
    )
    def test_there_can_be_a_best_b_in_between(self, T, sigma, smallest):
        at = {"T": T, "epsilon": 0.1, "c": 20, "C": 20, "sigma": sigma, "L": 1, "gap": 10}
        sizes = [2**k for k in range(10)]
        found = min(sizes, key=lambda b: corrected.micro_batch_clipping(b=b, **at).total)
        assert found == smallest
        printed = sizes[4:]  # where the printed theorem applies
        assert min(printed, key=lambda b: rates.micro_batch_clipping(b=b, **at).total) == 512


class TestCounterexamples:
    def test_none_of_the_claims_holds(self):
        claims = counterexamples.all_claims()
        assert len(claims) == 14
        for claim in claims:
            assert not claim.holds, claim

    def test_relations(self):
        def holds(left, relation, right):
            return counterexamples.Claim("", "", left, relation, right).holds

        assert holds(1, "<=", 1)
        assert not holds(1, "<", 1)
        assert holds(1, "<", 2)
        assert holds(0.1 + 0.2, "==", 0.3)
        assert not holds(0.1, "==", 0.3)

    @pytest.mark.parametrize(
        ("epsilon", "B", "growth"),
        [(0.1, 1, 1.0287), (0.1, 8, 1.0004), (0.1, 16, 0.9980), (0.05, 16, 1.0007)],
    )
    def test_sgd_grows_if_batches_are_small(self, epsilon, B, growth):
        # by hand at B = 1: .9 * .99 + .1 * sqrt(1 + (.01 * 94.607)^2) = .891 + .1 * 1.376606
        C = conditions.chosen_dragger_limit(10**4, epsilon, as_printed=True)
        found = counterexamples.sgd_growth(T=10**4, B=B, epsilon=epsilon, C=C)
        assert found == pytest.approx(growth, abs=6e-5)
        claim = counterexamples.sgd_rate(B=B, epsilon=epsilon)
        assert claim.holds == (growth < 1)

    def test_the_printed_rate_of_sgd_in_the_counterexample(self):
        # 10000^(-1/4) sqrt(4 * .5/.81) = .1 * 1.5713
        assert counterexamples.sgd_rate().right == pytest.approx(0.15713, rel=1e-4)

    def test_the_printed_rate_of_clipping_in_the_counterexample(self):
        # bias 50.005/(.4 * 11) = 11.3648; transient 2 * 2 * 17/.2 * (1250 + .5)/10^5 = 4.2517
        claim = counterexamples.clipping_rate()
        assert claim.right == pytest.approx(11.36477 + 4.2517, rel=1e-5)
        assert claim.left == pytest.approx(49)

    @pytest.mark.parametrize("b", [1, 2, 3, 4, 8, 16, 64])
    def test_the_printed_rate_of_clipping_fails_at_every_b(self, b):
        assert not counterexamples.clipping_rate(b).holds
        assert not counterexamples.clipping_drift(b).holds

    @pytest.mark.parametrize("b", [1, 2, 3, 4, 8, 16, 64])
    def test_the_corrected_rates_do_not_fail_there(self, b):
        at = counterexamples._hard(b)
        for rate in (corrected.micro_batch_clipping, corrected.micro_batch_clipping_symmetric):
            bound = rate(
                T=at.T, b=b, epsilon=at.epsilon, c=at.c, C=at.c, sigma=50 * at.flip, L=1, gap=1250
            )
            assert counterexamples.clipping_rate(b).left <= bound.total

    def test_the_corrected_bias_at_one_example_cannot_be_smaller(self):
        # the gradient stays at G - 1, and the bias is sigma = 1.0001 G
        claim = counterexamples.clipping_rate(G=1e4)
        assert claim.left / (1.0001 * 1e4) > 0.9997

    def test_exact_drift(self):
        # b = 2, half draggers as long as g. No dragger (1/4): both forward with flip .5, so 1.
        # One (1/2): (1.5, 1) or (.5, 1), evenly: (1.5/sqrt(3.25) + .5/sqrt(1.25)) / 2 = .639632
        found = counterexamples.exact_drift(b=2, epsilon=0.5, ratio=1, flip=0.5)
        assert found == pytest.approx(0.25 + 0.5 * 0.639632, rel=1e-5)

    def test_floor_of_star_fails_for_many_draggers_only(self):
        assert counterexamples.floor_of_star(epsilon=0.3).holds
        assert not counterexamples.floor_of_star(epsilon=0.6).holds

    def test_an_even_number_of_draggers_is_symmetric(self):
        assert counterexamples.deviation_is_symmetric(b=5, epsilon=0.5).holds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"T": 0}, "T, the number of steps, must be a whole number of at least 1, but got 0."),
        ({"T": 1e4}, "but got 10000.0."),
        ({"B": True}, "but got True."),
        ({"b": -1}, "b, the micro-batch size, must be"),
        ({"epsilon": 1}, "must be at least 0 and below 1, but got 1."),
        ({"epsilon": math.nan}, "but got nan."),
        ({"c": -0.1}, "must be a finite number of at least 0, but got -0.1."),
        ({"C": math.inf}, "but got inf."),
        ({"sigma": "1"}, "but got '1'."),
        ({"L": 0}, "must be a finite number above 0, but got 0."),
        ({"gap": -1}, "L_0 - L_*, must be"),
    ],
)
def test_bad_values_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(**values)


@pytest.mark.parametrize("size", [1, 7, 59, 60, 512])
@pytest.mark.parametrize("probability", [0, 1e-6, 0.2, 0.999, 1])
def test_binomial(size, probability):
    found = binomial(size, probability)
    assert len(found) == size + 1
    assert sum(found) == pytest.approx(1)
    assert sum(k * p for k, p in enumerate(found)) == pytest.approx(size * probability)


def test_its_old_name_still_works_and_warns():
    with pytest.warns(DeprecationWarning, match="moved to microclip_lab.theory"):
        assert microclip.theory.rates is rates


def test_simulations_are_imported_when_asked_for():
    code = (
        "import sys, microclip_lab.theory\n"
        "assert 'torch' not in sys.modules\n"
        "microclip_lab.theory.rates, microclip_lab.theory.simulator\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="'microclip_lab.theory' has no attribute 'rate'"):
        _ = theory.rate
