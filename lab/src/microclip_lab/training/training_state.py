"""The state of everything that a run trains with, as plain data: what a checkpoint holds.

Works on one process, on several, and with sharded models. Knows nothing about files.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from microclip_lab.training.config import SettingError

logger = logging.getLogger("microclip.training")


@dataclass(frozen=True)
class TrainingState:
    """The objects whose state makes up a checkpoint."""

    accelerator: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    clipper: Any

    def progress(self) -> dict[str, Any]:
        """Return everything but weights and random states; on every process at the same time."""
        scaler = self.accelerator.scaler
        return {
            "optimizer": self._optimizer_state(),
            "schedule": self.schedule.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "clipper": self.clipper.state_dict(),
        }

    def load_progress(self, state: dict[str, Any]) -> None:
        """Restore what `progress` returned."""
        if _is_sharded(self.model):
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                set_optimizer_state_dict,
            )

            whole = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=whole)
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        schedule = state["schedule"]
        # a schedule would take any attribute, even one that replaces a method
        if set(schedule) != set(self.schedule.state_dict()):
            raise ValueError(f"the schedule has the entries {sorted(schedule)}")
        self.schedule.load_state_dict(schedule)
        scaler = self.accelerator.scaler
        if (scaler is None) != (state["scaler"] is None):
            raise ValueError("the loss scaler is missing or superfluous")
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])
        self.clipper.load_state_dict(state["clipper"])

    def random_state(self) -> dict[str, Any]:
        """Return the states of this process's random number generators."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "device": [] if (device := self._device()) is None else _device_state(device),
        }

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Restore what `random_state` returned."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        device = self._device()
        if device is not None and state["device"]:
            _load_device_state(device, state["device"])

    def note_other_processes(self, before: int) -> None:
        """Say that random states cannot be restored on another number of processes."""
        logger.warning(
            "The checkpoint was written by %d processes and is resumed on %d: dropout and other "
            "random numbers are not those of an uninterrupted run.",
            before,
            self.accelerator.num_processes,
        )

    def _optimizer_state(self) -> dict[str, Any]:
        if not _is_sharded(self.model):
            return self.optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=whole))

    def _device(self) -> Any:
        """Return the module of the accelerator in use, such as torch.cuda; None for the CPU."""
        kind = self.accelerator.device.type
        return None if kind == "cpu" else torch.get_device_module(kind)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights and buffers; tied ones once. On ranks other than 0 perhaps nothing."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    kept: dict[Any, tuple[str, Any]] = {}
    for name, weight in weights.items():
        # tied weights are saved once, under their first name: safetensors allows no more
        place = (weight.data_ptr(), weight.shape) if weight.numel() else name
        kept.setdefault(place, (name, weight))
    return dict(kept.values())


def load_model_state(model: nn.Module, weights: Mapping[str, Tensor], file: Path) -> None:
    """Load weights into a model, sharded or not; `file` is for the error if they do not fit."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=False)
    names = set(weights)
    try:
        _, unexpected = set_model_state_dict(model, dict(weights), options=options)
    except RuntimeError as error:  # torch lists the shapes that differ
        raise SettingError(f"{file} does not fit this model: {error}") from error
    parameters = {
        name.removeprefix("module."): id(parameter)  # the prefix that DistributedDataParallel adds
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    given = {parameter for name, parameter in parameters.items() if name in names}  # tied or not
    absent = [name for name, parameter in parameters.items() if parameter not in given]
    if absent or unexpected:
        raise SettingError(
            f"{file} does not fit this model: it lacks {absent[:3] or 'nothing'} and has "
            f"{list(unexpected)[:3] or 'nothing'} in addition."
        )


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _device_state(device: Any) -> list[Tensor]:
    every = getattr(device, "get_rng_state_all", None)  # MPS has one device, and not this function
    return [device.get_rng_state()] if every is None else list(every())


def _load_device_state(device: Any, states: list[Tensor]) -> None:
    every = getattr(device, "set_rng_state_all", None)
    if every is None:
        device.set_rng_state(*states)
    else:
        every(states)
