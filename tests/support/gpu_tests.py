"""Runs the tests of devices on the GPU of this machine: `make test-gpu`.

Options go to pytest: `python tests/support/gpu_tests.py -x -k fused`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1] / "unit" / "test_devices.py"


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        sys.exit(
            f"torch {torch.__version__} finds no GPU (CUDA, MPS or XPU) to test: if this machine "
            "has one, install a build of torch for it into .venv."
        )
    command = [sys.executable, "-m", "pytest", "-q", "-m", "full or not full", str(TESTS)]
    options = sys.argv[1:] or ["-k", "real"]
    environment = {**os.environ, "MICROCLIP_TEST_DEVICE": device.type}
    sys.exit(subprocess.call([*command, *options], env=environment))


if __name__ == "__main__":
    main()
