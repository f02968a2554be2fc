"""Every engine against the twin, every property, over rules x models x sizes x dtypes.

Rules are pure functions of the norms, so the default run has two of them everywhere, one that
streams and one that does not, and all of them on two models. The full run has every cell.
"""

import pytest
import torch

from microclip import Clipper
from microclip.rules import Keep, MinNorm

import properties
import zoo
from properties import RESCALING, RULES, SCALE_FREE, Cell, engines_for

DTYPES = (torch.float32, torch.float64)
EVERYWHERE = ("MinNorm()", "Median(rescale=False)")
ALL_RULES = ("mlp", "gpt")


def cells(models=zoo.MODELS, rules=RULES, sizes=(2,), dtypes=DTYPES, **options):
    return [
        Cell(model, rule, engine, b, dtype, **options)
        for model in models
        for dtype in dtypes
        for b in sizes
        for rule in rules
        for engine in engines_for(rule, model)
    ]


def over(*found):
    cells = [
        pytest.param(cell, marks=[] if is_default(cell) else [pytest.mark.full], id=str(cell))
        for some in found
        for cell in some
    ]
    return pytest.mark.parametrize("cell", cells)


def is_default(cell):
    rounded_and_odd = cell.dtype == torch.float32 and cell.b in (1, 7)
    return (cell.rule in EVERYWHERE or cell.model in ALL_RULES) and not rounded_and_odd


@over(
    cells(sizes=(1, 2, 3, 7)),
    cells(sizes=(2,), domains=True),
    cells(sizes=(3,), reduction="sum", dtypes=(torch.float64,)),
)
def test_equals_twin(cell):
    properties.assert_equals_twin(cell)


@over(cells(rules=SCALE_FREE, sizes=(7, 16, None), dtypes=(torch.float32,)))
def test_one_microbatch_is_plain(cell):
    properties.assert_one_microbatch_is_plain(cell)


@over(cells(dtypes=(torch.float64,)))
def test_permutation_invariant(cell):
    properties.assert_permutation_invariant(cell)


@over(cells(rules=[*SCALE_FREE, "Unit()"], dtypes=(torch.float64,)))
def test_scales_with_loss(cell):
    properties.assert_scales_with_loss(cell)


@over(cells(sizes=(1, 3, 16), models=["mlp", "gpt", "lstm"], dtypes=(torch.float64,)))
def test_sum_is_mean_times_count(cell):
    properties.assert_sum_is_mean_times_count(cell)


@over(cells(sizes=(3,), dtypes=(torch.float64,)), cells(domains=True, dtypes=(torch.float32,)))
def test_clipped_norms_meet_bound(cell):
    properties.assert_clipped_norms_meet_bound(cell)


@over(cells(dtypes=(torch.float64,)))
def test_domains_separate(cell):
    properties.assert_domains_separate(cell)


@over(cells(rules=["MinNorm()", "Median(rescale=False)"], sizes=(3,), dtypes=(torch.float32,)))
def test_grad_survives_an_error(cell):
    properties.assert_grad_survives_an_error(cell)


@over(cells(rules=["MinNorm()", "Median(rescale=False)"], dtypes=(torch.float32,)))
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
