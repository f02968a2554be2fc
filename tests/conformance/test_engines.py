"""Engines apart from the gradient: randomness, buffers, memory, devices, other libraries."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from microclip import Clipper, multitensor, rules
from microclip.microbatches import cut

import properties
import reference
import zoo
from measure import peak_memory

ENGINES = ["stream", "two_pass"]


def gradient(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class TestRandomness:
    def make(self):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1))
        return model, lambda x: model(x).square().mean(), torch.randn(12, 4)

    def test_both_passes_see_the_same_masks(self):
        model, loss_fn, x = self.make()
        torch.manual_seed(7)
        stored = reference.microbatch_gradients(loss_fn, list(model.parameters()), x.split(4))
        wanted, _, _ = reference.clipped_gradient(stored, [4] * 3, reference.WEIGH["MinNorm()"])
        after = torch.get_rng_state()
        for engine in ENGINES:
            model.zero_grad()
            torch.manual_seed(7)
            Clipper(model, 4, engine=engine).backward(loss_fn, x)
            properties.assert_close(gradient(model), wanted, 1e-5)
            assert torch.equal(torch.get_rng_state(), after)

    def test_random_numbers_drawn_between_fold_and_finish_are_not_repeated(self):
        model, loss_fn, x = self.make()
        clipper = Clipper(model, 4, engine="two_pass")
        clipper.fold(loss_fn, x)
        between = torch.rand(3)
        state = torch.get_rng_state()
        clipper.finish()
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(torch.rand(3), between)


class TestBuffers:
    @pytest.mark.parametrize("engine", ENGINES)
    def test_batchnorm_sees_each_microbatch_once(self, engine):
        torch.manual_seed(0)
        x = torch.randn(12, 3)
        model, twin = (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)) for _ in range(2))
        for part in x.split(4):
            twin(part)
        Clipper(model, 4, engine=engine).backward(lambda x: model(x).mean(), x)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, dict(twin.named_buffers())[name])
        assert model[0].num_batches_tracked == 3

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_skipped_microbatch_was_seen_all_the_same(self, engine):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        factors = torch.tensor([1.0] * 4 + [torch.inf] * 4)
        with pytest.warns(RuntimeWarning, match="Skipped 1 of 2"):
            Clipper(model, 4, engine=engine, nonfinite="skip").backward(
                lambda batch: (model(batch[0]).squeeze(1) * batch[1]).mean(),
                (torch.randn(8, 3), factors),
            )
        assert model[0].num_batches_tracked == 2


class NoReading(TorchDispatchMode):
    """Fails on every operation that would make a host wait for an accelerator."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in self.READS, f"{function} reads a value on the host"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_an_accelerator(monkeypatch):
    """Take the code path of devices whose values are expensive to read."""
    monkeypatch.setattr(multitensor, "on_host", lambda tensor: False)


@pytest.mark.usefixtures("as_on_an_accelerator")
class TestWithoutHostSynchronisation:
    @pytest.mark.parametrize("name", properties.RULES)
    @pytest.mark.parametrize("domains", [False, True])
    def test_nothing_is_read(self, name, domains):
        for engine in properties.engines_for(name):
            cell = properties.Cell("gpt", name, engine, 2, torch.float32, domains)
            gradients, sizes, labels = properties.stored_gradients("gpt", cell.dtype, 2, domains)
            with NoReading():  # a check of a single pass would
                found, outcome = cell.run(verify="never")
            wanted, norms, _ = reference.clipped_gradient(
                gradients, sizes, reference.WEIGH[name], domains=labels
            )
            properties.assert_close(found, wanted, cell.tolerance)
            assert outcome.norms.tolist() == pytest.approx(norms, rel=1e-6)

    def test_one_microbatch_is_plain(self):
        cell = properties.Cell("gpt", "MinNorm()", "stream", None, torch.float32)
        with NoReading():
            found, _ = cell.run()
        cell.case.loss_fn(cell.case.batch).mean().backward()
        plain = [p.grad for p in cell.case.parameters]
        assert all(torch.equal(f, p) for f, p in zip(found, plain, strict=True))
        cell.case.model.zero_grad()

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("bad", [0, 2])
    def test_skipping(self, engine, bad):
        model = nn.Linear(2, 1)
        x = torch.randn(4, 2)
        broken = x.clone()
        broken[bad] = torch.inf
        with pytest.warns(RuntimeWarning, match="Skipped 1 of 4"):
            Clipper(model, 1, engine=engine, nonfinite="skip").backward(
                lambda x: model(x).mean(), broken
            )
        found = gradient(model)
        model.zero_grad()
        kept = x[[i for i in range(4) if i != bad]]
        Clipper(model, 1).backward(lambda x: model(x).mean(), kept)
        properties.assert_close(found, gradient(model), 1e-6)

    def test_half_precision(self):
        model = nn.Linear(8, 4).bfloat16()
        x = torch.randn(6, 8).bfloat16()

        def loss_fn(x):
            return model(x).float().square().mean()

        stored = reference.microbatch_gradients(loss_fn, list(model.parameters()), x.split(2))
        wanted, _, _ = reference.clipped_gradient(stored, [2] * 3, reference.WEIGH["MinNorm()"])
        Clipper(model, 2).backward(loss_fn, x)
        properties.assert_close(gradient(model), wanted, torch.finfo(torch.bfloat16).eps)


