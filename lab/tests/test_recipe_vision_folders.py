"""Image folders: splits, kinds of images, and errors."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import microclip
from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import LayoutError
from microclip_lab.vision import folder, models
from microclip_lab.vision.pictures import set_aside
from microclip_lab.vision.recipe import Vision

TINY = {"hidden_size": 16, "layers": 2, "heads": 2}


def photograph(size, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image_folder(root: Path, splits=(("train", 10), ("val", 4), ("test", 2)), classes="ab"):
    """Red images in a, green ones in b, each slightly different, in ImageFolder layout."""
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
        batch = recipe.collate(list(data.training), BatchRng(0, step, 20))
        clipper.backward(lambda batch: recipe.losses(model, batch), batch)
        optimizer.step()
    model.eval()
    records = recipe.judge(model, recipe.collate(list(data.test), None))
    assert recipe.summary(records)["accuracy"] == 1


@pytest.mark.parametrize(
    ("splits", "sizes", "said"),
    [
        ([("train", 10), ("val", 4), ("test", 3)], [20, 8, 6], "All three have their own folder"),
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
    """An image that is red on the left, saved rotated, with EXIF orientation."""
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
    for rng in (None, BatchRng(0, 0, 6)):
        pictures = [data.training.source.pixels(place) for place in range(6)]
        assert all(min(picture.shape[1:]) == 18 for picture in pictures)
        examples = [data.training[0]._replace(pixels=picture) for picture in pictures]
        batch = replace(recipe, smallest_crop=0.1).collate(examples, rng)
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
        (empty("train/a"), "to have images (.jpg", "has 1 file (notes.txt)"),
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
    with pytest.raises(LayoutError, match='must be "digits", "cifar10n" or a folder .* is not one'):
        Vision(data="cifar10").load(0)
    with pytest.raises(LayoutError, match="has nothing in it"):
        of_folder(tmp_path).load(0)


def test_too_few_pictures_to_set_any_aside(tmp_path):
    with pytest.raises(LayoutError, match="train/ was expected .* but has 2 images of 2 classes"):
        of_folder(image_folder(tmp_path, [("train", 1)])).load(0)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"<html>404</html>", "does not recognize its content"),
        (b"", "does not recognize its content"),
        (b"\xff\xd8\xff", "cannot be read|does not recognize its content"),
    ],
)
def test_files_that_are_no_pictures(tmp_path, content, found):
    spoil("train/a/0.JPEG", content)(image_folder(tmp_path))
    data = of_folder(tmp_path).load(0)
    with pytest.raises(LayoutError, match=f"0.JPEG was expected to be an image, .*({found})"):
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


def test_a_checkpoint_for_other_classes_gets_a_new_head(tmp_path):
    recipe = of_folder(image_folder(tmp_path / "data"))
    ten = models.new("deit", classes=10, channels=3, image_size=16, patch_size=8, **TINY)
    ten.save_pretrained(tmp_path / "saved")
    loaded = replace(recipe, checkpoint=str(tmp_path / "saved")).build(recipe.load(0))
    assert loaded.classifier.weight.shape == (2, 16)
    assert torch.equal(loaded.deit.embeddings.cls_token, ten.deit.embeddings.cls_token)
    with pytest.raises(ValueError, match="num_channels = 3, but the pictures have 1. Choose"):
        Vision(checkpoint=str(tmp_path / "saved"), image_size=16).build(Vision().load(0))


def test_patches_that_are_too_many(tmp_path):
    recipe = Vision(data=str(image_folder(tmp_path)), patch_size=4)
    with pytest.raises(ValueError, match="into 3136 tokens, .* larger --patch-size"):
        recipe.build(recipe.load(0))
