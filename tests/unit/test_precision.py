"""Half precision, autocast and loss scaling: norms in float32 or wider, sums that do not drift."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper, multitensor, rules
from microclip.microbatches import cut

import properties
import reference

HALF = [torch.float16, torch.bfloat16]


def classifier(dtype=torch.float32):
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)


def data(size=64, dtype=torch.float32):
    return torch.randn(size, 16, dtype=dtype), torch.randint(0, 4, (size,))


def loss_of(model):
    return lambda batch: F.cross_entropy(model(batch[0]).float(), batch[1])


def gradient(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("engine", ["stream", "two_pass"])
def test_half_precision_parameters(dtype, engine):
    """The sum is exact up to the one rounding of the result to the parameters' dtype."""
    model, batch = classifier(dtype), data(dtype=dtype)
    pieces = cut(batch, 1)
    stored = reference.microbatch_gradients(
        loss_of(model), list(model.parameters()), [piece.batch for piece in pieces]
    )
    wanted, norms, _ = reference.clipped_gradient(stored, [1] * 64, reference.WEIGH["MinNorm()"])
    outcome = Clipper(model, 1, engine=engine).backward(loss_of(model), batch)
    assert all(p.grad.dtype == dtype for p in model.parameters())
    assert outcome.norms.tolist() == pytest.approx(norms, rel=1e-6)
    properties.assert_close(gradient(model), wanted, 2 * torch.finfo(dtype).eps)
    once_rounded = [t.to(dtype) for t in wanted]
    same = [
        (f == w).float().mean().item() for f, w in zip(gradient(model), once_rounded, strict=True)
    ]
    assert min(same) > 0.99  # adding up in half precision would leave far fewer the same


def test_half_precision_one_microbatch_is_plain():
    model, batch = classifier(torch.bfloat16), data(dtype=torch.bfloat16)
    loss_of(model)(batch).backward()
    plain = gradient(model)
    model.zero_grad()
    Clipper(model).backward(loss_of(model), batch)
    assert all(torch.equal(f, p) for f, p in zip(gradient(model), plain, strict=True))


