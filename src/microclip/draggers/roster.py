"""The roster: a number for every example id, in the order of their first appearance.

Ids stay in Arrow's memory, one copy of each, because a Python object for every id of a large data
set would take more room than all that is found out about it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int64]


class Roster:
    """Ids, numbered as they come."""

    def __init__(self, integers: bool) -> None:
        # large: all ids together may well have more than the 2 GiB that Arrow's strings end at
        self.type = pa.int64() if integers else pa.large_string()
        self._known: pa.Array = pa.array([], self.type)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def ids(self) -> pa.Array:
        """The ids, each at the place of its number."""
        return self._known

    def enter(self, ids: pa.Array) -> Numbers:
        """Return the numbers of some ids (strings, as ledgers have them); new ids get new ones."""
        ids = ids.cast(self.type)
        found = pc.index_in(ids, value_set=self._known)
        if found.null_count:
            new = pc.unique(ids.filter(pc.is_null(found)))
            self._known = pa.concat_arrays([self._known, new])
            found = pc.index_in(ids, value_set=self._known)
        numbers: Numbers = found.to_numpy(zero_copy_only=False).astype(np.int64)
        return numbers
