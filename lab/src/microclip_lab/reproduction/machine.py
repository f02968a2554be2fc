"""What a run was done on and with: versions and the class of machine, no name of one."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("microclip", "torch", "transformers", "accelerate", "numpy")


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # pragma: no cover (all of them are needed to get here)
            found[name] = "not installed"
    return found


@functools.cache
def machine_class() -> dict[str, str]:
    """Return what results may depend on in their last bits: the processor and its instructions."""
    import torch

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        for line in cpus.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
