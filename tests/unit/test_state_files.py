"""States in files: they come back exactly, and nothing in a file is ever run."""

import math
import pickle

import numpy as np
import pytest
import torch

from microclip.files import DamagedFileError
from microclip.state_files import read_state, write_state, write_tensors

NESTED = {
    "step": 2**70,
    "flags": [True, False, None],
    "numbers": [0.1, -0.0, math.inf, -math.inf, 5e-324, 1e308],
    "texts": ["", "µ\n", "\ud800"],
    "betas": (0.9, (0.999,), []),
    "empty": {},
    7: {0: "by integer", "0": "by text", None: 1, 1.5: 2},
    "tensor": {"tensor": "not a reference"},
    "dict": [["a", 1]],
}


def same(a, b):
    """Whether two states are equal in values, types, shapes and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        bits = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b and math.copysign(1, a) == math.copysign(1, b) if isinstance(a, float) else a == b


def test_everything_comes_back(tmp_path):
    write_state(tmp_path / "a", NESTED)
    assert same(read_state(tmp_path / "a"), NESTED)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint32, torch.bool),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_come_back(tmp_path, dtype, shape):
    state = {"memory": [torch.randn(shape).to(dtype)]}
    write_state(tmp_path / "a", state)
    assert same(read_state(tmp_path / "a"), state)


def test_tensors_that_share_memory_or_are_views(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    state = {"base": base, "turned": base.t(), "row": base[1], "again": base, "nan": base / 0}
    write_state(tmp_path / "a", state)
    assert same(read_state(tmp_path / "a"), {k: v.contiguous() for k, v in state.items()})


def test_numpy(tmp_path):
    state = {"losses": np.arange(5, dtype=np.uint32), "turned": np.eye(3)[:, :2].T}
    write_state(tmp_path / "a", {**state, "number": np.int64(3)})
    assert same(read_state(tmp_path / "a"), {**state, "number": 3})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"rule": {"seen": {1}}}, r"state\['rule'\]\['seen'\] is of type set"),
        ([0, lambda: 0], r"state\[1\] is of type function"),
        ({(1, 2): 3}, r"the key \(1, 2\) of type tuple"),
        ({"a": np.array(["x"])}, "is of type ndarray"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, value, message):
    with pytest.raises(TypeError, match=message):
        write_state(tmp_path / "a", value)
    assert not list(tmp_path.iterdir())


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


@pytest.mark.parametrize("kind", ["pickle", "torch", "empty", "text", "no structure", "deep"])
def test_a_hostile_file_is_damaged_and_nothing_runs(tmp_path, kind):
    path = tmp_path / "a"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif kind == "torch":
        torch.save(Bomb(), path)
    elif kind == "no structure":
        write_tensors(path, {"x": torch.ones(2)})
    elif kind == "deep":
        deep = bytearray(b"[" * 10**6)
        write_tensors(path, {"structure": torch.frombuffer(deep, dtype=torch.uint8)})
    else:
        path.write_bytes(b"" if kind == "empty" else b"hello, world" * 9)
    with pytest.raises(DamagedFileError, match="a is damaged: "):
        read_state(path)
