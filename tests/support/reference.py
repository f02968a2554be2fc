"""Algorithm 1 as slowly and plainly as possible: the twin that every engine is tested against.

Plain autograd, every micro-batch gradient stored, sums and norms in float64. The rules stand here
once more, as formulas on lists of floats, so that an error in `microclip.rules` cannot hide.
"""

import math
from itertools import accumulate

import torch


def microbatch_gradients(loss_fn, parameters, batches):
    """Return g_j, the gradient of the mean loss of each micro-batch, as lists of tensors."""
    gradients = []
    for batch in batches:
        for p in parameters:
            p.grad = None
        loss_fn(batch).mean().backward()
        gradients.append([None if p.grad is None else wide(p.grad) for p in parameters])
    for p in parameters:
        p.grad = None
    return gradients


def norm(gradient):
    return math.sqrt(sum((abs(t) ** 2).sum().item() for t in gradient if t is not None))


def clipped_gradient(gradients, sizes, weigh, reduction="mean", b=None, domains=None):
    """Return sum_j (size_j / total size) w_j g_j, with the weights found within each domain."""
    norms, weights = [norm(g) for g in gradients], [0.0] * len(sizes)
    domains = domains or [None] * len(sizes)
    for domain in set(domains):
        rows = [j for j in range(len(sizes)) if domains[j] == domain and norms[j] > 0]
        found = weigh([norms[j] for j in rows], [sizes[j] for j in rows])
        for j, w in zip(rows, found, strict=True):
            weights[j] = w
    divisor = sum(sizes) if reduction == "mean" else min(b, sum(sizes))
    shares = [w * size / divisor for w, size in zip(weights, sizes, strict=True)]
    return weighted_sum(gradients, shares), norms, weights


def weighted_sum(gradients, shares):
    total = []
    for column in zip(*gradients, strict=True):
        terms = [s * t for s, t in zip(shares, column, strict=True) if t is not None]
        total.append(sum(terms) if terms else None)
    return total


def wide(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def quantile(norms, sizes, q):
    pairs = sorted(zip(norms, sizes, strict=True))
    reached = accumulate(size for _, size in pairs)
    return next(n for (n, _), r in zip(pairs, reached, strict=True) if r >= q * sum(sizes) - 1e-6)


def mean(norms, sizes):
    return sum(n * size for n, size in zip(norms, sizes, strict=True)) / sum(sizes)


def clip(bound):
    return lambda norms, sizes: [min(1.0, bound(norms, sizes) / n) for n in norms]


def rescale(bound):
    return lambda norms, sizes: [bound(norms, sizes) / n for n in norms]


WEIGH = {
    "MinNorm()": rescale(lambda norms, sizes: min(norms)),
    "Unit()": rescale(lambda norms, sizes: 1.0),
    "Fixed(c=0.5)": clip(lambda norms, sizes: 0.5),
    "Median(rescale=False)": clip(lambda norms, sizes: quantile(norms, sizes, 0.5)),
    "Median(rescale=True)": rescale(lambda norms, sizes: quantile(norms, sizes, 0.5)),
    "Mean(rescale=False)": clip(mean),
    "Mean(rescale=True)": rescale(mean),
    "Quantile(q=0.25, rescale=False)": clip(lambda norms, sizes: quantile(norms, sizes, 0.25)),
    "Automatic(gamma=0.01)": lambda norms, sizes: [1 / (n + 0.01) for n in norms],
}
