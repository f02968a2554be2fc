"""Chunked cross-entropy: the same losses and gradients as with a table of logits, in any engine."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from microclip import Clipper
from microclip.losses import chunked_cross_entropy, token_losses

import properties
import reference
from measure import peak_memory

OPTIONS = [{}, {"label_smoothing": 0.2}, {"softcap": 2.0}, {"softcap": 2.0, "label_smoothing": 0.1}]
WORDS, WIDTH = 31, 8


def from_table(hidden, weight, labels, bias=None, softcap=None, label_smoothing=0.0, **ignored):
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    each = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=label_smoothing
    ).view(labels.shape)
    return each.sum(1) / (labels != -100).sum(1).clamp(min=1)


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (3, 6, WIDTH), (WORDS, WIDTH), (WORDS,)
    hidden, weight, bias = (torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes)
    labels = torch.randint(0, WORDS, (3, 6))
    labels[0, 2:] = -100
    labels[1] = -100  # an example without a loss
    return hidden, weight, labels, bias


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 100, None])
def test_losses_and_gradients_are_those_of_the_table(options, chunk):
    hidden, weight, labels, bias = inputs()
    wanted = from_table(hidden, weight, labels, bias, **options)
    found = chunked_cross_entropy(hidden, weight, labels, bias, chunk=chunk, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert found[1] == 0
    factors = torch.tensor([0.3, 2.0, -1.0])
    leaves = [hidden, weight, bias]
    one, two = (torch.autograd.grad((each * factors).sum(), leaves) for each in (found, wanted))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_by_hand():
    """Two words with equal logits: log 2."""
    hidden, weight = torch.zeros(1, 3, 4), torch.ones(2, 4)
    labels = torch.tensor([[0, 1, -100]])
    log2 = 0.6931471805599453
    call = partial(chunked_cross_entropy, hidden, weight, labels)
    assert call().item() == pytest.approx(log2)
    assert call(reduction="sum").item() == pytest.approx(2 * log2)
    assert call(reduction="none").tolist()[0] == pytest.approx([log2, log2, 0])


def test_shifted_labels():
    hidden, weight, labels, _ = inputs()
    wanted = from_table(hidden[:, :-1], weight, labels[:, 1:])
    found = chunked_cross_entropy(hidden, weight, labels, shift=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_another_label_to_ignore():
    hidden, weight, labels, _ = inputs()
    found = chunked_cross_entropy(hidden, weight, labels.clamp(min=0), ignore_index=0)
    rest = labels.where(labels > 0, -100)
    torch.testing.assert_close(found, from_table(hidden, weight, rest), rtol=1e-12, atol=1e-14)


def test_one_row_per_example():
    hidden, weight, labels, _ = inputs()
    found = chunked_cross_entropy(hidden[:, 0], weight, labels[:, 0])
    torch.testing.assert_close(
        found, from_table(hidden[:, :1], weight, labels[:, :1]), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("bits", [torch.float32, torch.bfloat16])
def test_lower_precisions(bits):
    hidden, weight, labels, _ = inputs(bits)
    found = chunked_cross_entropy(hidden, weight, labels, chunk=5)
    assert found.dtype == torch.float32
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    wanted = from_table(*wide, labels)
    rtol = 1e-5 if bits == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=rtol)
    found.sum().backward()
    wanted.sum().backward()
    for narrow, each in zip((hidden, weight), wide, strict=True):
        error = (narrow.grad.double() - each.grad).norm() / each.grad.norm()
        assert error < rtol


def test_autocast():
    hidden, weight, labels, _ = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(hidden, weight, labels)
    found.sum().backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(found, from_table(hidden, weight, labels), rtol=5e-2, atol=5e-2)


def test_autocast_leaves_float64_alone():
    hidden, weight, labels, bias = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(hidden, weight, labels, bias)
    wanted = from_table(hidden, weight, labels, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("engine", [None, "stream", "fused", "auto"])
def test_gradient_penalties_are_refused(engine, frozen):
    """Without a word, the penalty would have no gradient."""
    x, weight, labels, _ = (each.detach() for each in inputs())
    body, head = nn.Linear(WIDTH, WIDTH).double(), nn.Parameter(weight, requires_grad=not frozen)

    def losses(batch):
        hidden = body(batch[0])
        each = chunked_cross_entropy(hidden, head, batch[1])
        (slope,) = torch.autograd.grad(each.sum(), hidden, create_graph=True)
        return each + slope.square().sum((1, 2))

    model = nn.ModuleList([body])
    model.register_parameter("head", head)
    step = partial(Clipper(model, 1, engine=engine).backward, losses) if engine else losses
    with pytest.raises(RuntimeError, match="differentiated twice"):
        step((x, labels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 7)}, "with the width of hidden"),
        ({"labels": torch.zeros(3, 5, dtype=torch.long)}, "one for each row of hidden"),
        ({"bias": torch.zeros(3)}, "bias must have shape"),
        ({"chunk": 0}, "chunk must be a positive number"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"label_smoothing": 2.0}, "label_smoothing must be between 0 and 1"),
        ({"reduction": "total"}, "reduction must be"),
    ],
)
def test_bad_input(change, message):
    hidden, weight, labels, bias = inputs()
    given = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias, **change}
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**given)


class Language(nn.Module):
    """Embeddings, a layer, a head; `kind` says what is special about the head."""

    def __init__(self, kind):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, WORDS, bias=kind in ("bias", "frozen weight"))
        self.kind = kind
        if kind.startswith("tied"):
            self.head.weight = self.table.weight
        if kind.startswith("frozen"):
            self.head.weight.requires_grad_(False)

    def forward(self, batch, loss=chunked_cross_entropy):
        ids, labels = batch
        hidden = self.body(self.table(ids))
        weight, bias = self.head.weight, self.head.bias
        if self.kind == "derived":
            weight = weight * 2
        if self.kind == "softcap":
            return loss(hidden, weight, labels, bias, softcap=1.5, label_smoothing=0.1)
        if self.kind == "tied twice":
            first = loss(hidden, weight, labels, chunk=7)
            also = F.linear(hidden, weight).sin().mean((1, 2))
            return first + loss(hidden.cos(), weight, labels) + also
        if self.kind == "flipped":
            return loss(hidden.flip(0), weight, labels.flip(0), bias).flip(0)
        return loss(hidden, weight, labels, bias)


KINDS = [
    "plain", "bias", "tied", "tied twice", "frozen", "frozen weight", "derived", "softcap",
    "flipped",
]  # fmt: skip


def words(tokens):
    torch.manual_seed(1)
    ids, labels = torch.randint(0, WORDS, (2, 6, tokens)).unbind(0)
    labels[0, 1:] = -100
    labels[2] = -100
    return ids, labels


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b", [1, 2, 4])
@pytest.mark.parametrize("tokens", [3, 20])  # few: pairs of rows; many: parts of the vocabulary
def test_the_single_pass_is_exact(kind, b, tokens, monkeypatch):
    monkeypatch.setattr("microclip.engines.single_pass.head.ELEMENTS", 300)  # many parts
    model, batch = Language(kind).double(), words(tokens)
    parameters = [p for p in model.parameters() if p.requires_grad]
    cut = list(zip(*(each.split(b) for each in batch), strict=True))
    gradients = reference.microbatch_gradients(partial(model, loss=from_table), parameters, cut)
    sizes = [len(each[0]) for each in cut]
    wanted, norms, _ = reference.clipped_gradient(gradients, sizes, reference.WEIGH["MinNorm()"])
    outcome = Clipper(model, b, engine="fused", verify="never").backward(model, batch)
    assert outcome.engine == "fused"
    torch.testing.assert_close(outcome.norms.tolist(), norms, rtol=1e-10, atol=1e-14)
    properties.assert_close([p.grad for p in parameters], wanted, 1e-10)


@pytest.mark.parametrize("engine", ["stream", "two_pass", "auto"])
def test_other_engines(engine):
    model, batch = Language("tied").double(), words(4)
    parameters = list(model.parameters())
    cut = list(zip(*(each.split(2) for each in batch), strict=True))
    gradients = reference.microbatch_gradients(partial(model, loss=from_table), parameters, cut)
    wanted, *_ = reference.clipped_gradient(gradients, [2] * 3, reference.WEIGH["MinNorm()"])
    Clipper(model, 2, engine=engine).backward(model, batch)
    properties.assert_close([p.grad for p in parameters], wanted, 1e-10)


def test_checks_pass():
    model = Language("tied twice").double()
    clipper = Clipper(model, 2, engine="fused", verify="always")
    for tokens in (3, 20, 5):
        assert clipper.backward(model, words(tokens)).engine == "fused"


def test_a_micro_batch_that_is_not_finite_is_left_out():
    model, (ids, labels) = Language("plain").double(), words(4)
    model.table.weight.data[0] = torch.nan
    ids[3] = 0
    ids[[0, 1, 2, 4, 5]] = ids[[0, 1, 2, 4, 5]].clamp(min=1)
    with pytest.warns(RuntimeWarning, match="not finite"):
        outcome = Clipper(model, 1, engine="fused", nonfinite="skip").backward(model, (ids, labels))
    assert outcome.skipped.tolist() == [False] * 3 + [True] + [False] * 2
    assert model.head.weight.grad.isfinite().all()


def test_labels_of_other_examples_are_refused():
    model = Language("plain").double()

    def mixed(batch):
        ids, labels = batch
        return chunked_cross_entropy(
            model.body(model.table(ids)), model.head.weight, labels.flip(0)
        )

    with pytest.raises(NotImplementedError, match="whether the labels"):
        Clipper(model, 1, engine="fused").backward(mixed, words(4))


def test_tokens_with_labels_only():
    """Rows that are chosen by a mask: each example has another number of them."""
    model = Language("tied").double()

    def losses(batch, loss=token_losses):
        ids, labels = batch
        real = labels != -100
        hidden = model.body(model.table(ids))
        each = loss(hidden[real], model.head.weight, labels[real])
        return torch.zeros_like(hidden[..., 0]).masked_scatter(real, each).sum(1)

    def plainly(batch):
        return losses(batch, lambda h, w, y: F.cross_entropy(h @ w.mT, y, reduction="none"))

    ids, labels = words(5)
    labels[2, 0] = 3
    cut = list(zip(ids.split(1), labels.split(1), strict=True))
    parameters = list(model.parameters())
    gradients = reference.microbatch_gradients(plainly, parameters, cut)
    wanted, *_ = reference.clipped_gradient(gradients, [1] * 6, reference.WEIGH["MinNorm()"])
    try:
        Clipper(model, 1, engine="fused").backward(losses, (ids, labels))
    except NotImplementedError as error:
        pytest.fail(str(error))
    properties.assert_close([p.grad for p in parameters], wanted, 1e-10)


def test_peak_memory():
    """A table of logits takes 32 MB, and its gradient as much again; a chunk takes 4 MB."""
    torch.manual_seed(0)
    table, head = nn.Embedding(100, 16), nn.Linear(16, 20_000, bias=False)
    model = nn.ModuleList([table, head])
    batch = torch.randint(0, 100, (4, 100)), torch.randint(0, 20_000, (4, 100))

    def losses(batch, chunk=50):
        hidden = table(batch[0]).tanh()
        return chunked_cross_entropy(hidden, head.weight, batch[1], chunk=chunk)

    def from_logits(batch):
        logits = head(table(batch[0]).tanh())
        return F.cross_entropy(logits.mT, batch[1], reduction="none").mean(1)

    found = {}
    for loss_fn in (losses, from_logits):
        clipper = Clipper(model, 1, engine="fused", verify="never")
        for _ in range(2):
            model.zero_grad()
            clipper.backward(loss_fn, batch)
        model.zero_grad()
        found[loss_fn.__name__] = peak_memory(partial(clipper.backward, loss_fn, batch))
    table_bytes = 4 * 100 * 20_000 * 4

    assert found["from_logits"] > 2 * table_bytes
    assert found["losses"] < 1.6 * table_bytes
