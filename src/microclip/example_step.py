"""Between rules that weight examples and the engines: weights before a step, losses after it.

Engines see only micro-batches with weights (`ExampleWeights`), whatever the rule. Ids become keys
here; after the step, what all ranks saw is shown to the rule. Knows nothing of models or gradients.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from microclip.engines.step_record import StepRecord, domain_key
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


class ExampleIds:
    """The ids that a Clipper has been given, which must tell examples apart."""

    def __init__(self, rule: ExampleRule) -> None:
        self._rule = rule
        self._kind = ""
        self._example: Any = None  # an id of that kind
        self._first: float | None = None  # the sum of the first example's numbers, if ids count

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
        if self._kind and kind != self._kind:
            raise TypeError(
                f"ids were of type {self._kind} so far, such as {self._example!r}, but are now of "
                f"type {kind}, such as {names[0]!r}: the rule would not recognize its examples."
            )
        self._kind, self._example = kind, names[0]
        if step < 2 and self._rule.needs_ids:
            self._refuse_positions(microbatches, names, step)
        return keys

    def _refuse_positions(self, microbatches: MicrobatchList, names: list[Any], step: int) -> None:
        """Refuse ids that number the examples of each batch anew."""
        order = microbatches.order
        counts = [name for _, name in sorted(zip(order, names, strict=True))]
        if counts != list(range(len(names))):
            self._first = None
            return
        leaf = next((leaf for leaf in microbatches.leaves if leaf.dim() > 0), None)
        first = 0.0 if leaf is None else float(leaf.select(0, 0).detach().double().sum())
        if step > 0 and self._first is not None and first != self._first:
            raise ValueError(
                f"ids are 0 to {len(names) - 1} again in the second step, but the examples are "
                "others: these are positions in the batch, which do not tell examples apart. "
                f"{HOW_TO_ADD_IDS}"
            )
        self._first = first


class ExampleStep:
    """The examples of one step: their weights, then what was seen of them."""

    def __init__(self, rule: ExampleRule, ids: ExampleIds, step: int) -> None:
        self._rule, self._ids, self._step = rule, ids, step
        self._parts: list[tuple[Tensor, ExampleWeights, list[int]]] = []

    def weigh(
        self,
        microbatches: MicrobatchList,
        ids: Ids | None,
        are_required: bool,
        scales: Tensor | None = None,
    ) -> MicrobatchList:
        """Return the micro-batches with the weights that the rule gives their examples.

        `scales` is what losses are multiplied by before anyone sees them, if they are.
        """
        keys = self._ids.keys(microbatches, ids, self._step)
        rule, order = self._rule, microbatches.order
        if rule.needs_losses:
            empty = torch.zeros(0, dtype=torch.int64)
            weights = ExampleWeights(
                None, len(order), lambda losses: self._checked(rule.weigh(empty, losses), losses)
            )
        else:
            found = self._checked(rule.weigh(keys, None), keys)
            values = torch.empty(len(order), dtype=torch.float64)
            values[order] = found
            weights = ExampleWeights(values, len(order))
        weights.are_required = are_required
        weights.leaves_losses = rule.needs_norms
        if scales is not None:
            weights.scales = scales.detach().double().cpu()
        self._parts.append((keys, weights, order))
        return microbatches.with_weights(weights)

    def forget_last(self) -> None:
        """Drop what was weighted last, because it is cut in another way."""
        self._parts.pop()

    def _checked(self, weights: Tensor, of: Tensor) -> Tensor:
        """Return usable weights, or raise with what the rule returned instead."""
        if not isinstance(weights, Tensor) or weights.shape != of.shape:
            shown = tuple(weights.shape) if isinstance(weights, Tensor) else repr(weights)
            raise ValueError(
                f"{self._rule!r} must return one weight for each of {len(of)} examples from "
                f"weigh(), but returned {shown}."
            )
        weights = weights.detach().double().cpu()
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise ValueError(
                f"{self._rule!r} must return finite weights of 0 or more from weigh(), but "
                f"returned {weights.tolist()[:8]}."
            )
        return weights

    def weights(self) -> Tensor:
        """Return the weights of all examples so far, in the order of the record."""
        found = [weights.values[order] for _, weights, order in self._parts]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)

    def gather(self, record: StepRecord, ranks: Ranks | None) -> Seen:
        """Return what was seen of the examples of all ranks; each of them calls it once."""
        keys = torch.cat([keys for keys, _, _ in self._parts] or [torch.zeros(0).long()])
        domains = torch.tensor(record.domains_of_examples(domain_key), dtype=torch.int64)
        scales = torch.cat([w.scales[order] for _, w, order in self._parts] or [torch.zeros(0)])
        columns = [record.example_losses().cpu() / scales, self.weights()]
        if self._rule.needs_norms:
            columns.append(record.norms_of_all().double().cpu())
        if ranks is not None and ranks.count > 1:
            rows = [keys, domains, *(column.view(torch.int64) for column in columns)]
            keys, domains, *bits = ranks.gather_examples(self._step, torch.stack(rows))
            columns = [column.contiguous().view(torch.float64) for column in bits]
        record.note_examples(True, len(keys))
        losses, weights, *norms = columns
        return Seen(self._step, keys, losses, weights, domains, norms[0] if norms else None)
