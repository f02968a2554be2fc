"""The corrected bounds hold: exactly where that can be computed, and in hundreds of trainings.

The same checks find the printed theorems wrong where they are, so they can fail.
"""

import math
import random

import pytest
import torch

from microclip import rules
from microclip_lab.theory import corrected, counterexamples, lemmas
from microclip_lab.theory.simulator import World, efficiency, simulate, update
from microclip_lab.theory.steps import sgd_step
from microclip_lab.theory.world import LAWS, SYMMETRIC

SETTINGS = 320


def random_world(draw: random.Random, **fixed) -> World:
    c = draw.choice([0.0, draw.uniform(0, 2), draw.uniform(2, 30)])
    chosen = {
        "epsilon": draw.choice([0.0, draw.uniform(0, 0.5), draw.uniform(0.5, 0.95)]),
        "c": c,
        "C": c * draw.choice([1, draw.uniform(1, 2)]),
        "sigma": draw.choice([0.1, 1, 3]) * draw.uniform(0.5, 2),
        "L": draw.uniform(0.3, 3),
        "gap": draw.uniform(0.1, 8),
        "noise": draw.choice(list(LAWS)),
        "dimension": draw.randint(2, 6),
    }
    return World(**chosen | fixed)


class TestLemma:
    def test_symmetric_pair_in_many_directions(self):
        """g, mu and noise beside mu in four dimensions: the floor holds, and is reached."""
        generator = torch.Generator().manual_seed(0)
        n = 300_000
        angle = torch.rand(n, generator=generator, dtype=torch.float64) * math.pi / 2
        u = torch.stack([angle.cos(), angle.sin()], dim=1)  # along g, along mu
        noise = torch.randn(n, 3, generator=generator, dtype=torch.float64)  # g and two others
        noise[: n // 2, 1:] *= 0.01
        length = 1.5 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
        noise = noise / noise.norm(dim=1, keepdim=True) * length
        pair = torch.zeros(n, dtype=torch.float64)
        for sign in (1, -1):
            x, others = u[:, 0] + sign * noise[:, 0], noise[:, 1:].square().sum(1)
            pair += x / (x.square() + u[:, 1].square() + others).sqrt() / 2
        slack = pair - u[:, 0] * (1 - length[:, 0]).clamp(min=0)
        assert slack.min() > -1e-12
        assert slack.min() < 1e-3  # no room for a larger constant

    def test_the_function_says_the_same(self):
        draw = random.Random(0)
        for _ in range(2000):
            u = [draw.uniform(0.01, 2), draw.uniform(0, 4), 0]
            n = [draw.uniform(-3, 3), 0, draw.uniform(-3, 3)]
            g = [draw.uniform(0.1, 5), 0, 0]
            assert lemmas.symmetric_pair(g, u, n) >= lemmas.symmetric_pair_floor(g, u, n) - 1e-12

    def test_noise_along_the_dragger_would_break_it(self):
        assert lemmas.symmetric_pair([1, 0], [1, 4], [2, 4]) < 0


class TestOneStep:
    def test_exact_drifts(self):
        """Noise of two values, all mixtures enumerated: no chance in it."""
        draw = random.Random(0)
        for _ in range(3000):
            b, epsilon = draw.choice([1, 2, 3, 4, 6, 8, 16]), draw.uniform(0, 0.999)
            ratio = draw.choice([0.0, draw.uniform(0, 2), draw.uniform(2, 50)])
            flip = draw.choice([0.0, draw.uniform(0, 2), draw.uniform(0, 20)])
            exact = counterexamples.exact_drift(b=b, epsilon=epsilon, ratio=ratio, flip=flip)
            at = {"g": 1, "b": b, "epsilon": epsilon, "c": ratio, "C": ratio, "sigma": flip}
            assert corrected.drift(**at) <= exact + 1e-12
            assert corrected.drift_symmetric(**at) <= exact + 1e-12

    def test_the_printed_drift_is_right_for_long_draggers_as_far_as_we_see(self):
        """No counterexample with b >= 2 and c >= 1/2 among noise of two values (not a proof)."""
        draw, tried = random.Random(3), 0
        while tried < 4000:
            b, c = draw.choice([2, 3, 4, 6, 8, 12]), math.exp(draw.uniform(math.log(0.5), 3.4))
            epsilon = 1 - math.exp(draw.uniform(math.log(1e-4), math.log(b / (b + 1))))
            most = (1 - math.sqrt((1 - epsilon) / (b * epsilon))) * math.sqrt(b) * epsilon * (1 + c)
            if most <= 0:
                continue
            flip, tried = draw.uniform(0, most), tried + 1
            at = {"g": 1, "b": b, "epsilon": epsilon, "c": c, "C": c, "sigma": flip}
            exact = counterexamples.exact_drift(b=b, epsilon=epsilon, ratio=c, flip=flip)
            assert lemmas.one_step_drift(**at) <= exact

    def test_drifts_in_space(self):
        draw, tested = random.Random(1), 0
        for seed in range(300):
            world = random_world(draw, L=1.0)
            b, runs = draw.choice([1, 2, 3, 5, 8]), 2000
            g = world.gradient(world.start(runs))
            generator = torch.Generator().manual_seed(seed)
            step = update(world.sample(g, b, generator), b, rules.Unit())
            gain = (step * g).sum(1)
            error = (gain.std() / math.sqrt(runs)).item()
            at = {"g": g[0].norm().item(), "b": b, "epsilon": world.epsilon}
            at |= {"c": world.c, "C": world.C, "sigma": world.sigma}
            assert gain.mean().item() >= corrected.drift(**at) - 5 * error - 1e-12
            if world.symmetric:
                assert gain.mean().item() >= corrected.drift_symmetric(**at) - 5 * error - 1e-12
                tested += 1
        assert tested > 200

    def test_the_printed_drift_fails_the_same_check(self):
        world = World(epsilon=0.8, c=10, C=10, sigma=1.01, gap=0.5, noise="flip")
        g = world.gradient(world.start(200_000))
        step = update(world.sample(g, 1, torch.Generator().manual_seed(0)), 1, rules.Unit())
        gain = (step * g).sum(1)
        error = (gain.std() / math.sqrt(len(gain))).item()
        printed = lemmas.one_step_drift(g=1, b=1, epsilon=0.8, c=10, C=10, sigma=1.01)
        assert gain.mean().item() < printed - 2 * error
        assert abs(gain.mean().item()) < 4 * error  # it is 0

    def test_mean_square_of_sgd(self):
        """E|mini-batch gradient|^2 is K_B |g|^2 + (1-epsilon) sigma^2/B, with equality."""
        for B in (1, 3, 16):
            world = World(epsilon=0.3, c=4, C=4, sigma=2, gap=2, noise="sphere")
            g = world.gradient(world.start(100_000))
            step = update(world.sample(g, B, torch.Generator().manual_seed(B)), B, None)
            squares = step.square().sum(1)
            error = (squares.std() / math.sqrt(len(squares))).item()
            expected = corrected.second_moment(B=B, epsilon=0.3, C=4) * 4 + 0.7 * 4 / B
            assert squares.mean().item() == pytest.approx(expected, abs=4 * error)

    def test_the_printed_step_of_sgd_fails(self):
        """On |w|^2/2 the change of the loss is exact: -eta g.step + eta^2 |step|^2/2."""
        world = World(epsilon=0.1, c=20, C=20, sigma=0, gap=0.5)
        g = world.gradient(world.start(100_000))
        step = update(world.sample(g, 1, torch.Generator().manual_seed(0)), 1, None)
        change = -0.1 * (g * step).sum(1) + 0.005 * step.square().sum(1)
        error = (change.std() / math.sqrt(len(change))).item()
        printed = sgd_step(g=1, eta=0.1, B=1, epsilon=0.1, C=20, sigma=0, L=1)
        assert change.mean().item() > printed + 20 * error
        # by hand: -.1 * .9 + .005 * (.9 + 40) = .1145, printed -.09 + .005 * 4.81 = -.06595
        assert change.mean().item() == pytest.approx(0.1145, abs=4 * error)
        assert printed == pytest.approx(-0.06595)


class TestTrainings:
    @pytest.mark.full
    def test_no_corrected_bound_is_violated(self):
        """Random constants, noises, sizes: what each theorem bounds stays below its bound."""
        draw, seen, tightest = random.Random(2), {}, 0.0
        for seed in range(SETTINGS):
            world = random_world(draw)
            b = draw.choice([1, 1, 2, 3, 4])
            B = b * draw.choice([1, 2, 4])
            rule = draw.choice([None, rules.Unit(), rules.Unit(), rules.Unit(), rules.MinNorm()])
            report = simulate(world, T=draw.randint(5, 60), B=B, b=b, rule=rule, runs=16, seed=seed)
            for check in report.checks:
                if check.statement.startswith("corrected"):
                    assert check.holds, (world, B, b, rule, check)
                    seen[check.statement] = seen.get(check.statement, 0) + 1
                    tightest = max(tightest, check.measured / check.bound)
        assert len(seen) == 3
        assert seen["corrected: micro-batch clipping"] > 150
        assert seen["corrected: SGD with draggers"] > 30
        assert tightest > 0.8  # the bounds are not merely large

    def test_hard_settings_come_close(self):
        """Noise that turns half of the gradients around holds b = 1 just below its bias, sigma."""
        world = World(epsilon=0.5, c=5, C=5, sigma=30, gap=0.5 * 29.9**2, noise="flip")
        report = simulate(world, T=200, B=1, b=1, rule=rules.Unit(), runs=64)
        (symmetric,) = [check for check in report.checks if "symmetric" in check.statement]
        bias = corrected.micro_batch_clipping_symmetric(
            T=200, b=1, epsilon=0.5, c=5, C=5, sigma=30, L=1, gap=world.gap
        ).bias
        assert bias == pytest.approx(30)
        assert symmetric.holds
        assert report.mean_norm > 0.98 * bias

    def test_the_printed_rate_of_sgd_is_violated(self):
        """Small batches and draggers as long as the printed proof allows: the gradient grows."""
        # sqrt((2 * .9 * 10 - .99)/.02) = 29.16 is the C of the printed proof at T = 100
        world = World(epsilon=0.1, c=29.16, C=29.16, sigma=0, gap=0.5)
        (printed,) = simulate(world, T=100, B=1, runs=64).checks
        assert printed.statement.startswith("printed")
        assert printed.bound == pytest.approx(100**-0.25 * math.sqrt(2 / 0.81))
        assert printed.measured == pytest.approx(1)  # the first step's: never below it again
        assert not printed.holds

    def test_large_batches_keep_it(self):
        world = World(epsilon=0.1, c=29.16, C=29.16, sigma=0, gap=0.5)
        assert all(check.holds for check in simulate(world, T=100, B=256, runs=16).checks)

    def test_one_micro_batch_with_the_min_rule_is_sgd(self):
        world = World(epsilon=0.3, c=3, C=6, sigma=1)
        plain = simulate(world, T=30, B=8, runs=8)
        clipped = simulate(world, T=30, B=8, b=8, rule=rules.MinNorm(), runs=8)
        torch.testing.assert_close(plain.norms, clipped.norms, rtol=1e-12, atol=0)
        assert [check.statement for check in clipped.checks] == [
            "printed: SGD with draggers",
            "corrected: SGD with draggers",
        ]

    def test_no_theorem_speaks_of_the_min_rule(self):
        world = World(epsilon=0.3, c=3, C=6, sigma=1)
        assert simulate(world, T=3, B=8, b=4, rule=rules.MinNorm(), runs=2).checks == ()

    def test_the_min_rule_takes_shorter_steps(self):
        """The same directions, each at most as long as the shortest gradient."""
        gradients = torch.tensor([[[3.0, 4.0], [0.0, 10.0], [6.0, 8.0], [0.0, 0.0]]])
        # norms 5, 10, 10, 0: rho = 5, so ((3, 4) + (0, 5) + (3, 4) + 0)/4
        assert update(gradients, 1, rules.MinNorm()).tolist() == [[1.5, 3.25]]
        torch.testing.assert_close(update(gradients, 1, rules.Unit()), torch.tensor([[0.3, 0.65]]))
        assert update(gradients, 4, None).tolist() == [[2.25, 5.5]]

    def test_what_is_reported(self):
        # eta = 1/2 and no noise: |g| is 2, 1, 1/2, 1/4
        calm = World(epsilon=0, c=0, C=0, sigma=0, gap=2)
        report = simulate(calm, T=4, B=1, runs=2)
        assert report.mean_norm == pytest.approx(3.75 / 4)
        assert report.least_norm == pytest.approx(0.25)
        assert report.root_mean_square == pytest.approx(math.sqrt((4 + 1 + 0.25 + 0.0625) / 4))

    def test_seeds_repeat_and_differ(self):
        world = World(epsilon=0.3, c=3, C=6, sigma=1)
        first, again, other = (simulate(world, T=5, B=4, runs=3, seed=s).norms for s in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


class TestWorld:
    @pytest.mark.parametrize("noise", LAWS)
    def test_assumptions_are_kept(self, noise):
        world = World(epsilon=0.4, c=2, C=5, sigma=3, noise=noise)
        w = torch.randn(300, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        g = world.gradient(w)
        samples = world.sample(g, 400, torch.Generator().manual_seed(0))
        length = g.norm(dim=1, keepdim=True)
        # only draggers are perpendicular to g: benign noise has a part of its own along it
        along = (samples * g[:, None]).sum(2) / length
        drags = along.abs() < 1e-9
        assert drags.double().mean().item() == pytest.approx(0.4, abs=0.01)
        for row in range(50):
            draggers, benign = samples[row][drags[row]], samples[row][~drags[row]]
            assert torch.allclose(draggers, draggers[:1])  # all alike
            ratio = (draggers[0].norm() / length[row]).item()
            assert 2 - 1e-9 <= ratio <= 5 + 1e-9
            assert (benign @ draggers[0]).abs().max() < 1e-9 * benign.norm(dim=1).max() * 100
        deviations = (samples - g[:, None])[~drags]
        assert deviations.square().sum(1).mean() <= 9 * 1.03
        backward = (samples - g[:, None])[~drags].mul(g.repeat_interleave((~drags).sum(1), 0))
        centred = backward.sum(1)
        assert abs(centred.mean()) < 4 * centred.std() / math.sqrt(len(centred))
        third = (centred**3).mean().item() / centred.std().item() ** 3
        assert (abs(third) < 0.2) == (noise in SYMMETRIC)

    @pytest.mark.parametrize("noise", LAWS)
    def test_the_minimum_is_no_trouble(self, noise):
        """At w = 0 exactly there is no direction of g, and a dragger has no length."""
        world = World(epsilon=0.5, c=2, C=5, sigma=1, noise=noise)
        samples = world.sample(torch.zeros(3, 6, dtype=torch.float64), 8, torch.Generator())
        assert samples.isfinite().all()

    def test_the_start_is_the_gap_above_the_least_loss(self):
        world = World(epsilon=0, c=0, C=0, sigma=0, L=4, gap=8)
        assert world.start(2).norm(dim=1).tolist() == [2, 2]  # 4 * 2^2 / 2
        assert world.gradient(world.start(1)).norm() == 8

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"noise": "loud"}, "noise must be one of sphere, rare, along, flip, skewed"),
            ({"dimension": 1}, "dimension must be 2 or more"),
            ({"c": 9}, "needs c <= C, but got c = 9 and C = 2"),
            ({"epsilon": 1}, "must be at least 0 and below 1"),
        ],
    )
    def test_bad_worlds_are_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            World(**{"epsilon": 0.1, "c": 1, "C": 2, "sigma": 1} | change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"b": 3}, "b must divide B, but got b = 3 and B = 4."),
            ({"rule": rules.Unit()}, r"Unit\(\) needs a micro-batch size: pass b."),
            ({"runs": 1}, "runs must be 2 or more"),
            ({"T": 0}, "T, the number of steps, must be"),
        ],
    )
    def test_bad_trainings_are_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            simulate(World(epsilon=0.1, c=1, C=2, sigma=1), **{"T": 2, "B": 4} | change)


