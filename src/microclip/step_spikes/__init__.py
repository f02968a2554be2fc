"""Which row broke the run: steps whose loss or gradient stands out, with their rows ranked.

Data flows one way: `series` (one loss and one norm per step, and how far they stand out) -> `find`
(the spikes and their rows, as a table). `replay` runs one of these steps again, and is the only
module here that knows models.
"""

from importlib.util import find_spec

if find_spec("pyarrow") is None or find_spec("numpy") is None:
    raise ImportError("microclip.spikes needs pyarrow and numpy: pip install 'microclip[ledger]'")

from microclip.step_spikes.find import Spike, Spikes, spikes
from microclip.step_spikes.run_replay import Replay, replay

__all__ = ["Replay", "Spike", "Spikes", "replay", "spikes"]
