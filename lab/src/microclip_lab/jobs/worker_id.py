"""Who does a job: which process on which machine, and whether it is still there."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Workplace:
    """A process. Numbers of processes come again, so its beginning belongs to it."""

    machine: str
    process: int
    began: float

    @classmethod
    def here(cls) -> Workplace:
        """Return this process."""
        return cls(_machine(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Workplace:
        """Return the one that `to_json` told of."""
        return cls(**said)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @property
    def is_gone(self) -> bool:
        """Whether its process has surely ended; of those on other machines nothing is sure."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.process)
            ended: bool = process.status() == psutil.STATUS_ZOMBIE
            return ended or abs(float(process.create_time()) - self.began) > 1
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:  # pragma: no cover (somebody else's, so it is there)
            return False


def _machine() -> str:
    """Return what tells this machine, since it was started, and this container from others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    inside = Path("/proc/self/ns/pid")
    return " ".join(
        (
            platform.node(),
            boot.read_text().strip() if boot.exists() else f"{psutil.boot_time():.0f}",
            os.readlink(inside) if inside.exists() else "",
        )
    ).strip()
