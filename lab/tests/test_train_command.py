"""`microclip train`: recipes and presets, help, errors, custom recipes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from microclip.cli import main
from microclip.report.runs import read_run
from microclip_lab.command_line import read
from microclip_lab.training.recipe_lookup import BUILT_IN, find_recipe

from tiny_recipe import forget_accelerate

ROOT = Path(__file__).parents[2]
TINY = str(Path(__file__).with_name("support") / "tiny_recipe.py")
OWN = str(ROOT / "examples" / "recipes" / "tumours.py")


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch, tmp_path):
    forget_accelerate()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def failed(capsys, *arguments):
    """Return the error message of a failing command."""
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    assert code in (1, 2)
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_help_teaches(capsys, verb):
    assert main([verb, "--help"]) == 0
    assert main([verb]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name}" in said for name in BUILT_IN) or verb == "sweep"
    assert f"microclip {verb} vision" in said
    assert "FILE.py" in said


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_help_of_a_recipe(capsys, verb, name):
    with pytest.raises(SystemExit) as exit_:
        main([verb, name, "--help"])
    said = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"usage: microclip {verb} {name}" in said
    assert "--preset NAME" in said
    assert "paper" in said
    for option in ("--data", "--batch-size", "--optimizer"):
        assert option in said
    swept = "--microbatch-sizes" in said
    assert swept == (verb == "sweep")
    assert ("--microbatch-size " in said) != swept


def test_help_of_a_preset_shows_its_values():
    order = read("train", ["vision", "--preset", "paper", "--steps", "7"])
    assert (order.training.batch_size, order.training.microbatch_size) == (4096, 32)
    assert order.training.steps == 7
    assert read("train", ["vision", "--preset=paper"]).training.batch_size == 4096


def test_none_is_plain_training():
    assert read("train", [TINY]).training.microbatch_size == 4
    assert read("train", [TINY, "--microbatch-size", "none"]).training.microbatch_size is None


def test_a_run_from_start_to_page(capsys, tmp_path):
    assert main(["train", OWN, "--steps", "60", "--out", "run", "--trackers"]) == 0
    said = capsys.readouterr().out
    assert "step 60 of 60: validation_accuracy" in said
    assert "examples/s" in said
    assert "min left" in said
    assert "test_accuracy" in said
    assert f"Page: {tmp_path / 'run' / 'report.html'}" in said
    run = read_run(Path("run"))
    assert run.command == f"microclip train {OWN} --steps 60 --out run --trackers"
    assert run.metrics["best_test_accuracy"][60] > 0.85
    told = [json.loads(line) for line in Path("run/examples.jsonl").read_text().splitlines()]
    assert len(told) == 369
    assert 0.08 < sum(line["label"] != line["truth"] for line in told) / 369 < 0.25
    assert "already holds a run" in failed(capsys, "train", OWN, "--steps", "60", "--out", "run")
    again = ["train", OWN, "--steps", "60", "--out", "run", "--trackers", "--resume"]
    forget_accelerate()
    assert main(again) == 0


def test_a_run_has_a_place_of_its_own_by_default():
    arguments = [TINY, "--steps", "2", "--no-page", "--seed", "3"]
    assert main(["train", *arguments]) == 0
    forget_accelerate()
    assert main(["train", *arguments, "--microbatch-size", "none"]) == 0
    assert {path.name for path in Path("runs").iterdir()} == {"tiny-b4-seed3", "tiny-plain-seed3"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "takes a recipe before its options"),
        (["images"], "There is no recipe 'images'. Choose vision, speech, language, or give"),
        (["gone.py"], "There is no recipe file gone.py."),
        ([TINY, "--preset", "huge"], "has no preset 'huge'. Its presets: default, dropping"),
        ([TINY, "--preset"], "has no preset ''"),
        ([TINY, "--batch-size", "0"], "batch_size must be 1 or more, but got 0."),
        ([TINY, "--rule", "Best"], "rule must be one of"),
        ([TINY, "--chunk-size", "7"], "chunk_size must divide"),
        ([TINY, "--pace", "3"], "Unrecognized options: --pace"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert message in failed(capsys, "train", *arguments)
    assert not list(Path().glob("runs/*/run.json"))


def test_a_diverging_run_ends_with_a_sentence(capsys):
    said = failed(capsys, "train", TINY, "--blow-up", "inf", "--log-every", "1")
    assert said.startswith("microclip: The loss was not finite 3 times in a row")


class TestOwnRecipes:
    def write(self, text):
        Path("mine.py").write_text(text)

    def test_none_in_the_file(self):
        self.write("x = 1\n")
        with pytest.raises(ValueError, match="should define one recipe, a subclass of .* has none"):
            find_recipe("mine.py")

    def test_several(self):
        source = Path(TINY).read_text()
        self.write(f"{source}\n\n@dataclass(frozen=True)\nclass Other(Tiny):\n    pass\n")
        with pytest.raises(ValueError, match=r"has Tiny, Other. Choose one: mine.py:Tiny"):
            find_recipe("mine.py")
        assert find_recipe("mine.py:Other").__name__ == "Other"
        with pytest.raises(ValueError, match="has no recipe 'Third'; it has Tiny, Other"):
            find_recipe("mine.py:Third")

    def test_an_error_in_the_file_is_shown_as_it_is(self):
        self.write("1 / 0\n")
        with pytest.raises(ZeroDivisionError):
            find_recipe("mine.py")
        with pytest.raises(ZeroDivisionError):  # not remembered as loaded
            find_recipe("mine.py")

    def test_what_lies_beside_it_can_be_imported(self):
        Path("beside_it.py").write_text("FACTOR = 3.0\n")
        source = Path(TINY).read_text().replace("blow_up: float = 1.0", "blow_up: float = FACTOR")
        self.write(
            source.replace("import torch\n", "import torch\nfrom beside_it import FACTOR\n", 1)
        )
        assert find_recipe("mine.py")().blow_up == 3.0

    def test_it_must_be_a_dataclass(self, capsys):
        body = Path(TINY).read_text().replace("@dataclass(frozen=True)\n", "")
        self.write(body)
        assert "Tiny must be a dataclass" in failed(capsys, "train", "mine.py")


def test_help_is_quick():
    """It imports neither transformers nor Accelerate, which take seconds."""
    code = (
        "import sys; from microclip.cli import main\n"
        "try: main(['train', 'vision', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'transformers', 'accelerate', 'sklearn', 'optuna'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
