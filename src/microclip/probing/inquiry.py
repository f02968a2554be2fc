"""The probe: from a model and a few batches to what each micro-batch size would do."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from microclip.engines.losses import LossFn
from microclip.probing.gram import Gram, collect, gram_of
from microclip.probing.merit import CONFIDENCE, Facts, Merits, Setting, interval, judge_all
from microclip.probing.result import Best, Probe, Row
from microclip.probing.sampling import Pool
from microclip.rules import MinNorm, Rule

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
    """Find out what each micro-batch size would do to this model on these examples, now.

    Takes the gradient of every example once, as inner products only, and simulates steps of every
    size from them: random examples, cut into micro-batches, clipped, and judged by the mean
    gradient of examples that are not in the step. The model is left as it was.

    Args:
        model: As it is at this point of training.
        loss_fn: Returns one loss per example.
        batches: A list of batches as they are trained on. Two to four say much more than one.
        sizes: The micro-batch sizes b; powers of two up to B, and B itself, unless given.
        rules: A rule or several; `MinNorm()` unless given.
        held_out: Other batches, of clean data perhaps, to judge the steps by. Without them each
            step is judged by those examples of `batches` that are not in it.
        batch_size: B, the examples of a simulated step. Unless given: the largest batch, or half
            of all examples if too few would be left to judge by.
        draws: How many steps are simulated.
        replicates: How many bootstrap replicates the intervals come from.
        seed: Of the simulation. Other generators are neither used nor changed.
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
    merits = judge_all(gram.matrix, pool, wanted, named, draws, replicates, generator)
    return _result(merits, gram, pool, lengths)


def _result(merits: Merits, gram: Gram, pool: Pool, lengths: tuple[int, ...]) -> Probe:
    B = pool.batch_size
    held_out = len(gram) - (sum(lengths) if pool.held_out is not None else B)
    notes = list(gram.notes)
    if pool.held_out is None:
        notes.append(
            "Steps were judged by examples of the same batches. If some of these are wrong, a step "
            "that resists them looks worse than it is: clean data, as held_out, judges better."
        )
    if max(lengths) > B:
        notes.append(
            f"Steps have {B} examples, fewer than the batches, since the others are needed to "
            "judge them. Give more batches to probe steps of full size."
        )
    first = _shares_of_first_places(merits)
    order = list(dict.fromkeys(rule for rule, _ in merits.facts))
    rows = tuple(_row(s, facts, B, first[s]) for s, facts in merits.facts.items())
    return Probe(
        rows=tuple(sorted(rows, key=lambda row: order.index(row.rule))),
        best=_best(merits, first),
        batch_size=B,
        held_out=held_out,
        plain_efficiency=merits.plain,
        plain_alignment=merits.plain_alignment,
        noise_scale=merits.noise / merits.signal if merits.signal > 0 else float("inf"),
        gram=gram,
        notes=tuple(notes),
    )


def _row(setting: Setting, facts: Facts, B: int, first: float) -> Row:
    low, high = interval(facts.gains)
    return Row(
        rule=setting[0],
        size=setting[1],
        microbatches=-(-B // setting[1]),
        norm_low=facts.norms[0].item(),
        norm_median=facts.norms[1].item(),
        norm_high=facts.norms[2].item(),
        bound=facts.bound,
        bound_spread=facts.bound_spread,
        mean_weight=facts.mean_weight,
        effective_sample_size=facts.effective_sample_size,
        alignment=facts.alignment,
        efficiency=facts.efficiency,
        gain=facts.gain,
        gain_low=low,
        gain_high=high,
        first=first,
    )


def _best(merits: Merits, first: Mapping[Setting, float]) -> Best | None:
    """Return the size that is worth most; ranked by merit, which is there even if gains are not."""
    setting = max(merits.facts, key=lambda s: merits.facts[s].merit)
    chosen = merits.facts[setting]
    if not chosen.merit > 0:
        return None
    rivals = [
        other
        for other, found in merits.facts.items()
        if other != setting and _share(found.merits >= chosen.merits) > UNLIKELY
    ]
    low, high = interval(chosen.gains)
    over_plain = _share(chosen.merits > merits.plain_merits)
    return Best(*setting, chosen.gain, low, high, first[setting], over_plain, tuple(rivals))


def _share(true: Tensor) -> float:
    return true.double().mean().item()


def _shares_of_first_places(merits: Merits) -> dict[Setting, float]:
    """Return how often each setting is the best; plain training takes part."""
    found = torch.stack([facts.merits for facts in merits.facts.values()])
    winners = found.argmax(0)
    winners[found.amax(0) < merits.plain_merits] = -1
    return {
        setting: _share((winners == number) & (found[number] > 0))
        for number, setting in enumerate(merits.facts)
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
                f"rules must be rules of microclip.rules or your own, but got {rule!r}."
            )
    if not named:
        raise ValueError("rules is empty: there is nothing to probe.")
    return named


def _batch_size(given: int | None, lengths: tuple[int, ...], apart: bool) -> int:
    total = sum(lengths)
    if given is None:
        return max(lengths) if apart or total - max(lengths) >= max(lengths) else total // 2
    size = _index(given, "batch_size")
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
    sizes = sorted({_index(size, "sizes") for size in given})
    if not sizes:
        raise ValueError("sizes is empty: there is nothing to probe.")
    for size in sizes:
        if size > B:
            remedy = (
                "Give more batches, so that steps can have as many examples and others are left "
                "to judge them by."
                if size <= largest
                else "A micro-batch cannot be larger than its mini-batch."
            )
            raise ValueError(
                f"sizes must not be larger than B = {B}, the examples of a step, but got {size}. "
                f"{remedy}"
            )
    return sizes


def _index(value: object, what: str) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} must be positive integers, but got {value!r}.")
    return number


def _check_count(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise ValueError(f"{what} must be an integer of 2 or more, but got {value!r}.")
