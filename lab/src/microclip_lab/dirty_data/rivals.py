"""What people use against dirty data today: robust losses, weight averages, two networks, cleaning.

Constants are the papers' own, those for CIFAR-10 where there are several.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from microclip_lab.dirty_data.task import Flags, Labels, Part, Task, outputs_of
from microclip_lab.dirty_data.training import Backward, Batch, Setup, train

Objective = Callable[[Tensor, Tensor], Tensor]  # outputs and targets to one loss per example


def mean_of(objective: Objective, setup: Setup) -> Backward:
    """Train on the mean of some loss: the task's, or another one."""

    def backward(rows: Tensor, batch: Batch) -> None:
        torch.autograd.backward(objective(setup.model(batch[0]), batch[1]).mean())

    return backward


# ---- losses

Q = 0.7


def generalized_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """(1 - p^q) / q with q = 0.7 (Zhang and Sabuncu 2018)."""
    right = F.softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)
    # p^q has an infinite slope at 0
    return (1 - right.clamp_min(1e-7) ** Q) / Q


ALPHA, BETA, LOG_OF_ZERO = 0.1, 1.0, -4.0


def symmetric_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """0.1 CE + reverse CE, with log 0 = -4 (Wang et al. 2019)."""
    right = F.softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)
    reverse = -LOG_OF_ZERO * (1 - right)  # -sum_k p_k log(one-hot_k)
    return ALPHA * F.cross_entropy(outputs, targets, reduction="none") + BETA * reverse


SMOOTHING = 0.1


def smoothed_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with a tenth of the target spread over all classes (Szegedy et al. 2016)."""
    each = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=SMOOTHING)
    return each.flatten(1).mean(1) if each.dim() > 1 else each


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss, quadratic up to one standard deviation of the clean targets."""
    return F.huber_loss(outputs.squeeze(1), targets, reduction="none", delta=1.0)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """L1."""
    return (outputs.squeeze(1) - targets).abs()


# ---- early-learning regularization (Liu et al. 2020)

ELR_WEIGHT, ELR_MEMORY, ELR_FLOOR = 3.0, 0.7, 1e-4


