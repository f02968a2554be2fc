"""Whole sweeps: interrupted, killed, shared, and from the command line."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import psutil
import pytest
from optuna.trial import TrialState
from rich.console import Console

from microclip.report.comparison import compare
from microclip.report.runs import read_run
from microclip_lab.command_line import read
from microclip_lab.jobs import subprocesses
from microclip_lab.jobs.job_queue import JobQueue
from microclip_lab.jobs.plan import Cell, Job
from microclip_lab.jobs.storage import open_storage, open_study
from microclip_lab.jobs.worker_loop import TrialError
from microclip_lab.sweep import worker
from microclip_lab.sweep.command import RUNS, run_sweep
from microclip_lab.sweep.config import SweepConfig
from microclip_lab.sweep.setup import ChangedError
from microclip_lab.training.config import SettingError

import sweep_recipe
from sweep_recipe import MEETING, STEPS, TRAP, Line

RECIPE, TRAINING = Line.presets()["default"]
FILE = sweep_recipe.__file__
QUIET = Console(file=StringIO())


def sweep(out, recipe=RECIPE, training=TRAINING, **options):
    config = SweepConfig(
        **{
            "out": out,
            "microbatch_sizes": (4,),
            "learning_rates": (0.03, 0.1),
            "growth": 0,
            "tuning_seeds": 1,
            "seeds": 2,
            **options,
        }
    )
    path = run_sweep(recipe, training, config, console=Console(file=StringIO()), log=QUIET)
    return json.loads(path.read_text())


# ---------------------------------------------------------------------------------- whole sweeps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A sweep with two rules: its folder, and what it says."""
    out = tmp_path_factory.mktemp("undisturbed") / "sweep"
    return out, sweep(out, rules=("MinNorm", "Unit"), seeds=2)


def test_a_sweep_tells_everything(undisturbed):
    out, said = undisturbed
    assert [cell["name"] for cell in said["cells"]] == ["plain", "b = 4", "Unit, b = 4"]
    assert said["evaluation_seeds"] == [1, 2]
    for cell in said["cells"]:
        assert {run["seed"] for run in cell["runs"]} == {1, 2}
        for run in cell["runs"]:
            assert {"test_error", "best_test_error", "validation_error"} <= run["metrics"].keys()
            logged = read_run(out / RUNS / run["folder"]).metrics["test_error"]
            assert logged == {STEPS: run["metrics"]["test_error"]}
    plain, four, unit = said["cells"]
    by_hand = statistics.fmean(
        ours["metrics"]["test_error"] - theirs["metrics"]["test_error"]
        for ours, theirs in zip(four["runs"], plain["runs"], strict=True)
    )
    assert four["last"]["difference"]["mean"] == pytest.approx(by_hand)
    assert unit["rule"] == "Unit"
    text = (out / "sweep.md").read_text()
    assert "| Unit, b = 4 |" in text
    assert said["verdict"] in text


def test_the_page_of_a_sweep_tells_rules_apart(undisturbed):
    out, said = undisturbed
    assert (out / "sweep.html").stat().st_size > 1_000_000
    folders = [run["folder"] for cell in said["cells"] for run in cell["runs"]]
    (comparison,) = compare([read_run(out / RUNS / folder) for folder in folders])
    assert [len(setting.runs) for setting in comparison.settings] == [2, 2, 2]
    plain, *clipped = (setting.name for setting in comparison.settings)
    assert plain == "plain training"
    assert ["Unit" in name for name in clipped] != ["MinNorm" in name for name in clipped]
    assert comparison.headline == "test_error"


def test_given_again_a_finished_sweep_trains_nothing(undisturbed, monkeypatch):
    out, said = undisturbed
    monkeypatch.setattr(worker, "train", None)
    assert sweep(out, rules=("MinNorm", "Unit"), seeds=2) == said


def test_a_sweep_that_grows_keeps_what_was_done(undisturbed, tmp_path, monkeypatch):
    out, said = undisturbed
    trained = []
    real = worker.train

    def counted(recipe, training, **options):
        trained.append((training.microbatch_size, training.seed))
        return real(recipe, training, **options)

    monkeypatch.setattr(worker, "train", counted)
    grown = sweep(out, rules=("MinNorm", "Unit"), seeds=3)
    assert trained == [(None, 3), (4, 3), (4, 3)]
    assert [cell["runs"][:2] for cell in grown["cells"]] == [c["runs"] for c in said["cells"]]


