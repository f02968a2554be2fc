"""Gradient snapshots, compared with autograd and checked for invariants."""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import save_file

from microclip.probing.draggers import Estimate
from microclip_lab.language import vader
from microclip_lab.language.recipe import Language
from microclip_lab.reproduction.gradient_snapshots import (
    Snapshot,
    known_draggers,
    rows_to_compare,
    take_snapshot,
)
from microclip_lab.speech.recipe import Speech
from microclip_lab.speech.tokens import frames_needed
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.vision.recipe import Vision

from tiny_recipe import Tiny

SMALL = Vision(training_pictures=60, hidden_size=8, layers=1, heads=2, patch_size=4, dropout=0.5)
SEED = 3


def weights_of(recipe, data, folder):
    """Write new weights like a checkpoint, and return the model."""
    torch.manual_seed(1)
    model = recipe.build(data)
    folder.mkdir(exist_ok=True)
    tied = getattr(model, "_tied_weights_keys", None) or ()
    kept = {name: w for name, w in model.state_dict().items() if name not in tied}
    save_file({name: w.clone() for name, w in kept.items()}, folder / "model.safetensors")
    return model.eval()


def gradients(recipe, data, model, rows):
    """Return losses and gradients, one row per example, by separate backward passes."""
    batch = recipe.collate([data.training[row] for row in rows], BatchRng(SEED, 0, len(rows)))
    losses = recipe.losses(model, batch)
    found = []
    for loss in losses:
        model.zero_grad()
        loss.backward(retain_graph=True)
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat(grads).double())
    return losses.detach().double(), torch.stack(found)


@pytest.fixture
def digits(tmp_path):
    data = SMALL.load(SEED)
    return data, weights_of(SMALL, data, tmp_path), tmp_path


def test_equals_one_backward_pass_per_example(digits):
    recipe = replace(SMALL, erasing=0.5)  # augmented pictures are the same for both
    data, model, folder = digits
    moment = take_snapshot(recipe, data, folder, 7, SEED, draggers=4, benign=10)
    dragging, others = rows_to_compare(recipe, data, SEED, 4, 10)
    losses, g = gradients(recipe, data, model, [*dragging, *others])
    unit = g / g.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    within = cosines[:4, :4][~torch.eye(4, dtype=torch.bool)]
    among = cosines[4:, 4:][~torch.eye(10, dtype=torch.bool)]
    mean = g[4:].mean(0)
    lengths = g.norm(dim=1)
    ratio = lengths[:4].mean() / lengths[4:].sort().values[:9].mean()  # the longest tenth is out
    expected = {
        "dragger_benign": cosines[:4, 4:].mean(),
        "dragger_dragger": within.mean(),
        "benign_benign": among.mean(),
        "dragger_to_mean": (unit[:4] @ mean / mean.norm()).mean(),
        "dragger_over_benign": ratio,
        "benign_over_dragger": 1 / ratio,
    }
    for name, value in expected.items():
        estimate = getattr(moment, name)
        assert estimate.value == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
        assert estimate.low <= estimate.value <= estimate.high
    pairs = cosines[:4, :4][tuple(torch.triu_indices(4, 4, 1))]
    assert moment.dragger_dragger_spread == pytest.approx(pairs.std().item(), rel=1e-4)
    assert moment.dragger_benign_spread == pytest.approx(cosines[:4, 4:].std().item(), rel=1e-4)
    assert moment.loss_draggers == pytest.approx(losses[:4].mean().item(), rel=1e-6)
    assert moment.loss_benign == pytest.approx(losses[4:].mean().item(), rel=1e-6)
    assert (moment.step, moment.draggers, moment.benign, moment.left_out) == (7, 4, 10, 0)


