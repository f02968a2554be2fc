"""Saving and restoring the side effects of forward passes, so that they can be run again.

Engines that call `loss_fn` more than once (two passes, checks, trials) take a snapshot before and
restore it after. It holds buffers, parameters that forward passes write to (moving averages of a
teacher, codebooks), gradients of parameters that are not trained here, attributes of modules
(counters, caches), what `loss_fn` closes over, and every random generator among these, besides the
global ones of torch, Python and numpy. What it cannot see, such as a file or a custom object, shows
up as a different gradient, so whatever runs a pass twice compares the two.

Tensors are copied up to a limit. If there are many, every step but the first few copies only those
that were seen to change; rare snapshots (trials, checks) copy all.
"""

from __future__ import annotations

import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from microclip import multitensor
from microclip.engines.gradients import set_aside
from microclip.engines.randomness import (
    Randomness,
    generator_state,
    numpy_class,
    set_generator_state,
)
from microclip.microbatches import MicrobatchList
from microclip.wrappers import modules_of

# packages whose functions hold no state of a user's forward pass
FOREIGN = ("torch", "transformers", "accelerate", "lightning", "numpy", "datasets", "pandas")
STANDARD = sys.stdlib_module_names - {"__main__", "types"}
MOST = 2**30  # bytes of tensors that are copied at most
SOME = 2**26  # bytes of tensors outside the model
LITTLE = 2**22  # bytes that may be copied in every step
LOOKS = 4  # first steps that copy everything, to learn what changes; then 8, 16, 32, ...
REACH = 2000  # objects that are inspected
FEW, MANY = 1000, 100_000  # entries up to which a container is inspected, and copied
DEEP = 6  # levels of nesting
CLIPPER = "microclip.clipper"  # a loss may reach it through a Trainer: it holds the step itself
OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}

Restore = Callable[[], object]


class SideEffects:
    """What a model's forward passes are known to change, learned from one snapshot to the next."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changing: set[str] = set()  # names of tensors that were seen to change
        self.looks = 0  # snapshots taken by steps
        self.is_little = False  # whether there is so little that everything is always copied
        self.doubts: list[tuple[Tensor, str]] = []  # comparisons of the last step, still unread
        self.edits_batches: bool | None = None  # whether loss_fn writes to its batch; None: unknown

    def snapshot(self, *loss_fns: Callable[..., Any]) -> Snapshot:
        """Take a full snapshot of the model, of what these functions hold, and of random states."""
        return Snapshot(self, loss_fns, copies_all=True)

    def in_every_step(self, *loss_fns: Callable[..., Any]) -> Snapshot:
        """Take a snapshot that copies only the tensors known to change, if they are known."""
        self.looks += 1
        looks = self.looks <= LOOKS or self.looks & (self.looks - 1) == 0
        return Snapshot(self, loss_fns, copies_all=looks or self.is_little)

    def look_again(self) -> None:
        """Forget what is known: the next snapshots copy everything that fits."""
        self.looks, self.edits_batches = 0, None

    def guarded(self, microbatches: MicrobatchList) -> MicrobatchList:
        """Return micro-batches that can be restored if loss_fn writes to them."""
        return microbatches if self.edits_batches is False else microbatches.keep_copy()

    def note_edits(self, microbatches: MicrobatchList) -> None:
        """Note whether loss_fn has written to these."""
        if microbatches.were_edited:
            self.edits_batches = True
        elif self.edits_batches is None:
            self.edits_batches = False


@contextmanager
def undisturbed(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Inside the block the model may be run freely; afterwards its state is restored."""
    before = SideEffects(model).snapshot()
    modes = [(module, module.training) for module in model.modules()]
    try:
        with set_aside(parameters):
            yield
    finally:
        before.restore()
        for module, mode in modes:
            module.training = mode


