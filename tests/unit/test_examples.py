"""The examples run; with one micro-batch per step they train exactly as without microclip."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

FOLDER = Path(__file__).parents[2] / "examples"
SHORT = {  # options that make them short, and options that make a step one micro-batch
    "text_classifier": (["--steps", "4"], ["--microbatch-size", "32"]),
    "causal_lm": (["--steps", "4", "--batch-size", "8"], ["--microbatch-size", "8"]),
    "image_classifier": (["--epochs", "1"], ["--microbatch-size", "32"]),
    "speech_ctc": (["--epochs", "1", "--microbatch-size", "16", "--microbatches", "1"], []),
    # four epochs, or there is no history to judge examples by
    "sft_garbage_answers": (["--steps", "40"], ["--microbatch-size", "24"]),
    "dpo_flipped_pairs": (["--steps", "40"], ["--microbatch-size", "24"]),
    "lora_classifier": (["--steps", "40"], ["--microbatch-size", "32"]),
}


def main_of(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    AcceleratorState._reset_state(True)  # as in a new process
    GradientState._reset_state()
    return module.main


def test_all_examples_are_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SHORT)


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHORT)
def test_one_microbatch_is_plain_training(name):
    short, whole = SHORT[name]
    plain = main_of(name)([*short, "--plain"])
    clipped = main_of(name)([*short, *whole])
    assert len(plain) >= 4
    assert plain[0] != plain[-1]
    assert clipped == pytest.approx(plain, rel=1e-6)


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHORT)
def test_clipping_trains(name, capsys):
    losses = main_of(name)(SHORT[name][0])
    assert all(math.isfinite(loss) for loss in losses)
    assert re.search("accuracy|bits per character|without a mistake", capsys.readouterr().out)
