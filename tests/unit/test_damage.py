"""Damaged files: whatever bit is flipped, a reader says so; and a ledger's rank has one writer."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from microclip import Ledger
from microclip.files import append_line, is_intact, lock, sealed, write_whole
from microclip.ledger import open_ledger, storage
from microclip.report.folder import RunFolder
from microclip.report.run_data import read_examples
from microclip.report.runs import RunError, read_run

from ledger_steps import outcome

SIX, IDS = range(6), range(9)


def write_ledger(path):
    with Ledger(path, flush_every=3) as ledger:
        for step in SIX:
            ledger.record(outcome(step))
    return path


def everything(path):
    """Return all that a reader can learn from a ledger."""
    record = open_ledger(path)
    rows = [
        [row for batch in read() for row in batch.to_pylist()]
        for read in (record.microbatches, record.examples)
    ]
    return rows, record.steps, record.ranks, record.ids_are_integers, record.manifest


def flipped(content, places):
    """Yield a copy of a file's content for each bit to flip, with its number."""
    for bit in places:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(damaged)


class TestLedger:
    @pytest.mark.parametrize("table", ["microbatches", "examples"])
    def test_no_flipped_bit_of_a_part_is_accepted(self, tmp_path, table):
        write_ledger(tmp_path)
        part = tmp_path / table / storage.Part(3, 0, 5).name
        content = part.read_bytes()
        bits = random.Random(0).sample(range(8 * len(content)), 150)
        for bit, damaged in flipped(content, bits):
            part.write_bytes(damaged)
            with pytest.raises(ValueError, match=part.name):
                everything(tmp_path)
            assert bit >= 0

    def test_no_flipped_bit_of_its_description_is_accepted(self, tmp_path):
        write_ledger(tmp_path)
        whole = everything(tmp_path)
        file = tmp_path / "ledger.json"
        content = file.read_bytes()
        for bit, damaged in flipped(content, range(0, 8 * len(content), 7)):
            file.write_bytes(damaged)
            try:
                found = everything(tmp_path)
            except ValueError as error:
                found = str(error)
            assert found == whole or "ledger.json" in found, bit  # the same: white space

    def test_a_writer_does_not_build_on_a_damaged_part(self, tmp_path):
        write_ledger(tmp_path)
        part = tmp_path / "microbatches" / storage.Part(3, 0, 5).name
        (damaged,) = (d for _, d in flipped(part.read_bytes(), [800]))
        part.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"), Ledger(tmp_path) as ledger:
            ledger.record(outcome(4))
        assert part.read_bytes() == damaged

    def test_a_ledger_of_the_version_before_is_read_and_continued(self, tmp_path):
        write_ledger(tmp_path)
        whole = everything(tmp_path)[:4]
        file = tmp_path / "ledger.json"
        content = json.loads(file.read_text())
        del content["sha256"]
        file.write_text(json.dumps(content | {"version": 1}))
        for part in tmp_path.glob("*/*.parquet"):  # as if its checksum had never been there
            part.write_bytes(part.read_bytes().replace(b"microclip.crc32", b"microclip.other"))
        assert everything(tmp_path)[:4] == whole
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(6))
        assert open_ledger(tmp_path).steps == range(7)

    def test_a_second_writer_of_a_rank_is_refused(self, tmp_path):
        with Ledger(tmp_path, flush_every=1) as first, Ledger(tmp_path, flush_every=2) as second:
            first.record(outcome(0))
            with pytest.raises(FileExistsError, match="Rank 0 of the ledger .* already has a wri"):
                second.record(outcome(0))
            second.record(outcome(0), rank=1)
            first.record(outcome(1))
        assert [row["step"] for row in everything(tmp_path)[0][0] if row["rank"] == 0] == [
            *[0] * 2,
            *[1] * 2,
        ]

    def test_a_second_process_is_refused(self, tmp_path):
        code = (
            "import sys, ledger_steps\n"
            "from microclip import Ledger\n"
            "Ledger(sys.argv[1]).record(ledger_steps.outcome(0))\n"
        )
        path = os.pathsep.join(p for p in sys.path if p)
        command = [sys.executable, "-c", code, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": path}
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0))
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 1
            assert "already has a writer: another process" in done.stderr
        subprocess.run(command, env=environment, check=True)

    def test_one_that_was_closed_or_forgotten_is_no_writer(self, tmp_path):
        first = Ledger(tmp_path)
        first.record(outcome(0))
        first.close()
        second = type("Named", (Ledger,), {})(tmp_path)
        second.record(outcome(1))
        second.itself = second  # only the garbage collector can remove it
        del second
        with Ledger(tmp_path) as third:
            third.record(outcome(2))
        assert open_ledger(tmp_path).steps == range(3)

    def test_a_refused_writer_removes_nothing(self, tmp_path):
        """Not even the rows of ranks that no longer exist."""
        with Ledger(tmp_path) as ledger:
            ledger.record(outcome(0))
            ledger.record(outcome(0), rank=1)
            ledger.flush()
            with Ledger(tmp_path) as second, pytest.raises(FileExistsError):
                second.record(outcome(0))
        assert open_ledger(tmp_path).ranks == (0, 1)


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run", microbatch_size=2, settings={"lr": 0.1})
    for step in range(8):
        run.log(step, loss=1 / (step + 1), validation_accuracy=0.1 * step)
    write_ledger(run.ledger)
    for one in IDS:
        run.example(one, image=[[one, 255]], label="cat", truth="dog")
    return run.path


