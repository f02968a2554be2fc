"""Weighted examples in loops that call backward themselves: weighted_loss(), then fold()."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import microclip
from microclip.rules import LossHistory, LossWeight, Unit

import properties
from example_weights import ByKey


def setup(rule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, microclip.Clipper(model, 2, rule=rule, engine="stream")


def data(count=8):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator), y


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("rule", [ByKey, lambda: ByKey(clip=Unit()), LossWeight])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_equals_backward(rule, size):
    """Three steps, so that a rule that learns from losses has something to go by."""
    x, y = data()
    wanted, clipper = setup(rule())
    found, own = setup(rule())
    if own.policy.rule.clip is not None:
        size = 2  # micro-batches are clipped
    for _ in range(3):
        outcome = clipper.backward(lambda b: losses_of(wanted, b), (x, y), ids=torch.arange(8))
        for rows in torch.arange(8).split(size):
            losses = losses_of(found, (x[rows], y[rows]))
            own.weighted_loss(losses, ids=rows).backward()
            own.fold(loss=losses, ids=rows)
        made = own.finish()
        gradients = [[p.grad for p in model.parameters()] for model in (found, wanted)]
        properties.assert_close(*gradients, 1e-6)
        assert torch.equal(made.example_weights, outcome.example_weights)
        assert torch.allclose(made.example_losses, outcome.example_losses)
        for model in (found, wanted):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            model.zero_grad()


def test_other_rules_take_the_mean():
    model, clipper = setup(microclip.rules.MinNorm())
    losses = losses_of(model, data())
    assert clipper.weighted_loss(losses) == losses.mean()
    losses.mean().backward()
    clipper.fold(size=8, loss=losses)
    outcome = clipper.finish()
    assert torch.equal(outcome.example_losses, losses)
    assert outcome.loss == losses.mean()


def test_losses_without_ids_count_the_examples():
    model, clipper = setup(LossWeight())
    losses = losses_of(model, data())
    clipper.weighted_loss(losses).backward()
    clipper.fold(loss=losses)
    assert clipper.finish().sizes.tolist() == [8]


def test_losses_that_were_scaled():
    """As in loops that divide by the number of steps; the rule sees what they were."""
    model, clipper = setup(LossWeight())
    losses = losses_of(model, data())
    (clipper.weighted_loss(losses) / 4).backward()
    clipper.fold(loss=losses / 4, loss_scale=1 / 4)
    wanted, other = setup(LossWeight())
    outcome = other.backward(lambda b: losses_of(wanted, b), data())
    clipper.finish()
    gradients = [[p.grad for p in each.parameters()] for each in (model, wanted)]
    properties.assert_close(*gradients, 1e-6)
    assert torch.allclose(clipper.outcome.example_losses, outcome.example_losses)
    assert clipper.policy.rule.center == pytest.approx(other.policy.rule.center)


def test_a_plain_mean_is_refused():
    """Its gradient does not have the weights that the rule would claim; nothing is lost."""
    model, clipper = setup(ByKey())
    x, y = data()
    losses = losses_of(model, (x, y))
    clipper.weighted_loss(losses[:4], ids=range(4)).backward(retain_graph=True)
    clipper.fold(loss=losses[:4], ids=range(4))
    losses[4:].mean().backward()
    gradient = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match="ByKey weights examples, but this is the gradient of a pl"
    ):
        clipper.fold(loss=losses[4:], ids=range(4, 8))
    assert all(map(torch.equal, [p.grad for p in model.parameters()], gradient))
    model.zero_grad()
    losses = losses_of(model, (x, y))
    clipper.weighted_loss(losses[4:], ids=range(4, 8)).backward()
    clipper.fold(loss=losses[4:], ids=range(4, 8))
    wanted, other = setup(ByKey())
    other.backward(lambda b: losses_of(wanted, b), (x, y), ids=range(8))
    clipper.finish()
    gradients = [[p.grad for p in each.parameters()] for each in (model, wanted)]
    properties.assert_close(*gradients, 1e-6)


@pytest.mark.parametrize("ids", [range(1, 9), range(7), None])
def test_weights_of_other_examples_are_refused(ids):
    model, clipper = setup(LossWeight())
    losses = losses_of(model, data())
    clipper.weighted_loss(losses, ids=range(8)).backward()
    size = 8 if ids is None else len(ids)
    with pytest.raises(ValueError, match="was called for other examples than these"):
        clipper.fold(loss=losses[:size].detach(), ids=ids)


def test_means_weight_micro_batches():
    model, clipper = setup(ByKey())
    losses = losses_of(model, data())
    losses.mean().backward()
    clipper.fold(loss=losses.mean(), ids=range(8))
    assert clipper.finish().sizes.tolist() == [8]


@pytest.mark.parametrize("losses", [torch.tensor(1.0), torch.zeros(2, 2), 3.0, torch.zeros(0)])
def test_anything_but_one_loss_per_example_is_refused(losses):
    _, clipper = setup(LossHistory())
    with pytest.raises(ValueError, match="needs a vector with one loss per example"):
        clipper.weighted_loss(losses)


def test_ids_that_do_not_fit_are_refused():
    _, clipper = setup(LossHistory())
    with pytest.raises(ValueError, match="has 3 examples, but ids has 2"):
        clipper.weighted_loss(torch.zeros(3), ids=[1, 2])
    with pytest.raises(ValueError, match="this batch has no ids"):
        clipper.weighted_loss(torch.zeros(3))
