"""Starts the doctor's own session, with a time limit and without Spark's log output."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hopsgpu.backends.spark.session import session as new_session
from hopsgpu.doctor.probe_cluster import ProbeCluster
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.bounded_calls import BoundedCall

_NAME = "hopsgpu-doctor"


class NoSessionError(HopsGpuError):
    """The error of an application that did not start; the message gives the reason.

    Attributes:
        log: the log of Spark's JVM.
        fix: the remedy.
    """

    def __init__(self, message: str, log: Path, fix: str = "fix what the message says") -> None:
        super().__init__(message)
        self.log = log
        self.fix = fix


@contextlib.contextmanager
def started(conf: Mapping[str, str], cluster: ProbeCluster, seconds: float) -> Iterator[Any]:
    """Provide a SparkSession, and stop it on exit.

    Raises:
        NoSessionError: the session did not start in `seconds`.
    """
    name = f"{_NAME}-{secrets.token_hex(4)}"
    properties = cluster.session_properties(conf, name)
    with _stderr_in_file() as log:
        starting = BoundedCall("hopsgpu-session", lambda: new_session(_NAME, conf=properties))
        try:
            session = starting.result(seconds)
        except TimeoutError:
            waited = f"the application has not started within {seconds:.0f} s"
            why, fix = cluster.give_up(name, waited, starting)
            raise NoSessionError(why, log, fix) from None
        except HopsGpuError as error:
            raise NoSessionError(str(error), log) from error
        except Exception as error:
            # Any exception of Spark's JVM is a result that the doctor reports.
            raise NoSessionError(first_cause(str(error)), log) from error
    try:
        yield session
    finally:
        log.unlink(missing_ok=True)
        session.stop()


def first_cause(error: str) -> str:
    """Return the line of a py4j error with the Java exception, else its first line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    thrown = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return next(iter(thrown or lines), "no reason given")


@contextlib.contextmanager
def _stderr_in_file() -> Iterator[Path]:
    """Send this process's stderr, and that of its child processes, to a file until the exit.

    Spark's JVM continues to write to the file after that.
    """
    descriptor, name = tempfile.mkstemp(prefix="hopsgpu-doctor-", suffix=".log")
    before = os.dup(2)
    try:
        os.dup2(descriptor, 2)
        yield Path(name)
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(descriptor)
