"""The command `microclip`: what it says of itself, its errors, missing extras, Ctrl-C."""

import functools
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import microclip
from microclip.cli import main
from microclip.demo import experiment
from microclip.demo.cache import Cache

EXTRAS = ("tyro", "rich", "sklearn", "scipy", "matplotlib", "pyarrow", "jinja2", "plotly")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def refused(capsys, *arguments: str) -> str:
    """Return what is printed when the command line is not accepted, on one line."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    return " ".join(error.replace("│", " ").split())


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_the_installed_command_is_this_main():
    (script,) = entry_points(group="console_scripts", name="microclip")
    assert script.load() is main


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"microclip {microclip.__version__}\n"


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for part in ("microclip demo --help", "microclip --version", "wrong labels", "two minutes"):
        assert part in text


def test_help_of_the_demo_teaches(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for part in ("two minutes", "microclip demo --seeds 20", "--fresh", "default: demo-output"):
        assert part in text
    assert "--no-fresh" not in text


def test_a_command_must_be_named(capsys):
    assert "demo" in refused(capsys)
    assert "--seeds" in refused(capsys, "--seeds", "3")  # not taken for options of the demo


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seeds 1", "seeds must be 2 or more, since an interval needs two values, but got 1."),
        ("--steps 0", "steps must be 1 or more, but got 0."),
        ("--batch-size 1", "batch_size must be between 2 and 900"),
        ("--batch-size 901", "the number of training images, but got 901."),
        ("--microbatch-sizes 2 3", "must divide the batch size 32, but got 3."),
        ("--microbatch-sizes 0", "must divide the batch size 32, but got 0."),
        ("--microbatch-sizes 32", "must name at least one size below the batch size 32"),
        ("--noise 1.5", "noise must be between 0 and 1, but got 1.5."),
        ("--noise nan", "noise must be between 0 and 1, but got nan."),
        ("--workers 0", "workers must be 1 or more, but got 0."),
    ],
)
def test_bad_options_are_refused_with_the_value(options, message, capsys):
    assert message in refused(capsys, "demo", *options.split())


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "taken").write_text("a file")
    assert main(["demo", "--out", str(tmp_path / "taken")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("microclip: ")
    assert str(tmp_path / "taken") in error
    assert error.count("\n") == 1


def test_a_killed_process_ends_in_a_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiment, "_prepare_worker", functools.partial(os._exit, 1))
    assert main(["demo", "--out", str(tmp_path), "--workers", "1"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("microclip: One of the 1 training processes was killed")
    assert "--workers 1" in last


@pytest.mark.parametrize(
    ("absent", "extra"),
    [("tyro", "cli"), ("rich", "cli"), ("sklearn", "demo"), ("plotly", "demo")],
)
def test_missing_extras_are_named_in_one_line(absent, extra, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, absent, None)  # from now on, importing it fails
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error == (
        f"microclip: This command needs {absent}, which cannot be imported. "
        f'Install it with: pip install "microclip[{extra}]"\n'
    )
    assert not (tmp_path / "out").exists()


def test_with_torch_alone_the_command_names_its_extra():
    result = python(
        f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}))\n"
        "from microclip.cli import main; sys.exit(main(['demo']))"
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert 'pip install "microclip[cli]"' in result.stderr


def test_importing_microclip_imports_no_extra():
    result = python(
        f"import sys, microclip, microclip.cli; print([m for m in {EXTRAS} if m in sys.modules])"
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a process group")
def test_interrupted_it_keeps_what_is_finished(tmp_path):
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from microclip.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    options = f"demo --out {tmp_path} --seeds 5 --steps 300 --microbatch-sizes 16 --workers 2"
    with subprocess.Popen(
        [sys.executable, "-c", code, *options.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, which is what a terminal sends Ctrl-C to
    ) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "left" in line)  # something is finished
        os.killpg(process.pid, signal.SIGINT)
        rest, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest == ""
    assert error.splitlines()[-1] == (
        "microclip: Interrupted. What was finished is kept: the same command goes on from there."
    )
    assert "Traceback" not in error
    assert 0 < len(Cache(tmp_path / "runs.jsonl").load()) < 24