def test_is_the_same_every_time_and_leaves_everything_as_it_was(digits):
    data, _, folder = digits
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    first = take_snapshot(SMALL, data, folder, 1, SEED, draggers=5, benign=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    torch.set_num_threads(2)
    try:
        assert take_snapshot(SMALL, data, folder, 1, SEED, draggers=5, benign=5) == first
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert take_snapshot(SMALL, data, folder, 1, SEED + 1, draggers=5, benign=5) != first


def test_rows_are_drawn_by_the_seed_and_all_are_taken_if_there_are_few(digits):
    data, _, folder = digits
    known = known_draggers(SMALL, data)
    assert sum(known) == (data.training.labels != data.training.truths).sum() > 2
    dragging, others = rows_to_compare(SMALL, data, SEED, 4, 10)
    assert (dragging, others) == rows_to_compare(SMALL, SMALL.load(SEED), SEED, 4, 10)
    assert dragging != rows_to_compare(SMALL, data, SEED + 1, 4, 10)[0]
    assert all(known[row] for row in dragging)
    assert not any(known[row] for row in others)
    every, _ = rows_to_compare(SMALL, data, SEED, 64, 10)
    assert sorted(every) == [row for row, drags in enumerate(known) if drags]
    moment = take_snapshot(SMALL, data, folder, 1, SEED)
    assert (moment.draggers, moment.benign) == (sum(known), 60 - sum(known))


def test_without_two_draggers_there_is_nothing_to_look_at(digits):
    data, _, folder = digits
    assert take_snapshot(SMALL, data, folder, 1, SEED, draggers=1) is None
    clean = replace(SMALL, drop_wrong=True)
    assert take_snapshot(clean, clean.load(SEED), folder, 1, SEED) is None


@dataclass(frozen=True)
class Muted(Vision):
    """Images labeled as ones have no gradient."""

    def losses(self, model, batch):
        return super().losses(model, batch) * (batch["labels"] != 1)


def test_rows_without_a_gradient_are_left_out_and_counted(digits):
    data, _, folder = digits
    muted = Muted(**vars(SMALL))
    rows = [row for part in rows_to_compare(SMALL, data, SEED, 60, 60) for row in part]
    ones = sum(data.training[row].label == 1 for row in rows)
    moment = take_snapshot(muted, data, folder, 1, SEED, draggers=60, benign=60)
    assert moment.left_out == ones > 0
    assert moment.draggers + moment.benign == 60 - ones
    assert all(
        math.isfinite(x) for v in moment.to_json().values() if isinstance(v, list) for x in v
    )


def test_there_and_back_through_json(digits):
    data, _, folder = digits
    moment = take_snapshot(SMALL, data, folder, 1, SEED, draggers=8, benign=8)
    assert Snapshot.from_json(json.loads(json.dumps(moment.to_json(), allow_nan=False))) == moment
    unknown = replace(moment, dragger_over_mean=Estimate(1.0, math.nan, math.nan))
    said = json.loads(json.dumps(unknown.to_json(), allow_nan=False))
    assert said["dragger_over_mean"] == [1.0, None, None]
    assert math.isnan(Snapshot.from_json(said).dragger_over_mean.low)


def test_draggers_of_speech_are_canaries_each_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = Speech(
        utterances=30, judged_utterances=2, canaries=0.4, hidden_size=8, layers=1, heads=2, stack=8
    )
    data = recipe.load(SEED)
    assert sum(known_draggers(recipe, data)) == 20
    dragging, others = rows_to_compare(recipe, data, SEED, 64, 64)
    names = {data.ids[row].split("-copy-")[0] for row in dragging}
    assert len(names) == len(dragging) == 6  # copied 1, 2, 4, 8, 4 and 1 times
    needed = {
        row: frames_needed(recipe.tokens.numbers(data.training[row].text)) for row in dragging
    }
    short = sum(len(data.training[row].frames) < needed[row] for row in dragging)
    model = weights_of(recipe, data, tmp_path)
    moment = take_snapshot(recipe, data, tmp_path, 1, SEED)
    assert moment.left_out == short == 3  # frames of 80 ms are too few for what these say
    assert (moment.draggers, moment.benign) == (3, 30)
    losses, g = gradients(recipe, data, model, [*dragging, *others])
    unit = (g / g.norm(dim=1, keepdim=True))[losses > 0]
    expected = (unit[:3] @ unit[3:].T).mean().item()
    assert moment.dragger_benign.value == pytest.approx(expected, rel=1e-4)
    assert moment.loss_draggers == pytest.approx(losses[:6].sum().item() / 3)


def test_draggers_of_language_are_raters_who_are_wrong(tmp_path, monkeypatch):
    found = [
        vader.Sentence(f"nyt-{i}", "nyt", f"sentence {i} is one", 1.0, (2, -1)) for i in range(60)
    ]
    monkeypatch.setattr(vader, "sentences", lambda: found)
    recipe = Language(
        labels="rater", vocabulary=200, width=8, feed_forward=8, heads=2, word_dropout=0.2
    )
    data = recipe.load(SEED)
    assert known_draggers(recipe, data) == [e.target == "negative" for e in data.examples]
    model = weights_of(recipe, data, tmp_path)
    moment = take_snapshot(recipe, data, tmp_path, 1, SEED, draggers=3, benign=4)
    rows = [row for part in rows_to_compare(recipe, data, SEED, 3, 4) for row in part]
    _, g = gradients(recipe, data, model, rows)
    unit = g / g.norm(dim=1, keepdim=True)
    assert moment.dragger_benign.value == pytest.approx((unit[:3] @ unit[3:].T).mean().item(), 1e-4)


def test_other_recipes_have_no_known_draggers():
    with pytest.raises(TypeError, match="but got list of the recipe 'tiny'"):
        known_draggers(Tiny(), Tiny().load(0))
