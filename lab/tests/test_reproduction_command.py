"""`microclip reproduce`: killed, shared, lost and repeated runs; and errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from optuna.trial import TrialState
from rich.console import Console

from microclip.cli import main, options_of
from microclip_lab.commands import REPRODUCE
from microclip_lab.jobs.storage import open_storage, open_study
from microclip_lab.jobs.worker_loop import StoppedError, TrialError
from microclip_lab.reproduction.claims import CLAIMS
from microclip_lab.reproduction.command import announcement, reproduce
from microclip_lab.reproduction.config import TASKS, WORK, ReproduceConfig
from microclip_lab.reproduction.record_checks import (
    NotTheSameError,
    OtherPlanError,
    check,
    find,
    made_otherwise,
    rerun,
)
from microclip_lab.reproduction.records import Job, files, path_of, read_all, write
from microclip_lab.reproduction.run_job import run_job, spec_of
from microclip_lab.reproduction.study import Study
from microclip_lab.reproduction.tasks import tasks

import reproduction_study
import sweep_recipe
from reproduction_study import DIVERGES, study, work_through
from sweep_recipe import MEETING, STEPS, TRAP, Line

PLAN = study()
BEFORE = STEPS + 12  # losses of the first run, and of one that diverges; then comes a third
B4 = Job("line", "b4", "evaluation", 0.03, 200)


def content(out):
    """Return all records of a folder as they are on disk, except for durations."""
    said = {path.relative_to(out).as_posix(): json.loads(path.read_text()) for path in files(out)}
    for record in said.values():
        assert record["made"].pop("seconds") >= 0
    return {path: json.dumps(record) for path, record in said.items()}


def trials(out):
    storage = open_storage(f"sqlite:///{out / WORK / 'trials.db'}")
    return open_study(storage, out.name, lower_is_better=False).trials


def command(out, workers=1, **environment):
    return subprocess.run(
        [sys.executable, reproduction_study.__file__, str(out), str(workers)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a plan that was completed without interruption."""
    out = tmp_path_factory.mktemp("whole") / "reproduction"
    work_through(out)
    return out


def test_every_run_of_the_plan_leaves_a_record_and_no_folder(whole):
    records = read_all(whole)
    assert set(records) == set(PLAN.expected(records))
    assert PLAN.missing(records) == []
    assert len(records) == 2 * (2 + 2) + 2
    assert not list((whole / WORK / "runs").rglob("*.safetensors"))
    assert {job.value for job in records if job.stage == "evaluation"} == {0.03, None}


def test_a_run_that_diverges_is_a_result(whole):
    found = read_all(whole)[Job("line", "plain", "tuning", DIVERGES, 100)]
    assert "not finite" in found.diverged
    assert str(whole) not in json.dumps(found.to_json())
    assert found.weights == ""
    assert found.metrics == {}


def test_a_replay_takes_the_steps_of_the_run_with_its_seed(whole):
    records = read_all(whole)
    lengths = records[B4].course["gradient_norm"]
    assert len(lengths) == STEPS
    spec = spec_of(PLAN, Job("line", "as-long", "evaluation", None, 200), records)
    assert spec.rule.lengths == lengths
    assert spec.training.learning_rate == 0.03
    assert spec.training.rule == f"gradient_norm of {B4.id}"


