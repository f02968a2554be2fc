"""The ledger: what is recorded comes back, at any moment, and nothing leaves its folder."""

import json
import os
import pickle
import resource
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import duckdb
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import microclip
from microclip import Clipper, Ledger, Outcome
from microclip.engines.choose import ENGINES
from microclip.ledger import open_ledger, parts, rows, write
from microclip.ledger.schema import SCHEMAS

import ledger_faults
import ledger_ranks
import processes


def outcome(step, norms=(3.0, 4.0), ids=((0, 1), (2, 3)), domains=None, losses=True, each=True):
    """Return a step whose numbers can be checked by eye: the bound is the smallest norm."""
    norms = torch.tensor(norms)
    sizes = torch.tensor([len(group) for group in ids])
    return Outcome(
        step=step,
        loss=None,
        losses=norms / 10 if losses else None,
        example_losses=torch.arange(int(sizes.sum())) / 4 if each else None,
        norms=norms,
        weights=norms.min() / norms,
        bounds=norms.min().expand(len(ids)),
        sizes=sizes,
        skipped=norms.isnan(),
        domains=(None,) * len(ids) if domains is None else domains,
        ids=ids,
        engine="none",
    )


def table(record, name="microbatches"):
    return [row for batch in getattr(record, name)() for row in batch.to_pylist()]


def steps_of(path, name="microbatches"):
    return [row["step"] for row in table(open_ledger(path), name)]


def record_steps(path, steps, **options):
    with Ledger(path, **options) as ledger:
        for step in steps:
            ledger.record(outcome(step))


def parts_of(path, name="microbatches"):
    return [(part.first, part.last) for part in parts.find(path / name)]


