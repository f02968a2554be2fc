"""One step of training, as the paper's proofs bound it: what the theorems add up over t.

The norms of g and mu are called g and mu here. What the letters mean: `symbols`.
"""

from __future__ import annotations

from microclip_lab.theory.lemmas import expected_deviation, one_step_drift
from microclip_lab.theory.symbols import check, check_order

__all__ = ["clipping_step", "drift_before_simplifying", "sgd_coefficient", "sgd_step"]


def sgd_coefficient(*, eta: float, epsilon: float, C: float, L: float) -> float:
    """Return what the printed proof multiplies `|g|^2` with in a step of SGD.

    ::

        (1-epsilon)^2 L eta^2 / 2  -  (1-epsilon) eta  +  epsilon^2 L eta^2 C^2 / 2

    It is 0 at C = `conditions.dragger_limit`. What is true has `corrected.second_moment` in place
    of (1-epsilon)^2 + epsilon^2 C^2.

    >>> sgd_coefficient(eta=0.5, epsilon=0.5, C=2.0, L=1.0)  # .03125 - .25 + .125
    -0.09375
    """
    check(epsilon=epsilon, C=C, L=L)
    return L * eta**2 / 2 * ((1 - epsilon) ** 2 + (epsilon * C) ** 2) - (1 - epsilon) * eta


def sgd_step(
    *, g: float, eta: float, B: int, epsilon: float, C: float, sigma: float, L: float
) -> float:
    """Return the printed bound of E[L_{t+1} - L_t] for SGD with draggers.

    ::

        sgd_coefficient |g|^2  +  (1-epsilon) L eta^2 sigma^2 / (2B)

    >>> sgd_step(g=2.0, eta=0.5, B=2, epsilon=0.5, C=2.0, sigma=2.0, L=1.0)  # -.375 + .125
    -0.25
    """
    check(B=B, sigma=sigma)
    noise = (1 - epsilon) * L * eta**2 * sigma**2 / (2 * B)
    return sgd_coefficient(eta=eta, epsilon=epsilon, C=C, L=L) * g**2 + noise


def drift_before_simplifying(*, g: float, mu: float, b: int, epsilon: float, sigma: float) -> float:
    """Return the proof's bound of `g . E[g^/|g^|]` while it still knows the norm of mu.

    ::

        1/2  (1-epsilon)|g|^2 / (|g| + 2 epsilon |mu|)
             ( 1 - E|Delta| / (epsilon |mu| + epsilon |g|) )

    with `E|Delta|` from `lemmas.expected_deviation`; the last factor is Markov's inequality.
    `lemmas.one_step_drift` is what remains with c and C in place of mu.

    >>> drift_before_simplifying(g=3, mu=4, b=1, epsilon=0.5, sigma=0)  # 4.5/14 (1 - 2.5/3.5)
    0.09183673469387756
    """
    check(b=b, epsilon=epsilon, sigma=sigma)
    if epsilon == 0:
        raise ValueError("The printed drift divides by epsilon, which must not be 0 here.")
    deviation = expected_deviation(g=g, mu=mu, b=b, epsilon=epsilon, sigma=sigma)
    kept = 1 - deviation / (epsilon * (mu + g))
    return (1 - epsilon) * g**2 / (2 * (g + 2 * epsilon * mu)) * kept


def clipping_step(
    *, g: float, eta: float, b: int, epsilon: float, c: float, C: float, sigma: float, L: float
) -> float:
    """Return the printed bound of E[L_{t+1} - L_t] for unit-normalised micro-batches.

    ::

        -eta one_step_drift  +  L eta^2 / 2

    >>> clipping_step(g=1.0, eta=0.5, b=4, epsilon=0.5, c=3.0, C=3.0, sigma=1.0, L=1.0)
    0.1171875
    """
    check(L=L)
    check_order(c, C)
    drift = one_step_drift(g=g, b=b, epsilon=epsilon, c=c, C=C, sigma=sigma)
    return L * eta**2 / 2 - eta * drift
