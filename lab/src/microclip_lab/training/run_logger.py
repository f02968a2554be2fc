"""What a run writes: its folder, metrics, trackers, ledger and page.

Only the main process writes, except for the ledger, where every process writes its part.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microclip.files import lock, write_whole
from microclip.report.folder import LEDGER, RUN, RunFolder
from microclip_lab.training.components import is_plain
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.recipe import Data, Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from microclip.ledger import Ledger

FACTS, LOCK, PAGE, TENSORBOARD = "facts.json", ".lock", "report.html", "tensorboard"
# may change when a run resumes: results do not depend on them
FREE = {
    *("out", "resume", "checkpoint_every", "log_every", "workers", "trackers", "ledger", "page"),
    "cpu",
}
OWN_PLACE = frozenset(("seed", "microbatch_size"))  # separate entries of run.json
OF_CLIPPING = frozenset(("rule", "engine", "by_domain"))  # not used by plain training
SHOWN = 300  # most suspicious examples that the page shows
DESCRIBED = 5_000  # data sets up to this size are described completely


class RunLogger:
    """The folder of a run during training."""

    def __init__(
        self,
        path: Path,
        accelerator: Accelerator,
        recipe: Recipe[Any, Any],
        training: Training,
        command: str | None,
    ) -> None:
        self.path, self.accelerator = path, accelerator
        self._recipe, self._training, self._command = recipe, training, command
        self._folder: RunFolder | None = None
        self._ledger: Ledger | None = None

    @classmethod
    @contextmanager
    def open(
        cls, recipe: Recipe[Any, Any], training: Training, command: str | None
    ) -> Iterator[RunLogger]:
        """Lock and open the folder of a run; always close it at the end."""
        import torch
        from accelerate import Accelerator

        path = Path(training.out or default_folder(recipe, training))
        accelerator = Accelerator(
            # without this, processes on CPUs would not communicate
            cpu=training.cpu or not torch.accelerator.is_available(),
            mixed_precision=None if training.precision == "no" else training.precision,
            log_with=list(training.trackers) or None,
            project_dir=str(path),
        )
        logger = cls(path, accelerator, recipe, training, command)
        with _alone_in(path) if accelerator.is_main_process else _nothing():
            logger._check()
            accelerator.wait_for_everyone()
            try:
                yield logger
            finally:
                logger._close()

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, if it is enabled."""
        if self._ledger is None and self._training.ledger:
            import microclip

            self._ledger = microclip.Ledger(self.path / "ledger")
        return self._ledger

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write the description of the run, before its first step."""
        accelerator, training = self.accelerator, self._training
        if accelerator.is_main_process:
            self._folder = RunFolder(
                self.path,
                microbatch_size=training.microbatch_size,
                seed=training.seed,
                group=self._recipe.name,
                settings=settings(self._recipe, training),
                command=self._command,
                headline=f"test_{self._recipe.headline}",
            )
            text = json.dumps(facts, indent=2, default=str) + "\n"
            write_whole(self.path / FACTS, text.encode())
        options = (
            {"tensorboard": {"purge_step": step + 1}} if "tensorboard" in training.trackers else {}
        )
        accelerator.init_trackers(TENSORBOARD, init_kwargs=options)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        if self._folder is not None:
            self._folder.log_all(step, figures)
        self.accelerator.log(dict(figures), step=step)

    def describe(self, recipe: Recipe[Any, Any], data: Data[Any]) -> None:
        """Describe the most suspicious examples, and write the page."""
        if self._ledger is not None:
            self._ledger.flush()
        self.accelerator.wait_for_everyone()
        if self._folder is None:
            return
        if self._ledger is not None:
            self._describe_examples(self._folder, recipe, data)
        if self._training.page:
            from microclip.report import write_report

            write_report([self.path], self.path / PAGE)

    def _describe_examples(
        self, folder: RunFolder, recipe: Recipe[Any, Any], data: Data[Any]
    ) -> None:
        import microclip

        found = microclip.draggers.score(folder.ledger).top(SHOWN)["id"].to_pylist()
        ids: Any = range(len(data.training)) if data.ids is None else data.ids
        suspicious = {str(one) for one in found}
        few = len(data.training) <= DESCRIBED
        for row, id in enumerate(ids):
            shown = str(id) in suspicious
            if not (shown or few):
                continue
            said = dict(recipe.describe(data, row))
            if data.domains is not None:
                said.setdefault("domain", data.domains[row])
            if not shown:  # labels are small, images and sound are not
                said = {name: said[name] for name in ("label", "truth", "domain") if name in said}
            folder.example(id, **said)

    def _check(self) -> None:
        """Refuse to overwrite a run, or to resume it with other settings."""
        if not (self.path / RUN).exists():
            return
        if not self._training.resume:
            raise FileExistsError(
                f"{self.path} already holds a run. Use --resume to continue it, or choose another "
                "folder with --out."
            )
        try:
            said = json.loads((self.path / RUN).read_text(encoding="utf-8"))
            before = {**said["settings"], **{name: said[name] for name in OWN_PLACE}}
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(
                f"{self.path / RUN} cannot be read ({error!r}), so the run cannot be resumed. "
                "Choose another folder with --out."
            ) from error
        training = self._training
        now = json.loads(json.dumps(settings(self._recipe, training), default=str))
        now |= {name: getattr(training, name) for name in OWN_PLACE}
        changed = [
            f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise SettingError(
                f"The run in {self.path} cannot be resumed with other settings: "
                f"{'; '.join(changed)}. Use the same options, or choose another folder with --out."
            )

    def _close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()


def settings(recipe: Recipe[Any, Any], training: Training) -> dict[str, Any]:
    """Return the settings of a run, without the seed and the micro-batch size."""
    fields: dict[str, Any] = asdict(recipe)  # type: ignore[call-overload]
    of_training = {
        name: value for name, value in asdict(training).items() if name not in FREE | OWN_PLACE
    }
    if is_plain(training):
        of_training |= dict.fromkeys(OF_CLIPPING)
    return {**fields, **of_training}


def default_folder(recipe: Recipe[Any, Any], training: Training) -> Path:
    """Return the default folder of a run."""
    b = training.microbatch_size
    kind = f"b{b}" if b is not None else "plain" if is_plain(training) else "examples"
    return Path("runs") / f"{recipe.name}-{kind}-seed{training.seed}"


@contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Lock the folder while the block runs; if that fails before anything is written, remove it."""
    new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    taken = FileExistsError(
        f"Another process is writing to {path}. Wait for it, or choose another folder with --out."
    )
    with lock(path / LOCK, taken):
        try:
            yield
        except BaseException:
            if new:
                _remove_unused(path)
            raise


def _remove_unused(path: Path) -> None:
    """Remove the folder of a run that wrote nothing, such as one whose data cannot be loaded."""
    if (path / RUN).exists() or {each.name for each in path.iterdir()} - {LOCK, LEDGER}:
        return
    if any(each.is_file() for each in (path / LEDGER).glob("*/*")):
        return
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