class TestWhatComesBack:
    def test_is_what_the_step_did(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(7, ids=((10, 11), (12,)), domains=("de", "en")))
        record = open_ledger(tmp_path)
        assert table(record) == [
            {
                "step": 7, "rank": 0, "microbatch": 0, "ids": [10, 11], "size": 2,
                "norm": 3.0, "weight": 1.0, "bound": 3.0, "domain": "de",
                "loss": pytest.approx(0.3), "skipped": False,
            },
            {
                "step": 7, "rank": 0, "microbatch": 1, "ids": [12], "size": 1,
                "norm": 4.0, "weight": 0.75, "bound": 3.0, "domain": "en",
                "loss": pytest.approx(0.4), "skipped": False,
            },
        ]  # fmt: skip
        assert table(record, "examples") == [
            {"step": 7, "rank": 0, "microbatch": 0, "id": 10, "loss": 0.0},
            {"step": 7, "rank": 0, "microbatch": 0, "id": 11, "loss": 0.25},
            {"step": 7, "rank": 0, "microbatch": 1, "id": 12, "loss": 0.5},
        ]
        assert (record.rows, record.steps, record.ranks) == (2, range(7, 8), (0,))
        assert record.domains == ("de", "en")
        assert record.has_examples
        assert record.ids_are_integers
        assert "2 micro-batches, steps 7 to 7" in repr(record)

    @pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "auto"])
    def test_a_clipper_records_every_step_with_every_engine(self, tmp_path, engine):
        model = torch.nn.Linear(3, 1)
        outcomes = []
        with Ledger(tmp_path, flush_every=2) as ledger:
            clipper = Clipper(model, 2, engine=engine, ledger=ledger)
            for _ in range(5):
                found = clipper.backward(lambda x: model(x).square().mean(1), torch.randn(7, 3))
                outcomes.append(found)
        record = open_ledger(tmp_path)
        norms = torch.cat([found.norms for found in outcomes]).tolist()
        weights = torch.cat([found.weights for found in outcomes]).tolist()
        assert [(row["norm"], row["weight"]) for row in table(record)] == list(
            zip(norms, weights, strict=True)
        )
        losses = torch.cat([found.example_losses for found in outcomes]).tolist()
        assert [row["loss"] for row in table(record, "examples")] == losses
        kept = [v for found in outcomes for v in vars(found).values() if torch.is_tensor(v)]
        assert not any(tensor.requires_grad for tensor in kept)  # else graphs would live on
        assert all(tensor.untyped_storage().nbytes() <= 7 * 8 for tensor in kept)

    def test_steps_with_and_without_losses(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0, losses=False, each=False))
            ledger.record(outcome(1, each=False))
            ledger.record(outcome(2))
        record = open_ledger(tmp_path)
        assert [row["loss"] is None for row in table(record)] == [True] * 2 + [False] * 4
        assert [(r["step"], r["id"]) for r in table(record, "examples")] == [
            (2, i) for i in range(4)
        ]

    def test_examples_can_be_left_out(self, tmp_path):
        record_steps(tmp_path, range(3), examples=False)
        record = open_ledger(tmp_path)
        assert not record.has_examples
        assert table(record, "examples") == []

    def test_what_is_not_finite_stays_so(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0, norms=(float("nan"), float("inf")), each=False))
        first, second = table(open_ledger(tmp_path))
        assert first["norm"] != first["norm"]
        assert first["skipped"]
        assert second["norm"] == second["loss"] == float("inf")

    def test_a_rank_without_examples_has_no_rows(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0))
            ledger.record(_empty(1))
            ledger.record(outcome(2))
        assert steps_of(tmp_path) == [0, 0, 2, 2]

    def test_columns_can_be_chosen_and_are_checked(self, tmp_path):
        record_steps(tmp_path, range(2))
        record = open_ledger(tmp_path)
        batches = list(record.microbatches(["weight", "step"], batch_size=3))
        assert [batch.num_rows for batch in batches] == [3, 1]
        assert batches[0].schema.names == ["weight", "step"]
        with pytest.raises(ValueError, match="microbatches have the columns step, .* but not 'x'"):
            record.microbatches(["x"])
        with pytest.raises(ValueError, match="tables microbatches and examples, but not 'x'"):
            record.dataset("x")

    def test_the_columns_on_disk_are_those_of_the_schema(self, tmp_path):
        record_steps(tmp_path, range(2))
        for name, schema in SCHEMAS.items():
            [file] = (tmp_path / name).glob("*.parquet")
            assert pq.read_schema(file).remove_metadata() == schema

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 4))
    @settings(max_examples=25, deadline=None)
    def test_any_sizes_and_flushes(self, tmp_path_factory, sizes, flush_every):
        path = tmp_path_factory.mktemp("ledger")
        numbers = iter(range(10_000))
        recorded = []
        with Ledger(path, flush_every=flush_every) as ledger:
            for step, size in enumerate(sizes):
                ids = tuple(tuple(next(numbers) for _ in range(k + 1)) for k in range(size))
                recorded.append(outcome(step, norms=[1.0 + k for k in range(size)], ids=ids))
                ledger.record(recorded[-1])
        record = open_ledger(path)
        assert [tuple(r["ids"]) for r in table(record)] == [i for o in recorded for i in o.ids]
        assert [r["microbatch"] for r in table(record)] == [
            k for size in sizes for k in range(size)
        ]
        assert [r["id"] for r in table(record, "examples")] == [
            i for o in recorded for group in o.ids for i in group
        ]


def _empty(step):
    nothing = torch.zeros(0)
    return Outcome(
        step, None, None, None, nothing, nothing, nothing, nothing, nothing.bool(), (), (), "none"
    )


