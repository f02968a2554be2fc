"""Custom rules: those that stream, those that only seem to, and mistakes."""

import math

import pytest
import torch
from torch import nn

from microclip import Clipper, rules
from microclip.rules import Rule

import reference


def weights_by(function):
    """A twin of a rule, from a function of a list of norms."""
    return lambda norms, sizes: function(norms)


class Band(Rule):
    """Leaves short gradients out: its first factor may be 0."""

    def weights(self, norms, sizes):
        return self.factor(norms)

    def factor(self, norms):
        return (norms > 1.0).to(norms.dtype)


class HalfMin(rules.MinNorm):
    def weights(self, norms, sizes):
        return torch.where(norms > 2, 0.5, 1.0) * super().weights(norms, sizes)


class SoftUnit(rules.Unit):
    def weights(self, norms, sizes):
        return norms**-0.5


class SoftFixed(rules.Fixed):
    def weights(self, norms, sizes):
        return (self.c / norms).clamp(max=1.0) ** 0.5


class DoubleMin(rules.MinNorm):
    """Overrides the common number alone, and so still streams."""

    def bound(self, norms, sizes):
        return 2 * rules.minimum(norms)


class AgedMedian(rules.Median):
    def weights(self, norms, sizes):
        return super().weights(norms, sizes) / 2


def soft_fixed(norms):
    return [min(1.0, 0.5 / n) ** 0.5 for n in norms]


OWN = {
    "Band": (Band(), lambda norms: [float(n > 1) for n in norms], True),
    "HalfMin": (HalfMin(), lambda ns: [(0.5 if n > 2 else 1) * min(ns) / n for n in ns], False),
    "SoftUnit": (SoftUnit(), lambda norms: [n**-0.5 for n in norms], False),
    "SoftFixed": (SoftFixed(0.5), soft_fixed, False),
    "DoubleMin": (DoubleMin(), lambda norms: [2 * min(norms) / n for n in norms], True),
    "AgedMedian": (
        AgedMedian(rescale=True),
        lambda norms: [sorted(norms)[(len(norms) - 1) // 2] / n / 2 for n in norms],
        False,
    ),
}
SCALES = [0.01, 3.0, 0.0, 0.2, 8.0, 0.9]


def run(model, rule, engine, loss_fn, batch):
    """One step; "fold" is a loop that calls backward itself."""
    clipper = Clipper(model, 1, rule=rule, engine="auto" if engine == "fold" else engine)
    if engine != "fold":
        return clipper.backward(loss_fn, batch)
    for part in zip(*(tensor.split(1) for tensor in batch), strict=True):
        loss_fn(part).mean().backward()
        clipper.fold()
    return clipper.finish()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("engine", ["auto", "stream", "two_pass", "fused", "fold"])
@pytest.mark.parametrize("order", [1, -1])
def test_against_the_twin(name, engine, order):
    rule, function, streams = OWN[name]
    assert rule.streams == streams
    model = nn.Linear(3, 2)
    batch = torch.randn(6, 3), torch.tensor(SCALES[::order])

    def losses(batch):
        return model(batch[0]).square().sum(1) * batch[1]

    parts = list(zip(*(tensor.split(1) for tensor in batch), strict=True))
    stored = reference.microbatch_gradients(losses, list(model.parameters()), parts)
    wanted, _, weights = reference.clipped_gradient(stored, [1] * 6, weights_by(function))
    if engine in ("stream", "fold") and not streams:
        with pytest.raises((ValueError, RuntimeError), match="needs all norms|needs the examples"):
            run(model, rule, engine, losses, batch)
        return
    outcome = run(model, rule, engine, losses, batch)
    assert outcome.weights.tolist() == pytest.approx(weights, rel=1e-5)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("engine", ["stream", "fused"])
def test_a_reference_in_a_later_chunk(engine):
    """All factors of the first chunk are 0, so the second one brings the reference."""
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[0.3, 0.4], [0.0, 0.5], [3.0, 4.0], [6.0, 8.0]])
    clipper = Clipper(model, 1, rule=Band(), engine=engine)
    clipper.fold(lambda x: model(x).squeeze(1), x[:2])
    clipper.fold(lambda x: model(x).squeeze(1), x[2:])
    assert clipper.finish().weights.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(model.weight.grad, x[2:].sum(0, keepdim=True) / 4)


