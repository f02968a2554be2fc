"""Draggers: hand-checkable ledgers of three examples, then properties, then planted noise."""

import math
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import roc_auc_score

import microclip
from microclip import draggers
from microclip.draggers.statistics import LIMIT
from microclip.ledger import Ledger, open_ledger
from microclip.ledger.tables import write_parquet

from ledgers import Row, outcome, write

LOG2 = math.log(2)
NAN, INF = math.nan, math.inf
OF_NORMS = ("group", "refined")


def scores(path, method="auto"):
    table = draggers.score(path, method).table
    return dict(zip(table["id"].to_pylist(), table["score"].to_pylist(), strict=True))


def row(path, one, method="auto"):
    table = draggers.score(path, method).table
    return next(found for found in table.to_pylist() if found["id"] == one)


# Step 0 has the median log 2, step 1 the median log 8.
NORMS = [
    [Row("a", 1.0, 1.0), Row("b", 2.0, 0.5), Row("c", 8.0, 0.125)],
    [Row("a", 4.0, 1.0), Row("b", 8.0, 0.5), Row("c", 16.0, 0.25)],
]
LOSSES = [
    [Row("ab", 1.0, losses=[1.0, 2.0]), Row("c", 1.0, losses=[5.0])],
    [Row("bc", 1.0, losses=[0.25, 4.0]), Row("a", 1.0, losses=[0.5])],
]


class TestByHand:
    def test_group(self, tmp_path):
        found = scores(write(tmp_path, NORMS), "group")
        assert found == pytest.approx({"c": 1.5 * LOG2, "b": 0.0, "a": -LOG2})
        assert list(found) == ["c", "b", "a"]

    def test_group_shares_a_microbatch(self, tmp_path):
        steps = [
            [Row("ab", 4.0), Row("c", 1.0)],  # the median of the logarithms is log 2
            [Row("a", 1.0), Row("bc", 1.0)],
        ]
        found = scores(write(tmp_path, steps), "group")
        assert found == pytest.approx({"a": LOG2 / 2, "b": LOG2 / 2, "c": -LOG2 / 2})

    def test_loss(self, tmp_path):
        found = scores(write(tmp_path, LOSSES))  # medians 2 and 0.5
        assert found == pytest.approx({"c": (3 + 3.5) / 2, "b": -0.25 / 2, "a": -1 / 2})

    def test_raw_loss(self, tmp_path):
        found = scores(write(tmp_path, LOSSES), "raw_loss")
        assert found == pytest.approx({"c": 4.5, "b": 1.125, "a": 0.75})

    def test_late_loss(self, tmp_path):
        """Over six steps, the last two; d was not seen in them."""
        late = [[Row("ab", 1.0, losses=[2.0, 1.0]), Row("c", 1.0, losses=[0.0])]] * 2
        early = [[Row("ab", 1.0, losses=[0.0, 1.0]), Row("d", 1.0, losses=[5.0])]] * 4
        found = scores(write(tmp_path, early + late), "late_loss")
        assert found == pytest.approx({"d": 4, "a": 1, "b": 0, "c": -1})

    def test_refined_separates_members(self, tmp_path):
        """Whatever a is paired with, the norm is large because of a."""
        steps = [
            [Row("ab", 4.0), Row("cd", 1.0)],
            [Row("ac", 4.0), Row("bd", 1.0)],
            [Row("ad", 4.0), Row("bc", 1.0)],
        ]
        found = scores(write(tmp_path, steps), "refined")
        # y is +-log 2; ridge on X with entries 1/2: diagonal 3/4, off the diagonal 1/4
        A = np.full((4, 4), 0.25) + np.eye(4) * (0.5 + 0.1 * 0.75)
        beta = np.linalg.solve(A, np.array([1.5, -0.5, -0.5, -0.5]) * LOG2)
        assert [found[one] for one in "abcd"] == pytest.approx(beta.tolist(), rel=1e-3)

    def test_combined_adds_standard_deviations(self, tmp_path):
        path = write(tmp_path, LOSSES)
        refined, loss = scores(path, "refined"), scores(path, "loss")

        def standard(of):
            values = np.array([of[one] for one in "abc"])
            return (values - values.mean()) / (values.std() or 1)

        expected = dict(zip("abc", standard(refined) + standard(loss), strict=True))
        assert scores(path, "combined") == pytest.approx(expected)

    def test_evidence(self, tmp_path):
        found = row(write(tmp_path, NORMS), "c", "group")
        half = 1.959964 * np.std([2 * LOG2, LOG2], ddof=1) / math.sqrt(2)
        assert (found["appearances"], found["rank"], found["nonfinite"]) == (2, 1, 0)
        assert found["mean_weight"] == pytest.approx(0.1875)
        assert found["log_norm"] == pytest.approx(1.5 * LOG2)
        assert found["log_norm_low"] == pytest.approx(1.5 * LOG2 - half)
        assert found["log_norm_high"] == pytest.approx(1.5 * LOG2 + half)
        assert found["loss"] is found["domain"] is None

    def test_thirds(self, tmp_path):
        """An example may drag early and help late."""
        steps = [[Row("a", 2.0**e), Row("b", 1.0), Row("c", 1.0)] for e in (3, 1, 1, 0, -1, -3)]
        found = row(write(tmp_path, steps), "a", "group")
        thirds = [found[f"log_norm_{third}"] / LOG2 for third in ("early", "middle", "late")]
        assert thirds == pytest.approx([2, 0.5, -2])

    def test_loss_of_microbatches_is_separated(self, tmp_path):
        """The loss of a micro-batch is the mean over its members: regression recovers them."""
        own = {"a": 4.0, "b": 0.0, "c": 0.0, "d": 0.0}
        pairs = [("ab", "cd"), ("ac", "bd"), ("ad", "bc")]
        steps = [
            [Row(p, 1.0, loss=sum(own[i] for i in p) / 2) for p in both] for both in pairs * 20
        ]
        path = write(tmp_path, steps)
        found = draggers.score(path)
        assert (found.method, found.losses) == ("loss", "microbatch")
        assert found.ids(n=1) == ["a"]
        values = scores(path)
        assert values["a"] - values["b"] == pytest.approx(4, rel=0.15)  # the ridge shrinks a little

    def test_domains_are_compared_within(self, tmp_path):
        steps = [
            [
                Row("a", 1.0, domain="x"),
                Row("b", 2.0, domain="x"),
                Row("c", 100.0, domain="y"),
                Row("d", 400.0, domain="y"),
            ]
        ]
        found = scores(write(tmp_path, steps), "group")
        expected = {"d": LOG2, "b": LOG2 / 2, "a": -LOG2 / 2, "c": -LOG2}
        assert found == pytest.approx(expected)
        assert row(tmp_path, "d", "group")["domain"] == "y"