class TestWhen:
    def test_steps_appear_with_a_flush(self, tmp_path):
        ledger = Ledger(tmp_path, flush_every=3)
        for step in range(7):
            ledger.record(outcome(step))
        assert parts_of(tmp_path) == parts_of(tmp_path, "examples") == [(0, 2), (3, 5)]
        ledger.flush()
        ledger.flush()  # nothing waits: nothing is written
        assert parts_of(tmp_path) == [(0, 2), (3, 5), (6, 6)]

    def test_a_checkpoint_flushes(self, tmp_path):
        model = torch.nn.Linear(2, 1)
        clipper = Clipper(model, 1, ledger=Ledger(tmp_path))
        clipper.backward(lambda x: model(x).mean(), torch.ones(2, 2))
        assert parts_of(tmp_path) == []
        clipper.state_dict()
        assert parts_of(tmp_path) == [(0, 0)]

    def test_many_rows_flush(self, tmp_path, monkeypatch):
        monkeypatch.setattr(write, "ROWS", 30)
        ledger = Ledger(tmp_path)
        for step in range(11):  # with six rows each: two micro-batches, four examples
            ledger.record(outcome(step))
        assert parts_of(tmp_path) == [(0, 4), (5, 9)]

    def test_time_flushes(self, tmp_path):
        ledger = Ledger(tmp_path, flush_seconds=0)
        ledger.record(outcome(0))
        assert parts_of(tmp_path) == [(0, 0)]

    def test_the_end_of_the_process_flushes(self, tmp_path):
        code = (
            "import torch, microclip\n"
            "model = torch.nn.Linear(2, 1)\n"
            f"clipper = microclip.Clipper(model, 1, ledger=microclip.Ledger({str(tmp_path)!r}))\n"
            "clipper.backward(lambda x: model(x).mean(), torch.ones(2, 2))\n"
            "raise SystemExit('the end')\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert done.stderr == b"the end\n"
        assert steps_of(tmp_path) == [0, 0]

    def test_a_forgotten_ledger_is_written(self, tmp_path):
        Ledger(tmp_path).record(outcome(0))
        assert steps_of(tmp_path) == [0, 0]

    def test_a_fork_does_not_write_what_is_not_its_own(self, tmp_path):
        """In a process of its own: this one has threads."""
        code = (
            "import os, test_ledger\n"
            "from microclip import Ledger\n"
            f"ledger = Ledger({str(tmp_path)!r})\n"
            "ledger.record(test_ledger.outcome(0))\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    ledger.flush()\n"
            "    ledger.record(test_ledger.outcome(0), rank=1)\n"
            "    ledger.close()\n"
            "    os._exit(0)\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
            "assert len(os.listdir(ledger.path / 'microbatches')) == 1\n"
            "ledger.close()\n"
        )
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        assert Counter(row["rank"] for row in table(open_ledger(tmp_path))) == {0: 2, 1: 2}

    def test_a_closed_ledger_takes_no_more(self, tmp_path):
        ledger = Ledger(tmp_path)
        ledger.close()
        ledger.close()
        with pytest.raises(ValueError, match="is closed: make a new Ledger"):
            ledger.record(outcome(0))

    def test_sampling(self, tmp_path):
        record_steps(tmp_path, range(10), every=4)
        assert sorted(set(steps_of(tmp_path))) == [0, 4, 8]

    def test_retention_keeps_at_least_so_many_steps(self, tmp_path):
        with Ledger(tmp_path, flush_every=2, keep_steps=5) as ledger:
            for step in range(12):
                ledger.record(outcome(step))
        assert parts_of(tmp_path) == parts_of(tmp_path, "examples") == [(6, 7), (8, 9), (10, 11)]
        assert steps_of(tmp_path)[0] == 6

    def test_a_pickled_ledger_is_the_same_folder_with_the_same_options(self, tmp_path):
        again = pickle.loads(pickle.dumps(Ledger(tmp_path, flush_every=2)))
        again.record(outcome(0))
        assert repr(again) == f"Ledger({str(tmp_path)!r})"
        again.record(outcome(1))
        assert parts_of(tmp_path) == [(0, 1)]


class TestGoingOn:
    def test_after_the_last_step(self, tmp_path):
        record_steps(tmp_path, range(5), flush_every=2)
        record_steps(tmp_path, range(5, 8), flush_every=2)
        assert steps_of(tmp_path) == [step for step in range(8) for _ in range(2)]

    @pytest.mark.parametrize("start", range(9))
    def test_from_an_earlier_step(self, tmp_path, start):
        """Whether it is the first of a part or in its middle: no row twice, none missing."""
        record_steps(tmp_path, range(8), flush_every=3)
        record_steps(tmp_path, range(start, 10), flush_every=4)
        for name, count in (("microbatches", 2), ("examples", 4)):
            assert steps_of(tmp_path, name) == [s for s in range(10) for _ in range(count)]
        assert all(before[1] < after[0] for before, after in pairwise(parts_of(tmp_path)))
        assert parts_of(tmp_path) == parts_of(tmp_path, "examples")

    def test_from_a_step_that_is_not_sampled(self, tmp_path):
        record_steps(tmp_path, range(10))
        record_steps(tmp_path, range(5, 12), every=4)
        assert sorted(set(steps_of(tmp_path))) == [0, 1, 2, 3, 4, 8]

    def test_where_only_later_steps_have_losses_of_examples(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            for step in range(6):
                ledger.record(outcome(step, each=step >= 4))
        for start in (3, 1):
            with Ledger(tmp_path) as ledger:
                ledger.record(outcome(start, each=False))
            assert sorted(set(steps_of(tmp_path))) == list(range(start + 1))
            assert steps_of(tmp_path, "examples") == []

    def test_within_a_session_says_so(self, tmp_path):
        with Ledger(tmp_path, flush_every=2) as ledger:
            for step in range(5):
                ledger.record(outcome(step))
            with pytest.warns(RuntimeWarning, match="Step 1 of rank 0 is recorded again"):
                ledger.record(outcome(1))
        assert steps_of(tmp_path) == [0, 0, 1, 1]

    def test_from_the_start_says_so_and_replaces(self, tmp_path, caplog):
        record_steps(tmp_path, range(5))
        record_steps(tmp_path, range(2))
        assert "starts again from step 0: its steps up to 4" in caplog.text
        assert steps_of(tmp_path) == [0, 0, 1, 1]

    def test_leftovers_of_this_rank_are_removed(self, tmp_path):
        record_steps(tmp_path, range(3))
        for rank in (0, 1):
            leftover = tmp_path / "microbatches" / f".{parts.Part(3, rank, 5).name}.tmp"
            leftover.write_bytes(b"half of a file")
        record_steps(tmp_path, [3])
        assert [p.name[:11] for p in (tmp_path / "microbatches").glob(".*")] == [".part-00001"]
        assert steps_of(tmp_path)[-1] == 3

    def test_a_part_that_kept_its_old_name_is_renamed(self, tmp_path):
        record_steps(tmp_path, range(3))
        folder = tmp_path / "microbatches"
        os.rename(folder / parts.Part(0, 0, 2).name, folder / parts.Part(0, 0, 9).name)
        record_steps(tmp_path, range(3, 5))
        assert parts_of(tmp_path) == [(0, 2), (3, 4)]
        assert steps_of(tmp_path) == [step for step in range(5) for _ in range(2)]

    def test_examples_of_an_unfinished_flush_are_not_looked_at_and_removed(self, tmp_path):
        record_steps(tmp_path, range(6), flush_every=3)
        os.remove(tmp_path / "microbatches" / parts.Part(3, 0, 5).name)
        assert set(steps_of(tmp_path, "examples")) == {0, 1, 2}
        record_steps(tmp_path, [7])
        assert parts_of(tmp_path, "examples") == [(0, 2), (7, 7)]

    def test_killed_at_random_moments(self, tmp_path):
        for line in ledger_faults.torment(tmp_path, 12):
            assert "are whole" in line

    @pytest.mark.parametrize("operation", range(1, 16))
    def test_killed_before_each_operation_of_going_back(self, tmp_path, operation):
        record = tmp_path / "ledger"
        with Ledger(record, flush_every=7) as ledger:
            for step in range(30):
                ledger.record(ledger_faults.outcome_of(step, 0))
        ledger_faults.kill_once(tmp_path, 10, 1, None, operation)
        ledger_faults.check(record, 9)
        ledger_faults.kill_once(tmp_path, 10, 2, 30, None)
        assert ledger_faults.check(record, 9) >= 9


class TestManyRanks:
    def test_write_one_ledger_and_fewer_go_on(self, tmp_path):
        ledger, first, second = (tmp_path / name for name in ("ledger", "first", "second"))
        first.mkdir()
        second.mkdir()
        norms = processes.run(ledger_ranks.train, 2, first, ledger, 0, 7)
        record = open_ledger(ledger)
        assert record.ranks == (0, 1)
        found = {
            rank: [row["norm"] for row in table(record) if row["rank"] == rank] for rank in (0, 1)
        }
        for rank in (0, 1):
            assert found[rank] == [norm for step in norms[rank] for norm in step]
        bounds = {row["step"]: row["bound"] for row in table(record)}
        for row in table(record):
            assert row["bound"] == bounds[row["step"]]  # one bound over all ranks
        # then with one rank, from a checkpoint in the middle of a part
        processes.run(ledger_ranks.train, 1, second, ledger, 4, 2)
        steps = {(row["rank"], row["step"]) for row in table(open_ledger(ledger))}
        assert steps == {(0, s) for s in range(6)} | {(1, s) for s in range(4)}

    def test_one_process_may_write_for_several(self, tmp_path):
        with Ledger(tmp_path, flush_every=2) as ledger:
            for step in range(4):
                for rank in (0, 123_456):
                    ledger.record(outcome(step), rank=rank)
        record = open_ledger(tmp_path)
        assert record.ranks == (0, 123_456)
        assert [row["step"] // 2 for row in table(record)] == [0] * 8 + [1] * 8  # as training went

    @pytest.mark.parametrize("rank", [-1, True, "0", 1.0])
    def test_a_rank_is_a_number(self, tmp_path, rank):
        with pytest.raises(ValueError, match="rank must be 0 or a positive integer, but got"):
            Ledger(tmp_path).record(outcome(0), rank=rank)


class TestOtherReaders:
    def test_read_while_it_is_being_written(self, tmp_path):
        ledger = Ledger(tmp_path, flush_every=2)
        pattern = f"{tmp_path}/microbatches/*.parquet"
        # what a writer in the middle of a part leaves in the folder
        (tmp_path / "microbatches" / f".{parts.Part(0, 0, 1).name}.tmp").write_bytes(b"PAR1 half")
        opened = None
        for step in range(1, 9):
            ledger.record(outcome(step - 1, domains=("de", None)))
            if step % 2:
                continue
            rows = 2 * step
            query = "select count(*), count(distinct step), count(domain), sum(len(ids)) from "
            found = duckdb.sql(f"{query} '{pattern}'").fetchall()
            assert found == [(rows, step, rows // 2, 2 * rows)]
            found = ds.dataset(tmp_path / "microbatches", format="parquet")
            assert found.count_rows() == rows
            assert pq.read_table(tmp_path / "examples").num_rows == 2 * rows
            opened = opened or open_ledger(tmp_path)
            assert opened.rows == len(table(opened)) == 4  # what was there when it was opened
            assert open_ledger(tmp_path).dataset("examples").count_rows() == 2 * rows

    def test_a_part_that_vanishes_is_explained(self, tmp_path):
        ledger = Ledger(tmp_path, flush_every=1, keep_steps=1)
        ledger.record(outcome(0))
        opened = open_ledger(tmp_path)
        ledger.record(outcome(1))
        ledger.record(outcome(2))
        with pytest.raises(FileNotFoundError, match="removed while the ledger was being read"):
            table(opened)


HOSTILE = [
    "<script>alert(1)</script>",
    "../../../etc/passwd",
    "/absolute",
    "=cmd|' /C calc'!A0",
    "two\nlines\r\n",
    "nothing\0",
    "'; drop table examples; --",
    "",
    "part-00000-0000000000-0000000000.parquet",
    "\N{RIGHT-TO-LEFT OVERRIDE}gnp.exe",
    "x" * 2**20,
    None,
    ("a", 1),
    1.5,
    True,
    b"bytes",
]


class TestAnyIds:
    def test_are_texts_and_stay_in_the_folder(self, tmp_path):
        path = tmp_path / "run" / "ledger"
        with Ledger(path) as ledger:
            groups = tuple((label,) for label in HOSTILE)
            domains = tuple(HOSTILE)
            ledger.record(outcome(0, norms=[1.0] * len(groups), ids=groups, domains=domains))
        record = open_ledger(path)
        assert not record.ids_are_integers
        texts = [str(label) for label in HOSTILE]
        assert [row["ids"] for row in table(record)] == [[text] for text in texts]
        assert [row["id"] for row in table(record, "examples")] == texts
        assert [row["domain"] for row in table(record)] == [
            None if label is None else str(label) for label in HOSTILE
        ]
        found = duckdb.sql(f"select id from '{path}/examples/*.parquet'").fetchall()
        assert [row[0] for row in found] == texts
        names = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*"))
        assert names == [
            "run",
            "run/ledger",
            "run/ledger/examples",
            f"run/ledger/examples/{parts.Part(0, 0, 0).name}",
            "run/ledger/ledger.json",
            "run/ledger/microbatches",
            f"run/ledger/microbatches/{parts.Part(0, 0, 0).name}",
        ]
        # statistics would hold the longest text again, in every part
        assert (path / "examples" / parts.Part(0, 0, 0).name).stat().st_size < 2**17

    def test_lone_surrogates_are_escaped(self, tmp_path):
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0, ids=(("\ud800x", "ä"), ("c", "d")), domains=("\udfff", None)))
        record = open_ledger(tmp_path)
        assert table(record)[0]["ids"] == [r"\ud800x", "ä"]
        assert record.domains == (r"\udfff",)

    @given(st.lists(st.text(), min_size=2, max_size=2))
    @settings(max_examples=20, deadline=None)
    def test_any_text(self, tmp_path_factory, ids):
        path = tmp_path_factory.mktemp("ledger")
        with Ledger(path) as ledger:
            ledger.record(outcome(0, ids=((ids[0],), (ids[1],))))
        assert [row["id"] for row in table(open_ledger(path), "examples")] == ids

    @pytest.mark.parametrize(
        ("ids", "integers"),
        [
            ((0, -5, 2**63 - 1, -(2**63)), True),
            ((0, 1, 2, 2**63), False),
            ((0, 1, 2, True), False),
            ((0, 1, 2, "3"), False),
            (tuple(torch.arange(4).numpy()), True),
        ],
    )
    def test_integers_come_back_as_integers_if_all_are(self, tmp_path, ids, integers):
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0, ids=(ids[:2], ids[2:])))
        record = open_ledger(tmp_path)
        assert record.ids_are_integers == integers
        expected = list(ids) if integers else [str(label) for label in ids]
        assert [row["id"] for row in table(record, "examples")] == expected
        assert [i for row in table(record) for i in row["ids"]] == expected

    def test_integers_in_some_parts_only_come_back_as_texts(self, tmp_path):
        with Ledger(tmp_path, flush_every=1) as ledger:
            ledger.record(outcome(0))
            ledger.record(outcome(1, ids=(("a", "b"), ("c", "d"))))
        assert [row["ids"][0] for row in table(open_ledger(tmp_path))] == ["0", "2", "a", "c"]

    def test_much_text_makes_more_parts(self, tmp_path, monkeypatch):
        monkeypatch.setattr(rows, "TEXT_LIMIT", 100)
        with Ledger(tmp_path) as ledger:
            for step in range(8):
                ledger.record(outcome(step, ids=(("a" * 10, "b" * 10), ("c" * 10, "d" * 10))))
        assert parts_of(tmp_path) == [(0, 1), (2, 3), (4, 5), (6, 7)]
        assert steps_of(tmp_path) == [step for step in range(8) for _ in range(2)]


@contextmanager
def no_file_larger_than(size):
    """A disk that is full, as far as this process can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestFailingDisks:
    @pytest.mark.parametrize("size", [100, 2000, 20_000])
    def test_nothing_is_lost_and_nothing_there_twice(self, tmp_path, size):
        """Small files fail; of the larger limits, one lets the first of two tables through."""
        ledger = Ledger(tmp_path, flush_every=100)
        ledger.record(outcome(0))
        ledger.flush()
        with no_file_larger_than(size):
            for step in range(1, 100):
                ledger.record(_wide(step))
            with pytest.raises(OSError, match=r"Could not write steps 1 to 100 .*kept in") as error:
                ledger.record(_wide(100))
            assert error.value.filename == str(tmp_path)
            with pytest.raises(OSError, match="call flush"):
                ledger.record(_wide(101))  # it does not go on silently
        assert set(steps_of(tmp_path)) == {0}
        assert not list(tmp_path.glob("*/.*"))
        ledger.flush()
        assert Counter(steps_of(tmp_path)) == {0: 2} | dict.fromkeys(range(1, 102), 20)
        assert Counter(steps_of(tmp_path, "examples")) == {0: 4} | dict.fromkeys(range(1, 102), 40)

    def test_a_clipper_has_finished_its_step(self, tmp_path):
        model = torch.nn.Linear(2, 1)
        ledger = Ledger(tmp_path, flush_every=1)
        clipper = Clipper(model, 1, ledger=ledger)
        with no_file_larger_than(10), pytest.raises(OSError, match="kept in memory"):
            clipper.backward(lambda x: model(x).mean(), torch.ones(2, 2))
        assert clipper.step == 1
        assert model.weight.grad is not None
        clipper.state_dict()
        assert steps_of(tmp_path) == [0, 0]

    def test_a_folder_that_went_away(self, tmp_path):
        ledger = Ledger(tmp_path / "ledger")
        ledger.record(outcome(0))
        os.rename(tmp_path / "ledger", tmp_path / "elsewhere")
        with pytest.raises(FileNotFoundError, match="Could not write steps 0 to 0"):
            ledger.flush()
        os.rename(tmp_path / "elsewhere", tmp_path / "ledger")
        ledger.close()
        assert steps_of(tmp_path / "ledger") == [0, 0]


def _wide(step):
    generator = torch.Generator().manual_seed(step)
    norms = torch.rand(20, generator=generator).tolist()
    return outcome(step, norms=norms, ids=tuple((40 * step + i, i) for i in range(20)))


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"flush_every": 0}, "flush_every must be a positive integer, but got 0."),
            ({"flush_every": True}, "flush_every must be a positive integer, but got True."),
            ({"every": 1.5}, "every must be a positive integer, but got 1.5."),
            ({"keep_steps": -1}, "keep_steps must be a positive integer or None, which keeps all"),
            ({"examples": "yes"}, "examples must be True or False, but got 'yes'."),
            ({"flush_seconds": "5"}, "flush_seconds must be a number of seconds, or None"),
            ({"flush_seconds": float("nan")}, "flush_seconds must be a number of seconds, or None"),
        ],
    )
    def test_options(self, tmp_path, options, message):
        with pytest.raises(ValueError, match=message):
            Ledger(tmp_path / "new", **options)
        assert not (tmp_path / "new").exists()

    def test_a_path_for_a_ledger(self, tmp_path):
        with pytest.raises(TypeError, match="must be a microclip.Ledger, but got 'run'"):
            Clipper(torch.nn.Linear(2, 1), ledger="run")

    def test_steps_before_the_first(self, tmp_path):
        with pytest.raises(ValueError, match="A step has a number from 0 on, but got -1"):
            Ledger(tmp_path).record(outcome(-1))

    def test_places_where_no_ledger_can_be(self, tmp_path):
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file", tmp_path / "file" / "ledger", tmp_path / ("x" * 300)):
            with pytest.raises(OSError, match="A ledger cannot be kept here") as error:
                Ledger(path)
            assert error.value.filename == str(path)

    @pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
    def test_a_folder_that_cannot_be_written_to(self, tmp_path):
        folder = tmp_path / "mine"
        folder.mkdir()
        folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)  # nobody
        try:
            with pytest.raises(PermissionError, match="A ledger cannot be kept here"):
                Ledger(folder / "ledger")
        finally:
            if root:
                os.seteuid(0)

    def test_there_is_none(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no ledger at .*does not exist"):
            open_ledger(tmp_path / "none")
        (tmp_path / "file").write_text("")
        with pytest.raises(NotADirectoryError, match="A ledger is a folder, but"):
            open_ledger(tmp_path / "file")
        with pytest.raises(ValueError, match="is not a ledger: it has no ledger.json"):
            open_ledger(tmp_path)

    def test_an_empty_one(self, tmp_path):
        Ledger(tmp_path)
        with pytest.raises(ValueError, match="is empty: no step has been written yet"):
            open_ledger(tmp_path)

    @pytest.mark.parametrize("use", [Ledger, open_ledger])
    @pytest.mark.parametrize(
        ("said", "message"),
        [
            ('{"format": "microclip-ledger", "version": 2, "microclip": "9"}', "of version 2, but"),
            ('{"format": "other", "version": 1}', 'does not say "format": "microclip-ledger"'),
            ("[]", "this is not a ledger"),
            ("{", "is damaged"),
            ("", "is damaged"),
        ],
    )
    def test_other_versions_and_other_things(self, tmp_path, use, said, message):
        record_steps(tmp_path, range(2))
        (tmp_path / "ledger.json").write_text(said)
        with pytest.raises(ValueError, match=message):
            use(tmp_path)

    @pytest.mark.parametrize("use", [Ledger, open_ledger])
    def test_without_its_manifest(self, tmp_path, use):
        record_steps(tmp_path, range(2))
        (tmp_path / "ledger.json").unlink()
        with pytest.raises(ValueError, match="was deleted: ledger.json is missing. Put it back"):
            use(tmp_path)

    @pytest.mark.parametrize(
        ("table", "first", "message"),
        [
            ("microbatches", 2, "what rank 0 recorded between part-.* is missing"),
            ("examples", 2, "examples/part-00000-0000000002-0000000003.parquet is missing"),
        ],
    )
    def test_half_deleted(self, tmp_path, table, first, message):
        record_steps(tmp_path, range(8), flush_every=2)
        (tmp_path / table / parts.Part(first, 0, first + 1).name).unlink()
        with pytest.raises(ValueError, match=message):
            open_ledger(tmp_path)

    def test_without_micro_batches(self, tmp_path):
        record_steps(tmp_path, range(4), flush_every=2)
        for file in (tmp_path / "microbatches").iterdir():
            file.unlink()
        with pytest.raises(ValueError, match="was deleted: microbatches is missing"):
            open_ledger(tmp_path)

    def test_the_oldest_parts_may_be_removed(self, tmp_path):
        record_steps(tmp_path, range(8), flush_every=2)
        for name in ("microbatches", "examples"):
            (tmp_path / name / parts.Part(0, 0, 1).name).unlink()
        assert open_ledger(tmp_path).steps == range(2, 8)

    @pytest.mark.parametrize("length", [0, 3, 200, -20])
    def test_a_damaged_part(self, tmp_path, length):
        record_steps(tmp_path, range(2))
        path = tmp_path / "microbatches" / parts.Part(0, 0, 1).name
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(ValueError, match="0001.parquet is damaged"):
            open_ledger(tmp_path)
        with pytest.raises(ValueError, match="0001.parquet is damaged"):
            Ledger(tmp_path).record(outcome(2))

    def test_other_columns(self, tmp_path):
        record_steps(tmp_path, range(2))
        path = tmp_path / "microbatches" / parts.Part(0, 0, 1).name
        pq.write_table(pq.read_table(path).drop_columns(["norm"]), path)
        with pytest.raises(ValueError, match="has other columns than a ledger's microbatches"):
            open_ledger(tmp_path)

    def test_without_pyarrow(self):
        code = (
            "import sys; sys.modules['pyarrow'] = None\n"
            "import microclip\n"
            "try: microclip.Ledger\n"
            "except ImportError as error: print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert b"needs pyarrow: pip install 'microclip[ledger]'" in done.stdout

    def test_names_that_do_not_exist(self):
        with pytest.raises(AttributeError, match="module 'microclip' has no attribute 'leger'"):
            _ = microclip.leger


def test_the_manifest_says_what_was_chosen(tmp_path):
    Ledger(tmp_path, every=3)
    said = json.loads((tmp_path / "ledger.json").read_text())
    assert said["options"]["every"] == 3
    assert said["microclip"] == microclip.__version__
    Ledger(tmp_path, every=4)  # whoever goes on does not change it
    assert json.loads((tmp_path / "ledger.json").read_text()) == said


def test_no_warnings_at_the_end(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_steps(tmp_path, range(3))
