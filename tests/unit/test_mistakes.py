"""Mistakes in training loops: warned about once with a remedy, or refused; never silent."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper, rules

import reference


def linear(width=3):
    torch.manual_seed(0)
    return nn.Linear(width, 2)


def loss_of(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def batch(size=8, width=3):
    return torch.randn(size, width), torch.randint(0, 2, (size,))


def clipped(model, loss_fn, parts):
    """The twin: MinNorm of the gradients of these parts."""
    stored = reference.microbatch_gradients(loss_fn, list(model.parameters()), parts)
    sizes = [len(part[1]) for part in parts]
    return reference.clipped_gradient(stored, sizes, reference.WEIGH["MinNorm()"])[0]


class TestGradientsOfTheStepBefore:
    def steps(self, between, steps=2, **options):
        model = linear()
        clipper = Clipper(model, 2, engine="stream", **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            clipper.backward(loss_of(model), batch())
            between(optimizer)

    @pytest.mark.parametrize(
        "between",
        [
            lambda optimizer: None,
            lambda optimizer: optimizer.step(),
            lambda optimizer: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1),
        ],
    )
    def test_are_noticed(self, between):
        with pytest.warns(RuntimeWarning, match=r"previous step.*zero_grad\(\).*finish\(\) once"):
            self.steps(between)

    def test_once(self):
        with pytest.warns(RuntimeWarning) as caught:
            self.steps(lambda optimizer: None, steps=9)
        assert len(caught) == 1

    @pytest.mark.parametrize("to_none", [True, False])
    def test_zeroed_ones_are_fine(self, to_none):
        self.steps(lambda optimizer: optimizer.zero_grad(set_to_none=to_none), steps=9)

    def test_what_others_add_is_fine(self):
        """A regulariser with a backward pass of its own."""
        model = linear()
        clipper = Clipper(model, 2)
        for _ in range(4):
            model.zero_grad()
            (0.1 * model.weight.square().sum()).backward()
            clipper.backward(loss_of(model), batch())


SUMS = {
    "cross-entropy": lambda m, b, n: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
    "squares": lambda m, b, n: F.mse_loss(m(b[0]), torch.zeros(len(b[0]), 2), reduction="sum"),
    "sum()": lambda m, b, n: m(b[0]).square().sum(),
    "of one per example": lambda m, b, n: m(b[0]).square().mean(1).sum(),
    "over B": lambda m, b, n: m(b[0]).square().sum() / n,
    "cross-entropy over B": lambda m, b, n: F.cross_entropy(m(b[0]), b[1], reduction="sum") / n,
}
MEANS = {
    "cross-entropy": lambda m, b, n: F.cross_entropy(m(b[0]), b[1]),
    "sum over its size": lambda m, b, n: m(b[0]).square().sum() / len(b[0]),
    "batchmean": lambda m, b, n: F.kl_div(
        m(b[0]).log_softmax(1), torch.full((len(b[0]), 2), 0.5), reduction="batchmean"
    ),
    "two tasks": lambda m, b, n: torch.stack([m(b[0]).square().mean(), m(b[0]).abs().mean()]).sum(),
    "weighted": lambda m, b, n: 0.5 * F.cross_entropy(m(b[0]), b[1]),
    "over tokens": lambda m, b, n: m(b[0]).square().sum() / m(b[0]).numel(),
}


class TestLossesThatAreNoMeans:
    @pytest.mark.parametrize("name", SUMS)
    @pytest.mark.parametrize("engine", ["auto", "stream", "two_pass"])
    def test_sums_are_noticed(self, name, engine):
        model = linear()
        with pytest.warns(RuntimeWarning, match=r"micro-batch of 2 examples is a sum.*mean"):
            Clipper(model, 2, engine=engine).backward(lambda b: SUMS[name](model, b, 8), batch())

    @pytest.mark.parametrize("name", MEANS)
    @pytest.mark.parametrize("engine", ["auto", "stream", "two_pass"])
    def test_means_are_not(self, name, engine):
        model = linear()
        Clipper(model, 2, engine=engine).backward(lambda b: MEANS[name](model, b, 8), batch())

    def test_a_sum_over_one_example_is_its_mean(self):
        model = linear()
        Clipper(model, 1).backward(lambda b: SUMS["cross-entropy"](model, b, 8), batch())

    def test_a_function_of_the_whole_batch(self):
        model, whole = linear(), batch()
        with pytest.warns(RuntimeWarning, match="All 4 micro-batches have the same loss"):
            Clipper(model, 2).backward(lambda part: loss_of(model)(whole), whole)

    def test_a_head_of_zeros_is_none(self):
        """All losses are log 2 there, and the gradients are not the same."""
        model = linear()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        Clipper(model, 2).backward(loss_of(model), batch())


class TestDividedLosses:
    """nanoGPT's loop: the loss is divided by the number of steps that accumulate."""

    def run(self, steps, **fold):
        model = linear()
        parts = [batch(4) for _ in range(steps)]
        wanted = clipped(model, loss_of(model), parts)
        clipper = Clipper(model)
        for part in parts:
            loss = loss_of(model)(part) / steps
            loss.backward()
            clipper.fold(loss=loss, size=4, **fold)
        return model, wanted, clipper.finish(), parts

    def test_is_noticed(self):
        with pytest.warns(RuntimeWarning, match=r"mean that was divided.*loss_scale=1 / steps"):
            self.run(4)

    @pytest.mark.parametrize("steps", [2, 4, 7])
    def test_loss_scale_makes_it_right(self, steps):
        model, wanted, outcome, parts = self.run(steps, loss_scale=1 / steps)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-5, atol=1e-7)
        mean = sum(loss_of(model)(part).item() for part in parts) / steps
        assert outcome.loss.item() == pytest.approx(mean, rel=1e-5)

    def test_inside_loss_fn(self):
        model = linear()
        with pytest.warns(RuntimeWarning, match="divided by 4"):
            Clipper(model, 2).backward(lambda b: loss_of(model)(b) / 4, batch())

    @pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), "1/4", None])
    def test_bad_scales(self, scale):
        model = linear()
        loss_of(model)(batch()).backward()
        with pytest.raises(ValueError, match="loss_scale must be the positive number"):
            Clipper(model).fold(loss_scale=scale)
        assert model.weight.grad is not None

    def test_belongs_to_a_backward_of_ones_own(self):
        model = linear()
        with pytest.raises(TypeError, match="loss_scale"):
            Clipper(model, 2).fold(loss_of(model), batch(), loss_scale=0.5)

    def test_two_parameters_that_share_a_gradient(self):
        """Autograd may give one tensor to two parameters; it must not be divided twice."""
        x = torch.randn(2, 3)
        model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
        clipper = Clipper(model)
        for row in x:
            ((row + model[0] + model[1]).square().sum() / 2).backward()
            clipper.fold(loss_scale=0.5)
        outcome = clipper.finish()
        torch.testing.assert_close(outcome.norms, (2 * x).norm(dim=1).double() * 2**0.5)
        assert torch.equal(model[0].grad, model[1].grad)


