"""The record of one step: the norms as they come in, the rule's verdict once they are all there.

The only room where norms, sizes and domains meet the rule, shared by all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from microclip.distributed.domains import key
from microclip.microbatches import Cuts, Microbatch
from microclip.outcome import Outcome
from microclip.rules import Nonfinite, Rule, Verdict, apply, countable

if TYPE_CHECKING:
    from microclip.distributed.ranks import Everyone, Ranks

Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


class NonfiniteGradientError(ArithmeticError):
    """A micro-batch gradient holds NaN or inf, and the policy is to raise."""


@dataclass(frozen=True)
class Policy:
    """What a user asked for, as far as engines need to know it."""

    rule: Rule
    microbatch_size: int | None
    reduction: Reduction
    nonfinite: Nonfinite


@dataclass(frozen=True)
class _Found:
    """What was found of some neighbouring micro-batches."""

    norms: Tensor
    losses: Tensor | None
    example_losses: Tensor | None


class Tally:
    """What is known of the micro-batches of one step."""

    def __init__(self, policy: Policy, step: int, ranks: Ranks | None = None) -> None:
        self.policy = policy
        self.step = step
        self.ranks = ranks  # None: this process has the whole mini-batch
        self._everyone: Everyone | None = None
        # of each micro-batch
        self._sizes: list[int] = []
        self._domains: list[Hashable] = []
        self._ids: list[tuple[Hashable, ...]] = []
        self._found: list[_Found] = []
        self._rows: dict[Hashable, list[int]] = {}
        self._verdicts: dict[Hashable, Verdict] = {}
        self._sizes_of: dict[Hashable, Tensor] = {}
        self.left_out: list[int] = []
        self.on_loss: Callable[[Tensor, int], None] = _nothing  # is shown losses with their graphs

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def examples(self) -> int:
        """How many examples have been seen."""
        return sum(self._sizes)

    def add(
        self, microbatch: Microbatch, norm: Tensor, loss: Tensor | None, each: Tensor | None = None
    ) -> None:
        """Record a micro-batch; its batch is not kept."""
        found = _Found(norm.view(1), None if loss is None else loss.view(1), each)
        self._record([microbatch.size], [microbatch.domain], [microbatch.ids], found)

    def extend(self, cuts: Cuts, norms: Tensor, losses: Tensor | None, each: Tensor | None) -> None:
        """Record several micro-batches at once."""
        self._record(cuts.sizes, cuts.domains, cuts.ids, _Found(norms, losses, each))

    def _record(
        self,
        sizes: list[int],
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
        self._domains += domains
        self._ids += ids
        self._found.append(found)

    def norms(self, domain: Hashable) -> Tensor:
        """Return the norms of one domain's micro-batches."""
        return self._of(domain, self._all_norms())

    def sizes(self, domain: Hashable) -> Tensor:
        """Return the sizes of one domain's micro-batches, as numbers to calculate with."""
        norms, rows = self._all_norms(), self._rows[domain]
        found = self._sizes_of.get(domain)
        if found is None or len(found) != len(rows):
            sizes = [float(self._sizes[row]) for row in rows]
            found = torch.tensor(sizes, dtype=norms.dtype, device=norms.device)
            self._sizes_of[domain] = found
        return found

    def _all_norms(self) -> Tensor:
        if len(self._found) > 1:  # joined once, not whenever they are asked for
            each = [found.example_losses for found in self._found]
            losses = [found.losses for found in self._found]
            norms = torch.cat([found.norms for found in self._found])
            self._found = [_Found(norms, _joined(losses), _joined(each))]
        return self._found[0].norms if self._found else torch.zeros(0)

    def _of(self, domain: Hashable, values: Tensor) -> Tensor:
        """Return one domain's entries of a row with one for each micro-batch."""
        rows = self._rows[domain]
        if len(rows) == len(values):
            return values
        return values[torch.tensor(rows, device=values.device)]

    @property
    def waits(self) -> bool:
        """Whether other ranks have yet to tell their norms."""
        return self.ranks is not None and self._everyone is None

    def settle(self) -> None:
        """Hear the norms of the other ranks, if there are any; all ranks call it, once."""
        if self.ranks is not None and self._everyone is None:
            self._everyone = self.ranks.exchange(
                self.step,
                self._all_norms(),
                self._sizes,
                self._domains,
            )

    def judge(self, domain: Hashable) -> Verdict:
        """Let the rule speak on one domain; all its micro-batches must have been added."""
        everyone = self._everyone
        if everyone is None:
            return self._verdict(domain)
        verdict = self._verdict(key(domain))
        chosen = everyone.mine_of(key(domain))
        return Verdict(verdict.weights[chosen], verdict.bound, verdict.skipped[chosen])

    def _verdict(self, name: Hashable) -> Verdict:
        """Return the verdict on a domain over all ranks; among ranks, a domain goes by its key."""
        if name not in self._verdicts:
            norms, sizes = self._evidence(name)
            policy = self.policy
            self._verdicts[name] = apply(policy.rule, norms, sizes, policy.nonfinite)
        return self._verdicts[name]

    def _evidence(self, name: Any) -> tuple[Tensor, Tensor]:
        if self._everyone is None:
            return self.norms(name), self.sizes(name)
        rows = self._everyone.rows(name)
        return self._everyone.norms[rows], self._everyone.sizes[rows]

    def _names(self) -> Sequence[Hashable]:
        """Return all domains, on all ranks."""
        return list(self._rows) if self._everyone is None else self._everyone.keys

    def coefficients(self) -> Tensor:
        """Return what each micro-batch's gradient is multiplied with in the result."""
        shares = self._gather(lambda domain: self.judge(domain).weights * self.sizes(domain))
        return shares / self.divisor()

    def divisor(self) -> Tensor:
        """Return what sum_j size_j w_j g_j is divided by: total size for the mean, b for the sum.

        Every domain's verdict is spoken by then: what was skipped is not part of the total.
        """
        parts = [
            (self._evidence(name)[1] * ~self._verdict(name).skipped).sum() for name in self._names()
        ]
        total = torch.stack(parts).sum() + self._poison()
        if self.policy.reduction == "mean":
            return total.clamp(min=1)  # nothing left: the gradient is zero, whatever divides it
        if self._everyone is None:
            sizes = [size for row, size in enumerate(self._sizes) if row not in self.left_out]
        else:
            counted = self._everyone.sizes
            if self.policy.nonfinite == "skip":
                counted = counted[self._everyone.norms.isfinite()]
            sizes = counted.long().tolist()
        largest, examples = max(sizes, default=1), max(1, sum(sizes))
        size = min(self.policy.microbatch_size or largest, examples)
        return torch.full_like(total, size) + self._poison()

    def _poison(self) -> Tensor | float:
        """Return NaN if what is not finite is to reach every domain, else 0.

        Within its own domain it does so through the verdict.
        """
        norms = self._all_norms() if self._everyone is None else self._everyone.norms
        if self.policy.nonfinite != "propagate" or len(self._names()) < 2:
            return 0.0
        return (norms * 0).sum()  # NaN if any norm is not finite

    def overflowed(self, scale: float) -> bool:
        """Whether gradients that are left out are the loss scale's fault: their losses are finite.

        Asked after `leave_out`. With a scale of 1 or less there is nothing left to lower.
        """
        if not self.left_out or scale <= 1:
            return False
        losses = self._found[0].losses if self._found else None
        return losses is None or bool(losses[self.left_out].isfinite().any())

    def leave_out(self) -> list[int]:
        """Return the micro-batches to leave out, or raise, as the policy has it.

        Reads the device once; under "propagate" not at all. All ranks raise alike.
        """
        if self.policy.nonfinite == "propagate":
            return []
        if self._sizes:
            flags = self._gather(lambda domain: self.judge(domain).skipped)
            self.left_out = [row for row, flag in enumerate(flags.tolist()) if flag]
        if self.policy.nonfinite == "raise":
            if self.left_out:
                raise NonfiniteGradientError(self._describe(self.left_out[0]))
            self._raise_for_others()
        return self.left_out

    def _raise_for_others(self) -> None:
        if self._everyone is None:
            return
        bad = (~self._everyone.norms.isfinite()).nonzero().flatten().tolist()
        if bad:
            rank, row = self._everyone.place(bad[0])
            raise NonfiniteGradientError(
                f"Step {self.step}: the gradient of micro-batch {row} of rank {rank} is not finite "
                "(its own log names the examples). `.grad` is as it was."
            )

    def outcome(self, engine: str, notes: tuple[str, ...]) -> Outcome:
        """Return what the step did, and let the rule take note of it."""
        rule = self.policy.rule
        for name in self._names() if type(rule).observe is not Rule.observe else ():
            evidence, counts = self._evidence(name)
            rule.observe(countable(evidence), counts)
        sizes = self._gather(self.sizes)
        skipped = self._gather(lambda domain: self.judge(domain).skipped).bool()
        norms, poison = self._all_norms(), self._poison()
        losses = self._found[0].losses if self._found else None
        return Outcome(
            step=self.step,
            loss=None if losses is None else _mean_loss(losses, sizes * ~skipped),
            losses=losses,
            example_losses=self._found[0].example_losses if self._found else None,
            norms=norms,
            weights=self._gather(lambda domain: self.judge(domain).weights + poison),
            bounds=self._gather(
                lambda domain: (self.judge(domain).bound + poison).expand(len(self._rows[domain]))
            ),
            sizes=sizes.long(),
            skipped=skipped,
            domains=tuple(self._domains),
            ids=tuple(self._ids),
            engine=engine,
            notes=notes,
        )

    def _gather(self, of_domain: Callable[[Hashable], Tensor]) -> Tensor:
        """Put vectors that exist per domain into one, in the order of the micro-batches."""
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
            f"norm {norm} ({len(self.left_out)} of {len(self)} micro-batches are not "
            "finite). `.grad` is as it was. Look at these examples, or leave such micro-batches "
            'out with nonfinite="skip".'
        )


def _nothing(loss: Tensor, size: int) -> None:
    """Look at no loss."""


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the parts in a row if none is missing."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if len(found) == len(parts) else None


def _mean_loss(losses: Tensor, shares: Tensor) -> Tensor:
    counted = torch.where(shares > 0, losses.to(shares.dtype), 0.0)
    return (counted * shares).sum() / shares.sum().clamp(min=1)
