"""Where the paper's statements fail: each function builds an instance and returns both sides.

Nothing is simulated here: the numbers are exact, or proven inequalities whose proof stands in the
docstring. `all_claims` has every one with its default values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from microclip_lab.theory import conditions, lemmas, rates
from microclip_lab.theory.binomial import binomial
from microclip_lab.theory.corrected import second_moment
from microclip_lab.theory.symbols import check

__all__ = [
    "Claim",
    "acceleration_with_one_limit",
    "all_claims",
    "clipping_drift",
    "clipping_rate",
    "deviation_is_symmetric",
    "exact_drift",
    "floor_of_star",
    "limit_of_draggers",
    "noise_term",
    "second_moment_of_sgd",
    "sgd_growth",
    "sgd_rate",
    "slow_down_by_draggers",
    "star_with_a_part_along_the_dragger",
    "sweet_spot_from_measured_c",
    "threshold_on_epsilon",
]


@dataclass(frozen=True)
class Claim:
    """Something the paper prints, with the two sides it has in one instance."""

    says: str
    where: str
    left: float
    relation: Literal["<=", "<", "=="]
    right: float

    @property
    def holds(self) -> bool:
        """Whether the two sides are related as claimed."""
        if self.relation == "==":
            return math.isclose(self.left, self.right, rel_tol=1e-9, abs_tol=1e-12)
        return self.left <= self.right if self.relation == "<=" else self.left < self.right


def sgd_growth(*, T: int, B: int, epsilon: float, C: float) -> float:
    """Return `E|g_{t+1}| / |g_t|` of SGD on `|w|^2/2`, with draggers of length `C|g|`, no noise.

    With m draggers among B, which are perpendicular to w = g, and eta = 1/sqrt(T)::

        |w - eta ((1 - m/B) w + (m/B) mu)|  =  |w| sqrt( (1 - eta (1 - m/B))^2 + (eta C m/B)^2 )

    >>> sgd_growth(T=4, B=1, epsilon=0.5, C=2 * math.sqrt(3.0))  # (1/2 + sqrt(1 + 3)) / 2
    1.25
    """
    check(T=T, B=B, epsilon=epsilon, C=C)
    eta = 1 / math.sqrt(T)
    return sum(
        p * math.hypot(1 - eta * (1 - m / B), eta * C * m / B)
        for m, p in enumerate(binomial(B, epsilon))
    )


def sgd_rate(*, T: int = 10_000, B: int = 1, epsilon: float = 0.1) -> Claim:
    """Check the printed rate of SGD with draggers on `|w|^2/2` from 1, with the proof's own C.

    The left side is exact: `E|g_t| = f^t` with f of `sgd_growth`. Where f > 1 the gradient grows
    from the first step on, and the least is the first, 1.

    >>> claim = sgd_rate()
    >>> claim.left, round(claim.right, 3), claim.holds
    (1.0, 0.157, False)
    """
    C = conditions.chosen_dragger_limit(T, epsilon, as_printed=True)
    growth = sgd_growth(T=T, B=B, epsilon=epsilon, C=C)
    return Claim(
        says=f"SGD with draggers converges at the printed rate (B = {B}, epsilon = {epsilon:g})",
        where="theorem on SGD with draggers",
        left=min(1.0, growth ** (T - 1)),
        relation="<=",
        right=rates.sgd_with_draggers(T=T, B=B, epsilon=epsilon, sigma=0, L=1, gap=0.5).total,
    )


def exact_drift(*, b: int, epsilon: float, ratio: float, flip: float) -> float:
    """Return `g/|g| . E[g^/|g^|]` if benign gradients are (1 + flip) g or (1 - flip) g, evenly.

    `ratio` is `|mu|/|g|`. The noise, +-flip g, is symmetric and perpendicular to mu, as assumed.

    >>> exact_drift(b=1, epsilon=0.8, ratio=10.0, flip=1.0001)  # .2 * (1 - 1) / 2
    0.0
    >>> exact_drift(b=1, epsilon=0.75, ratio=10.0, flip=0.5)  # .25 * (1 + 1) / 2
    0.25
    """
    check(b=b, epsilon=epsilon, c=ratio)
    drift = 0.0
    for m, p in enumerate(binomial(b, epsilon)[:b]):
        benign = b - m
        for ups, evenly in enumerate(binomial(benign, 0.5)):
            along = benign + flip * (2 * ups - benign)
            length = math.hypot(along, m * ratio)
            drift += p * evenly * along / length if length else 0.0
    return drift


@dataclass(frozen=True)
class _Instance:
    """One that `exact_drift` can compute: draggers of length c|g| = C|g|, noise +-flip g."""

    b: int
    epsilon: float
    c: float
    flip: float
    T: int


def _hard(b: int) -> _Instance:
    # b = 1: a single benign gradient that flips its sign half of the time carries no direction.
    # b > 1: if nearly all examples are short draggers, most micro-batches with anything to say
    # hold *one* benign example, so its noise is sigma and not sigma/sqrt(b).
    if b == 1:
        return _Instance(b=1, epsilon=0.8, c=10.0, flip=1.0001, T=10**10)
    return _Instance(b=b, epsilon=1 - 1e-3 / b, c=1e-3 / b, flip=1.02, T=10**14)


def clipping_drift(b: int = 1) -> Claim:
    """Check the one-step drift that the proof for micro-batch clipping arrives at, at length 1.

    >>> claim = clipping_drift()
    >>> round(claim.left, 5), claim.right, claim.holds
    (0.00227, 0.0, False)
    """
    at = _hard(b)
    return Claim(
        says=f"a clipped step gains at least this much along g (b = {b})",
        where="proof of the theorem on micro-batch clipping",
        left=lemmas.one_step_drift(g=1, b=b, epsilon=at.epsilon, c=at.c, C=at.c, sigma=at.flip),
        relation="<=",
        right=exact_drift(b=b, epsilon=at.epsilon, ratio=at.c, flip=at.flip),
    )


def clipping_rate(b: int = 1, *, G: float = 50.0) -> Claim:
    """Check the printed rate of micro-batch clipping on a loss whose gradient is at most G.

    The loss is x^2/2 up to `|x| = G` and goes on linearly, in one direction x; draggers move
    another coordinate, on which it does not depend. It is 1-smooth. Benign gradients are
    g +- flip g, so sigma = flip G covers them everywhere. Start at x = G.

    Per step x moves by at most eta = 1/sqrt(T), on average by eta d towards 0 with d of
    `exact_drift`. So x_t >= G - d sqrt(T) + M_t with a martingale M whose variance stays below
    T eta^2 = 1, and `E|g_t| >= G - d sqrt(T) - E|M_t| >= G - d sqrt(T) - 1` for all t <= T: the
    left side, which is below the least of them.

    >>> claim = clipping_rate()
    >>> claim.left, round(claim.right, 1), claim.holds
    (49.0, 15.6, False)
    """
    at = _hard(b)
    drift = exact_drift(b=b, epsilon=at.epsilon, ratio=at.c, flip=at.flip)
    printed = rates.micro_batch_clipping(
        T=at.T, b=b, epsilon=at.epsilon, c=at.c, C=at.c, sigma=at.flip * G, L=1, gap=G**2 / 2
    )
    return Claim(
        says=f"micro-batch clipping converges at the printed rate (b = {b})",
        where="theorem on micro-batch clipping",
        left=G - 1 - drift * math.sqrt(at.T),
        relation="<=",
        right=printed.total,
    )


def second_moment_of_sgd(*, B: int = 1, epsilon: float = 0.1, C: float = 20.0) -> Claim:
    """Check the mean square of a mini-batch gradient at `|g| = 1`, `|mu| = C`, sigma = 0.

    Printed: `(1-epsilon)^2 |g|^2 + epsilon^2 |mu|^2`, as if the number of draggers were not random.

    >>> claim = second_moment_of_sgd()  # .9 + .1 * 400;  .81 + .01 * 400
    >>> round(claim.left, 6), round(claim.right, 6), claim.holds
    (40.9, 4.81, False)
    """
    return Claim(
        says=f"the mean square of SGD's gradient is at most this (B = {B})",
        where="proof of the theorem on SGD with draggers, third line",
        left=second_moment(B=B, epsilon=epsilon, C=C),
        relation="<=",
        right=(1 - epsilon) ** 2 + epsilon**2 * C**2,
    )


def limit_of_draggers(*, T: int = 10_000, epsilon: float = 0.5) -> Claim:
    """Compare the printed limit of C with what the line above it solves to.

    >>> claim = limit_of_draggers(T=100)  # sqrt(9.25 / .25);  sqrt(9.75 / .25)
    >>> round(claim.left, 3), round(claim.right, 3), claim.holds
    (6.083, 6.245, False)
    """
    return Claim(
        says="the coefficient is negative exactly for C below the printed limit",
        where="proof of the theorem on SGD with draggers: (1-epsilon^2) for (1-epsilon)^2",
        left=conditions.dragger_limit(T, epsilon, as_printed=True),
        relation="==",
        right=conditions.dragger_limit(T, epsilon),
    )


def noise_term(*, B: int = 1, epsilon: float = 0.5, sigma: float = 1.0, L: float = 1.0) -> Claim:
    """Compare the printed noise term after eta = 1/(L sqrt T) with the substitution carried out.

    (1-epsilon) L eta^2 sigma^2 T / (2B)  is  (1-epsilon) sigma^2 / (2LB); printed is four times it,
    2 (1-epsilon) sigma^2 / (LB). The theorem itself has the right one.

    >>> claim = noise_term()
    >>> claim.left, claim.right, claim.holds
    (1.0, 0.25, False)
    """
    check(B=B, epsilon=epsilon, sigma=sigma, L=L)
    return Claim(
        says="the noise term after the learning rate is put in",
        where="proof of the theorem on SGD with draggers, after eta",
        left=2 * (1 - epsilon) * sigma**2 / (L * B),
        relation="==",
        right=(1 - epsilon) * sigma**2 / (2 * L * B),
    )


def slow_down_by_draggers(*, T: int = 10_000, B: int = 1, sigma: float = 1.0) -> Claim:
    """Compare the printed rate with draggers, at epsilon = 0, with the rate without any.

    The ratio should be 1 and is sqrt(2): the larger constant stems from choosing C at half of its
    (squared) limit, not from draggers.

    >>> claim = slow_down_by_draggers()
    >>> round(claim.left, 6), claim.right, claim.holds
    (1.414214, 1.0, False)
    """
    with_none = rates.sgd_with_draggers(T=T, B=B, epsilon=0, sigma=sigma, L=1, gap=1)
    without = rates.bu_et_al(T=T, B=B, sigma=sigma, L=1, gap=1)
    return Claim(
        says="without draggers the printed rate is that of plain SGD",
        where="remark after the theorem on SGD with draggers",
        left=with_none.total / without.total,
        relation="==",
        right=1.0,
    )


def deviation_is_symmetric(*, b: int = 4, epsilon: float = 0.2) -> Claim:
    """Compute the skewness of the number of draggers, which makes Delta skewed as well.

    Delta = (m/b - epsilon)(mu - g) + noise with m binomial, whose skewness is
    (1 - 2 epsilon)/sqrt(b epsilon (1-epsilon)).

    >>> claim = deviation_is_symmetric()  # .6 / sqrt(.64)
    >>> round(claim.left, 6), claim.right, claim.holds
    (0.75, 0.0, False)
    """
    check(b=b, epsilon=epsilon)
    variance = b * epsilon * (1 - epsilon)
    third = sum(p * (m - b * epsilon) ** 3 for m, p in enumerate(binomial(b, epsilon)))
    return Claim(
        says="a micro-batch's deviation Delta is symmetric (its skewness is 0)",
        where="proof of the theorem on micro-batch clipping, the split into half-spaces",
        left=third / variance**1.5 if variance else 0.0,
        relation="==",
        right=0.0,
    )


def star_with_a_part_along_the_dragger() -> Claim:
    """Evaluate the starred expression at a Delta with a part along mu, as micro-batches have it.

    g = (1, 0), mu = (0, 1), epsilon = 1/2, Delta = (1, 1/2): the mean plus Delta is (1.5, 1), minus
    Delta (-0.5, 0); so star = 1.5/sqrt(3.25) - 1.

    >>> claim = star_with_a_part_along_the_dragger()
    >>> claim.left, round(claim.right, 3), claim.holds
    (0.0, -0.168, False)
    """
    return Claim(
        says="the starred expression is never negative",
        where="second lemma, where the proof uses it: Delta is not perpendicular to mu",
        left=0.0,
        relation="<=",
        right=lemmas.star(g=[1, 0], mu=[0, 1], delta=[1, 0.5], epsilon=0.5),
    )


def floor_of_star(*, epsilon: float = 0.5, mu: float = 0.5) -> Claim:
    """Evaluate the proof's second inequality at the longest Delta it is for, along g = (1, 0).

    At the default: star = 1.25/sqrt(1.625) - .25/sqrt(.125), its floor .5/(.5 + .25 + .75).

    >>> claim = floor_of_star()
    >>> round(claim.left, 3), round(claim.right, 3), claim.holds
    (0.333, 0.273, False)
    """
    vectors = {"g": [1.0, 0.0], "mu": [0.0, mu], "delta": [epsilon * (1 + mu), 0.0]}
    return Claim(
        says="star >= (1-epsilon)|g|^2/((1-epsilon)|g| + epsilon|mu| + |Delta|)",
        where="proof of the theorem on micro-batch clipping, second inequality",
        left=lemmas.star_floor(**vectors, epsilon=epsilon),
        relation="<=",
        right=lemmas.star(**vectors, epsilon=epsilon),
    )


def threshold_on_epsilon(b: int = 4) -> Claim:
    """Evaluate the printed bias' denominator at epsilon = 1/(b+1), which the theorem allows.

    >>> claim = threshold_on_epsilon(3)  # sqrt(3)/4 - sqrt(3/16)
    >>> claim.left, abs(claim.right) < 1e-15, claim.holds
    (0.0, True, False)
    """
    epsilon = conditions.smallest_epsilon(b)
    margin = math.sqrt(b) * epsilon - math.sqrt(epsilon * (1 - epsilon))
    return Claim(
        says=f"at epsilon = 1/(b+1) the bound's denominator is positive (b = {b})",
        where="theorem on micro-batch clipping: epsilon >= 1/(b+1)",
        left=0.0,
        relation="<",
        right=0.0 if abs(margin) < 1e-12 else margin,
    )


def acceleration_with_one_limit(*, T: int = 10**12, b: int = 4, epsilon: float = 0.5) -> Claim:
    """Compute what 16 times the steps do to the clipping transient, with C as SGD's proof has it.

    A rate of 1/sqrt(T) falls to 1/4. But the chosen C grows like T^(1/4), so it falls to 1/2 only,
    as SGD's rate does.

    >>> claim = acceleration_with_one_limit()
    >>> round(claim.left, 3), claim.right, claim.holds
    (0.5, 0.25, False)
    """

    def transient(steps: int) -> float:
        C = conditions.chosen_dragger_limit(steps, epsilon)
        return rates.micro_batch_clipping(
            T=steps, b=b, epsilon=epsilon, c=0, C=C, sigma=0, L=1, gap=1
        ).transient

    return Claim(
        says="with 16 T steps the transient is a quarter (the rate 1/sqrt(T))",
        where="comparison of the two theorems, with one C for both",
        left=transient(16 * T) / transient(T),
        relation="==",
        right=0.25,
    )


def sweet_spot_from_measured_c(*, epsilon: float = 0.8) -> Claim:
    """Compare the fall of c that a best b of 4 among 4 and 512 needs with the one in Table 3.

    >>> claim = sweet_spot_from_measured_c()  # 17.70/1.2;  6.74/5.42
    >>> round(claim.left, 1), round(claim.right, 2), claim.holds
    (14.8, 1.24, False)
    """
    return Claim(
        says=f"the measured fall of c makes b = 4 better than 512 (epsilon = {epsilon:g})",
        where="conclusion; the remark under Table 3 concedes it",
        left=conditions.needed_fall_of_c(b=4, B=512, epsilon=epsilon),
        relation="<",
        right=(1 + 5.74) / (1 + 4.42),
    )


def all_claims() -> tuple[Claim, ...]:
    """Return every claim of this module at its default values, the two theorems first."""
    return (
        sgd_rate(),
        clipping_rate(),
        clipping_rate(2),
        second_moment_of_sgd(),
        clipping_drift(),
        deviation_is_symmetric(),
        star_with_a_part_along_the_dragger(),
        floor_of_star(),
        threshold_on_epsilon(),
        limit_of_draggers(),
        noise_term(),
        slow_down_by_draggers(),
        acceleration_with_one_limit(),
        sweet_spot_from_measured_c(),
    )
