"""What must hold for every rule, engine, model, size and dtype, each as one assertion.

A cell is one combination of these. Engines and integrations still to come are put through the
same functions.
"""

from dataclasses import dataclass
from functools import cache

import torch

from microclip import Clipper, rules
from microclip.microbatches import cut

import reference
import zoo

RULES = {
    repr(rule): rule
    for rule in (
        rules.MinNorm(), rules.Unit(), rules.Fixed(0.5), rules.Median(), rules.Median(rescale=True),
        rules.Mean(), rules.Mean(rescale=True), rules.Quantile(0.25), rules.Automatic(),
    )
}  # fmt: skip
# weights do not change when all norms are multiplied by one number
SCALE_FREE = [name for name in RULES if name.startswith(("MinNorm", "Me", "Quantile"))]
# every gradient that counts comes out with the same norm
RESCALING = [name for name in RULES if name in ("MinNorm()", "Unit()") or "=True" in name]
DOMAINS = ["en", "de", "en", "de", "en", "fr", "en"]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def engines_for(rule_name, model="mlp"):
    engines = ["two_pass"]
    if RULES[rule_name].streams:
        engines.append("stream")
    if model not in zoo.CANNOT_FUSE:
        engines.append("fused")
    return engines


@dataclass(frozen=True)
class Cell:
    model: str
    rule: str
    engine: str
    b: int | None
    dtype: torch.dtype
    domains: bool = False
    reduction: str = "mean"

    def __str__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        domains = "-domains" if self.domains else ""
        return f"{self.model}-{self.rule}-{self.engine}-b{self.b}-{dtype}-{self.reduction}{domains}"

    @property
    def case(self):
        return zoo.case(self.model, self.dtype)

    @property
    def loss_fn(self):
        """One loss per example for the engine that needs it, else what the case has."""
        each = self.case.each_loss_fn
        return each if each is not None and self.engine == "fused" else self.case.loss_fn

    @property
    def labels(self):
        return DOMAINS if self.domains else None

    @property
    def tolerance(self):
        return TOLERANCE[self.dtype]

    def clipper(self, model=None, **options):
        options = {
            "rule": RULES[self.rule],
            "engine": self.engine,
            "reduction": self.reduction,
        } | options
        return Clipper(model or self.case.model, self.b, **options)

    def run(self, batch=None, loss_fn=None, domains=None, **options):
        """Return the gradient that a clipper leaves in empty `.grad`s, and the outcome."""
        case = self.case
        case.model.zero_grad(set_to_none=True)
        batch = case.batch if batch is None else batch
        outcome = self.clipper(**options).backward(
            loss_fn or self.loss_fn, batch, domains=domains or self.labels
        )
        gradient = [p.grad for p in case.parameters]
        case.model.zero_grad(set_to_none=True)
        return gradient, outcome


@cache
def stored_gradients(model, dtype, b, domains, each=False):
    """Return the twin's micro-batch gradients, sizes and domains; the same for all rules.

    `each`: from the loss per example, which need not round as the model's own mean does.
    """
    case = zoo.case(model, dtype)
    loss_fn = case.each_loss_fn if each and case.each_loss_fn else case.loss_fn
    pieces = cut(case.batch, b, domains=DOMAINS if domains else None)
    gradients = reference.microbatch_gradients(
        loss_fn, case.parameters, [piece.batch for piece in pieces]
    )
    return gradients, [piece.size for piece in pieces], [piece.domain for piece in pieces]


def assert_close(found, expected, tolerance):
    """Both have gradients for the same parameters, and differ by a small share of the norm."""
    assert [t is None for t in found] == [t is None for t in expected]
    difference = [
        None if f is None else reference.wide(f) - reference.wide(e)
        for f, e in zip(found, expected, strict=True)
    ]
    assert reference.norm(difference) <= tolerance * reference.norm(expected)


def assert_equals_twin(cell):
    gradients, sizes, domains = stored_gradients(
        cell.model, cell.dtype, cell.b, cell.domains, cell.engine == "fused"
    )
    expected, norms, weights = reference.clipped_gradient(
        gradients, sizes, reference.WEIGH[cell.rule], cell.reduction, cell.b, domains
    )
    found, outcome = cell.run()
    assert_close(found, expected, cell.tolerance)
    close = {"rtol": cell.tolerance, "atol": 0.0}
    torch.testing.assert_close(outcome.norms, torch.tensor(norms, dtype=torch.float64), **close)
    torch.testing.assert_close(outcome.weights, torch.tensor(weights, dtype=torch.float64), **close)
    assert outcome.sizes.tolist() == sizes
    assert list(outcome.domains) == domains


