"""Where `loss_fn` may keep state: all of it is restored, or the loss is not called again."""

import functools
import itertools
import random
import warnings
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from microclip import Clipper, rules
from microclip.engines.two_pass import PassesDifferError

import reference

B, SIZE = 2, 8
CALLS = 0
AVERAGE = None


class Trainer:
    """What people write around a model."""

    total = 0

    def __init__(self, model):
        self.model, self.calls, self.history = model, 0, []
        self.teacher = nn.Linear(4, 1).requires_grad_(False)

    def closure(self):
        def loss_fn(x):
            self.calls += 1
            self.history.append(self.calls)
            return self.model(x).square().mean() * len(self.history)

        return loss_fn

    def method(self, x):
        self.teacher.weight.data.lerp_(self.model.weight.data, 0.5)
        return (self.model(x) - self.teacher(x)).square().mean()

    @classmethod
    def counted(cls, model):
        def loss_fn(x):
            cls.total += 1
            return model(x).square().mean() * cls.total

        return loss_fn


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1
        return self.sum / self.count


def by_default(model):
    def loss_fn(x, state={"n": 0}, *, norm=nn.BatchNorm1d(4, affine=False)):  # noqa: B006, B008
        state["n"] += 1
        return model(norm(x)).square().mean() * state["n"]

    return loss_fn


def by_attribute(model):
    def loss_fn(x):
        loss_fn.calls += 1
        return model(x).square().mean() * loss_fn.calls

    loss_fn.calls = 0
    return loss_fn


def by_wrapper(model):
    def counting(function):
        calls = 0

        @functools.wraps(function)
        def wrapper(x):
            nonlocal calls
            calls += 1
            return function(x) * calls

        return wrapper

    return counting(lambda x: model(x).square().mean())


def by_global(model):
    def loss_fn(x):
        global CALLS, AVERAGE
        CALLS += 1
        loss = model(x).square().mean()
        value = loss.detach()
        AVERAGE = value if AVERAGE is None else 0.9 * AVERAGE + 0.1 * value
        return loss * (CALLS + AVERAGE)

    return loss_fn


def by_hook(model):
    calls = []
    model.register_forward_hook(lambda module, args, out: (calls.append(1), out * len(calls))[1])
    return lambda x: model(x).square().mean()


def by_layer(model):
    body = nn.Sequential(model)
    body.steps = 0

    def loss_fn(x):
        body.steps += 1
        return body(x).square().mean() * body.steps

    return loss_fn


def by_critic(model):
    critic = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.1)

    def loss_fn(x):
        optimizer.zero_grad()
        (critic(x) - model(x).detach()).square().mean().backward()
        optimizer.step()
        return (model(x) - critic(x).detach()).square().mean()

    return loss_fn


def by_containers(model):
    deep = {"a": [{"b": deque([1])}], "c": OrderedDict(d=np.zeros(3)), "e": {1}}

    def loss_fn(x):
        deep["a"][0]["b"].append(1)
        deep["c"]["d"] += 1
        deep["e"].add(len(deep["e"]))
        size = len(deep["a"][0]["b"]) + float(deep["c"]["d"].sum()) + len(deep["e"])
        return model(x).square().mean() * size

    return loss_fn


def by_meter(model):
    meter = Meter()

    def loss_fn(x):
        loss = model(x).square().mean()
        return loss * (1 + meter.update(float(loss.detach())))

    return loss_fn


WAYS = {
    "closure": lambda model: Trainer(model).closure(),
    "method": lambda model: Trainer(model).method,
    "class": Trainer.counted,
    "partial": lambda model: functools.partial(Trainer(model).method),
    **{
        function.__name__: function
        for function in (
            by_default, by_attribute, by_wrapper, by_global, by_hook, by_layer, by_critic,
            by_containers, by_meter,
        )
    },
}  # fmt: skip


