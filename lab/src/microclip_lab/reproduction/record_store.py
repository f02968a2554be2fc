"""The records of a folder, read once each: those of others appear while one works."""

from __future__ import annotations

from pathlib import Path

from microclip_lab.reproduction.jobs import Job
from microclip_lab.reproduction.records import Record, files, path_of, read


class Shelf:
    """All records that are in a folder; what is there is what is finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, Record] = {}

    def records(self) -> dict[Job, Record]:
        """Return the records that are there now."""
        self._read = {path: self._read.get(path) or read(path) for path in files(self.folder)}
        return {record.job: record for record in self._read.values()}

    def has(self, job: Job) -> bool:
        """Say whether the record of a job is there."""
        return path_of(self.folder, job).exists()
