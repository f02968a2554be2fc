"""The vision recipe: its data, its models, what is measured, and what is refused."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import microclip
from microclip.recipes.draws import Draws
from microclip.recipes.fetch import cache_folder
from microclip.recipes.layout import LayoutError
from microclip.recipes.train import train
from microclip.recipes.vision import cifar, folder, models
from microclip.recipes.vision.models import DropPath
from microclip.recipes.vision.pictures import set_aside
from microclip.recipes.vision.recipe import Vision

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
    with pytest.raises(ValueError, match="nobody says it of my/pictures"):
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


# ---------------------------------------------------------------------------------------- folders


def photograph(size, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image_folder(root: Path, splits=(("train", 10), ("val", 4), ("test", 2)), classes="ab"):
    """Red pictures in a, green ones in b, each a bit different, in ImageFolder layout."""
    for split, count in splits:
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                colour = tuple(200 + 5 * i if channel == label else i for channel in range(3))
                path = root / split / name / f"{i}.{'jpg' if i % 2 else 'JPEG'}"
                Image.new("RGB", (40 + i, 30), colour).save(path)
    return root


def of_folder(root, **options):
    return Vision(data=str(root), image_size=16, patch_size=8, **TINY, **options)


def test_a_folder_is_read(tmp_path):
    recipe = of_folder(image_folder(tmp_path))
    data = recipe.load(seed=0)
    assert [len(part) for part in (data.training, data.validation, data.test)] == [20, 8, 4]
    assert data.training.classes == ("a", "b")
    assert data.ids[:2] == ["train/a/0.JPEG", "train/a/1.jpg"]
    assert data.training[0].pixels.shape == (3, 18, 24)
    batch = recipe.collate([data.training[0], data.training[10]], None)
    red, green = batch["pixel_values"].mean((2, 3)).argmax(1).tolist()
    assert (red, green) == (0, 1)
    assert batch["labels"].tolist() == [0, 1]
    shown = recipe.describe(data, 0)
    assert shown["image"].startswith(b"\xff\xd8\xff")
    assert shown["label"] == "a"
    assert "truth" not in shown
    assert pickle.loads(pickle.dumps(data)).training[3].label == 0  # for processes that load


def test_a_folder_is_learned(tmp_path):
    recipe = of_folder(image_folder(tmp_path), smallest_crop=0.3, flip=True)
    data = recipe.load(seed=0)
    torch.manual_seed(0)
    model = recipe.build(data)
    clipper = microclip.Clipper(model, microbatch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(12):
        optimizer.zero_grad()
        batch = recipe.collate(first(data, 20), Draws(0, step, 20))
        clipper.backward(lambda batch: recipe.losses(model, batch), batch)
        optimizer.step()
    model.eval()
    records = recipe.judge(model, recipe.collate(list(data.test), None))
    assert recipe.summary(records)["accuracy"] == 1


@pytest.mark.parametrize(
    ("splits", "sizes", "said"),
    [
        ([("train", 10), ("val", 4), ("test", 3)], [20, 8, 6], "All three are folders"),
        ([("train", 10), ("val", 4)], [20, 4, 4], "val/ is cut in two halves"),
        ([("train", 10), ("test", 3)], [18, 2, 6], "There is no val/"),
        ([("train", 10)], [16, 2, 2], "neither val/ nor test/"),
    ],
)
def test_splits_that_are_missing_are_made_and_said(tmp_path, splits, sizes, said):
    recipe = of_folder(image_folder(tmp_path, splits))
    data, again = recipe.load(seed=0), recipe.load(seed=1)
    parts = data.training, data.validation, data.test
    assert [len(part) for part in parts] == sizes
    assert said in data.facts["splits"]
    for part, same in zip(parts, (again.training, again.validation, again.test), strict=True):
        assert part.places.tolist() == same.places.tolist()
        assert (part.labels == 0).sum() == (part.labels == 1).sum()
    names = [part.source.names[place] for part in parts for place in part.places]
    assert len(set(names)) == len(names) == sum(2 * count for _, count in splits)


def test_setting_aside_keeps_at_least_one_of_each_class():
    labels = np.array([0] * 20 + [1] * 2 + [2])
    kept, aside = set_aside(labels, 0.1)
    assert sorted([*kept, *aside]) == list(range(23))
    assert np.bincount(labels[aside]).tolist() == [2, 1]
    assert np.bincount(labels[kept]).tolist() == [18, 1, 1]


def turned(path):
    """A picture that is red on the left, saved lying, with EXIF saying so."""
    upright = Image.new("RGB", (40, 40), "blue")
    upright.paste("red", (0, 0, 20, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    upright.rotate(90).save(path, exif=exif, quality=95)


def test_pictures_of_every_kind_become_upright_rgb(tmp_path):
    turned(tmp_path / "turned.jpg")
    Image.new("L", (20, 20), 51).save(tmp_path / "grey.png")
    Image.fromarray(np.full((20, 20), 13107, dtype=np.uint16)).save(tmp_path / "deep.png")
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("CMYK", (20, 20), (0, 255, 255, 0)).save(tmp_path / "ink.jpg")
    palette = Image.new("P", (20, 20), 1)
    palette.putpalette([0, 0, 0, 0, 255, 0])
    palette.save(tmp_path / "palette.gif")
    palette.save(tmp_path / "palette.png", transparency=b"\xff\x00")
    Image.new("1", (20, 20), 1).save(tmp_path / "bit.png")

    def colour(name, at=(5, 5)):
        picture = folder.read(tmp_path / name, 20)
        assert picture.mode == "RGB"
        return [round(value / 51) for value in picture.getpixel(at)]

    assert colour("turned.jpg") == [5, 0, 0]
    assert colour("turned.jpg", (35, 35)) == [0, 0, 5]
    assert colour("grey.png") == colour("deep.png") == [1, 1, 1]
    assert colour("clear.png") == colour("palette.png") == colour("bit.png") == [5, 5, 5]
    assert colour("ink.jpg")[0] > colour("ink.jpg")[1]
    assert colour("palette.gif") == [0, 5, 0]


def test_pictures_of_every_shape_become_squares(tmp_path):
    recipe = of_folder(tmp_path)
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        for i, size in enumerate([(1, 1), (3, 200), (200, 3), (18, 18), (17, 18), (640, 480)]):
            photograph(size).save(tmp_path / "train" / name / f"{i}.jpg")
    data = recipe.load(0)
    for draws in (None, Draws(0, 0, 6)):
        pictures = [data.training.source.pixels(place) for place in range(6)]
        assert all(min(picture.shape[1:]) == 18 for picture in pictures)
        examples = [data.training[0]._replace(pixels=picture) for picture in pictures]
        batch = replace(recipe, smallest_crop=0.1).collate(examples, draws)
        assert batch["pixel_values"].shape == (6, 3, 16, 16)


def rename(source, target):
    def change(root):
        (root / source).rename(root / target)

    return change


def spoil(name, content):
    def change(root):
        (root / name).write_bytes(content)

    return change


def empty(name):
    def change(root):
        for file in (root / name).iterdir():
            file.unlink()
        (root / name / "notes.txt").write_text("none yet")

    return change


def flatten(root):
    for file in sorted((root / "val").rglob("*.*")):
        file.rename(root / "val" / f"{file.parent.name}-{file.name}")
    for name in "ab":
        (root / "val" / name).rmdir()


@pytest.mark.parametrize(
    ("change", "expected", "found"),
    [
        (rename("train", "images"), "to have train/CLASS/*.jpg", "folders images/, test/, val/"),
        (rename("val", "validation"), "val/CLASS/*.jpg", "a folder validation/. Rename it to val/"),
        (rename("val/b", "val/c"), "the classes of", "has no b and also has c"),
        (rename("test/b", "tset"), "two or more classes", "has the folder a/"),
        (empty("train/a"), "to have pictures (.jpg", "has 1 file (notes.txt)"),
        (flatten, "for each of two or more classes", "has 8 files (a-0.JPEG, a-1.jpg, a-2.JPEG"),
    ],
)
def test_wrong_layouts_say_what_was_expected_and_found(tmp_path, change, expected, found):
    change(image_folder(tmp_path))
    with pytest.raises(LayoutError) as error:
        of_folder(tmp_path).load(0)
    assert expected in str(error.value)
    assert found in str(error.value)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(LayoutError, match='must be "digits", "cifar10n" or a folder .* no folder'):
        Vision(data="cifar10").load(0)
    with pytest.raises(LayoutError, match="has nothing in it"):
        of_folder(tmp_path).load(0)


def test_too_few_pictures_to_set_any_aside(tmp_path):
    with pytest.raises(LayoutError, match="train/ was expected .* but has 2 pictures of 2 classes"):
        of_folder(image_folder(tmp_path, [("train", 1)])).load(0)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"<html>404</html>", "none that Pillow knows"),
        (b"", "none that Pillow knows"),
        (b"\xff\xd8\xff", "cannot be read|none that Pillow knows"),
    ],
)
def test_files_that_are_no_pictures(tmp_path, content, found):
    spoil("train/a/0.JPEG", content)(image_folder(tmp_path))
    data = of_folder(tmp_path).load(0)
    with pytest.raises(LayoutError, match=f"0.JPEG was expected to be a picture, .*({found})"):
        data.training[0]


def test_a_picture_that_breaks_off(tmp_path):
    image_folder(tmp_path)
    path = tmp_path / "train" / "a" / "0.JPEG"
    photograph((200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    data = of_folder(tmp_path).load(0)
    with pytest.raises(LayoutError, match="0.JPEG .* cannot be read: .*truncated.* Remove"):
        data.training[0]


def test_hidden_files_are_passed_over_and_folders_in_classes_entered(tmp_path):
    image_folder(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "a" / "._0.jpg").write_bytes(b"what macOS leaves behind")
    for name in (".thumbnails", "more"):
        (tmp_path / "train" / "a" / name).mkdir()
        photograph((9, 9)).save(tmp_path / "train" / "a" / name / "x.png")
    data = of_folder(tmp_path).load(0)
    assert len(data.training) == 21
    assert "train/a/more/x.png" in data.ids


# ----------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("architecture", ["vit", "deit"])
def test_first_gradients_are_of_ordinary_length(architecture):
    """transformers' own first weights of DeiT give gradients ten thousand times as long."""
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


