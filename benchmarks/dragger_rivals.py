"""Other ways to find wrong labels. Every one gives a score per example; higher is more suspicious.

Mean loss and forgetting events are seen in a plain training run; EL2N and GraNd look at the data
with a network that is not yet done; cleanlab's self-confidence trains five networks, each on four
fifths of the data, and asks each about the fifth that it never saw.
"""

from __future__ import annotations

import numpy as np
import torch
from cleanlab.rank import get_label_quality_scores
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dragger_data import Noisy
from dragger_training import CLASSES, Recipe, logits, train

FOLDS = 5


class Watcher:
    """What a plain run shows on the way: losses, and what was right before and is wrong now."""

    def __init__(self, data: Noisy) -> None:
        self.labels = data.labels
        self.losses, self.seen = torch.zeros(len(data)), torch.zeros(len(data))
        self.right = torch.zeros(len(data), dtype=torch.bool)  # when it was last looked at
        self.ever = torch.zeros(len(data), dtype=torch.bool)
        self.forgotten = torch.zeros(len(data))

    def __call__(self, rows: Tensor, answers: Tensor, losses: Tensor) -> None:
        """Look at a step."""
        right = answers.argmax(1) == self.labels[rows]
        self.losses[rows] += losses
        self.seen[rows] += 1
        self.forgotten[rows] += (self.right[rows] & ~right).float()
        self.right[rows] = right
        self.ever[rows] |= right

    @property
    def mean_loss(self) -> Tensor:
        """The mean over a run."""
        return self.losses / self.seen.clamp(min=1)

    @property
    def forgetting(self) -> Tensor:
        """How often an example was forgotten; what was never learned counts above all else."""
        return torch.where(self.ever, self.forgotten, self.forgotten.max() + 1)


@torch.no_grad()
def el2n(model: nn.Module, data: Noisy) -> Tensor:
    """Return the length of the error, probabilities minus label (Paul et al., 2021)."""
    truth = F.one_hot(data.labels, CLASSES)
    return (logits(model, data.images).softmax(1) - truth).norm(dim=1)


def grand(model: nn.Module, data: Noisy) -> Tensor:
    """Return the norm of the gradient of every example, over all parameters, exactly."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(some: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        answer = functional_call(model, some, (image[None],))
        return F.cross_entropy(answer, label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    norms = []
    with sdpa_kernel(SDPBackend.MATH):  # the kernel that vmap knows how to batch
        for images, labels in zip(data.images.split(64), data.labels.split(64), strict=True):
            gradients = each(parameters, images, labels).values()
            norms.append(sum(g.flatten(1).square().sum(1) for g in gradients).sqrt())
    return torch.cat(norms)


def cleanlab(recipe: Recipe, data: Noisy, seed: int) -> Tensor:
    """Return 1 - cleanlab's label quality, from predictions of networks that did not see it."""
    draw = torch.Generator().manual_seed(seed)
    folds = torch.randperm(len(data), generator=draw).chunk(FOLDS)
    probabilities = torch.zeros(len(data), CLASSES, dtype=torch.float64)
    for number, held_out in enumerate(folds):
        others = torch.cat([fold for fold in folds if fold is not held_out])
        model = train(recipe, data.only(others), seed=1000 * seed + number)
        answers = logits(model, data.images[held_out])
        probabilities[held_out] = answers.double().softmax(1)
    quality = get_label_quality_scores(
        data.labels.numpy(), probabilities.numpy(), method="self_confidence"
    )
    return torch.from_numpy(1 - np.asarray(quality))