class Snapshot:
    """The current state of a model and of what some functions hold."""

    def __init__(
        self, effects: SideEffects, loss_fns: tuple[Callable[..., Any], ...], copies_all: bool
    ) -> None:
        self._effects = effects
        self._copies_all = copies_all
        self._room = MOST
        self._reach = REACH
        self._restores: list[Restore] = []
        self._copies: dict[str, tuple[Tensor, Tensor, tuple[int, int]]] = {}
        self._kept: dict[str, tuple[Tensor, tuple[int, int]]] = {}  # those that are not copied
        self._generators: list[tuple[Any, Any]] = []
        self._seen: dict[int, object] = {}  # kept alive, so that no other object gets the same id
        self.unrepeatable = (
            ""  # the name of something that can be read only once, such as an iterator
        )
        model = effects.model
        parameters = list(model.parameters())
        self._devices = {parameter.device for parameter in parameters}
        self._trained = {id(parameter) for parameter in parameters}
        self._randomness = Randomness.now(self._devices)
        self._own: set[int] = {id(module) for module in modules_of(model)}
        self._module(model, "model")
        self._room = min(self._room, SOME)
        for number, loss_fn in enumerate(loss_fns):
            self._function(loss_fn, f"loss_fn{number or ''}", 0)
        if copies_all:
            copied = sum(copy.nbytes for _, copy, _ in self._copies.values())
            effects.is_little = copied <= LITTLE

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, including tensors that were replaced."""
        for restore in self._restores:
            restore()
        self._randomness.restore()

    def learn(self) -> None:
        """Note which tensors were written to since; called after a whole pass."""
        self._effects.changing |= self.unforeseen() | {
            name
            for name, (now, copy, version) in self._copies.items()
            if version != _version(now) or (multitensor.on_host(now) and _differ(now, copy))
        }

    def unforeseen(self) -> set[str]:
        """Return the names of tensors that were not copied but have been written to since."""
        return {name for name, (now, version) in self._kept.items() if version != _version(now)}

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since, from any known generator."""
        own = any(generator_state(generator) != state for generator, state in self._generators)
        return own or self._randomness.moved(self._devices)

    # one method for each kind of object

    def _is_new(self, value: object) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _module(self, module: nn.Module, name: str) -> None:
        for part_name, part in module.named_modules():
            if not self._is_new(part):
                continue
            place = f"{name}.{part_name}" if part_name else name
            if isinstance(part, torch.jit.ScriptModule):  # it has no Python attributes
                for tensor_name, tensor in part.named_buffers(recurse=False):
                    self._tensor(tensor, f"{place}.{tensor_name}")
                continue
            origin = type(part).__module__
            is_layer = origin.startswith("torch.nn.modules")
            if part._buffers or not is_layer:
                self._entries(part._buffers, place, 0)
            if part._parameters:
                self._parameters(part, place)
            if is_layer:
                self._shallow(part.__dict__)
            elif not origin.startswith("torch."):  # torch's wrappers keep their own state
                self._attributes(part, place)
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
                self._function(hook, place, 1)

    def _parameters(self, module: nn.Module, place: str) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None or not self._is_new(parameter):
                continue
            full_name = f"{place}.{name}"
            if parameter.requires_grad and id(module) in self._own:
                # trained parameters are too large to copy; writes to them are detected
                if full_name not in self._effects.changing:
                    self._kept[full_name] = parameter, _version(parameter)
                    continue
            else:
                self._gradient(parameter)
            self._tensor(parameter, full_name)

    def _gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        copy = None if gradient is None else gradient.detach().clone()

        def restore() -> None:
            parameter.grad = gradient
            if gradient is not None and copy is not None:
                gradient.copy_(copy)

        self._restores.append(restore)

    def _attributes(self, module: nn.Module, place: str) -> None:
        attributes = module.__dict__
        self._entries(attributes, place, 0, [n for n in attributes if n not in OF_EVERY_MODULE])

    def _function(self, function: Any, place: str, depth: int) -> None:
        """Save what a function holds: closure, bound object, arguments, globals."""
        if depth > DEEP or not self._is_new(function):
            return
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._function(wrapped, place, depth + 1)
        if isinstance(function, nn.Module):
            del self._seen[id(function)]
            self._module(function, place)
        elif isinstance(function, partial):
            self._function(function.func, place, depth + 1)
            for value in (*function.args, *function.keywords.values()):
                self._value(value, place, depth + 1)
        elif isinstance(function, types.MethodType):
            self._value(function.__self__, place, depth + 1)
            self._function(function.__func__, place, depth + 1)
        elif _is_foreign(function):
            return
        elif isinstance(function, types.FunctionType):
            self._cells(function, place, depth)
            held = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            for value in held:
                self._value(value, place, depth + 1)
            if function.__dict__:
                self._entries(function.__dict__, place, depth + 1)
            for name in _names_in(function.__code__):
                if name in function.__globals__:
                    self._global(function.__globals__, name, depth)
        elif callable(function) and not isinstance(function, type):
            del self._seen[id(function)]
            self._value(function, place, depth)

    def _cells(self, function: types.FunctionType, place: str, depth: int) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # a variable without a value yet
                continue

            def restore(cell: types.CellType = cell, value: object = value) -> None:
                cell.cell_contents = value

            self._restores.append(restore)
            self._value(value, f"{place}: {name}", depth + 1)

    def _global(self, names: dict[str, Any], name: str, depth: int) -> None:
        value = names[name]
        if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            return

        def restore() -> None:
            if names.get(name, names) is not value:
                names[name] = value

        self._restores.append(restore)
        self._value(value, name, depth + 1)

    def _entries(
        self, entries: dict[str, Any], place: str, depth: int, names: list[str] | None = None
    ) -> None:
        """Save a dict of attributes: its keys, its values, and their contents."""
        chosen = list(entries) if names is None else names
        before = {name: entries[name] for name in chosen}

        def restore() -> None:
            for name in [n for n in entries if n not in before and n not in OF_EVERY_MODULE]:
                del entries[name]
            for name, value in before.items():
                if entries.get(name, restore) is not value:
                    entries[name] = value

        self._restores.append(restore)
        for name, value in before.items():
            self._value(value, f"{place}.{name}", depth + 1)

    def _shallow(self, attributes: dict[str, Any]) -> None:
        """Save a dict of attributes: its keys and values, but not their contents."""
        before = attributes.copy()

        def restore() -> None:
            if attributes.keys() != before.keys() or any(
                attributes[name] is not value for name, value in before.items()
            ):
                for name in attributes.keys() - before.keys():
                    del attributes[name]
                attributes.update(before)

        self._restores.append(restore)

    def _value(self, value: Any, place: str, depth: int) -> None:
        if value is None or isinstance(value, bool | int | float | str | bytes) or depth > DEEP:
            return
        if isinstance(value, nn.Module):
            self._module(value, place)
        elif isinstance(value, Tensor):
            if self._is_new(value):
                self._tensor(value, place)
        elif isinstance(value, types.FunctionType | types.MethodType | partial):
            self._function(value, place, depth)
        elif id(value) not in self._seen and self._reach > 0:
            self._seen[id(value)] = value
            self._reach -= 1
            self._thing(value, place, depth)

    def _thing(self, value: Any, place: str, depth: int) -> None:
        """Save any other object, if it can be saved."""
        state = generator_state(value)
        if state is not None:
            self._generators.append((value, state))
            self._restores.append(partial(set_generator_state, value, state))
        elif isinstance(value, numpy_class("ndarray")):
            if value.flags.writeable and value.nbytes <= self._room:
                self._room -= value.nbytes
                self._restores.append(partial(value.__setitem__, ..., value.copy()))
        elif type(value) in CONTAINERS:
            if len(value) <= MANY:
                self._container(value, place, depth)
        elif isinstance(value, tuple):
            for number, entry in enumerate(value[:FEW]):
                self._value(entry, f"{place}[{number}]", depth + 1)
        elif isinstance(value, Iterator):
            if depth <= 1:  # held by the function directly, so it will be read
                self.unrepeatable = self.unrepeatable or f"{place}, a {type(value).__name__}"
        elif isinstance(value, torch.optim.Optimizer):
            held = (parameter for group in value.param_groups for parameter in group["params"])
            if not any(id(parameter) in self._trained for parameter in held):
                self._container(value.state, f"{place}.state", depth)
        elif isinstance(value, type):
            if not _is_foreign(value):
                self._class(value)
        elif (
            type(getattr(value, "__dict__", None)) is dict
            and not _is_foreign(type(value))
            and type(value).__module__ != CLIPPER
        ):
            self._entries(value.__dict__, place, depth)

    def _class(self, kind: type) -> None:
        """Save numbers that are attributes of a class."""
        for name, value in list(vars(kind).items()):
            if isinstance(value, bool | int | float) and not name.startswith("__"):
                self._restores.append(partial(_set_attribute, kind, name, value))

    def _container(self, container: Any, place: str, depth: int) -> None:
        before = container.copy()

        def restore() -> None:
            if _is_same(container, before):
                return
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(before)

        self._restores.append(restore)
        for key, entry in _entries_of(before) if len(before) <= FEW else ():
            self._value(entry, f"{place}[{key!r}]" if isinstance(key, str) else place, depth + 1)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        """Copy a tensor, or keep its storage, which is enough if it is given another one."""
        if tensor.grad_fn is not None or tensor.is_nested or tensor.layout != torch.strided:
            return  # a result: restored by assigning it back to its name
        if is_lazy(tensor) or tensor.is_meta:
            return
        while name in self._copies or name in self._kept:
            name += "'"
        data = tensor.data
        copy: Tensor | None = None
        wanted = self._copies_all or name in self._effects.changing
        if wanted and tensor.nbytes <= self._room:
            self._room -= tensor.nbytes
            copy = data.clone()
            self._copies[name] = tensor, copy, _version(tensor)
        else:
            self._kept[name] = tensor, _version(tensor)

        def restore() -> None:
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
            if copy is not None and not (multitensor.on_host(data) and not _differ(data, copy)):
                data.copy_(copy)

        self._restores.append(restore)


CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


def _is_same(container: Any, before: Any) -> bool:
    """Whether a container has the same entries as before."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    if isinstance(container, set):
        return bool(container == before)
    return all(a is b for a, b in zip(container, before, strict=True))


def _set_attribute(kind: type, name: str, value: object) -> None:
    if vars(kind).get(name) is not value:
        setattr(kind, name, value)


def _is_foreign(thing: Any) -> bool:
    """Whether a function or class is from a library that keeps no state of forward passes."""
    name = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return name in FOREIGN or name in STANDARD


def _entries_of(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that a function, or one nested in it, looks up."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Return numbers that, in most cases, change when a tensor is written to or replaced."""
    return (-1 if tensor.is_inference() else tensor._version), tensor.data_ptr()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ; NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if is_traceable_wrapper_subclass(one):  # quantized weights, which may not know equal()
        names, _ = one.__tensor_flatten__()
        return any(_differ(getattr(one, name), getattr(other, name)) for name in names)
    if torch.equal(one, other):
        return False
    return not bool(((one == other) | ((one != one) & (other != other))).all())
