"""The rules by hand-checkable numbers, and the edge-case table of `microclip.rules` row by row."""

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor

from microclip import Clipper, rules
from microclip.rules import apply

from properties import RULES, SCALE_FREE
from reference import WEIGH

NAN, INF = math.nan, math.inf


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def weights(rule, norms, nonfinite="propagate", sizes=None):
    norms = vector(*norms)
    return apply(
        rule, norms, torch.ones_like(norms) if sizes is None else vector(*sizes), nonfinite
    )


@pytest.mark.parametrize(
    ("rule", "norms", "expected", "bound"),
    [
        (rules.MinNorm(), [3, 4, 6], [1, 0.75, 0.5], 3),
        (rules.Unit(), [0.5, 4], [2, 0.25], 1),
        (rules.Fixed(2), [1, 2, 8], [1, 1, 0.25], 2),
        (rules.Fixed(INF), [1, 2, 8], [1, 1, 1], INF),
        (rules.Fixed(1e-3), [1, 2], [1e-3, 5e-4], 1e-3),
        (rules.Median(), [1, 2, 8], [1, 1, 0.25], 2),
        (rules.Median(), [1, 2, 4, 8], [1, 1, 0.5, 0.25], 2),
        (rules.Median(rescale=True), [1, 2, 8], [2, 1, 0.25], 2),
        (rules.Mean(), [1, 3], [1, 2 / 3], 2),
        (rules.Mean(rescale=True), [1, 3], [2, 2 / 3], 2),
        (rules.Quantile(0), [3, 4, 6], [1, 0.75, 0.5], 3),
        (rules.Quantile(1), [3, 4, 6], [1, 1, 1], 6),
        (rules.Quantile(0.75), [1, 2, 4, 8], [1, 1, 1, 0.5], 4),
        (rules.Automatic(1.0), [1, 3], [0.5, 0.25], 0.75),
        (rules.Automatic(0), [0.5, 4], [2, 0.25], 1),
    ],
    ids=repr,
)
def test_by_hand(rule, norms, expected, bound):
    verdict = weights(rule, norms)
    torch.testing.assert_close(verdict.weights, vector(*expected))
    assert verdict.bound.item() == pytest.approx(bound)


def test_sizes_count():
    """A micro-batch of three counts like three of one, for the statistics that average."""
    for rule in (rules.Median(), rules.Mean(), rules.Quantile(0.7)):
        once = weights(rule, [5, 1], sizes=[3, 1])
        thrice = weights(rule, [5, 5, 5, 1])
        assert once.bound == thrice.bound


def test_quantile_does_not_miss_a_whole_number_by_rounding():
    norms = list(range(1, 31))
    assert weights(rules.Quantile(0.1), norms).bound == 3  # 0.1 * 30 = 3.0000000000000004


@pytest.mark.parametrize("name", RULES)
class TestEdgeCaseTable:
    def test_one_zero(self, name):
        with_zero, without = weights(RULES[name], [3, 0, 4]), weights(RULES[name], [3, 4])
        assert with_zero.weights[1] == 0
        assert with_zero.weights[[0, 2]].tolist() == without.weights.tolist()
        assert with_zero.bound == without.bound

    def test_all_zero(self, name):
        verdict = weights(RULES[name], [0, 0])
        assert verdict.weights.tolist() == [0, 0]
        assert verdict.bound == 0

    def test_one_microbatch(self, name):
        verdict = weights(RULES[name], [5])
        if name in SCALE_FREE:
            assert verdict.weights.item() == 1
            assert verdict.bound == 5
        else:
            assert verdict.weights.tolist() == pytest.approx(WEIGH[name]([5.0], [1]))
            assert verdict.weights.item() < 1

    def test_tiny(self, name):
        verdict = weights(RULES[name], [1e-40, 2e-40])
        assert verdict.weights.tolist() == pytest.approx(WEIGH[name]([1e-40, 2e-40], [1, 1]))

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_nonfinite_propagates(self, name, bad):
        verdict = weights(RULES[name], [3, bad, 4])
        assert verdict.weights.isnan().all()
        assert verdict.bound.isnan()
        assert not verdict.skipped.any()

    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_nonfinite_is_skipped(self, name, bad):
        verdict, without = weights(RULES[name], [3, bad, 4], "skip"), weights(RULES[name], [3, 4])
        assert verdict.weights.tolist() == [without.weights[0], 0, without.weights[1]]
        assert verdict.bound == without.bound
        assert verdict.skipped.tolist() == [False, True, False]

    def test_all_are_skipped(self, name):
        verdict = weights(RULES[name], [NAN, INF], "skip")
        assert verdict.weights.tolist() == [0, 0]
        assert verdict.bound == 0

    def test_huge_spread(self, name):
        verdict = weights(RULES[name], [1e-15, 1e15])
        assert verdict.weights.tolist() == pytest.approx(WEIGH[name]([1e-15, 1e15], [1, 1]))
        assert (verdict.weights > 0).all()

    def test_permutation(self, name):
        norms, order = [3.0, 1.0, 7.0, 5.0], [2, 0, 3, 1]
        moved = weights(RULES[name], [norms[i] for i in order])
        assert moved.weights.tolist() == weights(RULES[name], norms).weights[order].tolist()


