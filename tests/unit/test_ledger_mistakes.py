"""Ledgers on failing disks, and mistakes that users make."""

import os
import resource
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest
import torch

import microclip
from microclip import Clipper, Ledger
from microclip.ledger import open_ledger, storage

from ledger_steps import outcome, record_steps, steps_of


@contextmanager
def no_file_larger_than(size):
    """Simulate a full disk for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestFailingDisks:
    @pytest.mark.parametrize("size", [100, 2000, 20_000])
    def test_nothing_is_lost_and_nothing_written_twice(self, tmp_path, size):
        """Small limits fail at once; a larger one lets the first of two tables through."""
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
                ledger.record(_wide(101))  # it does not continue silently
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

    def test_a_folder_that_disappears(self, tmp_path):
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
        with pytest.raises(ValueError, match="step must be 0 or a positive integer, but got -1"):
            Ledger(tmp_path).record(outcome(-1))

    def test_paths_where_no_ledger_can_be_created(self, tmp_path):
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file", tmp_path / "file" / "ledger", tmp_path / ("x" * 300)):
            with pytest.raises(OSError, match="Cannot create a ledger here") as error:
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
            with pytest.raises(PermissionError, match="Cannot create a ledger here"):
                Ledger(folder / "ledger")
        finally:
            if root:
                os.seteuid(0)

    def test_no_ledger_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no ledger at .*does not exist"):
            open_ledger(tmp_path / "none")
        (tmp_path / "file").write_text("")
        with pytest.raises(NotADirectoryError, match="A ledger is a folder, but"):
            open_ledger(tmp_path / "file")
        with pytest.raises(ValueError, match="is not a ledger: it has no ledger.json"):
            open_ledger(tmp_path)

    def test_an_empty_ledger(self, tmp_path):
        Ledger(tmp_path)
        with pytest.raises(ValueError, match="is empty: no step has been written yet"):
            open_ledger(tmp_path)

    @pytest.mark.parametrize("use", [Ledger, open_ledger])
    @pytest.mark.parametrize(
        ("said", "message"),
        [
            (
                '{"format": "microclip-ledger", "version": 4, "microclip": "9"}',
                "has version 4",
            ),
            ('{"format": "other", "version": 1}', 'does not say "format": "microclip-ledger"'),
            ("[]", "this is not a ledger"),
            ("{", "is damaged"),
            ("", "is damaged"),
        ],
    )
    def test_other_versions_and_formats(self, tmp_path, use, said, message):
        record_steps(tmp_path, range(2))
        (tmp_path / "ledger.json").write_text(said)
        with pytest.raises(ValueError, match=message):
            use(tmp_path)

    @pytest.mark.parametrize("use", [Ledger, open_ledger])
    def test_without_its_manifest(self, tmp_path, use):
        record_steps(tmp_path, range(2))
        (tmp_path / "ledger.json").unlink()
        with pytest.raises(ValueError, match="was deleted: ledger.json is missing. Restore it"):
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
        (tmp_path / table / storage.Part(first, 0, first + 1).name).unlink()
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
            (tmp_path / name / storage.Part(0, 0, 1).name).unlink()
        assert open_ledger(tmp_path).steps == range(2, 8)

    @pytest.mark.parametrize("length", [0, 3, 200, -20])
    def test_a_damaged_part(self, tmp_path, length):
        record_steps(tmp_path, range(2))
        path = tmp_path / "microbatches" / storage.Part(0, 0, 1).name
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(ValueError, match="0001.parquet is damaged"):
            open_ledger(tmp_path)
        with pytest.raises(ValueError, match="0001.parquet is damaged"):
            Ledger(tmp_path).record(outcome(2))

    def test_other_columns(self, tmp_path):
        record_steps(tmp_path, range(2))
        path = tmp_path / "microbatches" / storage.Part(0, 0, 1).name
        rows = pq.read_table(path).drop_columns(["norm"])
        pq.write_table(rows.replace_schema_metadata(), path)
        with pytest.raises(ValueError, match="does not have the columns of microbatches"):
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


def test_a_path_that_is_not_utf8_is_named(tmp_path):
    record_steps(tmp_path / "ledger", range(2))
    os.rename(tmp_path / "ledger", os.fsencode(tmp_path) + b"/led\xff")
    path = os.fsdecode(os.fsencode(tmp_path) + b"/led\xff")
    message = r"led\\udcff is not valid UTF-8, .* Rename the folder"
    for opened in (open_ledger, Ledger):
        with pytest.raises(ValueError, match=message):
            opened(path)
    (tmp_path / "link").symlink_to(path)
    assert set(steps_of(tmp_path / "link")) == {0, 1}