class Own(Rule):
    """Returns whatever it is told to."""

    def __init__(self, found, factor=None):
        self.found = found
        if factor is not None:
            self.factor = factor

    def weights(self, norms, sizes):
        return self.found(norms)


MISTAKES = {
    "a list": (lambda n: [1.0] * len(n), TypeError, "must return a tensor.*list"),
    "a number": (lambda n: 1.0, TypeError, "must return a tensor.*float"),
    "None": (lambda n: None, TypeError, "must return a tensor.*NoneType"),
    "complex": (lambda n: n.to(torch.complex128), TypeError, "complex128"),
    "a scalar": (lambda n: n.sum(), ValueError, r"one number for each of the 3 norms.*\(\)"),
    "too few": (lambda n: n[:2], ValueError, r"shape \(2,\)"),
    "a column": (lambda n: n[:, None], ValueError, r"shape \(3, 1\)"),
    "negative": (lambda n: -n, ValueError, r"returned -\d.* must be finite"),
    "NaN": (lambda n: n * math.nan, ValueError, "returned nan from weights"),
    "infinite": (lambda n: n / 0, ValueError, "returned inf from weights"),
    "one NaN": (lambda n: torch.where(n > n.min(), n, math.nan), ValueError, "returned nan"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("engine", ["two_pass", "fused", "auto"])
def test_mistakes_are_refused(mistake, engine):
    found, kind, message = MISTAKES[mistake]
    model = nn.Linear(2, 1)
    model.weight.grad = kept = torch.ones(1, 2)
    clipper = Clipper(model, 1, rule=Own(found), engine=engine)
    with pytest.raises(kind, match=message):
        clipper.backward(lambda x: model(x).square().sum(1), torch.randn(3, 2))
    assert model.weight.grad is kept
    assert kept.tolist() == [[1, 1]]
    assert model.bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_other_dtypes_are_taken_for_what_they_say(dtype):
    model = nn.Linear(2, 1, bias=False)
    x = torch.randn(3, 2)
    rule = Own(lambda norms: (norms > norms.min()).to(dtype))
    outcome = Clipper(model, 1, rule=rule).backward(lambda x: model(x).squeeze(1), x)
    wanted = (x.norm(dim=1) > x.norm(dim=1).min()).float()
    assert outcome.weights.tolist() == wanted.tolist()
    torch.testing.assert_close(model.weight.grad, (wanted @ x / 3).unsqueeze(0))


FACTORS = {
    "another power": lambda norms: norms**-0.5,
    "all zero": torch.zeros_like,
    "zero for one": lambda norms: torch.where(norms > norms.min(), 1 / norms, 0.0),
    "one of a list": lambda norms: [1.0] * len(norms),
    "negative": lambda norms: -1 / norms,
    "NaN": lambda norms: norms * math.nan,
    "a scalar": lambda norms: norms.sum() + 1,
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("engine", ["auto", "stream", "fold"])
def test_factors_that_do_not_fit_the_weights(name, engine):
    """Streamed, they would give another gradient than the weights say."""
    model = nn.Linear(2, 1)
    rule = Own(lambda norms: 1 / norms, factor=FACTORS[name])
    assert rule.streams
    with pytest.raises((ValueError, TypeError), match="Own"):
        run(
            model, rule, engine, lambda batch: model(batch[0]).square().mean(), (torch.randn(3, 2),)
        )


def test_bounds_may_be_plain_numbers():
    class Bounded(rules.Unit):
        def bound(self, norms, sizes):
            return 3

    model = nn.Linear(2, 1)
    outcome = Clipper(model, 1, rule=Bounded()).backward(
        lambda x: model(x).square().mean(), torch.randn(3, 2)
    )
    assert outcome.bound == 3


def test_bounds_of_the_wrong_shape_are_refused():
    class Bounded(rules.Unit):
        def bound(self, norms, sizes):
            return norms

    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"one bound for all norms.*\(3,\)"):
        Clipper(model, 1, rule=Bounded()).backward(
            lambda x: model(x).square().mean(), torch.randn(3, 2)
        )
