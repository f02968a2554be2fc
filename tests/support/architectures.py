"""A sweep over every architecture in transformers that a tiny configuration can build.

`python tests/support/architectures.py` builds each (`tiny_models`), checks by plain autograd
whether its examples mix, and compares the engines with Algorithm 1.
"""

import argparse
import contextlib
import gc
import json
import logging
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor

import microclip
from microclip.engines.base import CannotFuseError

from tiny_inputs import EXAMPLES
from tiny_models import (
    Case,
    Gradient,
    OutOfTime,
    Skipped,
    brief,
    build,
    gradient,
    names,
    norm,
    rows,
)

SECONDS = 60  # for each architecture
TOLERANCE = 1e-9  # of a parameter's gradient, in float64
MIXES = 1e-8  # by so much do per-example gradients differ, alone and in company
STEADY = 1e-10  # and by less than this if parameters change in their last digit
FLOOR = 1e-6  # of the whole norm: a parameter's error is relative to no less, for rounding's sake

# Plain autograd


def apart(got: Gradient, want: Gradient) -> tuple[float, str]:
    """Return the largest relative error of a parameter's gradient, and which one has it."""
    least = max(FLOOR * norm(want), 1e-300)
    errors = {n: float((got[n] - g).norm() / max(float(g.norm()), least)) for n, g in want.items()}
    worst = max(errors, key=lambda n: float("inf") if errors[n] != errors[n] else errors[n])
    return errors[worst], worst


def alone(case: Case, batch: dict[str, Tensor]) -> list[Gradient]:
    return [gradient(case, case.loss_fn(rows(batch, i, i + 1)).sum()) for i in range(EXAMPLES)]


def in_company(case: Case, batch: dict[str, Tensor]) -> list[Gradient]:
    losses = case.loss_fn(batch)
    return [gradient(case, losses[i], keep=True) for i in range(EXAMPLES)]


def largest(some: list[Gradient], others: list[Gradient]) -> float:
    return max(apart(a, b)[0] for a, b in zip(some, others, strict=True))


@contextlib.contextmanager
def nudged(case: Case) -> Iterator[None]:
    """Change the parameters in their last digits."""
    kept = {name: p.detach().clone() for name, p in case.parameters.items()}
    with torch.no_grad():
        for p in case.parameters.values():
            p.mul_(1 + 3e-16 * torch.randn_like(p.real).sign())
    yield
    with torch.no_grad():
        for name, p in case.parameters.items():
            p.copy_(kept[name])


def classify(case: Case) -> dict[str, Any]:
    """Say whether examples mix, and whether gradients are steady enough to be compared."""
    batch = case.batches[0]
    try:
        own = alone(case, batch)
    except (ValueError, RuntimeError) as error:
        return {"mixes": True, "chaotic": False, "why": f"an example alone: {brief(error)}"}
    difference = largest(in_company(case, batch), own)
    reached = sum(any(bool(g[name].any()) for g in own) for name in case.parameters)
    with nudged(case):
        unsteady = largest(alone(case, batch), own)
    chaotic = unsteady > STEADY and difference < 100 * unsteady
    mixes = not chaotic and not difference <= MIXES
    return {
        "mixes": mixes,
        "chaotic": chaotic,
        "difference": difference,
        "unsteady": unsteady,
        "reached": f"{reached} of {len(case.parameters)} parameters",
    }


def reference(case: Case, batch: dict[str, Tensor], b: int) -> Gradient:
    """Return what Algorithm 1 gives: every micro-batch alone, all scaled to the least norm."""
    starts = range(0, EXAMPLES, b)
    own = [gradient(case, case.loss_fn(rows(batch, s, s + b)).mean()) for s in starts]
    norms = [norm(g) for g in own]
    scales = [min(norms) / n if n else 0.0 for n in norms]
    return {
        name: sum(scale * g[name] for scale, g in zip(scales, own, strict=True)) / len(own)
        for name in own[0]
    }


# Engines


def check(case: Case, engine: str, b: int) -> str:
    """Take a step with each batch; say exact, refused, WRONG or CRASH, and what about it."""
    clipper = microclip.Clipper(case.model, microbatch_size=b, engine=engine)
    used, error = [], 0.0
    for turn, batch in enumerate(case.batches):
        want = wanted(case, turn, b)
        if want is None:
            return "impossible: an example cannot be run alone"
        case.model.zero_grad()
        try:
            outcome = clipper.backward(case.loss_fn, batch)
        except CannotFuseError as refusal:
            return f"refused: {' '.join(str(refusal).split())}"
        except Exception as crash:
            return f"CRASH: {brief(crash)} at {last_line(crash)}"
        got = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in case.parameters.items()
        }
        difference, name = apart(got, want)
        if not difference <= TOLERANCE:
            return f"WRONG: {difference:.1e} in {name} of batch {turn} ({outcome.engine})"
        used.append(outcome.engine)
        error = max(error, difference)
    case.model.zero_grad()
    return f"exact: {error:.0e} ({', '.join(dict.fromkeys(used))})"


