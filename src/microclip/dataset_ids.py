"""Ids for the examples of any map-style data set, so that a ledger can name them.

Knows data sets and samples; nothing of ledgers.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

Id = int | str

LABELS_ERROR = (
    "The last entry of this batch is not its ids, but the target of the loss. Use a loader of "
    "microclip.with_ids(dataset), or pass ids=, a function that finds them in a batch."
)


def with_ids(
    dataset: Dataset[Any] | Sequence[Any], ids: Sequence[Id] | None = None, *, key: str = "id"
) -> DatasetWithIds:
    """Return a data set whose samples also have their id.

    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> dataset = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    >>> for x, y, ids in DataLoader(with_ids(dataset), batch_size=2):
    ...     print(ids)
    tensor([0, 1])
    tensor([2, 3])

    | a sample of the data set | becomes |
    | --- | --- |
    | a tuple or list `(x, y)` | `(x, y, id)` |
    | a dictionary, or another mapping | a dictionary with one more entry, `key` |
    | anything else: a tensor, a named tuple, an object | the pair `(sample, id)` |

    Args:
        dataset: A map-style data set, or a list. Wrap it before you split or subset it: its parts
            then keep the ids of the whole.
        ids: The id of each example: integers or strings. By default its position, 0, 1, 2, ...
        key: The entry of the id in dictionaries.
    """
    return DatasetWithIds(dataset, ids, key)


class DatasetWithIds(Dataset[Any]):
    """What `with_ids` returns. Anything else that it is asked for comes from the data set."""

    def __init__(self, dataset: Any, ids: Sequence[Id] | None, key: str) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"with_ids() needs a data set with positions, but {type(dataset).__name__} can "
                "only be iterated over. Let it yield an id with each sample, such as a file name "
                "and line number: yield x, y, f'{file}:{line}'. It must be the same in every epoch."
            )
        if isinstance(dataset, DatasetWithIds):
            raise ValueError("This data set has ids already: with_ids() was called on it before.")
        if ids is not None and len(ids) != len(dataset):
            raise ValueError(
                f"ids must hold one id per example: there are {len(dataset)} examples, but "
                f"{len(ids)} ids."
            )
        self.dataset, self.ids, self.key = dataset, ids, key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._add_id(self.dataset[index], self._id_at(index))

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return several samples at once, as data loaders ask for them."""
        together = getattr(self.dataset, "__getitems__", None)
        samples = together(indices) if together else [self.dataset[index] for index in indices]
        return [
            self._add_id(sample, self._id_at(index))
            for sample, index in zip(samples, indices, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _id_at(self, index: Any) -> Id:
        try:
            place = operator.index(index)
        except TypeError:
            raise TypeError(
                f"A data set with ids is indexed by the position of one example, but got {index!r}."
            ) from None
        if self.ids is None:
            return place if place >= 0 else place + len(self)
        found = self.ids[place]
        if hasattr(found, "item"):  # of a tensor or array
            found = found.item()
        if isinstance(found, bool) or not isinstance(found, int | str):
            raise TypeError(
                f"ids must be integers or strings, which data loaders can collate, but the id of "
                f"example {place} is {found!r}. Use str() of it."
            )
        return found

    def _add_id(self, sample: Any, identity: Id) -> Any:
        if isinstance(sample, Mapping):
            if self.key in sample:
                raise ValueError(
                    f"Samples of this data set already have an entry {self.key!r}. Use it as the "
                    "id, or choose another name: with_ids(dataset, key=...)."
                )
            return {**sample, self.key: identity}
        if type(sample) is tuple or type(sample) is list:
            return type(sample)((*sample, identity))
        return sample, identity


def ids_of(batch: Any, key: str = "id") -> Any:
    """Return the ids of a batch whose samples got them from `with_ids`.

    >>> import torch
    >>> ids_of([torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([7, 8])])
    tensor([7, 8])
    >>> ids_of({"x": torch.zeros(2, 3), "id": ["a", "b"]})
    ['a', 'b']
    """
    found: Any = None
    if isinstance(batch, Mapping):
        found = batch.get(key)
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        found = batch[-1]
    if isinstance(found, Tensor):
        right = found.dim() == 1 and not (found.is_floating_point() or found.dtype == torch.bool)
    else:
        right = isinstance(found, tuple | list) and all(isinstance(i, int | str) for i in found)
    if not right:
        where = f"the entry {key!r}" if isinstance(batch, Mapping) else "the last entry"
        what = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise ValueError(
            f"There are no ids in {where} of this batch, but {what or type(found).__name__}. Use "
            "a loader of microclip.with_ids(dataset), or pass ids=, a function that finds them in "
            "a batch."
        )
    return found


def ids_in(dataset: Any, remedy: str) -> Sequence[Id] | None:
    """Return the id of each example, in order; None if there is nothing `with_ids` inside.

    >>> from microclip import with_ids
    >>> ids_in(Subset(with_ids(["x", "y", "z"]), [2, 0]), "")
    [2, 0]

    Args:
        dataset: Anything. A wrapper other than `Subset` around one with ids is refused, since it
            may hold the examples in any order.
        remedy: What to do then, to end the message with.
    """
    if isinstance(dataset, DatasetWithIds):
        if dataset.ids is None:
            return range(len(dataset))
        return [one.item() if hasattr(one, "item") else one for one in dataset.ids]
    if isinstance(dataset, Subset):
        whole = ids_in(dataset.dataset, remedy)
        return None if whole is None else [whole[int(place)] for place in dataset.indices]
    inside = getattr(dataset, "dataset", None)
    parts = getattr(dataset, "datasets", None)
    for part in (inside, *(parts if isinstance(parts, tuple | list) else ())):
        if part is not None and ids_in(part, remedy) is not None:
            raise ValueError(
                f"The {type(dataset).__name__} wraps a data set with ids, and it is unclear which "
                f"example has which id. Pass what with_ids() returned, or a torch Subset of it, or "
                f"{remedy}."
            )
    return None


def are_labels(ids: Any, target: Tensor, look: bool) -> bool:
    """Whether ids are the target of a loss; without a look at their values, if they are a copy."""
    if not isinstance(ids, Tensor) or ids.shape != target.shape:
        return False
    if ids.data_ptr() == target.data_ptr():
        return bool(len(ids))
    return look and have_repeats(ids) and bool((ids.to(target.device) == target).all())


def have_repeats(ids: Any) -> bool:
    """Whether an id occurs more than once."""
    return len(set(ids.tolist() if isinstance(ids, Tensor) else ids)) < len(ids)
