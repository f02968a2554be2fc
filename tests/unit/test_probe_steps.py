"""Steps simulated from the Gram matrix against steps of materialized gradients, for every b."""

import math
from functools import cache

import pytest
import torch

from microclip import Clipper
from microclip.microbatches import cut as cut_batch
from microclip.probing import gram_of
from microclip.probing.simulation import (
    Draws,
    Pool,
    clip,
    cut,
    draws_from,
    interval,
    simulate,
    weigh,
)
from microclip.rules import Automatic, Fixed, Mean, Median, MinNorm, Quantile, Rule, Unit, apply

import zoo
from per_example import losses, materialized

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-11}
MODELS = (
    "mlp", "cnn_groupnorm", "convolutions", "low_rank", "gpt", "tied_embeddings", "lstm",
    "complex_parameters", "hf_gpt2", "hf_t5", "hf_vit", "hf_wav2vec2_bert",
)  # fmt: skip
RULES = [MinNorm(), Unit(), Median(), Mean(rescale=True), Quantile(0.3), Fixed(0.7), Automatic(0.1)]


@cache
def gradients(name, dtype):
    case = zoo.case(name, dtype)
    return gram_of(case.model, losses(case), [case.batch]).matrix, materialized(case)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_norms_weights_and_products_equal_those_of_materialized_gradients(name, dtype):
    matrix, rows = gradients(name, dtype)
    tolerance = TOLERANCES[dtype]
    order = torch.tensor([[4, 0, 6, 2, 5], [1, 3, 2, 0, 6]])
    held_out = torch.ones(2, 7, dtype=torch.float64).scatter_(1, order, 0.0) / 2
    draws = Draws.of(matrix, order, held_out)
    for b in range(1, 6):
        for rule in RULES:
            found = clip(cut(draws, b), rule)
            for number in range(2):
                g = rows[held_out[number] > 0].mean(0)
                parts = list(rows[order[number]].split(b))
                means = torch.stack([part.mean(0) for part in parts])
                norms = means.norm(dim=1)
                sizes = torch.tensor([float(len(part)) for part in parts], dtype=torch.float64)
                weights = rule.weights(norms, sizes)
                step = (sizes / 5 * weights) @ means
                near(found.norms[number], norms, tolerance)
                near(found.weights[number], weights, tolerance)
                near(found.bounds[number], rule.bound(norms, sizes), tolerance)
                assert abs(found.along[number] - g @ step) <= tolerance * g.norm() * step.norm()
                assert abs(found.square[number] - step @ step) <= tolerance * step @ step


def near(found, wanted, tolerance):
    assert torch.allclose(found, wanted, rtol=tolerance, atol=0.0), (found, wanted)


@pytest.mark.parametrize("b", [1, 2, 3, 5, 7])
def test_a_simulated_step_is_the_clippers(b):
    """The same examples in the same order: norms, weights, bound and length of the gradient."""
    case = zoo.case("gpt", torch.float64)
    matrix, _ = gradients("gpt", torch.float64)
    order = torch.tensor([[3, 1, 4, 0, 5, 2, 6]])
    draws = Draws.of(matrix, order, torch.full((1, 7), 1 / 7, dtype=torch.float64))
    found = clip(cut(draws, b), MinNorm())
    batch = tuple(leaf[order[0]] for leaf in case.batch)
    outcome = Clipper(case.model, microbatch_size=b).backward(case.loss_fn, batch)
    length = sum(p.grad.square().sum() for p in case.parameters).sqrt()
    case.model.zero_grad()
    near(found.norms[0], outcome.norms, 1e-11)
    near(found.weights[0], outcome.weights, 1e-11)
    near(found.bounds[0], outcome.bound, 1e-11)
    near(found.square[0].sqrt(), length, 1e-11)


