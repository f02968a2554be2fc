"""The domain guard: shares computed by hand, and warnings only where they are due."""

import math
import warnings

import numpy as np
import pytest

from microclip import guard
from microclip.ledger import Ledger

from ledgers import Row, write


def clipped(norms, ids, domains=None):
    """Rows weighted by the paper's rule, within domains if there are any."""
    domains = domains or [None] * len(norms)
    least = {d: min(n for n, e in zip(norms, domains, strict=True) if e == d) for d in domains}
    return [Row(i, n, least[d] / n, d) for i, n, d in zip(ids, norms, domains, strict=True)]


def uneven(steps, factor, noise=0.3, seed=0, domains=False):
    """Six micro-batches a step; those of "b", a third, have gradients `factor` times as long."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        norms = np.array([1, 1, 1, 1, factor, factor]) * np.exp(noise * draw.normal(size=6))
        ids = [[f"{'a' if j < 4 else 'b'}{draw.integers(50)}"] for j in range(6)]
        found.append(clipped(norms.tolist(), ids, list("aaaabb") if domains else None))
    return found


def first_letter(one):
    return one[0]


class TestByHand:
    STEPS = [  # noqa: RUF012
        [Row(["a"], 1.0, 1.0, "x"), Row(["b"], 1.0, 1.0, "x"), Row(["c"], 4.0, 0.25, "y")],
        [Row(["a"], 2.0, 0.5, "x"), Row(["b"], 2.0, 0.5, "x"), Row(["c"], 2.0, 0.5, "y")],
    ]

    def test_shares(self, tmp_path):
        found = guard.check(write(tmp_path, self.STEPS))
        y, x = found.domains.to_pylist()  # the one most held back first
        assert (y["domain"], x["domain"]) == ("y", "x")
        assert y["example_share"] == pytest.approx(1 / 3)
        assert y["weight_share"] == pytest.approx((0.25 / 2.25 + 1 / 3) / 2)
        assert y["ratio"] == pytest.approx(y["weight_share"] / y["example_share"])
        assert x["ratio"] == pytest.approx((1 - y["weight_share"]) / (2 / 3))
        assert (x["examples"], y["examples"], y["steps"]) == (4, 2, 2)
        assert y["suppression"] == pytest.approx((0.75 + 0) / 2)
        assert y["log_norm_90"] == pytest.approx(math.log(4), abs=0.02)

    def test_over_time(self, tmp_path):
        found = guard.check(write(tmp_path, self.STEPS)).over_time
        rows = [r for r in found.to_pylist() if r["domain"] == "y" and r["examples"]]
        assert [r["first_step"] for r in rows] == [0, 1]
        assert [r["ratio"] for r in rows] == pytest.approx([3 * 0.25 / 2.25, 1])
        assert [r["suppression"] for r in rows] == pytest.approx([0.75, 0])
        empty = [r for r in found.to_pylist() if not r["examples"]]
        assert empty
        assert all(r["ratio"] is r["log_norm_50"] is None for r in empty)

    def test_mixed_microbatches_count_by_example(self, tmp_path):
        steps = [[Row(["a", "a2", "b"], 1.0, 1.0), Row(["b2", "b3", "a3"], 2.0, 0.5)]]
        found = guard.check(write(tmp_path, steps), first_letter)
        shares = {r["domain"]: r["weight_share"] for r in found.domains.to_pylist()}
        assert shares == pytest.approx({"a": 2.5 / 4.5, "b": 2 / 4.5})

    def test_times_cover_all_steps(self, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", guard.DomainWarning)
            found = guard.check(write(tmp_path, uneven(37, 3.0)), first_letter).over_time
        first, last = (found[c].to_pylist()[::2] for c in ("first_step", "last_step"))
        assert (first[0], last[-1]) == (0, 36)
        assert all(b == a + 1 for a, b in zip(last[:-1], first[1:], strict=True))
        assert sum(found["examples"].to_pylist()) == 37 * 6


class TestWarning:
    def test_held_back(self, tmp_path):
        path = write(tmp_path, uneven(200, 3.0))
        with pytest.warns(guard.DomainWarning, match="holds the domain 'b' back.*domains= to") as w:
            found = guard.check(path, first_letter)
        assert len(w) == len(found.findings) == 1
        finding = found.findings[0]
        assert (finding.domain, finding.steps, str(found)) == ("b", 200, finding.message)
        assert finding.low < finding.ratio < finding.high < 0.8
        # weights of a third of the examples are a third: 1/3 / (2/3 + 1/3 * 1/3) = 3/7 of its share
        assert finding.ratio == pytest.approx(3 / 7, abs=0.05)
        assert "33.3 % of the examples" in finding.message

    def test_a_mapping_works_too(self, tmp_path):
        domain_of = {f"{letter}{i}": letter for letter in "ab" for i in range(50)}
        with pytest.warns(guard.DomainWarning, match="'b'"):
            guard.check(write(tmp_path, uneven(200, 3.0)), domain_of)

    def test_domains_are_the_remedy(self, tmp_path):
        """The remedy in the warning makes it go away."""
        found = guard.check(write(tmp_path, uneven(200, 3.0, domains=True)))
        assert found.findings == ()
        assert str(found) == "None of the 2 domains is held back."

    def test_evenly_treated(self, tmp_path):
        for seed in range(5):
            path = write(tmp_path / str(seed), uneven(150, 1.0, seed=seed))
            found = guard.check(path, first_letter)
            ratios = found.domains["ratio"].to_pylist()
            assert ratios == pytest.approx([1, 1], abs=0.1)
            assert not found.findings

    def test_interval_covers_the_truth(self, tmp_path):
        hits = 0
        for seed in range(20):
            path = write(tmp_path / str(seed), uneven(120, 1.0, noise=0.6, seed=seed))
            b = next(
                r for r in guard.check(path, first_letter).domains.to_pylist() if r["domain"] == "b"
            )
            hits += b["low"] <= 1 <= b["high"]
        assert hits >= 16  # of 20, at 95 %

    def test_too_few_steps(self, tmp_path):
        path = write(tmp_path, uneven(50, 3.0))
        assert guard.check(path, first_letter).findings == ()
        with pytest.warns(guard.DomainWarning):
            guard.check(path, first_letter, min_steps=50)

    def test_a_small_effect(self, tmp_path):
        path = write(tmp_path, uneven(400, 1.1))
        assert guard.check(path, first_letter).findings == ()
        with pytest.warns(guard.DomainWarning):
            assert guard.check(path, first_letter, below=1.0).findings[0].domain == "b"

    def test_a_domain_whose_norms_vary_a_lot(self, tmp_path):
        """With domains=, a domain with a wide spread of norms still loses weight."""
        draw = np.random.default_rng(0)
        steps = []
        for _ in range(200):
            norms = np.exp(np.array([0.1] * 4 + [2.0] * 4) * draw.normal(size=8)).tolist()
            steps.append(clipped(norms, [[j] for j in range(8)], list("xxxxyyyy")))
        with pytest.warns(guard.DomainWarning, match="'y' back.*its own bound"):
            guard.check(write(tmp_path, steps))


class TestEdges:
    def test_domains_that_never_share_a_step(self, tmp_path):
        steps = [
            [Row([t], 1.0, 1.0, "xy"[t % 2]), Row([t], 2.0, 0.5, "xy"[t % 2])] for t in range(9)
        ]
        found = guard.check(write(tmp_path, steps))
        assert found.domains["ratio"].to_pylist() == [None, None]
        assert found.domains["steps"].to_pylist() == [0, 0]
        assert not found.findings

    def test_steps_that_are_not_finite_do_not_count(self, tmp_path):
        good = TestByHand.STEPS
        bad = [Row(["a"], math.nan, math.nan, "x"), Row(["c"], 1.0, math.nan, "y")]
        skipped = [Row(["c"], math.inf, 0.0, "y")]
        a = guard.check(write(tmp_path / "a", good))
        b = guard.check(write(tmp_path / "b", [good[0] + skipped, good[1], bad]))
        assert a.domains["ratio"].to_pylist() == pytest.approx(b.domains["ratio"].to_pylist())

    def test_many_chunks(self, tmp_path, monkeypatch):
        path = write(tmp_path, uneven(60, 3.0), flush_every=7)
        whole = guard.check(path, first_letter)
        monkeypatch.setattr(guard.whole_steps, "__defaults__", (20,))
        parts = guard.check(path, first_letter)
        for name in ("domains", "over_time"):
            one, other = getattr(whole, name), getattr(parts, name)
            assert one.column_names == other.column_names
            for column in one.column_names:
                assert one[column].to_pylist() == pytest.approx(other[column].to_pylist())

    def test_hostile_names(self, tmp_path):
        name = "<script>alert(1)</script>" + "x" * 10**6
        steps = [[Row([j], 1.0 + 3 * j, 1 / (1 + 3 * j), ("y", name)[j]) for j in range(2)]] * 120
        with pytest.warns(guard.DomainWarning) as caught:
            guard.check(write(tmp_path, steps))
        assert len(str(caught[0].message)) < 1000


class TestErrors:
    def test_no_domains(self, tmp_path):
        with pytest.raises(ValueError, match="has no domains.*domain_of="):
            guard.check(write(tmp_path, uneven(3, 1.0)))

    def test_unknown_id(self, tmp_path):
        path = write(tmp_path, [[Row([1], 1.0), Row([2], 1.0)]])
        with pytest.raises(ValueError, match="no entry for the id 2.*integers"):
            guard.check(path, {1: "x"})

    def test_no_ledger(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no ledger"):
            guard.check(tmp_path / "nowhere")
        Ledger(tmp_path).close()
        with pytest.raises(ValueError, match="is empty"):
            guard.check(tmp_path)

    def test_below(self, tmp_path):
        with pytest.raises(ValueError, match="between 0 and 1, but got 1.2"):
            guard.check(tmp_path, below=1.2)
