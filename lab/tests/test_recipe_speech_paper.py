"""The paper's scale: the full-size model is built, and takes two steps on stand-in data."""

from dataclasses import replace

import numpy as np
import psutil
import pytest
import soundfile
import torch

from microclip import Clipper
from microclip_lab.speech.recipe import Speech
from microclip_lab.training.batch_rng import BatchRng

PARAMETERS = 580_000_000
NEEDED = 10 * 2**30  # bytes: weights, gradients and one more such buffer, 2.3 GB each, and room


@pytest.fixture
def preset(tmp_path, monkeypatch):
    """Return the preset on stand-in data, with random weights instead of the hub's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for split, count in (("train-clean-100", 8), ("dev-clean", 1), ("test-clean", 1)):
        folder = tmp_path / split / "1" / "2"
        folder.mkdir(parents=True)
        lines = [f"1-2-{number:04d} GO\n" for number in range(count)]
        (folder / "1-2.trans.txt").write_text("".join(lines))
        for number in range(count):
            noise = 0.1 * draw.standard_normal(4_800 + 320 * number)
            soundfile.write(folder / f"1-2-{number:04d}.flac", noise, 16_000)
    recipe, training = Speech.presets()["paper"]
    return replace(recipe, data=str(tmp_path), checkpoint=None, canaries=0.0), training


def test_the_preset_is_the_papers():
    recipe, training = Speech.presets()["paper"]
    assert recipe.checkpoint == "facebook/w2v-bert-2.0"
    assert (training.batch_size, training.microbatch_size, training.steps) == (512, 4, 20_000)
    assert training.chunk_size is not None
    assert training.chunk_size % training.microbatch_size == 0


def test_the_model_has_its_full_size(preset):
    recipe, _ = preset
    data = recipe.load(0)
    with torch.device("meta"):
        model = recipe.build(data)
    assert sum(parameter.numel() for parameter in model.parameters()) > PARAMETERS
    batch = recipe.collate([data.training[row] for row in range(3)], BatchRng(0, 0, 3))
    inputs = batch["input_features"].to("meta")
    assert inputs.shape == (3, int(batch["attention_mask"].sum(1).max()), 160)
    # without its mask, in which the model looks for zeros: there are no values to look at
    assert model(input_features=inputs).logits.shape == (3, inputs.shape[1], 29)


@pytest.mark.full
def test_two_steps(preset):
    if psutil.virtual_memory().available < NEEDED:
        pytest.skip(f"Two steps need {NEEDED / 2**30:.0f} GiB of free memory.")
    recipe, training = preset
    data = recipe.load(0)
    torch.manual_seed(0)
    model = recipe.build(data)
    clipper = Clipper(model, training.microbatch_size, engine="stream")
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    head = model.lm_head.weight.detach().clone()
    for step in range(2):
        batch = recipe.collate([data.training[row] for row in range(8)], BatchRng(0, step, 8))
        optimizer.zero_grad()
        outcome = clipper.backward(lambda part: recipe.losses(model, part), batch)
        optimizer.step()
        assert outcome.loss.isfinite()
        assert outcome.norms.shape == (2,)
        assert outcome.norms.isfinite().all()
        assert outcome.weights.max() == 1
    assert not torch.equal(head, model.lm_head.weight)
    with torch.no_grad():
        records = recipe.judge(model.eval(), recipe.collate([data.test[0]], None))
    assert records[0][0] == "go"