class TestParameters:
    def test_outside_the_model(self):
        model, head = linear(), nn.Linear(2, 1)
        for engine in ("stream", "two_pass", "fused", "auto"):
            clipper = Clipper(model, 2, engine=engine)
            with pytest.raises(
                (ValueError, NotImplementedError), match=r"shape \(1, 2\).*ModuleList|cannot tell"
            ):
                clipper.backward(lambda b: head(model(b[0])).square().mean(1), batch())
            assert model.weight.grad is None

    def test_outside_the_model_in_chunks(self):
        model, head = linear(), nn.Linear(2, 1)
        clipper = Clipper(model, 2)
        with pytest.raises(ValueError, match="does not belong to the model"):
            clipper.fold(lambda b: head(model(b[0])).square().mean(), batch())

    def test_a_plain_tensor_that_is_trained(self):
        model, scale = linear(), torch.ones((), requires_grad=True)
        with pytest.raises(ValueError, match="trainable tensor of shape"):
            Clipper(model, 2).backward(lambda b: (model(b[0]) * scale).square().mean(), batch())

    def test_tensors_that_loss_fn_makes_are_fine(self):
        """A gradient penalty needs inputs that require gradients."""
        model = linear()

        def loss_fn(b):
            x = b[0].clone().requires_grad_()
            out = model(x).square().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            return model(x).square().mean() + slope.square().mean()

        Clipper(model, 2, engine="stream").backward(loss_fn, batch())

    def test_frozen_ones_outside_are_fine(self):
        model, head = linear(), nn.Linear(2, 1).requires_grad_(False)
        Clipper(model, 2).backward(lambda b: head(model(b[0])).square().mean(), batch())
        assert head.weight.grad is None

    def test_one_microbatch_is_plain_training(self):
        model, head = linear(), nn.Linear(2, 1)
        whole = batch()
        Clipper(model).backward(lambda b: head(model(b[0])).square().mean(), whole)
        found = head.weight.grad.clone()
        head.zero_grad()
        head(model(whole[0])).square().mean().backward()
        assert torch.equal(found, head.weight.grad)

    @pytest.mark.parametrize("own", [False, True])
    def test_unfrozen_between_folds(self, own):
        model = nn.Sequential(linear(), nn.Linear(2, 2))
        model[1].requires_grad_(False)
        clipper = Clipper(model, 2)

        def fold():
            if own:
                loss_of(model)(batch()).backward()
                clipper.fold(size=8)
            else:
                clipper.fold(loss_of(model), batch())

        fold()
        model[1].requires_grad_(True)
        with pytest.raises(
            RuntimeError, match=r"requires_grad of parameter '1\.weight' has changed"
        ):
            fold()

    def test_unfrozen_between_steps_is_fine(self):
        model = nn.Sequential(linear(), nn.Linear(2, 2))
        model[1].requires_grad_(False)
        clipper = Clipper(model, 2)
        clipper.backward(loss_of(model), batch())
        model.zero_grad()
        model[1].requires_grad_(True)
        clipper.backward(loss_of(model), batch())
        assert model[1].weight.grad is not None

    def test_lazy_modules(self):
        with pytest.raises(ValueError, match=r"'weight' of LazyLinear has no shape yet.*Run the"):
            Clipper(nn.LazyLinear(2), 2)


