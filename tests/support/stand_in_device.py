"""A stand-in for an accelerator: torch's PrivateUse1 device, in memory of the host.

`install()` registers it as "accel", for good, so it belongs into a process of its own, before the
first backward pass. Its tensors have real values. As on CUDA, an operation that mixes them with
tensors of the host fails, unless these have no dimensions; and every read by the host is counted,
with the place in microclip that asked for it. `float64=False` makes it like MPS: there is no
float64, and `synchronize` takes no argument. Needs no compiler: memory becomes a tensor through
DLPack, and one fallback runs every operation on the host. Knows nothing of microclip but its name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from host_reads import Counts, reads
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "accel"
WIDE = {torch.float64, torch.complex128}
ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten


class MixedDevicesError(RuntimeError):
    """An operation got tensors of the host and of the accelerator."""


# ---- memory: DLPack's C structures, see dlpack.h

HOST, EXTENSION = 1, 12  # kDLCPU and kDLExtDev
HEADER = 1024  # bytes before the numbers: the structure, the shape and the strides
SHAPE, STRIDES = 256, 640
CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}


class _Numbers(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_C = ctypes.CDLL(None)
_C.malloc.restype, _C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
# the structure lies at the start of its own memory, so the C library's free() will do
_FREE = ctypes.cast(_C.free, ctypes.c_void_p).value
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
)


def _tensor(
    device: int,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    data: int | None = None,
) -> Tensor:
    """Return a tensor on a device, in memory at `data`, or in memory of its own."""
    extent = 0
    if 0 not in size:
        extent = 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))
    address = _C.malloc(HEADER + (extent * dtype.itemsize if data is None else 0))
    dims = ctypes.c_int64 * len(size)
    dims.from_address(address + SHAPE)[:] = size
    dims.from_address(address + STRIDES)[:] = strides
    kind = str(dtype).removeprefix("torch.").rstrip("0123456789")
    _Numbers.from_address(address).__init__(  # type: ignore[misc]
        address + HEADER if data is None else data,
        device, 0, len(size), CODES[kind], 8 * dtype.itemsize, 1,
        address + SHAPE, address + STRIDES, 0, None, _FREE,
    )  # fmt: skip
    found: Tensor = torch._C._from_dlpack(_capsule(address, b"dltensor", None))  # type: ignore[attr-defined]
    return found


# ---- the device


class Accelerator:
    """The operations of the device, one for all."""

    def __init__(self, float64: bool) -> None:
        self.float64 = float64
        self.generator = torch.Generator()
        self.counting: list[Counts] = []
        self.library: torch.library.Library | None = None

    @contextmanager
    def counts(self) -> Iterator[Counts]:
        """Count what the host reads in the block."""
        counts = Counts()
        self.counting.append(counts)
        try:
            yield counts
        finally:
            self.counting.remove(counts)

    def empty(self, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor."""
        if dtype in WIDE and not self.float64:
            raise TypeError(f"Cannot convert to {dtype}: the device {NAME} does not support it.")
        return _tensor(EXTENSION, size, strides, dtype)

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host."""
        found = self.empty(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        alias(found).copy_(tensor)
        return found

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run any operation."""
        with torch._C.DisableTorchFunction():  # kernels of devices are not seen by modes
            return self._run(op, args, kwargs)

    def _run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = op._schema.name.removeprefix("aten::")
        if name in FACTORIES:
            return FACTORIES[name](self, *args, **kwargs)
        if name in SPECIAL:
            return SPECIAL[name](self, *args, **kwargs)
        if op.is_view or name == "set_":  # only sizes and strides change
            return op.redispatch(ON_HOST, *args, **kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        self._refuse_mixes(op, flat)
        if reads(name, args, kwargs):
            self.note_read(name)
        originals: dict[int, Tensor] = {}
        unsized: list[tuple[Tensor, Tensor]] = []  # results without memory, as yet

        def on_host(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, Tensor) or value.device.type != NAME:
                return value
            if value.numel() or "out" not in op._overloadname:
                shown = alias(value)
            else:
                shown = torch.empty(0, dtype=value.dtype)
                unsized.append((value, shown))
            originals[id(shown)] = value
            return shown

        def on_device(found: Tensor) -> Tensor:
            return originals[id(found)] if id(found) in originals else self.upload(found)

        shown = [on_host(value) for value in flat]  # kept, so that their ids stay unique
        args, kwargs = pytree.tree_unflatten(shown, spec)
        if any(argument.name == "generator" for argument in op._schema.arguments):
            kwargs = {**kwargs, "generator": self.generator}
        found = op(*args, **kwargs)
        for value, result in unsized:
            if result.numel():
                aten.set_.source_Tensor.redispatch(ON_HOST, value, self.upload(result))
        return pytree.tree_map_only(Tensor, on_device, found)

    def _refuse_mixes(self, op: Any, flat: list[Any]) -> None:
        if op._schema.name.startswith("aten::_ctc_loss"):
            return  # lengths may be anywhere
        tensors = [value for value in flat if isinstance(value, Tensor)]
        others = [t for t in tensors if t.device.type != NAME and t.dim() > 0]
        if others and len(others) < len(tensors):
            raise MixedDevicesError(
                f"Expected all tensors to be on the same device, but {op} got tensors on {NAME} "
                f"and one of shape {tuple(others[0].shape)} on {others[0].device}."
            )

    def note_read(self, name: str) -> None:
        """Count a read by the host."""
        for counts in self.counting:
            counts.note(name)


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the host in the same memory."""
    size, strides = tuple(tensor.shape), tensor.stride()
    found = _tensor(HOST, size, strides, tensor.dtype, tensor.data_ptr())
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def _empty(
    on: Accelerator, /, size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any
) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    like = torch.empty(
        size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format
    )
    return on.empty(tuple(size), like.stride(), dtype)


def _empty_strided(
    on: Accelerator, /, size: Any, stride: Any, *, dtype: Any = None, **_: Any
) -> Tensor:
    return on.empty(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


def _copy_from(
    on: Accelerator, /, source: Tensor, target: Tensor, non_blocking: bool = False
) -> Tensor:
    if target.device.type != NAME:
        on.note_read("copy")
    here = [alias(each) if each.device.type == NAME else each for each in (source, target)]
    here[1].copy_(here[0])
    return target


def _resize(on: Accelerator, /, tensor: Tensor, size: Any, **_: Any) -> Tensor:
    old, found = alias(tensor), _empty(on, size, dtype=tensor.dtype)
    count = min(old.numel(), found.numel())
    alias(found).view(-1)[:count] = old.reshape(-1)[:count]
    aten.set_.source_Tensor.redispatch(ON_HOST, tensor, found)
    return tensor


def _convolution(on: Accelerator, /, *args: Any) -> Tensor:
    return on(aten.convolution.default, *args)


def _convolution_backward(
    on: Accelerator, /, grad: Tensor, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Any:
    *settings, mask = (*args, *kwargs.values())
    return on(
        aten.convolution_backward.default, grad, x, weight, [weight.shape[0]], *settings, mask
    )


COMPOSITE = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
FACTORIES: dict[str, Any] = {"empty": _empty, "empty_strided": _empty_strided}
SPECIAL: dict[str, Any] = {
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "resize_": _resize,
    "convolution_overrideable": _convolution,  # so they are called on devices unknown to torch
    "convolution_backward_overrideable": _convolution_backward,
}


class _Module(ModuleType):
    """torch.accel, with what torch and trainers ask of such a module."""

    def __init__(self, device: Accelerator) -> None:
        super().__init__(f"torch.{NAME}")
        self._device = device
        self.waited = 0
        if device.float64:
            self.synchronize = self._synchronize_one  # type: ignore[method-assign]

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self._device.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return self._device.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        self._device.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def synchronize(self) -> None:
        self.waited += 1

    def _synchronize_one(self, device: Any = None) -> None:
        self.waited += 1


def install(float64: bool = True) -> Accelerator:
    """Register the device in this process."""
    device = Accelerator(float64)
    _setup_privateuseone_for_python_backend(NAME, _Module(device))
    # one by one: torch does not find a fallback written in Python while a dispatch mode is active
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if _needs_kernel(name):
            op, _, overload = name.removeprefix("aten::").partition(".")
            found = getattr(getattr(aten, op), overload or "default")
            library.m.impl(name.removeprefix("aten::"), "PrivateUse1", partial(device, found))
    for lazy in ("Conjugate", "Negative"):  # copying resolves these, and resolving copies
        library.impl("_copy_from", torch.library.fallthrough_kernel, lazy)
    device.library = library
    return device


def _needs_kernel(name: str) -> bool:
    """Whether an operation has one kernel for each device."""
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
    if name.startswith("aten::") and name.removeprefix("aten::") in SPECIAL:
        return True
    return name.startswith("aten::") and has("CPU") and not any(map(has, COMPOSITE))
