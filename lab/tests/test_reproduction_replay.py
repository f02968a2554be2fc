"""Plain training with another run's step lengths: the rule, the engines, resuming."""

import json
import math

import pytest
import torch
from torch import nn

import microclip
from microclip.rules import apply
from microclip_lab.reproduction.run_job import Replay
from microclip_lab.training.train import train

from tiny_recipe import Tiny, forget_accelerate, training, weights

ENGINES = ["stream", "two_pass", "fused"]
LENGTHS = [0.5, 0.0, 7.0, 1e-3, 2.0, 1.0]


@pytest.fixture
def setting():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    batches = [torch.randn(8, 3, generator=generator).double() for _ in range(3)]

    def losses(x):
        return model(x).square().sum(1)

    return model, losses, batches


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_keep_their_direction_and_get_the_lengths_one_after_the_other(setting, engine):
    model, losses, batches = setting
    clipper = microclip.Clipper(model, 8, rule=Replay([3.0, 0.0, 1e-6]), engine=engine)
    for batch, length in zip(batches, [3.0, 0.0, 1e-6], strict=True):
        model.zero_grad()
        losses(batch).mean().backward()
        plain = gradient(model)
        model.zero_grad()
        outcome = clipper.backward(losses, batch)
        torch.testing.assert_close(gradient(model), plain * (length / plain.norm()))
        assert outcome.bound.item() == length
    with pytest.raises(ValueError, match="the lengths of 3 steps, but this is step 4"):
        clipper.backward(losses, batches[0])


def test_a_gradient_of_zero_stays_zero_and_is_a_step_all_the_same():
    rule = Replay([3.0, 4.0])
    zero, size = torch.zeros(1, dtype=torch.float64), torch.ones(1)
    assert apply(rule, zero, size, "propagate").weights.tolist() == [0.0]
    rule.observe(zero, size)
    assert apply(rule, zero + 2, size, "propagate").weights.tolist() == [2.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_several_micro_batches_are_refused(setting, engine):
    model, losses, batches = setting
    clipper = microclip.Clipper(model, 4, rule=Replay([1.0]), engine=engine)
    with pytest.raises(ValueError, match="but got 2 micro-batches"):
        clipper.backward(losses, batches[0])


def test_several_domains_are_refused(setting):
    model, losses, batches = setting
    clipper = microclip.Clipper(model, 8, rule=Replay([1.0] * 4), engine="stream")
    with pytest.raises(ValueError, match="has several domains"):
        clipper.backward(losses, batches[0], domains=["a", "b"] * 4)


@pytest.mark.parametrize("length", [math.nan, math.inf, -0.5])
def test_lengths_that_no_gradient_has(length):
    with pytest.raises(ValueError, match="that of step 2 of 3 is"):
        Replay([1.0, length, 2.0])


def test_states():
    rule = Replay([1.0, 2.0])
    rule.load_state_dict({"step": 1})
    assert rule.weights(torch.ones(1), torch.ones(1)).tolist() == [2.0]
    with pytest.raises(ValueError, match=r"holds \['bound'\]"):
        rule.load_state_dict({"bound": 1})


def test_a_resumed_run_goes_on_with_the_right_length(tmp_path):
    def run(name, **options):
        forget_accelerate()
        resume = options.pop("resume", False)
        how = training(
            out=tmp_path / name, resume=resume, microbatch_size=16, steps=len(LENGTHS),
            engine="stream", optimizer="sgd", schedule="constant", log_every=1, cpu=True,
        )  # fmt: skip
        return train(Tiny(dropout=0.3), how, rule=Replay(LENGTHS), **options).path

    whole = weights(run("whole"))
    run("halves", until=4)
    resumed = weights(run("halves", resume=True))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    lines = (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    lengths = [line["gradient_norm"] for line in found if "gradient_norm" in line]
    assert lengths == pytest.approx(LENGTHS, rel=1e-6)
