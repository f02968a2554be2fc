"""Models sharded with `fully_shard` (FSDP2): no rank ever holds a whole gradient.

`RankScope`: each micro-batch belongs to one rank. A first backward pass takes norms where the
gradients would be reduced, and sends nothing; a second one sends the weighted gradients. No
gradient is kept.
`WorldScope`: a micro-batch is what all ranks process at the same time. Its gradient comes out
reduced, in shards, and is streamed: the accumulator is sharded as well.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from microclip import multitensor
from microclip.distributed.ranks import Ranks
from microclip.engines.base import Engine
from microclip.engines.gradients import (
    Gradients,
    LossFn,
    backward,
    evaluate,
    gradient_hooks,
    set_aside,
    take,
    trainable,
    unscale,
)
from microclip.engines.select import Scope
from microclip.engines.step_record import StepRecord
from microclip.engines.stream import Stream
from microclip.microbatches import MicrobatchList
from microclip.wrappers import sharded_modules


class Fsdp:
    """A sharded model: its ranks, its engines, and when it gathers and reduces."""

    def __init__(self, model: nn.Module, scope: Scope = "rank") -> None:
        self._model = model
        self._scope = scope
        self.modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.reshard()
        mesh = _mesh(model)
        parameter = next(p for p in model.parameters() if p.requires_grad)
        self.ranks = Ranks(mesh.get_group(), parameter.device)
        names = {id(module): name or "the model itself" for name, module in model.named_modules()}
        self.is_known = False  # whether the ranks have finished a step together
        self._step: int | None = None
        for module in self.modules:
            for group in _groups(module):
                self.ranks.parts.append(repr(names[id(module)]))
                if group.gradient_divide_factor is not None:
                    raise NotImplementedError(
                        "set_gradient_divide_factor() scales what FSDP sends by a factor that "
                        "clipping would have to know. Leave it at its default."
                    )

    @classmethod
    def find(cls, model: nn.Module, scope: Scope = "rank") -> Fsdp | None:
        """Return it for a sharded model, None for others; refuse unsupported sharding."""
        if sharded_modules(model):
            return cls(model, scope)
        sharded = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
        if not sharded:
            return None
        raise NotImplementedError(
            f"Parameter {sharded[0]!r} is sharded over ranks (a DTensor), but fully_shard() was "
            "not called on the Clipper's model or a part of it. Give the Clipper the whole model; "
            "tensor parallelism is not supported."
        )

    @property
    def norm_exchange(self) -> Ranks | None:
        """The ranks to exchange norms with; with scope="world" every rank has them already."""
        return self.ranks if self._scope == "rank" else None

    @property
    def ranks_per_row(self) -> int:
        """How many ranks a row of the record stands for, with the examples of one of them."""
        return 1 if self._scope == "rank" else self.ranks.count

    def norm_of_shards(self, norm: Tensor) -> Tensor:
        """Return the norm of a whole gradient, given that of this rank's shards of it."""
        square = norm.square()
        dist.all_reduce(square, group=self.ranks.group)
        return square.sqrt()

    def make(self, name: str, record: StepRecord, scaler: GradScaler | None) -> Engine:
        """Return the engine for one step; there is one for each scope."""
        engine = WorldScope if self._scope == "world" else RankScope
        if name not in ("auto", engine.name):
            raise ValueError(
                f"engine={name!r} does not work on a sharded model with scope={self._scope!r}: "
                'leave it at "auto".'
            )
        if engine is WorldScope and not record.policy.rule.streams:
            raise ValueError(
                f"{record.policy.rule!r} needs all norms before it can weight any gradient, but "
                'micro-batches over all ranks are streamed. Use scope="rank" or rescale=True.'
            )
        return engine(self._model, trainable(self._model), record, scaler, fsdp=self)

    def report_empty_batch(self, record: StepRecord, scaler: GradScaler | None) -> None:
        """Tell the other ranks, which would wait for this one, that it has no examples."""
        self.ranks.describe(record.policy, scaler, trainable(self._model))
        self.ranks.agree(record.step, 0)

    def reshard(self) -> None:
        """Put the shards back in place, which a forward pass without a backward pass replaces.

        So that the model has the parameters that its optimizer has. Whatever needs unsharded
        parameters later gathers them again.
        """
        if set(map(id, sharded_modules(self._model))) != set(map(id, self.modules)):
            raise RuntimeError(
                f"Parts of {type(self._model).__name__} were sharded, added or removed after the "
                "Clipper was made, so it does not know how they are sharded. Make a new Clipper."
            )
        _refuse_frozen_whole(self._all_groups)
        for module in self.modules:
            module.reshard()
        if any(not g.is_sharded or g._training_state.name != "IDLE" for g in self._all_groups):
            raise RuntimeError(
                "An error interrupted a forward or backward pass of the sharded model while ranks "
                "were communicating. Call model.reset_iter_state() (torch 2.13) on all ranks after "
                "the error, before the next step."
            )

    @property
    def _all_groups(self) -> list[Any]:
        return [group for module in self.modules for group in _groups(module)]

    @contextmanager
    def sending(self, way: Sending) -> Iterator[None]:
        """Inside the block, FSDP reduces gradients through `way`."""
        before = [(group, group._reduce_scatter_comm) for group in self._all_groups]
        try:
            with self.reducing():
                for part, (group, comm) in enumerate(before):
                    group._reduce_scatter_comm = _ReduceScatter(way, comm, self, part)
                yield
        finally:
            for group, comm in before:
                group._reduce_scatter_comm = comm

    def begin(self) -> None:
        """Begin a step, with no part of the model used yet."""
        self.ranks.used = []

    @contextmanager
    def meeting(self, step: int) -> Iterator[None]:
        """Inside the block, in the first step, ranks check that they gather the same parts.

        If one rank does not use a layer, the others would wait for it, or mistake its next layer
        for this one. Later steps are compared only at their end, before the result is used.
        """
        if self.is_known or self.ranks.count == 1:
            with self.ranks.answering(step):
                yield
            return
        self._step = step
        before = [(group, group._all_gather_comm) for group in self._all_groups]
        try:
            for part, (group, comm) in enumerate(before):
                group._all_gather_comm = _AllGather(comm, self, part)
            with self.ranks.answering(step):
                yield
        finally:
            self._step = None
            for group, comm in before:
                group._all_gather_comm = comm

    def meet(self, part: int, size: int = 0) -> None:
        """In the first step, wait for the other ranks before anything is sent."""
        if self._step is not None:
            self.ranks.meet(self._step, part, size)

    def note_unused(self, parameters: Iterable[str], used: Container[str]) -> None:
        """Note the parameters without a gradient, which must be the same on all ranks.

        The messages do not show which parameters they belong to.
        """
        unused = [name for name in parameters if name not in used]
        if unused:
            self.ranks.used.append(f"no gradient for {', '.join(unused)}")

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Inside the block FSDP reduces, even if it was told not to, to accumulate gradients.

        Otherwise it would keep whole gradients, and none would pass through here.
        """
        groups = self._all_groups
        before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
        try:
            for group in groups:
                group.reduce_grads = group.all_reduce_grads = True
            yield
        finally:
            for group, reduce, all_reduce in before:
                group.reduce_grads, group.all_reduce_grads = reduce, all_reduce


class Sending:
    """Sits between FSDP and its reduce-scatter, where a rank's whole gradient passes through."""

    def __init__(self, mode: Literal["norms", "all", "nothing"]) -> None:
        self.mode = mode
        self.norms: list[Tensor] = []

    def take(self, output: Tensor, flat: Tensor, group: dist.ProcessGroup) -> bool:
        """Process a gradient; return whether to send it."""
        if self.mode == "norms":
            norm = multitensor.norm([flat], flat.device)
            self.norms.append(norm * _divided_before(flat.dtype, group.size()))
            output.zero_()
            return False
        if self.mode == "nothing":
            flat.zero_()  # the other ranks wait for it
        return True


