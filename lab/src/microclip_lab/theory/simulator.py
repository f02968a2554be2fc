"""Simulated training in a `World` that satisfies the assumptions, compared with the theorems.

Micro-batches are weighted by the very rules that training uses, from `microclip.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from microclip.rules import MinNorm, Rule, Unit, apply
from microclip_lab.theory import corrected, rates
from microclip_lab.theory.symbols import check
from microclip_lab.theory.world import Noise, World

__all__ = ["Check", "Noise", "Report", "World", "efficiency", "simulate"]


@dataclass(frozen=True)
class Check:
    """The bound of a theorem, and the measured value."""

    statement: str
    measured: float
    error: float  # one standard error of the measured value, over the runs
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the bound is not exceeded by more than chance explains (four errors)."""
        return self.measured - 4 * self.error <= self.bound


@dataclass(frozen=True)
class Report:
    """Repeated training runs under the theorems' assumptions."""

    norms: Tensor  # |g_t| of every run before every step: (runs, T)
    checks: tuple[Check, ...]  # one for each theorem that applies

    @property
    def mean_norm(self) -> float:
        """The mean of E|g_t| over the steps, which the clipping theorems bound."""
        return self.norms.mean().item()

    @property
    def least_norm(self) -> float:
        """min_t E|g_t|, which all theorems are stated for."""
        return self.norms.mean(0).min().item()

    @property
    def root_mean_square(self) -> float:
        """The root of the mean of E|g_t|^2, which the SGD theorems bound."""
        return math.sqrt(self.norms.square().mean().item())


def simulate(
    world: World,
    *,
    T: int,
    B: int,
    b: int | None = None,
    rule: Rule | None = None,
    runs: int = 32,
    seed: int = 0,
) -> Report:
    """Train `runs` times for T steps with the theorems' learning rate 1/(L sqrt T).

    Without a rule it is SGD. With `rules.Unit()` it is the update of the paper's theorem, with
    `rules.MinNorm()` that of its Algorithm 1 (as a mean, so that learning rates compare), of
    which no theorem speaks unless b = B, where it is SGD.

    >>> calm = World(epsilon=0.0, c=0.0, C=0.0, sigma=0.0, gap=2.0)  # w shrinks by 1/2 a step
    >>> simulate(calm, T=4, B=1, runs=1).norms
    tensor([[2.0000, 1.0000, 0.5000, 0.2500]], dtype=torch.float64)
    """
    size = _checked_size(T, B, b, rule)
    if runs < 2 and world.sigma + world.epsilon > 0:
        raise ValueError(f"runs must be 2 or more, since an error needs two values; got {runs}.")
    generator = Generator().manual_seed(seed)
    eta = 1 / (world.L * math.sqrt(T))
    w, norms = world.start(runs), []
    for _ in range(T):
        g = world.gradient(w)
        norms.append(g.norm(dim=-1))
        w = w - eta * update(world.sample(g, B, generator), size, rule)
    measured = torch.stack(norms, dim=1)
    return Report(measured, tuple(_checks(world, T, B, size, rule, measured)))


