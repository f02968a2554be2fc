"""`probe`: from a model and a few batches to what each micro-batch size would do.

`ProbeEvery` repeats it during training and shows how the best size drifts. Knows nothing about how
gradients are computed or steps simulated.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from microclip.engines.gradients import LossFn
from microclip.probing.advice import suggestions
from microclip.probing.forecast import RISE, TOP_TENTH
from microclip.probing.gram import Gram, collect, gram_of
from microclip.probing.inequality import inequality
from microclip.probing.result import Best, Probe, Row
from microclip.probing.simulation import (
    CONFIDENCE,
    Pool,
    Setting,
    SettingStats,
    Simulation,
    interval,
    simulate,
)
from microclip.rules import ExampleRule, MinNorm, Rule

UNLIKELY = (1 - CONFIDENCE) / 2
Rules = Rule | Sequence[Rule] | Mapping[str, Rule]


def probe(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    sizes: Sequence[int] | None = None,
    rules: Rules | None = None,
    *,
    held_out: Iterable[Any] | None = None,
    batch_size: int | None = None,
    draws: int = 256,
    replicates: int = 1000,
    seed: int = 0,
    memory_budget: int | None = None,
) -> Probe:
    """Predict what each micro-batch size would do to this model on these examples, now.

    Computes the inner products of all examples' gradients once, and simulates steps of every size
    from them: random examples, cut into micro-batches, clipped, and judged by the mean gradient of
    examples that are not in the step. The model is left as it was.

    Args:
        model: As it is at this point of training.
        loss_fn: Returns one loss per example.
        batches: A list of batches as they are trained on. Two to four tell much more than one.
        sizes: The micro-batch sizes b; by default powers of two up to B, and B itself.
        rules: One rule or several; by default `MinNorm()`.
        held_out: Other batches to judge the steps by, ideally of clean data. By default each step
            is judged by those examples of `batches` that are not in it.
        batch_size: B, the examples of a simulated step. By default the largest batch, or half of
            all examples if too few would be left to judge by.
        draws: How many steps to simulate.
        replicates: How many bootstrap replicates to take for the intervals.
        seed: Of the simulation. No other generator is used or changed.
        memory_budget: Bytes that may be held beside one forward and backward pass.
    """
    chosen, lengths = collect(batches)
    judges = [] if held_out is None else collect(held_out)[0]
    named = _named(rules)
    pool_size = sum(lengths)
    B = _batch_size(batch_size, lengths, apart=bool(judges))
    wanted = _sizes(sizes, B, max(lengths))
    _check_count(draws, "draws")
    _check_count(replicates, "replicates")
    gram = gram_of(model, loss_fn, [*chosen, *judges], memory_budget)
    apart = torch.arange(len(gram)) >= pool_size if judges else None
    pool = Pool(len(gram), B, apart)
    generator = torch.Generator().manual_seed(seed)
    simulation = simulate(gram.matrix, pool, wanted, named, draws, replicates, generator)
    return _result(simulation, gram, pool, lengths)


def _result(simulation: Simulation, gram: Gram, pool: Pool, lengths: tuple[int, ...]) -> Probe:
    B = pool.batch_size
    held_out = len(gram) - (sum(lengths) if pool.held_out is not None else B)
    notes = list(gram.notes)
    if pool.held_out is None:
        notes.append(
            "Steps were judged by examples of the same batches. If some of these are wrong, a step "
            "that resists them looks worse than it is. Clean data judge better: pass held_out."
        )
    if max(lengths) > B:
        notes.append(
            f"Steps have {B} examples, fewer than the batches, since the others are needed to "
            "judge them. Pass more batches to probe steps of full size."
        )
    first = _shares_ranked_first(simulation)
    order = list(dict.fromkeys(rule for rule, _ in simulation.stats))
    rows = tuple(_row(s, stats, B, first[s]) for s, stats in simulation.stats.items())
    return Probe(
        rows=tuple(sorted(rows, key=lambda row: order.index(row.rule))),
        best=_best(simulation, first),
        batch_size=B,
        held_out=held_out,
        plain_efficiency=simulation.plain,
        plain_alignment=simulation.plain_alignment,
        noise_scale=simulation.noise / simulation.signal if simulation.signal > 0 else float("inf"),
        gram=gram,
        notes=tuple(notes),
        figures=inequality(gram.matrix[pool.for_steps][:, pool.for_steps], B),
    )


def _row(setting: Setting, stats: SettingStats, B: int, first: float) -> Row:
    low, high = interval(stats.gains)
    return Row(
        rule=setting[0],
        size=setting[1],
        microbatches=-(-B // setting[1]),
        norm_low=stats.norms[0].item(),
        norm_median=stats.norms[1].item(),
        norm_high=stats.norms[2].item(),
        bound=stats.bound,
        bound_spread=stats.bound_spread,
        mean_weight=stats.mean_weight,
        effective_sample_size=stats.effective_sample_size,
        alignment=stats.alignment,
        efficiency=stats.efficiency,
        gain=stats.gain,
        gain_low=low,
        gain_high=high,
        first=first,
    )


def _best(simulation: Simulation, first: Mapping[Setting, float]) -> Best | None:
    """Return the size with the largest decrease, which exists even where gains do not."""
    setting = max(simulation.stats, key=lambda s: simulation.stats[s].decrease)
    chosen = simulation.stats[setting]
    if not chosen.decrease > 0:
        return None
    rivals = [
        other
        for other, found in simulation.stats.items()
        if other != setting and _share(found.decreases >= chosen.decreases) > UNLIKELY
    ]
    low, high = interval(chosen.gains)
    over_plain = _share(chosen.decreases > simulation.plain_decreases)
    return Best(*setting, chosen.gain, low, high, first[setting], over_plain, tuple(rivals))


def _share(true: Tensor) -> float:
    return true.double().mean().item()


def _shares_ranked_first(simulation: Simulation) -> dict[Setting, float]:
    """Return how often each setting is the best, plain training included."""
    found = torch.stack([stats.decreases for stats in simulation.stats.values()])
    winners = found.argmax(0)
    winners[found.amax(0) < simulation.plain_decreases] = -1
    return {
        setting: _share((winners == number) & (found[number] > 0))
        for number, setting in enumerate(simulation.stats)
    }


def _named(rules: Rules | None) -> dict[str, Rule]:
    if rules is None:
        rules = MinNorm()
    if isinstance(rules, Rule):
        rules = [rules]
    named = dict(rules) if isinstance(rules, Mapping) else {repr(rule): rule for rule in rules}
    for rule in named.values():
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rules must be rules from microclip.rules or your own, but got {rule!r}."
            )
        if isinstance(rule, ExampleRule):
            instead = f" Probe what it clips by, {rule.clip!r}." if rule.clip else ""
            raise ValueError(
                f"A probe looks at gradient norms of a single step, but {type(rule).__name__} "
                f"weights examples by their losses or their history: leave it out.{instead}"
            )
    if not named:
        raise ValueError("rules is empty: there is nothing to probe.")
    return named


def _batch_size(given: int | None, lengths: tuple[int, ...], apart: bool) -> int:
    total = sum(lengths)
    if given is None:
        return max(lengths) if apart or total - max(lengths) >= max(lengths) else total // 2
    size = _index(given, "batch_size must be a positive integer")
    most = total if apart else total - 2
    if not 2 <= size <= most:
        raise ValueError(
            f"batch_size must be from 2 to {most}, since {total} examples were given"
            + ("" if apart else " and two must be left to judge a step by")
            + f", but got {given}."
        )
    return size


def _sizes(given: Sequence[int] | None, B: int, largest: int) -> list[int]:
    if given is None:
        return sorted({*(2**k for k in range(B.bit_length())), B})
    sizes = sorted({_index(size, "sizes must be positive integers") for size in given})
    if not sizes:
        raise ValueError("sizes is empty: there is nothing to probe.")
    for size in sizes:
        if size > B:
            remedy = (
                "Pass more batches, so that steps can have that many examples and others are left "
                "to judge them by."
                if size <= largest
                else "A micro-batch cannot be larger than its mini-batch."
            )
            raise ValueError(
                f"sizes must not be larger than B = {B}, the examples of a step, but got {size}. "
                f"{remedy}"
            )
    return sizes


def _index(value: object, rule: str) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{rule}, but got {value!r}.")
    return number


def _check_count(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise ValueError(f"{what} must be an integer of 2 or more, but got {value!r}.")


@dataclass(frozen=True)
class Moment:
    """One probe of the run, without its Gram matrix."""

    step: int  # steps taken before
    rows: tuple[Row, ...]
    best: Best | None
    sentence: str
    figures: Mapping[str, float] = field(default_factory=dict)  # with the rise since the first


class ProbeEvery:
    """Probes every n steps; call `step` once per training step, before or after backward.

    Args:
        n: Probe at steps n - 1, 2n - 1, ... counted from 0.
        recent: How many of the latest batches a probe gets. They are kept until then.
        options: Passed to `microclip.probe`: sizes, rules, held_out, draws, ...

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> watch = ProbeEvery(2, draws=16, replicates=16)
    >>> for batch in torch.randn(4, 8, 3):
    ...     _ = watch.step(model, lambda x: model(x).squeeze(1).square(), batch)
    >>> [moment.step for moment in watch.history]
    [1, 3]
    """

    def __init__(self, n: int, *, recent: int = 2, **options: Any) -> None:
        for name, value in (("n", n), ("recent", recent)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, but got {value!r}.")
        self.n = n
        self.history: list[Moment] = []
        self._options = options
        self._recent: deque[Any] = deque(maxlen=recent)
        self._steps = 0

    def step(self, model: nn.Module, loss_fn: LossFn, batch: Any) -> Probe | None:
        """Count a step; every n-th time probe and return the result, else None.

        Gradients, buffers, random generators and training mode are left as they are.
        """
        number, self._steps = self._steps, self._steps + 1
        due = self._steps % self.n == 0
        missing = self.n - self._steps % self.n
        if due or missing < (self._recent.maxlen or 1):  # no probe gets the others
            self._recent.append(batch)
        if not due:
            return None
        found = probe(model, loss_fn, list(self._recent), **self._options)
        self._recent.clear()
        figures = {**found.figures, **self._rise(found.figures)}
        self.history.append(Moment(number, found.rows, found.best, found.sentence, figures))
        return found

    def _rise(self, now: Mapping[str, float]) -> dict[str, float]:
        """Return by how much the top tenth's share rose since the first probe."""
        if not self.history or not {TOP_TENTH} <= now.keys() & self.history[0].figures.keys():
            return {}
        return {RISE: now[TOP_TENTH] - self.history[0].figures[TOP_TENTH]}

    @property
    def suggestions(self) -> list[str]:
        """Say what the latest figures suggest, and how often that was right."""
        return suggestions(self.history[-1].figures) if self.history else []

    @property
    def sentence(self) -> str:
        """Say how the best size moved, without calling any size the best for training."""
        known = [(moment.step, moment.best) for moment in self.history if moment.best is not None]
        if not known:
            return "Nothing to report yet: no probe has found a result."
        runs: list[tuple[int, int, int]] = []  # size, first step, last step
        for step, best in known:
            if runs and runs[-1][0] == best.size:
                runs[-1] = (best.size, runs[-1][1], step)
            else:
                runs.append((best.size, step, step))
        listed = ", then ".join(
            f"b = {size} " + (f"at step {a}" if a == z else f"from step {a} to {z}")
            for size, a, z in runs
        )
        helped = sum(best.helps for _, best in known)
        return (
            f"Ranked first: {listed}; in {helped} of {len(known)} probes it was clearly better "
            "than a plain step. These are the weights of this run, and a run with another size has "
            "others, so race the two or three sizes that rank first before deciding."
        )

    def plot(self, path: str | Path) -> None:
        """Plot gains and the best size against the step; needs matplotlib."""
        if not self.history:
            raise ValueError(f"There is nothing to plot: {self._steps} steps, no probe yet.")
        from microclip.probing.plot import draw_history

        draw_history(self.history, path)

    def __str__(self) -> str:
        lines = [
            f"step {moment.step}: "
            + ", ".join(f"b={row.size} {row.gain:.2f}" for row in moment.rows)
            for moment in self.history
        ]
        return "\n".join([*self.suggestions, *lines, self.sentence])
