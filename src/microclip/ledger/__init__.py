"""The ledger: what clipping did to every micro-batch, in a folder of Parquet files.

`Ledger` writes it while a model trains; `open_ledger` reads it, even while it is being written.
Knows outcomes and files; `microclip.draggers` and `microclip.report` make sense of them.
"""

try:
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError("microclip.ledger needs pyarrow: pip install 'microclip[ledger]'") from error

from microclip.ledger.read import Record, open_ledger
from microclip.ledger.write import Ledger

__all__ = ["Ledger", "Record", "open_ledger"]