class TestHooksThatTakeGradients:
    """Optimizers that step inside the backward pass."""

    @pytest.mark.parametrize("engine", ["stream", "two_pass", "auto", "fused"])
    @pytest.mark.parametrize("of", ["all", "one"])
    def test_are_refused(self, engine, of):
        model = nn.Sequential(linear(), nn.Linear(2, 2))

        def step(parameter):
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in list(model.parameters())[: None if of == "all" else 1]:
            parameter.register_post_accumulate_grad_hook(step)
        clipper = Clipper(model, 2, engine=engine)
        with pytest.raises((RuntimeError, NotImplementedError), match="hook"):
            clipper.backward(
                lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batch()
            )

    @pytest.mark.parametrize("engine", ["stream", "two_pass"])
    def test_hooks_that_keep_them_are_fine(self, engine):
        model, whole = linear(), batch()

        def halve(parameter):
            parameter.grad.mul_(0.5)

        model.weight.register_post_accumulate_grad_hook(halve)
        parts = list(zip(whole[0].split(2), whole[1].split(2), strict=True))
        wanted = clipped(model, loss_of(model), parts)
        Clipper(model, 2, engine=engine).backward(loss_of(model), whole)
        torch.testing.assert_close(model.weight.grad.double(), wanted[0], rtol=1e-5, atol=1e-7)
        assert len(model.weight._post_accumulate_grad_hooks) == 1


