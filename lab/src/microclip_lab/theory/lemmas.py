"""The paper's two lemmas and the inequalities of its proof, as functions of concrete vectors.

A vector is a sequence of numbers. Write u = (1-epsilon) g + epsilon mu for the mean of a
micro-batch gradient and Delta for what a particular one deviates from it. What the letters mean:
`symbols`. The last lemma is the one our own proof uses instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from microclip_lab.theory.symbols import check, check_order

__all__ = [
    "Vector",
    "expected_deviation",
    "one_step_drift",
    "star",
    "star_floor",
    "star_sides",
    "symmetric_pair",
    "symmetric_pair_floor",
]

Vector = Sequence[float]


def expected_deviation(*, g: float, mu: float, b: int, epsilon: float, sigma: float) -> float:
    """Return the first lemma's bound of `E|Delta|`; g and mu are norms here.

    ::

        E|Delta|  <=  sqrt( (epsilon (1-epsilon) |g|^2 + epsilon (1-epsilon) |mu|^2
                             + (1-epsilon) sigma^2) / b )

    Its square is the variance that the appendix computes; Jensen's inequality gives the rest.

    >>> round(expected_deviation(g=3, mu=5, b=3, epsilon=0.5, sigma=3), 6)  # sqrt((8.5 + 4.5) / 3)
    2.081666
    """
    check(b=b, epsilon=epsilon, sigma=sigma)
    mixed = epsilon * (1 - epsilon) * (g**2 + mu**2)
    return math.sqrt((mixed + (1 - epsilon) * sigma**2) / b)


def star(g: Vector, mu: Vector, delta: Vector, epsilon: float) -> float:
    """Return the starred expression of the proof: a deviation and its mirror image together.

    ::

        star  =  ((1-epsilon)|g|^2 + g.Delta) / |(1-epsilon) g + epsilon mu + Delta|
               + ((1-epsilon)|g|^2 - g.Delta) / |(1-epsilon) g + epsilon mu - Delta|

    The second lemma: it is never negative if mu is perpendicular to both g and Delta. That is
    true. But the proof applies it to a Delta with a part along mu, where it is not:
    `counterexamples.star_with_a_part_along_the_dragger`.

    >>> star(g=[1, 0], mu=[0, 1.5], delta=[0.5, 0], epsilon=0.5)  # 1/sqrt(1 + .5625) + 0
    0.8
    """
    check(epsilon=epsilon)
    benign = (1 - epsilon) * _dot(g, g)
    along = _dot(g, delta)
    mean = [(1 - epsilon) * x + epsilon * y for x, y in zip(g, mu, strict=True)]
    up = math.hypot(*(x + d for x, d in zip(mean, delta, strict=True)))
    down = math.hypot(*(x - d for x, d in zip(mean, delta, strict=True)))
    return _ratio(benign + along, up) + _ratio(benign - along, down)


def star_sides(g: Vector, mu: Vector, delta: Vector, epsilon: float) -> tuple[float, float]:
    """Return both sides of the inequality that the second lemma rests on.

    ::

        (g.Delta)^2  <=  epsilon^2 |g|^2 |mu|^2 + |g|^2 |Delta|^2

    Printed is `|mu|` in place of `|mu|^2`. It is Cauchy and Schwarz's inequality with something
    added on the right, so it always holds, and it is equivalent to the lemma.

    >>> star_sides(g=[2, 0], mu=[0, 3], delta=[4, 1], epsilon=0.5)  # 8^2;  .25*4*9 + 4*17
    (64.0, 77.0)
    """
    check(epsilon=epsilon)
    squared = _dot(g, g)
    right = epsilon**2 * squared * _dot(mu, mu) + squared * _dot(delta, delta)
    return float(_dot(g, delta) ** 2), float(right)


def star_floor(g: Vector, mu: Vector, delta: Vector, epsilon: float) -> float:
    """Return what the proof's next line puts below `star`, where `|Delta| <= epsilon (|mu| + |g|)`.

    ::

        star  >=  (1-epsilon) |g|^2 / ((1-epsilon)|g| + epsilon |mu| + |Delta|)

    It fails for epsilon from about 0.48 on: `counterexamples.floor_of_star`.

    >>> star_floor(g=[1, 0], mu=[0, 1], delta=[0.5, 0], epsilon=0.5)  # 0.5 / (0.5 + 0.5 + 0.5)
    0.3333333333333333
    """
    check(epsilon=epsilon)
    length = (1 - epsilon) * math.hypot(*g) + epsilon * math.hypot(*mu) + math.hypot(*delta)
    return _ratio((1 - epsilon) * _dot(g, g), length)


def one_step_drift(*, g: float, b: int, epsilon: float, c: float, C: float, sigma: float) -> float:
    """Return what the proof says a normalised step gains at least along g; g is a norm here.

    ::

        g . E[g^/|g^|]  >=  (1-epsilon) / (2 (1 + 2 epsilon C))
            * ( (1 - sqrt((1-epsilon)/(b epsilon))) |g|  -  sigma / (sqrt(b) epsilon (1 + c)) )

    >>> one_step_drift(g=1.0, b=4, epsilon=0.5, c=3.0, C=3.0, sigma=1.0)  # .5/8 * (.5 - .25)
    0.015625
    """
    check(b=b, epsilon=epsilon, sigma=sigma)
    check_order(c, C)
    if epsilon == 0:
        raise ValueError("The printed drift divides by epsilon, which must not be 0 here.")
    kept = 1 - math.sqrt((1 - epsilon) / (b * epsilon))
    lost = sigma / (math.sqrt(b) * epsilon * (1 + c))
    return (1 - epsilon) / (2 * (1 + 2 * epsilon * C)) * (kept * g - lost)


def symmetric_pair(g: Vector, u: Vector, n: Vector) -> float:
    """Return what two opposite noises, n and -n, give together along g.

    ::

        g/|g| . ( (u+n)/|u+n| + (u-n)/|u-n| ) / 2

    >>> round(symmetric_pair(g=[1, 0], u=[3, 4], n=[3, 0]), 6)  # (6/sqrt(52) + 0/4) / 2
    0.416025
    """
    length = math.hypot(*g)
    together = 0.0
    for sign in (1, -1):
        v = [x + sign * y for x, y in zip(u, n, strict=True)]
        together += _ratio(_dot(g, v), math.hypot(*v) * length)
    return together / 2


def symmetric_pair_floor(g: Vector, u: Vector, n: Vector) -> float:
    """Return the floor under `symmetric_pair`, for n perpendicular to the part of u beside g.

    ::

        (g.u) / (|g||u|)  *  max(0, 1 - |n|/|u|)

    Noise that is symmetric costs at most its share of the signal's length, and never turns the
    step around. This is the paper's second lemma, sharpened, and used for one micro-batch
    *with a known number of draggers*: there the noise is indeed symmetric and perpendicular to mu.
    Its proof is on the documentation's page on the theory.

    >>> symmetric_pair_floor(g=[1, 0], u=[3, 4], n=[3, 0])  # 3/5 * (1 - 3/5)
    0.24
    """
    length = math.hypot(*u)
    if length == 0:
        return 0.0
    return _dot(g, u) / (math.hypot(*g) * length) * max(0.0, 1 - math.hypot(*n) / length)


def _dot(x: Vector, y: Vector) -> float:
    return sum(p * q for p, q in zip(x, y, strict=True))


def _ratio(part: float, length: float) -> float:
    return part / length if length else 0.0  # as the rules do: what has no length adds nothing
