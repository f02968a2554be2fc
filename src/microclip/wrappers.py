"""Which distributed wrappers a model has: DistributedDataParallel, fully_shard, others.

The only module that detects them. It imports nothing heavy and does not communicate: what to do
about a wrapper is the business of `microclip.distributed`.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules, in no particular order; several times faster than `model.modules()`."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += module._modules.values()
    return list(found.values())


def world_size() -> int:
    """Return the number of processes in the default group; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ddp_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel wrappers in a model, including the model itself."""
    return [m for m in modules_of(model) if isinstance(m, DistributedDataParallel)]


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `fully_shard()` was called on.

    The parameters alone do not tell: after a forward pass without a backward pass, some of them
    are still unsharded.
    """
    library = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    if library is None:
        return []
    return [module for module in modules_of(model) if isinstance(module, library.FSDPModule)]


def is_shard(tensor: Tensor) -> bool:
    """Whether this rank holds only a part of the tensor (a DTensor)."""
    return hasattr(tensor, "device_mesh")


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are spread over ranks, by `fully_shard()` or otherwise."""
    return any(map(is_shard, model.parameters())) or bool(sharded_modules(model))


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse wrappers that reduce gradients where nothing can intervene."""
    for module in modules_of(model):
        kind = type(module)
        if kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch"):
            raise NotImplementedError(
                "The model is wrapped with FullyShardedDataParallel (FSDP1), which reduces "
                "gradients before they can be clipped. Use fully_shard(model) (FSDP2)."
            )
        if kind.__module__.partition(".")[0] == "deepspeed" and kind.__name__.endswith("Engine"):
            raise NotImplementedError(
                f"The model is wrapped with DeepSpeed's {kind.__name__}, which reduces gradients "
                "before they can be clipped. Use DistributedDataParallel or fully_shard(model)."
            )
