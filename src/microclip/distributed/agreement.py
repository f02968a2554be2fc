"""What all ranks must have in common: how they clip, and what they train.

A step's message holds a digest of it, so that it costs nothing to compare; only where two ranks
differ is it sent in full, to say what the difference is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

if TYPE_CHECKING:
    from microclip.engines.tally import Policy

VALUES = "the values of"
SHOWN = 4  # differences that an error names
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DisagreementError(RuntimeError):
    """Ranks do not clip the same way, or do not train the same parameters."""


class Agreement:
    """What this rank says about itself."""

    def __init__(self) -> None:
        self.digest = 0
        self._given: tuple[Policy, GradScaler | None, dict[str, nn.Parameter]] | None = None
        self._seen: object = None

    def describe(
        self, policy: Policy, scaler: GradScaler | None, parameters: dict[str, nn.Parameter]
    ) -> None:
        """Take note of what this rank is about to do; does nothing if it is as before."""
        seen = policy, tuple(map(id, parameters.values()))
        if seen == self._seen:
            return
        self._seen, self._given = seen, (policy, scaler, parameters)
        self.digest = digest_of(self._said())

    def _said(self) -> dict[str, str]:
        if self._given is None:
            return {}
        policy, scaler, parameters = self._given
        return dict((*_settings(policy, scaler), *_trained(parameters)))

    def settle(
        self, group: dist.ProcessGroup | None, device: torch.device
    ) -> DisagreementError | None:
        """Return what the difference between ranks is; all of them call it.

        None: there is none any more, as they had only looked at themselves at different times.
        """
        mine = self._said()
        self.digest = digest_of(mine)
        said: list[dict[str, str]] = tell(mine, group, device)
        found = []
        for what in dict.fromkeys(what for each in said for what in each):
            values = [each.get(what, "frozen or missing") for each in said]
            missing = any(what not in each for each in said)
            if len(set(values)) > 1 and not (missing and what.startswith(VALUES)):
                of_ranks = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                found.append(f"{what} ({of_ranks})")
        if not found:
            return None
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return DisagreementError(
            f"The ranks differ in {'; '.join(found[:SHOWN])}{more}. All ranks must clip the same "
            "way and train the same parameters, from the same checkpoint. `.grad` is as it was."
        )


def _settings(policy: Policy, scaler: GradScaler | None) -> Iterator[tuple[str, str]]:
    rule = policy.rule
    shown = repr(rule)
    if " at 0x" in shown:  # its place in memory is not part of a rule
        shown = f"{type(rule).__qualname__}({vars(rule)})" if hasattr(rule, "__dict__") else ""
    yield "rule", shown if " at 0x" not in shown else type(rule).__qualname__
    yield "rule's state", repr(rule.state_dict())
    yield "microbatch_size", str(policy.microbatch_size)
    yield "reduction", policy.reduction
    yield "nonfinite", policy.nonfinite
    scaled = scaler is not None and scaler.is_enabled()
    yield "grad_scaler", f"scale {scaler.get_scale()}" if scaler and scaled else "none"


def _trained(parameters: dict[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    for name, parameter in parameters.items():
        dtype = str(parameter.dtype).removeprefix("torch.")
        yield f"parameter {name!r}", f"{dtype} {list(parameter.shape)}"
    sums = {n: _checksum(p) for n, p in parameters.items() if not hasattr(p, "device_mesh")}
    for name, total in sums.items():
        yield f"{VALUES} parameter {name!r}", f"checksum {int(total) & (2**64 - 1):016x}"


@torch.no_grad()
def _checksum(parameter: nn.Parameter) -> Tensor:
    """Add up the bits, which is exact in any order and on any machine."""
    found = parameter.detach().contiguous()
    found = torch.view_as_real(found) if found.is_complex() else found
    return found.view(_WHOLE_NUMBERS[found.element_size()]).sum(dtype=torch.int64)


def digest_of(said: Any) -> int:
    """Return a number that stands for it, of 48 bits, which a float64 holds exactly."""
    return int.from_bytes(blake2b(json.dumps(said).encode(), digest_size=6).digest(), "big")


def tell(said: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Return what all ranks have to say, be it as long as it likes."""
    message, count = json.dumps(said).encode(), dist.get_world_size(group)
    size = torch.tensor([len(message)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(count)]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(each) for each in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(message)] = torch.tensor(list(message), dtype=torch.uint8, device=device)
    heard = [torch.zeros_like(padded) for _ in range(count)]
    dist.all_gather(heard, padded, group=group)
    return [json.loads(bytes(h[: int(n)].tolist())) for h, n in zip(heard, sizes, strict=True)]
