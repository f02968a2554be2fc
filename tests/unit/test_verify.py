"""Checks of single passes: when, at what cost, and what happens if one fails."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper, rules
from microclip.engines.randomness import Randomness
from microclip.engines.single_pass.verify import Comparison, Verifier

import properties
from hidden import Hidden


class Scaled(torch.autograd.Function):
    """The right values, but gradients that depend on the number of examples."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d * len(d)


class Mixing(nn.Module):
    """Mixes examples invisibly once it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.mixes = True

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.last(Scaled.apply(hidden) if self.mixes else hidden)


def losses(model):
    return lambda x: model(x).square().mean(1)


def wanted(model, x, b=2, **options):
    model.zero_grad()
    Clipper(model, b, engine="stream", **options).backward(losses(model), x)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def gradient(model):
    return [p.grad for p in model.parameters()]


class TestMismatch:
    @pytest.mark.parametrize("engine", ["fused", "auto"])
    @pytest.mark.parametrize("starts", [1, 2, 5])
    def test_redone_with_a_warning_and_given_up(self, engine, starts):
        """From the start, at a step that is checked, or with a new function."""
        torch.manual_seed(0)
        model = Mixing()
        clipper = Clipper(model, 2, engine=engine)
        used, said = [], []
        for step in range(1, 8):
            model.mixes = step >= starts
            x = torch.randn(8, 4)
            expected = wanted(model, x)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                used.append(clipper.backward(losses(model), x).engine)
            said += [str(each.message) for each in caught]
            properties.assert_close(gradient(model), expected, 1e-5)
        assert set(used[starts - 1 :]) == {"stream"}
        assert all("parameter 'first" in message for message in said)
        assert len(said) <= 1
        if engine == "fused":
            assert used[: starts - 1] == ["fused"] * (starts - 1)
            assert "of module 'first' (Linear)" in said[0]
            assert "redone" in said[0] or "done again" in said[0]

    def test_rules_that_do_not_stream(self):
        model, x = Mixing(), torch.randn(8, 4)
        expected = wanted(model, x, rule=rules.Median(rescale=True))
        clipper = Clipper(model, 2, engine="fused", rule=rules.Median(rescale=True))
        with pytest.warns(RuntimeWarning, match="alone"):
            clipper.backward(losses(model), x)
        properties.assert_close(gradient(model), expected, 1e-5)

    def test_chunks(self):
        """The first chunk is repeated; if a later one is wrong, that is an error."""
        model, x = Mixing(), torch.randn(8, 4)
        expected = wanted(model, x)
        clipper = Clipper(model, 2, engine="fused")
        with pytest.warns(RuntimeWarning, match="alone"):
            clipper.fold(losses(model), x[:4])
        clipper.fold(losses(model), x[4:])
        assert clipper.finish().engine == "stream"
        properties.assert_close(gradient(model), expected, 1e-5)

    def test_without_checks(self):
        model, x = Mixing(), torch.randn(8, 4)
        Clipper(model, 2, engine="fused", verify="never").backward(losses(model), x)
        assert (model.first.weight.grad - wanted(model, x)[0]).norm() > 1e-3


class TestWhen:
    def checked(self, model, verify, steps=20, b=1, before=None):
        """Return the steps at which a micro-batch was differentiated alone."""
        hidden, found = Hidden(), []  # a plain list would be restored by the snapshot

        def loss_fn(x):
            hidden.calls.append(len(x))
            return losses(model)(x)

        clipper = Clipper(model, b, engine="fused", verify=verify)
        for step in range(1, steps + 1):
            if before:
                before(step)
            hidden.calls.clear()
            clipper.backward(loss_fn, torch.randn(32, 4))
            if len(hidden.calls) > 1:
                found.append(step)
        return found

    @pytest.mark.parametrize(
        ("verify", "steps"),
        [
            ("rarely", [1, 2, 4, 8, 16]),
            ("always", list(range(1, 21))),
            ("never", []),
            (6, [1, 2, 4, 6, 8, 12, 16, 18]),
        ],
    )
    def test_how_often(self, verify, steps):
        assert self.checked(nn.Linear(4, 2), verify) == steps

    def test_whenever_something_is_new(self):
        model = Mixing()

        def before(step):
            model.mixes = False
            model.last.forward = (
                F.gelu if step == 11 else type(model.last).forward.__get__(model.last)
            )

        assert self.checked(model, "rarely", before=before) == [1, 2, 4, 8, 11, 16]

    def test_takes_little_of_two_hundred_steps(self):
        """Counted in steps; the largest part is a second pass over half of the first batch."""
        for microbatches in (8, 16, 32, 64):
            verifier = Verifier()
            for _ in range(200):
                verifier.begin()
                if verifier.is_due({"something"}, microbatches):
                    verifier.spend(1.5 / microbatches)
                    if verifier.is_first:
                        verifier.spend(0.5 + 1.5 / microbatches * min(4, microbatches // 4))
            assert verifier._spent <= 0.01 * 200

    @pytest.mark.parametrize("verify", ["often", 0, -1, True, None, 1.5])
    def test_bad_values(self, verify):
        with pytest.raises(ValueError, match=f"verify must be .* but got {verify!r}"):
            Clipper(nn.Linear(2, 2), verify=verify)


class TestLeavesNoTrace:
    def test_generators_and_buffers(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                self.calls += 1
                return self.dropout(self.layer(x))

        found = []
        for verify in ("always", "never"):
            torch.manual_seed(3)
            model = Counting()
            clipper = Clipper(model, 2, engine="fused", verify=verify)
            for _ in range(3):
                clipper.backward(losses(model), torch.randn(8, 4))
            found.append((model.calls.item(), model.layer.weight.grad.clone(), torch.rand(3)))
        (calls, gradients, numbers), (others, same, again) = found
        assert calls == others == 3
        assert torch.equal(gradients, same)
        assert torch.equal(numbers, again)

    def test_a_wrong_guess(self):
        """As many positions as examples: the pass is repeated; the first leaves no trace."""

        class Positions(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(8, 4)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                self.calls += 1
                near = (torch.arange(8)[:, None] - torch.arange(8)).abs()
                return (x + self.table(near).sum(1)).sum(2)

        model = Positions()
        x = torch.randn(8, 8, 4)
        expected = wanted(model, x)
        model.calls.zero_()
        state = torch.get_rng_state()
        clipper = Clipper(model, 2, engine="fused", verify="never")
        assert clipper.backward(losses(model), x).engine == "fused"
        assert model.calls == 1
        assert torch.equal(torch.get_rng_state(), state)
        properties.assert_close(gradient(model), expected, 1e-5)

    def test_dropout_is_disabled_and_mixing_found_despite_it(self):
        model = nn.Sequential(nn.Dropout(0.5), Mixing())
        x = torch.randn(8, 4)
        with pytest.warns(RuntimeWarning, match="parameter '1.first"):
            Clipper(model, 2, engine="fused").backward(losses(model), x)

    def test_noise_that_cannot_be_disabled_proves_nothing(self):
        model = nn.Linear(4, 2)
        clipper = Clipper(model, 2, engine="fused")

        def loss_fn(x):
            return model(x + random.random() + torch.randint(9, ())).square().mean(1)

        for _ in range(4):
            assert clipper.backward(loss_fn, torch.randn(8, 4)).engine == "fused"

    def test_the_users_batch_is_not_changed_by_checks(self):
        """A loss function that edits its batch does so only once."""
        model, fresh = nn.Linear(4, 2), torch.randn(8, 4)

        def loss_fn(x):
            loss = losses(model)(x.clone())
            x += 1
            return loss

        for verify in ("never", "rarely"):
            x = fresh.clone()
            clipper = Clipper(model, 2, engine="fused", verify=verify)
            assert clipper.backward(loss_fn, x).engine == "fused"
            assert torch.equal(x, fresh + 1)

    def test_models_that_need_several_examples(self):
        model = nn.Linear(4, 2)

        def loss_fn(x):
            if len(x) < 3:
                raise ValueError("too few")
            return losses(model)(x)

        clipper = Clipper(model, 2, engine="fused")
        with pytest.warns(RuntimeWarning, match="cannot be checked.*too few"):
            assert clipper.backward(loss_fn, torch.randn(8, 4)).engine == "fused"
        clipper.backward(loss_fn, torch.randn(8, 4))  # without a warning


class TestComparison:
    def test_small_parameters_count(self):
        """An error of 2 % in a parameter that has 1e-4 of the whole gradient."""
        comparison = Comparison()
        large, small = torch.ones(1000), torch.full((10,), 1e-3)
        comparison.add("large", large, large)
        comparison.add("small", small * 1.02, small)
        assert comparison.suspect(rounded=False) == "small"
        assert comparison.error < 1e-5

    def test_rounding_does_not(self):
        comparison = Comparison()
        values = torch.randn(1000)
        comparison.add("values", values * (1 + 1e-6), values)
        comparison.add("zero", torch.full((3,), 1e-7), torch.zeros(3))
        comparison.add("missing", None, None)
        assert comparison.suspect(rounded=False) is None

    def test_one_that_is_not_finite_does(self):
        comparison = Comparison()
        comparison.add("fine", torch.ones(3), torch.ones(3))
        comparison.add("lost", torch.ones(3), torch.full((3,), torch.nan))
        assert comparison.suspect(rounded=False) == "lost"

    def test_missing_ones_do(self):
        comparison = Comparison()
        comparison.add("there", torch.ones(3), torch.ones(3))
        comparison.add("gone", None, torch.ones(3))
        assert comparison.suspect(rounded=False) == "gone"

    def test_half_precision_may_be_off_by_more(self):
        comparison = Comparison()
        values = torch.randn(100).bfloat16()
        comparison.add("values", values * 1.02, values)
        assert comparison.suspect(rounded=False) is None


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_randomness_of_all_kinds(draw):
    before = Randomness.now({torch.device("cpu")})
    assert not before.moved({torch.device("cpu")})
    first = float(draw())
    assert before.moved({torch.device("cpu")})
    before.restore()
    assert float(draw()) == first