class TestMemory:
    """In units of one gradient buffer; the model is large and its activations small.

    Plain accumulation itself holds one of eight layers twice for a moment, so "one" is 7/8 here.
    """

    def make(self):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        buffer = sum(p.numel() * p.element_size() for p in model.parameters())
        return model, lambda x: model(x).square().mean(), torch.randn(8, 256), buffer

    def extra_buffers(self, step, b=1):
        """Return how many buffers a step takes beyond plain gradient accumulation."""
        model, loss_fn, x, buffer = self.make()

        def plain():
            for part in x.split(b):
                loss_fn(part).backward()

        def peak(run):
            model.zero_grad()
            run()  # whatever is allocated once is allocated now
            model.zero_grad()
            return peak_memory(run)

        return (peak(lambda: step(model, loss_fn, x)) - peak(plain)) / buffer

    @pytest.mark.parametrize("b", [1, 2, 4])
    def test_stream_takes_one(self, b):
        extra = self.extra_buffers(
            lambda model, loss_fn, x: Clipper(model, b, engine="stream").backward(loss_fn, x), b
        )
        assert 0.8 < extra < 1.05

    def test_stream_takes_one_more_for_domains_however_many(self):
        for labels in ([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3]):
            extra = self.extra_buffers(
                lambda model, loss_fn, x, labels=labels: Clipper(model, 1).backward(
                    loss_fn, x, domains=labels
                )
            )
            assert 1.8 < extra < 2.05

    @pytest.mark.parametrize("rule", [rules.MinNorm(), rules.Median()])
    def test_two_pass_takes_none(self, rule):
        extra = self.extra_buffers(
            lambda model, loss_fn, x: Clipper(model, 1, rule=rule, engine="two_pass").backward(
                loss_fn, x
            )
        )
        assert extra < 0.05

    @pytest.mark.parametrize("engine", ENGINES)
    def test_one_microbatch_takes_none(self, engine):
        extra = self.extra_buffers(
            lambda model, loss_fn, x: Clipper(model, 8, engine=engine).backward(loss_fn, x), 8
        )
        assert extra < 0.05

    def test_fold_takes_one(self):
        def step(model, loss_fn, x):
            clipper = Clipper(model)
            for part in x.split(1):
                loss_fn(part).backward()
                clipper.fold()
            clipper.finish()

        assert 0.8 < self.extra_buffers(step) < 1.05


