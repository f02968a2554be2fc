"""What follows from a review: ids to train on, new labels, files of both, or a cleaned data set.

Knows nothing about how verdicts were read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset

from microclip.dataset_ids import ids_in
from microclip.files import write_whole

KEEP, RELABEL, DROP = "keep", "relabel", "drop"
VERDICTS = (KEEP, RELABEL, DROP)

Id = int | str
Label = int | str
Format = Literal["text", "json", "parquet"]
ENDINGS = {"text": ("txt", "csv"), "json": ("json", "json"), "parquet": ("parquet", "parquet")}


@dataclass(frozen=True, eq=False)
class Review:
    """Verdicts on some of the examples of a run; all others are kept.

    Attributes:
        verdicts: "keep", "relabel" or "drop", by id.
        labels: The new labels of relabeled examples, by id.
        run_ids: All ids of the run, in ascending order; None if the review was read without it.
    """

    verdicts: Mapping[Id, str]
    labels: Mapping[Id, Label]
    run_ids: Sequence[Id] | None = None

    def __len__(self) -> int:
        return len(self.verdicts)

    def __repr__(self) -> str:
        counts = (f"{self.count(verdict)} {verdict}" for verdict in VERDICTS)
        return f"Review({', '.join(counts)})"

    def count(self, verdict: str) -> int:
        """Return how many examples have this verdict."""
        return sum(one == verdict for one in self.verdicts.values())

    @property
    def dropped(self) -> list[Id]:
        """The ids of examples to drop."""
        return [one for one, verdict in self.verdicts.items() if verdict == DROP]

    def kept_ids(self, all_ids: Iterable[Id] | None = None) -> list[Id]:
        """Return the ids of all examples that are not dropped.

        Args:
            all_ids: The ids of the whole data set, whose order is kept. By default those of the
                run, in ascending order.
        """
        if all_ids is None and self.run_ids is None:
            raise ValueError(
                "The review knows only the examples that were reviewed. Pass all_ids= with those "
                "of the whole data set, or read it with read_review(path, run=...)."
            )
        every_id = _plain(self.run_ids or () if all_ids is None else all_ids)
        self._expect_all(every_id)
        dropped = set(self.dropped)
        return [one for one in every_id if one not in dropped]

    def apply(
        self, dataset: Any, ids: Sequence[Id] | None = None, *, label: int | str | None = None
    ) -> ReviewedDataset:
        """Return a data set without the dropped examples, and with the new labels.

        Args:
            dataset: A map-style data set, perhaps one `with_ids`, or a torch `Subset` of it.
            ids: The id of each example; by default those of `with_ids`, else positions.
            label: Where the label of a sample is: by default second in a tuple or list, and
                "label" or "labels" in a dictionary.
        """
        if ids is None:
            if isinstance(dataset, ReviewedDataset):
                ids = dataset.ids
            else:
                own = ids_in(dataset, "ids= with the id of each example")
                ids = range(len(dataset)) if own is None else own
        plain = _plain(ids)
        if len(plain) != len(dataset):
            raise ValueError(
                f"ids must hold one id per example: there are {len(dataset)} examples, but "
                f"{len(plain)} ids."
            )
        return ReviewedDataset(self, dataset, plain, label)

    def write(self, folder: str | os.PathLike[str], format: Format = "text") -> list[Path]:
        """Write lists of ids to keep and to drop, and of new labels; return the files.

        Without the run, the ids to keep are unknown, and only the other two are written; a list to
        keep that an earlier review left there is removed.

        Args:
            folder: Where to; it is created if it does not exist.
            format: "text" (keep.txt and drop.txt with an id per line, relabel.csv), "json" or
                "parquet".
        """
        import pyarrow as pa

        from microclip.draggers.result import write_csv, write_ids, write_parquet

        place = Path(folder)
        lists = {"drop": self.dropped}
        if self.run_ids is not None:
            lists = {"keep": self.kept_ids(), **lists}
        table = pa.table({"id": list(self.labels), "label": list(self.labels.values())})
        ids_ending, labels_ending = ENDINGS[format]
        if format == "text":
            _expect_lines([one for ids in lists.values() for one in ids])
        try:
            place.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise NotADirectoryError(
                f"Cannot write lists to {place}: it is a file, or a folder above it is one. Name "
                "another folder."
            ) from error
        names = {name: place / f"{name}.{ids_ending}" for name in ("keep", "drop")}
        labels = place / f"relabel.{labels_ending}"
        if "keep" not in lists and names["drop"].exists() and labels.exists():
            names["keep"].unlink(missing_ok=True)  # it may hold what is dropped now
        for name, ids in lists.items():
            if format == "parquet":
                write_parquet(pa.table({"id": ids}), names[name])
            else:
                write_ids(ids, names[name])
        if format == "parquet":
            write_parquet(table, labels)
        elif format == "json":
            write_whole(labels, json.dumps(table.to_pylist()).encode())
        else:
            write_csv(table, labels)
        return [*(names[name] for name in lists), labels]

    def _expect_all(self, every_id: Sequence[Id]) -> None:
        """Raise an error if an example that something is to be done with is not among these."""
        changed = {one for one, verdict in self.verdicts.items() if verdict != KEEP}
        if missing := changed.difference(every_id):
            some = ", ".join(repr(one) for one in sorted(missing, key=str)[:3])
            raise ValueError(
                f"{len(missing):,} of the {len(changed):,} examples to drop or relabel are not in "
                f"the data set, for instance {some}. Its ids must be the ones that were recorded."
            )


class ReviewedDataset(Dataset[Any]):
    """What `Review.apply` returns: `ids` are those of the examples that are left."""

    def __init__(
        self, review: Review, dataset: Any, ids: Sequence[Id], label: int | str | None
    ) -> None:
        review._expect_all(ids)
        dropped = set(review.dropped)
        self.dataset, self.label = dataset, label
        self.places = [place for place, one in enumerate(ids) if one not in dropped]
        self.ids = [ids[place] for place in self.places]
        self.labels = dict(review.labels)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[self.places[index]]
        new = self.labels.get(self.ids[index])
        return sample if new is None else self._relabeled(sample, new)

    def _relabeled(self, sample: Any, new: Label) -> Any:
        if isinstance(sample, Mapping):
            key = self.label
            if key is None:
                found = [name for name in ("label", "labels") if name in sample]
                key = found[0] if len(found) == 1 else None
            if key not in sample:
                raise _lost(f"a dictionary with {', '.join(map(repr, sample))}")
            return {**sample, key: _like(sample[key], new)}
        place = 1 if self.label is None else self.label
        if not isinstance(sample, tuple | list) or not isinstance(place, int):
            raise _lost(f"an object of type {type(sample).__name__}")
        if not -len(sample) <= place < len(sample):
            raise _lost(f"a {type(sample).__name__} of {len(sample)}")
        changed = list(sample)
        changed[place] = _like(sample[place], new)
        if hasattr(sample, "_make"):  # a named tuple
            return sample._make(changed)
        return type(sample)(changed)


def _plain(ids: Iterable[Any]) -> list[Id]:
    """Return ids as a list; those of tensors and arrays as Python's numbers."""
    return [one.item() if hasattr(one, "item") else one for one in ids]


