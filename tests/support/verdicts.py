"""The verdict on an engine and a model: exact, refused, wrong, or a crash.

Every parameter's gradient is compared with the reference, which differentiates each micro-batch
separately. Errors are relative to the norm of the parameter, even if it is small.
"""

import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from microclip import Clipper
from microclip.microbatches import cut

import reference

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a parameter's norm,
FLOOR = {torch.float64: 1e-9, torch.float32: 1e-6}  # which is taken as at least this, of the whole
# units in the last place of the whole: sums that ought to be 0 seldom are
ROUNDING = {torch.float64: 128, torch.float32: 16}

KINDS = ("exact (fused)", "exact (stream)", "exact (two_pass)", "refused", "WRONG", "CRASH")


@dataclass(frozen=True)
class Error:
    """How far one parameter's gradient is off."""

    name: str
    relative: float
    is_too_large: bool


def verdict(model, loss_fn, batches, engine, b, dtype=torch.float64, before=None):
    """Put batch after batch through one Clipper and say what came of it.

    `b`: None for the whole batch. `before(step)` is called before each batch, and may change the
    model as a step of training would.
    """
    clipper = Clipper(model, microbatch_size=b, engine=engine)
    refusal, engines = None, set()
    for step, batch in enumerate(batches):
        if before is not None:
            before(step)
        expected = wanted(model, loss_fn, batch, b)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engines.add(clipper.backward(loss_fn, batch).engine)
        except Exception as error:
            may_refuse = engine in ("fused", "two_pass")
            if not may_refuse or not isinstance(error, NotImplementedError):
                return f"CRASH in batch {step}: {type(error).__name__}: {_line(error)}"
            if any(p.grad is not None for p in model.parameters()):
                return f"WRONG in batch {step}: .grad was touched before the refusal: {error}"
            refusal = refusal or f"refused in batch {step}: {_line(error)}"
            continue
        worst = compare(model, expected, dtype)
        if worst.is_too_large:
            return f"WRONG in batch {step}: {worst.name} is off by {worst.relative:.0e}"
    model.zero_grad(set_to_none=True)
    return refusal or f"exact ({engines.pop() if len(engines) == 1 else 'stream'})"


def wanted(model, loss_fn, batch, b):
    """Return the clipped gradient by plain autograd, one tensor or None for each parameter."""
    pieces = cut(batch, b)
    parameters = list(model.parameters())
    found = reference.microbatch_gradients(loss_fn, parameters, [piece.batch for piece in pieces])
    sizes = [piece.size for piece in pieces]
    expected, norms, _ = reference.clipped_gradient(found, sizes, reference.WEIGH["MinNorm()"])
    if not 0 < max(norms) < float("inf"):
        raise ValueError(f"A case that shows nothing: its gradients have the norms {norms}.")
    return expected


def compare(model, expected, dtype):
    """Return the parameter that is furthest off."""
    whole = reference.norm(expected)
    rounding = ROUNDING[dtype] * torch.finfo(dtype).eps * whole
    worst = Error("nothing", 0.0, False)
    for (name, p), want in zip(model.named_parameters(), expected, strict=True):
        got = None if p.grad is None else reference.wide(p.grad.to_dense())
        if got is None and want is None:
            continue
        norm = 0.0 if want is None else reference.norm([want])
        off = reference.norm([_difference(got, want)])
        relative = off / max(norm, FLOOR[dtype] * whole)
        too_large = not off <= TOLERANCE[dtype] * max(norm, FLOOR[dtype] * whole) + rounding
        if (too_large, relative) > (worst.is_too_large, worst.relative):
            worst = Error(name, relative, too_large)
    return worst


def _difference(got, want):
    if got is None or want is None:
        return want if got is None else got
    return got - want


def _line(error):
    return " ".join(str(error).split())


def kind(said):
    """Return which of KINDS a verdict is of."""
    return next(kind for kind in KINDS if said.startswith(kind))


def is_bad(said):
    return kind(said) in ("WRONG", "CRASH")


def summary(verdicts):
    """Return how many there are of each kind, as one line."""
    counts = Counter(map(kind, verdicts))
    return ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if counts[kind] or kind.isupper())


@contextmanager
def default_dtype(dtype):
    """Inside the block, numbers are made in this precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
