"""LossHistory and its relatives: when they hold examples back, whom, and when they stop."""

import copy
import logging
import math
import warnings

import pytest
import torch
from torch import nn

from microclip import Clipper
from microclip.rules import LossHistory, LossWeight, Mean, NormHistory, Seen, Unit
from microclip.rules.mixture import Mixture

EXAMPLES, BATCH, EPOCHS = 200, 20, 40
STEPS = EXAMPLES // BATCH * EPOCHS
WRONG = torch.arange(EXAMPLES) < 40


def losses_of(epoch, hard="stay"):
    """Return the losses of all examples: most are learned, 40 are not.

    hard: "stay" (they stay as bad), "learn" (they get better, more slowly than the others).
    """
    generator = torch.Generator().manual_seed(epoch)
    noise = 0.05 * torch.rand(EXAMPLES, generator=generator, dtype=torch.float64)
    easy = 2.3 * math.exp(-epoch / 3)
    other = {"stay": 2.3 + 0.02 * epoch, "learn": 2.3 * math.exp(-epoch / 12)}[hard]
    return torch.where(WRONG, other, easy) + noise


def heard(rule):
    """Return the rule's messages, and issue its warnings, as a Clipper does."""
    messages = rule.messages()
    for message in messages:
        if isinstance(message, Warning):
            warnings.warn(message, stacklevel=2)
    return [str(message) for message in messages]


