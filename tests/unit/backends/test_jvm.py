"""What is told of errors of calls into Spark's JVM."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.errors import HopsGpuError, RankFailed

ENDED = "the driver's JVM has ended: a signal ended spark-submit, or it crashed"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def jvm_at(port: int) -> Jvm:
    parameters = SimpleNamespace(address="127.0.0.1", port=port)
    context: Any = SimpleNamespace(
        _jsc=SimpleNamespace(sc=lambda: None),
        _gateway=SimpleNamespace(gateway_parameters=parameters),
    )
    return Jvm(context)


def test_a_context_that_was_stopped_is_named() -> None:
    """A run may go on in another thread."""
    stopped = SimpleNamespace(schedulerBackend=lambda: None, taskScheduler=lambda: None)
    context: Any = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: stopped), _gateway=None)
    jvm = Jvm(context)
    calls: list[Callable[[], object]] = [
        lambda: jvm.registered_executors(1),
        lambda: jvm.busy_executors(1),
        jvm.without_resource_warning,
    ]
    for call in calls:
        with pytest.raises(HopsGpuError, match="its SparkContext was stopped while a run used it"):
            call()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RankFailed("rank 1 failed"), "rank 1 failed"),
        (ValueError("no"), "ValueError: no"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (
            ConnectionRefusedError(111, "Connection refused"),
            f"{ENDED} (ConnectionRefusedError: [Errno 111] Connection refused)",
        ),
        (Py4JNetworkError("no answer"), f"{ENDED} (Py4JNetworkError: no answer)"),
    ],
)
def test_of_a_jvm_that_has_ended_that_is_told(
    listener: socket.socket, error: BaseException, words: str
) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert jvm_at(port).error_text(error) == words


@pytest.mark.parametrize("error", [OSError(28, "No space"), Py4JError("called")])
def test_of_one_that_listens_the_error_is_told(
    listener: socket.socket, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hopsgpu.backends.spark.jvm._ENDING_SECONDS", 0.0)
    port = listener.getsockname()[1]
    assert jvm_at(port).error_text(error) == f"{type(error).__name__}: {error}"
