"""Attacks on the single pass: each must be exact or refused, and with "auto" exact."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

from microclip import Clipper

import attacks
import properties

BY_NAME = {str(attack): attack for attack in attacks.ATTACKS}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("engine", ["fused", "auto"])
def test_exact_or_refused(name, engine):
    said = attacks.attempt(BY_NAME[name], engine, 1)
    assert said.startswith("exact" if engine == "auto" else ("exact", "refused")), said


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", list(BY_NAME)[::3])
@pytest.mark.parametrize(("b", "dtype"), [(3, torch.float64), (1, torch.float32)])
def test_exact_or_refused_at_other_sizes_and_precisions(name, b, dtype):
    said = attacks.attempt(BY_NAME[name], "fused", b, dtype)
    assert said.startswith(("exact", "refused")), said


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [str(a) for a in attacks.ATTACKS if not a.mixes][::3])
def test_owners_alone_are_enough(name):
    """Where examples do not mix, tracking is exact without checks."""
    attack = BY_NAME[name]
    with attacks.default_dtype(torch.float64):
        model = attack.build(0)
        for step, batch in enumerate(attack.batches()):
            attack.before(model, step)
            found = []
            for engine in ("fused", "stream"):
                model.zero_grad()
                clipper = Clipper(model, 1, engine=engine, verify="never")
                try:
                    clipper.backward(partial(attack.loss, model), batch)
                except NotImplementedError:
                    return
                gradients = [p.grad for p in model.parameters()]
                found.append([None if g is None else g.clone() for g in gradients])
            parameters = list(model.parameters())
            single, several = (
                [
                    torch.zeros_like(p) if g is None else g
                    for g, p in zip(each, parameters, strict=True)
                ]
                for each in found
            )
            properties.assert_close(single, several, 1e-9)


def test_most_attacks_are_done_in_a_single_pass():
    """So that refusing everything would not pass."""
    said = [attacks.attempt(a, "fused", 1) for a in attacks.ATTACKS[::4] if not a.mixes]
    assert sum(each == "exact (fused)" for each in said) > 0.7 * len(said)


def test_threads_that_share_a_batch():
    """Each has its own recorder, on the same tensors at the same time."""
    x = torch.randn(8, 5, dtype=torch.float64)
    models = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).double() for _ in range(4)]
    said = {}

    def train(number):
        model = models[number]
        clipper = Clipper(model, 2, engine="fused")
        try:
            for _ in range(20):
                model.zero_grad()
                clipper.backward(lambda x: model(x).square().mean(1), x)
            said[number] = [p.grad.clone() for p in model.parameters()]
        except Exception as error:
            said[number] = error

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, model in enumerate(models):
        model.zero_grad()
        Clipper(model, 2, engine="stream").backward(lambda x, m=model: m(x).square().mean(1), x)
        assert isinstance(said[number], list), said[number]
        properties.assert_close(said[number], [p.grad for p in model.parameters()], 1e-12)