def test_factor_is_what_streaming_needs():
    """weights = factor x one common number, for every rule that says it streams."""
    norms = vector(3, 1, 7, 5)
    for rule in RULES.values():
        if rule.streams:
            ratio = rule.weights(norms, torch.ones(4)) / rule.factor(norms)
            torch.testing.assert_close(ratio, ratio[:1].expand(4))
    assert [name for name, rule in RULES.items() if not rule.streams] == [
        "Median(rescale=False)",
        "Mean(rescale=False)",
        "Quantile(q=0.25, rescale=False)",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules.Fixed(0), "greater than 0, but got 0"),
        (lambda: rules.Fixed(-1.0), "but got -1.0"),
        (lambda: rules.Fixed(NAN), "but got nan"),
        (lambda: rules.Fixed("1"), "but got '1'"),
        (lambda: rules.Fixed(True), "but got True"),
        (lambda: rules.Quantile(1.5), "between 0 and 1, but got 1.5"),
        (lambda: rules.Quantile(None), "but got None"),
        (lambda: rules.Automatic(-0.1), "finite gamma >= 0, but got -0.1"),
        (lambda: rules.Automatic(INF), "but got inf"),
    ],
)
def test_bad_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class TestOwnRule:
    def test_weights_are_enough(self):
        class Halve(rules.Rule):
            def weights(self, norms, sizes):
                return 0.5 * torch.ones_like(norms)

        verdict = weights(Halve(), [2, 6, 0])
        assert not Halve().streams
        assert verdict.weights.tolist() == [0.5, 0.5, 0]
        assert verdict.bound == 3  # the longest that is left
        assert Halve().state_dict() == {}
        Halve().load_state_dict({})
        with pytest.raises(NotImplementedError, match="Halve has no factor"):
            Halve().factor(vector(1))
        with pytest.raises(ValueError, match=r"Halve has no state.*\['seen'\]"):
            Halve().load_state_dict({"seen": 1})

    def test_wrong_shape(self):
        class Scalar(rules.Rule):
            def weights(self, norms, sizes):
                return norms.min()

        with pytest.raises(ValueError, match=r"each of the 2 norms.*shape \(\)"):
            weights(Scalar(), [1, 2])

    def test_no_weights(self):
        with pytest.raises(NotImplementedError, match="must define weights"):
            weights(rules.Rule(), [1, 2])


STREAMING = [rules.MinNorm(), rules.Unit(), rules.Fixed(0.5), rules.Automatic(), rules.Keep()]


@pytest.mark.parametrize("rule", [*STREAMING, rules.NormHistory(100)], ids=repr)
@pytest.mark.parametrize("first", ["zero", "not finite"])
@pytest.mark.parametrize("how", ["stream", "fused", "fused in chunks", "auto", "fold", "domains"])
def test_a_first_microbatch_that_does_not_count(rule, first, how):
    """It gives a streamed sum nothing to refer to, and must not take the others with it."""
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    domains = ["a", "a", "a", "b", "b", "b", "b", "b"] if how == "domains" else None
    if first == "zero":
        y[0] = -100
    else:
        x[0] = math.nan

    def gradient(engine, folds=False, **options):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).double()

        def losses(batch):
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        clipper = Clipper(
            model, 1, rule=copy.deepcopy(rule), engine=engine, nonfinite="skip", **options
        )
        ids = range(8)
        if folds:
            for part in (slice(0, 3), slice(3, 8)):
                clipper.fold(losses, (x[part], y[part]), ids=list(ids)[part])
            clipper.finish()
        else:
            clipper.backward(losses, (x, y), ids=ids, domains=domains)
        return model.weight.grad

    engine = how if how in ("stream", "fused", "auto") else how.split()[0]
    options = {"memory_budget": 1} if "chunks" in how else {}
    engine = "stream" if engine in ("fold", "domains") else engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a micro-batch was skipped, or does not fit
        found = gradient(engine, folds=how == "fold", **options)
        expected = gradient("two_pass")
    assert expected.norm() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
