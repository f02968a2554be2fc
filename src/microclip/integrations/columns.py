"""Columns of a data set with the ids and domains of its examples.

Collators turn what they know into tensors and drop or fail on the rest, strings above all. So these
columns are taken out of the examples before collating and added to the batch afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from microclip.batches import tensors_of

EXAMPLE_COUNT = "microclip_examples"  # added to a batch whose rows are not its examples
MAX_BYTES = 256  # of a string that is sent from rank to rank
PACKING_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "position_ids")


class ColumnCollator:
    """Calls another collator without some columns, and adds them to its batch.

    Args:
        collator: The collator that makes the batch.
        columns: Names of the columns. Those that are inputs of the model are left in place.
        model_inputs: Names of the model's inputs.
        hide: Whether to hide the columns from the collator.
        add_to_batch: Whether to add them to the batch: in training, not in evaluation.
        as_tensors: Whether to encode strings as tensors, for when one rank loads for all ranks.
    """

    def __init__(
        self,
        collator: Callable[[Any], Any],
        columns: tuple[str, ...],
        model_inputs: frozenset[str],
        *,
        hide: bool,
        add_to_batch: bool,
        as_tensors: bool,
    ) -> None:
        self.collator = collator
        self.columns, self.model_inputs = columns, model_inputs
        self.hide, self.add_to_batch, self.as_tensors = hide, add_to_batch, as_tensors

    def __getattr__(self, name: str) -> Any:
        if name == "collator":  # while unpickling
            raise AttributeError(name)
        return getattr(self.collator, name)

    def with_collator(self, collator: Callable[[Any], Any]) -> ColumnCollator:
        """Return a copy that calls another collator."""
        other = copy(self)
        other.collator = collator
        return other

    def __call__(self, features: Any) -> Any:
        """Make a batch."""
        extra = [column for column in self.columns if column not in self.model_inputs]
        values = self._values(features, extra) if self.add_to_batch else {}
        if self.hide and extra:
            features = [
                {name: value for name, value in _fields(feature).items() if name not in extra}
                for feature in features
            ]
        batch = self.collator(features)
        if not isinstance(batch, Mapping):
            if extra and self.add_to_batch:
                raise TypeError(
                    f"The data collator returned a {type(batch).__name__}, but the columns "
                    f"{', '.join(extra)} can be added to a dict only. Return a dict from it."
                )
            return batch
        for column in extra:
            if column in batch:
                batch.pop(column)  # type: ignore[attr-defined]
        for column, found in values.items():
            batch[column] = found  # type: ignore[index]
        if self.add_to_batch and not _rows_are_examples(batch, features):
            batch[EXAMPLE_COUNT] = len(features)  # type: ignore[index]
        return batch

    def _values(self, features: Any, columns: list[str]) -> dict[str, Any]:
        found = {}
        for column in columns:
            check_column(column, list(_fields(features[0])))
            values = [_scalar(column, _fields(feature).get(column)) for feature in features]
            numbers = all(type(value) is int for value in values)
            # integers go as a tensor, to be moved and gathered like one; strings stay a list
            found[column] = _integers(column, values) if numbers else values
            if self.as_tensors and not numbers:
                found[column] = encode_strings(column, values)
        return found


@contextmanager
def collating_columns(trainer: Any, columns: tuple[str, ...], add_to_batch: bool) -> Iterator[None]:
    """Inside the block, the collator of a transformers Trainer handles these columns."""
    model_inputs = forward_arguments(trainer.model.forward)
    trainer._set_signature_columns_if_needed()
    collator, signature = trainer.data_collator, trainer._signature_columns
    source = inspect.unwrap(getattr(collator, "func", collator))
    stock = str(getattr(source, "__module__", "")).startswith("transformers.")
    hide = trainer.args.remove_unused_columns or stock
    dispatch = trainer.accelerator.dispatch_batches
    if dispatch is None:
        dispatch = isinstance(trainer.train_dataset, IterableDataset)
    send = dispatch and trainer.accelerator.num_processes > 1
    trainer.data_collator = ColumnCollator(
        collator, columns, model_inputs, hide=hide, add_to_batch=add_to_batch, as_tensors=send
    )
    trainer._signature_columns = [*signature, *(columns if add_to_batch else ())]
    try:
        yield
    finally:
        trainer.data_collator, trainer._signature_columns = collator, signature


def check_column(column: str, there: list[str]) -> None:
    """Refuse a column that the data set does not have."""
    if column not in there:
        names = ", ".join(repr(name) for name in there) or "none with a name"
        raise ValueError(
            f"The training data has no column {column!r}, which was passed as domain_column or "
            f"id_column. Its columns: {names}."
        )


def encode_strings(column: str, texts: list[Any]) -> Tensor:
    """Return strings as a tensor of bytes, all padded to the same length."""
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"Column {column!r} must hold strings or integers, but has {texts[0]!r}.")
    rows = [text.encode() for text in texts]
    if max(map(len, rows)) > MAX_BYTES or any(b"\0" in row for row in rows):
        longest = max(texts, key=len)
        raise ValueError(
            f"Column {column!r} has a string that cannot be sent from rank to rank, because it is "
            f"longer than {MAX_BYTES} bytes or contains a null byte: {longest!r}. Use shorter "
            "strings, or let every rank load its own data: "
            'accelerator_config={"dispatch_batches": False}.'
        )
    return torch.tensor([list(row.ljust(MAX_BYTES, b"\0")) for row in rows], dtype=torch.uint8)


def decode_strings(values: Any) -> Any:
    """Undo `encode_strings`, and return everything else as it is."""
    if isinstance(values, Tensor) and values.dtype == torch.uint8 and values.dim() == 2:
        return [bytes(row).rstrip(b"\0").decode() for row in values.tolist()]
    return values


def forward_arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a model's inputs, labels included."""
    return frozenset(inspect.signature(forward).parameters) | {"labels", "label", "label_ids"}


