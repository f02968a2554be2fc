"""Training on a device and on the host, side by side; a child process that compares them.

    python tests/support/device_cells.py accel            the stand-in device
    python tests/support/device_cells.py accel32          the one without float64
    python tests/support/device_cells.py cuda             a real one

It reads names of cells, one per line, and answers each with a line of JSON: the error if there was
one, the largest difference between the two, and what the host read from the device in each step.
After "by dispatch: " the stand-in's reads are counted as those of a real device. `Child` is the
other end.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import device_zoo
import torch
from device_models import EXAMPLES, MODELS, inputs
from device_probes import PROBES
from host_reads import CountReads, Counts
from torch import Tensor, nn
from torch.nn import functional as F

from microclip import Clipper, Ledger, multitensor, rules
from microclip.rules import ExampleRule, Rule, Seen

import stand_in_device

BY_DISPATCH, ZOO = "by dispatch: ", "zoo: "
STEPS = 6
CHECKED = (0, 1, 3)  # steps in which engines check themselves
ORDINARY = (2, 4, 5)
DOMAINS = ["en", "de", "en", "en", "de", "en", "en", "de"]
ENGINES = ("stream", "two_pass", "fused", "auto")
IDS = 200  # of which the first 40 are held back

RULES: dict[str, Callable[[], Rule]] = {
    "MinNorm": rules.MinNorm,
    "Unit": rules.Unit,
    "Fixed": partial(rules.Fixed, 0.5),
    "Median": rules.Median,
    "Mean": rules.Mean,
    "Mean, rescaled": partial(rules.Mean, rescale=True),
    "Quantile": partial(rules.Quantile, 0.3),
    "Automatic": rules.Automatic,
    "Keep": rules.Keep,
    "LossHistory": lambda: _experienced(rules.LossHistory()),
    "LossHistory, clipped": lambda: _experienced(rules.LossHistory(clip=rules.MinNorm())),
    "LossHistory, median": lambda: _experienced(rules.LossHistory(clip=rules.Median())),
    "NormHistory": lambda: _experienced(rules.NormHistory()),
    "LossWeight": rules.LossWeight,
    "LossWeight, clipped": lambda: rules.LossWeight(clip=rules.MinNorm()),
}


@dataclass(frozen=True)
class Cell:
    engine: str = "stream"
    rule: str = "MinNorm"
    model: str = "mlp"
    b: int | None = 3
    reduction: str = "mean"
    nonfinite: str = "propagate"
    how: str = "backward"  # or "fold", in two chunks; "own": after the user's own backward passes
    dtype: torch.dtype = torch.float32
    domains: bool = False
    ledger: bool = False
    scaled: bool = False  # by a GradScaler
    bad: bool = False  # one example of the last step has NaN
    tight: bool = False  # a memory budget
    mean_loss: bool = False  # loss_fn returns a mean


def _experienced(rule: ExampleRule) -> ExampleRule:
    """Return a rule that holds back examples already."""
    rule.load_state_dict({**copy.deepcopy(_experience(type(rule))), "clip": {}})
    return rule


@cache
def _experience(kind: type[ExampleRule]) -> dict[str, Any]:
    """Return the state of a rule that has seen some examples learned, and others not."""
    rule, ids = kind(), torch.arange(IDS)
    for epoch in range(16):
        noise = 0.05 * torch.rand(IDS, generator=torch.Generator().manual_seed(epoch)).double()
        losses = torch.where(ids < 40, 2.3 + 0.02 * epoch, 2.3 * math.exp(-epoch / 3)) + noise
        weights = rule.weigh(ids, None)
        rule.remember(Seen(epoch, ids, losses, weights, torch.zeros_like(ids), losses))
    assert bool((rule.weigh(ids, None)[:40] < 0.5).all())
    return rule.state_dict()


# ---- a cell

CELLS: dict[str, Cell] = {
    **{f"{engine}: {rule}": Cell(engine, rule) for rule in RULES for engine in ENGINES},
    **{f"{engine}: {model}": Cell(engine, model=model) for model in MODELS for engine in ENGINES},
    **{
        f"{engine}: {what}": Cell(engine, **more)
        for what, more in {
            "sum": {"reduction": "sum"},
            "one micro-batch": {"b": None},
            "single examples": {"b": 1},
            "domains": {"domains": True},
            "domains, Median": {"domains": True, "rule": "Median"},
            "domains, LossHistory": {"domains": True, "rule": "LossHistory"},
            "ledger": {"ledger": True},
            "ledger, LossHistory": {"ledger": True, "rule": "LossHistory", "domains": True},
            "chunks": {"how": "fold"},
            "chunks, Median": {"how": "fold", "rule": "Median"},
            "chunks, LossHistory": {"how": "fold", "rule": "LossHistory"},
            "skip": {"nonfinite": "skip"},
            "skip one": {"nonfinite": "skip", "bad": True},
            "skip one, Median": {"nonfinite": "skip", "bad": True, "rule": "Median"},
            "raise": {"nonfinite": "raise"},
            "raise for one": {"nonfinite": "raise", "bad": True},
            "propagate NaN": {"bad": True},
            "float64": {"dtype": torch.float64},
            "bfloat16": {"dtype": torch.bfloat16},
            "loss scaler": {"scaled": True},
            "memory budget": {"tight": True},
            "mean loss": {"mean_loss": True},
        }.items()
        for engine in ENGINES
    },
    "own backward": Cell(how="own"),
    "own backward, LossHistory": Cell(how="own", rule="LossHistory"),
    "own backward, domains": Cell(how="own", domains=True),
}
CELLS = {
    name: cell
    for name, cell in CELLS.items()
    # engines refuse these, on any device
    if not (cell.engine == "stream" and cell.rule in ("Median", "Mean", "Quantile"))
    and not (cell.engine == "stream" and cell.rule == "LossHistory, median")
    and not (cell.engine == "fused" and (cell.model == "batchnorm" or cell.mean_loss))
}


@dataclass
class Run:
    """What training gave: numbers of the last outcome and all parameters, on the host."""

    numbers: dict[str, Tensor]
    reads: list[dict[str, int]]  # of each step
    engine: str = ""


def train(
    cell: Cell,
    device: str,
    counting: Callable[[], Any],
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    rank: int = 0,
) -> Run:
    """Run all steps of a cell on a device; `wrap` and `rank`: with other ranks."""
    torch.manual_seed(0)
    bare = MODELS[cell.model]().to(device, cell.dtype)
    model = wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    b = 1 if cell.rule == "NormHistory" else cell.b
    rule, found = RULES[cell.rule](), Run({}, [])
    scaler = torch.amp.GradScaler(device, init_scale=64.0) if cell.scaled else None

    def losses(batch: Any) -> Tensor:
        x, y = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return each.mean() if cell.mean_loss else each

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(folder) if cell.ledger else None
        clipper = Clipper(
            model, b, rule=rule, engine=cell.engine, reduction=cell.reduction, ledger=ledger,
            nonfinite=cell.nonfinite, grad_scaler=scaler,
            memory_budget=2**14 if cell.tight else None,
        )  # fmt: skip
        for step in range(STEPS):
            batch = _batch(cell, step, device, rank)
            optimizer.zero_grad()
            with counting() as counts:
                try:
                    _step(clipper, cell, losses, batch, step, rank)
                except ArithmeticError as error:
                    found.numbers["error"] = torch.tensor(len(str(error)))
                    break
            found.reads.append(dict(counts.reads))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        if ledger is not None:
            ledger.close()
    outcome = clipper.outcome
    for name in ("norms", "weights", "losses", "loss", "bounds", "example_weights", "skipped"):
        value = getattr(outcome, name)
        if value is not None:
            found.numbers[name] = value.cpu().double()
    for name, parameter in bare.named_parameters():
        found.numbers[name] = parameter.detach().cpu().double()
    found.engine = outcome.engine
    return found


def _batch(cell: Cell, step: int, device: str, rank: int) -> tuple[Tensor, Tensor]:
    seed = step + 1000 * rank
    x = inputs(cell.model, seed)
    y = torch.randint(0, 5, (EXAMPLES,), generator=torch.Generator().manual_seed(100 + seed))
    if cell.bad and step == STEPS - 1 and rank == 0:
        x[4] = math.nan
    return x.to(device, cell.dtype if x.is_floating_point() else None), y.to(device)


def _step(clipper: Clipper, cell: Cell, losses: Any, batch: Any, step: int, rank: int) -> None:
    more: dict[str, Any] = {"domains": DOMAINS} if cell.domains else {}
    if "History" in cell.rule or "Weight" in cell.rule or cell.ledger:
        more["ids"] = [(24 + 8 * step + 5 * i + 3 * rank) % IDS for i in range(EXAMPLES)]
    if cell.how == "backward":
        clipper.backward(losses, batch, **more)
        return
    b = cell.b or EXAMPLES
    for start in range(0, EXAMPLES, 4 if cell.how == "fold" else b):
        rows = slice(start, start + (4 if cell.how == "fold" else b))
        part, given = tuple(t[rows] for t in batch), {k: v[rows] for k, v in more.items()}
        if cell.how == "fold":
            clipper.fold(losses, part, **given)
        else:
            loss = losses(part)
            if "ids" in given:
                clipper.weighted_loss(loss, **given).backward()
            else:
                loss.mean().backward()
            if "domains" in given:
                given["domain"] = given.pop("domains")[0]
            clipper.fold(loss=loss, **given)
    clipper.finish()


def compare(
    cell: Cell,
    device: str,
    counting: Callable[[], Any],
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    rank: int = 0,
) -> dict[str, Any]:
    """Return how a cell on a device differs from the same one on the host."""
    if multitensor.widest(torch.device(device)) != torch.float64:
        if cell.dtype == torch.float64:
            return {"skipped": "The device has no float64."}
        if cell.scaled and device == stand_in_device.NAME:
            return {"skipped": "GradScaler computes in float64 on any such device but MPS."}
    there = train(cell, device, counting, wrap, rank)
    here = train(cell, "cpu", _no_counting, wrap, rank)
    assert there.numbers.keys() == here.numbers.keys(), (there.numbers.keys(), here.numbers.keys())
    differences = {
        name: _difference(there.numbers[name], number) for name, number in here.numbers.items()
    }
    worst = max(differences, key=differences.__getitem__)
    return {
        "difference": differences[worst],
        "worst": worst,
        "reads": there.reads,
        "engine": there.engine,
        "finite": all(bool(number.isfinite().all()) for number in here.numbers.values()),
    }


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest number; NaN equals itself."""
    if one.shape != other.shape or bool((one.isnan() != other.isnan()).any()):
        return math.inf
    scale = other.nan_to_num().abs().max().item() if other.numel() else 0.0
    return (one - other).nan_to_num().abs().max().item() / scale if scale else 0.0


@contextmanager
def _no_counting() -> Iterator[Counts]:
    yield Counts()


@contextmanager
def _count_by_dispatch() -> Iterator[Counts]:
    with CountReads() as mode:
        yield mode.counts


def main(device: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the host computes in full precision
    counting: Callable[[], Any] = _count_by_dispatch
    if device.startswith(stand_in_device.NAME):
        counting = stand_in_device.install(float64=device == stand_in_device.NAME).counts
        device = stand_in_device.NAME
    for line in sys.stdin:
        try:
            name = line.strip().removeprefix(BY_DISPATCH)
            how = _count_by_dispatch if line.startswith(BY_DISPATCH) else counting
            if name in PROBES:
                answer = PROBES[name](device, how)
            elif name.startswith(ZOO):
                model, engine = name.removeprefix(ZOO).split()
                answer = device_zoo.compare(model, engine, device, how)
            else:
                answer = compare(CELLS[name], device, how)
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


class Child:
    """A process that has the device; it starts with the first question."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None

    def ask(self, name: str) -> dict[str, Any]:
        """Return the answer to the name of a cell or probe."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._device],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The process with the device ended with {self._process.wait()}.")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


if __name__ == "__main__":
    main(sys.argv[1])
