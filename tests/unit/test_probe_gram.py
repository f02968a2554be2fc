"""The Gram matrix against materialized gradients: the whole zoo, batches, budgets, errors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip.microbatches import cut
from microclip.probing import gram_of
from microclip.probing.gram import clear, one_by_one

import zoo
from per_example import losses, materialized

DTYPES = {"float32": (torch.float32, 2e-6), "float64": (torch.float64, 1e-13)}
NAMES = [name for name in zoo.MODELS if name != "cnn_batchnorm"]


def error(found, rows):
    """The largest error of an inner product, relative to the norms."""
    norms = rows.norm(dim=1)
    return ((found - rows @ rows.T).abs() / (norms[:, None] * norms)).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_it_equals_that_of_materialized_gradients(name, dtype):
    kind, tolerance = DTYPES[dtype]
    case = zoo.case(name, kind)
    found = gram_of(case.model, losses(case), [case.batch])
    assert found.matrix.dtype == torch.float64
    assert torch.equal(found.matrix, found.matrix.mT)
    assert error(found.matrix, materialized(case)) < tolerance
    slow = "one example at a time" in "".join(found.notes)
    assert slow == (name in zoo.CANNOT_FUSE), found.notes


@pytest.mark.parametrize("budget", [None, 1, 3000], ids=["ample", "none", "some"])
@pytest.mark.parametrize(
    "name", ["mlp", "tied_embeddings", "cnn_groupnorm", "hf_llama", "checkpointed"]
)
def test_several_batches_and_any_budget(name, budget):
    case = zoo.case(name, torch.float64)
    parts = [case.batch, cut(case.batch, 3)[1].batch, cut(case.batch, 5)[0].batch, case.batch]
    found = gram_of(case.model, losses(case), parts, memory_budget=budget)
    rows = materialized(case)
    order = [*range(7), 3, 4, 5, *range(5), *range(7)]
    assert found.sizes == (7, 3, 5, 7)
    assert error(found.matrix, rows[order]) < 1e-13


def test_a_layer_too_large_for_a_block_is_taken_in_parts(monkeypatch):
    case = zoo.case("hf_gpt2", torch.float64)
    monkeypatch.setattr("microclip.probing.gram.BLOCK_BYTES", 500)
    found = gram_of(case.model, losses(case), [case.batch])
    assert error(found.matrix, materialized(case)) < 1e-13


def test_gradients_one_by_one_are_the_same_in_portions():
    case = zoo.case("gpt", torch.float64)
    parameters = dict(case.model.named_parameters())
    clear(parameters)  # other tests share the model
    whole = torch.cat(list(one_by_one(parameters, losses(case), [case.batch], 1e9)), 1)
    portions = list(one_by_one(parameters, losses(case), [case.batch], 1000))
    assert len(portions) > 3
    assert torch.equal(torch.cat(portions, 1), whole)


def test_rows_longer_than_the_weight_and_single_rows_agree():
    """A linear layer is done by pairs of rows or by materialized gradients: both give the same."""
    for places, width in ((1, 40), (30, 3)):
        layer = nn.Linear(width, width).double()
        x = torch.randn(6, places, width, dtype=torch.float64)
        found = gram_of(layer, lambda x, m=layer: m(x).square().sum((1, 2)), [x])
        rows = []
        for one in x:
            g = torch.autograd.grad(layer(one).square().sum(), list(layer.parameters()))
            rows.append(torch.cat([part.flatten() for part in g]))
        assert error(found.matrix, torch.stack(rows)) < 1e-13


class Noisy(nn.Module):
    """Dropout, a buffer that counts calls, and noise that cannot be disabled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.dropout(self.layer(x)) + torch.randn(x.shape)


def test_the_model_is_left_as_it_was():
    model = Noisy()
    model.layer.bias.grad = torch.full((4,), 3.0)
    kept = model.layer.bias.grad
    model.dropout.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    gram_of(model, lambda x: model(x).square().sum(1), [torch.randn(8, 4), torch.randn(8, 4)])
    torch.set_rng_state(state)
    first = torch.rand(3)
    torch.set_rng_state(state)
    batches = [torch.ones(8, 4), torch.ones(8, 4)]
    gram_of(model, lambda x: model(x).square().sum(1), batches)
    assert torch.equal(torch.rand(3), first)
    assert model.layer.bias.grad is kept
    assert torch.equal(kept, torch.full((4,), 3.0))
    assert model.layer.weight.grad is None
    assert model.calls == 0
    assert [module.training for module in model.modules()] == modes


def test_also_after_an_error():
    model = Noisy()
    state = torch.get_rng_state()
    calls = 0

    def breaks(x):
        nonlocal calls
        calls += 1
        loss = model(x).square().sum(1)
        if calls == 6:
            raise KeyError("half way")
        return loss

    with pytest.raises(KeyError):
        gram_of(model, breaks, [torch.ones(8, 4)])
    assert model.layer.weight.grad is None
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_revisited_batches_see_the_same_dropout():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 1)).double()
    batches = list(torch.randn(4, 6, 5, dtype=torch.float64))
    found = []
    for budget in (None, 1):
        torch.manual_seed(2)
        gram = gram_of(model, lambda x: model(x).squeeze(1), batches, memory_budget=budget)
        found.append(gram.matrix)
        # positive semi-definite: all blocks come from the same gradients
        assert torch.linalg.eigvalsh(gram.matrix).min() > -1e-9
    assert torch.allclose(*found, rtol=1e-12)


