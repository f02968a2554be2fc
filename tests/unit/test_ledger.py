"""The ledger: what is recorded can be read back, at any time, after any crash."""

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import microclip
from microclip import Clipper, Ledger, Outcome
from microclip.engines.select import ENGINES
from microclip.ledger import open_ledger, rank_writer, storage
from microclip.ledger.tables import OPTIONAL, PREDICTIONS, SCHEMAS

import ledger_faults
from ledger_steps import outcome, parts_of, record_steps, steps_of, table


class TestReadingBack:
    def test_every_column(self, tmp_path):
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
        absent = dict.fromkeys(("weight", *PREDICTIONS))
        assert table(record, "examples") == [
            {"step": 7, "rank": 0, "microbatch": 0, "id": 10, "loss": 0.0, **absent},
            {"step": 7, "rank": 0, "microbatch": 0, "id": 11, "loss": 0.25, **absent},
            {"step": 7, "rank": 0, "microbatch": 1, "id": 12, "loss": 0.5, **absent},
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
                model.zero_grad()
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
        assert not any(tensor.requires_grad for tensor in kept)  # else graphs would be kept alive
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

    def test_nonfinite_values_are_kept(self, tmp_path):
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
        with pytest.raises(ValueError, match="columns of microbatches are step, .* but got 'x'"):
            record.microbatches(["x"])
        with pytest.raises(ValueError, match="one of microbatches and examples, but got 'x'"):
            record.dataset("x")

    def test_the_columns_on_disk_are_those_of_the_schema(self, tmp_path):
        record_steps(tmp_path, range(2))
        for name, schema in SCHEMAS.items():
            [file] = (tmp_path / name).glob("*.parquet")
            needed = pa.schema([field for field in schema if field.name not in OPTIONAL[name]])
            assert pq.read_schema(file).remove_metadata() == needed

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
        clipper.backward(lambda x: model(x).mean(), torch.eye(2))
        assert parts_of(tmp_path) == []
        clipper.state_dict()
        assert parts_of(tmp_path) == [(0, 0)]

    def test_many_rows_flush(self, tmp_path, monkeypatch):
        monkeypatch.setattr(rank_writer, "ROWS", 30)
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
            "clipper.backward(lambda x: model(x).mean(), torch.eye(2))\n"
            "raise SystemExit('the end')\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert done.stderr == b"the end\n"
        assert steps_of(tmp_path) == [0, 0]

    def test_a_forgotten_ledger_is_written(self, tmp_path):
        Ledger(tmp_path).record(outcome(0))
        assert steps_of(tmp_path) == [0, 0]

    def test_a_fork_does_not_write_its_parents_rows(self, tmp_path):
        """In a separate process, because this one has threads."""
        code = (
            "import os, ledger_steps\n"
            "from microclip import Ledger\n"
            f"ledger = Ledger({str(tmp_path)!r})\n"
            "ledger.record(ledger_steps.outcome(0))\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    ledger.flush()\n"
            "    ledger.record(ledger_steps.outcome(0), rank=1)\n"
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

    def test_a_closed_ledger_accepts_no_steps(self, tmp_path):
        ledger = Ledger(tmp_path)
        ledger.close()
        ledger.close()
        with pytest.raises(ValueError, match="is closed: create a new Ledger"):
            ledger.record(outcome(0))

    def test_sampling(self, tmp_path):
        record_steps(tmp_path, range(10), every=4)
        assert sorted(set(steps_of(tmp_path))) == [0, 4, 8]

    def test_keep_steps_keeps_at_least_that_many(self, tmp_path):
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


class TestResuming:
    def test_after_the_last_step(self, tmp_path):
        record_steps(tmp_path, range(5), flush_every=2)
        record_steps(tmp_path, range(5, 8), flush_every=2)
        assert steps_of(tmp_path) == [step for step in range(8) for _ in range(2)]

    @pytest.mark.parametrize("start", range(9))
    def test_from_an_earlier_step(self, tmp_path, start):
        """At the start of a part or in its middle: no row twice, none missing."""
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

    def test_going_back_within_a_run_warns(self, tmp_path):
        with Ledger(tmp_path, flush_every=2) as ledger:
            for step in range(5):
                ledger.record(outcome(step))
            with pytest.warns(RuntimeWarning, match="Step 1 of rank 0 is recorded again"):
                ledger.record(outcome(1))
        assert steps_of(tmp_path) == [0, 0, 1, 1]

    def test_restarting_from_step_0_warns_and_replaces(self, tmp_path, caplog):
        record_steps(tmp_path, range(5))
        record_steps(tmp_path, range(2))
        assert "restarts from step 0: its steps up to 4" in caplog.text
        assert steps_of(tmp_path) == [0, 0, 1, 1]

    def test_leftovers_of_this_rank_are_removed(self, tmp_path):
        record_steps(tmp_path, range(3))
        for rank in (0, 1):
            leftover = tmp_path / "microbatches" / f".{storage.Part(3, rank, 5).name}.tmp"
            leftover.write_bytes(b"half of a file")
        record_steps(tmp_path, [3])
        assert [p.name[:11] for p in (tmp_path / "microbatches").glob(".*")] == [".part-00001"]
        assert steps_of(tmp_path)[-1] == 3

    def test_a_part_that_kept_its_old_name_is_renamed(self, tmp_path):
        record_steps(tmp_path, range(3))
        folder = tmp_path / "microbatches"
        os.rename(folder / storage.Part(0, 0, 2).name, folder / storage.Part(0, 0, 9).name)
        record_steps(tmp_path, range(3, 5))
        assert parts_of(tmp_path) == [(0, 2), (3, 4)]
        assert steps_of(tmp_path) == [step for step in range(5) for _ in range(2)]

    def test_examples_of_an_unfinished_flush_are_ignored_and_removed(self, tmp_path):
        record_steps(tmp_path, range(6), flush_every=3)
        os.remove(tmp_path / "microbatches" / storage.Part(3, 0, 5).name)
        assert set(steps_of(tmp_path, "examples")) == {0, 1, 2}
        record_steps(tmp_path, [7])
        assert parts_of(tmp_path, "examples") == [(0, 2), (7, 7)]

    @pytest.mark.full
    def test_killed_at_random_moments(self, tmp_path):
        for line in ledger_faults.torment(tmp_path, 12):
            assert "are whole" in line

    @pytest.mark.sample(5)
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


def test_the_manifest_records_the_options(tmp_path):
    Ledger(tmp_path, every=3)
    said = json.loads((tmp_path / "ledger.json").read_text())
    assert said["options"]["every"] == 3
    assert said["microclip"] == microclip.__version__
    Ledger(tmp_path, every=4)  # resuming does not change it
    assert json.loads((tmp_path / "ledger.json").read_text()) == said


def test_no_warnings_at_the_end(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_steps(tmp_path, range(3))
