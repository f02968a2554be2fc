"""Ledgers of many ranks, with ids of any kind, and read by other tools."""

import duckdb
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microclip import Ledger
from microclip.ledger import arrays, open_ledger, storage

import ledger_ranks
import processes
from ledger_steps import outcome, parts_of, steps_of, table


class TestManyRanks:
    @pytest.mark.full
    def test_write_one_ledger_and_fewer_resume(self, tmp_path):
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
        (tmp_path / "microbatches" / f".{storage.Part(0, 0, 1).name}.tmp").write_bytes(b"PAR1 half")
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

    def test_a_part_that_disappears_is_explained(self, tmp_path):
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
    def test_become_strings_and_stay_in_the_folder(self, tmp_path):
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
            "run/ledger/.lock-00000",
            "run/ledger/examples",
            f"run/ledger/examples/{storage.Part(0, 0, 0).name}",
            "run/ledger/ledger.json",
            "run/ledger/microbatches",
            f"run/ledger/microbatches/{storage.Part(0, 0, 0).name}",
        ]
        # statistics would hold the longest text again, in every part
        assert (path / "examples" / storage.Part(0, 0, 0).name).stat().st_size < 2**17

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

    def test_integers_in_some_parts_only_come_back_as_strings(self, tmp_path):
        with Ledger(tmp_path, flush_every=1) as ledger:
            ledger.record(outcome(0))
            ledger.record(outcome(1, ids=(("a", "b"), ("c", "d"))))
        assert [row["ids"][0] for row in table(open_ledger(tmp_path))] == ["0", "2", "a", "c"]

    def test_much_text_makes_more_parts(self, tmp_path, monkeypatch):
        monkeypatch.setattr(arrays, "TEXT_LIMIT", 100)
        with Ledger(tmp_path) as ledger:
            for step in range(8):
                ledger.record(outcome(step, ids=(("a" * 10, "b" * 10), ("c" * 10, "d" * 10))))
        assert parts_of(tmp_path) == [(0, 1), (2, 3), (4, 5), (6, 7)]
        assert steps_of(tmp_path) == [step for step in range(8) for _ in range(2)]