def assert_one_microbatch_is_plain(cell):
    """Bit for bit, whether the size is exactly the batch's, larger, or not given."""
    case = cell.case
    case.model.zero_grad(set_to_none=True)
    cell.loss_fn(case.batch).mean().backward()
    plain = [p.grad for p in case.parameters]
    found, outcome = cell.run()
    assert len(outcome) == 1
    for f, p in zip(found, plain, strict=True):
        assert (f is None and p is None) or torch.equal(f, p)


def assert_permutation_invariant(cell):
    """Micro-batches may come in any order; with seven examples the first six make whole ones."""
    case = cell.case
    whole = cut(case.batch, 6)[0].batch
    order = torch.tensor([4, 5, 0, 1, 2, 3])
    moved = (
        type(whole)({k: v[order] for k, v in whole.items()})
        if hasattr(whole, "items")
        else tuple(v[order] for v in whole)
    )
    assert_close(cell.run(moved)[0], cell.run(whole)[0], cell.tolerance)


def assert_scales_with_loss(cell, factor=8.0):
    """A loss k times as large gives a gradient k times as large; `Unit` does not notice."""
    scaled, _ = cell.run(loss_fn=lambda batch: factor * cell.loss_fn(batch))
    plain, _ = cell.run()
    expected = factor if cell.rule in SCALE_FREE else 1.0
    assert_close(scaled, [None if t is None else expected * t for t in plain], cell.tolerance)


def assert_sum_is_mean_times_count(cell):
    summed, outcome = Cell(**vars(cell) | {"reduction": "sum"}).run()
    count = int(outcome.sizes.sum()) / min(cell.b, zoo.EXAMPLES)
    mean, _ = cell.run()
    assert_close(summed, [None if t is None else count * t for t in mean], cell.tolerance)


def assert_clipped_norms_meet_bound(cell):
    _, outcome = cell.run()
    clipped = outcome.norms * outcome.weights
    if cell.rule in RESCALING:
        torch.testing.assert_close(clipped, outcome.bounds, rtol=1e-12, atol=0.0)
    else:
        assert (clipped <= outcome.bounds * (1 + 1e-12)).all()
    if cell.rule == "MinNorm()":
        for domain in set(outcome.domains):
            rows = [j for j, d in enumerate(outcome.domains) if d == domain]
            assert (outcome.bounds[rows] == outcome.norms[rows].min()).all()


def assert_domains_separate(cell):
    """The result is the sum of what each domain would have given alone, by its size."""
    together, _ = Cell(**vars(cell) | {"domains": True}).run()
    alone = Cell(**vars(cell) | {"domains": False})
    shares, gradients = [], []
    for piece in cut(cell.case.batch, None, domains=DOMAINS):
        gradient, _ = alone.run(piece.batch)
        gradients.append([None if t is None else reference.wide(t) for t in gradient])
        shares.append(piece.size / zoo.EXAMPLES)
    assert_close(together, reference.weighted_sum(gradients, shares), cell.tolerance)


def assert_grad_survives_an_error(cell):
    """`.grad` keeps its objects and values, and no hook stays, if the last micro-batch raises."""
    case = cell.case
    for p in case.parameters:
        p.grad = torch.full_like(p, 3.0)
    kept = [p.grad for p in case.parameters]
    calls = []

    def raises_at_the_end(batch):
        calls.append(batch)
        if cell.engine == "fused" or len(calls) == len(cut(case.batch, cell.b)):
            raise OSError("the data has gone")
        return cell.loss_fn(batch)

    clipper = cell.clipper()
    try:
        clipper.backward(raises_at_the_end, case.batch)
    except OSError:
        pass
    else:
        raise AssertionError("the error of loss_fn was swallowed")
    for p, before in zip(case.parameters, kept, strict=True):
        assert p.grad is before
        assert torch.equal(before, torch.full_like(p, 3.0))
        assert not p._post_accumulate_grad_hooks
        p.grad = None
    clipper.backward(cell.loss_fn, case.batch)  # and the clipper can go on
    case.model.zero_grad(set_to_none=True)


def assert_adds_to_grad(cell):
    """As `loss.backward()`: into the same tensor."""
    case = cell.case
    fresh, _ = cell.run()
    for p in case.parameters:
        p.grad = torch.full_like(p, 2.0)
    kept = [p.grad for p in case.parameters]
    cell.clipper().backward(cell.loss_fn, case.batch)
    for p, before, gradient in zip(case.parameters, kept, fresh, strict=True):
        assert p.grad is before
        added = torch.full_like(p, 2.0) if gradient is None else 2.0 + gradient
        assert torch.equal(p.grad, added)
    case.model.zero_grad(set_to_none=True)