def train(rule, hard="stay", epochs=EPOCHS, ids=None, domains=None, first=0, batch=BATCH):
    """Show the rule the losses of some epochs; return its messages and the last weights."""
    messages = []
    ids = torch.arange(EXAMPLES) if ids is None else ids
    domains = torch.zeros(EXAMPLES, dtype=torch.int64) if domains is None else domains
    step = first * (EXAMPLES // batch)
    for epoch in range(first, epochs):
        losses = losses_of(epoch, hard)
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(batch):
            weights = rule.weigh(ids[rows], None)
            rule.remember(Seen(step, ids[rows], losses[rows], weights, domains[rows], losses[rows]))
            messages += heard(rule)
            step += 1
    return messages, rule.weigh(ids, None)


@pytest.mark.parametrize("kind", [LossHistory, NormHistory])
def test_examples_that_stay_bad_are_held_back(kind):
    rule = kind(STEPS)
    messages, weights = train(rule)
    assert rule.phase == "holding"
    assert weights[WRONG].max() < 0.05
    assert weights[~WRONG].min() > 0.95
    start, on = messages
    assert start.startswith(
        f"{kind.__name__} starts to hold examples back: 40 of 200 examples, for a trial (step"
    )
    assert on.startswith(
        f"{kind.__name__} keeps holding back 40 of 200 examples: left out, their median loss "
        "went from 2.4"
    )


def test_examples_that_get_better_while_left_out_are_released():
    rule = LossHistory(STEPS)
    messages, weights = train(rule, "learn")
    assert rule.phase == "released"
    assert weights.tolist() == [1.0] * EXAMPLES
    assert "starts to hold examples back" in messages[0]
    assert "releases all examples, for good" in messages[-1]
    assert "hard, not wrong" in messages[-1]


def test_it_logs_what_it_says(caplog):
    with caplog.at_level(logging.INFO, "microclip"):
        messages, _ = train(LossHistory(STEPS))
    assert [record.message for record in caplog.records] == messages


def test_nothing_is_held_back_before_most_is_learned():
    rule = LossHistory(STEPS)
    train(rule, epochs=3)
    assert rule.phase == "watching"
    train(rule, first=3, epochs=12)
    assert rule.is_holding


def test_too_few_visits():
    rule = LossHistory(5 * EXAMPLES // BATCH)
    with pytest.warns(RuntimeWarning, match=r"50 steps visit every example about 5\.0 times"):
        messages, weights = train(rule, epochs=5)
    assert rule.phase == "off"
    assert weights.tolist() == [1.0] * EXAMPLES
    assert "Train longer" in messages[0]


def test_examples_seen_only_once():
    """Then there is nothing to remember, and the rule says so once half of training is over."""
    rule = LossHistory(40)
    generator = torch.Generator().manual_seed(0)

    def show(steps):
        for step in steps:
            keys = torch.arange(step * 10, step * 10 + 10)
            losses = torch.rand(10, generator=generator, dtype=torch.float64)
            zeros = torch.zeros(10, dtype=torch.int64)
            assert rule.weigh(keys, None).tolist() == [1.0] * 10
            rule.remember(Seen(step, keys, losses, torch.ones(10), zeros))
            heard(rule)

    show(range(20))
    with pytest.warns(RuntimeWarning, match="no example has been seen twice"):
        show(range(20, 40))
    assert rule.phase == "off"


def test_without_total_steps():
    rule = LossHistory()
    _, weights = train(rule)
    assert rule.phase == "holding"
    assert weights[WRONG].max() < 0.05


def test_resampling_with_replacement_and_growing_data():
    """Visits are counted for each example; new ones have a weight of 1 until they are known."""
    rule = LossHistory(2000)
    generator = torch.Generator().manual_seed(0)
    for step in range(800):
        known = EXAMPLES if step > 400 else EXAMPLES - 50
        rows = torch.randint(0, known, (BATCH,), generator=generator)
        losses = losses_of(step * BATCH // known)[rows]
        weights = rule.weigh(rows, None)
        zeros = torch.zeros(BATCH, dtype=torch.int64)
        rule.remember(Seen(step, rows, losses, weights, zeros))
        if step == 401:
            assert rule.weigh(torch.arange(EXAMPLES - 50, EXAMPLES), None).min() == 1
    weights = rule.weigh(torch.arange(EXAMPLES), None)
    assert weights[WRONG].max() < 0.1
    assert weights[~WRONG].min() > 0.9


def test_the_same_id_twice_in_a_step_is_one_visit_with_the_mean():
    rule = LossHistory(100)
    keys = torch.tensor([5, 3, 5])
    zeros = torch.zeros(3, dtype=torch.int64)
    losses = torch.tensor([1.0, 7.0, 3.0], dtype=torch.float64)
    rule.remember(Seen(0, keys, losses, torch.ones(3), zeros))
    rows = rule.table.find(torch.tensor([5, 3]))
    assert rule.table["visits"][rows].tolist() == [1, 1]
    assert rule.table["last"][rows].tolist() == [2.0, 7.0]


def test_losses_that_are_not_finite_are_not_remembered():
    rule = LossHistory(100)
    zeros = torch.zeros(3, dtype=torch.int64)
    losses = torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)
    rule.remember(Seen(0, torch.arange(3), losses, torch.ones(3), zeros))
    assert len(rule.table) == 1
    rule.remember(Seen(1, torch.arange(3), losses * math.nan, torch.ones(3), zeros))
    assert len(rule.table) == 1


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_equal_losses_hold_nothing_back(value):
    rule = LossHistory(STEPS)
    for step in range(STEPS):
        keys = torch.arange(BATCH) + BATCH * (step % (EXAMPLES // BATCH))
        losses = torch.full((BATCH,), value, dtype=torch.float64)
        zeros = torch.zeros(BATCH, dtype=torch.int64)
        weights = rule.weigh(keys, None)
        assert weights.tolist() == [1.0] * BATCH
        rule.remember(Seen(step, keys, losses, weights, zeros))


def test_negative_losses_are_allowed():
    """Log-likelihoods may be negative; what counts is who stays above the others."""
    rule = LossHistory(STEPS)
    for epoch in range(EPOCHS):
        losses = losses_of(epoch) - 3
        for step, rows in enumerate(torch.arange(EXAMPLES).split(BATCH), epoch * 10):
            weights = rule.weigh(rows, None)
            zeros = torch.zeros(BATCH, dtype=torch.int64)
            rule.remember(Seen(step, rows, losses[rows], weights, zeros))
    weights = rule.weigh(torch.arange(EXAMPLES), None)
    assert rule.is_holding
    assert weights[WRONG].max() < 0.1


def test_more_than_the_stated_share_warns_once():
    rule = LossHistory(STEPS, most=0.1)
    with pytest.warns(RuntimeWarning, match=r"holds back 20% of all examples, more than most=0\.1"):
        train(rule, epochs=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(rule, first=20)


def test_a_hard_domain_is_not_held_back_as_a_whole():
    """It is judged by its own averages instead: within it, none stands out."""
    domains = WRONG.long() * 12345
    rule = LossHistory(STEPS)
    _, weights = train(rule, domains=domains)
    assert weights.min() > 0.5
    without = LossHistory(STEPS)
    train(without)
    assert without.weigh(torch.arange(EXAMPLES), None)[WRONG].max() < 0.05


def test_a_domain_with_a_few_examples_is_left_alone():
    domains = (torch.arange(EXAMPLES) < 3).long() * 77
    rule = LossHistory(STEPS)
    _, weights = train(rule, domains=domains)
    assert weights[:3].tolist() == [1.0, 1.0, 1.0]
    assert weights[3:40].max() < 0.05


@pytest.mark.sample(3)  # each id and each clip once
@pytest.mark.parametrize("ids", ["integers", "scattered"])
@pytest.mark.parametrize("clip", [None, Unit()])
def test_state_resumes_bit_for_bit(ids, clip):
    keys = torch.arange(EXAMPLES)
    if ids == "scattered":
        keys = keys * 10**14 - 10**15
    whole = LossHistory(STEPS, clip=clip)
    train(whole, ids=keys)
    for epoch in (1, 5, 8, 12, 30):
        before, after = LossHistory(STEPS, clip=clip), LossHistory(STEPS, clip=clip)
        train(before, ids=keys, epochs=epoch)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert after.fingerprint() == before.fingerprint()
        _, weights = train(after, ids=keys, first=epoch)
        assert torch.equal(weights, whole.weigh(keys, None))
        assert after.fingerprint() == whole.fingerprint()


def test_state_is_saved_without_pickle(tmp_path):
    rule = LossHistory(STEPS)
    train(rule, epochs=20)
    torch.save(rule.state_dict(), tmp_path / "state.pt")
    other = LossHistory(STEPS)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.fingerprint() == rule.fingerprint()


def test_state_of_another_rule_is_refused():
    with pytest.raises(ValueError, match="written with another rule"):
        LossHistory().load_state_dict({"mean": 1.0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossHistory(0), "total_steps must be the number"),
        (lambda: LossHistory(2.5), "total_steps must be the number"),
        (lambda: LossHistory(10, clip=LossWeight()), "clip must be a rule for norms"),
        (lambda: LossHistory(10, clip=Unit), "clip must be a rule for norms"),
        (lambda: LossHistory(10, most=0), "most must be a share"),
        (lambda: LossWeight(4, 2), "0 < low < high"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_shown_as_written():
    assert repr(LossHistory(10, clip=Unit())) == "LossHistory(total_steps=10, clip=Unit())"
    assert repr(LossHistory()) == "LossHistory()"
    assert repr(LossWeight()) == "LossWeight(low=2.0, high=4.0)"


def test_mixture_finds_two_groups():
    generator = torch.Generator().manual_seed(0)
    low = 0.2 + 0.1 * torch.randn(800, generator=generator)
    high = 3 + 0.5 * torch.randn(200, generator=generator)
    found = Mixture.fit(torch.cat([low, high]))
    assert found.low == pytest.approx(0.2, abs=0.02)
    assert found.high == pytest.approx(3, abs=0.1)
    assert found.share == pytest.approx(0.2, abs=0.02)
    weights = found.weights(torch.tensor([-5.0, 0.2, 1.0, 3.0, 50.0]))
    assert weights[0] == weights[1] == 1
    assert weights[3] == weights[4] == 0
    assert Mixture.fit(torch.ones(100)) is None
    assert Mixture.fit(torch.ones(1)) is None
    assert Mixture.fit(torch.tensor([1.0, 2.0])) is not None


class TestClipper:
    """What users of a Clipper see."""

    def setup_method(self):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.batch = torch.randn(8, 3), torch.randint(0, 2, (8,))

    def losses(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="none")

    def test_ids_are_needed(self):
        clipper = Clipper(self.model, rule=LossHistory(100))
        with pytest.raises(ValueError, match=r"no ids\. Pass ids="):
            clipper.backward(self.losses, self.batch)
        clipper.backward(self.losses, self.batch, ids=range(8))  # and nothing is broken

    def test_positions_in_the_batch_are_no_ids(self):
        clipper = Clipper(self.model, rule=LossHistory(100))
        clipper.backward(self.losses, self.batch, ids=range(8))
        other = torch.randn(8, 3), 1 - self.batch[1]
        with pytest.raises(ValueError, match="positions in the batch"):
            clipper.backward(self.losses, other, ids=range(8))

    def test_a_data_set_of_one_batch_has_such_ids(self):
        clipper = Clipper(self.model, rule=LossHistory(100))
        for _ in range(3):
            clipper.backward(self.losses, self.batch, ids=range(8))

    def test_ids_of_another_type(self):
        clipper = Clipper(self.model, rule=LossHistory(100))
        clipper.backward(self.losses, self.batch, ids=range(100, 108))
        with pytest.raises(
            TypeError, match="of type int so far, such as 100, but are now of type str"
        ):
            clipper.backward(self.losses, self.batch, ids=list("abcdefgh"))

    def test_an_abandoned_step_is_not_remembered(self):
        rule = LossHistory(100)
        clipper = Clipper(self.model, rule=rule)
        clipper.backward(self.losses, self.batch, ids=range(100, 108))
        before = rule.fingerprint()
        clipper.fold(self.losses, self.batch, ids=range(100, 108))
        clipper.discard()

        def fails(batch):
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            clipper.backward(fails, self.batch, ids=range(100, 108))
        assert rule.fingerprint() == before

    def test_state_goes_into_checkpoints(self):
        clipper = Clipper(self.model, rule=LossHistory(100))
        for turn in range(4):
            clipper.backward(self.losses, self.batch, ids=range(100 * turn, 100 * turn + 8))
        other = Clipper(self.model, rule=LossHistory(100))
        other.load_state_dict(clipper.state_dict())
        assert other.policy.rule.fingerprint() == clipper.policy.rule.fingerprint()

    @pytest.mark.parametrize("nonfinite", ["propagate", "skip", "raise"])
    def test_a_loss_that_is_not_finite(self, nonfinite):
        rule = LossHistory(100)
        clipper = Clipper(self.model, rule=rule, nonfinite=nonfinite)
        x = self.batch[0].clone()
        x[3] = math.nan
        ids = range(100, 108)
        if nonfinite == "raise":
            with pytest.raises(ArithmeticError, match="not finite"):
                clipper.backward(self.losses, (x, self.batch[1]), ids=ids)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clipper.backward(self.losses, (x, self.batch[1]), ids=ids)
        assert len(rule.table) == 7
        gradient = self.model.weight.grad
        if nonfinite == "propagate":
            assert gradient.isnan().any()
        else:
            assert gradient.isfinite().all()

    def test_loss_weight_needs_no_ids(self):
        rule = LossWeight()
        clipper = Clipper(self.model, rule=rule)
        for _ in range(2):  # until it has seen enough losses
            first = clipper.backward(self.losses, self.batch)
            assert first.example_weights.tolist() == [1.0] * 8
        far = self.batch[0].clone()
        far[2] *= -1000 if self.losses(self.batch)[2] < 0.7 else 1000
        outcome = clipper.backward(self.losses, (far, self.batch[1]))
        losses = self.losses((far, self.batch[1])).detach()
        assert losses[2] < 1 or outcome.example_weights[2] == 0
        assert torch.allclose(
            rule.weigh(torch.zeros(8), losses), rule.weigh(torch.zeros(8), losses)
        )


def test_loss_weight_follows_losses_that_move_away():
    rule = LossWeight()
    zeros = torch.zeros(50, dtype=torch.int64)
    for step in range(20):
        losses = torch.linspace(0.5, 1.5, 50, dtype=torch.float64) + (step >= 10) * 30
        rule.remember(Seen(step, zeros, losses, torch.ones(50), zeros))
        assert rule.weigh(zeros, losses).min() > 0.9
    assert rule.center == pytest.approx(31, abs=0.5)
    state = rule.state_dict()
    other = LossWeight()
    other.load_state_dict(state)
    assert (other.center, other.spread) == (rule.center, rule.spread)


def test_statistics_of_clip_are_kept_too():
    rule = LossHistory(10, clip=Mean())
    assert rule.weights(torch.tensor([1.0, 3.0]), torch.ones(2)).tolist() == pytest.approx(
        [1, 2 / 3]
    )
    assert not rule.streams


def test_a_warning_that_is_an_error_comes_after_the_step():
    """The rule, `.grad` and the count of steps agree, so training can go on."""
    model = torch.nn.Linear(3, 1)
    clipper = Clipper(model, rule=LossHistory(4))
    x = torch.randn(8, 3)
    clipper.backward(lambda x: model(x).square().sum(1), x, ids=range(8))
    model.zero_grad()
    with pytest.raises(RuntimeWarning, match="4 steps visit every example about 4"):
        clipper.backward(lambda x: model(x).square().sum(1), x, ids=range(8))
    assert clipper.step == 2
    assert clipper.policy.rule.state_dict()["steps"] == 2
    assert model.weight.grad is not None
    assert "Train longer" in clipper.outcome.notes[0]
    model.zero_grad()
    assert clipper.backward(lambda x: model(x).square().sum(1), x, ids=range(8)).step == 2
