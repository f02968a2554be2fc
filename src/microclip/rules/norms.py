r"""Rules: from the norms of a mini-batch's micro-batch gradients to the weight each one gets.

Pure functions of a vector that know nothing of models, gradients or domains: a rule sees the norms
of one domain. Engines call rules through `apply`, which hides the norms that do not count, so that
every rule, custom ones included, treats the edge cases the same way.

==================  ==========================================================================
norms               what comes out, for every rule
==================  ==========================================================================
one is zero         weight 0, and not a candidate for the bound; the others are as without it
all are zero        weights 0, bound 0: the gradient is zero, not NaN
one micro-batch     a bound taken from the norms (MinNorm, Median, Mean, Quantile): weight
                    exactly 1, the plain gradient. Unit, Fixed and Automatic have a bound of their
                    own and use it: normalized, globally clipped, damped gradient
tiny (1e-40)        as any other: norms are float64, so neither 1/norm nor its square overflows,
                    and a weight of 1e40 reaches float32 gradients in two factors
NaN or inf          "propagate": all weights and the bound are NaN, so the gradient is NaN;
                    "skip": weight 0, the others are as without it;
                    "raise": an error, and `.grad` is unchanged
huge spread (1e30)  as any other: a weight of 1e-30 is kept, not flushed to zero
weights of a        that are negative, NaN, infinite or not a tensor: an error that names the rule
custom rule         (on an accelerator, where checking would stall it: NaN, also in the gradient)
==================  ==========================================================================

>>> import torch
>>> norms, sizes = torch.tensor([3.0, 4.0, 6.0]), torch.tensor([2.0, 2.0, 2.0])
>>> MinNorm().weights(norms, sizes)
tensor([1.0000, 0.7500, 0.5000])
>>> Median().weights(norms, sizes)
tensor([1.0000, 1.0000, 0.6667])
>>> Median(rescale=True).weights(norms, sizes)
tensor([1.3333, 1.0000, 0.6667])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Nonfinite = Literal["propagate", "skip", "raise"]
NONFINITE: tuple[str, ...] = get_args(Nonfinite)


class Rule:
    """Maps norms to weights. Subclass it and write `weights`; nothing else is required.

    A NaN among `norms` marks a micro-batch that does not count (its gradient is zero, or it was
    skipped): use reductions that ignore NaN, such as `torch.nanmedian` or `minimum` from here.
    What a rule returns for a NaN does not matter. Do not read values on the host (`.item()`,
    `if norm > ...`): on an accelerator that would stall every step.
    """

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return one weight per micro-batch, given all norms and sizes of one domain."""
        raise NotImplementedError(f"{type(self).__name__} must define weights(norms, sizes).")

    def factor(self, norms: Tensor) -> Tensor:
        """Return the part of a weight that depends on its own norm only.

        weights = factor x (one common number). A rule that has a factor *streams*: gradients are
        added up as they come, and the common number, which may depend on all norms, is multiplied
        in at the end. A rule without it needs all norms before it can add the first gradient, that
        is, two passes.
        """
        raise NotImplementedError(f"{type(self).__name__} has no factor: it needs all norms first.")

    @property
    def streams(self) -> bool:
        """Whether gradients can be added up before all norms are known. Engines read this.

        A subclass that overrides only `weights` does not stream: the `factor` it inherits belongs
        to its parent's weights.
        """
        factor = _depth(self, "factor")
        return factor <= _depth(self, "weights") and type(self).__mro__[factor] is not Rule

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the norm that gradients are clipped to; by default the largest after clipping."""
        return maximum(self.weights(norms, sizes) * norms)

    def observe(self, norms: Tensor, sizes: Tensor) -> None:
        """Update the state from a finished step, once per domain; by default does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty by default."""
        return {}

    def fingerprint(self) -> str:
        """Return a short text that differs if the state does, to compare ranks."""
        return repr(self.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(
                f"{type(self).__name__} has no state, but the checkpoint contains {sorted(state)}."
            )


def minimum(norms: Tensor) -> Tensor:
    """Return the smallest norm that counts."""
    return norms.nan_to_num(nan=math.inf).min()


def maximum(norms: Tensor) -> Tensor:
    """Return the largest norm that counts."""
    return norms.nan_to_num(nan=-math.inf).max()


def quantile(norms: Tensor, sizes: Tensor, q: float) -> Tensor:
    """Return the smallest norm with a share q of the sizes at or below it."""
    ordered, order = norms.sort()  # NaN, which does not count, comes last
    reached = (sizes[order] * ~ordered.isnan()).cumsum(0)
    # the slack keeps q * total from missing a whole number by a rounding (0.1 * 30 > 3)
    below = (reached < q * reached[-1:] * (1 - 1e-6)).sum(0, keepdim=True)
    return ordered.gather(0, below).squeeze(0)


class _FromNorms(Rule):
    """The bound is a statistic of the norms: clip to it, or rescale every gradient to it."""

    rescale: bool

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return bound/norm, and at most 1 when clipping."""
        weights = self.bound(norms, sizes) / norms
        return weights if self.rescale else weights.clamp(max=1.0)

    def factor(self, norms: Tensor) -> Tensor:
        """Return 1/norm."""
        return 1 / norms

    @property
    def streams(self) -> bool:
        """Rescaling streams; clipping does not, since it depends on the bound who is clipped."""
        return self.rescale and super().streams


