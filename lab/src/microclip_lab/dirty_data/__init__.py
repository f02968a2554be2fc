"""The benchmark "What helps on dirty data?": tasks with known errors, our rules, and their rivals.

Every arm gets the same data, network, batches and tuning. `run` trains one arm once, in memory.
"""

from microclip_lab.dirty_data.run import run

__all__ = ["run"]
