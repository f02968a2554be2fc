"""The options of `microclip reproduce`. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from microclip_lab.training.config import SettingError

TASKS = ("digits", "clean-digits", "digits-sgd", "cifar10n", "speech", "mixture", "movie")
RANDOM = "random"
WORK = "work"  # below the folder: not needed any more when all runs are done


@dataclass(frozen=True)
class ReproduceConfig:
    """Rerun the paper's experiments at a small scale, with controls, and check its claims.

    Trains with and without clipping, and in ways that could explain its effect otherwise, on digits
    with wrong labels, CIFAR-10 with human labels, speech with canaries, and text from unequal
    domains. Every arm gets its own learning rate, chosen on validation data with separate seeds;
    then all are trained on the same seeds and compared. The criteria for each claim were written
    down before the runs (microclip_lab.reproduction.claims).

    Writes a verdict on every claim, a page, and results.json. Each run leaves a small record in
    runs/, from which everything else is made; runs that have a record are skipped. So Ctrl-C is
    safe, and the same command continues. The whole takes a night on two cores. A smoke test of a
    few minutes, whose verdicts mean nothing:
      microclip reproduce --quick

    On several machines, run the same command on each, with a shared folder and storage:
      microclip reproduce --out /shared/reproduction --storage postgresql://user@host/database

    To verify a record bit for bit, repeat its run, here a random one:
      microclip reproduce --out results --again random
    """

    out: Path | None = None
    """Folder for records and page. Default: reproduction, or reproduction-quick with --quick."""
    quick: bool = False
    """Smoke test of a few minutes: few steps, little data, few seeds."""
    smallest: bool = False
    """An even smaller smoke test, for continuous integration."""
    tasks: tuple[str, ...] = ()
    """Only these tasks: digits, clean-digits, digits-sgd, cifar10n, speech, mixture, movie."""
    workers: int | None = None
    """Parallel runs on this machine, each on one core. Default: the number of cores."""
    storage: str | None = None
    """Optuna storage URL of the job queue. Default: an SQLite file in the folder. Records are not
    stored there."""
    again: str | None = None
    """Only repeat the run of this record, or of a "random" one, and compare the two."""
    only_page: bool = False
    """Train nothing; write the page and results.json from the existing records."""
    document: Path | None = None
    """Also write verdicts and tables to this Markdown file."""

    def __post_init__(self) -> None:
        if self.quick and self.smallest:
            raise SettingError("quick and smallest are two different scales: give only one.")
        for task in self.tasks:
            if task not in TASKS:
                raise SettingError(f"tasks must be among {', '.join(TASKS)}, but got {task!r}.")
        if self.workers is not None and self.workers < 1:
            raise SettingError(f"workers must be 1 or more, but got {self.workers}.")
        if self.again is not None and (self.only_page or self.document is not None):
            raise SettingError(
                "again repeats a run and writes nothing, so it cannot be combined with only_page "
                "or document."
            )

    @property
    def scale(self) -> Literal["default", "quick", "smallest"]:
        """The scale of the runs."""
        return "quick" if self.quick else "smallest" if self.smallest else "default"

    @property
    def folder(self) -> Path:
        """The output folder."""
        name = "reproduction" if self.scale == "default" else f"reproduction-{self.scale}"
        return self.out or Path(name)

    @property
    def storage_url(self) -> str:
        """The Optuna storage URL."""
        return self.storage or f"sqlite:///{(self.folder / WORK / 'trials.db').resolve()}"

    @property
    def arguments(self) -> list[str]:
        """The options for starting a worker."""
        given = ["--out", str(self.folder)]
        given += [f"--{self.scale}"] if self.scale != "default" else []
        given += ["--tasks", *self.tasks] if self.tasks else []
        return given + (["--storage", self.storage] if self.storage is not None else [])
