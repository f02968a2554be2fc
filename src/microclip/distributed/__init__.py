"""Many ranks: one mini-batch over several processes, clipped as one process would clip it.

`ranks` is what processes say to each other, `agreement` what they must have in common, `ddp` what
DistributedDataParallel needs and `fsdp` what `fully_shard` needs. `outside` finds ranks that a
Clipper was not told of, `collectives` losses that talk to them; `hook` is for those who keep their
own `loss.backward()`. Everything else is as on one process: engines never know how many there are.
"""

from typing import Any

__all__ = ["RankClip"]


def __getattr__(name: str) -> Any:
    if name == "RankClip":  # not before it is asked for: it needs engines, and they need `ranks`
        from microclip.distributed.hook import RankClip

        return RankClip
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
