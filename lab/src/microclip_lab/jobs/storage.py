"""The storage that workers share: an SQLite file, or a database server for several machines."""

from __future__ import annotations

import time
import warnings
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

BEAT = 20  # seconds between two heartbeats of a run
GRACE = 120  # seconds without a heartbeat until it counts as dead
PATIENCE = 60  # seconds to wait for another writer
ATTEMPTS = 5  # to open it: if several processes create the tables at once, only one succeeds


class StorageError(OSError):
    """The storage cannot be used; the message says why, and what to do."""


def open_storage(url: str) -> RDBStorage:
    """Open or create a storage."""
    is_sqlite = url.startswith("sqlite")
    options: dict[str, Any] = {"connect_args": {"timeout": PATIENCE}} if is_sqlite else {}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                storage = RDBStorage(
                    url, engine_kwargs=options, heartbeat_interval=BEAT, grace_period=GRACE
                )
            break
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise StorageError(
                f"{url!r} cannot be used as a storage ({error}). Give an Optuna storage URL, such "
                "as sqlite:///trials.db or postgresql://user@host/database, and install the "
                "driver of that database."
            ) from error
        except (SQLAlchemyError, StorageInternalError) as error:
            if attempt == ATTEMPTS:
                raise StorageError(f"The storage {url!r} cannot be opened: {error}") from error
            time.sleep(0.2 * attempt)
    if is_sqlite:
        _begin_by_locking(storage.engine)
    return storage


def _begin_by_locking(engine: sqlalchemy.Engine) -> None:
    """Make every SQLite transaction lock the file from its start.

    Optuna claims a trial by reading its state and then writing it, with a row lock in between, and
    SQLite has no row locks. Two workers could both read "waiting" and get the same trial.
    """

    def leave_transactions_to_us(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sqlalchemy.event.listen(engine, "connect", leave_transactions_to_us)
    sqlalchemy.event.listen(engine, "begin", begin)
    engine.dispose()  # connections that were opened before


def open_study(storage: RDBStorage, name: str, *, lower_is_better: bool) -> optuna.Study:
    """Open or create the study of this name."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no message about creating it
    try:
        return optuna.create_study(
            storage=storage,
            study_name=name,
            direction="minimize" if lower_is_better else "maximize",
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(),  # never used: the plan decides what to try
        )
    finally:
        optuna.logging.set_verbosity(verbosity)
