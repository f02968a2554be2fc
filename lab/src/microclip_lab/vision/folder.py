"""Any folder in ImageFolder layout: train/CLASS/*.jpg, val/CLASS/*.jpg and, optionally, test/.

Files are listed at once and read on demand. A missing split is cut from another one, which is noted
in the facts; any other surprise is an error that says what was expected and found.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from microclip_lab.training.config import LayoutError
from microclip_lab.training.recipe import Data
from microclip_lab.vision.pictures import Labels, Picture, Pictures, set_aside

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, the usual choice
SHARE = 0.1  # of the training images, for a missing split
MARGIN = 8 / 7  # the shorter side is resized to 256 pixels for 224
SHOWN = 128  # pixels of the longer side on the page

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
LAYOUT = "train/CLASS/*.jpg, val/CLASS/*.jpg and, if there is one, test/CLASS/*.jpg"
OTHER_NAMES = ("validation", "valid", "dev", "eval", "training", "testing")


@dataclass(frozen=True)
class Files:
    """Images that are read on demand."""

    root: Path
    names: Sequence[str]  # relative to root
    shorter: int  # what the shorter side is resized to

    def pixels(self, place: int) -> Tensor:
        """Return an image in RGB, upright, with its aspect ratio."""
        picture = read(self.root / self.names[place], self.shorter)
        factor = self.shorter / min(picture.size)
        width, height = (max(self.shorter, round(side * factor)) for side in picture.size)
        if picture.size != (width, height):
            from PIL.Image import Resampling

            picture = picture.resize((width, height), Resampling.BICUBIC)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    def shown(self, place: int) -> bytes:
        """Return a small JPEG."""
        picture = read(self.root / self.names[place], SHOWN)
        picture.thumbnail((SHOWN, SHOWN))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=85)
        return file.getvalue()


def load(root: Path, size: int = SIZE) -> Data[Picture]:
    """Return the images of a folder."""
    if not root.is_dir():
        raise LayoutError(
            f'data must be "digits", "cifar10n" or a folder with {LAYOUT}, but {root} is not one.'
        )
    for name in OTHER_NAMES:
        if (root / name).is_dir():
            raise LayoutError(
                f"{root} was expected to have {LAYOUT}, but has a folder {name}/. Rename it to "
                f"{'train' if name == 'training' else 'test' if name == 'testing' else 'val'}/, "
                "or move it elsewhere."
            )
    if not (root / "train").is_dir():
        raise LayoutError(f"{root} was expected to have {LAYOUT}, but has {_content(root)}.")
    classes = _classes(root / "train")
    training = _split(root, "train", classes, size)
    validation = _optional(root, "val", classes, size)
    test = _optional(root, "test", classes, size)
    training, validation, test, said = _completed(training, validation, test)
    return Data(
        training,
        validation,
        test,
        ids=[training.source.names[place] for place in training.places],  # type: ignore[attr-defined]
        facts={"splits": said},
    )


def read(path: Path, shorter: int) -> Image:
    """Return an image in RGB, rotated by its EXIF orientation, on white where it is transparent.

    It may be smaller than in the file, since JPEGs are then cheaper to decode, but not so that a
    side falls below `shorter`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            # about malformed EXIF data and large sizes
            warnings.simplefilter("ignore")
            with Image.open(path) as file:
                if file.format == "JPEG":
                    file.draft(None, (2 * shorter, 2 * shorter))
                return _in_rgb(ImageOps.exif_transpose(file))
    except UnidentifiedImageError as error:
        raise LayoutError(
            f"{path} was expected to be an image, but Pillow does not recognize its content. "
            "Remove or replace it."
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise LayoutError(
            f"{path} was expected to be an image, but cannot be read: {error}. "
            "Remove or replace it."
        ) from error


def _in_rgb(picture: Image) -> Image:
    from PIL import Image

    if picture.mode.startswith("I"):  # 16-bit grayscale, which convert() would clip at 255
        grey = np.asarray(picture).astype(np.float64) / 257
        return Image.fromarray(grey.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    whole = picture.convert("RGBA")
    white = Image.new("RGBA", whole.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, whole).convert("RGB")


def _classes(folder: Path) -> list[str]:
    classes = sorted(entry.name for entry in _visible(folder) if entry.is_dir())
    if len(classes) < 2:
        raise LayoutError(
            f"{folder} was expected to have a folder of images for each of two or more classes, "
            f"but has {_content(folder)}."
        )
    return classes


def _split(root: Path, split: str, classes: Sequence[str], size: int) -> Pictures:
    """Find the files of a split."""
    folder = root / split
    found = _classes(folder)
    if found != list(classes):
        missing, more = sorted({*classes} - {*found}), sorted({*found} - {*classes})
        raise LayoutError(
            f"{folder} was expected to have the classes of {root / 'train'}, but "
            + " and ".join(
                part
                for part in (
                    f"has no {_some(missing)}" if missing else "",
                    f"also has {_some(more)}" if more else "",
                )
                if part
            )
            + "."
        )
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = _files(folder / name)
        names += [file.relative_to(root).as_posix() for file in files]
        labels += [label] * len(files)
    source = Files(root, names, shorter=round(size * MARGIN))
    return Pictures(source, np.arange(len(names)), np.array(labels, dtype=np.int64), classes)


def _optional(root: Path, split: str, classes: Sequence[str], size: int) -> Pictures | None:
    return _split(root, split, classes, size) if (root / split).is_dir() else None


def _files(folder: Path) -> list[Path]:
    """Return the images of a class, including those in subfolders."""
    files = sorted(
        Path(place, name)
        for place, folders, names in os.walk(folder, followlinks=True)
        if _enters_visible_only(folders)
        for name in names
        if name.lower().endswith(ENDINGS) and not name.startswith(".")
    )
    if not files:
        raise LayoutError(
            f"{folder} was expected to have images ({', '.join(ENDINGS)}), but has "
            f"{_content(folder)}."
        )
    return files


def _enters_visible_only(folders: list[str]) -> bool:
    """Keep os.walk out of hidden folders, by editing its list in place."""
    folders[:] = [name for name in folders if not name.startswith(".")]
    return True


def _completed(
    training: Pictures, validation: Pictures | None, test: Pictures | None
) -> tuple[Pictures, Pictures, Pictures, str]:
    """Cut missing splits from existing ones, and return a note that says so."""
    if validation is not None and test is not None:
        return training, validation, test, "All three have their own folder."
    if validation is not None:
        chosen, tested = set_aside(validation.labels, 0.5)
        _refuse_empty(tested, validation, "val")
        said = "There is no test/: val/ is cut in two halves, class by class; one is for testing."
        return training, validation.only(chosen), validation.only(tested), said
    kept, chosen = set_aside(training.labels, SHARE)
    _refuse_empty(chosen, training, "train")
    validation, training = training.only(chosen), training.only(kept)
    if test is not None:
        said = "There is no val/: a tenth of train/, class by class, is for validation."
        return training, validation, test, said
    kept, tested = set_aside(training.labels, SHARE / (1 - SHARE))
    _refuse_empty(tested, training, "train")
    said = (
        "There is neither val/ nor test/: a tenth of train/ each, class by class, is for "
        "validation and for testing."
    )
    return training.only(kept), validation, training.only(tested), said


def _refuse_empty(rows: Labels, pictures: Pictures, split: str) -> None:
    if len(rows) == 0:
        raise LayoutError(
            f"{split}/ was expected to have several images per class, so that some can be held "
            f"out, but has {len(pictures)} images of {len(pictures.classes)} classes. "
            f"Add images, or add val/ and test/ folders."
        )


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _content(folder: Path) -> str:
    """Describe the content of a folder."""
    entries = _visible(folder)
    folders = [f"{entry.name}/" for entry in entries if entry.is_dir()]
    files = [entry.name for entry in entries if not entry.is_dir()]
    said = []
    if folders:
        said.append(f"the {'folder' if len(folders) == 1 else 'folders'} {_some(folders)}")
    if files:
        said.append(f"{len(files)} {'file' if len(files) == 1 else 'files'} ({_some(files)})")
    return " and ".join(said) or "nothing in it"


def _some(names: Sequence[str]) -> str:
    """List the first few."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
