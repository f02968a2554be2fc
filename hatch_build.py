"""Makes the C library of the single-pass engine, where there is a compiler for it.

Without it the engine gives the same and takes a little longer, so no installation fails for it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/microclip/engines/single_pass/native.c")
LIBRARY = SOURCE.with_name("libnative.so")


class CustomBuildHook(BuildHookInterface[Any]):
    """What hatchling calls before it builds a wheel, editable ones included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and let the wheel be one for this platform if that went well."""
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)
        if not compiled(root / SOURCE, root / LIBRARY):
            self.app.display_info(f"{SOURCE} was not compiled: torch will do its work.")
            return
        build_data["artifacts"].append(str(LIBRARY))
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False


def compiled(source: Path, library: Path) -> bool:
    """Whether a compiler could make the library.

    It is not linked to an OpenMP library: a second one beside torch's would have threads of its
    own, which would stand in each other's way.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "native.o")
        flags = ("-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-c")
        commands = (
            [*compiler, *flags, str(source), "-o", str(made)],
            [*compiler, "-shared", str(made), "-o", str(library)],
        )
        try:
            for command in commands:
                subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True
