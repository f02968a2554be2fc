"""The C library: what it computes, torch as the fallback, and how it is built."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from microclip import Clipper
from microclip.engines.single_pass import native
from microclip.engines.single_pass.rows import pair_sums

from models import TASKS

ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def library_if_it_runs():
    """The library, even where torch is faster and it would not be used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MICROCLIP_C", "1")
        native.library.cache_clear()
        found = native.library()
    native.library.cache_clear()
    return found


LIBRARY = library_if_it_runs()


def needs_library(test):
    skip = pytest.mark.skipif(LIBRARY is None, reason="there is no library, or it does not run")
    return skip(pytest.mark.usefixtures("with_library")(test))


@pytest.fixture
def with_library(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: LIBRARY)


def wanted(left, right):
    """Every pair separately, in double precision."""
    lefts, rights = (torch.einsum("jrk,jsk->jrs", s, s) for s in (left.double(), right.double()))
    products = lefts * rights
    return products.sum((1, 2)), products.diagonal(dim1=1, dim2=2).sum(1)


def assert_right(found, left, right):
    """Relative to the largest that the sum of these pairs can be: signs may cancel."""
    largest = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1) ** 2
    for one, other in zip(found, wanted(left, right), strict=True):
        assert ((one - other).abs() <= 1e-6 * largest).all()


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)


@needs_library
class TestLibrary:
    def test_by_hand(self):
        """Rows (3, 4) and (1, 0), of deltas 1 and 2: |(3, 4) + 2 (1, 0)|^2 = 25 + 16 = 41.

        Each by itself: |(3, 4)|^2 + |2 (1, 0)|^2 = 29.
        """
        left, right = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]]), torch.tensor([[[1.0], [2.0]]])
        assert [sums.tolist() for sums in native.pairs(left, right)] == [[41.0], [29.0]]

    @pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 12, 13, 64, 65, 127, 128])
    @pytest.mark.parametrize("widths", [(1, 1), (3, 8), (8, 13), (224, 31), (40, 96)])
    @pytest.mark.parametrize("microbatches", [1, 2, 5])
    def test_all_pairs_of_rows(self, rows, widths, microbatches):
        torch.manual_seed(rows)
        left, right = (torch.randn(microbatches, rows, width) for width in widths)
        assert native.pairs_up(left, right)
        assert_right(native.pairs(left, right), left, right)

    @pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 2, 0)])
    def test_empty(self, shape):
        nothing = torch.zeros(shape)
        for sums in native.pairs(nothing, nothing):
            assert sums.tolist() == [0.0] * shape[0]

    def test_strided_rows(self):
        torch.manual_seed(0)
        large = torch.randn(6, 20, 30)
        left, right = large[::2, 3:17:2, 4:20], torch.randn(1, 7, 9).expand(3, -1, -1)
        assert native.pairs_up(left, right)
        assert_right(native.pairs(left, right), left, right)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("row", [0, 3, 6])
    def test_nonfinite_values_stay_in_their_microbatch(self, bad, row):
        torch.manual_seed(0)
        left, right = torch.randn(3, 7, 10), torch.randn(3, 7, 12)
        clean, _ = native.pairs(left, right)
        left[1, row, 9] = bad
        found, own = native.pairs(left, right)
        assert own.isfinite().tolist() == [True, False, True]
        assert found.isfinite().tolist() == [True, False, True]
        assert found[::2].tolist() == clean[::2].tolist()

    def test_any_number_of_threads(self):
        torch.manual_seed(0)
        left, right = torch.randn(33, 20, 50), torch.randn(33, 20, 60)
        threads, found = torch.get_num_threads(), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found.append([sums.tolist() for sums in native.pairs(left, right)])
        finally:
            torch.set_num_threads(threads)
        assert found[0] == found[1] == found[2]

    def test_what_is_left_to_torch(self):
        rows = torch.randn(2, 5, 8)
        assert native.pairs_up(rows, rows)
        for other in (rows.double(), rows.mT, torch.randn(2, native.MOST_ROWS + 1, 8)):
            assert not native.pairs_up(other, other)
            assert_right(pair_sums(other, other), other, other)

    def test_a_single_pass_uses_it(self, monkeypatch):
        torch.manual_seed(0)
        calls, pairs = [], native.pairs
        monkeypatch.setattr(native, "pairs", lambda *sides: calls.append(1) or pairs(*sides))
        task = TASKS["gpt"](2)
        clipper = Clipper(task.model, 1, engine="fused", verify="never")
        clipper.backward(task.losses, task.batch)
        assert len(calls) == 17  # linear layers


def layer_norm(examples, tokens, shape, **kind):
    """What a layer norm has after the backward pass: input, statistics, gradient of the output."""
    x = torch.randn(examples, tokens, *shape, **kind) + 3
    _, mean, rstd = torch.native_layer_norm(x, shape, None, None, 1e-5)
    return x, mean, rstd, torch.randn_like(x)


