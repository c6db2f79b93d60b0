"""XGBoost's collective operations among the ranks of a gang.

XGBoost reads nothing from the environment: a `RabitTracker` must run somewhere, and each rank needs
its address. The tracker cannot bind a port that another process holds for it (it does not set
SO_REUSEADDR). So it takes a free port, and rank 0 tells the others which one at
`HOPSGPU_COORDINATOR`, whose port is held.

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

from hopsgpu.frameworks.callbacks import CallbackContext, MetricReporter

log = logging.getLogger(__name__)

# The time that torch's ranks wait for each other.
_SECONDS = 1800.0
# Rank 0 sends no signal once it listens, so the others poll.
_LOOK_SECONDS = 0.05
# A peer that connects and sends nothing for so long is no rank.
_STRANGER_SECONDS = 5.0
_RANK_BYTES = 4
_ALONE = (("RANK", "0"), ("WORLD_SIZE", "1"))


@contextlib.contextmanager
def communicator() -> Iterator[None]:
    """Connect the ranks for XGBoost: training inside the block makes one model of all ranks' rows.

    All ranks must call it, and may do so any number of times; XGBoost's ranks are those of the
    gang. With a single rank, and outside a gang, XGBoost trains without it.

    Raises:
        TimeoutError: not all ranks have called it within 30 minutes.
    """
    rank, world_size = (int(os.environ.get(name, alone)) for name, alone in _ALONE)
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
        # With leading zeros, because the tracker sorts the names of its tasks as text.
        task = f"{rank:0{len(str(world_size))}d}"
        # CommunicatorContext also finds NCCL.
        connection = collective.CommunicatorContext(**tracker, dmlc_task_id=task)
        collective.init(**connection.args)
        yield
        # After an exception, leave it to the end of the process. Otherwise the others would fail
        # because of it before this rank has reported its failure, and one of them would be taken
        # for the first rank that failed.
        collective.finalize()


def gang_callback(context: CallbackContext) -> Any:
    """Return a TrainingCallback that reports each round's metrics to the driver.

    It is for the argument `callbacks=` of `xgboost.train`.

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
    """Run a tracker in this process; yield what ranks need to find it."""
    tracking = importlib.import_module("xgboost.tracker")
    tracker = tracking.RabitTracker(n_workers=world_size, host_ip=host, sortby="task")
    try:
        tracker.start()
        yield tracker.worker_args()
        # The other ranks tell the tracker when they leave.
        tracker.wait_for()
    except BaseException:
        # It raises an error about ranks that are still connected, which would hide the first one.
        with contextlib.suppress(RuntimeError, ValueError):
            tracker.free()
        raise
    tracker.free()


def _announce(address: tuple[str, int], tracker: dict[str, Any], world_size: int) -> None:
    """Tell all other ranks where the tracker is."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    deadline = time.monotonic() + _SECONDS
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
                    f"ranks {missing} did not call communicator() within {_SECONDS:.0f} s"
                ) from None
            with connection, contextlib.suppress(OSError, EOFError):
                connection.settimeout(_STRANGER_SECONDS)
                rank = int.from_bytes(_exactly(connection, _RANK_BYTES))
                connection.sendall(json.dumps(tracker).encode())
                answered.add(rank)
    log.debug("XGBoost: all ranks know the tracker")


def _find_tracker(address: tuple[str, int], rank: int) -> dict[str, Any]:
    """Wait until rank 0 tells where the tracker is, and return it."""
    log.debug("XGBoost: waits until rank 0 calls communicator()")
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address) as connection:
            connection.sendall(rank.to_bytes(_RANK_BYTES))
            with connection.makefile("rb") as answer:
                if text := answer.read():
                    return dict(json.loads(text))
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError(f"rank 0 did not call communicator() within {_SECONDS:.0f} s")


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Read exactly so many bytes.

    Raises:
        EOFError: the peer sent fewer bytes.
    """
    read = b""
    while len(read) < size:
        more = connection.recv(size - len(read))
        if not more:
            raise EOFError
        read += more
    return read