def test_by_hand():
    """Gradients (3, 0) and (0, 4), and (1, 1) held out: a 3-4-5 triangle."""
    rows = torch.tensor([[3.0, 0.0], [0.0, 4.0], [1.0, 1.0]], dtype=torch.float64)
    draws = Draws.of(
        rows @ rows.T, torch.tensor([[0, 1]]), torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    )
    one = clip(cut(draws, 1), MinNorm())  # (3, 0) stays, (0, 4) becomes (0, 3): their mean
    assert one.norms.tolist() == [[3.0, 4.0]]
    assert one.weights.tolist() == [[1.0, 0.75]]
    assert one.along.item() == pytest.approx(1.5 + 1.5)
    assert one.square.item() == pytest.approx(1.5**2 + 1.5**2)
    both = clip(cut(draws, 2), MinNorm())  # the mean (1.5, 2)
    assert both.norms.tolist() == [[2.5]]
    assert both.along.item() == pytest.approx(3.5)
    assert both.square.item() == pytest.approx(6.25)


def test_signal_excludes_the_product_of_an_example_with_itself():
    """Gradients 1, 2, 6: pairs give (2 + 6 + 12) / 3."""
    rows = torch.tensor([[1.0], [2.0], [6.0], [0.0]], dtype=torch.float64)
    held_out = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64) / 3
    draws = Draws.of(rows @ rows.T, torch.tensor([[3]]), held_out)
    assert draws.held.item() == pytest.approx(9.0)
    assert draws.signal.item() == pytest.approx(20 / 3)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_are_applied_row_by_row(rule):
    norms = torch.rand(20, 6, dtype=torch.float64)
    norms[3, 2] = 0.0
    norms[4] = 0.0
    sizes = torch.tensor([4.0, 4, 4, 4, 4, 1], dtype=torch.float64)
    weights, bounds = weigh(rule, norms, sizes)
    for row in range(20):
        verdict = apply(rule, norms[row], sizes, "propagate")
        assert torch.equal(weights[row], verdict.weights)
        assert torch.equal(bounds[row], verdict.bound)


class ReadsValues(Rule):
    """A rule that cannot be vectorized: it reads its numbers on the host."""

    def weights(self, norms, sizes):
        smallest = min(norm for norm in norms.tolist() if not math.isnan(norm))
        return smallest / norms


def test_rules_that_read_values_work_too():
    norms = torch.rand(9, 5, dtype=torch.float64) + 0.1
    sizes = torch.ones(5, dtype=torch.float64)
    found, wanted = weigh(ReadsValues(), norms, sizes), weigh(MinNorm(), norms, sizes)
    assert torch.allclose(found[0], wanted[0])
    assert torch.allclose(found[1], wanted[1])


@pytest.mark.parametrize("apart", [False, True])
def test_no_example_is_in_a_step_and_held_out(apart):
    held = torch.arange(20) >= 14 if apart else None
    pool = Pool(20, 8, held)
    generator = torch.Generator().manual_seed(0)
    count = 0
    for steps, held_out in draws_from(pool, 300, generator):
        count += len(steps)
        assert steps.shape[1] == 8
        assert all(len(set(row)) == 8 for row in steps.tolist())
        assert torch.equal(held_out.gather(1, steps), torch.zeros(steps.shape, dtype=torch.float64))
        assert torch.allclose(held_out.sum(1), torch.ones(len(steps), dtype=torch.float64))
        assert (held_out > 0).sum(1).unique().tolist() == [6 if apart else 12]
        if apart:
            assert steps.max() < 14
    assert count == 300


def population(examples, generator, draggers=0.2, noise=5.0, length=20.0, width=200):
    """Gradients of mean e_1 with noise, and draggers that point anywhere."""
    shape, options = (examples, width), {"generator": generator, "dtype": torch.float64}
    benign = noise / width**0.5 * torch.randn(shape, **options)
    benign[:, 0] += 1
    wild = length / width**0.5 * torch.randn(shape, **options)
    return torch.where(torch.rand(examples, 1, generator=generator) < draggers, wild, benign)