class EarlyLearning:
    """CE + 3 log(1 - <p, t>), with t a running mean of the network's own predictions."""

    def __init__(self, examples: int, classes: int) -> None:
        self.targets = torch.zeros(examples, classes)

    def __call__(self, rows: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per example and move its target toward the current prediction."""
        answers = F.softmax(outputs, 1).clamp(ELR_FLOOR, 1 - ELR_FLOOR)
        now = answers.detach()
        kept = ELR_MEMORY * self.targets[rows]
        self.targets[rows] = kept + (1 - ELR_MEMORY) * now / now.sum(1, keepdim=True)
        agreement = (self.targets[rows] * answers).sum(1)
        return F.cross_entropy(outputs, labels, reduction="none") + ELR_WEIGHT * torch.log(
            1 - agreement
        )


def elr(setup: Setup) -> Backward:
    """Early-learning regularization."""
    with torch.no_grad():
        classes = setup.model(setup.data.training.inputs[:2]).shape[1]
    objective = EarlyLearning(len(setup.data.training), classes)

    def backward(rows: Tensor, batch: Batch) -> None:
        torch.autograd.backward(objective(rows, setup.model(batch[0]), batch[1]).mean())

    return backward


# ---- weight averaging

WINDOW = 0.1  # of all steps


def weight_averaging(setup: Setup) -> Backward:
    """Train plainly, but evaluate an exponential moving average of the weights."""
    average = copy.deepcopy(setup.model)
    setup.evaluated = average
    share = 1 / max(1.0, WINDOW * setup.steps)
    steps = 0

    @torch.no_grad()
    def follow() -> None:
        nonlocal steps
        steps += 1
        # the plain mean of the first steps, so that nothing is left of the initial weights
        torch._foreach_lerp_(
            list(average.parameters()), list(setup.model.parameters()), max(share, 1 / steps)
        )

    setup.after_step.append(follow)
    return mean_of(setup.task.losses, setup)


# ---- co-teaching (Han et al. 2018)

RAMP = 0.25  # of the epochs, over which the forget rate grows


def co_teaching(setup: Setup) -> Backward:
    """Train two networks, each on the examples that have the smallest losses in the other.

    Knows the share of wrong training examples. The first network is evaluated.
    """
    task = setup.task
    other = task.model(setup.seed + 50_000)
    setup.also_trained.append(other)
    ramp = max(1.0, RAMP * task.epochs) * setup.steps_per_epoch
    step = 0

    def backward(rows: Tensor, batch: Batch) -> None:
        nonlocal step
        inputs, targets = batch
        one, two = (task.losses(net(inputs), targets) for net in (setup.model, other))
        forget = task.noise * min(1.0, step / ramp)
        count = max(1, round((1 - forget) * len(rows)))
        of_two = one.detach().argsort()[:count]
        of_one = two.detach().argsort()[:count]
        torch.autograd.backward(one[of_one].mean() + two[of_two].mean())
        step += 1

    return backward


# ---- cleaning first: confident learning (Northcutt et al. 2021)

FOLDS = 4
KEPT_PER_CLASS = 5

Probabilities = npt.NDArray[np.float64]


def label_issues(labels: Labels, probabilities: Probabilities) -> Flags:
    """Return the labels that are probably wrong: cleanlab's default, "prune by noise rate".

    Finds what cleanlab 2.9 finds, apart from how counts are rounded; written out here so that
    results do not depend on what is installed.

    Args:
        labels: The given labels.
        probabilities: Out-of-sample class probabilities, one row per example.
    """
    classes = probabilities.shape[1]
    members = [labels == k for k in range(classes)]
    thresholds = np.array(
        [probabilities[own, k].mean() if own.any() else 1.0 for k, own in enumerate(members)]
    )
    confident = probabilities >= thresholds - 1e-6
    # the most probable of the confident classes counts as the truth
    guess = np.where(confident, probabilities, -1.0).argmax(1)
    joint = np.zeros((classes, classes))  # given label x guessed one
    counted = confident.any(1)
    np.add.at(joint, (labels[counted], guess[counted]), 1)
    np.fill_diagonal(joint, np.maximum(joint.diagonal(), 1))
    sizes = np.array([own.sum() for own in members])
    joint *= (sizes / joint.sum(1))[:, None]
    issues = np.zeros(len(labels), dtype=np.bool_)
    for k, own in enumerate(members):
        if sizes[k] <= KEPT_PER_CLASS:
            continue
        for j in range(classes):
            count = round(joint[k, j])
            if j == k or count == 0:
                continue
            margins = np.where(own, probabilities[:, j] - probabilities[:, k], -np.inf)
            issues |= own & (margins >= np.sort(margins)[-count])
    agreeing: Flags = probabilities.argmax(1) == labels
    return issues & ~agreeing


@functools.lru_cache(maxsize=32)
def found_issues(task: Task, seed: int, rate: float) -> Tensor:
    """Return which training labels cross-validated networks take for wrong."""
    data = task.make_data(seed)
    part = data.training
    folds = torch.from_numpy(np.random.default_rng((seed, 21)).permutation(len(part)) % FOLDS)
    probabilities: Tensor | None = None
    for fold in range(FOLDS):
        kept, held_out = folds != fold, folds == fold
        fewer = Part(part.inputs[kept], part.targets[kept])
        model = task.model(seed)
        setup = Setup(
            task, replace(data, training=fewer, wrong=data.wrong[kept]), model, seed, rate, rate
        )
        train(setup, functools.partial(mean_of, task.losses))
        answers = F.softmax(outputs_of(model, part.inputs[held_out]).double(), 1)
        if probabilities is None:
            probabilities = answers.new_zeros(len(part), answers.shape[1])
        probabilities[held_out] = answers
    assert probabilities is not None
    return torch.tensor(label_issues(part.targets.numpy(), probabilities.numpy()))


def clean_then_train(setup: Setup) -> Backward:
    """Leave out what cross-validated networks take for wrong, then train from scratch."""
    issues = found_issues(setup.task, setup.seed, setup.plain_rate)
    setup.notes["left_out"] = float(issues.float().mean())
    return without(issues, setup)


def without(left_out: Tensor, setup: Setup) -> Backward:
    """Train plainly on the same batches, with some examples left out of the mean."""

    def backward(rows: Tensor, batch: Batch) -> None:
        kept = ~left_out[rows]
        losses = setup.losses(batch)
        torch.autograd.backward((losses * kept).sum() / kept.sum().clamp_min(1))

    return backward