@pytest.mark.full
def test_killed_and_taken_up_by_two_workers_it_comes_to_the_same(whole, tmp_path):
    out, trap, meeting = tmp_path / "reproduction", tmp_path / "trap", tmp_path / "meeting"
    trap.write_text(str(BEFORE + STEPS // 2))
    assert command(out, **{TRAP: str(trap)}).returncode == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in files(out)}
    assert len(before) == 2
    assert list((out / WORK / "runs").rglob("*.safetensors"))
    meeting.mkdir()
    done = command(out, 2, **{MEETING: str(meeting)})
    assert done.returncode == 0, done.stderr
    assert "ended early" not in done.stderr
    assert content(out) == content(whole)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    completed = [t for t in trials(out) if t.state == TrialState.COMPLETE]
    jobs = [json.dumps(t.user_attrs["job"]) for t in completed]
    assert len(jobs) == len(set(jobs)) == len(content(out))
    assert len({t.user_attrs["worker"]["process"] for t in completed[2:]}) == 2
    assert not list((out / WORK / "runs").rglob("*.safetensors"))


@pytest.mark.parametrize("step", [STEPS // 2, pytest.param(STEPS, marks=pytest.mark.full)])
def test_interrupted_it_goes_on_from_a_checkpoint(whole, tmp_path, monkeypatch, step):
    out, left = tmp_path / "reproduction", [BEFORE + step]

    def interrupt():
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sweep_recipe, "_fall_into_trap", interrupt)
    with pytest.raises(StoppedError, match="run the same command again"):
        work_through(out)
    assert len(content(out)) == 2
    work_through(out)
    assert content(out) == content(whole)


def test_records_are_the_truth_whatever_the_storage_says(whole, tmp_path, monkeypatch):
    out = tmp_path / "reproduction"
    shutil.copytree(whole, out)
    path_of(out, B4).unlink()
    work_through(out)  # the storage takes this run for finished
    assert content(out) == content(whole)
    monkeypatch.setattr("microclip_lab.reproduction.run_job.run_job", None)
    clone = tmp_path / "clone"
    shutil.copytree(whole / "runs", clone / "runs")
    work_through(clone)  # there is no storage that knows of any run
    assert content(clone) == content(whole)


def test_an_error_stops_no_other_run_and_is_named(tmp_path):
    out = tmp_path / "reproduction"
    with pytest.raises(TrialError, match="seed201: RuntimeError: the disk is on fire"):
        work_through(out, recipe=Line(broken=201))
    assert {job.seed for job in read_all(out)} == {100, 200}


def test_announced_is_what_is_left(whole):
    said = announcement(PLAN, {}, 2)
    assert said.startswith("10 runs: line. The rest takes about 0.17 core-hours, with 2 runs in")
    records = read_all(whole)
    assert announcement(PLAN, records, 2).startswith("All 10 runs have records")
    del records[B4]
    assert "9 of them already have records." in announcement(PLAN, records, 2)


# ------------------------------------------------------------------------------------------- again


def again(records, id):
    console = Console(file=StringIO(), width=120)
    log = Console(file=StringIO(), width=1000)
    try:
        rerun(PLAN, records, id, console, log)
    finally:
        said = console.file.getvalue(), log.file.getvalue()
    return said


@pytest.mark.parametrize("job", [B4, Job("line", "as-long", "evaluation", None, 201)])
def test_a_run_done_again_comes_to_the_same(whole, job):
    said, log = again(read_all(whole), job.id)
    assert said.endswith("Identical, bit for bit.\n")
    assert "NO" not in said
    assert log == f"Repeating {job.id}.\n"


def test_one_that_diverged_does_so_again(whole):
    said, _ = again(read_all(whole), f"line/b4/tuning-{DIVERGES!r}-seed100")
    assert said.endswith("Identical, bit for bit.\n")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: {"metrics": {**r.metrics, "test_error": r.metrics["test_error"] + 1e-15}}, 1),
        (lambda r: {"curve": {**r.curve, 8: 0.25}}, "curve"),
        (lambda r: {"course": {**r.course, "bound": r.course["bound"][::-1]}}, "course"),
        (lambda r: {"weights": "0" * 64}, "weights"),
        (lambda r: {"moments": ({"step": 3},)}, "moments"),
    ],
)
def test_a_record_that_was_changed_is_found_out(whole, change, named):
    records = read_all(whole)
    records[B4] = replace(records[B4], **change(records[B4]))
    named = "test_error" if named == 1 else named
    with pytest.raises(NotTheSameError, match=f"differs from its record in {named}\\.$"):
        again(records, B4.id)


def test_another_machine_is_said_to_be_one(whole):
    record = read_all(whole)[B4]
    assert made_otherwise(record) == []
    elsewhere = replace(record, made={**record.made, "torch": "1.0", "processor": "Z80"})
    (processor, torch) = made_otherwise(elsewhere)
    assert processor.startswith("processor was 'Z80' and is now ")
    assert torch.startswith("torch was '1.0' and is now ")
    _, log = again({**read_all(whole), B4: elsewhere}, B4.id)
    assert "from another environment (processor was 'Z80'" in log


def test_any_record_or_a_known_one(whole):
    records = read_all(whole)
    assert find(PLAN, records, "random").job in records
    with pytest.raises(ValueError, match="such as line/as-long/seed200, or random, but got 'x'"):
        find(PLAN, records, "x")
    with pytest.raises(ValueError, match="no records to compare with"):
        find(Study(()), records, "random")


# -------------------------------------------------------------------------------------- real tasks