def _integers(column: str, values: list[Any]) -> Tensor:
    for value in values:
        if not -(2**63) <= value < 2**63:
            raise ValueError(
                f"Column {column!r} has the integer {value}, which does not fit into 64 bits with "
                "a sign, as torch's integers have. Make it a column of strings: "
                f'data = data.cast_column("{column}", datasets.Value("string")).'
            )
    return torch.tensor(values)


def _scalar(column: str, value: Any) -> Hashable:
    if (isinstance(value, Tensor) and value.numel() == 1) or (
        isinstance(value, np.ndarray | np.generic) and value.size == 1
    ):
        value = value.item()
    if not isinstance(value, str | int | float | bytes):
        raise ValueError(
            f"Column {column!r} must hold one string or number per example, but one of them is "
            f"{value!r}."
        )
    return value


def _fields(feature: Any) -> Mapping[str, Any]:
    if isinstance(feature, Mapping):
        return feature
    return vars(feature) if hasattr(feature, "__dict__") else {}


def _rows_are_examples(batch: Mapping[str, Any], features: Any) -> bool:
    """Whether a batch has one row per example, or per example that was not dropped."""
    rows = {len(leaf) for _, leaf in tensors_of(dict(batch))}
    if not rows or rows == {len(features)}:
        return True
    packed = any(name in batch for name in PACKING_KEYS)
    if packed or len(rows) > 1:
        return not packed  # if rows differ, cutting the batch raises a clear error
    return min(rows) < len(features) and (min(rows) > 1 or not _is_concatenated(batch, features))


def _is_concatenated(batch: Mapping[str, Any], features: Any) -> bool:
    """Whether the texts were concatenated; if all but one were dropped, the row is shorter."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor):
        return False
    if any("input_ids" not in _fields(feature) for feature in features):
        return True
    return tokens.shape[-1] >= sum(len(_fields(feature)["input_ids"]) for feature in features)
