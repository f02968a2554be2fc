"""The vision recipe: data, models, metrics and errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.fetch import cache_folder
from microclip_lab.training.train import train
from microclip_lab.vision import cifar, models
from microclip_lab.vision.models import DropPath
from microclip_lab.vision.recipe import Vision

CACHED = all((cache_folder() / p.file).exists() for p in (cifar.PHOTOGRAPHS, cifar.PEOPLE))
TINY = {"hidden_size": 16, "layers": 2, "heads": 2}


def first(data, count):
    return [data.training[row] for row in range(count)]


def gradient_norm(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


# --------------------------------------------------------------------------------------- digits


def test_digits_are_wrong_in_training_only():
    data = Vision().load(seed=3)
    assert [len(part) for part in (data.training, data.validation, data.test)] == [1200, 297, 300]
    assert data.training.wrong == 0.2
    assert data.validation.wrong == data.test.wrong == 0
    assert data.facts["wrong training labels"] == 0.2
    assert len(set(data.ids)) == 1200
    assert Vision(noise=0).load(seed=3).training.wrong == 0


def test_what_is_drawn_depends_on_the_seed_alone():
    one, same, other = (Vision(training_pictures=100).load(seed) for seed in (1, 1, 2))
    assert one.ids == same.ids != other.ids
    assert one.training.labels.tolist() == same.training.labels.tolist()
    assert one.validation.places.tolist() == other.validation.places.tolist()
    assert len(one.training) == len(one.ids) == 100


def test_wrong_labels_are_dropped_from_what_was_drawn():
    whole = Vision(training_pictures=100).load(seed=1)
    clean = Vision(training_pictures=100, drop_wrong=True).load(seed=1)
    wrong = whole.training.labels != whole.training.truths
    assert 0 < wrong.sum() < 100
    assert clean.ids == [id for id, bad in zip(whole.ids, wrong, strict=True) if not bad]
    assert clean.ids == clean.training.places.tolist()
    assert clean.training.labels.tolist() == clean.training.truths.tolist()
    assert clean.facts["wrong training labels"] == 0
    assert clean.facts["pictures left out for their wrong labels"] == wrong.sum()
    assert clean.validation.places.tolist() == whole.validation.places.tolist()
    with pytest.raises(ValueError, match="but got my/pictures"):
        Vision(data="my/pictures", drop_wrong=True)


def test_pictures_are_normalised_and_of_the_size_asked_for():
    recipe = Vision()
    data = recipe.load(0)
    pixels = recipe.collate(first(data, 900), None)["pixel_values"]
    assert pixels.shape == (900, 1, 8, 8)
    assert abs(pixels.mean()) < 0.02
    assert abs(pixels.std() - 1) < 0.02
    larger = Vision(image_size=16, patch_size=4)
    pixels = larger.collate(first(larger.load(0), 4), None)["pixel_values"]
    assert pixels.shape == (4, 1, 16, 16)


def test_the_page_is_shown_the_picture_its_label_and_the_truth():
    recipe = Vision()
    data = recipe.load(0)
    wrong = int(np.flatnonzero(data.training.labels != data.training.truths)[0])
    shown = recipe.describe(data, wrong)
    assert shown["label"] != shown["truth"]
    assert shown["image"].shape == (8, 8, 1)
    assert 0 <= shown["image"].min() < shown["image"].max() <= 1


# -------------------------------------------------------------------------------------- cifar10n


@pytest.mark.skipif(not CACHED, reason="fetches 139 MB; run the preset cifar10n once")
def test_cifar10n_is_labelled_by_people_and_judged_by_the_truth():
    recipe = Vision(data="cifar10n", training_pictures=2000, judged_pictures=300, image_size=16)
    data = recipe.load(seed=0)
    assert [len(part) for part in (data.training, data.validation, data.test)] == [2000, 300, 300]
    assert 0.14 < data.training.wrong < 0.21
    assert data.validation.wrong == data.test.wrong == 0
    assert not {*data.ids} & {*data.validation.places.tolist()}
    worse = replace(recipe, human_labels="worse_label").load(seed=0)
    assert worse.ids == data.ids
    assert 0.36 < worse.training.wrong < 0.44
    assert replace(recipe, human_labels="clean_label").load(seed=0).training.wrong == 0
    batch = recipe.collate(first(data, 200), None)
    assert batch["pixel_values"].shape == (200, 3, 16, 16)
    assert recipe.build(data)(pixel_values=batch["pixel_values"][:2]).logits.shape == (2, 10)
    # the middle four pixels of a photograph, averaged with their neighbours' neighbours
    whole = cifar.cifar10().training[data.ids[0]].mean((0, 1))
    assert np.allclose(recipe.describe(data, 0)["image"].mean((0, 1)), whole, atol=2)


# ----------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("architecture", ["vit", "deit"])
def test_first_gradients_are_of_ordinary_length(architecture):
    """transformers' initial weights of DeiT give gradients ten thousand times as large."""
    torch.manual_seed(0)
    model = models.new(
        architecture,
        **TINY,
        classes=10,
        channels=1,
        image_size=8,
        patch_size=2,
    )
    pixels, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(model(pixel_values=pixels).logits, labels)
    assert gradient_norm(model, loss) < 10
    assert abs(loss.item() - np.log(10)) < 0.5


