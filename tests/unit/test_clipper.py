"""The Clipper from the outside: folding, finishing, outcomes, checkpoints, and bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from microclip import Clipper, Outcome, rules
from microclip.microbatches import cut

import properties
import reference


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.fixture
def batch():
    return torch.randn(10, 3, dtype=torch.float64), torch.randint(0, 2, (10,))


def loss_of(model, reduction="mean"):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def gradient(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def expected(model, batch, b, domains=None):
    pieces = cut(batch, b, domains=domains)
    gradients = reference.microbatch_gradients(
        loss_of(model), list(model.parameters()), [piece.batch for piece in pieces]
    )
    sizes, labels = [piece.size for piece in pieces], [piece.domain for piece in pieces]
    weigh = reference.WEIGH["MinNorm()"]
    return reference.clipped_gradient(gradients, sizes, weigh, domains=labels)[0]


class TestFolding:
    def test_own_backward_calls(self, model, batch):
        wanted = expected(model, batch, 4)
        clipper = Clipper(model)
        for piece in cut(batch, 4):
            loss = loss_of(model)(piece.batch)
            loss.backward()
            clipper.fold(size=piece.size, loss=loss, ids=piece.ids)
            assert all(p.grad is None for p in model.parameters())
        outcome = clipper.finish()
        properties.assert_close(gradient(model), wanted, 1e-12)
        assert outcome.ids == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))
        assert outcome.loss.item() == pytest.approx(loss_of(model)(batch).item())

    def test_own_backward_calls_in_domains(self, model, batch):
        domains = ["a", "b"] * 5
        wanted = expected(model, batch, 2, domains)
        clipper = Clipper(model)
        pieces = cut(batch, 2, domains=domains)
        for piece in sorted(pieces, key=lambda piece: piece.ids):  # interleaved
            loss_of(model)(piece.batch).backward()
            clipper.fold(size=piece.size, domain=piece.domain)
        outcome = clipper.finish()
        properties.assert_close(gradient(model), wanted, 1e-12)
        assert outcome.loss is None
        assert "loss not given" in str(outcome)

    def test_one_loss_per_example_tells_the_size(self, model, batch):
        wanted = expected(model, batch, 4)
        clipper = Clipper(model)
        for piece in cut(batch, 4):
            losses = loss_of(model, "none")(piece.batch)
            losses.mean().backward()
            clipper.fold(loss=losses)
        outcome = clipper.finish()
        properties.assert_close(gradient(model), wanted, 1e-12)
        assert outcome.sizes.tolist() == [4, 4, 2]
        assert outcome.example_losses.tolist() == loss_of(model, "none")(batch).tolist()

    def test_losses_of_other_examples_are_refused(self, model, batch):
        losses = loss_of(model, "none")(batch)
        losses.mean().backward()
        before = gradient(model)
        clipper = Clipper(model)
        for wrong in ({"size": 4}, {"loss": losses.reshape(5, 2), "size": 10}):
            with pytest.raises(ValueError, match="one loss for each of"):
                clipper.fold(**{"loss": losses, **wrong})
        with pytest.raises(ValueError, match="10 examples, but ids has 3"):
            clipper.fold(loss=losses, ids="abc")
        properties.assert_close(gradient(model), before, 0)

    def test_sizes_default_to_equal(self, model, batch):
        clipper = Clipper(model)
        for piece in cut(batch, 5):
            loss_of(model)(piece.batch).backward()
            clipper.fold()
        assert clipper.finish().sizes.tolist() == [1, 1]
        properties.assert_close(gradient(model), expected(model, batch, 5), 1e-12)

    @pytest.mark.parametrize("engine", ["stream", "two_pass"])
    @pytest.mark.parametrize("domains", [None, list("abbabaabba")])
    def test_chunks_give_the_same_as_the_whole(self, model, batch, engine, domains):
        whole = Clipper(model, 2, engine=engine).backward(loss_of(model), batch, domains=domains)
        wanted = gradient(model)
        model.zero_grad()
        clipper = Clipper(model, 2, engine=engine)
        for start, stop in ((0, 4), (4, 10)):
            chunk = batch[0][start:stop], batch[1][start:stop]
            labels = None if domains is None else domains[start:stop]
            clipper.fold(loss_of(model), chunk, domains=labels)
        outcome = clipper.finish()
        properties.assert_close(gradient(model), wanted, 1e-12)
        assert sorted(outcome.ids) == sorted(whole.ids)
        assert outcome.bound == whole.bound

    def test_chunks_of_an_odd_size_are_noted(self, model, batch):
        clipper = Clipper(model, 4)
        clipper.fold(loss_of(model), batch)
        assert clipper.finish().notes == (
            "A chunk of 10 examples is not a multiple of microbatch_size 4: "
            "its last micro-batch is smaller.",
        )

    def test_grad_between_folds_is_the_users(self, model, batch):
        clipper = Clipper(model, 5)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        clipper.fold(loss_of(model), batch)
        assert all((p.grad == 1).all() for p in model.parameters())
        clipper.finish()
        found = [g - 1 for g in gradient(model)]
        properties.assert_close(found, expected(model, batch, 5), 1e-12)

    def test_discard(self, model, batch):
        clipper = Clipper(model, 2)
        clipper.fold(loss_of(model), batch)
        clipper.discard()
        clipper.backward(loss_of(model), batch)
        properties.assert_close(gradient(model), expected(model, batch, 2), 1e-12)
        assert clipper.step == 1

    def test_error_in_a_later_chunk_drops_the_step(self, model, batch):
        clipper = Clipper(model, 5)
        clipper.fold(loss_of(model), batch)
        with pytest.raises(ZeroDivisionError) as caught:
            clipper.fold(lambda batch: 1 / 0, batch)
        assert "the 2 micro-batches folded since the last finish() were dropped" in "".join(
            caught.value.__notes__
        )
        with pytest.raises(RuntimeError, match="nothing to finish"):
            clipper.finish()


class TestOutcome:
    def test_by_hand(self):
        """One weight; gradients 3 and -4 per example, so everything can be checked by eye."""
        model = nn.Linear(1, 1, bias=False)
        outcome = Clipper(model, 1, engine="stream").backward(
            lambda x: model(x).squeeze(1), torch.tensor([[3.0], [-4.0]])
        )
        assert outcome.norms.tolist() == [3, 4]
        assert outcome.weights.tolist() == [1, 0.75]
        assert outcome.bound == 3
        assert model.weight.grad.item() == 0  # (3 - 3) / 2
        assert outcome.suppression.tolist() == [0, 0.25]
        assert outcome.mean_weight == 0.875
        assert outcome.effective_sample_size.item() == pytest.approx(1.75**2 / 1.5625)
        assert outcome.weight_shares[None] == 1
        w = model.weight.item()
        assert outcome.example_losses.tolist() == pytest.approx([3 * w, -4 * w])
        assert outcome.losses.tolist() == pytest.approx([3 * w, -4 * w])
        assert outcome.loss.item() == pytest.approx(-w / 2)
        assert outcome.engine == "stream"
        assert len(outcome) == 2
        assert str(outcome).endswith(
            "2 micro-batches of up to 1 examples, bound 3, mean weight 0.875, "
            "effective sample size 1.96 of 2"
        )

    def test_domains(self):
        model = nn.Linear(1, 1, bias=False)
        x = torch.tensor([[1.0], [10.0], [2.0], [20.0]])
        outcome = Clipper(model, 1).backward(
            lambda x: model(x).mean(), x, domains=["small", "large"] * 2, ids=list("pqrs")
        )
        assert outcome.domains == ("large", "large", "small", "small")
        assert outcome.ids == (("q",), ("s",), ("p",), ("r",))
        assert outcome.bounds.tolist() == [10, 10, 1, 1]
        assert outcome.bound == 1
        assert outcome.weight_shares == {"large": 0.5, "small": 0.5}
        assert model.weight.grad.item() == (10 + 10 + 1 + 1) / 4
        assert outcome.example_losses is None

    def test_frozen(self, model, batch):
        outcome = Clipper(model, 2).backward(loss_of(model), batch)
        with pytest.raises(AttributeError):
            outcome.step = 3

    def test_all_zero(self):
        model = nn.Linear(1, 1, bias=False)
        outcome = Clipper(model, 1).backward(lambda x: (0 * model(x)).mean(), torch.ones(3, 1))
        assert model.weight.grad.item() == 0
        assert outcome.bound == 0
        assert outcome.effective_sample_size == 0
        assert outcome.suppression.tolist() == [1, 1, 1]

    def test_a_zero_gradient_counts_in_the_total(self):
        model = nn.Linear(1, 1, bias=False)
        x = torch.tensor([[0.0], [2.0], [4.0]])
        for engine in ("stream", "two_pass"):
            model.zero_grad()
            outcome = Clipper(model, 1, engine=engine).backward(lambda x: model(x).mean(), x)
            assert outcome.bound == 2
            assert model.weight.grad.item() == pytest.approx((0 + 2 + 2) / 3)

    def test_larger_than_the_batch_is_said(self, model, batch):
        outcome = Clipper(model, 16).backward(loss_of(model), batch)
        assert outcome.notes == (
            "microbatch_size 16 is larger than the batch of 10: one micro-batch.",
        )
        assert outcome.weights.tolist() == [1]

    def test_step_counts(self, model, batch):
        clipper = Clipper(model, 5)
        assert clipper.outcome is None
        for step in range(3):
            outcome = clipper.backward(loss_of(model), batch)
            assert outcome.step == step
            assert clipper.outcome is outcome
        assert clipper.step == 3
        assert isinstance(outcome, Outcome)


class Drifting(rules.Rule):
    """Clips to a running mean of the norms: a rule with state."""

    def __init__(self):
        self.running = 1.0

    def weights(self, norms, sizes):
        return (self.running / norms).clamp(max=1.0)

    factor = lambda self, norms: self.weights(norms, None)  # noqa: E731

    def observe(self, norms, sizes):
        self.running = 0.5 * self.running + 0.5 * norms.nanmean().item()

    def state_dict(self):
        return {"running": self.running}

    def load_state_dict(self, state):
        self.running = state["running"]


class TestCheckpoint:
    def test_a_rule_with_state_goes_on_where_it_was(self, model, batch):
        first = Clipper(model, 2, rule=Drifting())
        first.backward(loss_of(model), batch)
        state = first.state_dict()
        assert state["step"] == 1
        assert state["rule"]["running"] != 1.0
        second = Clipper(model, 2, rule=Drifting())
        second.load_state_dict(state)
        a = first.backward(loss_of(model), batch)
        b = second.backward(loss_of(model), batch)
        assert a.weights.tolist() == b.weights.tolist()
        assert (a.step, b.step) == (1, 1)

    def test_bad_states(self, model, batch):
        clipper = Clipper(model, 2)
        with pytest.raises(ValueError, match=r"'step' and 'rule'.* but got \['steps'\]"):
            clipper.load_state_dict({"steps": 1})
        with pytest.raises(ValueError, match="MinNorm has no state"):
            clipper.load_state_dict({"step": 1, "rule": {"running": 2.0}})
        assert clipper.step == 0
        clipper.fold(loss_of(model), batch)
        with pytest.raises(RuntimeError, match="cannot hold half a step"):
            clipper.state_dict()


def poisoned(model, rows, value=math.nan):
    """A loss whose gradient is not finite for the examples marked in the batch."""

    def loss_fn(batch):
        x, marks = batch
        return (model(x).sum(1) * torch.where(marks, value, 1.0)).mean()

    marks = torch.zeros(10, dtype=torch.bool)
    marks[rows] = True
    return loss_fn, marks


@pytest.mark.parametrize("engine", ["stream", "two_pass"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
class TestNonfinite:
    def test_propagate(self, model, batch, engine, value):
        loss_fn, marks = poisoned(model, [5], value)
        outcome = Clipper(model, 2, engine=engine).backward(loss_fn, (batch[0], marks))
        assert all(p.grad.isnan().all() for p in model.parameters())
        assert outcome.bound.isnan()

    @pytest.mark.parametrize("rows", [[0], [5], [9], [0, 1, 4]])
    def test_skip_is_as_if_it_had_not_been_there(self, model, batch, engine, value, rows):
        loss_fn, marks = poisoned(model, rows, value)
        clipper = Clipper(model, 2, engine=engine, nonfinite="skip")
        with pytest.warns(RuntimeWarning, match="of 5 micro-batches in step 0"):
            outcome = clipper.backward(loss_fn, (batch[0], marks))
        found = gradient(model)
        bad = {row // 2 for row in rows}
        assert outcome.skipped.tolist() == [j in bad for j in range(5)]
        assert outcome.loss.isfinite()
        good = torch.tensor([i for i in range(10) if i // 2 not in bad])
        model.zero_grad()
        Clipper(model, 2).backward(loss_fn, (batch[0][good], marks[good]))
        properties.assert_close(found, gradient(model), 1e-12)
        clipper.backward(loss_fn, (batch[0], marks))  # the second time without a warning

    def test_the_size_of_a_skipped_microbatch_does_not_count(self, model, batch, engine, value):
        """A sum is the mean times the number of micro-batches, of the size of those that count."""
        loss_fn, marks = poisoned(model, [0], value)
        marks = marks[:6]
        clipper = Clipper(model, 4, engine=engine, nonfinite="skip", reduction="sum")
        with pytest.warns(RuntimeWarning, match="Skipped 1 of 2"):
            clipper.backward(loss_fn, (batch[0][:6], marks))
        found = gradient(model)
        model.zero_grad()
        Clipper(model, 4).backward(loss_fn, (batch[0][4:6], marks[4:]))
        properties.assert_close(found, gradient(model), 1e-12)

    def test_skip_all(self, model, batch, engine, value):
        loss_fn, marks = poisoned(model, list(range(10)), value)
        with pytest.warns(RuntimeWarning, match="Skipped 5 of 5"):
            outcome = Clipper(model, 2, engine=engine, nonfinite="skip").backward(
                loss_fn, (batch[0], marks)
            )
        assert all((p.grad == 0).all() for p in model.parameters())
        assert outcome.skipped.all()
        assert "5 skipped" in str(outcome)

    def test_raise_names_the_examples(self, model, batch, engine, value):
        loss_fn, marks = poisoned(model, [5], value)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        clipper = Clipper(model, 2, engine=engine, nonfinite="raise")
        ids = [f"utterance-{i}" for i in range(10)]
        with pytest.raises(
            ArithmeticError, match="Step 0: .* micro-batch 2, examples 'utterance-4', 'utterance-5'"
        ):
            clipper.backward(loss_fn, (batch[0], marks), ids=ids)
        assert all((p.grad == 1).all() for p in model.parameters())
        with pytest.raises(ArithmeticError, match="micro-batch 0 of domain 'x', examples 5, has"):
            clipper.backward(loss_fn, (batch[0], marks), domains=list("yyyyyxyyyy"))


def test_raise_shortens_long_lists(model, batch):
    loss_fn, marks = poisoned(model, [0])
    with pytest.raises(ArithmeticError, match=r"examples 0, 1, 2, 3, 4, 5, 6, 7, \.\.\., has norm"):
        Clipper(model, None, nonfinite="raise").backward(loss_fn, (batch[0], marks))


class TestBadInput:
    @pytest.mark.parametrize("b", [0, -2, 1.5, "4"])
    def test_microbatch_size(self, model, b):
        with pytest.raises(ValueError, match=f"positive integer or None, but got {b!r}"):
            Clipper(model, b)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"engine": "steam"}, "one of 'auto', 'stream', 'two_pass', 'fused', but got 'steam'"),
            ({"reduction": "none"}, "reduction must be one of 'mean', 'sum', but got 'none'"),
            ({"nonfinite": "ignore"}, "'propagate', 'skip', 'raise', but got 'ignore'"),
            ({"engine": "stream", "rule": rules.Median()}, "needs all norms .* or rescale=True"),
            ({"engine": "stream", "rule": rules.Rule()}, 'Use engine="two_pass" or "auto"\\.'),
        ],
    )
    def test_options(self, model, options, message):
        with pytest.raises(ValueError, match=message):
            Clipper(model, 2, **options)

    def test_rule_class_instead_of_instance(self, model):
        with pytest.raises(TypeError, match="such as microclip.rules.MinNorm"):
            Clipper(model, 2, rule=rules.MinNorm)

    def test_parameters_instead_of_model(self, model):
        with pytest.raises(TypeError, match="needs the model, .* but got list"):
            Clipper(list(model.parameters()), 2)

    def test_nothing_trainable(self, model):
        with pytest.raises(ValueError, match="Sequential has no trainable parameters"):
            Clipper(model.requires_grad_(False), 2)

    def test_everything_frozen_later(self, model, batch):
        clipper = Clipper(model, 2)
        model.requires_grad_(False)
        with pytest.raises(ValueError, match="no trainable parameters"):
            clipper.backward(loss_of(model), batch)

    def test_empty_batch(self, model):
        with pytest.raises(ValueError, match="The batch is empty"):
            Clipper(model, 2).backward(loss_of(model), (torch.zeros(0, 3), torch.zeros(0)))

    def test_loss_instead_of_function(self, model, batch):
        with pytest.raises(TypeError, match=r"but got Tensor\. .* backward\(loss_fn, batch\)"):
            Clipper(model, 2).backward(loss_of(model)(batch), batch)

    @pytest.mark.parametrize(
        ("loss_fn", "error", "message"),
        [
            (lambda out: out, ValueError, r"for 2 examples .* of shape \(2, 2\)"),
            (lambda out: out.sum(1)[:0], ValueError, r"of shape \(0,\)"),
            (lambda out: out.mean().item(), TypeError, "but returned float"),
            (lambda out: None, TypeError, "but returned NoneType"),
            (lambda out: out.mean().detach(), RuntimeError, "no graph to differentiate"),
        ],
    )
    def test_losses(self, model, batch, loss_fn, error, message):
        for engine in ("stream", "two_pass"):
            with pytest.raises(error, match=message):
                Clipper(model, 2, engine=engine).backward(lambda b: loss_fn(model(b[0])), batch)
        assert all(p.grad is None for p in model.parameters())

    def test_loss_inside_an_output_object(self, model, batch):
        class Output:
            loss = 1.0

        with pytest.raises(TypeError, match=r"returned Output\. Return its \.loss"):
            Clipper(model, 2).backward(lambda b: Output(), batch)

    def test_one_element_loss_is_a_scalar(self, model, batch):
        Clipper(model, 2).backward(lambda b: loss_of(model)(b).reshape(1), batch)
        properties.assert_close(gradient(model), expected(model, batch, 2), 1e-12)

    def test_no_grad(self, model, batch):
        with torch.no_grad(), pytest.raises(RuntimeError, match="no graph"):
            Clipper(model, 2).backward(loss_of(model), batch)

    def test_domains_of_the_wrong_length(self, model, batch):
        with pytest.raises(ValueError, match="10 examples, but domains has 3"):
            Clipper(model, 2).backward(loss_of(model), batch, domains=["a", "b", "c"])

    def test_nothing_folded(self, model):
        with pytest.raises(RuntimeError, match="nothing to finish"):
            Clipper(model, 2).finish()

    def test_no_gradients(self, model):
        with pytest.raises(RuntimeError, match=r"every parameter's \.grad is None"):
            Clipper(model, 2).fold()

    def test_backward_amid_folds(self, model, batch):
        clipper = Clipper(model, 5)
        clipper.fold(loss_of(model), batch)
        with pytest.raises(RuntimeError, match="2 micro-batches are folded but not finished"):
            clipper.backward(loss_of(model), batch)
        clipper.finish()
        properties.assert_close(gradient(model), expected(model, batch, 5), 1e-12)

    def test_folding_gradients_under_a_rule_that_needs_two_passes(self, model, batch):
        loss_of(model)(batch).backward()
        before = gradient(model)
        for options in ({"rule": rules.Median()}, {"engine": "two_pass"}):
            with pytest.raises(RuntimeError, match="needs the examples"):
                Clipper(model, 2, **options).fold()
        assert all(torch.equal(a, b) for a, b in zip(before, gradient(model), strict=True))

    def test_mixed_up_folds(self, model, batch):
        clipper = Clipper(model, 2)
        with pytest.raises(TypeError, match="Did you mean domains="):
            clipper.fold(loss_of(model), batch, domain="a")
        with pytest.raises(TypeError, match="needs loss_fn"):
            clipper.fold(domains=["a"])
        loss_of(model)(batch).backward()
        with pytest.raises(ValueError, match="has 3 examples, but ids has 2"):
            clipper.fold(size=3, ids=[1, 2])
        with pytest.raises(ValueError, match="positive integer"):
            clipper.fold(size=0)
        clipper.fold(ids=torch.tensor([7, 8]))
        assert clipper.finish().ids == ((7, 8),)

    def test_sparse_gradients(self):
        model = nn.Embedding(5, 2, sparse=True)
        for engine in ("stream", "two_pass"):
            with pytest.raises(NotImplementedError, match="'weight' got a sparse .* sparse=False"):
                Clipper(model, 1, engine=engine).backward(
                    lambda x: model(x).mean(), torch.tensor([1, 2])
                )
            assert model.weight.grad is None
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(NotImplementedError, match="sparse"):
            Clipper(model).fold()

    def test_keyboard_interrupt(self, model, batch):
        def interrupted(batch):
            raise KeyboardInterrupt

        clipper = Clipper(model, 2)
        with pytest.raises(KeyboardInterrupt):
            clipper.backward(interrupted, batch)
        clipper.backward(loss_of(model), batch)


def test_a_loss_that_reaches_no_parameter_counts_as_zero():
    model, other = nn.Linear(1, 1, bias=False), torch.ones(1, requires_grad=True)

    def loss_fn(x):
        return model(x).mean() if x.item() > 0 else (other * x).mean()

    for engine in ("stream", "two_pass"):
        model.zero_grad()
        outcome = Clipper(model, 1, engine=engine).backward(loss_fn, torch.tensor([[2.0], [-1.0]]))
        assert outcome.norms.tolist() == [2, 0]
        assert model.weight.grad.item() == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch_size_and_domains(data):
    """Whatever the batch, the micro-batch size, the domains and the rule: the twin agrees."""
    size = data.draw(st.integers(1, 12), "examples")
    b = data.draw(st.none() | st.integers(1, 14), "b")
    labels = st.lists(st.sampled_from([0, 1, 2]), min_size=size, max_size=size)
    domains = data.draw(st.none() | labels, "domains")
    name = data.draw(st.sampled_from(sorted(properties.RULES)), "rule")
    engine = data.draw(st.sampled_from(properties.engines_for(name)), "engine")
    scale = data.draw(st.sampled_from([0.0, 1e-12, 1.0, 1e12]), "scale")  # of one example's loss
    torch.manual_seed(size)
    model = nn.Linear(3, 2).double()
    x, factors = torch.randn(size, 3, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    factors[0] = scale

    def loss_fn(batch):
        return model(batch[0]).square().sum(1) * batch[1]

    pieces = cut((x, factors), b, domains=domains)
    gradients = reference.microbatch_gradients(
        loss_fn, list(model.parameters()), [piece.batch for piece in pieces]
    )
    wanted, norms, _ = reference.clipped_gradient(
        gradients,
        [piece.size for piece in pieces],
        reference.WEIGH[name],
        domains=[piece.domain for piece in pieces],
    )
    outcome = Clipper(model, b, rule=properties.RULES[name], engine=engine).backward(
        loss_fn, (x, factors), domains=domains
    )
    properties.assert_close(gradient(model), wanted, 1e-11)
    assert outcome.norms.tolist() == pytest.approx(norms, rel=1e-12)
