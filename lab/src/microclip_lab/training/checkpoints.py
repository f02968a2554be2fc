"""Checkpoints: written under a temporary name, then renamed, so that none is ever half-written.

A checkpoint holds everything the next step depends on: weights, optimizer, schedule, loss scaler,
random states, the clipper. Which examples come next follows from the step number. Its manifest has
a checksum of every file. Nothing in it is pickled: reading one runs no code, whoever wrote it.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from microclip.files import (
    DamagedFileError,
    fast_checksum,
    is_intact,
    sealed,
    sync_file,
    sync_folder,
    write_whole,
)
from microclip.state_files import read_state, read_tensors, write_state, write_tensors
from microclip_lab.training.config import SettingError
from microclip_lab.training.training_state import TrainingState, load_model_state, model_state

FOLDER, STEP, BEST = "checkpoints", "step-", "best-"
WEIGHTS, PROGRESS, RANDOM = "model.safetensors", "training.safetensors", "random-{}.safetensors"
MANIFEST, FORMAT, VERSION = "manifest.json", "microclip-checkpoint", 1
RUN_ID = ".run-id"
OURS = re.compile(rf"({STEP}|{BEST})\d{{9}}|\.({STEP}|{BEST})\d{{9}}\.tmp")
KEPT = 2  # whole checkpoints: if the last one is damaged, there is another


@dataclass(frozen=True)
class State:
    """How far a run has come."""

    step: int = 0  # finished steps
    best: float | None = None  # the best headline figure on validation data so far
    best_step: int | None = None


class Checkpoints:
    """The checkpoints of a run: the last two, and the weights that had validated best by then.

    Nothing is deleted before the checkpoint that replaces it is in place, and nothing that this run
    has not written.
    """

    def __init__(self, run: Path, accelerator: Any = None) -> None:  # None: only to find them
        self.run, self.folder = run, run / FOLDER
        self._accelerator = accelerator

    def last(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        found = self._all()
        return found[-1] if found else None

    def best(self, step: int) -> Path:
        """Return the folder for the weights of a step that validated best."""
        return self.folder / f"{BEST}{step:09d}"

    def write(self, state: State, training: TrainingState) -> None:
        """Write a checkpoint of all processes, then delete what it replaces."""
        path = self.folder / f"{STEP}{state.step:09d}"
        if self._is_own(path):  # stopped before it had taken a step
            return
        with self._written(path, asdict(state)) as partial:
            weights = model_state(training.model)
            progress = training.progress()
            if self._accelerator.is_main_process:
                write_tensors(partial / WEIGHTS, weights, format="pt")
                write_state(partial / PROGRESS, progress)
            own = self._accelerator.process_index
            write_state(partial / RANDOM.format(own), training.random_state())
        if self._accelerator.is_main_process:
            self._remove_old()

    def read(self, checkpoint: Path, training: TrainingState) -> State:
        """Restore everything from a checkpoint, or explain why it cannot be done."""
        try:
            content = _verified(checkpoint)
            state = State(**content["state"])
            with _as_damage(checkpoint):
                load_weights(training.model, checkpoint)
                training.load_progress(read_state(checkpoint / PROGRESS))
                own = RANDOM.format(self._accelerator.process_index)
                if content["processes"] == self._accelerator.num_processes:
                    training.load_random_state(read_state(checkpoint / own))
                else:
                    training.note_other_processes(content["processes"])
        except DamagedFileError as error:
            raise DamagedFileError(f"{error} {self._way_out(checkpoint)}") from error
        return state

    def write_best(self, model: nn.Module, step: int) -> None:
        """Save the weights as the best so far."""
        accelerator = self._accelerator
        with self._written(self.best(step), {}) as partial:
            weights = model_state(model)
            if accelerator.is_main_process:
                write_tensors(partial / WEIGHTS, weights, format="pt")
                config: Any = getattr(accelerator.unwrap_model(model), "config", None)
                if hasattr(config, "save_pretrained"):  # so that from_pretrained reads it
                    config.save_pretrained(partial)

    @contextmanager
    def _written(self, path: Path, state: dict[str, Any]) -> Iterator[Path]:
        """Yield a folder for all processes to write to; name it `path` once it is on disk."""
        accelerator = self._accelerator
        partial = path.with_name(f".{path.name}.tmp")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self._remove(partial)
            self._remove(path)  # weights of a step that was trained again
        try:
            if accelerator.is_main_process:
                partial.mkdir(parents=True)
            accelerator.wait_for_everyone()
            yield partial
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                _write_manifest(partial, self._run_id(), state, accelerator.num_processes)
                partial.rename(path)
                sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"The checkpoint {path} could not be written: {error.strerror or error}. Earlier "
                "ones are intact: fix this, and run the same command with --resume."
            ) from error
        accelerator.wait_for_everyone()

    def _all(self) -> list[Path]:
        return sorted(p for p in self.folder.glob(f"{STEP}*") if OURS.fullmatch(p.name))

    def _remove_old(self) -> None:
        """Remove what this run has written and nothing refers to anymore."""
        own = [path for path in self._all() if self._is_own(path)]
        kept = set(own[-KEPT:])
        for path in list(kept):
            best = _content(path)["state"]["best_step"]
            if best is not None:
                kept.add(self.best(best))
        for path in self.folder.iterdir():
            if path not in kept and self._is_own(path):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        if not path.is_symlink() and not path.exists():
            return
        if not self._is_own(path):
            raise FileExistsError(
                f"{path} is in the way of a checkpoint, but this run has not written it. Move it "
                "elsewhere."
            )
        shutil.rmtree(path, ignore_errors=True)

    def _is_own(self, path: Path) -> bool:
        """Return whether this run has written a folder."""
        if path.is_symlink() or not path.is_dir() or not OURS.fullmatch(path.name):
            return False
        if path.name.endswith(".tmp"):  # unfinished: a process was killed
            return True
        try:
            return bool(_content(path)["run"] == self._run_id())
        except (DamagedFileError, KeyError):
            return False

    def _run_id(self) -> str:
        """Return what tells this run's checkpoints from those of others."""
        file = self.run / RUN_ID
        if not file.exists():
            write_whole(file, secrets.token_hex(16).encode())
        return file.read_text(encoding="utf-8", errors="replace")

    def _way_out(self, damaged: Path) -> str:
        """Say where the run can resume from."""
        for path in reversed([path for path in self._all() if path < damaged]):
            try:
                _verified(path)
            except DamagedFileError:
                continue
            return (
                f"The checkpoint before it, {path}, is whole: to resume from there, delete "
                f"{damaged} and run the same command again."
            )
        return (
            "There is no whole checkpoint before it. Restore it from a backup, or delete the "
            "folder of the run and start again."
        )


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint into a model, sharded or not."""
    file = folder / WEIGHTS
    if not file.exists():
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS}. Give a folder with weights: one of a run's checkpoints/, "
            "or one written by save_pretrained."
        )
    if (folder / MANIFEST).exists():
        _verify_file(folder, WEIGHTS, _content(folder)["files"])
    load_model_state(model, read_tensors(file), file)


def _write_manifest(folder: Path, run: str, state: dict[str, Any], processes: int) -> None:
    paths = sorted(folder.iterdir())
    with ThreadPoolExecutor() as pool:  # one computes while another waits for the disk
        synced = [pool.submit(sync_file, path) for path in paths]
        files = dict(
            zip((path.name for path in paths), pool.map(fast_checksum, paths), strict=True)
        )
        for each in synced:
            each.result()
    content = {
        "format": FORMAT,
        "version": VERSION,
        "run": run,
        "processes": processes,
        "state": state,
        "files": files,
    }
    write_whole(folder / MANIFEST, (json.dumps(sealed(content), indent=2) + "\n").encode())


def _content(folder: Path) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / "state.json").exists():
            raise DamagedFileError(
                f"{folder} was written by an earlier version, with pickled objects, which may run "
                "code and are no longer read. (Its weights can be used: --start-from.)"
            ) from None
        raise DamagedFileError(f"{folder} is damaged: it has no {MANIFEST}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}).") from error
    if not isinstance(content, dict) or not is_intact(content):
        raise DamagedFileError(f"{path} is damaged: its content does not match its own checksum.")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise DamagedFileError(
            f"{path} says {content.get('format')!r}, version {content.get('version')!r}, but this "
            f"version of microclip reads {FORMAT!r}, version {VERSION}."
        )
    return content


def _verified(folder: Path) -> dict[str, Any]:
    """Return what the manifest says, after comparing every file with its checksum."""
    content = _content(folder)
    needed = {WEIGHTS, PROGRESS, *(RANDOM.format(i) for i in range(content["processes"]))}
    for name in sorted(needed | set(content["files"])):
        _verify_file(folder, name, content["files"])
    return content


def _verify_file(folder: Path, name: str, files: dict[str, str]) -> None:
    path = folder / name
    if path.name != name or name not in files:
        raise DamagedFileError(f"{folder / MANIFEST} is damaged: it does not list {path.name}.")
    try:
        found = fast_checksum(path)
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror}).") from error
    if found != files[name]:
        raise DamagedFileError(
            f"{path} is damaged: its checksum is {found}, but {files[name]} was written."
        )


@contextmanager
def _as_damage(checkpoint: Path) -> Iterator[None]:
    """Turn the errors of objects that are given the wrong state into one that names the files."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, DamagedFileError | SettingError):
            raise
        raise DamagedFileError(
            f"{checkpoint / PROGRESS} does not fit this run ({type(error).__name__}: {error})."
        ) from error