def wanted(case: Case, turn: int, b: int) -> Gradient | None:
    if (turn, b) not in case.references:
        try:
            case.references[turn, b] = reference(case, case.batches[turn], b)
        except (ValueError, RuntimeError):
            return None
    return case.references[turn, b]


def last_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


# The sweep


@contextlib.contextmanager
def at_most_seconds(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def examine(name: str, engines: list[str], sizes: list[int]) -> dict[str, Any]:
    record: dict[str, Any] = {"name": name, "cells": {}}
    start = time.perf_counter()
    try:
        with at_most_seconds(SECONDS):
            case = build(name)
            record["built"] = isinstance(case, Case)
            if isinstance(case, Skipped):
                record["reason"] = case.reason
            else:
                record |= {
                    "model": type(case.model).__name__,
                    "plan": str(case.plan),
                    "inputs": {n: list(t.shape) for n, t in case.batches[0].items()},
                    "outputs": case.outputs,
                    **classify(case),
                }
                for engine in engines:
                    for b in sizes:
                        record["cells"][f"{engine} {b}"] = check(case, engine, b)
    except OutOfTime:
        record["timeout"] = True
        record.setdefault("built", False)
        record.setdefault("reason", "out of time")
    return record | {"seconds": round(time.perf_counter() - start, 2)}


def past(out: Path | None) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().splitlines()]


def sweep(only: list[str], engines: list[str], sizes: list[int], out: Path | None) -> list[dict]:
    records = past(out)
    done = {record["name"] for record in records}
    for name in only or names():
        if name in done:
            continue
        record = examine(name, engines, sizes)
        records.append(record)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
        print(line_of(record), flush=True)
        gc.collect()
    return records


def line_of(record: dict[str, Any]) -> str:
    if not record["built"]:
        return f"{record['name']}: skipped, {record['reason'][:200]}"
    kinds = [kind for kind in ("mixes", "chaotic", "timeout") if record.get(kind)]
    cells = "; ".join(f"{cell}: {result[:120]}" for cell, result in record["cells"].items())
    return f"{record['name']} ({', '.join([record['model'], *kinds])}): {cells}"


def general(reason: str) -> str:
    """Strip a refusal of names and numbers, so that refusals can be counted."""
    quoted, classes = r"'[^']*'|\"[^\"]*\"|`[^`]*`", r"(?<=\()[A-Z]\w+(?=\))|(?<= in )[A-Z]\w+"
    nameless = re.sub(f"{quoted}|{classes}", "_", reason)
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "N", nameless)


def summary(records: list[dict[str, Any]]) -> str:
    made = [r for r in records if r["built"]]
    mixing = [r for r in made if r.get("mixes")]
    chaotic = [r for r in made if r.get("chaotic")]
    apart_ones = [r for r in made if not r.get("mixes") and not r.get("chaotic")]
    lines = [
        f"{len(records)} architectures, {len(made)} built, {len(mixing)} mix examples, "
        f"{len(chaotic)} chaotic, {len(apart_ones)} remain",
        f"{sum(r['seconds'] for r in records):.0f} s",
    ]
    for cell in dict.fromkeys(cell for r in made for cell in r["cells"]):
        for kind, group in ("not mixing", apart_ones), ("mixing", mixing), ("chaotic", chaotic):
            results = [r["cells"][cell] for r in group if cell in r["cells"]]
            if not results:
                continue
            counts = Counter(result.split(":")[0] for result in results)
            single = sum("(fused)" in result for result in results if result.startswith("exact"))
            lines.append(
                f"{cell}, {kind}: {dict(counts)}, in a single pass {single} of {len(results)}"
            )
        refusals = Counter(
            general(r["cells"][cell])
            for r in apart_ones
            if r["cells"].get(cell, "").startswith("refused")
        )
        lines += [f"  {count} x {reason}" for reason, count in refusals.most_common()]
        for r in made:
            if r["cells"].get(cell, "").startswith(("WRONG", "CRASH")):
                lines.append(f"  {r['name']}: {r['cells'][cell]}")
    return "\n".join(lines)


def quiet() -> None:
    hf.logging.set_verbosity(logging.CRITICAL)
    hf.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--engines", nargs="*", default=["fused", "auto"])
    parser.add_argument("--sizes", nargs="*", default=["1", "3", "B"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    sizes = [EXAMPLES if size == "B" else int(size) for size in given.sizes]
    records = sweep(given.only, given.engines, sizes, given.out)
    print(summary(records))


if __name__ == "__main__":
    sys.exit(main())
