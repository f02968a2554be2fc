"""The command `microclip`: what it says of itself, its errors, missing extras, Ctrl-C."""

import subprocess
import sys
import types
from importlib.metadata import EntryPoint, entry_points

import pytest

import microclip
from microclip.cli import COMMANDS, LAB, Command, all_commands, main

EXTRAS = ("tyro", "rich", "sklearn", "scipy", "matplotlib", "pyarrow", "jinja2", "plotly")
HEAVY = ("torch", "numpy", *EXTRAS)


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


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in all_commands().items():
        assert f"  {name} " in text
        assert command.summary in text
    for part in ("microclip demo --help", "microclip --version", "wrong labels", "two minutes"):
        assert part in text


def test_help_imports_nothing_heavy():
    """So that it comes at once: torch alone takes more than a second."""
    result = python(
        "import sys; from microclip.cli import main; main(['--help'])\n"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    assert result.stderr == "[]\n"


def test_the_laboratory_adds_its_commands():
    assert set(LAB) <= set(all_commands())
    assert not set(LAB) & set(COMMANDS)


@pytest.mark.parametrize("name", LAB)
def test_commands_of_a_laboratory_that_is_not_installed(name, monkeypatch, capsys):
    monkeypatch.setattr("microclip.cli.entry_points", lambda group: [])
    assert main([name]) == 2
    error = capsys.readouterr().err
    assert error == (
        f'microclip: The command "{name}" comes with microclip-lab. '
        "Install it with: pip install microclip-lab\n"
    )


def test_help_of_the_demo_teaches(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for part in ("about two minutes", "microclip demo --seeds 20", "default: demo-output"):
        assert part in text


@pytest.mark.parametrize("arguments", [[], ["--seeds", "3"], ["dmeo"]])
def test_a_command_must_be_named(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"There are: {', '.join(all_commands())}." in error
    if arguments:
        assert f"There is no command {arguments[0]!r}." in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seeds 1", "seeds must be 2 or more for an interval, but got 1."),
        ("--steps 0", "steps must be 1 or more, but got 0."),
        ("--microbatch-size 0", "microbatch_size must be between 1 and 32, but got 0."),
        ("--microbatch-size 33", "microbatch_size must be between 1 and 32, but got 33."),
        ("--noise 1.5", "noise must be between 0 and 1, but got 1.5."),
        ("--noise nan", "noise must be between 0 and 1, but got nan."),
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


def test_a_reader_that_leaves_is_no_error(tmp_path):
    code = (
        "import sys; from microclip import cli\n"
        "def run(options): raise BrokenPipeError(32, 'Broken pipe')\n"
        "sys.modules['leaving'] = type(sys)('leaving'); sys.modules['leaving'].run = run\n"
        "cli.COMMANDS['leave'] = cli.Command('leave', 'leaving:run')\n"
        "sys.exit(cli.main(['leave']))"
    )
    result = python(code)
    assert (result.returncode, result.stderr) == (141, "")


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
        f"microclip: This command needs {absent}, which is not installed. "
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


@pytest.mark.parametrize("resumes", [False, True])
def test_interrupted_it_says_whether_to_go_on(resumes, monkeypatch, capsys):
    def run(options):
        raise KeyboardInterrupt

    module = types.ModuleType("interrupted")
    module.run = run
    monkeypatch.setitem(sys.modules, "interrupted", module)
    command = Command("be interrupted", "interrupted:run", resumes=resumes)
    monkeypatch.setitem(COMMANDS, "wait", command)
    assert main(["wait"]) == 130
    error = capsys.readouterr().err
    assert error.startswith("microclip: Interrupted.")
    assert ("the same command again" in error) is resumes


def test_a_package_that_cannot_be_loaded_takes_no_other_command_along(monkeypatch, capsys):
    broken = EntryPoint("train", "no_such_package.commands:TRAIN", "microclip.commands")
    monkeypatch.setattr("microclip.cli.entry_points", lambda group: [broken])
    assert main(["--help"]) == 0
    assert "cannot be loaded: No module named 'no_such_package'" in capsys.readouterr().out
    assert main(["train"]) == 1
    assert "'train' cannot be loaded: No module named" in capsys.readouterr().err
