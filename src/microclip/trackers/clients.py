"""TensorBoard, Weights & Biases, MLflow and Trackio behind one small protocol.

Each adapter takes its tracker's own object, which stays the user's: it is never closed here, unless
`started` opened it. Knows figures and tables; nothing of ledgers.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from microclip.integrations.metrics import PREFIX
from microclip.trackers.examples import Example, ExampleTable
from microclip.trackers.figures import Steps

CLIENTS = ("tensorboard", "wandb", "mlflow", "trackio")
STEP, WORST = f"{PREFIX}step", f"{PREFIX}worst_examples"
AT_ONCE = 1000  # metrics that MLflow takes in one call
MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|~])")
SUFFIX = ".microclip"  # of TensorBoard's files that `started` opens
BLANK = (1, 1)  # pixels where an example has no picture


@runtime_checkable
class Client(Protocol):
    """Where figures and tables go. Write your own, and pass it as `to=`."""

    def log_steps(self, steps: Steps) -> None:
        """Log the figures of each step, by name."""

    def log_examples(self, step: int, table: ExampleTable) -> None:
        """Log the worst examples after this step."""


def client_for(to: Any) -> Client:
    """Return the adapter for a tracker's own object, or the object itself if it is a client."""
    name = to.__name__ if isinstance(to, ModuleType) else type(to).__module__
    package = name.partition(".")[0]
    if package == "wandb":
        return _WandB(_started_run(to, "run", "wandb.init()"))
    if package == "mlflow":
        return _MLflow(_started_run(to, "active_run", "mlflow.start_run()"))
    if package == "trackio":
        return _Trackio(to)
    if all(hasattr(to, name) for name in ("add_scalar", "add_text", "add_image")):
        return _TensorBoard(to)
    if isinstance(to, Client):
        return to
    raise TypeError(
        "to must be a SummaryWriter, a run of wandb, mlflow or trackio, one of the names "
        f"{', '.join(map(repr, CLIENTS))}, or an object with log_steps() and log_examples(), but "
        f"got {to!r}."
    )


@contextmanager
def started(to: str, project: str, name: str, folder: Path) -> Iterator[Any]:
    """Start a run of a tracker, called by name, and end it: as failed if something fails.

    Args:
        to: One of `CLIENTS`.
        project: The project or experiment that the run belongs to.
        name: The name of the run.
        folder: Where TensorBoard's files go; those of an earlier call are removed at the end.
    """
    if to not in CLIENTS:
        raise ValueError(f"to must be one of {', '.join(map(repr, CLIENTS))}, but got {to!r}.")
    earlier: list[Path] = []
    if to == "tensorboard":
        _imported("tensorboard")
        earlier = list(folder.glob(f"*{SUFFIX}"))
    try:
        run, end = _start(to, project, name, folder)
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # each has errors of its own
        raise RuntimeError(f"{to} could not start a run: {error}") from error
    whole = False
    try:
        yield run
        whole = True
    finally:
        end(whole)
    for file in earlier:
        file.unlink(missing_ok=True)


def _start(to: str, project: str, name: str, folder: Path) -> tuple[Any, Callable[[bool], object]]:
    """Return a run, and what ends it, which is told whether everything was logged."""
    if to == "tensorboard":
        # purge_step: a TensorBoard that is running has read the earlier files
        run = _imported("torch.utils.tensorboard").SummaryWriter(
            str(folder), purge_step=0, filename_suffix=SUFFIX
        )
        return run, lambda whole: run.close()
    module: Any = _imported(to)
    if to == "wandb":
        run = module.init(project=project, name=name)
        return run, lambda whole: run.finish(None if whole else 1)
    if to == "trackio":
        run = module.init(project=project, name=name, embed=False)
        return run, lambda whole: module.finish()
    module.set_experiment(project)
    run = module.start_run(run_name=name)
    return run, lambda whole: module.end_run("FINISHED" if whole else "FAILED")


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.rpartition(".")[2]
        raise ImportError(
            f"{package} is not installed ({error}): pip install 'microclip[trackers]'"
        ) from error


def _started_run(to: Any, current: str, command: str) -> Any:
    """Return a run; if the module was passed instead, the one that it has started."""
    if not isinstance(to, ModuleType):
        return to
    found = getattr(to, current)
    found = found() if callable(found) and current == "active_run" else found
    if found is None:
        raise ValueError(f"{to.__name__} has no active run: call {command} first.")
    return found


