"""Checkpoints: no file of a run is unpickled, damage is named, and only our own is removed."""

import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from microclip.files import DamagedFileError
from microclip_lab.speech import features
from microclip_lab.training.checkpoints import Checkpoints, State
from microclip_lab.training.config import LayoutError
from microclip_lab.training.fetch import FetchError, Package
from microclip_lab.training.train import train

import processes
import sharded_checkpoint
from tiny_recipe import Tiny, forget_accelerate, training, weights

RECIPE = Tiny(dropout=0.5)
FILES = ("manifest.json", "model.safetensors", "random-0.safetensors", "training.safetensors")


@pytest.fixture(autouse=True)
def _alone():
    forget_accelerate()


@pytest.fixture
def run(tmp_path):
    """A run of 40 steps that stopped at step 12, with checkpoints of steps 6 and 12."""
    # "auto" goes by the clock, which two runs need not agree on
    how = training(out=tmp_path / "run", checkpoint_every=6, ledger=False, engine="fused")
    train(RECIPE, how, until=12)
    forget_accelerate()
    return replace(how, resume=True)


def steps(path):
    return sorted(each.name for each in (path / "checkpoints").glob("step-*"))


class Bomb:
    """Leaves a mark if it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", [*FILES, "custom_checkpoint_0.pkl", "optimizer.bin"])
def test_a_pickle_in_a_checkpoint_is_never_loaded(run, tmp_path, name):
    last = run.out / "checkpoints" / "step-000000012"
    bomb = Bomb(tmp_path / "code-ran")
    if name.endswith(".bin"):
        torch.save(bomb, last / name)
    else:
        (last / name).write_bytes(pickle.dumps(bomb))
    if name in FILES:
        with pytest.raises(DamagedFileError, match=f"{name} is damaged"):
            train(RECIPE, run)
    else:
        train(RECIPE, run)
    assert not (tmp_path / "code-ran").exists()


def test_pickles_of_an_earlier_version_are_refused(run, tmp_path):
    last = run.out / "checkpoints" / "step-000000012"
    shutil.rmtree(last)
    last.mkdir()
    (last / "state.json").write_text('{"step": 12}')
    (last / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Bomb(tmp_path / "code-ran")))
    with pytest.raises(DamagedFileError, match="earlier version, with pickled objects"):
        train(RECIPE, run)
    assert not (tmp_path / "code-ran").exists()


def test_no_file_of_a_run_is_a_pickle(run):
    """Neither a plain one nor one in torch's archives."""
    files = [path for path in run.out.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [
        path for path in files if path.read_bytes()[:2] in (b"\x80\x04", b"\x80\x02", b"PK")
    ]


@pytest.mark.sample(3)  # every damage, every file
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing", "swapped"])
def test_damage_is_named_and_the_checkpoint_before_offered(run, name, damage):
    last, before = (run.out / "checkpoints" / f"step-{n:09d}" for n in (12, 6))
    file = last / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "cut":
        del content[-7:]
    elif damage == "empty":
        content.clear()
    elif damage == "swapped":
        content = (before / name).read_bytes()
    file.write_bytes(content)
    if damage == "missing":
        file.unlink()
    message = rf"(?s)step-000000012.*{name}.*before it, .*step-000000006, is whole"
    if (name, damage) != ("manifest.json", "swapped"):
        with pytest.raises(DamagedFileError, match=message):
            train(RECIPE, run)
    else:  # an intact manifest, of other files
        with pytest.raises(DamagedFileError, match="step-000000006, is whole"):
            train(RECIPE, run)
    forget_accelerate()
    shutil.rmtree(last)  # as the message says
    assert train(RECIPE, run).step == 40


def test_from_the_checkpoint_before_it_comes_to_the_same_weights(run, tmp_path):
    train(RECIPE, replace(run, resume=False, out=tmp_path / "undisturbed"))
    forget_accelerate()
    shutil.rmtree(run.out / "checkpoints" / "step-000000012")
    train(RECIPE, run)
    wanted = weights(tmp_path / "undisturbed")
    assert all(torch.equal(wanted[name], value) for name, value in weights(run.out).items())


@pytest.mark.full
def test_a_sharded_model_resumes_bit_for_bit(tmp_path):
    assert processes.run(sharded_checkpoint.go, 2, tmp_path, str(tmp_path / "run")) == [True, True]


def test_all_damaged(run):
    for path in (run.out / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(DamagedFileError, match="There is no whole checkpoint before it"):
        train(RECIPE, run)


def test_weights_to_start_from_are_compared_too(run, tmp_path):
    file = run.out / "checkpoints" / "step-000000012" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x10
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match="model.safetensors is damaged: its checksum is"):
        train(RECIPE, training(out=tmp_path / "new", start_from=file.parent))


def test_only_what_the_run_has_written_is_removed(run, tmp_path):
    """Neither notes, nor what a link leads to, nor the checkpoints of another run."""
    folder = run.out / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    kept = [
        folder / "notes" / "important.txt",
        folder / "step-000000006-keep" / "important.txt",
        folder / "best-000000001" / "important.txt",  # a name like ours
        folder / "plan.txt",
        elsewhere / "important.txt",
    ]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (folder / "step-000000003").symlink_to(elsewhere, target_is_directory=True)
    (folder / "link").symlink_to(elsewhere, target_is_directory=True)
    other = train(RECIPE, training(out=tmp_path / "other", steps=4, ledger=False)).path
    forget_accelerate()
    shutil.copytree(other / "checkpoints" / "step-000000004", folder / "step-000000004")
    train(RECIPE, run)
    assert [path.read_text() for path in kept] == ["mine"] * len(kept)
    assert steps(run.out) == [
        *("step-000000003", "step-000000004"),
        *("step-000000006-keep", "step-000000036", "step-000000040"),
    ]
    assert (folder / "step-000000004" / "model.safetensors").exists()


def test_a_folder_in_the_way_is_not_removed(run):
    there = run.out / "checkpoints" / "step-000000018"
    there.mkdir()
    (there / "important.txt").write_text("mine")
    checkpoints = Checkpoints(run.out, Alone())
    with pytest.raises(FileExistsError, match="step-000000018 is in the way of a checkpoint"):
        checkpoints.write(State(18), None)
    assert (there / "important.txt").read_text() == "mine"


class Alone:
    """The part of an Accelerator that checkpoints use, of a single process."""

    is_main_process, process_index, num_processes = True, 0, 1

    def wait_for_everyone(self):
        pass


def test_the_lock_neither_follows_a_link_nor_empties_its_file(tmp_path):
    target = tmp_path / "precious.txt"
    target.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link, which is not followed"):
        train(RECIPE, training(out=tmp_path / "run", steps=2))
    assert target.read_text() == "mine"
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").write_text("mine")
    train(RECIPE, training(out=tmp_path / "run", steps=2))
    assert (tmp_path / "run" / ".lock").read_text() == "mine"


def test_a_source_distribution_is_compared_before_it_is_run(tmp_path, monkeypatch):
    """With the real pip, which runs setup.py to learn what a package is called."""
    mark = tmp_path / "code-ran"
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: somedata\nVersion: 1.0\n",
        "setup.py": f"open({str(mark)!r}, 'w').close()\n"
        "from setuptools import setup\nsetup(name='somedata', version='1.0')\n",
    }
    store = tmp_path / "store"
    store.mkdir()
    with tarfile.open(store / "somedata-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"somedata-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(store))
    package = Package("sdist", "somedata==1.0", "somedata-1.0.tar.gz", "0" * 64)
    with pytest.raises(FetchError, match="could not fetch somedata==1.0"):
        package.fetched()
    assert not mark.exists()
    assert not list((tmp_path / "cache" / "microclip").iterdir())


