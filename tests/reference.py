"""Algorithm 1 as slowly and plainly as possible: the twin that every engine is tested against.

Plain autograd, every micro-batch gradient stored, norms in float64. Rules are written out again
here as formulas on a list of floats, so that an error in `microclip.rules` cannot hide.
"""

import math

import torch


def gradient(loss_fn, parameters, microbatches, weigh, reduction="mean", b=None):
    """Return the clipped gradient of micro-batches [(batch, size, domain), ...], and its weights."""
    stored = []
    for batch, _, _ in microbatches:
        loss = loss_fn(batch).mean()
        stored.append(torch.autograd.grad(loss, parameters, allow_unused=True))
    norms = [math.sqrt(sum((abs(g.to(wide(g))) ** 2).sum().item() for g in gs if g is not None)) for gs in stored]
    sizes = [size for _, size, _ in microbatches]
    weights = [0.0] * len(norms)
    for domain in {domain for _, _, domain in microbatches}:
        rows = [j for j, m in enumerate(microbatches) if m[2] == domain and norms[j] > 0]
        for j, w in zip(rows, weigh([norms[j] for j in rows], [sizes[j] for j in rows]), strict=True):
            weights[j] = w
    divisor = sum(sizes) if reduction == "mean" else min(b, sum(sizes))
    result = []
    for column in zip(*stored, strict=True):
        terms = [w * s / divisor * g.to(wide(g)) for g, w, s in zip(column, weights, sizes, strict=True) if g is not None]
        result.append(sum(terms) if terms else None)
    return result, norms, weights


def wide(tensor):
    return torch.complex128 if tensor.is_complex() else torch.float64


def _quantile(norms, sizes, q):
    pairs, reached = sorted(zip(norms, sizes, strict=True)), 0
    for norm, size in pairs:
        reached += size
        if reached >= q * sum(sizes) - 1e-6:
            return norm
    return pairs[-1][0]


def _clip(bound):
    return lambda n, s: [min(1.0, bound(n, s) / x) for x in n]


def _rescale(bound):
    return lambda n, s: [bound(n, s) / x for x in n]


def _mean(n, s):
    return sum(x * y for x, y in zip(n, s, strict=True)) / sum(s)


WEIGH = {
    "MinNorm()": _rescale(lambda n, s: min(n)),
    "Unit()": _rescale(lambda n, s: 1.0),
    "Fixed(c=0.5)": _clip(lambda n, s: 0.5),
    "Median(rescale=False)": _clip(lambda n, s: _quantile(n, s, 0.5)),
    "Median(rescale=True)": _rescale(lambda n, s: _quantile(n, s, 0.5)),
    "Mean(rescale=False)": _clip(_mean),
    "Mean(rescale=True)": _rescale(_mean),
    "Quantile(q=0.25, rescale=False)": _clip(lambda n, s: _quantile(n, s, 0.25)),
    "Automatic(gamma=0.01)": lambda n, s: [1 / (x + 0.01) for x in n],
}