def update(gradients: Tensor, b: int, rule: Rule | None) -> Tensor:
    """Return the mean of the weighted micro-batch gradients, of (runs, B, dimension) gradients.

    >>> pair = torch.tensor([[[3.0, 4.0], [0.0, 10.0]]])
    >>> update(pair, 1, MinNorm())  # 5 is the smaller norm: ((3, 4) + (0, 5)) / 2
    tensor([[1.5000, 4.5000]])
    """
    if rule is None:
        return gradients.mean(1)
    runs, B, dimension = gradients.shape
    micro = gradients.view(runs, B // b, b, dimension).mean(2)
    sizes = torch.full((B // b,), float(b), dtype=gradients.dtype)
    weigh = torch.vmap(lambda norms: apply(rule, norms, sizes, "propagate").weights)
    return (weigh(micro.norm(dim=-1))[..., None] * micro).mean(1)


def efficiency(
    world: World,
    *,
    B: int,
    sizes: Iterable[int],
    rule: Rule | None = None,
    draws: int = 4000,
    seed: int = 0,
) -> dict[int, float]:
    """Return `eff(b) = (g . E U)^2 / (|g|^2 E|U|^2)` for each b, at the start of training.

    The share of the best possible decrease of the loss in one step, `|g|^2/(2L)`, that the update U
    attains when its learning rate is the best for it: 1 for U = g. It compares rules and sizes
    whatever their scale. Without a rule: SGD's, the same for all sizes.

    >>> calm = World(epsilon=0.0, c=0.0, C=0.0, sigma=0.0)
    >>> efficiency(calm, B=4, sizes=[1, 4], rule=MinNorm(), draws=2)
    {1: 1.0, 4: 1.0}
    """
    wanted = {b: _checked_size(1, B, b, rule) for b in sizes}
    generator, done = Generator().manual_seed(seed), 0
    gains: dict[int, list[Tensor]] = {b: [] for b in wanted}
    squares: dict[int, list[Tensor]] = {b: [] for b in wanted}
    while done < draws:
        g = world.gradient(world.start(runs=min(200, draws - done)))
        gradients = world.sample(g, B, generator)
        for b in wanted:
            step = update(gradients, b, rule)
            gains[b].append((g * step).sum(-1) / g.norm(dim=-1))
            squares[b].append(step.square().sum(-1))
        done += g.shape[0]
    found = {}
    for b in wanted:
        gain, square = torch.cat(gains[b]), torch.cat(squares[b])
        # the square of a mean over draws is biased by the variance of the mean
        unbiased = gain.mean().square() - gain.var() / draws
        found[b] = (unbiased / square.mean()).item()
    return found


def _checked_size(T: int, B: int, b: int | None, rule: Rule | None) -> int:
    check(T=T, B=B)
    if b is None:
        if rule is not None:
            raise ValueError(f"{rule!r} needs a micro-batch size: pass b.")
        return B
    check(b=b)
    if B % b:
        raise ValueError(f"b must divide B, but got b = {b} and B = {B}.")
    return b


def _checks(
    world: World, T: int, B: int, b: int, rule: Rule | None, norms: Tensor
) -> Iterable[Check]:
    """Yield what the theorems say, each about the quantity that its proof bounds."""
    constants = {"epsilon": world.epsilon, "sigma": world.sigma, "L": world.L, "gap": world.gap}
    best = norms[:, norms.mean(0).argmin()]
    least = best.mean().item(), _error(best)
    if rule is None or (isinstance(rule, MinNorm) and b == B):
        printed = rates.sgd_with_draggers(T=T, B=B, **constants)
        yield Check("printed: SGD with draggers", *least, printed.total)
        moment = corrected.second_moment(B=B, epsilon=world.epsilon, C=world.C)
        if moment < 2 * (1 - world.epsilon) * math.sqrt(T):
            squares = norms.square().mean(1)
            root = math.sqrt(squares.mean().item())
            error = _error(squares) / (2 * root) if root else 0.0
            bound = corrected.sgd_with_draggers(T=T, B=B, C=world.C, **constants)
            yield Check("corrected: SGD with draggers", root, error, bound.total)
    elif isinstance(rule, Unit):
        constants |= {"c": world.c, "C": world.C}
        each = norms.mean(1)
        mean = each.mean().item(), _error(each)
        if world.epsilon * (b + 1) > 1 + 1e-9:
            printed = rates.micro_batch_clipping(T=T, b=b, **constants)
            yield Check("printed: micro-batch clipping", *least, printed.total)
        bound = corrected.micro_batch_clipping(T=T, b=b, **constants)
        yield Check("corrected: micro-batch clipping", *mean, bound.total)
        if world.symmetric:
            bound = corrected.micro_batch_clipping_symmetric(T=T, b=b, **constants)
            yield Check("corrected: micro-batch clipping, symmetric noise", *mean, bound.total)


def _error(values: Tensor) -> float:
    return (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else 0.0