@pytest.mark.parametrize(
    ("recipe", "training", "options", "said"),
    [
        (RECIPE, replace(TRAINING, steps=40), {}, "steps was 20 and is now 40"),
        (RECIPE, TRAINING, {"judge_by": "best"}, "judge_by was 'last' and is now 'best'"),
        (Line(contrary=True), TRAINING, {}, "contrary was False and is now True"),
    ],
)
def test_a_sweep_is_not_gone_on_with_in_another_way(undisturbed, recipe, training, options, said):
    out, _ = undisturbed
    with pytest.raises(ChangedError, match=said):
        sweep(out, recipe, training, **options)


def test_nor_in_the_same_folder_with_another_storage(undisturbed, tmp_path):
    out, _ = undisturbed
    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    with pytest.raises(ChangedError, match="steps was 20 and is now 40"):
        sweep(out, training=replace(TRAINING, steps=40), storage=elsewhere)


def test_rates_are_chosen_on_validation_data_even_if_test_data_says_otherwise(tmp_path):
    said = sweep(tmp_path / "sweep", Line(contrary=True), seeds=1, learning_rates=(0.001, 0.03))
    for cell in said["cells"]:
        tried = {t["learning_rate"]: t["validation"] for t in cell["tried"]}
        assert cell["learning_rate"] == min(tried, key=tried.get) == 0.03
    # what test data says can be read in the folder of a rate that was not chosen
    (slow,) = (tmp_path / "sweep" / RUNS / "tuning").glob("MinNorm-b4-lr0.001-*")
    (fast,) = (tmp_path / "sweep" / RUNS / "tuning").glob("MinNorm-b4-lr0.03-*")
    tested = [list(read_run(f).metrics["test_error"].values())[-1] for f in (slow, fast)]
    assert tested[0] < tested[1]


def test_a_rate_that_diverges_is_ended_and_its_folder_kept(tmp_path):
    said = sweep(tmp_path / "sweep", learning_rates=(0.03, 0.1, 1e20), seeds=1)
    assert all(c["tried"][2] == {"learning_rate": 1e20, "validation": None} for c in said["cells"])
    assert all(c["learning_rate"] < 1 for c in said["cells"])
    kept = list((tmp_path / "sweep" / RUNS / "tuning").glob("*lr1e+20*"))
    assert len(kept) == 2
    assert all((folder / "run.json").exists() for folder in kept)


def test_a_broken_training_stops_no_other_and_is_named(tmp_path):
    recipe = Line(broken=2)
    with pytest.raises(TrialError, match="seed 2: RuntimeError: the disk is on fire"):
        sweep(tmp_path / "sweep", recipe, learning_rates=(0.1,), seeds=3)
    storage = open_storage(f"sqlite:///{tmp_path / 'sweep' / 'trials.db'}")
    queue = JobQueue(open_study(storage, "sweep", lower_is_better=True), storage, Job.from_json)
    assert {job.seed for job in queue.state().finished} == {1, 3}


def test_an_interrupted_training_goes_on_from_its_checkpoint(undisturbed, tmp_path, monkeypatch):
    _, said = undisturbed
    left = [50]

    def interrupt():
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sweep_recipe, "_fall_into_trap", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "sweep", rules=("MinNorm", "Unit"))
    again = sweep(tmp_path / "sweep", rules=("MinNorm", "Unit"))
    assert again["cells"] == said["cells"]


# -------------------------------------------------------------------------------------- commands

OPTIONS = [
    *("--microbatch-sizes", "none", "4", "--learning-rates", "0.03", "0.1", "--growth", "0"),
    *("--tuning-seeds", "1", "--seeds", "2"),
]