class TestNonfinite:
    @pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
    @pytest.mark.parametrize("bad", [0, 3])
    def test_propagates_to_all_domains(self, engine, bad):
        """Also to parameters that only the other domain reaches."""
        model = nn.ModuleList([linear(), linear()])
        x, domains = torch.randn(4, 3), [0, 0, 1, 1]
        x[bad] = torch.nan
        picked = torch.tensor(domains)

        def losses(b):
            both = model[0](b[0]), model[1](b[0])
            chosen = torch.where(b[1][:, None] == 0, both[0], both[1])
            return chosen.square().mean(1)

        outcome = Clipper(model, 1, engine=engine, verify="never").backward(
            losses, (x, picked), domains=domains
        )
        assert outcome.weights.isnan().all()
        assert outcome.bounds.isnan().all()
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.isnan().all()
        assert model[0].weight.grad is not None
        assert model[1].weight.grad is not None

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_two_separate_modules(self, reduction):
        """With streaming, the finite domain's own module gets NaN as well."""
        model = nn.ModuleDict({"a": linear(), "b": linear()})
        x = torch.randn(4, 3)
        x[3] = torch.inf

        def loss_fn(b):
            return model["b" if b[1][0] else "a"](b[0]).square().mean()

        Clipper(model, 1, engine="stream", reduction=reduction).backward(
            loss_fn, (x, torch.tensor([0, 0, 1, 1])), domains=[0, 0, 1, 1]
        )
        assert all(parameter.grad.isnan().all() for parameter in model.parameters())

    @pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
    def test_a_scale_that_is_too_large_is_lowered(self, engine):
        """With "skip" the scaler must still see that half precision overflows."""
        model = linear()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        clipper = Clipper(model, 2, engine=engine, nonfinite="skip", grad_scaler=scaler)

        def losses(b):
            hidden = model(b[0])
            # what half precision does: gradients beyond 65504 are infinite
            hidden.register_hook(lambda g: torch.where(g.abs() > 65504, torch.inf * g.sign(), g))
            return F.cross_entropy(hidden, b[1], reduction="none")

        scales, finite = [], []
        for _ in range(40):
            optimizer.zero_grad()
            outcome = clipper.backward(losses, batch())
            finite.append(bool(model.weight.grad.isfinite().all()))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[0] == 2.0**39
        assert not finite[0]
        assert finite[-1]
        assert not outcome.skipped.any()
        assert 1 < scales[-1] < 2.0**20

    def test_bad_data_is_left_out_at_any_scale(self):
        model = linear()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        clipper = Clipper(model, 2, nonfinite="skip", grad_scaler=scaler)
        x, y = batch()
        x[0] = torch.nan
        with pytest.warns(RuntimeWarning, match="Skipped 1 of 4"):
            clipper.backward(loss_of(model), (x, y))
        assert model.weight.grad.isfinite().all()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**10


class TestWhatWasTried:
    """`auto` remembers a trial by the loss function it was made with."""

    def test_a_second_loss_that_mixes(self):
        model, whole = linear(), batch()

        def plain(b):
            return F.cross_entropy(model(b[0]), b[1], reduction="none")

        def mixing(b):
            hidden = model(b[0])
            return (hidden - hidden.mean(0)).square().mean(1)

        clipper = Clipper(model, 2)
        for loss_fn in (plain, mixing, plain, mixing):
            model.zero_grad()
            parts = list(zip(whole[0].split(2), whole[1].split(2), strict=True))
            wanted = clipped(model, lambda b, f=loss_fn: f(b).mean(), parts)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*mix examples", RuntimeWarning)
                clipper.backward(loss_fn, whole)
            torch.testing.assert_close(model.weight.grad.double(), wanted[0], rtol=1e-4, atol=1e-6)
        assert len(clipper.state_dict()["trials"]) == 2

    def test_a_term_that_is_switched_on_later(self):
        model, whole, mixes = linear(), batch(), False

        def loss_fn(b):
            hidden = model(b[0])
            losses = F.cross_entropy(hidden, b[1], reduction="none")
            return losses + 0.1 * (hidden - hidden.mean(0)).square().mean(1) if mixes else losses

        clipper = Clipper(model, 2)
        for step in range(6):
            mixes = step >= 3
            model.zero_grad()
            parts = list(zip(whole[0].split(2), whole[1].split(2), strict=True))
            wanted = clipped(model, lambda b: loss_fn(b).mean(), parts)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*", RuntimeWarning)
                clipper.backward(loss_fn, whole)
            torch.testing.assert_close(model.weight.grad.double(), wanted[0], rtol=1e-4, atol=1e-6)

    def test_a_function_recreated_in_every_step_is_the_same(self):
        model, whole = linear(), batch()
        clipper = Clipper(model, 2)
        for step in range(4):
            model.zero_grad()
            clipper.backward(
                lambda b, step=step: F.cross_entropy(model(b[0]), b[1], reduction="none"), whole
            )
        assert len(clipper.state_dict()["trials"]) == 1

    def test_checkpoints_of_before(self):
        model = linear()
        clipper = Clipper(model, 2)
        clipper.backward(lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batch())
        state = clipper.state_dict()
        for trial in state["trials"]:
            del trial["loss"]
        other = Clipper(model, 2)
        other.load_state_dict(state)
        model.zero_grad()
        other.backward(lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batch())
        assert len(other.state_dict()["trials"]) == 1