def judged(rows, batch_size, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pool = Pool(len(rows), batch_size)
    return simulate(rows @ rows.T, pool, sizes, {"min": MinNorm()}, 128, 400, generator)


def test_eff_is_that_of_the_population():
    """Few examples give on average, and within intervals, what very many give directly."""
    generator = torch.Generator().manual_seed(3)
    along, square = dict.fromkeys((1, 4, 32), 0.0), dict.fromkeys((1, 4, 32), 0.0)
    for _ in range(2000):
        rows = population(32, generator)
        for b in along:
            means = rows.view(-1, b, 200).mean(1)
            norms = means.norm(dim=1, keepdim=True)
            step = (norms.min() / norms * means).mean(0)
            along[b] += 0.8 * step[0].item() / 2000  # g = 0.8 e_1
            square[b] += step.square().sum().item() / 2000
    eff = {b: along[b] ** 2 / (0.64 * square[b]) for b in along}
    inside, estimates = 0, {1: [], 4: []}
    for seed in range(15):
        found = judged(population(256, generator), 32, [1, 4, 32], seed)
        assert found.stats["min", 32].gain == pytest.approx(1.0, abs=1e-9)
        for b, values in estimates.items():
            stats = found.stats["min", b]
            values.append(stats.gain)
            low, high = interval(stats.gains)
            inside += low <= eff[b] / eff[32] <= high
    assert inside >= 26  # of 30, at 95 %
    for b, values in estimates.items():
        middle = sorted(values)[7]
        assert middle == pytest.approx(eff[b] / eff[32], rel=0.15)


def test_without_draggers_and_with_equal_norms_no_size_matters():
    generator = torch.Generator().manual_seed(0)
    found = judged(population(128, generator, draggers=0.0), 32, [1, 4, 32])
    assert found.stats["min", 1].gain == pytest.approx(1.0, abs=0.05)
    assert found.stats["min", 4].gain == pytest.approx(1.0, abs=0.05)


def test_a_scale_of_all_gradients_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    rows = population(128, generator)
    one, other = (judged(k * rows, 32, [2, 8]).stats["min", 2] for k in (1.0, 1e-6))
    assert one.gain == pytest.approx(other.gain, rel=1e-9)
    assert one.efficiency == pytest.approx(other.efficiency, rel=1e-9)
    assert one.bound == pytest.approx(1e6 * other.bound, rel=1e-9)


def test_stats_by_hand():
    """Orthogonal gradients of norms 1 and 2, alternating: the effect of MinNorm is known."""
    rows = torch.eye(40, dtype=torch.float64)
    rows[20:] *= 2
    held = torch.arange(40).remainder(20) >= 10  # 10 of each kind make the steps
    generator = torch.Generator().manual_seed(0)
    pool = Pool(40, 20, held)
    found = simulate(rows @ rows.T, pool, [1], {"min": MinNorm()}, 16, 16, generator)
    stats = found.stats["min", 1]
    assert stats.bound == 1.0
    assert stats.bound_spread == 0.0
    assert stats.mean_weight == pytest.approx(0.75)
    assert stats.effective_sample_size == pytest.approx(20 * 0.75**2 / ((1 + 0.25) / 2))
    assert stats.norms.tolist() == [1.0, 1.0, 2.0]
    assert found.signal == pytest.approx(0.0)
    assert stats.alignment == 0.0


def test_intervals_do_not_hide_what_is_unknown():
    values = torch.linspace(0, 1, 201)
    low, high = interval(values)
    assert low == pytest.approx(0.025, abs=0.001)
    assert high == pytest.approx(0.975, abs=0.001)
    values[:20] = torch.nan
    assert interval(values) == (-math.inf, math.inf)


def test_batches_cut_in_order_are_what_regrouping_takes():
    """The zoo's own batch, cut in its own order, is one of the draws."""
    case = zoo.case("mlp", torch.float64)
    matrix, rows = gradients("mlp", torch.float64)
    draws = Draws.of(matrix, torch.arange(7)[None], torch.full((1, 7), 1 / 7, dtype=torch.float64))
    for b in (2, 3):
        sizes = [part.size for part in cut_batch(case.batch, b)]
        assert cut(draws, b).sizes.tolist() == sizes
        wanted = torch.stack([part.mean(0).norm() for part in rows.split(b)])
        near(cut(draws, b).norms[0], wanted, 1e-11)