def told(path):
    """Return what a page would show of a run, and its notes."""
    run = read_run(path)
    known = [str(one) for one in IDS]
    examples = read_examples(path, known, known)
    return (run.metrics, run.settings, run.seed, examples.facts, examples.contents), (
        *run.notes,
        *examples.notes,
    )


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "examples.jsonl"])
def test_no_flipped_bit_of_a_run_is_shown_without_a_note(run, name):
    whole, notes = told(run)
    assert not notes
    file = run / name
    content = file.read_bytes()
    bits = random.Random(0).sample(range(8 * len(content)), 60)
    noticed = 0
    for bit, damaged in flipped(content, bits):
        file.write_bytes(damaged)
        try:
            found, notes = told(run)
        except RunError as error:
            found, notes = None, [str(error)]
        assert found == whole or any(name in note for note in notes), bit
        noticed += bool(notes)
    assert noticed > 50


@pytest.mark.parametrize("damage", ["zeroed", "empty", "no last line end"])
def test_metrics_that_were_lost_are_noted(run, damage):
    file = run / "metrics.jsonl"
    content = file.read_bytes()
    file.write_bytes(
        {"zeroed": bytes(len(content)), "empty": b"", "no last line end": content[:-1] + b"*"}[
            damage
        ]
    )
    (note,) = read_run(run).notes
    assert "metrics.jsonl" in note


def test_a_line_that_is_being_written_is_not_noted(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 9, "lo')
    assert read_run(run).notes == ()


def test_a_damaged_picture_is_not_shown(run):
    from microclip.report.media import ByteBudget, LeftOutError

    line = json.loads((run / "examples.jsonl").read_text().splitlines()[0])
    file = run / line["file"]
    given = run, line["file"], "image", line["file_crc32"]
    assert ByteBudget(10**6).embed(*given).uri
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(LeftOutError, match="is damaged"):
        ByteBudget(10**6).embed(*given)


def test_a_seal():
    content = {"a": [1, 0.1, None], "b": {"c": "µ"}, 3: float("inf")}
    once = json.loads(json.dumps(sealed(content)))
    assert is_intact(once)
    assert not is_intact({**once, "a": [1, 0.2, None]})
    assert not is_intact({"a": 1})


class TestReachingTheDisk:
    """Seen from the system calls: contents are synced before the name, and the folder after."""

    def test_whole_files(self, tmp_path, monkeypatch):
        calls = []
        fsync, replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", lambda d: (calls.append(_name(d)), fsync(d)))
        monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("renamed"), replace(a, b)))
        write_whole(tmp_path / "a", b"hello")
        assert calls[0].endswith(".tmp")
        assert calls[1:] == ["renamed", str(tmp_path)]

    def test_a_full_disk_is_named(self):
        full = Path("/dev/full")
        if not full.exists():
            pytest.skip("only Linux has it")
        with pytest.raises(OSError, match=r"Could not write this file: No space.*'/dev/full'"):
            append_line(full, "hello")


def _name(descriptor):
    return os.readlink(f"/proc/self/fd/{descriptor}")


class TestLock:
    def test_no_link_is_followed_and_nothing_emptied(self, tmp_path):
        (tmp_path / "precious").write_text("mine")
        (tmp_path / "lock").symlink_to(tmp_path / "precious")
        with pytest.raises(OSError, match="symbolic link, which is not followed"):
            lock(tmp_path / "lock", RuntimeError())
        with lock(tmp_path / "precious", RuntimeError()):
            assert (tmp_path / "precious").read_text() == "mine"

    @pytest.mark.parametrize("end", ["held.close()", "os.kill(os.getpid(), 9)"])
    def test_a_child_does_not_keep_it(self, tmp_path, end):
        """In a separate process, because this one has threads."""
        code = (
            "import os, sys, time\n"
            "from pathlib import Path\n"
            "from microclip.files import lock\n"
            "path = Path(sys.argv[1])\n"
            "held = lock(path, RuntimeError('taken'))\n"
            "(ready, say), (wait, end) = os.pipe(), os.pipe()\n"
            "if not os.fork():\n"
            "    os.close(end)\n"
            "    os.write(say, b'.')\n"
            "    os.read(wait, 1)\n"  # until the parent has ended
            "    for attempt in range(100):\n"  # the system closes pipes first
            "        try:\n"
            "            lock(path, BlockingIOError()).close()\n"
            "            break\n"
            "        except BlockingIOError:\n"
            "            time.sleep(0.05)\n"
            "    else:\n"
            "        raise RuntimeError('still taken')\n"
            "    print('free', flush=True)\n"
            "    os._exit(0)\n"
            "os.read(ready, 1)\n"
            f"{end}\n"
            "lock(path, RuntimeError('the child has it')).close()\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "lock")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("free\n", "")