@pytest.mark.parametrize("kind", [list, tuple])
def test_strings_are_cut_along(kind):
    """One text for each example belongs to the examples; other lists of strings do not."""
    model, seen = linear(), []
    x, y = batch(5)
    whole = {"x": x, "y": y, "text": kind("abcde"), "tags": ["t", "u"], "names": []}

    def loss_fn(b):
        seen.append((b["text"], b["tags"]))
        return F.cross_entropy(model(b["x"]), b["y"])

    Clipper(model, 2, engine="stream").backward(loss_fn, whole, domains=[0, 1, 0, 1, 0])
    assert seen == [
        (kind("ac"), ["t", "u"]), (kind("e"), ["t", "u"]), (kind("bd"), ["t", "u"])
    ]  # fmt: skip


def test_numpy_labels_are_the_same_domains():
    model = linear()
    outcome = Clipper(model, 2, rule=rules.MinNorm()).backward(
        loss_of(model), batch(4), domains=[1, np.int64(1), torch.tensor(2), np.int64(2)]
    )
    assert outcome.ids == ((0, 1), (2, 3))


class TestFold:
    """What happens to `.grad` in loops that call backward themselves."""

    def test_memory_of_ones_own(self):
        """Gradients in preallocated memory: the next micro-batch is written over the last."""
        model, flat = nn.Linear(4, 1, bias=False), torch.zeros(1, 4)
        parts = list(torch.randn(3, 8, 4))
        stored = reference.microbatch_gradients(
            lambda x: model(x).square().mean(), list(model.parameters()), parts
        )
        wanted = reference.clipped_gradient(stored, [8] * 3, reference.WEIGH["MinNorm()"])[0]
        clipper = Clipper(model)
        for part in parts:
            flat.zero_()
            model.weight.grad = flat
            model(part).square().mean().backward()
            clipper.fold(size=8)
        clipper.finish()
        torch.testing.assert_close(model.weight.grad.double(), wanted[0])

    @pytest.mark.parametrize(
        ("mistake", "kind", "message"),
        [
            ({"domain": ["a"]}, TypeError, "domain must be a hashable label"),
            ({"size": 0}, ValueError, "size must be a positive integer"),
            ({"size": True}, ValueError, "size must be a positive integer"),
            ({"loss": "low"}, TypeError, "loss must be a tensor or a number"),
        ],
    )
    def test_mistakes_leave_the_gradient(self, mistake, kind, message):
        model = linear()
        loss_of(model)(batch()).backward()
        kept = model.weight.grad
        with pytest.raises(kind, match=message):
            Clipper(model).fold(**mistake)
        assert model.weight.grad is kept

    def test_a_rule_that_fails_leaves_the_gradient(self):
        class Failing(rules.Unit):
            def factor(self, norms):
                raise RuntimeError("no factor today")

        model = linear()
        loss_of(model)(batch()).backward()
        kept = model.weight.grad
        with pytest.raises(RuntimeError, match="no factor today"):
            Clipper(model, rule=Failing()).fold()
        assert model.weight.grad is kept

    def test_a_rule_that_cannot_take_note_leaves_the_gradient(self):
        class Forgetful(rules.Unit):
            def observe(self, norms, sizes):
                raise RuntimeError("no memory")

        model = linear()
        clipper = Clipper(model, 2, rule=Forgetful())
        with pytest.raises(RuntimeError, match="no memory"):
            clipper.backward(loss_of(model), batch())
        assert model.weight.grad is None
        assert clipper.step == 0

    def test_a_loss_as_a_number(self):
        model = linear()
        clipper = Clipper(model)
        loss = loss_of(model)(batch())
        loss.backward()
        clipper.fold(loss=loss.item())
        assert clipper.finish().loss.item() == pytest.approx(loss.item())

    def test_gradients_can_be_saved(self, tmp_path):
        model = linear()
        Clipper(model, 2).backward(loss_of(model), batch())
        torch.save(model.weight.grad, tmp_path / "gradient.pt")
        assert torch.equal(torch.load(tmp_path / "gradient.pt"), model.weight.grad)

    def test_skipped_ones_do_not_count_in_sums(self):
        model = nn.Linear(4, 1, bias=False)
        good, bad = list(torch.randn(2, 4, 4)), torch.full((8, 4), torch.nan)
        found = []
        for parts in (good, [bad, *good]):
            model.zero_grad()
            clipper = Clipper(model, engine="stream", nonfinite="skip", reduction="sum")
            for part in parts:
                clipper.fold(lambda x: model(x).square().mean(), part)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Skipped 1 of 3", RuntimeWarning)
                clipper.finish()
            found.append(model.weight.grad.clone())
        torch.testing.assert_close(*found)
