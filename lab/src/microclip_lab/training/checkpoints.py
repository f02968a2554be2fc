"""Checkpoints: written under a temporary name, then renamed, so that none is ever half-written.

A checkpoint holds everything the next step depends on: weights, optimizer, schedule, loss scaler,
random states, the clipper. Which examples come next follows from the step number.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from microclip.files import write_whole
from microclip_lab.training.config import SettingError

FOLDER, STEP, BEST = "checkpoints", "step-", "best-"
STATE, WEIGHTS = "state.json", "model.safetensors"


@dataclass(frozen=True)
class State:
    """How far a run has come."""

    step: int = 0  # finished steps
    best: float | None = None  # the best headline figure on validation data so far
    best_step: int | None = None


class Checkpoints:
    """The checkpoints of a run: the last one, and the weights that validated best.

    Nothing is deleted before the checkpoint that replaces it is in place.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    def last(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        found = sorted(self.folder.glob(f"{STEP}*"))
        return found[-1] if found else None

    def best(self, step: int) -> Path:
        """Return the folder for the weights of a step that validated best."""
        return self.folder / f"{BEST}{step:09d}"

    def write(self, accelerator: Any, state: State) -> None:
        """Write a checkpoint of all processes, then delete what it replaces."""
        path = self.folder / f"{STEP}{state.step:09d}"
        if path.exists():  # stopped before it had taken a step
            return
        partial = self._begin(accelerator, path)
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            write_whole(partial / STATE, json.dumps(asdict(state)).encode())
            _put_in_place(partial, path)
            keep = {path} if state.best_step is None else {path, self.best(state.best_step)}
            for old in set(self.folder.iterdir()) - keep:
                shutil.rmtree(old, ignore_errors=True)
        accelerator.wait_for_everyone()

    def read(self, accelerator: Any, checkpoint: Path) -> State:
        """Restore everything from a checkpoint."""
        accelerator.load_state(str(checkpoint))
        return State(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))

    def write_best(self, accelerator: Any, model: nn.Module, step: int) -> None:
        """Save the weights as the best so far."""
        path = self.best(step)
        partial = self._begin(accelerator, path)
        weights = _whole_weights(model)
        if accelerator.is_main_process:
            accelerator.save(weights, partial / WEIGHTS, safe_serialization=True)
            config: Any = getattr(accelerator.unwrap_model(model), "config", None)
            if hasattr(config, "save_pretrained"):  # so that from_pretrained reads it
                config.save_pretrained(partial)
            shutil.rmtree(path, ignore_errors=True)
            _put_in_place(partial, path)
        accelerator.wait_for_everyone()

    def _begin(self, accelerator: Any, path: Path) -> Path:
        partial = path.with_name(f".{path.name}.tmp")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        return partial


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint into a model, sharded or not."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    file = folder / WEIGHTS
    if not file.exists():
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS}. Give a folder with weights: one of a run's checkpoints/, "
            "or one written by save_pretrained."
        )
    options = StateDictOptions(full_state_dict=True, strict=False)
    weights: dict[str, Any] = load_file(file)
    names = set(weights)  # torch adds to it
    try:
        _, unexpected = set_model_state_dict(model, weights, options=options)
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


def _whole_weights(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    kept: dict[Any, tuple[str, Any]] = {}
    for name, weight in weights.items():
        # tied weights are saved once, under their first name: safetensors allows no more
        place = (weight.data_ptr(), weight.shape) if weight.numel() else name
        kept.setdefault(place, (name, weight))
    return dict(kept.values())


def _put_in_place(partial: Path, path: Path) -> None:
    """Rename a folder once its content has reached the disk."""
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    partial.rename(path)
