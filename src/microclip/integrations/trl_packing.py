"""Packed and padding-free batches of TRL's SFTTrainer, with one text per row again.

TRL packs a data set when the trainer is created, and drops all columns but tokens and labels. Here
ids and domains are packed with them, and the collator gets the texts of a packed row one by one.
Knows nothing of losses or gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from accelerate import PartialState
from datasets import Dataset  # type: ignore[import-untyped]
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from microclip.integrations.columns import check_column
from microclip.integrations.example_losses import IGNORE_INDEX
from microclip.rules import ExampleRule

TOKENS = ("input_ids", "labels")  # what TRL packs
LENGTHS = "seq_lengths"  # of the texts in a packed row


class TextCollator:
    """Takes packed rows apart into texts, and calls another collator with these.

    Args:
        collator: Makes a batch of texts.
        columns: Names of the columns that have one entry per text.
    """

    def __init__(self, collator: Callable[[Any], Any], columns: Sequence[str]) -> None:
        self.collator, self.columns = collator, columns

    def __call__(self, features: Any) -> Any:
        """Make a batch; as in a row without padding, no token predicts the first of a text."""
        batch = self.collator([text for row in features for text in self._texts(row)])
        batch["labels"][:, 0] = IGNORE_INDEX  # which some models' Trainers would count
        return batch

    def _texts(self, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if LENGTHS not in row:  # a text that was not packed
            yield row
            return
        lengths = [int(length) for length in row[LENGTHS]]
        if sum(lengths) != len(row["input_ids"]):
            raise ValueError(
                f"A packed row has {len(row['input_ids'])} tokens, but its texts have the lengths "
                f"{lengths}, together {sum(lengths)}."
            )
        for column in (name for name in self.columns if name in row):
            _check_entries(column, row[column], len(lengths))
        start = 0
        for number, length in enumerate(lengths):
            text = {name: row[name][start : start + length] for name in TOKENS if name in row}
            text |= {name: row[name][number] for name in self.columns if name in row}
            start += length
            if length:
                yield text


def is_padding_free(collator: Any) -> bool:
    """Whether a collator joins the texts of a batch, in the way that TRL's own does."""
    return isinstance(collator, DataCollatorForLanguageModeling) and collator.padding_free


def padding(collator: Any) -> Any:
    """Return the same collator, but one that pads."""
    other = copy(collator)
    other.padding_free = False
    return other


def pack_with_columns(dataset: Any, args: Any, columns: Sequence[str]) -> Any:
    """Pack a tokenized data set as TRL does, columns with one entry per text included.

    TRL packs lists that are as long as the text, so that is what a column is made for a while: its
    entry where a text begins, or one of the pieces that "bfd_split" cuts, and nothing elsewhere.
    """
    workers = {"num_proc": args.dataset_num_proc} if isinstance(dataset, Dataset) else {}
    state = PartialState()
    for column in columns if isinstance(dataset.column_names, list) else ():
        check_column(column, dataset.column_names)
    with state.main_process_first(), state.local_main_process_first():
        dataset = dataset.with_format(None).select_columns([*TOKENS, *columns])
        spread = {"columns": list(columns), "length": args.max_length}
        dataset = dataset.map(_spread, fn_kwargs=spread, **workers)
        if args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        dataset = pack_dataset(dataset, args.max_length, args.packing_strategy, dict(workers))
        dataset = dataset.map(_gather, fn_kwargs={"columns": list(columns)}, **workers)
    return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset


def refuse_cut_texts(
    strategy: str, columns: Mapping[str, str | None], rule: ExampleRule | None
) -> None:
    """Refuse ids and domains of texts, where packing puts pieces of several into one example."""
    if strategy != "wrapped":
        return
    names = [f"{name[:-1]}_column={column!r}" for name, column in columns.items() if column]
    if rule is not None and rule.needs_ids:
        names.append(f"rule={type(rule).__name__}()")
    if names:
        raise NotImplementedError(
            f'packing_strategy="wrapped" joins all texts and cuts them wherever a row is full, so '
            f"a row has pieces of several texts, but no id and no domain: {names[0]} is not "
            'possible. Use packing_strategy="bfd", or leave it out: an example is then a row.'
        )


def _spread(row: dict[str, Any], columns: list[str], length: int) -> dict[str, Any]:
    places = range(len(row["input_ids"]))
    return {name: [None if i % length else row[name] for i in places] for name in columns}


def _gather(row: dict[str, Any], columns: list[str]) -> dict[str, Any]:
    starts = [0]
    for length in row[LENGTHS][:-1]:
        starts.append(starts[-1] + length)
    return {name: [row[name][start] for start in starts] for name in columns}


def _check_entries(column: str, value: Any, count: int) -> None:
    if isinstance(value, str | bytes) or not hasattr(value, "__len__") or len(value) != count:
        raise ValueError(
            f"Column {column!r} of a packed row must be a list with one entry for each of its "
            f"{count} texts, but is {value!r}. Let the trainer pack the data set (packing=True), "
            "which takes care of it, or leave out the column."
        )
