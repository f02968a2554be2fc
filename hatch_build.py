"""What building a wheel takes: the C library of the single-pass engine, and a README for indexes.

The library is compiled where there is a C compiler. Without it the engine gives the same results
and takes a little longer, so no installation fails for want of one.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCE = Path("src/microclip/engines/single_pass/native.c")
LIBRARY = SOURCE.with_name("libnative.so")


LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Makes the README's links absolute: a package index has none of the files they lead to."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the README."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, source: str) -> str:
    """Return Markdown whose links into the repository lead there from anywhere.

    >>> with_absolute_links("[a](docs/a.md) ![b](b.png) [c](https://c) [d](#d)", "https://host")
    '[a](https://host/blob/main/docs/a.md) ![b](https://host/raw/main/b.png) [c](https://c) [d](#d)'
    """

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}({source}/{kind}/main/{link[3]})"

    return LINK.sub(absolute, text)


class CustomBuildHook(BuildHookInterface[Any]):
    """Called by hatchling before it builds a wheel, editable ones included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tag the wheel for this platform if that succeeded."""
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
    """Compile the library; return whether that succeeded.

    It is not linked to an OpenMP library: a second one beside torch's would start its own threads,
    which would compete with torch's.
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
