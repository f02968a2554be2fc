"""Every engine against the twin, every property, over rules x models x sizes x dtypes.

Rules are pure functions of the norms, so the default run has two of them everywhere, one that
streams and one that does not, and all of them on two models. What follows from equality with the
twin is tested on these two models alone. The full run has every cell.
"""

import pytest
import torch

from microclip import Clipper
from microclip.rules import Keep, MinNorm

import properties
import zoo
from properties import RESCALING, RULES, SCALE_FREE, Cell, engines_for

SINGLE, DOUBLE = (torch.float32,), (torch.float64,)
EVERYWHERE = ("MinNorm()", "Median(rescale=False)")
ALL_RULES = ("mlp", "gpt")
OTHERS = [name for name in zoo.MODELS if name not in ALL_RULES]


def cells(models=zoo.MODELS, rules=RULES, sizes=(2,), dtypes=SINGLE + DOUBLE, **options):
    return [
        Cell(model, rule, engine, b, dtype, **options)
        for model in models
        for dtype in dtypes
        for b in sizes
        for rule in rules
        for engine in engines_for(rule, model)
    ]


def over(*found, everywhere=EVERYWHERE, rest=()):
    """`everywhere`: rules that the default run has on all models; `rest`: cells that it has not."""
    default = [cell for some in found for cell in some]
    chosen = {cell for cell in default if cell.rule in everywhere or cell.model in ALL_RULES}
    cells = [
        pytest.param(cell, marks=[] if cell in chosen else [pytest.mark.full], id=str(cell))
        for cell in [*default, *rest]
    ]
    return pytest.mark.parametrize("cell", cells)


@over(
    cells(sizes=(1, 3), dtypes=DOUBLE),
    cells(dtypes=SINGLE),
    cells(domains=True, dtypes=DOUBLE),
    cells(ALL_RULES, sizes=(3,), reduction="sum", dtypes=DOUBLE),
    rest=[
        *cells(sizes=(2, 7), dtypes=DOUBLE),
        *cells(sizes=(1, 3, 7), dtypes=SINGLE),
        *cells(domains=True, dtypes=SINGLE),
        *cells(OTHERS, sizes=(3,), reduction="sum", dtypes=DOUBLE),
    ],
)
def test_equals_twin(cell):
    properties.assert_equals_twin(cell)


@over(
    cells(rules=SCALE_FREE, sizes=(None,), dtypes=SINGLE),
    cells(ALL_RULES, rules=SCALE_FREE, sizes=(7, 16), dtypes=SINGLE),
    rest=cells(OTHERS, rules=SCALE_FREE, sizes=(7, 16), dtypes=SINGLE),
)
def test_one_microbatch_is_plain(cell):
    properties.assert_one_microbatch_is_plain(cell)


@over(cells(dtypes=DOUBLE), everywhere=())
def test_permutation_invariant(cell):
    properties.assert_permutation_invariant(cell)


@over(cells(rules=[*SCALE_FREE, "Unit()"], dtypes=DOUBLE), everywhere=())
def test_scales_with_loss(cell):
    properties.assert_scales_with_loss(cell)


@over(cells(["mlp", "gpt", "lstm"], sizes=(1, 3, 16), dtypes=DOUBLE), everywhere=())
def test_sum_is_mean_times_count(cell):
    properties.assert_sum_is_mean_times_count(cell)


@over(
    cells(sizes=(3,), dtypes=DOUBLE),
    cells(["mlp"], domains=True, dtypes=SINGLE),
    everywhere=(),
    rest=cells([name for name in zoo.MODELS if name != "mlp"], domains=True, dtypes=SINGLE),
)
def test_clipped_norms_meet_bound(cell):
    properties.assert_clipped_norms_meet_bound(cell)


@over(cells(dtypes=DOUBLE), everywhere=())
def test_domains_separate(cell):
    properties.assert_domains_separate(cell)


@over(cells(rules=EVERYWHERE, sizes=(3,), dtypes=SINGLE), everywhere=EVERYWHERE[:1])
def test_grad_survives_an_error(cell):
    properties.assert_grad_survives_an_error(cell)


@over(cells(rules=EVERYWHERE, dtypes=SINGLE), everywhere=EVERYWHERE[:1])
def test_adds_to_grad(cell):
    properties.assert_adds_to_grad(cell)


def test_every_rule_is_in_the_suite():
    from microclip import rules

    # those that weight examples have a suite of their own
    shipped = {n for n, kind in rules.KNOWN.items() if not issubclass(kind, rules.ExampleRule)}
    assert {type(rule).__name__ for rule in RULES.values()} | {"Keep"} == shipped
    assert set(RESCALING) < set(RULES)


@pytest.mark.parametrize("b", [1, 3, None])
@pytest.mark.parametrize("engine", ["stream", "two_pass", "fused", "auto"])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_keep_is_the_plain_gradient_with_norms(model, engine, b):
    case = zoo.case(model, torch.float64)
    loss_fn = case.each_loss_fn or case.loss_fn
    found = []
    for rule in (Keep(), MinNorm()):
        case.model.zero_grad()
        outcome = Clipper(case.model, b, rule=rule, engine=engine).backward(loss_fn, case.batch)
        found.append((outcome, [p.grad.clone() for p in case.parameters]))
    (kept, gradients), (clipped, _) = found
    case.model.zero_grad()
    loss_fn(case.batch).mean().backward()
    properties.assert_close(gradients, [p.grad for p in case.parameters], 1e-12)
    torch.testing.assert_close(kept.norms, clipped.norms)
    assert kept.weights.tolist() == [1.0] * len(kept)


@pytest.mark.parametrize("model", zoo.CANNOT_FUSE)
def test_what_cannot_be_fused_is_refused(model):
    """With a reason, and with nothing changed."""
    case = zoo.case(model, torch.float32)
    before = [b.clone() for b in case.model.buffers()]
    clipper = Clipper(case.model, 2, engine="fused")
    with pytest.raises(NotImplementedError, match=zoo.CANNOT_FUSE[model]):
        clipper.backward(case.each_loss_fn, case.batch)
    assert all(p.grad is None for p in case.parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.buffers(), strict=True))
