"""The record of one step: norms as they come in, then the weights that the rule gives them.

All engines share it, and it is the only place where norms, sizes and domains meet the rule. The
micro-batches of other ranks come from a `RankExchange`; with one process there is none. Knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from microclip.engines.rank_exchange import AllMicrobatches, RankExchange, domain_key
from microclip.microbatches import Microbatch, MicrobatchList
from microclip.outcome import Noise, Outcome
from microclip.rules import Nonfinite, Rule, Weighting, apply, countable

Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


class NonfiniteGradientError(ArithmeticError):
    """A micro-batch gradient contains NaN or inf, and the policy is to raise."""


@dataclass(frozen=True)
class Policy:
    """The user's settings that engines need."""

    rule: Rule
    microbatch_size: int | None
    reduction: Reduction
    nonfinite: Nonfinite


@dataclass(frozen=True)
class _Found:
    """Norms and losses of consecutive micro-batches."""

    norms: Tensor
    losses: Tensor | None
    example_losses: Tensor | None


class StepRecord:
    """Everything known about the micro-batches of one step."""

    def __init__(self, policy: Policy, step: int, ranks: RankExchange | None = None) -> None:
        self.policy = policy
        self.step = step
        self.ranks = ranks  # None: this process has the whole mini-batch
        self._all: AllMicrobatches | None = None
        # one entry per micro-batch
        self._sizes: list[int] = []
        self._effective: list[float] = []  # sums of the weights of their examples
        self._is_weighted = False  # whether examples have weights of their own
        self._examples_of_all = 0  # over all ranks, if examples have weights
        self._largest_of_all = 0  # micro-batch
        self._domains: list[Hashable] = []
        self._ids: list[tuple[Hashable, ...]] = []
        self._found: list[_Found] = []
        self._rows: dict[Hashable, list[int]] = {}
        self._weightings: dict[Hashable, Weighting] = {}
        self._sizes_of: dict[Hashable, Tensor] = {}
        self.left_out: list[int] = []
        self.on_loss: Callable[[Tensor, int], None] = _ignore  # called with losses and their graphs
        self.wants_domain_norms = False  # whether engines note the norm of each domain's sum
        self.domain_norms: dict[Hashable, Tensor] = {}  # |sum_j size_j w_j g_j|, if they did
        # called with the losses of the examples of what was added, and how many there are
        self.on_examples: Callable[[Tensor | None, int], None] = _ignore

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def examples(self) -> int:
        """How many examples have been seen."""
        return sum(self._sizes)

    def add(
        self, microbatch: Microbatch, norm: Tensor, loss: Tensor | None, each: Tensor | None = None
    ) -> None:
        """Record a micro-batch, without keeping its batch."""
        if microbatch.weights is not None:
            self._is_weighted = True
            loss = loss if each is None else each.mean()  # and not the weighted mean
        found = _Found(norm.view(1), None if loss is None else loss.view(1), each)
        sizes = [microbatch.size], [microbatch.effective_size]
        self._append(*sizes, [microbatch.domain], [microbatch.ids], found)

    def extend(
        self,
        microbatches: MicrobatchList,
        norms: Tensor,
        losses: Tensor | None,
        each: Tensor | None,
    ) -> None:
        """Record several micro-batches at once."""
        found = _Found(norms, losses, each)
        self._is_weighted |= microbatches.weights is not None
        sizes = microbatches.sizes, microbatches.effective_sizes
        self._append(*sizes, microbatches.domains, microbatches.ids, found)

    def _append(
        self,
        sizes: list[int],
        effective: list[float],
        domains: list[Hashable],
        ids: list[tuple[Hashable, ...]],
        found: _Found,
    ) -> None:
        row = len(self)
        for domain, run in groupby(domains):
            count = len(list(run))
            self._rows.setdefault(domain, []).extend(range(row, row + count))
            row += count
        self._sizes += sizes
        self._effective += effective
        self._domains += domains
        self._ids += ids
        self._found.append(found)
        self.on_examples(found.example_losses, sum(sizes))

    def norms(self, domain: Hashable) -> Tensor:
        """Return the norms of one domain's micro-batches."""
        return self._of(domain, self._all_norms())

    def sizes(self, domain: Hashable) -> Tensor:
        """Return the effective sizes of a domain's micro-batches, in the dtype of the norms."""
        norms, rows = self._all_norms(), self._rows[domain]
        found = self._sizes_of.get(domain)
        if found is None or len(found) != len(rows):
            sizes = [self._effective[row] for row in rows]
            found = torch.tensor(sizes, dtype=norms.dtype, device=norms.device)
            self._sizes_of[domain] = found
        return found

    def _all_norms(self) -> Tensor:
        if len(self._found) > 1:  # joined once, not on every call
            each = [found.example_losses for found in self._found]
            losses = [found.losses for found in self._found]
            norms = torch.cat([found.norms for found in self._found])
            self._found = [_Found(norms, _joined(losses), _joined(each))]
        return self._found[0].norms if self._found else torch.zeros(0)

    def _of(self, domain: Hashable, values: Tensor) -> Tensor:
        """Return the entries of one domain, from values with one entry per micro-batch."""
        rows = self._rows[domain]
        if len(rows) == len(values):
            return values
        return values[torch.tensor(rows, device=values.device)]

    @property
    def waits(self) -> bool:
        """Whether the norms of other ranks are still missing."""
        return self.ranks is not None and self._all is None

    def sync_ranks(self) -> None:
        """Exchange norms with the other ranks, if there are any; all ranks call it, once."""
        if self.ranks is not None and self._all is None:
            self._all = self.ranks.exchange(
                self.step,
                self._all_norms(),
                self._effective,
                self._domains,
            )

    def counted_sizes(self) -> list[int]:
        """Return the sizes of this rank's micro-batches, without those that will be skipped."""
        if self.policy.nonfinite != "skip":
            return self._sizes
        finite = self._all_norms().isfinite().tolist()
        return [size for size, counts in zip(self._sizes, finite, strict=True) if counts]

    def note_examples(self, examples: int, largest: int) -> None:
        """Note how many weighted examples of all ranks count, and their largest micro-batch."""
        self._is_weighted = True
        self._examples_of_all, self._largest_of_all = examples, largest

    def domains_of_examples(self, key: Callable[[Hashable], int]) -> list[int]:
        """Return the key of each example's domain."""
        pairs = zip(self._domains, self._sizes, strict=True)
        return [found for domain, size in pairs for found in [key(domain)] * size]

    def norms_of_all(self) -> Tensor:
        """Return the norms of all micro-batches, in the order they were added."""
        return self._all_norms()

    def example_losses(self) -> Tensor:
        """Return a loss for each example, that of its micro-batch if it has none of its own.

        On the host, since only rules that remember ask for them.
        """
        self._all_norms()
        if not self._found:
            return torch.zeros(0, dtype=torch.float64)
        found = self._found[0]
        if found.example_losses is not None:
            return found.example_losses.cpu().double()  # in this order: MPS has no float64
        assert found.losses is not None
        return found.losses.cpu().double().repeat_interleave(torch.tensor(self._sizes))

    def weigh(self, domain: Hashable) -> Weighting:
        """Apply the rule to one domain; all its micro-batches must have been added."""
        if self._all is None:
            return self._weighting(domain)
        key = domain_key(domain)
        found, mine = self._weighting(key), self._all.mine_of(key)
        return Weighting(found.weights[mine], found.bound, found.skipped[mine])

    def _weighting(self, name: Hashable) -> Weighting:
        """Return the weighting of a domain over all ranks, which know domains by their keys."""
        if name not in self._weightings:
            norms, sizes = self._norms_and_sizes(name)
            policy = self.policy
            self._weightings[name] = apply(policy.rule, norms, sizes, policy.nonfinite)
        return self._weightings[name]

    def _norms_and_sizes(self, name: Any) -> tuple[Tensor, Tensor]:
        if self._all is None:
            return self.norms(name), self.sizes(name)
        rows = self._all.rows(name)
        return self._all.norms[rows], self._all.sizes[rows]

    def _names(self) -> Sequence[Hashable]:
        """Return the domains of all ranks: labels, or keys if there are several ranks."""
        return list(self._rows) if self._all is None else self._all.keys

    def coefficients(self) -> Tensor:
        """Return the factor of each micro-batch's gradient in the result."""
        shares = self._gather(lambda domain: self.weigh(domain).weights * self.sizes(domain))
        return shares / self.divisor()

    def divisor(self) -> Tensor:
        """Return the divisor of sum_j size_j w_j g_j: the total size for the mean, b for the sum.

        Skipped micro-batches do not count, so every domain must be complete by now.
        """
        parts = [
            (self._norms_and_sizes(name)[1] * ~self._weighting(name).skipped).sum()
            for name in self._names()
        ]
        total = torch.stack(parts).sum() + self._poison()
        if self._is_weighted:
            return self._weighted_divisor(total)
        if self.policy.reduction == "mean":
            return total.clamp(min=1)  # nothing left: the gradient is zero anyway
        if self._all is None:
            sizes = self.counted_sizes()
        else:
            counted = self._all.sizes
            if self.policy.nonfinite == "skip":
                counted = counted[self._all.norms.isfinite()]
            sizes = counted.long().tolist()
        largest, examples = max(sizes, default=1), max(1, sum(sizes))
        size = min(self.policy.microbatch_size or largest, examples)
        return torch.full_like(total, size) + self._poison()

    def _weighted_divisor(self, total: Tensor) -> Tensor:
        """Return the divisor for weighted examples, given the total of their weights.

        It is at least a thousandth of the examples: a step in which nearly all are held back must
        not consist of the few weights that are left.
        """
        examples = self._examples_of_all or sum(self._sizes)
        total = total.clamp(min=max(examples, 1) / 1000)
        if self.policy.reduction == "mean":
            return total
        largest = self._largest_of_all or max(self._sizes, default=1)
        size = min(self.policy.microbatch_size or largest, max(examples, 1))
        return total * (size / max(examples, 1))

    def _poison(self) -> Tensor | float:
        """Return NaN if a nonfinite norm must spoil every domain, else 0.

        Its own domain gets NaN from the rule's weights already.
        """
        norms = self._all_norms() if self._all is None else self._all.norms
        if self.policy.nonfinite != "propagate" or len(self._names()) < 2:
            return 0.0
        return (norms * 0).sum()  # NaN if any norm is not finite

    def overflowed(self, scale: float) -> bool:
        """Whether skipped gradients are due to the loss scale: their losses are finite.

        Valid after `leave_out`. With a scale of 1 or less there is nothing to lower.
        """
        if not self.left_out or scale <= 1:
            return False
        losses = self._found[0].losses if self._found else None
        return losses is None or bool(losses[self.left_out].isfinite().any())

    def leave_out(self) -> list[int]:
        """Return the micro-batches to skip, or raise, depending on the policy.

        Reads the device once, with "propagate" not at all. If one rank raises, all do.
        """
        if self.policy.nonfinite == "propagate":
            return []
        if self._sizes:
            flags = self._gather(lambda domain: self.weigh(domain).skipped)
            self.left_out = [row for row, flag in enumerate(flags.tolist()) if flag]
        if self.policy.nonfinite == "raise":
            if self.left_out:
                raise NonfiniteGradientError(self._describe(self.left_out[0]))
            self._raise_for_others()
        return self.left_out

    def _raise_for_others(self) -> None:
        if self._all is None:
            return
        finite = self._all.norms.isfinite().tolist()
        if not all(finite):
            rank, row = self._all.place(finite.index(False))
            raise NonfiniteGradientError(
                f"Step {self.step}: the gradient of micro-batch {row} of rank {rank} is not finite "
                "(the log of that rank names the examples). `.grad` is unchanged."
            )

    def noise(self, norm: Tensor) -> Noise:
        """Return how noisy the weighted gradients of all ranks are, given the norm of the result.

        Every domain must be complete by now.
        """
        parts = [self._energy(name) for name in self._names()]
        energy, count, total = torch.stack(parts).sum(0).to(norm.device, norm.dtype)
        return Noise.estimate(energy, count, total, norm * self.divisor().to(norm) / total)

    def domain_noise(self) -> dict[Hashable, Noise]:
        """Return the same for each domain whose sum is known; norms must be unscaled by now."""
        found = {}
        for domain, norm in self.domain_norms.items():
            energy, count, total = self._energy(domain).to(norm.device, norm.dtype)
            found[domain] = Noise.estimate(energy, count, total, norm / total)
        return found

    def _energy(self, name: Hashable) -> Tensor:
        """Return sum_j size_j |w_j g_j|^2 of a domain, how many count, and their sizes."""
        norms, sizes = self._norms_and_sizes(name)
        found = self._weighting(name)
        counts = (sizes > 0) & ~found.skipped  # those of size 0 are padding
        squares = torch.where(counts, sizes * (found.weights * norms).square(), 0.0)
        return torch.stack([squares.sum(), counts.sum(), (sizes * counts).sum()])

    def update_rule(self) -> None:
        """Show the norms of the finished step to a rule that carries state."""
        rule = self.policy.rule
        for name in self._names() if type(rule).observe is not Rule.observe else ():
            norms, sizes = self._norms_and_sizes(name)
            rule.observe(countable(norms, sizes), sizes)

    def outcome(self, engine: str, notes: tuple[str, ...]) -> Outcome:
        """Return what the step did; nothing is changed by it."""
        skipped = self._gather(lambda domain: self.weigh(domain).skipped).bool()
        norms, poison = self._all_norms(), self._poison()
        sizes = torch.tensor(self._sizes, dtype=norms.dtype, device=norms.device)
        weights = self._gather(lambda domain: self.weigh(domain).weights + poison)
        if self._is_weighted:
            weights = weights * (self._gather(self.sizes) / sizes)
        losses = self._found[0].losses if self._found else None
        return Outcome(
            step=self.step,
            loss=None if losses is None else _mean_loss(losses, sizes * ~skipped),
            losses=losses,
            example_losses=self._found[0].example_losses if self._found else None,
            norms=norms,
            weights=weights,
            bounds=self._gather(
                lambda domain: (self.weigh(domain).bound + poison).expand(len(self._rows[domain]))
            ),
            sizes=sizes.long(),
            skipped=skipped,
            domains=tuple(self._domains),
            ids=tuple(self._ids),
            engine=engine,
            notes=notes,
        )

    def _gather(self, of_domain: Callable[[Hashable], Tensor]) -> Tensor:
        """Concatenate vectors of all domains, in the order of the micro-batches."""
        if not self._rows:  # a rank without examples
            return torch.zeros(0)
        if len(self._rows) == 1:
            return of_domain(self._domains[0])
        together = torch.cat([of_domain(domain) for domain in self._rows])
        rows = [row for rows in self._rows.values() for row in rows]
        if rows == sorted(rows):
            return together
        return together[torch.tensor(rows, device=together.device).argsort()]

    def _describe(self, row: int) -> str:
        ids, domain = self._ids[row], self._domains[row]
        shown = ", ".join(repr(i) for i in ids[:8]) + (", ..." if len(ids) > 8 else "")
        domain = "" if domain is None else f" of domain {domain!r}"
        norm = self._all_norms()[row].item()
        return (
            f"Step {self.step}: the gradient of micro-batch {row}{domain}, examples {shown}, has "
            f"norm {norm} ({len(self.left_out)} of {len(self)} micro-batches are not finite). "
            "`.grad` is unchanged. Check these examples, or skip such micro-batches with "
            'nonfinite="skip".'
        )


def _ignore(loss: Tensor | None, size: int) -> None:
    """Do nothing with a loss."""


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the parts, or return None if one is missing."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if len(found) == len(parts) else None


def _mean_loss(losses: Tensor, shares: Tensor) -> Tensor:
    counted = torch.where(shares > 0, losses.to(shares.dtype), 0.0)
    return (counted * shares).sum() / shares.sum().clamp(min=1)