def alive():
    """Count the tensors that are kept alive."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.sample(40)
@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused"])
@pytest.mark.parametrize("model", zoo.MODELS)
def test_nothing_is_left_of_past_steps(model, engine):
    """What is left over from each step would fill any memory in the end."""
    if engine == "fused" and model in zoo.CANNOT_FUSE:
        pytest.skip(f"refused: {zoo.CANNOT_FUSE[model]}")
    case = zoo.case(model, torch.float32)
    clipper = Clipper(case.model, 2, engine=engine)
    counts = []
    for _ in range(6):
        case.model.zero_grad()
        clipper.backward(case.each_loss_fn or case.loss_fn, case.batch)
        counts.append(alive())
    case.model.zero_grad()
    assert counts[-1] == counts[2]


class TestCompany:
    """Other parts of PyTorch that a training loop brings along."""

    @pytest.mark.parametrize(
        "optimizer",
        [
            torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
            torch.optim.Adafactor, torch.optim.NAdam, torch.optim.Rprop, torch.optim.LBFGS,
        ],
    )  # fmt: skip
    def test_any_optimizer(self, optimizer):
        """Training with one micro-batch per batch is plain training, bit for bit."""
        weights = []
        for clipped in (False, True):
            torch.manual_seed(3)
            model = nn.Linear(4, 2)
            steps = optimizer(model.parameters(), lr=0.01)
            clipper = Clipper(model)
            for _ in range(5):
                x = torch.randn(8, 4)

                def closure(x=x, model=model, steps=steps, clipper=clipper, clipped=clipped):
                    steps.zero_grad()
                    if clipped:
                        return clipper.backward(lambda x: model(x).square().mean(), x).loss.float()
                    loss = model(x).square().mean()
                    loss.backward()
                    return loss.detach()

                steps.step(closure)
            weights.append(model.weight.detach().clone())
        assert torch.equal(*weights)

    def test_clip_grad_norm_afterwards(self):
        cell = properties.Cell("mlp", "MinNorm()", "stream", 2, torch.float32)
        case = cell.case
        cell.clipper().backward(case.loss_fn, case.batch)
        before = gradient(case.model)
        total = nn.utils.clip_grad_norm_(case.model.parameters(), 1e-3)
        assert total.item() == pytest.approx(reference.norm(before))
        assert reference.norm(gradient(case.model)) == pytest.approx(1e-3, rel=1e-3)
        case.model.zero_grad()

    @pytest.mark.full
    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_compiled_models(self, engine, backend):
        case = zoo.case("mlp", torch.float32)
        gradients, sizes, _ = properties.stored_gradients("mlp", torch.float32, 2, False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own deprecations
            compiled = torch.compile(case.model, backend=backend)
            Clipper(compiled, 2, engine=engine).backward(
                lambda batch: F.cross_entropy(compiled(batch["x"]), batch["y"]), case.batch
            )
        wanted, _, _ = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])
        properties.assert_close(gradient(case.model), wanted, 1e-5)
        case.model.zero_grad()

    def test_shared_parameters_under_reentrant_checkpoints(self):
        """`stream` is right; `two_pass` cannot be, and says so."""
        shared, head = nn.Linear(6, 6), nn.Linear(6, 5)
        model = nn.ModuleList([shared, head])

        def loss_fn(batch):
            hidden = batch[0] * shared.bias  # so that the checkpoint's input needs a gradient
            hidden = checkpoint(lambda h: shared(h).tanh(), hidden, use_reentrant=True)
            return F.cross_entropy(head(hidden), batch[1])

        batch = torch.randn(6, 6), torch.randint(0, 5, (6,))
        pieces = [piece.batch for piece in cut(batch, 2)]
        stored = reference.microbatch_gradients(loss_fn, list(model.parameters()), pieces)
        wanted, _, _ = reference.clipped_gradient(stored, [2] * 3, reference.WEIGH["MinNorm()"])
        Clipper(model, 2).backward(loss_fn, batch)
        properties.assert_close(gradient(model), wanted, 1e-5)
        with pytest.raises(NotImplementedError, match=r"'0\.bias' in several parts"):
            Clipper(model, 2, engine="two_pass").backward(loss_fn, batch)


class NoisyBackward(torch.autograd.Function):
    """The identity; its gradient is rounded at random, as some low-precision kernels do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d * (1 + 0.1 * torch.rand_like(d))


def test_a_skipped_microbatch_shifts_no_random_numbers():
    """The second pass runs its forward pass only; the others must draw what they drew before."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    batch[4] = torch.nan
    found = []
    for engine in ENGINES:
        model.zero_grad()
        torch.manual_seed(1)
        clipper = Clipper(model, 3, engine=engine, nonfinite="skip")
        with pytest.warns(RuntimeWarning, match="not finite|skipped"):
            clipper.backward(lambda x: NoisyBackward.apply(model(x)).square().mean(), batch)
        found.append(torch.cat([each.flatten() for each in gradient(model)]))
    torch.testing.assert_close(*found)