def command(out, *options, **environment):
    return subprocess.run(
        [sys.executable, "-m", "microclip", "sweep", FILE, *OPTIONS, "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def trials(out):
    storage = open_storage(f"sqlite:///{out / 'trials.db'}")
    return open_study(storage, "sweep", lower_is_better=True).trials


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a sweep that one process has made without interruption."""
    out = tmp_path_factory.mktemp("whole") / "sweep"
    assert command(out).returncode == 0
    return out


@pytest.mark.full
def test_a_sweep_that_is_killed_loses_nothing_and_comes_to_the_same(whole, tmp_path):
    killed, trap = tmp_path / "sweep", tmp_path / "trap"
    done = []
    for moment in (27, 74):  # in the middle of a plain training, and of a clipped one
        trap.write_text(str(moment))
        assert command(killed, **{TRAP: str(trap)}).returncode == -signal.SIGKILL
        finished = [t for t in trials(killed) if t.state == TrialState.COMPLETE]
        assert done == [(t.number, t.datetime_complete) for t in finished[: len(done)]]
        done = [(t.number, t.datetime_complete) for t in finished]
    assert len(done) == 4
    assert command(killed).returncode == 0
    assert (killed / "sweep.json").read_text() == (whole / "sweep.json").read_text()
    assert (killed / "sweep.md").read_text() == (whole / "sweep.md").read_text()
    resumed = [f for f in (killed / RUNS).glob("*/*/metrics.jsonl") if "resumed" in f.read_text()]
    assert len(resumed) == 2


@pytest.mark.full
def test_two_workers_share_the_work_and_come_to_the_same(whole, tmp_path):
    shared, meeting = tmp_path / "sweep", tmp_path / "meeting"
    meeting.mkdir()
    done = command(shared, "--workers", "2", **{MEETING: str(meeting)})
    assert done.returncode == 0, done.stderr
    assert "ended early" not in done.stderr
    completed = [t for t in trials(shared) if t.state == TrialState.COMPLETE]
    assert len({t.user_attrs["worker"]["process"] for t in completed}) == 2
    seen = [json.dumps(t.user_attrs["job"]) for t in completed]
    assert len(seen) == len(set(seen))
    assert not [f for f in (shared / RUNS).glob("*/*/metrics.jsonl") if "resumed" in f.read_text()]
    assert (shared / "sweep.json").read_text() == (whole / "sweep.json").read_text()


def test_options_on_the_command_line():
    order = read(
        "sweep",
        [
            *(FILE, "--microbatch-sizes", "none", "2", "--rules", "MinNorm", "Quantile(0.2)"),
            *("--rate-scales", "Quantile(0.2)", "0.5", "--no-prune", "--workers", "3", "--race"),
        ],
    )
    assert order.sweep.microbatch_sizes == (None, 2)
    assert order.sweep.sizes == (2,)
    assert order.sweep.rate_scales == {"Quantile(0.2)": 0.5}
    assert order.sweep.race
    assert not order.sweep.prune
    assert order.training.workers == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatch_sizes": (None,)}, "there would be nothing to compare"),
        ({"microbatch_sizes": (0,)}, "must be positive, or none for plain training, but got 0"),
        ({"rules": ()}, "at least one rule"),
        ({"learning_rates": (-1.0,)}, "positive and finite, but got -1.0"),
        ({"rate_scales": {"Unit": 0.1}}, "names Unit, which is not among the rules"),
        ({"seeds": 0}, "seeds must be between 1 and 10,000, but got 0"),
        ({"budget": 1.5}, "budget must be 2 or more, but got 1.5"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(SettingError, match=said):
        SweepConfig(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatch_sizes": (3,)}, "cannot be cut into micro-batches of 3"),
        ({"rules": ("Nonsense",)}, "rule must be one of"),
        ({"workers": 2}, "no command to start them"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is(tmp_path, options, said):
    with pytest.raises(SettingError, match=said):
        sweep(tmp_path / "sweep", **options)
    assert not list(tmp_path.glob("sweep/runs/*"))


def test_several_processes_per_training_are_not_for_sweeps(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="without accelerate launch"):
        sweep(tmp_path)


def test_a_worker_that_ends_badly_is_quoted(tmp_path):
    code = "import sys; sys.exit('no memory')"
    with subprocesses.start_workers([sys.executable, "-c", code], 1, tmp_path) as (worker,):
        worker.process.wait()
        assert worker.failure.endswith("worker-1.log (exit code 1): no memory")


def test_workers_are_gone_when_their_block_is_left(tmp_path):
    code = "from microclip_lab.jobs.subprocesses import *; assert is_worker(); input()"
    with subprocesses.start_workers([sys.executable, "-c", code], 2, tmp_path) as processes:
        pass
    assert not any(worker.is_running for worker in processes)


def test_workers_end_with_the_process_that_started_them_even_if_it_is_killed(tmp_path):
    child = "from microclip_lab.jobs.subprocesses import *; exit_with_parent(); signal.pause()"
    parent = f"""
import os, signal, sys
from pathlib import Path
from microclip_lab.jobs.subprocesses import start_workers
with start_workers([sys.executable, "-c", {child!r}], 1, Path({str(tmp_path)!r})) as (worker,):
    print(worker.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=60)  # raises if it does not end


def test_folders_are_named_by_what_is_trained():
    job = Job("tuning", Cell("Quantile(0.2)", 4), 1e-05, 7)
    assert Path(job.folder).as_posix() == "tuning/Quantile-0.2-b4-lr1e-05-seed7"
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