@pytest.fixture(scope="module")
def digits():
    """Return the spec of a digits run with snapshots, at the smallest scale."""
    plan = Study(tuple(task for task in tasks("smallest") if task.name == "digits"))
    return spec_of(plan, Job("digits", "b4", "evaluation", 0.001, 200), {})


@pytest.fixture(scope="module")
def undisturbed(digits, tmp_path_factory):
    """Return its record."""
    return run_job(digits, tmp_path_factory.mktemp("undisturbed") / "run")


def test_what_is_seen_inside_survives_a_break(digits, undisturbed, tmp_path):
    def stumble(step, figures):
        if step == 9:  # after four of the moments, on the way to the fifth
            raise RuntimeError("a power cut")

    with pytest.raises(RuntimeError, match="a power cut"):
        run_job(digits, tmp_path, stumble)
    taken_up = run_job(digits, tmp_path)
    assert [moment["step"] for moment in undisturbed.moments] == [1, 2, 4, 8, 14, 20]
    assert len(undisturbed.course["bound"]) == 20
    assert replace(taken_up, made={}) == replace(undisturbed, made={})


@pytest.mark.full
def test_a_page_is_made_of_the_records_that_are_there(undisturbed, tmp_path, capsys):
    write(tmp_path, undisturbed)
    document = tmp_path / "docs" / "a.md"
    given = ["--smallest", "--out", str(tmp_path), "--only-page", "--document", str(document)]
    assert main(["reproduce", *given]) == 0
    said = capsys.readouterr().out
    (page,) = tmp_path.glob("*.html")
    assert str(page) in said
    assert undisturbed.id in page.read_text()
    assert str(document) in said
    assert f"(../{page.name})" in document.read_text()
    assert undisturbed.id in (tmp_path / "results.json").read_text()
    for claim in CLAIMS:
        assert f" {claim.id} " in said
    assert list(files(tmp_path)) == [path_of(tmp_path, undisturbed.job)]


# ----------------------------------------------------------------------------------------- options


def test_names_of_tasks_are_those_of_the_plan():
    assert [task.name for task in tasks()] == list(TASKS)


def test_records_of_another_plan_are_not_taken_for_ones_own(whole, tmp_path):
    records = read_all(whole)
    check(PLAN, records)
    check(Study(()), records)  # of other tasks nothing is said
    (task,) = PLAN.tasks
    longer = Study((replace(task, training=replace(task.training, steps=40)),))
    with pytest.raises(OtherPlanError, match="steps was 20 and is now 40"):
        check(longer, records)


def test_nothing_is_trained_beside_records_of_another_plan(whole, tmp_path, capsys):
    record = replace(read_all(whole)[B4], job=Job("clean-digits", "b4", "evaluation", 0.001, 200))
    write(tmp_path, record)
    options = ["--smallest", "--tasks", "clean-digits", "--out", str(tmp_path)]
    assert main(["reproduce", *options]) == 1
    assert "was made with other settings" in capsys.readouterr().err
    assert not (tmp_path / WORK).exists()


def test_there_is_no_page_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="has no records"):
        reproduce(ReproduceConfig(out=tmp_path, only_page=True))


def test_a_broken_record_is_named_in_one_line(tmp_path, capsys):
    path = path_of(tmp_path, B4)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert main(["reproduce", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"microclip: {path} should be the record")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tasks": ("digit",)}, f"tasks must be among {', '.join(TASKS)}, but got 'digit'"),
        ({"workers": 0}, "workers must be 1 or more, but got 0"),
        ({"quick": True, "smallest": True}, "two different scales"),
        ({"again": "random", "only_page": True}, "cannot be combined"),
        ({"again": "random", "document": Path("a.md")}, "cannot be combined"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        ReproduceConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quick": True, "workers": 3},
        {"smallest": True, "tasks": ("speech", "movie"), "storage": "sqlite:///x.db"},
    ],
)
def test_workers_are_started_with_the_same_options(options):
    config = ReproduceConfig(**options)
    read = options_of("reproduce", REPRODUCE, config.arguments)
    assert (read.scale, read.folder, read.tasks) == (config.scale, config.folder, config.tasks)
    assert read.storage_url == config.storage_url


def test_folders_of_scales_do_not_mix():
    assert ReproduceConfig().folder.name == "reproduction"
    assert ReproduceConfig(quick=True).folder.name == "reproduction-quick"


def test_the_help_teaches(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        main(["reproduce", "--help"])
    said = capsys.readouterr().out
    assert exit_.value.code == 0
    for part in ("--quick", "--again", "a night on two cores", "bit for bit", *TASKS):
        assert part in said
