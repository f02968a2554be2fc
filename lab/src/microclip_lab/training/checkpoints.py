"""Checkpoints: written under another name, then renamed, so that each is there whole or not at all.

A checkpoint holds everything the next step depends on: weights, optimizer, schedule, loss scaler,
random states, the clipper. Which examples come next follows from the step alone.
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
    """How far a run is."""

    step: int = 0  # steps that are done
    best: float | None = None  # the headline figure of the best look at the validation data
    best_step: int | None = None


class Checkpoints:
    """The checkpoints of a run: the last one, and the weights of the best look.

    Nothing goes before the checkpoint that replaces it, or that knows a better one, is in place.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    def last(self) -> Path | None:
        """Return the newest one, or None if there is none."""
        found = sorted(self.folder.glob(f"{STEP}*"))
        return found[-1] if found else None

    def best(self, step: int) -> Path:
        """Return where the weights after a step are, if they were the best so far."""
        return self.folder / f"{BEST}{step:09d}"

    def write(self, accelerator: Any, state: State) -> None:
        """Write a checkpoint of all processes; then what it replaces goes."""
        path = self.folder / f"{STEP}{state.step:09d}"
        if path.exists():  # asked to stop before it had taken a step
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
        """Take everything back."""
        accelerator.load_state(str(checkpoint))
        return State(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))

    def write_best(self, accelerator: Any, model: nn.Module, step: int) -> None:
        """Keep the weights as the best so far."""
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
    """Put the weights of a checkpoint, or of a best one, into a model, sharded or not."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    file = folder / WEIGHTS
    if not file.exists():
        raise FileNotFoundError(
            f"{folder} holds no {WEIGHTS}. Give a folder of weights: best/ of a run, one of its "
            "checkpoints/, or what save_pretrained of transformers wrote."
        )
    options = StateDictOptions(full_state_dict=True, strict=False)
    weights: dict[str, Any] = load_file(file)
    names = set(weights)  # torch puts more into it
    try:
        _, unexpected = set_model_state_dict(model, weights, options=options)
    except RuntimeError as error:  # torch's list of shapes that differ
        raise SettingError(f"{file} is of another model: {error}") from error
    parameters = {
        name.removeprefix("module."): id(parameter)  # as DistributedDataParallel calls its own
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    given = {parameter for name, parameter in parameters.items() if name in names}  # tied or not
    absent = [name for name, parameter in parameters.items() if parameter not in given]
    if absent or unexpected:
        raise SettingError(
            f"{file} is of another model: it lacks {absent[:3] or 'nothing'} and has "
            f"{list(unexpected)[:3] or 'nothing'} besides."
        )


def _whole_weights(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    kept: dict[Any, tuple[str, Any]] = {}
    for name, weight in weights.items():
        # tied weights once, under the first of their names: safetensors takes no others
        place = (weight.data_ptr(), weight.shape) if weight.numel() else name
        kept.setdefault(place, (name, weight))
    return dict(kept.values())


def _put_in_place(partial: Path, path: Path) -> None:
    """Rename a folder once what is in it has reached the disk."""
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    partial.rename(path)
