"""Rules that weight examples in a loop with Accelerate: equal to a slow twin, saved and resumed."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from microclip.integrations.accelerate import AcceleratedClipper
from microclip.rules import LossHistory, MinNorm

import accelerate_runs
import properties
import reference
from accelerate_runs import COUNT, rows_of
from example_weights import ByKey, corners, weight_of, weighted_mean


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    accelerate_runs.fresh_state()
    yield
    accelerate_runs.fresh_state()


def start(data, rule, steps, size, b=None, lr=0.0):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = TensorDataset(*data, torch.arange(len(data[0])))
    prepared = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=size))
    return accelerator, *prepared, AcceleratedClipper(accelerator, prepared[0], b, rule=rule)


def run(parts, reduction, epochs=1):
    """Return the gradients of all steps."""
    accelerator, model, optimizer, loader, clipper = parts

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    found = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                clipper.backward(loss_fn, batch, ids=batch[2])
                if accelerator.sync_gradients:
                    found.append(accelerate_runs.gradients_of(model))
                optimizer.step()
                optimizer.zero_grad()
    return found


def points():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 4, generator=generator)
    return x, torch.randint(0, 3, (COUNT,), generator=generator)


def gradients_of(model, pieces, loss_of):
    x, y = points()
    return reference.microbatch_gradients(
        lambda rows: loss_of(rows, F.cross_entropy(model(x[rows]), y[rows], reduction="none")),
        list(model.parameters()),
        pieces,
    )


def windows(size, steps):
    parts = rows_of(size)
    return [parts[i : i + steps] for i in range(0, len(parts), steps)]


@pytest.mark.parametrize(("size", "steps", "b"), [(8, 1, None), (4, 2, None), (8, 1, 2), (4, 3, 3)])
def test_a_step_is_the_weighted_mean_of_its_examples(size, steps, b):
    """Whatever the micro-batch size."""
    parts = start(points(), ByKey(), steps, size, b)
    found = run(parts, "none")
    assert len(found) == len(windows(size, steps))
    for gradients, window in zip(found, windows(size, steps), strict=True):
        rows = [row for part in window for row in part]
        each = gradients_of(parts[1], [[row] for row in rows], lambda _, losses: losses)
        properties.assert_close(gradients, weighted_mean(each, list(map(weight_of, rows))), 1e-5)
    held = sum(weight_of(row) < 0.5 for part in windows(size, steps)[-1] for row in part)
    assert parts[-1].metrics()["microclip/held_back"] == held


@pytest.mark.parametrize(("size", "steps", "b"), [(8, 1, 2), (4, 2, 1)])
def test_a_mean_loss_weights_micro_batches(size, steps, b):
    parts = start(points(), ByKey(), steps, size, b)
    for gradients, window in zip(run(parts, "mean"), windows(size, steps), strict=True):
        pieces = [part[i : i + b] for part in window for i in range(0, len(part), b)]
        each = gradients_of(parts[1], pieces, lambda _, losses: losses.mean())
        sizes = [sum(map(weight_of, piece)) for piece in pieces]
        properties.assert_close(gradients, weighted_mean(each, sizes), 1e-5)


def test_micro_batches_of_weighted_examples_are_clipped():
    parts = start(points(), ByKey(clip=MinNorm()), 2, 4, 2)

    def loss_of(rows, losses):
        weights = torch.tensor([weight_of(row) for row in rows])
        return (weights * losses).sum() / weights.sum()

    for gradients, window in zip(run(parts, "none"), windows(4, 2), strict=True):
        pieces = [part[i : i + 2] for part in window for i in range(0, len(part), 2)]
        each = gradients_of(parts[1], pieces, loss_of)
        sizes = [sum(map(weight_of, piece)) for piece in pieces]
        wanted = reference.clipped_gradient(each, sizes, reference.WEIGH["MinNorm()"])[0]
        properties.assert_close(gradients, wanted, 1e-5)


def test_resumed_training_is_bit_for_bit_the_same(tmp_path):
    """From a state in which the wrong examples are held back."""

    def new():
        return start(corners(), LossHistory(total_steps=120), 1, 16, lr=1.0)

    whole = new()
    run(whole, "none", 30)
    whole[0].save_state(tmp_path / "state")
    rule = whole[-1].clipper.policy.rule
    assert rule.phase == "holding", rule.phase
    held = (rule.weigh(torch.arange(48), None) < 0.5).nonzero().flatten().tolist()
    assert held == list(range(8))
    run(whole, "none", 10)
    accelerate_runs.fresh_state()
    again = new()
    again[0].load_state(tmp_path / "state")
    run(again, "none", 10)
    pairs = zip(whole[1].parameters(), again[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert again[-1].clipper.policy.rule.fingerprint() == rule.fingerprint()


def test_missing_ids_are_an_error():
    _, model, _, loader, clipper = start(points(), LossHistory(), 1, 8)
    with pytest.raises(ValueError, match="remembers every example, but this batch has no ids"):
        clipper.backward(
            lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), next(iter(loader))
        )
