"""What a run leaves behind: its folder, metrics, trackers, ledger and page.

Only the main process writes, but for the ledger, of which every process writes its own part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microclip.files import write_whole
from microclip.report.folder import RUN, RunFolder
from microclip_lab.training.config import SettingError, Training
from microclip_lab.training.recipe import Data, Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

    from microclip.ledger import Ledger

FACTS, LOCK, PAGE, TENSORBOARD = "facts.json", ".lock", "report.html", "tensorboard"
# what may be another when a run is taken up again: nothing that is computed depends on it
FREE = {
    *("out", "resume", "checkpoint_every", "log_every", "workers", "trackers", "ledger", "page"),
    "cpu",
}
OWN_PLACE = frozenset(("seed", "microbatch_size"))  # said in run.json by themselves
OF_CLIPPING = frozenset(("rule", "engine", "by_domain"))  # plain training has none of it
SHOWN = 300  # of the most suspicious examples, to be seen on the page
DESCRIBED = 5_000  # examples that are all described, if there are no more


class Journal:
    """The folder of a run that is being trained."""

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
    ) -> Iterator[Journal]:
        """Open the folder for one run at a time; close it whatever happens."""
        import torch
        from accelerate import Accelerator

        path = Path(training.out or default_folder(recipe, training))
        accelerator = Accelerator(
            # unless it is said, processes without an accelerator would not hear of each other
            cpu=training.cpu or not torch.accelerator.is_available(),
            mixed_precision=None if training.precision == "no" else training.precision,
            log_with=list(training.trackers) or None,
            project_dir=str(path),
        )
        journal = cls(path, accelerator, recipe, training, command)
        with _alone_in(path) if accelerator.is_main_process else _nothing():
            journal._check()
            accelerator.wait_for_everyone()
            try:
                yield journal
            finally:
                journal._close()

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, if there is to be one."""
        if self._ledger is None and self._training.ledger:
            import microclip

            self._ledger = microclip.Ledger(self.path / "ledger")
        return self._ledger

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Say what is run, before its first step here."""
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
        """Note what was measured after so many steps."""
        if self._folder is not None:
            self._folder.log_all(step, figures)
        self.accelerator.log(dict(figures), step=step)

    def describe(self, recipe: Recipe[Any, Any], data: Data[Any]) -> None:
        """Show the examples, the most suspicious ones above all, and make the page."""
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
            if not shown:  # a table of labels is small, pictures of everything are not
                said = {name: said[name] for name in ("label", "truth", "domain") if name in said}
            folder.example(id, **said)

    def _check(self) -> None:
        """Refuse to write over a run, or to go on with it in another way than it began."""
        if not (self.path / RUN).exists():
            return
        if not self._training.resume:
            raise FileExistsError(
                f"{self.path} holds a run already. Say --resume to go on with it, or choose "
                "another folder: --out."
            )
        try:
            said = json.loads((self.path / RUN).read_text(encoding="utf-8"))
            before = {**said["settings"], **{name: said[name] for name in OWN_PLACE}}
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(
                f"{self.path / RUN} cannot be read ({error!r}), so it is not known what is to be "
                "gone on with. Choose another folder: --out."
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
                f"The run in {self.path} cannot be gone on with in another way than it began: "
                f"{'; '.join(changed)}. Give it the same options, or choose another folder: --out."
            )

    def _close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()


def settings(recipe: Recipe[Any, Any], training: Training) -> dict[str, Any]:
    """Return what a run is done with, without what tells runs of one setting apart."""
    fields: dict[str, Any] = asdict(recipe)  # type: ignore[call-overload]
    of_training = {
        name: value for name, value in asdict(training).items() if name not in FREE | OWN_PLACE
    }
    if training.microbatch_size is None:
        of_training |= dict.fromkeys(OF_CLIPPING)
    return {**fields, **of_training}


def default_folder(recipe: Recipe[Any, Any], training: Training) -> Path:
    """Return where a run goes if nothing is said."""
    b = training.microbatch_size
    return Path("runs") / f"{recipe.name}-{'plain' if b is None else f'b{b}'}-seed{training.seed}"


@contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Hold the folder as long as the block runs; a process that is killed lets go of it."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # pragma: no cover (Windows)
            pass
        except BlockingIOError:
            raise FileExistsError(
                f"{path} is being written by another process. Wait for it, or choose another "
                "folder: --out."
            ) from None
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield
