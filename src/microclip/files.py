"""Files that survive a crash or a power failure, that notice damage, and that have one writer.

Knows nothing about what is in the files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self
from weakref import WeakSet

SEAL = "sha256"  # the entry of a JSON object that holds the checksum of the others

CHUNK = 2**20  # bytes read at once

logger = logging.getLogger("microclip.files")


class DamagedFileError(ValueError, OSError):
    """A file is not what was written; the message names it and says what to do."""

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def open_whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing and rename it to `path` once the block has succeeded.

    The content reaches the disk before the name does.
    """
    target = Path(path)
    require_file_name(target)
    temporary = target.parent / f".{secrets.token_hex(16)}.tmp"
    try:
        with temporary.open("wb") as file:
            yield file
            with _named(target):
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def require_file_name(path: str | os.PathLike[str]) -> None:
    """Raise an error unless a file may be written at `path`; call it before a long computation."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"Cannot write {target}: it is a folder. Name a file in it.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"Cannot write {target}: {target.parent} is not a folder.")


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new, never half of it."""
    with open_whole(path) as file, _named(path):
        file.write(content)


def append_line(path: Path, line: str) -> None:
    """Append a line; if the last one was cut off by a crash, start a new line after it."""
    with _named(path), path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(file):
            line = "\n" + line
        file.write(f"{line}\n".encode())


def sync_folder(folder: Path) -> None:
    """Sync renames and removals in a folder to disk."""
    if not hasattr(os, "O_DIRECTORY"):  # not available on Windows
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Sync the content of a file to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fast_checksum(path: Path) -> str:
    """Return the CRC-32 and the length of a file: enough to notice damage, not to stop forgery."""
    length = found = 0
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            found, length = zlib.crc32(block, found), length + len(block)
    return f"{found:08x}-{length}"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own checksum added.

    >>> is_intact(sealed({"step": 12})), is_intact({**sealed({"step": 12}), "step": 13})
    (True, False)
    """
    return {**content, SEAL: _digest(content)}


def is_intact(content: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is as it was when it was sealed."""
    rest = {name: value for name, value in content.items() if name != SEAL}
    return content.get(SEAL) == _digest(rest)


def _digest(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content, default=str))  # as a reader will see it
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Lock:
    """A lock file that this process holds until `close`, or until it ends."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        _held.add(file)

    def close(self) -> None:
        """Release it."""
        if not self._file.closed:
            _unlock(self._file)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def lock(path: Path, error: Exception) -> Lock:
    """Take the lock file at `path`, or raise `error` if another process or object holds it.

    The system releases the lock of a killed process, and a fork does not hold it. An existing file
    keeps its content, and a symbolic link in its place is refused.
    """
    file = _open_lock(path)
    try:
        if not _try_lock(file):
            raise error
    except BaseException:
        file.close()
        raise
    return Lock(file)


_held: WeakSet[IO[bytes]] = WeakSet()  # files of locks of this process


def _let_go() -> None:
    """In a fork, close the locks of the parent, which would otherwise last as long as both."""
    for file in list(_held):
        file.close()


if hasattr(os, "register_at_fork"):  # not available on Windows
    os.register_at_fork(after_in_child=_let_go)


def _open_lock(path: Path) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.fdopen(os.open(path, flags, 0o666), "rb+", buffering=0)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP,
            "The lock file is a symbolic link, which is not followed. Delete the link",
            str(path),
        ) from None


def _try_lock(file: IO[bytes]) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # pragma: no cover (Windows)
        return True
    except BlockingIOError:
        return False
    except OSError as error:  # pragma: no cover (some network file systems)
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        logger.warning(
            "%s has no locks (%s): a second process that writes here would go unnoticed.",
            file.name,
            error.strerror,
        )
    return True


def _unlock(file: IO[bytes]) -> None:
    with suppress(ImportError, OSError):  # closing it does the same, unless a fork has it too
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the name of the file to errors that lack one, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(
            error.errno, f"Could not write this file: {error.strerror}", str(path)
        ) from error


def _ends_with_newline(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
