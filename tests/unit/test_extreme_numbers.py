"""Gradients near both ends of float32: norms and weighted sums are still accurate."""

import math

import pytest
import torch
from torch import nn

from microclip import Clipper, multitensor, rules

SCALES = [
    [1e-22, 3e-22, 2e-23],  # squares are subnormal
    [1e-21, 2e-23, 1e-22],
    [1e-35, 1.0, 1e3],
    [1e3, 1e-35, 1.0],
    [1e-37, 1e37],  # a spread that float32 has no coefficient for
    [1e37, 1e-37],
    [0.0, 1.0, 1e-30],
    [1e20, 2e20, 1e19],  # squares overflow
    [1e-40, 2e-40],  # subnormal themselves
]
RULES = [rules.MinNorm(), rules.Unit(), rules.Median(), rules.Fixed(0.5)]


def scaled_losses(model):
    return lambda batch: (model(batch[0]) * batch[1][:, None]).sum(1)


def by_hand(scales, x, b, rule):
    """The gradient of (W x + c) summed and scaled, known in closed form, in float64."""
    gradients = []
    for scale, part in zip(scales, x.double().split(b), strict=True):
        weight, bias = part.mean(0).repeat(3, 1) * scale, torch.full((3,), scale).double()
        gradients.append(torch.cat([weight.flatten(), bias]))
    norms = [math.hypot(*gradient.tolist()) for gradient in gradients]
    seen = torch.tensor([n or math.nan for n in norms], dtype=torch.float64)
    weights = rule.weights(seen, torch.full_like(seen, b)).nan_to_num(nan=0.0)
    total = sum(w * g for w, g in zip(weights, gradients, strict=True)) / len(scales)
    return total, norms


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
@pytest.mark.parametrize("b", [1, 2])
def test_the_table_holds(scales, rule, engine, b):
    if engine == "stream" and not rule.streams:
        pytest.skip("needs all norms first")
    model = nn.Linear(4, 3)
    x = torch.randn(len(scales) * b, 4)
    scale = torch.tensor(scales).repeat_interleave(b)
    wanted, norms = by_hand(scale[::b].double().tolist(), x, b, rule)
    outcome = Clipper(model, b, rule=rule, engine=engine).backward(scaled_losses(model), (x, scale))
    found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    tolerance = 1e-4 if max(scales) < 1e-38 else 1e-6  # subnormal numbers have few digits
    assert outcome.norms.tolist() == pytest.approx(norms, rel=tolerance, abs=0)
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance


@pytest.mark.parametrize("domains", [None, [0, 1, 0, 1]])
def test_chunks_and_domains(domains):
    """Folded in two chunks, where multiples are taken of a reference from the first."""
    model = nn.Linear(4, 3)
    x, scale = torch.randn(4, 4), torch.tensor([1e-37, 1e37, 1.0, 1e20])
    found = []
    for engine in ("stream", "two_pass", "fused"):
        model.zero_grad()
        clipper = Clipper(model, 1, engine=engine)
        for rows in (slice(0, 2), slice(2, 4)):
            labels = None if domains is None else domains[rows]
            clipper.fold(scaled_losses(model), (x[rows], scale[rows]), domains=labels)
        clipper.finish()
        found.append(model.weight.grad.double())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1e160, 1e300])
def test_float64(size):
    values = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
    assert multitensor.norm([values], values.device).item() == pytest.approx(5 * size, rel=1e-12)
    halves = list(values.split(1))
    assert multitensor.norm(halves, values.device).item() == pytest.approx(5 * size, rel=1e-12)


@pytest.mark.parametrize("coefficient", [1e-45, 1e-33, 1e-5, 1e33, 1e45])
def test_coefficients_beyond_float32(coefficient):
    size = 1 / math.sqrt(coefficient) if coefficient < 1e-30 or coefficient > 1e30 else 1.0
    tensor = torch.full((5,), size)
    wanted = tensor.double() * coefficient
    for sums in (torch.zeros(5), torch.zeros(5, dtype=torch.float64)):
        multitensor.add_([sums], [tensor], torch.tensor(coefficient, dtype=torch.float64))
        torch.testing.assert_close(sums.double(), wanted, rtol=1e-6, atol=0)
    multitensor.multiply_([tensor], torch.tensor(coefficient, dtype=torch.float64))
    torch.testing.assert_close(tensor.double(), wanted, rtol=1e-6, atol=0)


def test_half_precision_meets_an_extreme_coefficient():
    sums, tensor = torch.zeros(3), torch.full((3,), 1e-4, dtype=torch.float16)
    multitensor.add_([sums], [tensor], torch.tensor(1e38, dtype=torch.float64))
    torch.testing.assert_close(sums, tensor.float() * 1e38)


@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
@pytest.mark.parametrize(
    ("values", "rule", "wanted"),
    [
        ([1e37] * 64, rules.MinNorm(), 1e37),  # whose sum has no room
        ([1e37] * 64, rules.Unit(), 1.0),
        ([3e38, 3e38, -3e38], rules.Fixed(1.0), 1 / 3),
        ([1e-45, 1.0, 1.0], rules.Unit(), 1.0),
        ([1e38, -1e38, 1e-45], rules.Unit(), 1 / 3),
        ([1e38, 1e-45], rules.MinNorm(), 1e-45),
    ],
)
def test_sums_of_any_size(engine, values, rule, wanted):
    model = nn.Linear(1, 1, bias=False)
    x = torch.tensor(values).unsqueeze(1)
    Clipper(model, 1, rule=rule, engine=engine).backward(lambda x: model(x).mean(1), x)
    assert model.weight.grad.item() == pytest.approx(wanted, rel=1e-5)


def test_a_scaled_loss_in_half_precision():
    model = nn.Linear(1, 1, bias=False).half()
    clipper = Clipper(model)
    for _ in range(2):
        model.weight.grad = torch.full((1, 1), 3e4).half()  # times 32 it has no room
        clipper.fold(loss_scale=1 / 32)
    assert clipper.finish().norms.tolist() == pytest.approx([9.6e5] * 2, rel=1e-3)