class TestEfficiency:
    def test_of_sgd(self):
        """By the exact second moment: (1-epsilon)^2 / (K_B + (1-epsilon) sigma^2/(B|g|^2))."""
        world = World(epsilon=0.2, c=20, C=20, sigma=1, gap=0.5)
        # .64 + .16/64 + 400 * (.04 + .0025) + .8/64 = 17.655
        assert efficiency(world, B=64, sizes=[64])[64] == pytest.approx(0.64 / 17.655, rel=0.02)

    def test_long_draggers_and_much_noise_have_a_best_b_in_between(self):
        world = World(epsilon=0.2, c=20, C=20, sigma=20, gap=0.5, dimension=64)
        sizes = [1, 2, 4, 8, 16, 32, 64]
        found = efficiency(world, B=64, sizes=sizes, rule=rules.MinNorm())
        assert max(found, key=found.get) in (4, 8, 16)
        assert found[1] < found[64] < found[4]
        assert found[64] == pytest.approx(efficiency(world, B=64, sizes=[64])[64], rel=1e-9)

    def test_long_draggers_and_little_noise_want_single_examples(self):
        world = World(epsilon=0.2, c=20, C=20, sigma=1, gap=0.5)
        found = efficiency(world, B=64, sizes=[1, 4, 64], rule=rules.MinNorm(), draws=1000)
        assert found[1] > 0.7 > found[4] > 10 * found[64] * 0.5

    def test_short_draggers_are_amplified(self):
        world = World(epsilon=0.2, c=1, C=1, sigma=5, gap=0.5)
        found = efficiency(world, B=64, sizes=[1, 64], rule=rules.MinNorm(), draws=1000)
        assert found[1] < 0.7 * found[64]
