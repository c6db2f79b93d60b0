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
from hopsgpu.cluster_managers.yarn.application_state import ApplicationState
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.bounded_calls import BoundedCall

_NAME = "hopsgpu-doctor"
_ENDING_SECONDS = 20.0
_BY_HAND = "end it with yarn application -kill"
_MASTER = (
    "make room for its application master: free memory and cores in the queue, and raise"
    " yarn.scheduler.capacity.maximum-am-resource-percent; or use another queue (--queue)"
)


class NoSessionError(HopsGpuError):
    """The application did not start; the message is YARN's or Spark's, and `log` that of Spark's
    JVM.
    """

    def __init__(self, message: str, log: Path, fix: str = "fix what the message says") -> None:
        super().__init__(message)
        self.log = log
        self.fix = fix


@contextlib.contextmanager
def started(conf: Mapping[str, str], manager: ResourceManager, seconds: float) -> Iterator[Any]:
    """Provide a SparkSession, and stop it on exit.

    Raises:
        NoSessionError: the session did not start in `seconds`.
    """
    tag = f"{_NAME}-{secrets.token_hex(4)}"
    tags = ",".join(filter(None, (conf.get("spark.yarn.tags"), tag)))
    properties = {**conf, "spark.yarn.tags": tags}
    with _stderr_in_file() as log:
        starting = BoundedCall("hopsgpu-session", lambda: new_session(_NAME, conf=properties))
        try:
            session = starting.result(seconds)
        except TimeoutError:
            raise NoSessionError(_given_up(manager, tag, seconds, starting), log, _MASTER) from None
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


def _given_up(
    manager: ResourceManager, tag: str, seconds: float, starting: BoundedCall[Any]
) -> str:
    """Kill an application that does not start; return a message with YARN's reason."""
    waited = f"the application has not started within {seconds:.0f} s"
    try:
        app = manager.find_by_tag(tag)
        if app is None:
            return f"{waited}: it has not reached the ResourceManager"
        remains = _kill(manager, app, starting)
    except HopsGpuError as error:
        return f"{waited}: {error}"
    return f"{waited}; it is {app.state}: {app.diagnostics or 'no reason given'}{remains}"


def _kill(manager: ResourceManager, app: ApplicationState, starting: BoundedCall[Any]) -> str:
    """Ask YARN to kill an application; return a text if it may still be running, or ""."""
    try:
        manager.kill(app.id, app.user)
    except HopsGpuError as error:
        return f"; it is still running ({error}): {_BY_HAND} {app.id}"
    try:
        starting.result(_ENDING_SECONDS)
    except TimeoutError:
        return f"; it may still be running: {_BY_HAND} {app.id}"
    except Exception:  # noqa: BLE001 - Spark reports here that the application was killed
        return ""
    return f"; it has just started, and may still be running: {_BY_HAND} {app.id}"


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