class _TensorBoard:
    """A SummaryWriter: curves, a table in Markdown, and pictures one by one."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log_steps(self, steps: Steps) -> None:
        for step, figures in steps:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_examples(self, step: int, table: ExampleTable) -> None:
        columns = [name for name in table.columns if name != "picture"]
        lines = [_line(["rank", *columns]), _line(["---"] * (1 + len(columns)))]
        for rank, row in enumerate(table.rows, 1):
            lines.append(_line([str(rank), *(_cell(row, name) for name in columns)]))
        self._writer.add_text(WORST, "\n".join(lines), step)
        self._add_pictures(step, table)
        self._writer.flush()

    def _add_pictures(self, step: int, table: ExampleTable) -> None:
        import numpy as np

        for rank, row in enumerate(table.rows, 1):
            if row.picture is not None:
                pixels = np.asarray(_opened(row.picture).convert("RGB"))
                # by rank, not by id: the number of tags stays small from table to table
                self._writer.add_image(f"{WORST}/{rank:03}", pixels, step, dataformats="HWC")


class _WandB:
    """A run of Weights & Biases: figures have their own step, so that yours are left alone."""

    def __init__(self, run: Any) -> None:
        self._run, self._wandb = run, _imported("wandb")
        run.define_metric(STEP, hidden=True)
        run.define_metric(f"{PREFIX}*", step_metric=STEP)

    def log_steps(self, steps: Steps) -> None:
        for step, figures in steps:
            self._run.log({STEP: step, **figures})

    def log_examples(self, step: int, table: ExampleTable) -> None:
        def cell(row: Example, name: str) -> Any:
            if name != "picture":
                return _value(row, name)
            return None if row.picture is None else self._wandb.Image(_opened(row.picture))

        data = [[cell(row, name) for name in table.columns] for row in table.rows]
        found = self._wandb.Table(columns=table.columns, data=data)
        self._run.log({STEP: step, WORST: found})


class _Trackio:
    """A run of Trackio, or the module, which logs to its current run."""

    def __init__(self, run: Any) -> None:
        self._run, self._trackio = run, _imported("trackio")

    def log_steps(self, steps: Steps) -> None:
        for step, figures in steps:
            self._run.log(figures, step=step)

    def log_examples(self, step: int, table: ExampleTable) -> None:
        def cell(row: Example, name: str) -> Any:
            if name != "picture":
                return _value(row, name)
            return None if row.picture is None else self._trackio.Image(_opened(row.picture))

        data = [[cell(row, name) for name in table.columns] for row in table.rows]
        self._run.log({WORST: self._trackio.Table(columns=table.columns, data=data)}, step=step)


class _MLflow:
    """A run of MLflow: metrics, and a table among its artifacts."""

    def __init__(self, run: Any) -> None:
        if not hasattr(run, "info"):
            raise TypeError(
                "For MLflow, to must be a run, such as mlflow.start_run() or mlflow.get_run(id) "
                f"returns, or the module, but got {type(run).__name__}."
            )
        self._id, self._mlflow = run.info.run_id, _imported("mlflow")
        self._client = self._mlflow.MlflowClient()

    def log_steps(self, steps: Steps) -> None:
        metric = _imported("mlflow.entities").Metric
        waiting: list[Any] = []
        for step, figures in steps:
            if len(waiting) + len(figures) > AT_ONCE:
                self._client.log_batch(self._id, metrics=waiting)
                waiting = []
            now = int(1000 * time.time())
            waiting += [metric(name, value, now, step) for name, value in figures.items()]
        if waiting:
            self._client.log_batch(self._id, metrics=waiting)

    def log_examples(self, step: int, table: ExampleTable) -> None:
        file = f"{WORST}/step-{step:08}.json"
        if find_spec("pandas") is None:  # which MLflow's tables need: the same file, no pictures
            names = [name for name in table.columns if name != "picture"]
            rows = [[_value(row, name) for name in names] for row in table.rows]
            self._client.log_dict(self._id, {"columns": names, "data": rows}, file)
            return
        columns = {name: [_value(row, name) for row in table.rows] for name in table.columns}
        if "picture" in columns:
            columns["picture"] = [self._picture(row.picture) for row in table.rows]
        if any(each.path == file for each in self._client.list_artifacts(self._id, WORST)):
            # MLflow appends to a table that is there already
            self._client.log_dict(self._id, {"columns": [], "data": []}, file)
        self._client.log_table(self._id, columns, file)

    def _picture(self, content: bytes | None) -> Any:
        from PIL import Image

        # MLflow takes columns of pictures, or without
        return Image.new("L", BLANK, 255) if content is None else _opened(content)


def _value(row: Example, name: str) -> Any:
    return row.text if name == "text" else row.values.get(name)


def _cell(row: Example, name: str) -> str:
    """Return a value for a Markdown table; nothing in it is taken for Markdown or HTML."""
    value = _value(row, name)
    if isinstance(value, float):
        return f"{value:.4g}"
    text = " ".join(str("" if value is None else value).split())
    return MARKDOWN.sub(r"\\\1", escape(text))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _opened(content: bytes | None) -> Any:
    from PIL import Image

    picture = Image.open(io.BytesIO(content or b""))
    picture.load()
    return picture