LAYER = nn.Linear(3, 1)


def each(x):
    return LAYER(x).squeeze(1).square()


@pytest.mark.parametrize(
    ("batches", "loss_fn", "message"),
    [
        ([torch.ones(3, 3)], each, "at least 4 examples.*but got 3"),
        ([], each, "at least 4 examples.*but got 0"),
        ([torch.ones(8, 3), torch.ones(1, 3)], each, "Batch 1 has one example"),
        ([torch.ones(8, 3)], lambda x: each(x).mean(), "one loss per example.*shape \\(\\)"),
        ([torch.ones(8, 3)], lambda x: LAYER(x), "for 3 examples it returned.*\\(3, 1\\)"),
        ([torch.ones(9000, 3)], each, "9000 examples, more than the 8192"),
    ],
)
def test_what_cannot_be_probed_is_refused(batches, loss_fn, message):
    with pytest.raises(ValueError, match=message):
        gram_of(LAYER, loss_fn, batches)


@pytest.mark.parametrize("batch", [torch.ones(8, 3), {"x": 1}, (torch.ones(8, 3),)], ids=type)
def test_a_single_batch_is_not_a_list_of_them(batch):
    with pytest.raises(TypeError, match=r"Write \[batch\]"):
        gram_of(LAYER, each, batch)


def test_examples_whose_gradients_are_not_finite_are_named():
    x, y = torch.ones(6, 3), torch.ones(6, 3)
    x[2], y[4] = torch.nan, torch.inf
    with pytest.raises(ValueError, match="2 of 12 examples .*: 2 of batch 0, 4 of batch 1"):
        gram_of(LAYER, each, [x, y])


def test_batchnorm_mixes_examples():
    case = zoo.case("cnn_batchnorm", torch.float64)
    with pytest.raises(ValueError, match="'1' is a BatchNorm2d in training mode, which mixes"):
        gram_of(case.model, losses(case), [case.batch])
    case.model.eval()
    try:
        found = gram_of(case.model, losses(case), [case.batch])
        assert error(found.matrix, materialized(case)) < 1e-13
    finally:
        case.model.train()


def test_a_loss_that_depends_on_its_neighbors_is_refused():
    """Such as in-batch negatives."""

    def contrastive(x):
        h = LAYER.weight * x
        return F.cross_entropy(h @ h.T, torch.arange(len(x)), reduction="none")

    with pytest.raises(ValueError, match="changes with its neighbors"):
        gram_of(LAYER, contrastive, [torch.randn(8, 3)])


def by_hand(layer, loss_fn, x):
    rows = []
    for one in x.split(1):
        found = torch.autograd.grad(loss_fn(one).sum(), list(layer.parameters()))
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


class TurnsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d.flip(0)


def test_what_a_single_pass_gets_wrong_is_noticed():
    """Each loss is right, but the gradients are permuted in the backward pass."""
    layer = nn.Linear(3, 1).double()
    x = torch.randn(8, 3, dtype=torch.float64)

    def turned(x):
        return TurnsGradients.apply(layer(x)).squeeze(1).square()

    found = gram_of(layer, turned, [x])
    assert "A single pass gives inner products that are off by" in found.notes[0]
    assert error(found.matrix, by_hand(layer, turned, x)) < 1e-13


def test_a_path_that_only_larger_batches_take():
    layer = nn.Linear(3, 1).double()
    x = torch.randn(8, 3, dtype=torch.float64)

    def sometimes(x):
        if len(x) > 4:
            with torch.autograd.graph.save_on_cpu():
                return layer(x).squeeze(1).square()
        return layer(x).squeeze(1).square()

    found = gram_of(layer, sometimes, [x])
    assert "hooks on saved tensors" in found.notes[0]
    assert error(found.matrix, by_hand(layer, sometimes, x)) < 1e-13


@pytest.fixture
def _one_rank():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_distributed_models_are_refused():
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    batches = [torch.randn(8, 3)]
    with pytest.raises(ValueError, match="Probe model.module"):
        gram_of(wrapped, lambda x: wrapped(x).squeeze(1), batches)
    assert len(gram_of(wrapped.module, lambda x: wrapped.module(x).squeeze(1), batches)) == 8
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    sharded = torch.distributed.fsdp.fully_shard(nn.Linear(3, 1), mesh=mesh)
    with pytest.raises(ValueError, match="sharded over several"):
        gram_of(sharded, lambda x: sharded(x).squeeze(1), batches)


def test_frozen_models_have_nothing_to_probe():
    with pytest.raises(ValueError, match="no trainable parameters"):
        gram_of(nn.Linear(3, 1).requires_grad_(False), each, [torch.ones(8, 3)])