@pytest.mark.parametrize("how", ["parameters", "autocast"])
@pytest.mark.parametrize("b", [1, 2, 4])
def test_convolutions_in_a_single_pass(how, b):
    """Their gradients are added up in float32, also where all else is in half precision."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten()
    )
    x = torch.randn(8, 3, 12, 12)
    if how == "parameters":
        model, x = model.bfloat16(), x.bfloat16()

    def losses(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return model(x).float().square().mean(1)

    found = []
    for engine in ("stream", "fused"):
        model.zero_grad()
        Clipper(model, b, engine=engine).backward(losses, x)
        found.append([gradient.double() for gradient in gradient(model)])
    properties.assert_close(found[1], found[0], 0.01)


@pytest.mark.parametrize("where", ["inside loss_fn", "around backward"])
@pytest.mark.parametrize("engine", ["stream", "two_pass"])
def test_autocast(where, engine):
    model, batch = classifier(), data(12)

    def inside(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)(batch)

    stored = reference.microbatch_gradients(
        inside, list(model.parameters()), [piece.batch for piece in cut(batch, 4)]
    )
    wanted, _, _ = reference.clipped_gradient(stored, [4] * 3, reference.WEIGH["MinNorm()"])
    clipper = Clipper(model, 4, engine=engine)
    if where == "inside loss_fn":
        clipper.backward(inside, batch)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            clipper.backward(loss_of(model), batch)
    properties.assert_close(gradient(model), wanted, 1e-5)


@pytest.mark.parametrize("rule", list(properties.RULES.values()), ids=repr)
def test_grad_scaler(rule):
    """Norms are those of the unscaled loss, so bounds mean what they say; `.grad` is scaled."""
    model, batch = classifier(), data(12)
    plain = Clipper(model, 4, rule=rule).backward(loss_of(model), batch)
    wanted = gradient(model)
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    outcome = Clipper(model, 4, rule=rule, grad_scaler=scaler).backward(loss_of(model), batch)
    assert outcome.norms.tolist() == pytest.approx(plain.norms.tolist(), rel=1e-6)
    assert outcome.loss == plain.loss
    properties.assert_close(gradient(model), [1024 * t for t in wanted], 1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.unscale_(optimizer)
    properties.assert_close(gradient(model), wanted, 1e-5)


@pytest.mark.parametrize("folding", [False, True])
def test_grad_scaler_sees_infinities(folding):
    model, batch = classifier(), data(12)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    clipper = Clipper(model, 4, grad_scaler=scaler)

    def step(batch):
        optimizer.zero_grad()
        if folding:
            for piece in cut(batch, 4):
                scaler.scale(loss_fn(piece.batch)).backward()
                clipper.fold(size=piece.size)
            clipper.finish()
        else:
            clipper.backward(loss_fn, batch)
        scaler.step(optimizer)
        scaler.update()

    def loss_fn(batch):
        x, y, factors = batch
        return (F.cross_entropy(model(x), y, reduction="none") * factors).mean()

    factors = torch.ones(12)
    factors[7] = math.inf
    step((*batch, factors))
    assert scaler.get_scale() == 512
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    step((*batch, torch.ones(12)))
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


class TestNorm:
    HOST = torch.device("cpu")

    def test_by_hand(self):
        assert multitensor.norm([torch.tensor([3.0]), torch.tensor([[4.0]])], self.HOST) == 5
        assert multitensor.norm([], self.HOST) == 0

    def test_large_tensors_do_not_drift(self):
        """One float32 reduction over these is off by 1e-4 and more; equal values are the worst."""
        for big in (torch.rand(8_000_000) + 0.5, torch.full((8_000_000,), 0.3)):
            exact = big.double().norm().item()
            assert multitensor.norm([big], self.HOST).item() == pytest.approx(exact, rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("layout", ["rows", "columns", "strided", "channels_last"])
    def test_any_layout(self, dtype, layout):
        tensor = torch.randn(2, 300, 150, 2).to(dtype)  # larger than one block
        if layout == "columns":
            tensor = tensor.permute(3, 1, 0, 2)
        elif layout == "strided":
            tensor = tensor[:, ::2]
        elif layout == "channels_last":
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        small = torch.ones(3, dtype=dtype)
        exact = math.hypot(tensor.double().norm().item(), math.sqrt(3))
        assert multitensor.norm([tensor, small], self.HOST).item() == pytest.approx(exact, rel=1e-6)

    @pytest.mark.parametrize("size", [1e-42, 1e-30, 1e25, 3e38])
    def test_the_whole_range_of_float32(self, size):
        tensor = torch.full((4,), size)
        assert multitensor.norm([tensor], self.HOST).item() == pytest.approx(2 * tensor[0].item())

    def test_not_finite(self):
        assert multitensor.norm([torch.tensor([1.0, math.inf])], self.HOST) == math.inf
        assert multitensor.norm([torch.tensor([1.0, math.nan])], self.HOST).isnan()


def test_tiny_and_huge_gradients():
    """Norms that float32 squares cannot hold are neither zero nor infinite."""
    model = nn.Linear(1, 1, bias=False)
    for scale in (1e-30, 1e30):
        model.zero_grad()
        x = torch.tensor([[3.0], [4.0]]) * scale
        outcome = Clipper(model, 1, rule=rules.MinNorm()).backward(lambda x: model(x).mean(), x)
        assert outcome.weights.tolist() == pytest.approx([1, 0.75])
        assert model.weight.grad.item() == pytest.approx(3 * scale)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("engine", ["fused", "auto"])
def test_rounding_in_a_single_layer_is_no_mistake(engine):
    """As Accelerate does it: autocast inside forward, which no inner module tells of."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    plain = model.forward

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x).float()

    model.forward = forward
    x = torch.randn(64, 2)
    y = x @ torch.tensor([2.0, -1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipper = Clipper(model, 4, engine=engine, verify="always")
    for _ in range(20):
        optimizer.zero_grad()
        outcome = clipper.backward(
            lambda batch: (model(batch[0])[:, 0] - batch[1]).square(), (x, y)
        )
        optimizer.step()
    if engine == "fused":
        assert outcome.engine == "fused"
