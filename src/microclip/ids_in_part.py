"""Which examples a data set, or a part of it, holds: the ids that `with_ids` gave them.

Knows data sets and torch's `Subset`, which `random_split` returns; nothing of ledgers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset

from microclip.dataset_ids import DatasetWithIds, Id


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