def _expect_lines(ids: Sequence[Id]) -> None:
    for one in ids:
        if isinstance(one, str) and one.splitlines() != [one]:
            raise ValueError(
                f"The id {one[:50]!r} does not fit on a single line. Write the lists in another "
                'format: --format json, or Review.write(folder, "json").'
            )


def _like(old: Any, new: Label) -> Any:
    """Return the new label in the type of the old one."""
    if isinstance(old, str):
        return str(new)
    if isinstance(new, str):
        raise ValueError(
            f"The new label {new!r} is text, but the samples have labels of type "
            f"{type(old).__name__}. Relabel with numbers, or set label= of Review.apply() to where "
            "texts are."
        )
    shape = getattr(old, "shape", None)
    if isinstance(old, list | tuple | Mapping) or (shape is not None and math.prod(shape) != 1):
        what = type(old).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        raise ValueError(
            f"The new label {new} is a number, but what it is to replace is of type {what}. Set "
            "label= of Review.apply() to where the class is; one-hot labels must be made from "
            "classes afterwards."
        )
    if isinstance(old, Tensor):
        return old.new_tensor(new).reshape(old.shape)
    return old.dtype.type(new) if hasattr(old, "dtype") else new  # numpy's numbers


def _lost(sample: str) -> ValueError:
    return ValueError(
        f"A sample is {sample}, and it is unclear where its label is. Say so with "
        "Review.apply(dataset, label=...): a position or a key."
    )
