"""Differences that rounding explains are no reason to leave a single pass; all others are."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper, rules
from microclip.engines.single_pass import engine as single_pass
from microclip.engines.single_pass.rounding import ExtraRounding, compared, rounding_explains


class Scaled(torch.autograd.Function):
    """The right values, but gradients that depend on the number of examples."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d * len(d)


class Certain(nn.Module):
    """Classifies with logits near 100,000: its gradients are lost in their rounding."""

    def __init__(self, mixes=False):
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 6)
        self.mixes = mixes
        with torch.no_grad():
            self.last.weight *= 1e5

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.last(Scaled.apply(hidden) if self.mixes else hidden)


def batch(model, size=8):
    """Return inputs, and labels that the model chose by a small margin for logits as large."""
    x = torch.randn(8_000, 64)
    with torch.no_grad():
        two = model(x).topk(2)
    margins = two.values[:, 0] - two.values[:, 1]
    rows = ((margins > 5) & (margins < 60)).nonzero()[:size, 0]
    assert len(rows) == size
    return x[rows], two.indices[rows, 0]


def warned(clipper, model, steps=2):
    """Return whether a step was found to be wrong, and the engine of the last step."""

    def losses(batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            outcome = clipper.backward(losses, batch(model))
    return any("mix examples" in str(each.message) for each in caught), outcome.engine


RULES = {"streams": rules.Unit(), "does not stream": rules.Median()}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["fused", "auto"])
def test_a_model_that_is_certain(name, rule):
    torch.manual_seed(0)
    model = Certain()
    clipper = Clipper(model, 1, engine=name, rule=rule, verify="always")
    found, engine = warned(clipper, model)
    assert not found
    if name == "fused":  # "auto" may take another one because it is faster at the moment
        assert engine == "fused"


def test_without_this_it_would_be_suspected(monkeypatch):
    monkeypatch.setattr(single_pass, "rounding_explains", lambda *_: False)
    torch.manual_seed(0)
    model = Certain()
    clipper = Clipper(model, 1, engine="fused", rule=rules.Unit(), verify="always")
    assert warned(clipper, model) == (True, "stream")


@pytest.mark.parametrize("mixes", [False, True])
def test_rounding_leaves_nothing_open_where_no_check_follows(mixes):
    """Nearly equal pairs: the smallest gradient, by which all others are scaled, is rounding."""
    torch.manual_seed(0)
    first, last = nn.Linear(64, 64), nn.Linear(64, 1)
    x = torch.randn(16, 2, 64)
    x[::5, 1] = x[::5, 0] * (1 + 1e-6)

    def losses(pairs):
        hidden = first(pairs.flatten(0, 1)).tanh()
        if mixes:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        better, worse = last(hidden).view(-1, 2).unbind(1)
        return -F.logsigmoid(better - worse)

    clipper = Clipper(nn.ModuleList([first, last]), 1, verify="never")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        outcome = clipper.backward(losses, x)
    assert outcome.engine == "stream"
    if not mixes:
        assert "proves nothing" in clipper.engine_report.reason


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["fused", "auto"])
def test_a_certain_model_that_mixes(name, rule):
    torch.manual_seed(0)
    model = Certain(mixes=True)
    clipper = Clipper(model, 1, engine=name, rule=rule, verify="always")
    found, engine = warned(clipper, model, steps=1)
    assert found
    assert engine != "fused"


def test_a_model_that_changes_from_call_to_call():
    torch.manual_seed(0)
    model, calls = nn.Linear(64, 6), []

    def loss_fn(batch):
        calls.append(1)
        return F.cross_entropy(
            model(batch[0]) * (1 + 0.01 * len(calls)), batch[1], reduction="none"
        )

    clipper = Clipper(model, 1, engine="fused", verify="always")
    x, y = torch.randn(8, 64), torch.randint(6, (8,))
    with pytest.warns(RuntimeWarning, match="mix examples"):
        clipper.backward(loss_fn, (x, y))