def start():
    global CALLS, AVERAGE
    CALLS, AVERAGE, Trainer.total = 0, None, 0
    torch.manual_seed(0)
    return nn.Linear(4, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", [rules.MinNorm(), rules.Median()], ids=["MinNorm", "Median"])
@pytest.mark.parametrize("engine", ["auto", "two_pass"])
def test_put_back(way, rule, engine):
    batches = list(torch.randn(3, SIZE, 4))
    model = start()
    loss_fn, wanted = WAYS[way](model), []
    for x in batches:
        stored = reference.microbatch_gradients(loss_fn, list(model.parameters()), x.split(B))
        weigh = reference.WEIGH[repr(rule)]
        wanted.append(reference.clipped_gradient(stored, [B] * (SIZE // B), weigh)[0])
    model = start()
    loss_fn = WAYS[way](model)
    clipper = Clipper(model, B, rule=rule, engine=engine)
    for x, gradients in zip(batches, wanted, strict=True):
        model.zero_grad()
        clipper.backward(loss_fn, x)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-4, atol=1e-7)


def mean_losses(model):
    return lambda x: model(x).square().mean()


class Sealed(dict):
    """A dict that does not want to be changed, as some libraries have for settings."""

    def update(self, *args, **kwargs):
        raise TypeError("sealed")

    __setitem__ = update


def frozen_array():
    array = np.ones(3)
    array.flags.writeable = False
    return array


UNTOUCHABLE = {
    "sealed": Sealed(a=1.0),
    "read-only": frozen_array(),
    "system randomness": random.SystemRandom(),
    "a lock": __import__("threading").Lock(),
    "a module": torch,
    "an open file": open(__file__),  # noqa: SIM115
}


@pytest.mark.parametrize("what", UNTOUCHABLE)
@pytest.mark.parametrize("engine", ["auto", "two_pass"])
@pytest.mark.parametrize("each", [False, True])
def test_what_cannot_be_changed_is_left_alone(what, engine, each):
    model, held = nn.Linear(4, 1), UNTOUCHABLE[what]

    def loss_fn(x):
        assert held is not None
        losses = model(x).square().mean(1)
        return losses if each else losses.mean()

    Clipper(model, B, engine=engine).backward(loss_fn, torch.randn(SIZE, 4))
    assert UNTOUCHABLE["sealed"] == {"a": 1.0}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("engine", ["auto", "two_pass", "stream"])
def test_scripted_models(engine):
    model = torch.jit.trace(nn.Linear(4, 1), torch.randn(2, 4))
    clipper = Clipper(model, B, engine=engine)
    assert len(clipper.backward(mean_losses(model), torch.randn(SIZE, 4))) == SIZE // B


def test_mean_losses_are_not_called_for_a_trial():
    """However they keep their state: `auto` calls them as often as a plain loop."""
    model, numbers = nn.Linear(4, 1), itertools.count(1)
    drawn = []

    def loss_fn(x):
        drawn.append(next(numbers))
        return model(x).square().mean()

    Clipper(model, B).backward(loss_fn, torch.randn(SIZE, 4))
    assert next(numbers) == SIZE // B + 1
    assert drawn == list(range(1, SIZE // B + 1))


def test_losses_that_read_an_iterator_are_not_called_for_a_trial():
    model, numbers = nn.Linear(4, 1), itertools.count(1)
    clipper = Clipper(model, B)
    clipper.backward(lambda x: model(x).square().mean(1) * next(numbers), torch.randn(SIZE, 4))
    assert next(numbers) == SIZE // B + 1
    assert "cannot be read again" in clipper.engine_report.reason


def test_between_folds_anything_may_change():
    """The second pass sees each part as the first did."""
    results = []
    for engine in ("stream", "two_pass"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        settings = {"scale": 1.0}
        clipper = Clipper(model, B, engine=engine)

        def loss_fn(x, model=model, settings=settings):
            return model(x).square().mean() * settings["scale"]

        for part in range(3):
            settings["scale"] = 1.0 + part
            model.train(part != 1)
            clipper.fold(loss_fn, torch.randn(SIZE, 4))
        clipper.finish()
        results.append([p.grad for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", ["in place", "data", "numpy"])
@pytest.mark.parametrize("rule", [rules.MinNorm(), rules.Median()], ids=["MinNorm", "Median"])
@pytest.mark.parametrize("engine", ["auto", "two_pass", "fused"])
@pytest.mark.parametrize("each", [False, True])
def test_batches_edited_in_any_way(way, rule, engine, each):
    if engine == "fused" and not each:
        pytest.skip("needs one loss per example")
    model, batches = nn.Linear(4, 1), list(torch.randn(4, SIZE, 4))

    def loss_fn(x):
        if way == "in place":
            x.mul_(0.5)
        elif way == "data":
            x.data.mul_(0.5)
        else:
            x.numpy()[...] *= 0.5
        losses = (model(x.clone()) - 1).square().mean(1)
        return losses if each else losses.mean()

    clipper = Clipper(model, B, rule=rule, engine=engine)
    for batch in batches:
        model.zero_grad()
        x = batch.clone()
        clipper.backward(loss_fn, x)
        found = model.weight.grad.double()
        stored = reference.microbatch_gradients(
            loss_fn, list(model.parameters()), batch.clone().split(B)
        )
        weigh = reference.WEIGH[repr(rule)]
        wanted = reference.clipped_gradient(stored, [B] * (SIZE // B), weigh)[0]
        torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(x, batch / 2)


class TestSinglePasses:
    def test_memory_that_is_used_again(self):
        """Rows are held until all norms are known, and may not change until then."""
        model, buffer = nn.Linear(4, 1), torch.empty(SIZE, 4)
        clipper = Clipper(model, B, rule=rules.Median(), engine="fused")
        for _ in range(2):
            buffer.copy_(torch.randn(SIZE, 4))
            clipper.fold(lambda x: (model(x) - 1).square().mean(1), buffer)
        with pytest.raises(RuntimeError, match="written to between fold"):
            clipper.finish()

    def test_inputs_that_are_overwritten(self):
        """As autograd does, a single pass refuses what was changed in place since."""
        model = nn.Linear(4, 1)

        def loss_fn(x):
            x = x.clone()
            losses = model(x).square().mean(1)
            x.zero_()
            return losses

        with pytest.raises(RuntimeError, match="in-?place operation"):
            Clipper(model, B, engine="fused").backward(loss_fn, torch.randn(SIZE, 4))

    @pytest.mark.parametrize("noise", ["randn_like", "rand", "normal_", "uniform_"])
    def test_noise_does_not_hide_a_mixture(self, noise):
        """A model that draws random numbers is checked all the same."""
        model = nn.Linear(4, 1)

        def loss_fn(x):
            if noise == "randn_like":
                small = torch.randn_like(x)
            elif noise == "rand":
                small = torch.rand(x.shape)
            else:
                small = getattr(torch.empty_like(x), noise)()
            return (model(x + 1e-6 * small) * x.abs().max().item()).square().mean(1)

        with pytest.warns(RuntimeWarning, match="mix examples"):
            outcome = Clipper(model, B, engine="fused").backward(loss_fn, torch.randn(SIZE, 4))
        assert outcome.engine == "stream"

    def test_what_can_neither_be_checked_nor_trusted(self):
        model = nn.Linear(4, 1)

        def loss_fn(x):
            small = torch.randint(9, x.shape)
            return (model(x + 1e-9 * small) * x.abs().max().item()).square().mean(1)

        with pytest.warns(RuntimeWarning, match="cannot be checked"):
            outcome = Clipper(model, B, engine="fused").backward(loss_fn, torch.randn(SIZE, 4))
        assert outcome.engine == "stream"

    @pytest.mark.parametrize("closeness", [1e-2, 1e-4, 1e-6])
    @pytest.mark.parametrize("engine", ["fused", "auto"])
    def test_rows_that_cancel_out(self, closeness, engine):
        """Pairs that are nearly the same: little is left of the difference of their gradients."""
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

        def loss_fn(b):
            reward = model(torch.cat([b["chosen"], b["rejected"]], 1)).squeeze(-1)
            return -nn.functional.logsigmoid(reward[:, :6].sum(1) - reward[:, 6:].sum(1))

        clipper = Clipper(model, 1, engine=engine)
        for _ in range(4):
            a, b = torch.randn(2, SIZE, 6, 16)
            b[0] = a[0] + closeness * torch.randn(6, 16)
            batch = {"chosen": a, "rejected": b}
            model.zero_grad()
            outcome = clipper.backward(loss_fn, batch)
            parts = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(SIZE)]
            found = [p.grad.double() for p in model.parameters()]
            stored = reference.microbatch_gradients(loss_fn, list(model.parameters()), parts)
            wanted, norms, _ = reference.clipped_gradient(
                stored, [1] * SIZE, reference.WEIGH["MinNorm()"]
            )
            # of numbers that cancel out, float32 keeps what is left of its 7 digits
            tolerance = 1e-4 + 2e-6 / closeness
            assert outcome.norms.tolist() == pytest.approx(norms, rel=tolerance)
            scale = max(float(g.abs().max()) for g in wanted)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * scale)


def test_an_iterator_that_two_passes_would_read_twice():
    model, numbers = nn.Linear(4, 1), itertools.count(1)
    clipper = Clipper(model, B, rule=rules.Median())
    with pytest.raises(PassesDifferError, match="different values"):
        clipper.backward(lambda x: model(x).square().mean() * next(numbers), torch.randn(SIZE, 4))


def test_numbers_of_examples_that_are_no_tensor():
    model = nn.Linear(4, 1)
    batch = {"x": torch.randn(SIZE, 4), "lengths": list(range(SIZE))}
    with pytest.warns(RuntimeWarning, match=r"batch\['lengths'\] holds 8 numbers"):
        Clipper(model, B).backward(lambda b: model(b["x"]).square().mean(), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = {"x": torch.randn(SIZE, 4), "size": [224, 224]}
        Clipper(model, B).backward(lambda b: model(b["x"]).square().mean(), other)
