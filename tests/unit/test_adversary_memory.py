"""Rules that weight examples, in corners where they could be silently wrong."""

import pytest
import torch

from microclip import Clipper
from microclip.rules import ExampleRule, ExampleTable, LossHistory, LossWeight, NormHistory, Unit
from microclip.rules.examples import Seen

from example_weights import Given


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def examples(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator)


def losses_of(model):
    return lambda batch: ((model(batch[0]) - batch[1]) ** 2).squeeze(1)


def show(rule, step, keys, losses):
    count = len(keys)
    weights = rule.weigh(keys, losses).double()
    rule.remember(Seen(step, keys, losses.double(), weights, torch.zeros(count, dtype=torch.int64)))


@pytest.mark.parametrize("tiny", [0.0, 1e-30, 4e-39, 1e-42])
def test_a_tiny_weight_in_the_first_chunk_does_not_overflow(tiny):
    model, (inputs, targets) = linear(), examples(4)
    clipper = Clipper(model, rule=Given([tiny, 1, 1, 1]))
    for i in range(4):
        clipper.fold(losses_of(model), (inputs[i : i + 1], targets[i : i + 1]), ids=[i])
    clipper.finish()
    plain = linear()
    losses_of(plain)((inputs[1:], targets[1:])).mean().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


@pytest.mark.full
def test_wrong_examples_at_every_second_id_are_found_in_large_data():
    count = 120_000
    keys, rule = torch.arange(count), LossHistory(100, most=1.0)
    for step in range(40):
        losses = torch.where(keys % 2 == 1, 5.0, 2 * 0.8**step) + 0.05 * torch.sin(keys * 12.9898)
        show(rule, step, keys, losses)
    held = rule.weigh(keys, None) < 0.5
    assert held.sum() == count // 2


def test_one_absurd_loss_does_not_hide_the_wrong_examples():
    keys, rule = torch.arange(2000), LossHistory(100)
    for step in range(40):
        losses = torch.where(keys % 5 == 0, 4.0, 2 * 0.8**step) + 0.05 * torch.sin(keys * 12.9898)
        losses[0] = 1000.0
        show(rule, step, keys, losses)
    assert (rule.weigh(keys, None) < 0.5).sum() == 400


@pytest.mark.parametrize("size", [1, 2])
def test_loss_weight_keeps_ordinary_examples_of_small_batches(size):
    generator, rule, weights = torch.Generator().manual_seed(0), LossWeight(), []
    for step in range(200):
        losses, keys = 1 + torch.rand(size, generator=generator), torch.zeros(size).long()
        weights.append(rule.weigh(keys, losses))
        show(rule, step, keys, losses)
    assert (torch.cat(weights) < 0.5).double().mean() < 0.2


def test_loss_weight_keeps_what_is_not_learned_if_most_losses_are_zero():
    losses, rule = torch.tensor([0.0] * 6 + [0.1, 0.2]), LossWeight()
    for step in range(3):
        show(rule, step, torch.zeros(8).long(), losses)
    assert rule.weigh(torch.zeros(8).long(), losses).sum() > 6


def test_losses_of_a_last_micro_batch_of_one_do_not_spoil_the_others():
    model = linear()
    rule = LossHistory(100, clip=Unit())
    clipper = Clipper(model, 4, rule=rule, engine="stream")
    batch = examples(9)
    expected = losses_of(model)(batch).detach()

    def squeezed(part):
        return ((model(part[0]) - part[1]) ** 2).squeeze()  # a scalar for one example

    clipper.backward(squeezed, batch, ids=range(9))
    torch.testing.assert_close(rule.table["last"][:9], expected)


def test_an_own_rule_that_needs_losses_gets_keys_too():
    seen = []

    class Own(ExampleRule):
        needs_losses = True

        def weigh(self, keys, losses):
            seen.append(keys.tolist())
            return torch.ones_like(losses)

    model = linear()
    Clipper(model, rule=Own()).backward(losses_of(model), examples(4), ids=[7, 8, 9, 10])
    assert seen[-1] == [7, 8, 9, 10]


def test_norm_history_refuses_the_record_of_loss_history():
    clipper = Clipper(linear(), rule=LossHistory(9))
    clipper.backward(losses_of(clipper.model), examples(4), ids=range(4))
    other = Clipper(linear(), 1, rule=NormHistory(9))
    with pytest.raises(ValueError, match="LossHistory"):
        other.load_state_dict(clipper.state_dict())


def test_norm_history_refuses_the_norm_of_several_examples():
    model = linear()
    clipper = Clipper(model, 1, rule=NormHistory(9), engine="stream")
    losses = losses_of(model)(examples(4))
    losses.mean().backward()
    with pytest.raises(ValueError, match="one example"):
        clipper.fold(loss=losses, ids=range(4))


@pytest.mark.parametrize("keys", [[1, 2, 3, 3], [-1, -2, -3, -3]])
def test_a_table_with_a_repeated_key_can_be_saved_and_loaded(keys):
    table, other = ExampleTable(a=torch.float32), ExampleTable(a=torch.float32)
    try:
        table.add(torch.tensor(keys))
    except ValueError:
        return  # a refusal is as good
    other.load_state_dict(table.state_dict())
    assert len(other) == len(table) == 3


def test_a_damaged_record_leaves_the_old_one_alone():
    table = ExampleTable(a=torch.float32)
    table.add(torch.arange(5, 45))
    state = table.state_dict()
    state["keys"] = state["keys"][:3]
    with pytest.raises(ValueError, match="keys"):
        table.load_state_dict(state)
    assert len(table) == 40


def test_ids_of_an_abandoned_step_do_not_count():
    model = linear()
    clipper = Clipper(model, rule=LossHistory(9))
    with pytest.raises(ZeroDivisionError):
        clipper.backward(lambda batch: 1 / 0, examples(4), ids=list("abcd"))
    clipper.backward(losses_of(model), examples(4), ids=range(4))


@pytest.mark.parametrize("ids", [[object() for _ in range(4)], [None] * 4])
def test_ids_that_cannot_recognize_an_example_are_refused(ids):
    model = linear()
    with pytest.raises((TypeError, ValueError), match="ids"):
        Clipper(model, rule=LossHistory(9)).backward(losses_of(model), examples(4), ids=ids)