@pytest.mark.parametrize(("growth", "is_excused"), [(0.0, True), (1.6, False)])
def test_what_grows_from_call_to_call_is_no_rounding(growth, is_excused):
    numbers, calls = 1 + torch.rand(64, generator=torch.Generator().manual_seed(0)), []

    def gradients():
        calls.append(1)
        small = numbers * 9000.7 - numbers * 9000  # of which rounding leaves three digits
        return {"weight": small + 1e-3 * growth ** len(calls) * small}

    difference = compared({"weight": 1.01 * gradients()["weight"]}, gradients())
    assert difference.suspect(rounded=False) == "weight"
    assert rounding_explains(difference, gradients, rounded=False) == is_excused


def test_ties_that_rounding_breaks_excuse_nothing():
    """Two equal numbers share the gradient of their maximum, until rounding tells them apart."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 6)
    model = nn.ModuleList([first, last])

    def loss_fn(batch):
        hidden = torch.stack([first(batch[0][:, :8]).tanh(), first(batch[0][:, :8]).tanh()])
        return F.cross_entropy(last(Scaled.apply(hidden.amax(0))), batch[1], reduction="none")

    clipper = Clipper(model, 1, engine="fused", verify="always")
    x, y = torch.randn(8, 64), torch.randint(6, (8,))
    with pytest.warns(RuntimeWarning, match="mix examples"):
        assert clipper.backward(loss_fn, (x, y)).engine == "stream"


class Halved(nn.Linear):
    """A layer whose parameters are wide, and that computes in half precision."""

    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


@pytest.mark.parametrize("layer", [nn.Linear, Halved])
@pytest.mark.parametrize("depth", [4, 8])
@pytest.mark.parametrize("name", ["centers", "normalizes"])
def test_half_precision_excuses_no_mixing(name, depth, layer):
    """A deep model in bfloat16 has gradients with errors of several percent, but not of half."""
    mix = {"centers": lambda g: g - g.mean(0) / 2, "normalizes": lambda g: g / g.norm() * 0.1}
    torch.manual_seed(0)
    norm = {"elementwise_affine": layer is nn.Linear}
    layers = [layer(32, 32) if i % 2 else nn.LayerNorm(32, **norm) for i in range(2 * depth)]
    body = nn.Sequential(*(nn.Sequential(each, nn.GELU()) for each in layers))
    last = layer(32, 5)
    if layer is nn.Linear:
        body, last = body.bfloat16(), last.bfloat16()

    def loss_fn(batch, mixes=True):
        hidden = body(batch[0])
        if mixes:  # out of sight, in the backward pass
            hidden.register_hook(mix[name])
        return F.cross_entropy(last(hidden).float(), batch[1], reduction="none")

    batch = torch.randn(8, 32).bfloat16(), torch.randint(5, (8,))
    clipper = Clipper(nn.ModuleList([body, last]), 1, engine="fused")
    assert clipper.backward(lambda batch: loss_fn(batch, mixes=False), batch).engine == "fused"
    with pytest.warns(RuntimeWarning, match="mix examples"):
        assert clipper.backward(loss_fn, batch).engine == "stream"


class TestExtraRounding:
    def test_errors_of_one_unit(self):
        x = torch.rand(1000) + 1
        with ExtraRounding():
            found = x * x
        error = (found / (x * x) - 1).abs()
        assert error.mean() > 0.5e-7
        assert error.max() < 2.5e-7

    def test_the_same_ones_again(self):
        x = torch.randn(100)
        with ExtraRounding(64):
            assert torch.equal(x.sin(), x.sin())
        with ExtraRounding(64, seed=0):
            one = x.sin()
        with ExtraRounding(64, seed=1):
            assert not torch.equal(x.sin(), one)

    def test_counts_masks_and_infinities_stay(self):
        lowest = torch.finfo(torch.float32).min
        with ExtraRounding(64):
            assert torch.ones(5).sum().item() == 5
            assert int(torch.tensor([3.5, 2.5]).floor()[0]) == 3
            assert torch.full((3,), lowest).add(0.25).isfinite().all()
            assert torch.arange(6).view(2, 3)[1].tolist() == [3, 4, 5]
            assert torch.zeros(2).log().tolist() == [-torch.inf] * 2