@dataclass(frozen=True)
class MinNorm(_FromNorms):
    """The paper's rule: every gradient is rescaled to the smallest norm among them.

    >>> MinNorm().weights(torch.tensor([5.0, 10.0]), torch.ones(2))
    tensor([1.0000, 0.5000])
    """

    # No norm is below the minimum, so clipping to it and rescaling to it are the same.
    rescale = True

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the smallest norm."""
        return minimum(norms)


@dataclass(frozen=True)
class Mean(_FromNorms):
    """Clip to the mean norm, weighted by size; `rescale` also scales shorter gradients up.

    >>> Mean().weights(torch.tensor([1.0, 3.0]), torch.ones(2))
    tensor([1.0000, 0.6667])
    """

    rescale: bool = False

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the mean norm per example."""
        return (sizes * norms).nansum() / (sizes * ~norms.isnan()).sum()


@dataclass(frozen=True)
class Quantile(_FromNorms):
    """Clip to the q-quantile of the norms, by size; `rescale` also scales shorter ones up.

    The quantile is one of the norms, never a value between two: the smallest norm such that at
    least a share q of the examples sits in micro-batches with norms up to it. q = 0 is `MinNorm`.

    >>> Quantile(0.75).weights(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.ones(4))
    tensor([1.0000, 1.0000, 1.0000, 0.5000])
    """

    q: float
    rescale: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.q) or not 0 <= self.q <= 1:
            raise ValueError(f"Quantile needs a q between 0 and 1, but got {self.q!r}.")

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the smallest norm with a share q of the examples at or below it."""
        return quantile(norms, sizes, self.q)


@dataclass(frozen=True)
class Median(_FromNorms):
    """Clip to the (lower) median norm, by size; `rescale` also scales shorter gradients up.

    >>> Median().weights(torch.tensor([1.0, 2.0, 8.0]), torch.ones(3))
    tensor([1.0000, 1.0000, 0.2500])
    """

    rescale: bool = False

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return the smallest norm with half of the examples at or below it."""
        return quantile(norms, sizes, 0.5)


