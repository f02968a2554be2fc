"""The state of training in a file that cannot run code: JSON for its structure, raw tensors.

For dicts, lists, tuples, numbers, strings, None, tensors and NumPy arrays, nested in any way, which
come back exactly as they were, on the CPU (a NumPy number as Python's). The file is in the
safetensors format; its tensor "structure" holds the JSON. Knows nothing about whose state it is.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microclip.files import DamagedFileError

STRUCTURE = "structure"
PLAIN = (str, int, float, type(None))  # bool is an int; what JSON has, and what keys may be


def write_state(path: Path, state: Any) -> None:
    """Write a state to a new file."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_pack(state, "state", tensors)).encode()
    tensors[STRUCTURE] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
    write_tensors(path, tensors)


def read_state(path: Path) -> Any:
    """Return the state in a file."""
    tensors = read_tensors(path)
    try:
        packed = tensors.pop(STRUCTURE)
        text = ctypes.string_at(packed.data_ptr(), packed.nbytes)
        return _unpack(json.loads(text), tensors)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(
            f"{path} is damaged: its structure cannot be read ({error!r})."
        ) from error


def write_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write tensors to a new safetensors file; those on other devices are copied."""
    safetensors = _safetensors()
    unshared: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory
        unshared[name] = plain.clone() if place in seen and place else plain
        seen.add(place)
    try:
        safetensors.torch.save_file(unshared, path, metadata=metadata or None)
    except safetensors.SafetensorError as error:
        raise OSError(f"Could not write {path}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file, in memory of their own."""
    safetensors = _safetensors()
    try:
        found: dict[str, Tensor] = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise DamagedFileError(
            f"{path} is damaged: it cannot be read as safetensors ({error})."
        ) from error
    return {name: tensor.clone() for name, tensor in found.items()}  # they were mapped to the file


def _pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; its tensors are put aside under the names that the JSON has."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list):
        return [_pack(each, f"{place}[{i}]", tensors) for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": _pack(list(value), place, tensors)}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, PLAIN):
                raise TypeError(
                    f"{place} has the key {key!r} of type {type(key).__name__}, but a saved state "
                    "has only strings, numbers and None as keys."
                )
        packed = [[key, _pack(each, f"{place}[{key!r}]", tensors)] for key, each in value.items()]
        return {"dict": packed}
    name = str(len(tensors))
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    is_numpy = type(value).__module__ == "numpy" and hasattr(value, "dtype")
    if is_numpy and value.dtype.kind in "biufc":
        if type(value).__name__ != "ndarray":
            return value.item()
        tensors[name] = torch.from_numpy(value.copy())
        return {"array": name}
    raise TypeError(
        f"{place} is of type {type(value).__name__}, which a saved state cannot hold: it may have "
        "dicts, lists, tuples, numbers, strings, None, tensors and NumPy arrays of numbers."
    )


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(packed, list):
        return [_unpack(each, tensors) for each in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "dict":
        return {key: _unpack(value, tensors) for key, value in content}
    if kind == "tuple":
        return tuple(_unpack(content, tensors))
    if kind == "array":
        return tensors[content].numpy()
    if kind == "tensor":
        return tensors[content]
    raise ValueError(f"unknown kind {kind!r}")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "Saving a state needs safetensors: pip install 'microclip[hf]'"
        ) from error
    return safetensors
