"""Many ranks: one mini-batch over several processes, clipped as one process would clip it.

`ranks` exchanges norms and gradients and checks that all ranks clip the same way. `ddp` handles
DistributedDataParallel, also with plain `loss.backward()`, and `fsdp` handles `fully_shard`.
`detection` finds several ranks that the model does not show, and losses that communicate. This
package may import engines, never the other way round.
"""

from typing import Any

__all__ = ["RankClip"]


def __getattr__(name: str) -> Any:
    if name == "RankClip":  # imported on first use, so that importing the package stays cheap
        from microclip.distributed.ddp import RankClip

        return RankClip
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
