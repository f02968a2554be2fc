"""What a clipped step costs on your GPU: the table of `step_cost.py`, in a file you can send us.

    python benchmarks/gpu.py                          the GPU that torch finds (CUDA, MPS or XPU)
    python benchmarks/gpu.py --device cpu --quick     to try this script without one

The file holds the table, and the same figures as JSON. It says which device, driver and versions
they belong to, and nothing else about you or your machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import microclip

from models import TASKS
from step_cost import Figure, figures

NO_GPU = (
    "torch {} finds no GPU (CUDA, MPS or XPU): if this machine has one, install a build of torch "
    "for it; to try this script without one, add --device cpu --quick."
)
QUICK: dict[str, Any] = {"tasks": ["conv"], "sizes": [1], "batch_size": 4, "rounds": 4}
FULL: dict[str, Any] = {"tasks": list(TASKS), "sizes": [1, 4, 16], "batch_size": 64, "rounds": 21}


def find_gpu() -> torch.device:
    """Return the GPU of this machine, or end with a sentence."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        sys.exit(NO_GPU.format(torch.__version__))
    return found


def about(device: torch.device) -> dict[str, str]:
    """Return what figures depend on: the device, its driver, and versions."""
    module = torch.get_device_module(device)
    named = device.type != "cpu" and hasattr(module, "get_device_name")
    found = {
        "device": module.get_device_name(device) if named else platform.machine(),
        "kind": device.type,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "microclip": microclip.__version__,
    }
    if device.type == "cuda":
        found["driver"] = _driver(module, device)
        found["CUDA or ROCm"] = str(torch.version.cuda or torch.version.hip)
        found["cuDNN"] = str(torch.backends.cudnn.version())
    elif device.type == "xpu":
        found["driver"] = _driver(module, device)
    elif device.type == "mps":
        found["driver"] = f"macOS {platform.mac_ver()[0]}"
    return found


def _driver(module: Any, device: torch.device) -> str:
    """Return the version of a driver as far as torch knows it."""
    version = getattr(module.get_device_properties(device), "driver_version", None)
    if version is None and hasattr(torch._C, "_cuda_getDriverVersion"):
        version = torch._C._cuda_getDriverVersion()
    return str(version)


def written(
    facts: dict[str, str], settings: dict[str, Any], table: dict[str, dict[str, Any]]
) -> str:
    """Return the file: facts, tables, and both as JSON."""
    lines = [f"# microclip on {facts['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [
        f"- batch of {settings['batch_size']}, {settings['rounds']} rounds, "
        f"{torch.get_num_threads()} threads",
        "",
        "Ratios to a plain step of the whole batch: time, median (quartiles), and peak memory.",
        "",
        "```text",
    ]
    for name, found in table.items():
        lines.append(f"{name}: {TASKS[name].__doc__}")
        lines += [str(Figure(**each)) for each in found["figures"]]
        lines += [
            "      largest difference between the clipped gradients at b = 1: "
            f"{found['difference']:.0e}"
        ] * (found["difference"] is not None)
    data = json.dumps({"facts": facts, "settings": settings, "table": table})
    return "\n".join([*lines, "```", "", "```json", data, "```", ""])


def measure(device: torch.device, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of every task, as plain data; print them as they come."""
    wait = None
    if device.type != "cpu":
        wait = partial(torch.accelerator.synchronize, device)
    table: dict[str, dict[str, Any]] = {}
    for name in settings["tasks"]:
        torch.manual_seed(0)
        task = TASKS[name](settings["batch_size"]).to(device)
        print(f"\n{name}: {TASKS[name].__doc__}", flush=True)
        table[name] = {"figures": [], "difference": None}
        for b in settings["sizes"]:
            found, difference = figures(task, b, settings["rounds"], wait=wait)
            print(*found, sep="\n", flush=True)
            table[name]["figures"] += map(asdict, found)
            table[name]["difference"] = table[name]["difference"] or difference
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="cuda, cuda:1, mps, xpu or cpu; by default what there is")
    parser.add_argument("--quick", action="store_true", help="one small model, few rounds")
    parser.add_argument("--output", type=Path, default=Path("microclip-gpu.md"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the others, about themselves
    device = torch.device(options.device) if options.device else find_gpu()
    settings = QUICK if options.quick else FULL
    table = measure(device, settings)
    options.output.write_text(written(about(device), settings, table), encoding="utf-8")
    print(f"\n{options.output}: please send it to us, in an issue.")


if __name__ == "__main__":
    main()
