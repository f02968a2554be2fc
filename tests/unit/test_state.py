"""State that forward passes change, and engines that run them more than once.

Every case is a model or a loss with a state of some kind. The twin is a plain loop over the
micro-batches: what it leaves behind, and its gradient, are what each engine must leave behind.
"""

import copy
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper, rules
from microclip.engines.snapshot import SideEffects
from microclip.engines.two_pass import PassesDifferError

import reference
from hidden import Hidden
from stateful_models import (
    STATEFUL,
    Cache,
    Counter,
    EmaTeacher,
    Growing,
    NumpyRandom,
    OwnGenerator,
    Student,
)

B, SIZE = 2, 6


def seed():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def twin(model, batches, rule):
    """Steps of a plain loop: gradients of every step, and the state in the end."""
    found = []
    for batch in batches:
        stored = reference.microbatch_gradients(
            lambda x: model.losses(x).mean(), list(model.layer.parameters()), batch.split(B)
        )
        weigh = reference.WEIGH[repr(rule)]
        found.append(reference.clipped_gradient(stored, [B] * (SIZE // B), weigh)[0])
    return found, model.state().detach().clone()


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("rule", [rules.MinNorm(), rules.Median()], ids=["MinNorm", "Median"])
@pytest.mark.parametrize("engine", ["stream", "two_pass", "auto"])
def test_gradients_and_state_are_those_of_a_plain_loop(kind, rule, engine):
    if engine == "stream" and not rule.streams:
        pytest.skip("needs all norms first")
    torch.manual_seed(0)
    model = kind()
    other = copy.deepcopy(model)
    batches = list(torch.randn(3, SIZE, 3))
    seed()
    wanted, state = twin(other, batches, rule)
    seed()
    clipper = Clipper(model, B, rule=rule, engine=engine)
    for batch, gradients in zip(batches, wanted, strict=True):
        model.layer.zero_grad()
        clipper.backward(lambda x: model.losses(x).mean(), batch)
        for parameter, gradient in zip(model.layer.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.state().detach(), state)


@pytest.mark.parametrize("kind", [EmaTeacher, Counter, Cache, OwnGenerator, NumpyRandom, Growing])
def test_a_trial_and_checks_leave_no_trace(kind):
    """One loss per example: the single pass is tried, and each model runs once per batch or so."""
    torch.manual_seed(0)
    model = kind()
    calls = []
    seed()
    clipper = Clipper(model, B, engine="auto")
    before = copy.deepcopy(model)
    seed()

    def losses(x):
        calls.append(len(x))
        return model.losses(x)

    x = torch.randn(SIZE, 3)
    seed()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A single pass .* seems to mix", RuntimeWarning)
        outcome = clipper.backward(losses, x)
    parts = [x] if outcome.engine == "fused" else x.split(B)
    assert calls == [len(part) for part in parts]  # the list is what one step would have made
    seed()
    for part in parts:
        before.losses(part)
    torch.testing.assert_close(model.state().detach(), before.state().detach())


class Holder:
    """An object whose method is the loss function."""

    def __init__(self, model):
        self.model, self.calls = model, 0

    def loss(self, x):
        self.calls += 1
        return self.model(x).square().mean() * self.calls


def closures(model):
    count, seen, noise = 0, [], torch.Generator().manual_seed(0)

    def counted(x):
        nonlocal count
        count += 1
        seen.append(count)
        drawn = torch.rand((), generator=noise)
        return model(x).square().mean() * (count + len(seen) + drawn)

    return counted, lambda: (count, len(seen), noise.get_state().sum().item())


@pytest.mark.parametrize("rule", [rules.MinNorm(), rules.Median()], ids=["MinNorm", "Median"])
@pytest.mark.parametrize("engine", ["auto", "two_pass"])
def test_what_a_function_closes_over(engine, rule):
    x = torch.randn(SIZE, 3)
    results = []
    for clipped in (False, True):
        torch.manual_seed(0)
        model = Student()
        loss_fn, state = closures(model)
        holder = Holder(model)
        for function in (loss_fn, holder.loss, partial(loss_fn)):
            model.zero_grad()
            if clipped:
                Clipper(model, B, rule=rule, engine=engine).backward(function, x)
                gradients = [p.grad.double() for p in model.parameters()]
            else:
                parameters = list(model.parameters())
                stored = reference.microbatch_gradients(function, parameters, x.split(B))
                weigh = reference.WEIGH[repr(rule)]
                gradients = reference.clipped_gradient(stored, [B] * (SIZE // B), weigh)[0]
            results.append((gradients, state(), holder.calls))
    for (one, *left), (other, *right) in zip(results[:3], results[3:], strict=True):
        assert left == right
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_cannot_be_put_back_is_refused():
    model, opaque = Student(), Hidden()
    model.layer.weight.grad = kept = torch.ones(2, 3)
    clipper = Clipper(model, B, engine="two_pass")
    with pytest.raises(
        PassesDifferError, match=r"examples 0, 1 gave different values for the loss"
    ):
        clipper.backward(lambda x: model(x).square().mean() * opaque.next(), torch.randn(SIZE, 3))
    assert model.layer.weight.grad is kept
    assert kept.eq(1).all()
    assert not model.layer.weight._post_accumulate_grad_hooks


def test_a_gradient_that_differs_while_the_loss_does_not():
    """Only the norms show it."""

    model, scale = Student(), Hidden()

    def loss_fn(x):
        scale.next()
        h = model(x)
        return (h + scale.value * (h - h.detach())).square().mean()

    with pytest.raises(PassesDifferError, match="norm of its gradient"):
        Clipper(model, B, engine="two_pass").backward(loss_fn, torch.randn(SIZE, 3))


@pytest.mark.parametrize("size", [2, 700])
def test_a_state_that_starts_late(size):
    """What is little is copied in every step; of more, what is seen to be written to."""

    class Starts(EmaTeacher):
        active = False

        def __init__(self):
            super().__init__()
            self.register_buffer("ballast", torch.zeros(size, size, 4))

        def losses(self, x):
            if self.active:
                return super().losses(x)
            return (self(x) - self.teacher(x)).square().sum(1)

    model = Starts()
    clipper = Clipper(model, B, engine="two_pass")
    x = torch.randn(SIZE, 3)
    for _ in range(6):
        model.zero_grad()
        clipper.backward(lambda x: model.losses(x).mean(), x)
    model.active = True
    if size > 2:
        model.zero_grad()
        with pytest.raises(PassesDifferError):
            clipper.backward(lambda x: model.losses(x).mean(), x)
    model.zero_grad()  # by now it is looked for, and the step can be repeated
    other = copy.deepcopy(model)
    wanted, state = twin(other, [x], rules.MinNorm())
    clipper.backward(lambda x: model.losses(x).mean(), x)
    torch.testing.assert_close(model.layer.weight.grad.double(), wanted[0][0])
    torch.testing.assert_close(model.teacher.weight, state)


def test_a_teacher_that_starts_as_a_copy():
    """It is written to without a change in the first step."""
    model = Student()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(x):
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return (model(x) - teacher(x) - 1).square().mean()

    clipper = Clipper(model, B, rule=rules.Median(), engine="two_pass")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        optimizer.zero_grad()
        clipper.backward(loss_fn, torch.randn(SIZE, 3))
        optimizer.step()


def test_skipped_microbatches_leave_their_traces_in_both_passes():
    """Statistics of later micro-batches depend on the one that is left out."""
    results = []
    for engine in ("stream", "two_pass"):
        torch.manual_seed(0)
        model = Counter()
        x = torch.randn(SIZE, 3)
        x[2] = torch.inf
        clipper = Clipper(model, B, engine=engine, nonfinite="skip")
        with pytest.warns(RuntimeWarning, match="Skipped 1 of 3"):
            clipper.backward(lambda x, model=model: model.losses(x).mean(), x)
        results.append((model.layer.weight.grad, model.calls))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 3


def test_autocast_around_fold_alone():
    """The second pass, in finish(), has the precision of the first."""
    results = []
    for engine in ("stream", "two_pass"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))
        clipper = Clipper(model, B, engine=engine)
        with torch.autocast("cpu", torch.bfloat16):
            clipper.fold(lambda x, m=model: m(x).float().square().mean(), torch.randn(SIZE, 3))
        assert not torch.is_autocast_enabled("cpu")
        clipper.finish()
        results.append(model[0].weight.grad)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def test_large_frozen_models_are_not_copied_in_every_step():
    model = nn.Sequential(nn.Linear(1024, 2048).requires_grad_(False), nn.Linear(2048, 2))
    effects = SideEffects(model)
    for step in range(1, 10):
        snapshot = effects.in_every_step()
        assert len(snapshot._copies) == (2 if step <= 4 or step == 8 else 0)  # nothing trained
        snapshot.learn()
    assert effects.changing == set()


def test_a_parameter_that_forward_clamps():
    model = Student()

    def loss_fn(x):
        with torch.no_grad():
            model.layer.weight.clamp_(-0.1, 0.1)
        return model(x).square().mean()

    results = []
    x = torch.randn(SIZE, 3)
    start = copy.deepcopy(model.state_dict())
    for engine in ("stream", "two_pass"):
        model.load_state_dict(start)
        model.zero_grad()
        Clipper(model, B, engine=engine).backward(loss_fn, x)
        results.append(model.layer.weight.grad.clone())
    torch.testing.assert_close(*results)


class TestBatchesThatAreEdited:
    """A masked-language model's masking, in place: each pass must see the batch as it came."""

    def make(self, each):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(20, 11))

        def loss_fn(batch):
            ids, labels = batch["ids"], batch["labels"]
            chosen = torch.rand(ids.shape) < 0.3
            labels[~chosen] = -100
            ids[chosen] = 10
            losses = F.cross_entropy(model(ids), labels[:, 0], ignore_index=-100, reduction="none")
            return losses if each else losses.mean()

        batch = {"ids": torch.randint(0, 10, (8, 5))}
        batch["labels"] = batch["ids"].clone()
        return model, loss_fn, batch

    @pytest.mark.parametrize("each", [False, True])
    @pytest.mark.parametrize("engine", ["stream", "two_pass", "auto", "fused"])
    def test_masked_once(self, engine, each):
        if engine == "fused" and not each:
            pytest.skip("needs one loss per example")
        model, loss_fn, batch = self.make(each)
        clipper = Clipper(model, 2, engine=engine)
        for step in range(4):
            fresh = {name: tensor.clone() for name, tensor in batch.items()}
            torch.manual_seed(step)
            outcome = clipper.backward(loss_fn, fresh)
            found = model[2].weight.grad.double()
            model.zero_grad()
            copied = {name: tensor.clone() for name, tensor in batch.items()}
            torch.manual_seed(step)
            if outcome.engine == "fused":  # one mask for the whole batch
                edited = loss_fn(copied)  # which is in `copied` now
                assert edited.requires_grad
                ids, labels = copied["ids"], copied["labels"]
                parts = zip(ids.split(2), labels.split(2), strict=True)

                def plain(part):
                    return F.cross_entropy(
                        model(part[0]), part[1][:, 0], ignore_index=-100, reduction="none"
                    )

                stored = reference.microbatch_gradients(plain, list(model.parameters()), parts)
            else:
                parts = [{n: t[i : i + 2] for n, t in copied.items()} for i in range(0, 8, 2)]
                stored = reference.microbatch_gradients(loss_fn, list(model.parameters()), parts)
            wanted = reference.clipped_gradient(stored, [2] * 4, reference.WEIGH["MinNorm()"])[0]
            torch.testing.assert_close(found, wanted[1], rtol=1e-4, atol=1e-6)
            assert torch.equal(fresh["ids"], copied["ids"])  # edited once, as in plain training

    def test_an_edit_that_starts_late(self):
        model, _, batch = self.make(each=True)
        active = False

        def loss_fn(batch):
            ids = batch["ids"].add_(1).remainder_(10) if active else batch["ids"]
            return F.cross_entropy(model(ids), batch["labels"][:, 0], reduction="none")

        clipper = Clipper(model, 2, engine="two_pass")
        clipper.backward(loss_fn, {name: tensor.clone() for name, tensor in batch.items()})
        active = True
        model.zero_grad()
        with pytest.raises(PassesDifferError):
            clipper.backward(loss_fn, {name: tensor.clone() for name, tensor in batch.items()})
        model.zero_grad()
        clipper.backward(loss_fn, {name: tensor.clone() for name, tensor in batch.items()})


class TestRedoneSteps:
    """A single pass that fails its check, or is refused, leaves no trace in any state."""

    @pytest.mark.parametrize("kind", ["buffer", "teacher"])
    @pytest.mark.parametrize("mixes", ["never", "by a number read on the host", "from step 3 on"])
    @pytest.mark.parametrize("engine", ["auto", "fused"])
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_state_and_gradients_are_those_of_streaming(self, kind, mixes, engine):
        found = [self.train(kind, mixes, one) for one in ("stream", engine)]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    def train(self, kind, mixes, engine):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        teacher = nn.Linear(4, 2).double().requires_grad_(False)
        model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        step = 0

        def loss_fn(x):
            if kind == "buffer":
                model.seen.add_(len(x))
                wanted = model.seen / 100
            else:
                teacher.weight.mul_(0.9)
                wanted = teacher(x)
            y = model(x)
            if mixes == "by a number read on the host":
                y = y * x.max().item()
            elif mixes == "from step 3 on" and step >= 3:
                y = y - y.mean(0)
            return (y - wanted).square().sum(1)

        clipper, kept = Clipper(model, 2, engine=engine), []
        for step in range(6):
            x = torch.randn(
                8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
            )
            model.zero_grad()
            try:
                clipper.backward(loss_fn, x)
            except NotImplementedError:  # fused refuses, with everything as it was
                assert engine == "fused"
                fallback = Clipper(model, 2, engine="stream")
                fallback.backward(loss_fn, x)
            kept += [model.weight.grad.clone(), model.seen.clone(), teacher.weight.clone()]
        if kind == "buffer" and engine == "stream":
            assert model.seen == 6 * 8
        return kept