class TestEdges:
    def test_alone_in_its_step(self, tmp_path):
        """With one micro-batch per step, norms say nothing."""
        path = write(tmp_path, [[Row("ab", 1.0)], [Row("ab", 9.0)]])
        assert scores(path) == {"a": None, "b": None}
        assert draggers.score(path).ids(fraction=1.0) == []

    def test_alone_sometimes(self, tmp_path):
        path = write(tmp_path, [[Row("ab", 1.0)], [Row("a", 1.0), Row("b", 4.0)]])
        assert scores(path, "group") == pytest.approx({"b": LOG2, "a": -LOG2})

    def test_seen_once_has_no_interval(self, tmp_path):
        path = write(tmp_path, [[Row("a", 1.0), Row("b", 4.0)], [Row("c", 1.0), Row("d", 1.0)]])
        found = row(path, "b", "group")
        assert (found["appearances"], found["log_norm_low"]) == (1, None)
        assert found["log_norm"] == pytest.approx(LOG2)

    @pytest.mark.parametrize("method", [*OF_NORMS, "auto", "loss", "combined"])
    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_nonfinite_comes_first(self, tmp_path, bad, method):
        steps = [
            [
                Row("a", 1.0, losses=[1.0]),
                Row("b", bad, 0.0, losses=[0.0]),
                Row("c", 50.0, losses=[9.0]),
            ],
            [
                Row("a", 1.0, losses=[1.0]),
                Row("b", bad, 0.0, losses=[0.0]),
                Row("c", 60.0, losses=[9.0]),
            ],
        ]
        found = draggers.score(write(tmp_path, steps), method).top(1).to_pylist()[0]
        assert (found["id"], found["nonfinite"], found["mean_weight"]) == ("b", 2, 0)
        assert found["score"] is not None

    def test_nonfinite_loss(self, tmp_path):
        """It counts as the largest of its step; if it always happens, the example goes first."""
        steps = [
            [Row("ab", NAN, 0.0, losses=[NAN, 1.0]), Row("cd", 2.0, losses=[2.0, 3.0])],
            [Row("ac", NAN, 0.0, losses=[NAN, 2.0]), Row("bd", 1.0, losses=[1.0, 3.0])],
            [Row("ad", NAN, 0.0, losses=[NAN, 3.0]), Row("bc", 1.0, losses=[1.0, 2.0])],
        ]
        path = write(tmp_path, steps)
        assert draggers.score(path).ids(n=2) == ["a", "d"]
        assert row(path, "a")["loss"] is None
        assert scores(path)["a"] == scores(path)["d"] == pytest.approx(1)

    def test_a_step_that_diverged_says_nothing(self, tmp_path):
        bad = [Row(one, NAN, NAN) for one in "abc"]
        path = write(tmp_path, [*NORMS, bad, bad])
        assert scores(path, "group") == pytest.approx({"c": 1.5 * LOG2, "b": 0, "a": -LOG2})
        assert row(path, "a", "group")["nonfinite"] == 0
        assert row(path, "c", "group")["mean_weight"] == pytest.approx(0.1875)

    def test_zero_and_huge_norms_are_bounded(self, tmp_path):
        steps = [[Row("a", 0.0), Row("b", 1.0), Row("c", 1.0), Row("d", 1e30)]]
        found = scores(write(tmp_path, steps), "group")
        assert found == pytest.approx({"d": LIMIT, "b": 0, "c": 0, "a": -LIMIT})

    def test_all_zero(self, tmp_path):
        path = write(tmp_path, [[Row("a", 0.0), Row("b", 0.0)]])
        assert scores(path, "group") == {"a": None, "b": None}

    def test_ragged_microbatches(self, tmp_path):
        steps = [[Row("abc", 1.0), Row("d", 4.0)], [Row("abd", 4.0), Row("c", 1.0)]]
        for method in OF_NORMS:
            assert draggers.score(write(tmp_path / method, steps), method).ids(n=1) == ["d"]

    def test_positions_are_not_ids(self, tmp_path):
        model = torch.nn.Linear(3, 1)
        with Ledger(tmp_path) as ledger:
            clipper = microclip.Clipper(model, 2, ledger=ledger)
            for _ in range(3):
                clipper.backward(lambda x: model(x).square().mean(1), torch.randn(8, 3))
        with pytest.warns(UserWarning, match="0 to 7 appear in every one of the 3 steps.*ids="):
            draggers.score(tmp_path)


