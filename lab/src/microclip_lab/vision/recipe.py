"""The vision recipe: data, model, augmentation and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from microclip_lab.training.batch_rng import BatchRng
from microclip_lab.training.config import Training
from microclip_lab.training.recipe import Data, Recipe
from microclip_lab.vision import augment, cifar, digits, folder, models
from microclip_lab.vision.pictures import Picture, in_pictures, square
from microclip_lab.vision.randaugment import MOST, rand_augmented

DIGITS, CIFAR10N = "digits", "cifar10n"
NOISE = 0.2
HUMAN_LABELS: cifar.HumanLabels = "random_label1"
MOST_TOKENS = 2304  # 768 pixels in patches of 16; attention is quadratic
LAST = 10**9  # the rank of a label when the model has no answer

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Vision(Recipe[Picture, int]):
    """Image classification with a ViT or DeiT."""

    name: ClassVar[str] = "vision"
    headline: ClassVar[str] = "accuracy"

    data: str = DIGITS
    """digits, cifar10n, or a folder with train/CLASS/*.jpg, val/CLASS/*.jpg, optionally test/."""
    noise: float = NOISE
    """Share of the training labels of digits to make wrong."""
    human_labels: cifar.HumanLabels = HUMAN_LABELS
    """Which human labels of cifar10n to train on: 17-18 % of random_label1 to 3 are wrong,
    9 % of aggre_label, 40 % of worse_label."""
    training_pictures: int | None = None
    """Number of training images, drawn with the seed. Default: all."""
    drop_wrong: bool = False
    """Drop images whose label is known to be wrong, as perfect cleaning would. They count towards
    training_pictures, so fewer are left."""
    judged_pictures: int | None = None
    """Maximum number of validation images, and of test images, the same for every seed."""
    image_size: int | None = None
    """Side length in pixels. Default: 8 for digits, 32 for cifar10n, 224 for a folder."""

    architecture: models.Architecture = "vit"
    """Architecture; deit has a second, distillation token, which is not distilled to."""
    checkpoint: str | None = None
    """Pretrained model to start from, a hub name or a folder; replaces architecture and sizes."""
    patch_size: int = 2
    """Side length of a patch in pixels."""
    hidden_size: int = 128
    """Width of the model."""
    layers: int = 2
    """Transformer layers."""
    heads: int = 4
    """Attention heads."""
    dropout: float = 0.0
    """Dropout probability."""
    drop_path: float = 0.0
    """Stochastic depth: how often the last layer is skipped; earlier ones less often."""

    smallest_crop: float = 1.0
    """Train on random crops with at least this share of the area; 1 uses the center."""
    crop_padding: int = 0
    """Shift training images by up to this many pixels."""
    flip: bool = False
    """Flip half of the training images horizontally."""
    rand_augment: float = 0.0
    """Magnitude of RandAugment, up to 10; 0 turns it off."""
    erasing: float = 0.0
    """Share of the training images with a random rectangle replaced by noise."""
    mixup: float = 0.0
    """Mixup: parameter of its beta distribution; 0 turns it off."""
    cutmix: float = 0.0
    """CutMix: parameter of its beta distribution; 0 turns it off."""
    label_smoothing: float = 0.0
    """Label smoothing."""

    def __post_init__(self) -> None:
        for option, share in {
            "noise": self.noise,
            "dropout": self.dropout,
            "drop_path": self.drop_path,
            "erasing": self.erasing,
            "label_smoothing": self.label_smoothing,
        }.items():
            if not 0 <= share <= 1:
                raise ValueError(f"{option} must be a share from 0 to 1, but got {share}.")
        for option, number in {
            "training_pictures": self.training_pictures,
            "judged_pictures": self.judged_pictures,
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "hidden_size": self.hidden_size,
            "layers": self.layers,
            "heads": self.heads,
        }.items():
            if number is not None and number < 1:
                raise ValueError(f"{option} must be 1 or more, but got {number}.")
        for option, value in {
            "crop_padding": self.crop_padding,
            "mixup": self.mixup,
            "cutmix": self.cutmix,
        }.items():
            if value < 0:
                raise ValueError(f"{option} must be 0 (off) or more, but got {value}.")
        if not 0 < self.smallest_crop <= 1:
            raise ValueError(
                "smallest_crop must be a share of the area, above 0 and at most 1 (off), "
                f"but got {self.smallest_crop}."
            )
        if not 0 <= self.rand_augment <= MOST:
            raise ValueError(
                f"rand_augment must be a magnitude from 0 to {MOST:g}, but got {self.rand_augment}."
            )
        if self.noise != NOISE and self.data != DIGITS:
            raise ValueError(
                f"noise works with digits only, but got noise {self.noise} for {self.data}. Leave "
                "it out."
            )
        if self.human_labels != HUMAN_LABELS and self.data != CIFAR10N:
            raise ValueError(
                f"human_labels works with cifar10n only, but got {self.human_labels} for "
                f"{self.data}. Leave it out, or use --data cifar10n."
            )
        if self.drop_wrong and self.data not in (DIGITS, CIFAR10N):
            raise ValueError(
                "drop_wrong works only where the wrong labels are known, with digits and cifar10n, "
                f"but got {self.data}. Leave it out."
            )
        if self.checkpoint is None:
            self._check_sizes()

    def _check_sizes(self) -> None:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size must be a multiple of heads, but {self.hidden_size} is not a "
                f"multiple of {self.heads}."
            )
        if self.size % self.patch_size:
            raise ValueError(
                f"patch_size must divide the image size {self.size}, but got {self.patch_size}. "
                "Change --patch-size or --image-size."
            )

    @property
    def size(self) -> int:
        """Side length of images in pixels."""
        return self.image_size or self._source.SIZE

    @property
    def _source(self) -> Any:
        """The module that loads the data."""
        return {DIGITS: digits, CIFAR10N: cifar}.get(self.data, folder)

    @classmethod
    def presets(cls) -> Mapping[str, tuple[Recipe[Any, Any], Training]]:
        """Return a run of a minute, one on photos, one for a folder, and the paper's."""
        return {
            "default": (
                cls(patch_size=4, dropout=0.2, erasing=0.5),
                Training(
                    microbatch_size=4,
                    batch_size=32,
                    steps=1500,
                    evaluate_every=150,
                    learning_rate=1e-3,
                    weight_decay=0.05,
                    schedule="cosine",
                    warmup=0.1,
                    threads=1,
                ),
            ),
            "cifar10n": (
                cls(
                    data=CIFAR10N,
                    training_pictures=5000,
                    judged_pictures=1000,
                    image_size=16,
                    hidden_size=64,
                    layers=4,
                    crop_padding=2,
                    flip=True,
                ),
                Training(
                    microbatch_size=4,
                    batch_size=32,
                    steps=1500,
                    learning_rate=1e-3,
                    weight_decay=0.05,
                    schedule="cosine",
                    warmup=0.1,
                    threads=1,
                ),
            ),
            "folder": (
                cls(
                    data="pictures",
                    image_size=64,
                    patch_size=8,
                    hidden_size=192,
                    layers=6,
                    drop_path=0.1,
                    smallest_crop=0.35,
                    flip=True,
                ),
                Training(
                    microbatch_size=4,
                    batch_size=64,
                    epochs=30,
                    learning_rate=1e-3,
                    weight_decay=0.05,
                    schedule="cosine",
                    warmup=0.1,
                ),
            ),
            "paper": (
                cls(
                    data="imagenet",
                    image_size=224,
                    architecture="deit",
                    patch_size=16,
                    hidden_size=768,
                    layers=12,
                    heads=12,
                    drop_path=0.1,
                    smallest_crop=0.08,
                    flip=True,
                    rand_augment=9,
                    erasing=0.25,
                    mixup=0.8,
                    cutmix=1.0,
                    label_smoothing=0.1,
                ),
                Training(
                    microbatch_size=32,
                    batch_size=4096,
                    chunk_size=128,
                    epochs=300,
                    learning_rate=5e-4 * 4096 / 512,
                    weight_decay=0.05,
                    warmup=5 / 300,
                    schedule="cosine",
                    precision="bf16",
                    workers=8,
                ),
            ),
        }

    def load(self, seed: int) -> Data[Picture]:
        """Return the images; the seed selects them and decides which labels are wrong."""
        if self.data == DIGITS:
            data = digits.load(seed, self.noise, self.size)
        elif self.data == CIFAR10N:
            data = cifar.load(self.human_labels, self.size)
        else:
            data = folder.load(Path(self.data).expanduser(), self.size)
        pictures = in_pictures(data)
        if self.training_pictures is not None and self.training_pictures > len(pictures):
            raise ValueError(
                f"training_pictures must be at most {len(pictures)}, the number of training images "
                f"of {self.data}, but got {self.training_pictures}."
            )
        rows = pictures.drawn(self.training_pictures, seed)
        drawn = len(rows)
        if self.drop_wrong:
            assert pictures.truths is not None
            rows = rows[(pictures.labels == pictures.truths)[rows]]
        training = pictures.only(rows)
        ids = data.ids
        assert ids is not None
        validation, test = (
            part.only(part.drawn(self.judged_pictures, seed=0))
            for part in (data.validation, data.test)
            if isinstance(part, type(pictures))
        )
        facts = {"classes": len(training.classes), **data.facts}
        if training.wrong is not None:
            facts["wrong training labels"] = round(training.wrong, 4)
        if self.drop_wrong:
            facts["pictures left out for their wrong labels"] = drawn - len(rows)
        return replace(
            data,
            training=training,
            validation=validation,
            test=test,
            ids=[ids[row] for row in rows],
            facts=facts,
        )

    def build(self, data: Data[Picture]) -> nn.Module:
        """Return a model for the classes of the data."""
        pictures = in_pictures(data)
        facts: dict[str, Any] = {
            "classes": len(pictures.classes),
            "channels": len(self._source.MEAN),
            "image_size": self.size,
            "drop_path": self.drop_path,
        }
        if self.checkpoint is not None:
            return models.from_checkpoint(self.checkpoint, **facts)
        self._check_tokens()
        return models.new(
            self.architecture,
            patch_size=self.patch_size,
            hidden_size=self.hidden_size,
            layers=self.layers,
            heads=self.heads,
            dropout=self.dropout,
            **facts,
        )

    def _check_tokens(self) -> None:
        tokens = (self.size // self.patch_size) ** 2
        if tokens > MOST_TOKENS:
            raise ValueError(
                f"patch_size {self.patch_size} turns an image of {self.size} x {self.size} pixels "
                f"into {tokens} tokens, more than {MOST_TOKENS}: a step would take minutes. Choose "
                "a larger --patch-size, such as 16, or a smaller --image-size."
            )

    def collate(self, examples: Sequence[Picture], rng: BatchRng | None) -> Batch:
        """Return normalized images and labels, augmented and perhaps mixed for training."""
        pictures = [picture.pixels for picture in examples]
        labels = torch.tensor([picture.label for picture in examples])
        if rng is None:
            whole = torch.stack([square(picture, self.size) for picture in pictures])
            return {"pixel_values": self._normalised(whole), "labels": labels}
        if self.smallest_crop < 1:
            pictures = augment.resized_crops(pictures, self.size, self.smallest_crop, rng)
        else:
            pictures = [square(picture, self.size) for picture in pictures]
        pixels = torch.stack(pictures)
        if self.crop_padding:
            pixels = augment.shifted(pixels, self.crop_padding, rng)
        if self.flip:
            pixels = augment.flipped(pixels, rng)
        if self.rand_augment:
            fill = torch.tensor(self._source.MEAN)
            pixels = rand_augmented(pixels, self.rand_augment, fill, rng)
        pixels = self._normalised(pixels)
        if self.erasing:
            pixels = augment.erased(pixels, self.erasing, rng)
        if not self.mixup and not self.cutmix:
            return {"pixel_values": pixels, "labels": labels}
        mixed = augment.mixed(pixels, labels, self.mixup, self.cutmix, rng)
        return {
            "pixel_values": mixed.pixels,
            "labels": mixed.labels,
            "partners": mixed.partners,
            "shares": mixed.shares,
        }

    def _normalised(self, pixels: Tensor) -> Tensor:
        mean, deviation = (
            torch.tensor(numbers).view(-1, 1, 1)
            for numbers in (self._source.MEAN, self._source.DEVIATION)
        )
        return (pixels - mean) / deviation

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return cross-entropies; mixed images have two labels, weighted by their shares."""
        logits = model(pixel_values=batch["pixel_values"]).logits.float()

        def losses(labels: Tensor) -> Tensor:
            return F.cross_entropy(
                logits, labels, reduction="none", label_smoothing=self.label_smoothing
            )

        if "partners" not in batch:
            return losses(batch["labels"])
        # equal to one soft target, since cross-entropy is linear in it
        shares = batch["shares"]
        return shares * losses(batch["labels"]) + (1 - shares) * losses(batch["partners"])

    def judge(self, model: nn.Module, batch: Batch) -> Sequence[int]:
        """Return the rank of each right label: 0 if no other class is as likely."""
        logits = model(pixel_values=batch["pixel_values"]).logits.float()
        own = logits.gather(1, batch["labels"][:, None])
        ranks = (logits >= own).sum(1) - 1  # ties count as wrong: a constant output is no answer
        ranks = ranks.masked_fill(logits.isnan().any(1), LAST)
        found: list[int] = ranks.tolist()
        return found

    def summary(self, records: Sequence[int]) -> dict[str, float]:
        """Return top-1 and top-5 accuracy."""
        return {
            "accuracy": sum(rank < 1 for rank in records) / len(records),
            "top5_accuracy": sum(rank < 5 for rank in records) / len(records),
        }

    def describe(self, data: Data[Picture], row: int) -> Mapping[str, Any]:
        """Return the image, its label and, if known, the right one."""
        return in_pictures(data).described(row)
