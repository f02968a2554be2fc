"""What a user may choose about `microclip reproduce`. Imports nothing heavy: `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from microclip_lab.training.config import SettingError

TASKS = ("digits", "clean-digits", "digits-sgd", "cifar10n", "speech", "mixture", "movie")
RANDOM = "random"
WORK = "work"  # below the folder: what is not needed any more when all is done


@dataclass(frozen=True)
class ReproduceConfig:
    """Do the paper's experiments again at a small scale, with controls, and say what holds.

    Trains plainly, with clipping and in the ways that could explain its effect otherwise: digits
    with wrong labels, CIFAR-10 as people labelled it, speech with canaries, texts of unequal
    domains. Every way gets its own learning rate, chosen on validation data and on seeds of their
    own; then all are trained on the same seeds and compared. What would bear each claim out was
    written down before the runs (microclip_lab.reproduction.claims).

    Ends with a verdict on every claim, a page, and results.json for programs. Each run leaves a
    small record in runs/, from which all of it is made; a run whose record is there is not done
    again. So Ctrl-C is safe, and the same command goes on. The whole takes a night on two cores;
    a smoke test of a few minutes, whose verdicts mean nothing:
      microclip reproduce --quick

    On several machines, the same command on each, with a folder and a storage that all of them see:
      microclip reproduce --out /shared/reproduction --storage postgresql://user@host/database

    Whether a record is true, bit for bit: do one of its runs again, here any one.
      microclip reproduce --out results --again random
    """

    out: Path | None = None
    """Folder for records and page; "reproduction" unless given, "reproduction-quick" if quick."""
    quick: bool = False
    """Only show that everything works, in a few minutes: few steps, little data, few seeds."""
    smallest: bool = False
    """The same with next to nothing of each; what continuous integration does."""
    tasks: tuple[str, ...] = ()
    """Only these: digits, clean-digits, digits-sgd, cifar10n, speech, mixture, movie."""
    workers: int | None = None
    """Runs side by side on this machine, each on one core; as many as it has unless given."""
    storage: str | None = None
    """Where it is kept who does which run: an Optuna storage URL; a file in the folder unless
    given. Records do not go there."""
    again: str | None = None
    """Do the run of this record again, or a "random" one, and compare the two; nothing else."""
    only_page: bool = False
    """Train nothing; make the page and results.json again from the records that are there."""
    document: Path | None = None
    """Also write verdicts and tables to this file, in Markdown."""

    def __post_init__(self) -> None:
        if self.quick and self.smallest:
            raise SettingError("quick and smallest are two scales: give one of them.")
        for task in self.tasks:
            if task not in TASKS:
                raise SettingError(f"tasks must be among {', '.join(TASKS)}, but got {task!r}.")
        if self.workers is not None and self.workers < 1:
            raise SettingError(f"workers must be 1 or more, but got {self.workers}.")
        if self.again is not None and (self.only_page or self.document is not None):
            raise SettingError(
                "again does a run and writes nothing, only_page and document write: give one."
            )

    @property
    def scale(self) -> Literal["default", "quick", "smallest"]:
        """How much of everything there is."""
        return "quick" if self.quick else "smallest" if self.smallest else "default"

    @property
    def folder(self) -> Path:
        """Where all goes."""
        name = "reproduction" if self.scale == "default" else f"reproduction-{self.scale}"
        return self.out or Path(name)

    @property
    def storage_url(self) -> str:
        """Where it is kept who does what."""
        return self.storage or f"sqlite:///{(self.folder / WORK / 'trials.db').resolve()}"

    @property
    def arguments(self) -> list[str]:
        """The options that a worker is started with."""
        given = ["--out", str(self.folder)]
        given += [f"--{self.scale}"] if self.scale != "default" else []
        given += ["--tasks", *self.tasks] if self.tasks else []
        return given + (["--storage", self.storage] if self.storage is not None else [])