def test_a_checkpoint_for_other_classes_gets_a_new_head(tmp_path):
    recipe = of_folder(image_folder(tmp_path / "data"))
    ten = models.new("deit", classes=10, channels=3, image_size=16, patch_size=8, **TINY)
    ten.save_pretrained(tmp_path / "saved")
    loaded = replace(recipe, checkpoint=str(tmp_path / "saved")).build(recipe.load(0))
    assert loaded.classifier.weight.shape == (2, 16)
    assert torch.equal(loaded.deit.embeddings.cls_token, ten.deit.embeddings.cls_token)
    with pytest.raises(ValueError, match="num_channels = 3, but the pictures have 1. Choose"):
        Vision(checkpoint=str(tmp_path / "saved"), image_size=16).build(Vision().load(0))


# ---------------------------------------------------------------------------- losses and figures


class Says(torch.nn.Module):
    """A model that has its answers."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, pixel_values):
        return self


def test_losses_of_mixed_pictures_are_those_of_soft_targets():
    recipe = Vision(mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    data = recipe.load(0)
    batch = recipe.collate(first(data, 8), Draws(0, 0, 8))
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
        ({"noise": 1.5}, "noise is a share, from 0 to 1, but got 1.5"),
        ({"label_smoothing": -0.1}, "label_smoothing is a share"),
        ({"layers": 0}, "layers must be 1 or more, but got 0"),
        ({"training_pictures": 0}, "training_pictures must be 1 or more"),
        ({"mixup": -1.0}, "mixup must be 0, which turns it off, or more; got -1.0"),
        ({"rand_augment": 11.0}, "rand_augment is a magnitude, from 0 to 10, but got 11"),
        ({"smallest_crop": 0.0}, "smallest_crop is a share of the area"),
        ({"patch_size": 3}, "patch_size must divide the image size 8, but got 3"),
        ({"hidden_size": 30}, "hidden_size must be a multiple of heads, but 30 is none of 4"),
        ({"data": "cifar10n", "noise": 0.1}, "noise is made for digits only"),
        ({"human_labels": "worse_label"}, "human_labels are those of cifar10n"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        Vision(**options)


def test_patches_that_are_too_many(tmp_path):
    recipe = Vision(data=str(image_folder(tmp_path)), patch_size=4)
    with pytest.raises(ValueError, match="makes 3136 tokens .* larger --patch-size"):
        recipe.build(recipe.load(0))


def test_more_pictures_than_there_are():
    with pytest.raises(ValueError, match="at most 1200, as many as digits has .* but got 1201"):
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
