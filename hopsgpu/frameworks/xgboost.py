"""XGBoost's collective operations among the ranks of a gang.

XGBoost takes nothing from the environment: a `RabitTracker` has to run somewhere, and each rank
needs its address. It cannot bind a port that somebody holds for it (it sets no SO_REUSEADDR), so it
takes a free one, and rank 0 tells the others which at `HOPSGPU_COORDINATOR`, which is held.

Source: xgboost.collective and xgboost.tracker of XGBoost 3.2.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from hopsgpu.frameworks.callbacks import Gang, numbers

# As long as torch's ranks wait for each other.
_SECONDS = 1800.0
# Nobody tells that rank 0 listens.
_LOOK_SECONDS = 0.05
# Who connects and says nothing is no rank.
_STRANGER_SECONDS = 5.0
_RANK_BYTES = 4
_ALONE = (("RANK", "0"), ("WORLD_SIZE", "1"))


@contextlib.contextmanager
def communicator() -> Iterator[None]:
    """Connect the ranks for XGBoost: what is trained within is one model, of the rows of all.

    All ranks call it, as often as they like; XGBoost's ranks are those of the gang. Alone, and
    outside a gang, XGBoost trains without it.

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
            given = stack.enter_context(_tracker(address[0], world_size))
            _tell(address, given, world_size)
        else:
            given = _told(address, rank)
        # The tracker sorts the names of its tasks as text.
        task = f"{rank:0{len(str(world_size))}d}"
        # It finds NCCL.
        connection = collective.CommunicatorContext(**given, dmlc_task_id=task)
        collective.init(**connection.args)
        yield
        # After an exception the process's end does it: else the others would fail of it before this
        # rank has told of its failure, and be taken for the first.
        collective.finalize()


def gang_callback(gang: Gang) -> Any:
    """A TrainingCallback for `callbacks=` of `xgboost.train`: each round's metrics to the driver.

    Args:
        gang: `hopsgpu.context()`.
    """
    xgboost = importlib.import_module("xgboost")

    class GangCallback(xgboost.callback.TrainingCallback):  # type: ignore[name-defined,misc]
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            last = {
                f"{data}-{metric}": values[-1]
                for data, metrics in evals_log.items()
                for metric, values in metrics.items()
            }
            gang.report(epoch, **numbers(last))
            return False  # to go on

    return GangCallback()


@contextlib.contextmanager
def _tracker(host: str, world_size: int) -> Iterator[dict[str, Any]]:
    """A tracker in this process; gives what ranks need to find it."""
    tracking = importlib.import_module("xgboost.tracker")
    tracker = tracking.RabitTracker(n_workers=world_size, host_ip=host, sortby="task")
    try:
        tracker.start()
        yield tracker.worker_args()
        # The others tell it that they leave.
        tracker.wait_for()
    except BaseException:
        # It complains of ranks that are still connected, which would hide what happened.
        with contextlib.suppress(RuntimeError, ValueError):
            tracker.free()
        raise
    tracker.free()


def _tell(address: tuple[str, int], given: dict[str, Any], world_size: int) -> None:
    """Tells all other ranks where the tracker is."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    deadline = time.monotonic() + _SECONDS
    told: set[int] = set()
    with socket.create_server(address, family=family, backlog=world_size) as server:
        while len(told) < world_size - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted({*range(1, world_size)} - told)
                raise TimeoutError(
                    f"ranks {missing} have not called communicator() for {_SECONDS:.0f} s"
                ) from None
            with connection, contextlib.suppress(OSError, EOFError):
                connection.settimeout(_STRANGER_SECONDS)
                rank = int.from_bytes(_exactly(connection, _RANK_BYTES))
                connection.sendall(json.dumps(given).encode())
                told.add(rank)


def _told(address: tuple[str, int], rank: int) -> dict[str, Any]:
    """What rank 0 tells of the tracker; waits until it does."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address) as connection:
            connection.sendall(rank.to_bytes(_RANK_BYTES))
            with connection.makefile("rb") as answer:
                if text := answer.read():
                    return dict(json.loads(text))
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError(f"rank 0 has not called communicator() for {_SECONDS:.0f} s")


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: the peer said less.
    """
    read = b""
    while len(read) < size:
        more = connection.recv(size - len(read))
        if not more:
            raise EOFError
        read += more
    return read
