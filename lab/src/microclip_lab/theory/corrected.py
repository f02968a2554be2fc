"""What holds: the rates of SGD and micro-batch clipping with draggers, and their conditions.

All are for the paper's setting and its learning rate 1/(L sqrt T). Derivations: the page on the
theory in the documentation. What the letters mean: `symbols`.

The one idea: condition on m, the number of draggers among the examples. Given m, a micro-batch
gradient is  a g + q mu + noise  with q = m/b, a = 1 - q, and a noise whose mean square is at most
sigma^2 a/b. It is the *random* m that the printed proofs pass over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from microclip_lab.theory.binomial import binomial
from microclip_lab.theory.rates import Bound
from microclip_lab.theory.symbols import check, check_order

__all__ = [
    "averaging",
    "dragger_limit",
    "drift",
    "drift_symmetric",
    "isolation",
    "micro_batch_clipping",
    "micro_batch_clipping_symmetric",
    "second_moment",
    "sgd_with_draggers",
    "sgd_with_draggers_simple",
]


def second_moment(*, B: int, epsilon: float, C: float) -> float:
    """Return K_B: the mean square of a mini-batch gradient is at most `K_B |g|^2` plus noise.

    ::

        K_B  =  (1-epsilon)^2 + epsilon (1-epsilon)/B  +  C^2 (epsilon^2 + epsilon (1-epsilon)/B)

    The terms with 1/B are the variance of the number of draggers; the printed proof lacks them.

    >>> second_moment(B=2, epsilon=0.5, C=2.0)  # .25 + .125 + 4 * (.25 + .125)
    1.875
    """
    check(B=B, epsilon=epsilon, C=C)
    variance = epsilon * (1 - epsilon) / B
    return (1 - epsilon) ** 2 + variance + C**2 * (epsilon**2 + variance)


def dragger_limit(*, T: int, B: int, epsilon: float) -> float:
    """Return the largest C with K_B <= (1-epsilon) sqrt(T), which `sgd_with_draggers_simple` needs.

    >>> round(dragger_limit(T=16, B=2, epsilon=0.5), 6)  # sqrt((2 - .375) / .375)
    2.081666
    """
    check(T=T, B=B, epsilon=epsilon)
    if epsilon == 0:
        return math.inf
    # not negative: at T = 1 it is (1-epsilon) epsilon (1 - 1/B)
    room = max(0.0, (1 - epsilon) * math.sqrt(T) - second_moment(B=B, epsilon=epsilon, C=0.0))
    return math.sqrt(room / (epsilon**2 + epsilon * (1 - epsilon) / B))


def sgd_with_draggers(
    *, T: int, B: int, epsilon: float, C: float, sigma: float, L: float, gap: float
) -> Bound:
    """Return the rate of SGD with draggers, for K_B < 2 (1-epsilon) sqrt(T). No symmetry needed.

    ::

        min_t E|g_t|  <=  sqrt( mean_t E|g_t|^2 )
                      <=  T^(-1/4) sqrt( (L (L_0-L_*) + (1-epsilon) sigma^2/(2B))
                                         / (1 - epsilon - K_B/(2 sqrt T)) )

    >>> bound = sgd_with_draggers(T=16, B=2, epsilon=0.5, C=2.0, sigma=2.0, L=1.0, gap=1.0)
    >>> round(bound.transient, 6)  # sqrt((1 + .5 * 4 / 4) / (.5 - 1.875/8)) / 2
    1.188177
    """
    check(T=T, B=B, epsilon=epsilon, C=C, sigma=sigma, L=L, gap=gap)
    moment = second_moment(B=B, epsilon=epsilon, C=C)
    kept = 1 - epsilon - moment / (2 * math.sqrt(T))
    if kept <= 0:
        raise ValueError(
            f"SGD need not converge here: K_B = {moment:g} must be below 2 (1-epsilon) sqrt(T) = "
            f"{2 * (1 - epsilon) * math.sqrt(T):g}. Take more steps, a larger B, or a smaller C."
        )
    return Bound(0.0, T**-0.25 * math.sqrt((L * gap + (1 - epsilon) * sigma**2 / (2 * B)) / kept))


def sgd_with_draggers_simple(
    *, T: int, B: int, epsilon: float, C: float, sigma: float, L: float, gap: float
) -> Bound:
    """Return the rate in the form of the printed ones, for K_B <= (1-epsilon) sqrt(T).

    ::

        min_t E|g_t|  <=  sqrt( mean_t E|g_t|^2 )
                      <=  T^(-1/4) sqrt( 2 L (L_0 - L_*)/(1-epsilon) + sigma^2/B )

    At epsilon = 0 it is Bu et al.'s rate; it is always below the printed rate with draggers.

    >>> sgd_with_draggers_simple(T=256, B=4, epsilon=0.5, C=2.0, sigma=2.0, L=1.0, gap=3.75).total
    1.0
    """
    check(T=T, B=B, epsilon=epsilon, C=C, sigma=sigma, L=L, gap=gap)
    moment, limit = second_moment(B=B, epsilon=epsilon, C=C), (1 - epsilon) * math.sqrt(T)
    if moment > limit:
        raise ValueError(
            f"This form needs K_B <= (1-epsilon) sqrt(T) = {limit:g}, but K_B = {moment:g}. "
            "Take more steps, a larger B, or a smaller C; or use sgd_with_draggers."
        )
    return Bound(0.0, T**-0.25 * math.sqrt(2 * L * gap / (1 - epsilon) + sigma**2 / B))


def isolation(*, b: int, epsilon: float, C: float) -> float:
    """Return A_b, how much of a normalised step still points along g when there is no noise.

    ::

        A_b  =  E_m[ a / sqrt(a^2 + q^2 C^2) ]

    Small micro-batches isolate draggers: at b = 1 a share 1-epsilon is untouched. Large ones mix a
    few into every micro-batch: A_b tends to (1-epsilon)/sqrt((1-epsilon)^2 + epsilon^2 C^2).

    >>> isolation(b=1, epsilon=0.25, C=20.0)
    0.75
    >>> isolation(b=2, epsilon=0.5, C=0.75)  # .25 * 1 + .5 * 1/1.25 + .25 * 0
    0.65
    """
    check(b=b, epsilon=epsilon, C=C)
    return sum(p * _cosine(a, q, C) for p, a, q in _mixtures(b, epsilon))


def averaging(*, b: int, epsilon: float, c: float) -> float:
    """Return beta_b, how much noise of size sigma can take away from a normalised step.

    ::

        beta_b  =  2 E_m[ sqrt(a/b) / sqrt(a^2 + q^2 c^2) ]

    It falls about like 1/sqrt(b): large micro-batches average the noise out.

    >>> averaging(b=1, epsilon=0.25, c=20.0)
    1.5
    >>> round(averaging(b=2, epsilon=0.5, c=0.75), 6)  # 2 (.25 sqrt(.5) + .5 * sqrt(.25)/.625)
    1.153553
    """
    check(b=b, epsilon=epsilon, c=c)
    return 2 * sum(p * _noise(a, q, b, c) for p, a, q in _mixtures(b, epsilon))


def drift(*, g: float, b: int, epsilon: float, c: float, C: float, sigma: float) -> float:
    """Return what a normalised step gains at least along g, whatever the noise; g is a norm here.

    ::

        g . E[g^/|g^|]  >=  A_b |g| - sigma beta_b

    >>> drift(g=2.0, b=1, epsilon=0.5, c=1.0, C=1.0, sigma=0.5)  # .5 * 2 - .5 * 1
    0.5
    """
    check(sigma=sigma)
    check_order(c, C)
    return isolation(b=b, epsilon=epsilon, C=C) * g - sigma * averaging(b=b, epsilon=epsilon, c=c)


def drift_symmetric(*, g: float, b: int, epsilon: float, c: float, C: float, sigma: float) -> float:
    """Return what a normalised step gains at least along g if noise is symmetric; g is a norm.

    ::

        g . E[g^/|g^|]  >=  sum_m p_m A_m max(0, |g| - sigma r_m)

    with p_m, A_m and r_m of `micro_batch_clipping_symmetric`. It is never negative.

    >>> drift_symmetric(g=2.0, b=1, epsilon=0.5, c=1.0, C=1.0, sigma=0.5)  # .5 * (2 - .5)
    0.75
    """
    check(b=b, epsilon=epsilon, sigma=sigma)
    check_order(c, C)
    return sum(
        p * _cosine(a, q, C) * max(0.0, g - sigma * _noise(a, q, b, c))
        for p, a, q in _mixtures(b, epsilon)
    )


def micro_batch_clipping(
    *, T: int, b: int, epsilon: float, c: float, C: float, sigma: float, L: float, gap: float
) -> Bound:
    """Return the rate of unit-normalised micro-batches, for all b and epsilon, without symmetry.

    ::

        min_t E|g_t|  <=  mean_t E|g_t|
                      <=  sigma beta_b / A_b  +  (L (L_0 - L_*) + 1/2) / (A_b sqrt T)

    with A_b of `isolation` and beta_b of `averaging`. The first pulls towards small b, the second
    towards large b, so at finite T there can be a best b in between.

    >>> micro_batch_clipping(
    ...     T=100, b=1, epsilon=0.5, c=2.0, C=4.0, sigma=1.0, L=1.0, gap=1.0
    ... )
    Bound(bias=2.0, transient=0.3)
    """
    check(T=T, sigma=sigma, L=L, gap=gap)
    check_order(c, C)
    kept = isolation(b=b, epsilon=epsilon, C=C)
    lost = averaging(b=b, epsilon=epsilon, c=c)
    return Bound(sigma * lost / kept, (L * gap + 0.5) / (kept * math.sqrt(T)))


def micro_batch_clipping_symmetric(
    *, T: int, b: int, epsilon: float, c: float, C: float, sigma: float, L: float, gap: float
) -> Bound:
    """Return the rate of unit-normalised micro-batches if benign noise is symmetric, as assumed.

    ::

        min_t E|g_t|  <=  mean_t E|g_t|
                      <=  ( sigma sum_S p_m A_m r_m  +  (L (L_0 - L_*) + 1/2)/sqrt(T) )
                          / sum_S p_m A_m

        A_m = a/sqrt(a^2 + q^2 C^2),   r_m = sqrt(a/b)/sqrt(a^2 + q^2 c^2)

    with p_m the probability of m draggers and S any set of m < b, since a micro-batch never steps
    uphill on average: the best S is taken. At epsilon = 0 the bias is sigma/sqrt(b).
    At b = 1 the bias is sigma, and no smaller one is true (`counterexamples.clipping_rate`).

    >>> micro_batch_clipping_symmetric(
    ...     T=100, b=4, epsilon=0.0, c=2.0, C=4.0, sigma=1.0, L=1.0, gap=0.5
    ... )
    Bound(bias=0.5, transient=0.1)
    """
    check(T=T, b=b, epsilon=epsilon, sigma=sigma, L=L, gap=gap)
    check_order(c, C)
    start = (L * gap + 0.5) / math.sqrt(T)
    # (noise r_m, weight p_m A_m); the best S holds all m whose noise is below some level
    levels = sorted((_noise(a, q, b, c), p * _cosine(a, q, C)) for p, a, q in _mixtures(b, epsilon))
    best = Bound(math.inf, math.inf)
    noise = weight = 0.0
    for r, w in levels:
        noise, weight = noise + w * r, weight + w
        if weight > 0 and (sigma * noise + start) / weight < best.total:
            best = Bound(sigma * noise / weight, start / weight)
    return best


def _mixtures(b: int, epsilon: float) -> Iterator[tuple[float, float, float]]:
    """Yield p_m, a and q for every m < b; draggers alone have nothing along g, nor any noise."""
    for m, p in enumerate(binomial(b, epsilon)[:b]):
        yield p, (b - m) / b, m / b


def _cosine(a: float, q: float, ratio: float) -> float:
    return a / math.hypot(a, q * ratio)


def _noise(a: float, q: float, b: int, ratio: float) -> float:
    return math.sqrt(a / b) / math.hypot(a, q * ratio)