class _ReduceScatter:
    def __init__(self, sending: Sending, comm: Any, fsdp: Fsdp, part: int) -> None:
        self._sending, self._comm = sending, comm
        self._fsdp, self._part = fsdp, part

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        found: Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return found

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **options: Any
    ) -> Any:
        size, ranks = input_tensor.numel(), self._fsdp.ranks
        ranks.used.append(f"{ranks.parts[self._part]} with {size} numbers")
        if not self._sending.take(output_tensor, input_tensor, group):
            return None
        self._fsdp.meet(self._part, size)
        return self._comm(output_tensor, input_tensor, group, op, **options)


class _AllGather:
    """Waits for the other ranks, then gathers."""

    def __init__(self, comm: Any, fsdp: Fsdp, part: int) -> None:
        self._comm, self._fsdp, self._part = comm, fsdp, part

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        found: Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return found

    def __call__(self, **options: Any) -> Any:
        self._fsdp.meet(self._part)
        return self._comm(**options)


class RankScope(Engine):
    """Keeps the graphs of all micro-batches, as a plain step does; differentiates each twice."""

    name = "two_pass"

    def __init__(self, *args: Any, fsdp: Fsdp, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fsdp = fsdp
        self._fsdp.begin()
        self._losses: list[Tensor] = []

    def fold(self, loss_fn: LossFn, microbatches: MicrobatchList, final: bool) -> None:
        """First backward pass: take norms, send nothing."""
        self._fsdp.ranks.describe(self.record.policy, self.scaler, self.parameters)
        self._fsdp.ranks.agree(self.record.step, len(microbatches))
        with set_aside(self.parameters), self._fsdp.meeting(self.record.step):
            for microbatch in microbatches:
                loss, each = evaluate(loss_fn, microbatch)
                norm = unscale(self._norm(loss), self.scaler)
                self.record.add(microbatch, norm, loss.detach(), each)
                self._losses.append(loss)

    def _norm(self, loss: Tensor) -> Tensor:
        """Differentiate for the norm only."""
        sending = Sending("norms")
        alone = self._fsdp.ranks.count == 1  # then FSDP sends nothing
        used: set[str] = set()
        with self._fsdp.sending(sending), nullcontext() if alone else self._dropping(used):
            backward(loss, self.scaler, retain_graph=True)
        if alone:
            return multitensor.norm(list(take(self.parameters).values()), self.device)
        self._fsdp.note_unused(self.parameters, used)
        return multitensor.join(sending.norms, self.device)

    def _dropping(self, used: set[str]) -> AbstractContextManager[None]:
        """Inside the block, drop gradient shards (zeros, since nothing was sent) immediately."""

        def drop(name: str) -> Callable[[nn.Parameter], None]:
            def hook(parameter: nn.Parameter) -> None:
                used.add(name)
                parameter.grad = None

            return hook

        return gradient_hooks(self.parameters, drop)

    def finish(self) -> Gradients:
        """Second backward pass: the weighted gradients, which FSDP averages over ranks."""
        coefficients = self.record.coefficients() * self._fsdp.ranks.count
        left_out = set(self.record.leave_out())
        with set_aside(self.parameters), self._fsdp.meeting(self.record.step):
            for row, loss in enumerate(self._losses):
                sending = Sending("nothing" if row in left_out else "all")
                with self._fsdp.sending(sending):
                    backward(loss * coefficients[row].to(loss.dtype), self.scaler)
            self._fsdp.is_known = True
            return take(self.parameters)


class WorldScope(Stream):
    """Streams shards; their norms are combined over all ranks."""

    def __init__(self, *args: Any, fsdp: Fsdp, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fsdp, self._ranks = fsdp, fsdp.ranks
        self._fsdp.begin()

    def fold(self, loss_fn: LossFn, microbatches: MicrobatchList, final: bool) -> None:
        """Add the gradients of these micro-batches, each over all ranks."""
        self._ranks.describe(self.record.policy, self.scaler, self.parameters)
        self._ranks.agree(self.record.step, len(microbatches), microbatches.sizes)
        with self._fsdp.sending(Sending("all")), self._fsdp.meeting(self.record.step):
            super().fold(loss_fn, microbatches, final)

    def finish(self) -> Gradients:
        """Return the weighted sum, after checking that all ranks used the same parts."""
        self._ranks.agree(self.record.step, len(self.record))
        self._fsdp.is_known = True
        return super().finish()

    def norm(self, gradients: Gradients) -> Tensor:
        """Return the norm over the shards of all ranks."""
        self._fsdp.note_unused(self.parameters, gradients)
        return self._fsdp.norm_of_shards(super().norm(gradients))


def _mesh(model: nn.Module) -> Any:
    """Return the mesh that all trainable parameters are sharded over."""
    meshes = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"Parameter {name!r} is not sharded but others are, so its gradient is not reduced "
                "over ranks. Shard the whole model with fully_shard(model)."
            )
        meshes.add(parameter.device_mesh)
    if len(meshes) > 1 or next(iter(meshes)).ndim > 1:
        raise NotImplementedError(
            "The model is sharded over a mesh of several dimensions (HSDP, or combined with tensor "
            "parallelism), which is not supported. Use a mesh of one dimension."
        )
    return meshes.pop()


def _refuse_frozen_whole(groups: list[Any]) -> None:
    """Refuse parameters that were frozen while unsharded: their shards are not frozen."""
    for group in groups:
        if not group.is_unsharded:
            continue
        for each in group.fsdp_params:
            if each._unsharded_param.requires_grad != each.sharded_param.requires_grad:
                raise RuntimeError(
                    f"requires_grad of parameter {each._param_fqn!r} was changed while the "
                    "parameter was unsharded, after an evaluation, and FSDP would forget it with "
                    "the next backward pass. Call reshard() on every FSDPModule of the model first."
                )


def _groups(module: FSDPModule) -> list[Any]:
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups


def _divided_before(dtype: torch.dtype, ranks: int) -> int:
    """Return by what FSDP divides a gradient before it sends it, about the root of the ranks.

    It divides in two steps for dtypes whose sums might overflow.
    """
    divisor = 1
    if dtype not in (torch.float32, torch.bfloat16):
        while ranks % divisor == 0 and ranks / divisor > divisor:
            divisor *= 2
    return divisor
