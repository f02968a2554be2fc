"""Columns of a data set that say what an example is called and where it comes from.

A collator makes tensors of what it knows and drops or chokes on the rest, texts above all. So these
columns are taken out of the examples before they are collated and put into the batch afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from microclip.microbatches import tensors_of

EXAMPLES = "microclip_examples"  # how many a batch was made of, where its rows are not examples
WIDTH = 256  # of a text that is sent from rank to rank, in bytes
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "position_ids")


class ColumnCollator:
    """Calls another collator without some columns, and puts them into its batch.

    Args:
        collator: The one that makes the batch.
        columns: Names of columns; those the model takes as inputs are left where they are.
        given: Names of those that the model takes as inputs.
        hide: Whether the collator must not see the columns.
        show: Whether they go into the batch: in training, not in evaluation.
        as_tensors: Whether texts go as tensors too, where one rank loads for all and sends.
    """

    def __init__(
        self,
        collator: Callable[[Any], Any],
        columns: tuple[str, ...],
        given: frozenset[str],
        *,
        hide: bool,
        show: bool,
        as_tensors: bool,
    ) -> None:
        self.collator = collator
        self.columns, self.given = columns, given
        self.hide, self.show, self.as_tensors = hide, show, as_tensors

    def __getattr__(self, name: str) -> Any:
        if name == "collator":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.collator, name)

    def around(self, collator: Callable[[Any], Any]) -> ColumnCollator:
        """Return the same around another collator."""
        other = copy(self)
        other.collator = collator
        return other

    def __call__(self, features: Any) -> Any:
        """Make a batch."""
        own = [column for column in self.columns if column not in self.given]
        values = self._values(features, own) if self.show else {}
        if self.hide and own:
            features = [
                {name: value for name, value in _fields(feature).items() if name not in own}
                for feature in features
            ]
        batch = self.collator(features)
        if not isinstance(batch, Mapping):
            if own and self.show:
                raise TypeError(
                    f"The data collator returned a {type(batch).__name__}, but columns "
                    f"({', '.join(own)}) can be handed on in a dict alone."
                )
            return batch
        for column in own:
            if column in batch:
                batch.pop(column)  # type: ignore[attr-defined]
        for column, found in values.items():
            batch[column] = found  # type: ignore[index]
        if self.show and not _rows_are_examples(batch, features):
            batch[EXAMPLES] = len(features)  # type: ignore[index]
        return batch

    def _values(self, features: Any, columns: list[str]) -> dict[str, Any]:
        found = {}
        for column in columns:
            check_column(column, list(_fields(features[0])))
            values = [_plain(column, _fields(feature).get(column)) for feature in features]
            numbers = all(type(value) is int for value in values)
            # a tensor goes wherever tensors go; texts are handed on as they are
            found[column] = torch.tensor(values) if numbers else values
            if self.as_tensors and not numbers:
                found[column] = written(column, values)
        return found


def check_column(column: str, there: list[str]) -> None:
    """Refuse a column that the data set does not have."""
    if column not in there:
        names = ", ".join(repr(name) for name in there) or "no names at all"
        raise ValueError(
            f"The training data has no column {column!r}, which was given as domain_column or "
            f"id_column. There are {names}."
        )


def written(column: str, texts: list[Any]) -> Tensor:
    """Return texts as a tensor of bytes, all of one width."""
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"Column {column!r} must hold texts or integers, but has {texts[0]!r}.")
    rows = [text.encode() for text in texts]
    if max(map(len, rows)) > WIDTH or any(b"\0" in row for row in rows):
        longest = max(texts, key=len)
        raise ValueError(
            f"Column {column!r} has a text of more than {WIDTH} bytes, which cannot be sent from "
            f"rank to rank: {longest!r}. Use shorter names, or let every rank load its own data: "
            'accelerator_config={"dispatch_batches": False}.'
        )
    return torch.tensor([list(row.ljust(WIDTH, b"\0")) for row in rows], dtype=torch.uint8)


def read(values: Any) -> Any:
    """Return what was written, and everything else as it is."""
    if isinstance(values, Tensor) and values.dtype == torch.uint8 and values.dim() == 2:
        return [bytes(row).rstrip(b"\0").decode() for row in values.tolist()]
    return values


def named_in(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of what a model takes."""
    return frozenset(inspect.signature(forward).parameters) | {"labels", "label", "label_ids"}


def _plain(column: str, value: Any) -> Hashable:
    if (isinstance(value, Tensor) and value.numel() == 1) or (
        isinstance(value, np.ndarray | np.generic) and value.size == 1
    ):
        value = value.item()
    if not isinstance(value, str | int | float | bytes):
        raise ValueError(
            f"Column {column!r} must hold one text or number per example, but one of them is "
            f"{value!r}."
        )
    return value


def _fields(feature: Any) -> Mapping[str, Any]:
    if isinstance(feature, Mapping):
        return feature
    return vars(feature) if hasattr(feature, "__dict__") else {}


def _rows_are_examples(batch: Mapping[str, Any], features: Any) -> bool:
    """Whether a batch has a row for each example, or for each that was not dropped."""
    rows = {len(leaf) for _, leaf in tensors_of(dict(batch))}
    if not rows or rows == {len(features)}:
        return True
    packed = any(name in batch for name in PACKED)
    if packed or len(rows) > 1:
        return not packed  # else it cannot be cut, which says so itself
    return min(rows) < len(features) and (min(rows) > 1 or not _in_one_row(batch, features))


def _in_one_row(batch: Mapping[str, Any], features: Any) -> bool:
    """Whether texts were put one after the other; if only one is left of them, it is shorter."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor):
        return False
    if any("input_ids" not in _fields(feature) for feature in features):
        return True
    return tokens.shape[-1] >= sum(len(_fields(feature)["input_ids"]) for feature in features)
