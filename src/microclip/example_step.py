"""Between rules that weight examples and the engines: weights before a step, losses after it.

Engines see only micro-batches with weights (`ExampleWeights`), whatever the rule. Ids become keys
here; after the step, what all ranks saw is shown to the rule. Knows nothing of models or gradients.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microclip.engines.rank_exchange import domain_key
from microclip.engines.step_record import StepRecord
from microclip.microbatches import ExampleWeights, Ids, MicrobatchList
from microclip.rules import ExampleRule, Seen
from microclip.rules.example_table import keys_of

if TYPE_CHECKING:
    from microclip.distributed.ranks import Ranks

HOW_TO_ADD_IDS = (
    "Pass ids= with something that tells every example of the data set apart, such as its position "
    "in it: clipper.backward(loss_fn, batch, ids=indices), with a Dataset whose __getitem__(i) "
    "returns i as well."
)


POSITION_CHECKS = 8  # first steps in which ids are compared with positions in the batch
LEAST = 1e-30  # smaller weights count as 0: their inverses would overflow


class ExampleIds:
    """The ids that a Clipper has been given, which must tell examples apart."""

    def __init__(self, rule: ExampleRule) -> None:
        self._rule = rule
        self.kind = ""  # of the ids of finished steps
        self._example: Any = None  # an id of that kind
        self._latest: tuple[str, Any] = ("", None)  # of a step that may yet be abandoned
        self._first: list[float] | None = None  # sums of the first example's numbers, if ids count

    def keys(self, microbatches: MicrobatchList, ids: Ids | None, step: int) -> Tensor:
        """Return the keys of examples, micro-batch after micro-batch; refuse useless ids."""
        names = list(chain.from_iterable(microbatches.ids))
        if not self._rule.needs_ids and ids is None:
            return torch.zeros(len(names), dtype=torch.int64)
        if ids is None:
            raise ValueError(
                f"{type(self._rule).__name__} remembers every example, but this batch has no ids. "
                f"{HOW_TO_ADD_IDS}"
            )
        keys, kind = keys_of(names)
        if self.kind and kind != self.kind:
            such = "" if self._example is None else f", such as {self._example!r},"
            raise TypeError(
                f"ids were of type {self.kind} so far{such} but are now of type {kind}, such as "
                f"{names[0]!r}: the rule would not recognize its examples."
            )
        self._latest = kind, names[0]
        if step < POSITION_CHECKS and self._rule.needs_ids:
            self._refuse_positions(microbatches, names, step)
        return keys

    @property
    def latest_kind(self) -> str:
        """The type of the ids of the step in progress."""
        return self._latest[0]

    def accept(self) -> None:
        """Take note of the ids of a finished step."""
        if self._latest[0]:
            self.kind, self._example = self._latest

    def _refuse_positions(self, microbatches: MicrobatchList, names: list[Any], step: int) -> None:
        """Refuse ids that start over in every batch."""
        order = microbatches.order
        counts = [name for _, name in sorted(zip(order, names, strict=True))]
        if counts != list(range(len(names))):
            self._first = None
            return
        # labels, if there are any: inputs may be augmented anew in every step
        leaves = [leaf for leaf in microbatches.leaves if leaf.dim() > 0]
        leaves = [leaf for leaf in leaves if not leaf.is_floating_point()] or leaves
        first = [
            leaf.select(0, 0).detach().cpu().double().sum().nan_to_num().item() for leaf in leaves
        ]
        if step > 0 and self._first is not None and first != self._first:
            raise ValueError(
                f"ids are 0 to {len(names) - 1} again in step {step}, but the examples are "
                "different: these are positions in the batch, which do not tell examples apart. "
                f"{HOW_TO_ADD_IDS}"
            )
        self._first = first


class ExampleStep:
    """The examples of one step: their weights, then what was seen of them."""

    def __init__(self, rule: ExampleRule, ids: ExampleIds, step: int) -> None:
        self._rule, self._ids, self._step = rule, ids, step
        self._parts: list[tuple[Tensor, ExampleWeights, list[int]]] = []
        # size and ids of what weighted_loss() returned last, until it is folded
        self.weighted_for: tuple[int, tuple[Any, ...]] | None = None

    def expect_weighted(self, size: int, names: tuple[Any, ...]) -> None:
        """Refuse the gradient of several examples that were not weighted beforehand."""
        found, self.weighted_for = self.weighted_for, None
        if size == 1 or found == (size, names) or self._rule.needs_norms:
            return
        name = type(self._rule).__name__
        reason = (
            f"this is the gradient of a plain mean of {size} losses"
            if found is None
            else "weighted_loss() was called for other examples than these"
        )
        raise ValueError(
            f"{name} weights examples, but {reason}. Call weighted_loss() before every fold(), "
            "with the same losses and ids: clipper.weighted_loss(losses, ids=ids).backward(); "
            "clipper.fold(loss=losses, ids=ids). To weight whole micro-batches instead, pass "
            "fold() their mean: loss=losses.mean()."
        )

    def weigh(
        self,
        microbatches: MicrobatchList,
        ids: Ids | None,
        are_required: bool,
        scales: Tensor | None = None,
    ) -> MicrobatchList:
        """Return the micro-batches with the weights that the rule gives their examples.

        `scales` are the factors that `loss_fn` multiplies its losses by, if it does.
        """
        keys = self._ids.keys(microbatches, ids, self._step)
        rule, order = self._rule, microbatches.order
        if rule.needs_losses:
            by_position = torch.empty_like(keys)
            by_position[order] = keys

            def from_losses(rows: list[int], losses: Tensor) -> Tensor:
                return self._checked(rule.weigh(by_position[rows], losses), losses)

            weights = ExampleWeights(None, len(order), from_losses)
        else:
            found = self._checked(rule.weigh(keys, None), keys)
            values = torch.empty(len(order), dtype=torch.float64)
            values[order] = found
            weights = ExampleWeights(values, len(order))
        weights.are_required = are_required
        weights.leaves_losses = rule.needs_norms
        if scales is not None:
            weights.scales = scales.detach().cpu().double()
        self._parts.append((keys, weights, order))
        return microbatches.with_weights(weights)

    def forget_last(self) -> None:
        """Forget the last batch, which will be cut differently."""
        self._parts.pop()

    def _checked(self, weights: Tensor, of: Tensor) -> Tensor:
        """Return usable weights, or raise with what the rule returned instead."""
        if not isinstance(weights, Tensor) or weights.shape != of.shape:
            found = f"one of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else ""
            raise ValueError(
                f"{self._rule!r} must return a tensor with one weight for each of {len(of)} "
                f"examples from weigh(), but returned {found or type(weights).__name__}."
            )
        weights = weights.detach().cpu().double()
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise ValueError(
                f"{self._rule!r} must return finite weights of 0 or more from weigh(), but "
                f"returned {weights.tolist()[:8]}."
            )
        return weights.where(weights >= LEAST, 0.0)

    def weights(self) -> Tensor:
        """Return the weights of all examples so far, in the order of the record."""
        found = [weights.values[order] for _, weights, order in self._parts]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)

    def gather(self, record: StepRecord, ranks: Ranks | None) -> Seen:
        """Return what all ranks saw of their examples; every rank calls it once per step."""
        keys = torch.cat([keys for keys, _, _ in self._parts] or [torch.zeros(0).long()])
        domains = torch.tensor(record.domains_of_examples(domain_key), dtype=torch.int64)
        scales = torch.cat([w.scales[order] for _, w, order in self._parts] or [torch.zeros(0)])
        columns = [record.example_losses() / scales, self.weights()]
        if self._rule.needs_norms:
            columns.append(record.norms_of_all().cpu().double())
        if ranks is not None and ranks.count > 1:
            rows = [keys, domains, *(column.view(torch.int64) for column in columns)]
            id_type = self._ids.latest_kind if self._parts else ""
            keys, domains, *bits = ranks.gather_examples(self._step, torch.stack(rows), id_type)
            columns = [column.contiguous().view(torch.float64) for column in bits]
        counted = record.counted_sizes()
        examples, largest = sum(counted), max(counted, default=0)
        if ranks is not None and ranks.count > 1:
            policy = record.policy
            examples = len(keys)
            if policy.reduction == "sum" or policy.nonfinite == "skip":
                mine = torch.tensor([[sum(counted)], [largest]])
                totals, sizes = ranks.gather_examples(self._step, mine)
                examples, largest = int(totals.sum()), int(sizes.max())
        self._ids.accept()
        record.note_examples(examples, largest)
        losses, weights, *norms = columns
        return Seen(self._step, keys, losses, weights, domains, norms[0] if norms else None)