@needs_library
class TestLayerNorm:
    @pytest.mark.parametrize("tokens", [1, 3, 64])
    @pytest.mark.parametrize("shape", [(1,), (7,), (8,), (224,), (3, 5)])
    @pytest.mark.parametrize("b", [1, 2, 6])
    def test_gradients_of_scale_and_shift(self, tokens, shape, b):
        torch.manual_seed(0)
        x, mean, rstd, d = layer_norm(6, tokens, shape)
        assert native.adds_up(b * tokens, x, mean, rstd, d)
        found = native.layer_norm(x, mean, rstd, d, 6 // b)
        x, mean, rstd, d = (tensor.double() for tensor in (x, mean, rstd, d))
        for one, each in zip(found, (d * (x - mean) * rstd, d), strict=True):
            rows = each.reshape(6 // b, b * tokens, -1)
            assert ((one - rows.sum(1)).abs() <= 1e-5 * rows.abs().sum(1) + 1e-6).all()

    def test_what_is_left_to_torch(self):
        parts = layer_norm(4, 3, (8,))
        assert native.adds_up(3, *parts)
        assert not native.adds_up(native.MOST_ROWS_ADDED + 1, *parts)
        assert not native.adds_up(3, *layer_norm(4, 3, (8,), dtype=torch.float64))
        assert not native.adds_up(3, *parts[:3], parts[3].mT)
        assert not native.adds_up(3, *parts[:3], parts[3].half())

    @pytest.mark.parametrize("frozen", [None, "weight", "bias"])
    @pytest.mark.parametrize("examples", [6, 5])
    def test_frozen_halves_and_ragged_ends(self, frozen, examples):
        """Micro-batches of 2, the last perhaps of 1, against `stream`, which uses none of it."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        nn.init.normal_(model[1].weight)
        if frozen:
            getattr(model[1], frozen).requires_grad_(False)
        x, found = torch.randn(examples, 5, 4), []
        for engine in ("stream", "fused"):
            model.zero_grad()
            clipper = Clipper(model, 2, engine=engine)
            clipper.backward(lambda x: model(x).square().mean((1, 2)), x)
            found.append([p.grad for p in model.parameters() if p.requires_grad])
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 1e-5 * one.norm()


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 128, 129, 200])
def test_torch_gives_the_same(rows, without_library):
    torch.manual_seed(rows)
    left, right = torch.randn(3, rows, 20), torch.randn(3, rows, 33)
    assert not native.pairs_up(left, right)
    assert_right(pair_sums(left, right), left, right)


@needs_library
@pytest.mark.parametrize("b", [1, 2, 4])
def test_steps_are_the_same_with_and_without_it(b, monkeypatch):
    torch.manual_seed(0)
    task, found, norms = TASKS["gpt"](4), [], []
    for library in (lambda: LIBRARY, lambda: None):
        monkeypatch.setattr(native, "library", library)
        task.model.zero_grad()
        outcome = Clipper(task.model, b, engine="fused").backward(task.losses, task.batch)
        norms.append(outcome.norms)
        found.append([p.grad for p in task.model.parameters()])
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


class TestFinding:
    """Whatever the reason why it cannot be used, torch does the work."""

    @pytest.fixture(autouse=True)
    def anew(self):
        native.library.cache_clear()
        yield
        native.library.cache_clear()

    def test_it_is_missing(self, monkeypatch, tmp_path):
        monkeypatch.setattr(native, "LIBRARY", tmp_path / "libnative.so")
        assert native.library() is None

    def test_it_cannot_be_loaded(self, monkeypatch, tmp_path):
        broken = tmp_path / "libnative.so"
        broken.write_text("not a library")
        monkeypatch.setattr(native, "LIBRARY", broken)
        assert native.library() is None

    def test_it_is_out_of_date(self, monkeypatch):
        class Library:
            class microclip_pairs:  # noqa: N801  # as it was named before
                pass

        monkeypatch.setattr(native.ctypes, "CDLL", lambda path: Library)
        monkeypatch.setattr(native, "LIBRARY", Path(__file__))
        monkeypatch.delenv("MICROCLIP_C", raising=False)
        assert native.library() is None

    def test_it_is_disabled(self, monkeypatch):
        monkeypatch.setenv("MICROCLIP_C", "0")
        assert native.library() is None

    def test_another_processor(self, monkeypatch):
        class Library:
            class microclip_pair_sums:  # noqa: N801
                pass

            microclip_layer_norm = microclip_pair_sums

            @staticmethod
            def microclip_pays():
                return 0

        monkeypatch.setattr(native.ctypes, "CDLL", lambda path: Library)
        monkeypatch.setattr(native, "LIBRARY", Path(__file__))
        monkeypatch.delenv("MICROCLIP_C", raising=False)
        assert native.library() is None


class TestBuilding:
    @pytest.fixture
    def hook(self):
        spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    @needs_compiler
    def test_it_compiles_without_a_warning(self, hook, tmp_path, monkeypatch):
        monkeypatch.setenv("CC", "cc -Wall -Wextra -Werror")
        library = tmp_path / "libnative.so"
        assert hook.compiled(ROOT / hook.SOURCE, library)
        assert library.read_bytes().startswith(b"\x7fELF")

    @pytest.mark.parametrize("compiler", ["false", "no-such-compiler --at-all"])
    def test_without_a_compiler_nothing_is_built(self, hook, compiler, tmp_path, monkeypatch):
        monkeypatch.setenv("CC", compiler)
        assert not hook.compiled(ROOT / hook.SOURCE, tmp_path / "libnative.so")
        assert not list(tmp_path.iterdir())

    @needs_compiler
    @pytest.mark.parametrize("compiler", ["cc", "false"])
    def test_wheels(self, compiler, tmp_path):
        """With a compiler: the library, for this platform. Without: none, for any platform."""
        for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp_path)
        shutil.copytree(
            ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "wheels"],
            cwd=tmp_path,
            env={**os.environ, "CC": compiler},
            check=True,
            capture_output=True,
        )
        (wheel,) = (tmp_path / "wheels").iterdir()
        libraries = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".so")]
        if compiler == "cc":
            assert libraries == ["microclip/engines/single_pass/libnative.so"]
            assert "-py3-none-any" not in wheel.name
        else:
            assert libraries == []
            assert wheel.name.endswith("-py3-none-any.whl")