@dataclass(frozen=True)
class Unit(Rule):
    """The update of the paper's theorem: every gradient is normalized to length 1.

    Steps do not shrink with the gradient, so with SGD the learning rate has to decay.

    >>> Unit().weights(torch.tensor([0.5, 4.0]), torch.ones(2))
    tensor([2.0000, 0.2500])
    """

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return 1/norm."""
        return 1 / norms

    def factor(self, norms: Tensor) -> Tensor:
        """Return the weight itself: it does not depend on the other norms."""
        return 1 / norms


@dataclass(frozen=True)
class Keep(Rule):
    """Every weight is 1: the plain gradient, with the norms of the micro-batches on record.

    >>> Keep().weights(torch.tensor([0.5, 4.0]), torch.ones(2))
    tensor([1., 1.])
    """

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return 1."""
        return torch.ones_like(norms)

    def factor(self, norms: Tensor) -> Tensor:
        """Return the weight itself, or NaN for a norm that does not count."""
        return torch.where(norms.isnan(), norms, 1.0)


@dataclass(frozen=True)
class Fixed(Rule):
    """DP-SGD's micro-batch clipping: a gradient longer than c is scaled to length c.

    >>> Fixed(2.0).weights(torch.tensor([1.0, 4.0]), torch.ones(2))
    tensor([1.0000, 0.5000])
    """

    c: float

    def __post_init__(self) -> None:
        if not is_number(self.c) or not self.c > 0:
            raise ValueError(f"Fixed needs a bound greater than 0, but got {self.c!r}.")

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return min(1, c/norm)."""
        return self.factor(norms)

    def factor(self, norms: Tensor) -> Tensor:
        """Return the weight itself: it does not depend on the other norms."""
        return (self.c / norms).clamp(max=1.0)

    def bound(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return c, even if no gradient is longer."""
        return torch.full_like(norms[0], self.c)


@dataclass(frozen=True)
class Automatic(Rule):
    """Automatic clipping (Bu et al.): every gradient is scaled to length norm/(norm + gamma).

    Normalizes gradients much longer than gamma and lets much shorter ones vanish, so that steps
    still shrink as training converges; `Unit` is gamma = 0.

    >>> Automatic(gamma=1.0).weights(torch.tensor([1.0, 3.0]), torch.ones(2))
    tensor([0.5000, 0.2500])
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        if not is_number(self.gamma) or not 0 <= self.gamma < math.inf:
            raise ValueError(f"Automatic needs a finite gamma >= 0, but got {self.gamma!r}.")

    def weights(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """Return 1/(norm + gamma)."""
        return self.factor(norms)

    def factor(self, norms: Tensor) -> Tensor:
        """Return the weight itself: it does not depend on the other norms."""
        return 1 / (norms + self.gamma)


@dataclass(frozen=True)
class Weighting:
    """What a rule gives to the micro-batches of one domain."""

    weights: Tensor  # one per micro-batch; 0 where it does not count
    bound: Tensor
    skipped: Tensor  # bool: left out, as if it had not been in the batch


def countable(norms: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Return the norms as rules see them: NaN for what is zero or not finite.

    And, given effective sizes, for micro-batches of which all examples are held back.
    """
    counts = (norms > 0) & (norms < math.inf)  # NaN is neither
    return torch.where(counts if sizes is None else counts & (sizes > 0), norms, math.nan)


def apply(rule: Rule, norms: Tensor, sizes: Tensor, nonfinite: Nonfinite) -> Weighting:
    """Apply a rule to one domain's norms, with the edge cases of this module's table."""
    seen = countable(norms, sizes)
    uncounted = seen.isnan()
    weights = _checked(rule, "weights", rule.weights(seen, sizes), seen)
    weights = weights.masked_fill(uncounted, 0.0)
    bound = _as_like(rule, "bound", rule.bound(seen, sizes), seen)
    if bound.numel() != 1:
        raise ValueError(
            f"{rule!r} must return one bound for all norms, but returned a tensor of shape "
            f"{tuple(bound.shape)}."
        )
    bound = bound.reshape(()).masked_fill(uncounted.all(), 0.0)
    if nonfinite == "propagate":
        poison = (norms * 0).sum()  # NaN if any norm is not finite
        return Weighting(weights + poison, bound + poison, torch.zeros_like(uncounted))
    return Weighting(weights, bound, ~norms.isfinite())