def test_data_that_cannot_be_loaded_leaves_no_folder(tmp_path):
    class Lost(Tiny):
        def load(self, seed):
            raise FileNotFoundError("no data here")

    with pytest.raises(FileNotFoundError, match="no data here"):
        train(Lost(), training(out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_recording_that_cannot_be_decoded_is_named(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    file = tmp_path / "a.flac"
    soundfile.write(file, np.random.default_rng(0).normal(size=32000) / 9, 16000)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(LayoutError, match=r"a.flac is damaged and cannot be decoded \(.*Copy it"):
        features.read(file)


def test_an_existing_folder_stays(tmp_path):
    class Lost(Tiny):
        def load(self, seed):
            raise FileNotFoundError("no data here")

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(FileNotFoundError, match="no data here"):
        train(Lost(), training(out=tmp_path / "run"))
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


LIMITED = """
import resource, signal, sys
sys.path.insert(0, {support!r})
from tiny_recipe import Tiny, training
RECIPE = Tiny(dropout=0.5)
from microclip_lab.training.train import train
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
how = training(out={out!r}, resume=True, ledger=False, checkpoint_every=6, engine="fused")
def no_room(step, figures):
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
train(RECIPE, how, watch=no_room)
"""


def test_no_room_for_a_checkpoint(run):
    """Files may not grow beyond some bytes, which fails as a full disk does."""
    support = str(Path(__file__).with_name("support"))
    script = LIMITED.format(support=support, out=str(run.out))
    # coverage would have no room for its own file, either
    environment = {name: v for name, v in os.environ.items() if not name.startswith("COV")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "step-000000018 could not be written: " in last, last
    assert "File too large" in last
    assert "basic_ios" not in done.stderr
    assert steps(run.out) == ["step-000000006", "step-000000012"]
    assert not list((run.out / "checkpoints").glob(".*"))
    assert train(RECIPE, run).step == 40
