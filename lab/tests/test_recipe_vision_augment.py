"""Image augmentation: checked by hand, and the same however a mini-batch is cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.nn import functional as F

from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.vision import augment, randaugment
from microclip_lab.vision.pictures import Picture, resized, square
from microclip_lab.vision.recipe import Vision

EVERYTHING = Vision(
    crop_padding=1,
    smallest_crop=0.3,
    flip=True,
    rand_augment=9,
    erasing=0.5,
    mixup=0.8,
    cutmix=1.0,
)


def pictures(count, seed=0, size=(8, 8), channels=1):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(count, channels, *size, generator=generator)
    return [Picture(p, row % 10) for row, p in enumerate(pixels)]


def together(parts):
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


OPTIONS = ["crop_padding", "smallest_crop", "flip", "rand_augment", "erasing", "mixup", "cutmix"]


@pytest.mark.parametrize("option", [*OPTIONS, "everything"])
@pytest.mark.parametrize("cuts", [(16,), (8, 8), (2,) * 8, (4, 10, 2)])
def test_even_parts_of_a_batch_are_changed_as_the_whole_is(option, cuts):
    recipe = EVERYTHING
    if option != "everything":
        recipe = replace(Vision(), **{option: getattr(EVERYTHING, option)})
    examples = pictures(16)
    whole = recipe.collate(examples, BatchRng(5, 3, 16))
    parts, begin = [], 0
    for count in cuts:
        rng = BatchRng(5, 3, 16, begin, count)
        parts.append(recipe.collate(examples[begin : begin + count], rng))
        begin += count
    cut = together(parts)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    plain = recipe.collate(examples, None)
    assert not torch.equal(plain["pixel_values"], whole["pixel_values"])
    other_step = recipe.collate(examples, BatchRng(5, 4, 16))
    assert not torch.equal(other_step["pixel_values"], whole["pixel_values"])


def test_nothing_is_changed_unless_asked_for():
    examples = pictures(6)
    plain, training = (Vision().collate(examples, rng) for rng in (None, BatchRng(0, 0, 6)))
    assert plain.keys() == training.keys() == {"pixel_values", "labels"}
    assert torch.equal(plain["pixel_values"], training["pixel_values"])


def test_judging_is_never_random():
    examples = pictures(6)
    batches = [EVERYTHING.collate(examples, None)["pixel_values"] for _ in range(2)]
    assert torch.equal(*batches)
    assert torch.equal(batches[0], Vision().collate(examples, None)["pixel_values"])


def test_shifts_are_all_that_there_are_and_bring_in_black():
    dots = torch.zeros(600, 1, 5, 5)
    dots[:, :, 2, 2] = 1
    found = {
        tuple(place[2:])
        for place in augment.shifted(dots, 2, BatchRng(0, 0, 600)).nonzero().tolist()
    }
    assert found == {(row, column) for row in range(5) for column in range(5)}
    ones = augment.shifted(torch.ones(50, 3, 4, 4), 1, BatchRng(0, 0, 50))
    assert set(ones.flatten().tolist()) == {0.0, 1.0}
    assert ones.sum((1, 2, 3)).min() == 3 * 9


def test_half_are_mirrored():
    ramp = torch.arange(4.0).expand(1000, 1, 2, 4)
    found = augment.flipped(ramp, BatchRng(0, 0, 1000))
    mirrored = (found[:, 0, 0, 0] == 3).float()
    assert torch.equal(found[:, 0, 0, 0] + found[:, 0, 1, 3], torch.full((1000,), 3.0))
    assert 0.45 < mirrored.mean() < 0.55


def test_erased_rectangles():
    blank = torch.full((500, 3, 20, 20), 7.0)
    found = augment.erased(blank, 0.5, BatchRng(0, 0, 500))
    holes = (found != 7).all(1)
    erased = holes.any((1, 2))
    assert 0.42 < erased.float().mean() < 0.58
    for hole in holes[erased][:50]:
        rows, columns = hole.any(1), hole.any(0)
        assert torch.equal(hole, rows[:, None] & columns)  # one rectangle
    areas = holes[erased].float().mean((1, 2))
    assert areas.min() >= 0.01
    assert areas.max() <= 0.36
    noise = found[holes[:, None].expand_as(found)]
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05
    assert torch.equal(blank, torch.full((500, 3, 20, 20), 7.0))  # what was given stays
    assert torch.equal(augment.erased(blank, 0.0, BatchRng(0, 0, 500)), blank)


def test_random_crops_are_as_large_and_square_as_they_should_be():
    x = torch.arange(60.0).expand(1, 40, 60) / 60
    boxes = [augment._box(x, drawn, 0.2) for drawn in BatchRng(0, 0, 2000).random(augment.TRIES, 4)]
    tops, lefts, heights, widths = (np.array(side) for side in zip(*boxes, strict=True))
    areas, proportions = heights * widths / 2400, widths / heights
    assert 0.18 < areas.min() < 0.25
    assert 0.8 < areas.max() <= 1
    assert proportions.min() > 0.7
    assert proportions.max() < 1.42
    assert (tops.min(), lefts.min()) == (0, 0)
    assert (tops + heights).max() == 40
    assert (lefts + widths).max() == 60


def test_a_picture_that_no_crop_fits_into():
    strip = torch.zeros(3, 4, 400)
    top, left, height, width = augment._box(strip, np.ones((augment.TRIES, 4)), 1.0)
    assert (top, height, width) == (0, 4, 5)
    assert left == (400 - 5) // 2
    crops = augment.resized_crops([strip], 16, 0.5, BatchRng(0, 0, 1))
    assert crops[0].shape == (3, 16, 16)


def test_a_crop_is_the_part_of_the_picture_that_it_says():
    ramp = torch.arange(64.0).expand(1, 64, 64) / 64
    crop = augment.resized_crops([ramp], 32, 0.25, BatchRng(1, 0, 1))[0]
    _, left, _, width = augment._box(ramp, BatchRng(1, 0, 1).random(augment.TRIES, 4)[0], 0.25)
    assert crop[0, :, 16].mean() == pytest.approx((left + width / 2) / 64, abs=0.02)
    assert torch.allclose(crop[0, 0], crop[0, -1], atol=1e-5)


def test_the_middle_of_a_picture():
    picture = torch.arange(24, dtype=torch.uint8).view(1, 4, 6)
    assert (square(picture, 2) * 255).tolist() == [[[8, 9], [14, 15]]]
    assert square(picture, 8).shape == (1, 8, 8)
    assert resized(torch.ones(3, 5, 7), 2, 3).allclose(torch.ones(3, 2, 3))


# ----------------------------------------------------------------------------------------- mixing


def coloured(count):
    """Images filled with their own number."""
    pixels = torch.arange(float(count)).view(-1, 1, 1, 1).expand(-1, 1, 10, 10)
    return pixels, torch.arange(count)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_neighbours_are_mixed_in_the_share_that_is_said(mixup, cutmix):
    pixels, labels = coloured(64)
    found = augment.mixed(pixels, labels, mixup, cutmix, BatchRng(0, 0, 64))
    assert torch.equal(found.labels, labels)
    assert found.partners.tolist() == [row ^ 1 for row in range(64)]
    expected = found.shares * labels + (1 - found.shares) * found.partners
    assert torch.allclose(found.pixels.mean((1, 2, 3)), expected, atol=1e-4)
    assert 0 <= found.shares.min() < 0.3
    assert 0.8 < found.shares.max() <= 1


def test_cutmix_pastes_one_rectangle_and_mixup_blends():
    pixels, labels = coloured(64)
    for alphas, blends in (((0.8, 0.0), 64), ((0.0, 1.0), 0)):
        found = augment.mixed(pixels, labels, *alphas, BatchRng(0, 0, 64)).pixels
        kinds = [len(picture.unique()) for picture in found]
        whole = [(picture == picture.round()).all().item() for picture in found]
        assert sum(kind == 1 and not w for kind, w in zip(kinds, whole, strict=True)) == blends
    for picture, own in zip(found, labels, strict=True):
        pasted = (picture != own)[0]
        assert torch.equal(pasted, pasted.any(1)[:, None] & pasted.any(0))


def test_the_last_of_an_odd_number_is_mixed_with_nobody():
    pixels, labels = coloured(5)
    found = augment.mixed(pixels, labels, 0.8, 1.0, BatchRng(0, 0, 5))
    assert found.partners.tolist() == [1, 0, 3, 2, 4]
    assert torch.allclose(found.pixels[4], pixels[4])


def test_with_both_each_picture_has_an_even_chance():
    pixels, labels = coloured(1000)
    found = augment.mixed(pixels, labels, 0.8, 1.0, BatchRng(0, 0, 1000)).pixels
    blended = sum((picture != picture.round()).any().item() for picture in found)
    assert 420 < blended < 560


def test_smoothed_labels_cost_more():
    recipe = Vision(hidden_size=16, layers=1, heads=2)
    model = recipe.build(recipe.load(0))
    batch = recipe.collate(pictures(4), None)
    logits = model(pixel_values=batch["pixel_values"]).logits
    smooth = replace(recipe, label_smoothing=0.1).losses(model, batch)
    spread = -F.log_softmax(logits, 1).mean(1)
    assert torch.allclose(smooth, 0.9 * recipe.losses(model, batch) + 0.1 * spread, atol=1e-5)


# ------------------------------------------------------------------------------------ RandAugment


def by_pillow(change, pixels):
    picture = Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())
    return torch.from_numpy(np.array(change(picture))).permute(2, 0, 1) / 255


def enhanced(kind, factor):
    return lambda picture: kind(picture).enhance(factor)


def turned(**how):
    size, mode = (16, 16), Image.Transform.AFFINE
    return lambda p: p.transform(size, mode, how["data"], Image.Resampling.BILINEAR)


AGAINST_PILLOW = {
    "auto_contrast": (1, 1, ImageOps.autocontrast, 0.01),
    "equalize": (1, 1, ImageOps.equalize, 0.001),
    "invert": (1, 1, ImageOps.invert, 0.001),
    "posterize": (0.5, 1, lambda picture: ImageOps.posterize(picture, 2), 0.001),
    "solarize": (0.5, 1, lambda picture: ImageOps.solarize(picture, 128), 0.01),
    "colour": (0.5, 1, enhanced(ImageEnhance.Color, 1.45), 0.02),
    "contrast": (0.5, -1, enhanced(ImageEnhance.Contrast, 0.55), 0.02),
    "brightness": (0.5, 1, enhanced(ImageEnhance.Brightness, 1.45), 0.01),
    "sharpness": (0.5, 1, enhanced(ImageEnhance.Sharpness, 1.45), 0.02),
    "translate_x": (1 / 0.45 / 4, 1, turned(data=(1, 0, 4, 0, 1, 0)), 0.01),
    "translate_y": (1 / 0.45 / 4, -1, turned(data=(1, 0, 0, 0, 1, -4)), 0.01),
    "shear_x": (1, 1, turned(data=(1, 0.3, -2.4, 0, 1, 0)), 0.01),
    "shear_y": (1, -1, turned(data=(1, 0, 0, -0.3, 1, 2.4)), 0.01),
    "rotate": (1, -1, lambda picture: picture.rotate(-30, Image.Resampling.BILINEAR), 0.02),
}


@pytest.mark.parametrize("kind", AGAINST_PILLOW)
def test_changes_are_those_of_pillow(kind):
    strength, direction, change, tolerance = AGAINST_PILLOW[kind]
    pixels = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    pixels = (pixels * 200 + 20).round() / 255
    numbers = torch.tensor([strength], dtype=torch.float32), torch.tensor([float(direction)])
    found = randaugment.KINDS[kind](pixels[None], *numbers, torch.zeros(3))[0].clamp(0, 1)
    expected = by_pillow(change, pixels)
    inner = slice(3, -3) if kind in ("rotate", "shear_x", "shear_y") else slice(None)
    # at the rim Pillow is in or out, where a bilinear mean with the colour of the outside is here
    difference = (found - expected)[:, inner, inner].abs()
    assert difference.max() < tolerance or kind == "rotate"
    assert difference.median() < tolerance
    assert not torch.allclose(found, pixels, atol=0.02)


def test_dark_is_made_brighter():
    pixels = torch.tensor([0.1, 0.4, 0.6, 0.9]).view(1, 1, 2, 2)
    found = randaugment.solarize_add(pixels, torch.tensor([0.5]), torch.ones(1), torch.zeros(1))
    more = 55 / 255
    assert found.flatten().tolist() == pytest.approx([0.1 + more, 0.4 + more, 0.6, 0.9])


def test_changes_that_find_nothing_to_change():
    flat = torch.full((1, 3, 4, 4), 0.5)
    for kind in ("auto_contrast", "equalize", "contrast", "sharpness", "colour"):
        numbers = torch.ones(1), torch.ones(1)
        assert torch.allclose(randaugment.KINDS[kind](flat, *numbers, torch.zeros(3)), flat), kind


@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_is_drawn_and_stays_between_0_and_1(channels):
    pixels = torch.rand(400, channels, 9, 7, generator=torch.Generator().manual_seed(1))
    found = randaugment.rand_augmented(pixels, 9, torch.full((channels,), 0.5), BatchRng(0, 0, 400))
    assert found.shape == pixels.shape
    assert found.min() >= 0
    assert found.max() <= 1
    same = (found == pixels).all(3).all(2).all(1).float().mean()
    assert 0.2 < same < 0.4  # a quarter is drawn for no change
