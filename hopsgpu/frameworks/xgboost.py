"""XGBoost's collective operations among the ranks of a gang.

XGBoost reads nothing from the environment: a `RabitTracker` must run somewhere, and each rank needs
its address. The tracker does not set SO_REUSEADDR, so it cannot bind a port that an agent holds. It
uses a free port, which rank 0 announces at `HOPSGPU_COORDINATOR`, whose port is held.

Source: xgboost.collective and xgboost.tracker of XGBoost 3.2.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from hopsgpu.core.bounded_reads import MAX_RECORD_BYTES
from hopsgpu.frameworks.callbacks import CallbackContext, MetricReporter

log = logging.getLogger(__name__)

# Torch's ranks wait for each other as long.
_SECONDS = 1800.0
# Poll: other ranks have no notification that rank 0 listens.
_POLL_SECONDS = 0.05
# A peer that sends nothing for this time is not a rank.
_STRANGER_SECONDS = 5.0
_RANK_BYTES = 4
_SINGLE_RANK = (("RANK", "0"), ("WORLD_SIZE", "1"))


@contextlib.contextmanager
def communicator() -> Iterator[None]:
    """Connect the ranks for XGBoost: training inside the block makes one model of all ranks' rows.

    All ranks must call it, any number of times. XGBoost's ranks are those of the gang. With a
    single rank, and outside a gang, the call does nothing.

    Raises:
        TimeoutError: not all ranks have called it within 30 minutes.
    """
    rank, world_size = (int(os.environ.get(name, default)) for name, default in _SINGLE_RANK)
    if world_size == 1:
        yield
        return
    collective = importlib.import_module("xgboost.collective")
    host, _, port = os.environ["HOPSGPU_COORDINATOR"].rpartition(":")
    address = host.strip("[]"), int(port)
    with contextlib.ExitStack() as stack:
        if rank == 0:
            tracker = stack.enter_context(_tracker(address[0], world_size))
            _announce(address, tracker, world_size)
        else:
            tracker = _find_tracker(address, rank)
        # With leading zeros, because the tracker sorts tasks by name.
        task = f"{rank:0{len(str(world_size))}d}"
        # CommunicatorContext also finds NCCL.
        connection = collective.CommunicatorContext(**tracker, dmlc_task_id=task)
        collective.init(**connection.args)
        yield
        # After an exception, do not finalize: the other ranks would fail before this rank reports
        # its failure, and one of them would count as the first failure.
        collective.finalize()


def gang_callback(context: CallbackContext) -> Any:
    """Return a TrainingCallback that reports each round's metrics to the driver.

    Pass the callback to `xgboost.train(..., callbacks=[...])`.

    Args:
        context: `hopsgpu.context()`.
    """
    xgboost = importlib.import_module("xgboost")
    reporter = MetricReporter(context, "XGBoost")

    class GangCallback(xgboost.callback.TrainingCallback):  # type: ignore[name-defined,misc]
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            last = {
                f"{data}-{metric}": values[-1]
                for data, metrics in evals_log.items()
                for metric, values in metrics.items()
            }
            reporter.report(epoch, last)
            return False  # training continues

    return GangCallback()


@contextlib.contextmanager
def _tracker(host: str, world_size: int) -> Iterator[dict[str, Any]]:
    """Run a tracker in this process; yield its address as arguments for ranks."""
    tracking = importlib.import_module("xgboost.tracker")
    tracker = tracking.RabitTracker(n_workers=world_size, host_ip=host, sortby="task")
    try:
        tracker.start()
        yield tracker.worker_args()
        # Wait until the other ranks have disconnected.
        tracker.wait_for()
    except BaseException:
        # free() raises an error if ranks are still connected, which would hide the first error.
        with contextlib.suppress(RuntimeError, ValueError):
            tracker.free()
        raise
    tracker.free()


def _announce(
    address: tuple[str, int],
    tracker: dict[str, Any],
    world_size: int,
    seconds: float = _SECONDS,
    stranger_seconds: float = _STRANGER_SECONDS,
) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    deadline = time.monotonic() + seconds
    answered: set[int] = set()
    log.debug("XGBoost: waits until %d other ranks call communicator()", world_size - 1)
    with socket.create_server(address, family=family, backlog=world_size) as server:
        while len(answered) < world_size - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted({*range(1, world_size)} - answered)
                raise TimeoutError(
                    f"ranks {missing} did not call communicator() within {seconds:.0f} s"
                ) from None
            with connection, contextlib.suppress(OSError, EOFError):
                connection.settimeout(stranger_seconds)
                rank = int.from_bytes(_read_exactly(connection, _RANK_BYTES))
                connection.sendall(json.dumps(tracker).encode())
                answered.add(rank)
    log.debug("XGBoost: all ranks know the tracker")


def _find_tracker(address: tuple[str, int], rank: int, seconds: float = _SECONDS) -> dict[str, Any]:
    """Poll rank 0 for the tracker's address."""
    log.debug("XGBoost: waits until rank 0 calls communicator()")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address) as connection:
            connection.sendall(rank.to_bytes(_RANK_BYTES))
            with connection.makefile("rb") as answer:
                if text := answer.read(MAX_RECORD_BYTES):
                    return dict(json.loads(text))
        # Nothing announces that rank 0 listens.
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"rank 0 did not call communicator() within {seconds:.0f} s")


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read a number of bytes; raise EOFError if the peer sent fewer."""
    content = b""
    while len(content) < size:
        chunk = connection.recv(size - len(content))
        if not chunk:
            raise EOFError
        content += chunk
    return content
