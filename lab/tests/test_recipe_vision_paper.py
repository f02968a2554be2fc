"""The vision recipe at the paper's size runs, on stand-in images."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from microclip.ledger import open_ledger
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.train import train
from microclip_lab.vision.recipe import Vision


@pytest.mark.full
def test_the_papers_model_takes_two_steps_on_stand_in_pictures(tmp_path):
    for label in range(2):
        (tmp_path / "train" / str(label)).mkdir(parents=True)
        for i in range(4):
            pixels = np.random.default_rng(i).integers(0, 256, (375, 500, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "train" / str(label) / f"{i}.JPEG")
    recipe, training = Vision.presets()["paper"]
    recipe = replace(recipe, data=str(tmp_path), judged_pictures=1)
    examples = [recipe.load(0).training[row] for row in range(4)]
    batch = recipe.collate(examples, BatchRng(0, 0, 4))
    assert batch["pixel_values"].shape == (4, 3, 224, 224)
    few = {"batch_size": 4, "microbatch_size": 2, "chunk_size": 2, "epochs": None, "steps": 2}
    few |= {"evaluate_every": 2}
    # 32 bits: processors without bfloat16 of their own take minutes for a step
    here = {"precision": "no", "workers": 0, "trackers": (), "page": False, "cpu": True}
    finished = train(recipe, replace(training, **few, **here, out=tmp_path / "run"))
    assert finished.step == 2
    assert finished.metrics.keys() >= {"test_accuracy", "best_test_top5_accuracy"}
    norms = open_ledger(tmp_path / "run" / "ledger").dataset().to_table()["norm"].to_pylist()
    assert len(norms) == 4
    assert all(0 < norm < 100 for norm in norms[:2]), norms  # not DeiT's trap
    assert all(np.isfinite(norms))
