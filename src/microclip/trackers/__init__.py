"""Step figures and the worst examples, where people already look: experiment trackers.

Data flows one way: `figures` (of steps) and `examples` (the worst, with what they contain) ->
`tracker` -> `clients`, which know TensorBoard, Weights & Biases, MLflow and Trackio. The clients
are imported only when they are used.
"""

from importlib.util import find_spec

if find_spec("pyarrow") is None or find_spec("numpy") is None:
    raise ImportError("microclip.track needs pyarrow and numpy: pip install 'microclip[ledger]'")

from microclip.trackers.clients import CLIENTS, Client
from microclip.trackers.examples import Example, ExampleTable
from microclip.trackers.tracker import Tracked, Tracker, track

__all__ = ["CLIENTS", "Client", "Example", "ExampleTable", "Tracked", "Tracker", "track"]