def factors(rule: Rule, norms: Tensor) -> Tensor:
    """Return a streaming rule's factors, NaN where a norm does not count; one norm or a row."""
    seen = countable(norms)
    if _is_builtin(rule):
        return rule.factor(seen)
    seen = seen.reshape(-1)
    found = _checked(rule, "factor", rule.factor(seen), seen)
    return torch.where(seen.isnan(), math.nan, found).view_as(norms)


def check_agreement(rule: Rule, norms: Tensor, weights: Tensor) -> None:
    """Refuse a custom rule whose weights are not its factors times one common number.

    The streamed gradient would not match the weights.
    """
    if _is_builtin(rule) or norms.device.type != "cpu":
        return
    found = factors(rule, norms)
    counts = ~found.isnan()
    found, weights = found[counts], weights[counts]
    if not len(found) or not bool(weights.isfinite().all()):
        return
    # weights_i factor_k = weights_k factor_i, with k the largest factor: nothing divides by zero
    largest = found.argmax()
    one, other = weights * found[largest], weights[largest] * found
    same = bool(((one - other).abs() <= 1e-6 * torch.maximum(one, other)).all())
    if same and bool((found[largest] > 0) | (weights == 0).all()):
        return
    raise ValueError(
        f"{rule!r} cannot be streamed: its weights {weights.tolist()[:8]} are not its factors "
        f"{found.tolist()[:8]} times one common number. Fix factor(), or remove it: the rule "
        "then sees all norms before any gradient is weighted."
    )


def _checked(rule: Rule, what: str, found: object, norms: Tensor) -> Tensor:
    """Return one usable number per norm, or raise with what the rule returned instead."""
    numbers = _as_like(rule, what, found, norms)
    if numbers.shape != norms.shape:
        raise ValueError(
            f"{rule!r} must return one number for each of the {norms.numel()} norms from "
            f"{what}(), but returned a tensor of shape {tuple(numbers.shape)}."
        )
    if _is_builtin(rule):
        return numbers
    usable = (numbers >= 0) & numbers.isfinite() | norms.isnan()
    if norms.device.type != "cpu":
        return torch.where(usable, numbers, math.nan)
    if not bool(usable.all()):
        row = int((~usable).nonzero()[0])
        raise ValueError(
            f"{rule!r} returned {numbers[row].item()} from {what}() for the norm "
            f"{norms[row].item():.6g}. It must be finite and at least 0. (A NaN among the norms "
            "marks a micro-batch that does not count: use reductions that ignore NaN, such as "
            "torch.nanmean and microclip.rules.minimum.)"
        )
    return numbers


def _as_like(rule: Rule, what: str, found: object, norms: Tensor) -> Tensor:
    """Return what a rule returned, in the dtype of the norms."""
    if what == "bound" and is_number(found):
        return torch.full_like(norms[:1], float(found))  # type: ignore[arg-type]
    if not isinstance(found, Tensor) or found.is_complex():
        kind = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"{rule!r} must return a tensor of real numbers from {what}(), but returned {kind}. "
            "Compute with the tensor of norms, which has the right dtype and device."
        )
    if found.device != norms.device:
        raise ValueError(
            f"{rule!r} returned a tensor on {found.device} from {what}(), but the norms are on "
            f"{norms.device}."
        )
    return found.detach().to(norms.dtype)


def _is_builtin(rule: Rule) -> bool:
    """Whether a rule is defined in this package, and need not be checked at every step."""
    return type(rule).__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def _depth(rule: Rule, method: str) -> int:
    """Return how far up the MRO a method is defined: 0 is the rule's class, or the object."""
    if method in getattr(rule, "__dict__", ()):
        return 0
    return next(i for i, kind in enumerate(type(rule).__mro__) if method in vars(kind))


def is_number(value: object) -> bool:
    """Whether this is a number other than NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