def test_transformers_still_begins_deit_with_zeros():
    """If this fails, the correction in models.py is no longer needed."""
    from transformers import DeiTConfig, DeiTForImageClassification

    config = DeiTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    model = DeiTForImageClassification(config)
    assert not model.deit.embeddings.cls_token.any()
    assert config.layer_norm_eps < 1e-6


def test_the_same_seed_builds_the_same_model():
    recipe = Vision(architecture="deit", **TINY)
    data = recipe.load(0)
    built = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        built.append(recipe.build(data).state_dict())
    assert all(torch.equal(built[0][name], built[1][name]) for name in built[0])
    assert any(not torch.equal(built[0][name], built[2][name]) for name in built[0])
    assert not any("distillation_classifier" in name for name in built[0])


def test_drop_path_leaves_out_branches_of_whole_examples():
    torch.manual_seed(0)
    drop, branch = DropPath(0.25), torch.ones(4000, 3, 2)
    dropped = drop(branch)
    assert torch.equal(drop.eval()(branch), branch)
    each = dropped.flatten(1)
    assert torch.equal(each.min(1).values, each.max(1).values)
    assert set(each.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((each[:, 0] == 0).float().mean() - 0.25) < 0.03


def test_drop_path_rises_with_depth_and_keeps_dropout():
    model = Vision(layers=3, drop_path=0.2).build(Vision().load(0))
    dropped = [module.probability for module in model.modules() if isinstance(module, DropPath)]
    assert dropped == pytest.approx([0, 0.1, 0.2])
    both = Vision(layers=3, drop_path=0.2, dropout=0.5).build(Vision().load(0))
    assert [type(part) for part in both.vit.layers[1].dropout] == [torch.nn.Dropout, DropPath]


def test_a_checkpoint_is_gone_on_with(tmp_path):
    recipe = Vision(**TINY)
    data = recipe.load(0)
    model = recipe.build(data)
    model.save_pretrained(tmp_path / "saved")
    loaded = Vision(checkpoint=str(tmp_path / "saved")).build(data)
    for name, weights in model.state_dict().items():
        assert torch.equal(weights, loaded.state_dict()[name]), name
    with pytest.raises(ValueError, match="image_size = 8, but the pictures have 16. Say --image-s"):
        Vision(checkpoint=str(tmp_path / "saved"), image_size=16).build(data)


# ---------------------------------------------------------------------------- losses and figures


class Says(torch.nn.Module):
    """A model with fixed outputs."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, pixel_values):
        return self


def test_losses_of_mixed_pictures_are_those_of_soft_targets():
    recipe = Vision(mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    data = recipe.load(0)
    batch = recipe.collate(first(data, 8), BatchRng(0, 0, 8))
    torch.manual_seed(0)
    model = recipe.build(data)
    logits = model(pixel_values=batch["pixel_values"]).logits
    own, other = (F.one_hot(batch[name], 10).float() for name in ("labels", "partners"))
    shares = batch["shares"][:, None]
    targets = 0.9 * (shares * own + (1 - shares) * other) + 0.1 / 10
    expected = F.cross_entropy(logits, targets, reduction="none")
    assert torch.allclose(recipe.losses(model, batch), expected, atol=1e-5)


def test_accuracies_by_hand():
    right, fourth, last = [3.0, 1, 1, 1, 1, 1], [4.0, 9, 9, 9, 3, 2], [0.0, 1, 2, 3, 4, 5]
    draw, broken = [1.0] * 6, [float("nan")] * 6
    model = Says([right, fourth, last, draw, broken])
    batch = {"pixel_values": torch.zeros(5), "labels": torch.zeros(5, dtype=torch.int64)}
    records = Vision().judge(model, batch)
    assert records[:4] == [0, 3, 5, 5]
    assert Vision().summary(records) == {"accuracy": 0.2, "top5_accuracy": 0.4}


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": 1.5}, "noise must be a share from 0 to 1, but got 1.5"),
        ({"label_smoothing": -0.1}, "label_smoothing must be a share"),
        ({"layers": 0}, "layers must be 1 or more, but got 0"),
        ({"training_pictures": 0}, "training_pictures must be 1 or more"),
        ({"mixup": -1.0}, "mixup must be 0 \\(off\\) or more, but got -1.0"),
        ({"rand_augment": 11.0}, "rand_augment must be a magnitude from 0 to 10, but got 11"),
        ({"smallest_crop": 0.0}, "smallest_crop must be a share of the area"),
        ({"patch_size": 3}, "patch_size must divide the image size 8, but got 3"),
        ({"hidden_size": 30}, "but 30 is not a multiple of 4"),
        ({"data": "cifar10n", "noise": 0.1}, "noise works with digits only"),
        ({"human_labels": "worse_label"}, "human_labels works with cifar10n only"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        Vision(**options)


def test_more_pictures_than_there_are():
    with pytest.raises(
        ValueError, match="at most 1200, the number of training images of digits, but got 1201"
    ):
        Vision(training_pictures=1201).load(0)


# ---------------------------------------------------------------------------------------- presets


def test_presets_are_what_they_say():
    presets = Vision.presets()
    assert presets.keys() == {"default", "cifar10n", "folder", "paper"}
    assert all(training.microbatch_size for _, training in presets.values())
    recipe, training = presets["paper"]
    assert (training.batch_size, training.microbatch_size) == (4096, 32)
    assert training.learning_rate == pytest.approx(4e-3)
    assert training.warmup * training.epochs == pytest.approx(5)
    with torch.device("meta"):
        model = models.new(
            recipe.architecture,
            classes=1000,
            channels=3,
            image_size=recipe.size,
            patch_size=recipe.patch_size,
            hidden_size=recipe.hidden_size,
            layers=recipe.layers,
            heads=recipe.heads,
        )
    # DeiT-B has 86,567,656; the second token and its position are 768 each
    assert sum(p.numel() for p in model.parameters()) == 86_567_656 + 2 * 768


def test_a_run_has_its_figures_and_a_page_with_pictures(tmp_path):
    recipe, training = Vision.presets()["default"]
    small = {"training_pictures": 64, "judged_pictures": 50}
    training = replace(training, batch_size=8, steps=8, evaluate_every=4, out=tmp_path / "run")
    finished = train(replace(recipe, **TINY, **small), replace(training, trackers=(), cpu=True))
    names = {"accuracy", "top5_accuracy"}
    expected = {f"{part}_{name}" for part in ("validation", "test", "best_test") for name in names}
    assert finished.metrics.keys() >= expected
    page = (tmp_path / "run" / "report.html").read_text()
    assert "data:image/png" in page
    assert "wrong training labels" in (tmp_path / "run" / "facts.json").read_text()