class TestProperties:
    @staticmethod
    def steps(seed=0, examples=30, count=40, b=3):
        draw = np.random.default_rng(seed)
        found = []
        for _ in range(count):
            order = draw.permutation(examples)[: 24 // b * b].reshape(-1, b)
            norms = np.exp(draw.normal(size=len(order)))
            losses = draw.exponential(size=order.shape)
            found.append(
                [
                    Row(ids.tolist(), norm, losses=each.tolist())
                    for ids, norm, each in zip(order, norms, losses, strict=True)
                ]
            )
        return found

    @pytest.mark.parametrize("method", draggers.METHODS)
    def test_order_of_rows_does_not_matter(self, tmp_path, method):
        steps = self.steps()
        turned = [rows[::-1] for rows in steps]
        a, b = write(tmp_path / "a", steps), write(tmp_path / "b", turned)
        assert scores(a, method) == pytest.approx(scores(b, method))

    @pytest.mark.parametrize("method", draggers.METHODS)
    def test_names_do_not_matter(self, tmp_path, method):
        steps = self.steps()
        renamed = [
            [Row([f"n{99 - i}" for i in r.ids], r.norm, losses=r.losses) for r in rows]
            for rows in steps
        ]
        a, b = write(tmp_path / "a", steps), write(tmp_path / "b", renamed)
        found, other = scores(a, method), scores(b, method)
        assert {f"n{99 - one}": value for one, value in found.items()} == pytest.approx(other)

    @pytest.mark.parametrize("method", OF_NORMS)
    def test_scale_of_a_step_does_not_matter(self, tmp_path, method):
        steps = self.steps()
        scaled = [[Row(r.ids, 10**t * r.norm) for r in rows] for t, rows in enumerate(steps)]
        a, b = write(tmp_path / "a", steps), write(tmp_path / "b", scaled)
        assert scores(a, method) == pytest.approx(scores(b, method))

    @pytest.mark.parametrize("method", ["group", "refined", "loss"])
    def test_parts_and_ranks_do_not_matter(self, tmp_path, method):
        """Two ranks, flushed at different moments, are one mini-batch."""
        steps = self.steps()
        write(tmp_path / "one", steps)
        halves = [rows[::2] for rows in steps], [rows[1::2] for rows in steps]
        for rank, (half, flush) in enumerate(zip(halves, (3, 7), strict=True)):
            write(tmp_path / "two", half, rank=rank, flush_every=flush)
        assert scores(tmp_path / "one", method) == pytest.approx(scores(tmp_path / "two", method))

    def test_chunks_do_not_matter(self, tmp_path, monkeypatch):
        path = write(tmp_path, self.steps(), flush_every=11)
        whole = {method: scores(path, method) for method in draggers.METHODS}
        monkeypatch.setattr(draggers.source.whole_steps, "__defaults__", (20,))
        for method, expected in whole.items():
            assert scores(path, method) == pytest.approx(expected)

    def test_a_file_with_its_rows_in_another_order(self, tmp_path):
        path = write(tmp_path, self.steps(), flush_every=11)
        expected = scores(path, "loss")
        for table in ("microbatches", "examples"):
            for part in (path / table).iterdir():
                with pq.ParquetFile(part) as file:
                    rows, said = file.read(), file.metadata.metadata
                turned = rows.take(np.arange(len(rows))[::-1]).replace_schema_metadata(said)
                with part.open("wb") as place:
                    write_parquet(turned, place)
        assert scores(path, "loss") == pytest.approx(expected)

    def test_b_of_one_needs_no_refinement(self, tmp_path):
        """With one example per micro-batch, regression only shrinks the mean."""
        path = write(tmp_path, self.steps(b=1))
        group, refined = scores(path, "group"), scores(path, "refined")
        a, b = (np.array([s[one] for one in sorted(group)]) for s in (group, refined))
        assert np.corrcoef(a, b)[0, 1] > 0.99

    def test_table_is_sorted_and_ranked(self, tmp_path):
        table = draggers.score(write(tmp_path, self.steps())).table
        values = table["score"].to_numpy()
        assert (values[1:] <= values[:-1]).all()
        assert table["rank"].to_pylist() == list(range(1, 31))


def planted(path, b, draggers_share=0.2, examples=200, epochs=40):
    """Every fifth example drags: its gradient is twice as long, whatever it is batched with."""
    draw = np.random.default_rng(1)
    wrong = np.arange(examples) < draggers_share * examples
    steps = []
    for _ in range(epochs):
        groups = draw.permutation(examples).reshape(-1, b)
        own = np.where(wrong, 2.0, 1.0)[groups] * np.exp(0.5 * draw.normal(size=groups.shape))
        norms = np.sqrt(np.square(own).sum(1)) / b
        for start in range(0, len(groups), 10):
            rows = slice(start, start + 10)
            steps.append(
                [Row(i.tolist(), n) for i, n in zip(groups[rows], norms[rows], strict=True)]
            )
    return write(path, steps), wrong


@pytest.mark.parametrize(("b", "least"), [(1, 0.999), (4, 0.99)])
@pytest.mark.parametrize("method", OF_NORMS)
def test_planted_draggers_are_found(tmp_path, b, least, method):
    path, wrong = planted(tmp_path, b)
    found = scores(path, method)
    assert roc_auc_score(wrong, [found[one] for one in range(len(wrong))]) >= least


def test_regression_is_better_than_means(tmp_path):
    """With few appearances, it matters which examples shared the micro-batch."""
    path, wrong = planted(tmp_path, b=4, epochs=10)
    group, refined = (
        roc_auc_score(wrong, [s[one] for one in range(len(wrong))])
        for s in (scores(path, method) for method in OF_NORMS)
    )
    assert refined > group


class TestUse:
    def test_a_ledger_that_is_being_written(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for step, rows in enumerate(NORMS):
                ledger.record(outcome(step, rows))
            assert scores(ledger) == scores(open_ledger(tmp_path)) == scores(str(tmp_path))

    def test_trained_for_real(self, tmp_path):
        """One wrong label among many right ones, with a real Clipper and a loss per example."""
        x = torch.randn(64, 2)
        y = (x[:, 0] > 0).long()
        y[7] = 1 - y[7]
        x[7] *= 3
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def loss_fn(rows):
            return torch.nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none")

        with Ledger(tmp_path) as ledger:
            clipper = microclip.Clipper(model, 4, ledger=ledger)
            for _ in range(20):
                for rows in torch.randperm(64).view(4, 16):
                    optimizer.zero_grad()
                    clipper.backward(loss_fn, rows, ids=rows)
                    optimizer.step()
        found = draggers.score(tmp_path)
        assert repr(found) == "Draggers(64 examples in 80 steps, method='loss')"
        assert found.ids(n=1) == [7]
        for method in OF_NORMS:
            assert draggers.score(tmp_path, method).ids(n=1) == [7]

    def test_choosing(self, tmp_path):
        found = draggers.score(write(tmp_path, NORMS), "group")
        assert found.ids(fraction=1 / 3) == found.ids(n=1) == found.ids(threshold=0.5) == ["c"]
        assert found.ids(n=0) == found.ids(threshold=9.0) == []
        assert found.ids(fraction=1.0) == ["c", "b", "a"]
        assert found.top(2)["id"].to_pylist() == ["c", "b"]
        assert found.kept_ids(n=1) == ["a", "b"]
        assert found.kept_ids(n=1, all_ids=["z", "c", "b", "a"]) == ["z", "b", "a"]

    def test_trajectories(self, tmp_path):
        path = write(tmp_path, LOSSES)
        found = draggers.trajectories(path, ["c"]).to_pylist()
        assert [r["step"] for r in found] == [0, 1]
        assert [r["microbatch"] for r in found] == [1, 0]
        assert [r["loss"] for r in found] == [5, 4]
        assert [r["excess_loss"] for r in found] == [3, 3.5]
        assert [r["log_norm"] for r in found] == [0, 0]
        with pytest.raises(ValueError, match="1 of the 2 ids are not in the ledger.*'z'"):
            draggers.trajectories(path, ["c", "z"])
        without = draggers.trajectories(write(tmp_path / "norms", NORMS), ["a"])
        assert without["loss"].to_pylist() == [None, None]
        assert without["norm"].to_pylist() == [1, 4]

    def test_quiet(self, tmp_path, capsys):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draggers.score(write(tmp_path, NORMS))
        assert capsys.readouterr() == ("", "")


class TestErrors:
    def test_no_ledger(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no ledger"):
            draggers.score(tmp_path / "nowhere")
        with pytest.raises(ValueError, match="not a ledger"):
            draggers.score(tmp_path)
        with pytest.raises(TypeError, match="got an object of type int"):
            draggers.score(3)

    def test_empty(self, tmp_path):
        Ledger(tmp_path).close()
        with pytest.raises(ValueError, match="is empty"):
            draggers.score(tmp_path)

    def test_unknown_method(self, tmp_path):
        with pytest.raises(ValueError, match="one of 'auto', 'group'.*but got 'best'"):
            draggers.score(write(tmp_path, NORMS), "best")

    def test_late_losses_of_microbatches(self, tmp_path):
        steps = [[Row("a", 1.0, loss=1.0), Row("b", 1.0, loss=2.0)]]
        with pytest.raises(ValueError, match="losses of micro-batches only. Use method='loss'"):
            draggers.score(write(tmp_path, steps), "late_loss")

    @pytest.mark.parametrize("method", ["loss", "late_loss", "raw_loss", "combined"])
    def test_no_losses(self, tmp_path, method):
        with pytest.raises(ValueError, match=f"method='{method}' needs losses.*'refined'"):
            draggers.score(write(tmp_path, NORMS), method)

    def test_damaged(self, tmp_path):
        write(tmp_path, NORMS)
        found = open_ledger(tmp_path)
        part = next((tmp_path / "microbatches").iterdir())
        part.write_bytes(part.read_bytes()[:100])
        with pytest.raises(ValueError, match="is damaged"):
            draggers.score(found)

    def test_removed_meanwhile(self, tmp_path):
        found = open_ledger(write(tmp_path, NORMS))
        next((tmp_path / "microbatches").iterdir()).unlink()
        with pytest.raises(FileNotFoundError, match="removed while the ledger was being read"):
            draggers.score(found, "group")

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ({}, "one of fraction=, n= and threshold=, but got none"),
            ({"n": 1, "fraction": 0.5}, "but got fraction and n"),
            ({"n": 4}, "between 0 and 3.*but got 4"),
            ({"n": -1}, "but got -1"),
            ({"n": True}, "but got True"),
            ({"fraction": 1.5}, "between 0 and 1, but got 1.5"),
        ],
    )
    def test_choosing(self, tmp_path, how, message):
        found = draggers.score(write(tmp_path, NORMS))
        with pytest.raises(ValueError, match=message):
            found.ids(**how)

    def test_top(self, tmp_path):
        with pytest.raises(ValueError, match="n must be 0 or a positive integer, but got -1"):
            draggers.score(write(tmp_path, NORMS)).top(-1)

    def test_ids_outside_the_data_set(self, tmp_path):
        steps = [[Row([0], 1.0), Row([1], 2.0), Row([2], 9.0)]]
        found = draggers.score(write(tmp_path, steps))
        with pytest.raises(ValueError, match="1 of the 1 ids.*instance 2.*ids are integers"):
            found.kept_ids(n=1, all_ids=["0", "1", "2"])
