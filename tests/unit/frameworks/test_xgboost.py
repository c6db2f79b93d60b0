"""Ranks find XGBoost's tracker; XGBoost itself is a stand-in here, and real in the soak."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.agent.addresses import held_ports
from hopsgpu.frameworks import xgboost
from tests.bounds import HANG_SECONDS

WHERE = {"dmlc_tracker_uri": "127.0.0.1", "dmlc_tracker_port": 5}


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Yield an address that an agent holds for rank 0."""
    with held_ports(1, "127.0.0.1") as held:
        yield "127.0.0.1", held.ports[0]


def test_ranks_find_the_tracker_despite_strangers(address: tuple[str, int]) -> None:
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(xgboost._find_tracker, address, rank) for rank in (1, 2)]
        serving = pool.submit(xgboost._announce, address, WHERE, 4, stranger_seconds=0.1)
        for _ in range(2):
            silent = _connected(address)
            with _connected(address) as brief:
                brief.sendall(b"\1")
        others.append(pool.submit(xgboost._find_tracker, address, 3))
        assert [other.result(HANG_SECONDS) for other in others] == [WHERE] * 3
        serving.result(HANG_SECONDS)
        silent.close()


def _connected(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            threading.Event().wait(0.01)


def test_timeout_names_the_missing_ranks(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hopsgpu.frameworks")
    with pytest.raises(TimeoutError, match="rank 0"):
        xgboost._find_tracker(address, 1, seconds=0.2)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\]"):
        xgboost._announce(address, WHERE, 3, seconds=0.2)
    assert ["rank 0" in caplog.messages[0], "2 other" in caplog.messages[1]] == [True, True]


class Standins:
    """XGBoost's two modules, which record their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setitem(sys.modules, "xgboost.tracker", SimpleNamespace(RabitTracker=self))
        collective = SimpleNamespace(
            CommunicatorContext=lambda **given: SimpleNamespace(args=given),
            init=lambda **given: self.calls.append(f"init {given['dmlc_task_id']}"),
            finalize=lambda: self.calls.append("finalize"),
        )
        monkeypatch.setitem(sys.modules, "xgboost.collective", collective)

    def __call__(self, **given: Any) -> Standins:
        assert given == {"n_workers": 12, "host_ip": "127.0.0.1", "sortby": "task"}
        return self

    def start(self) -> None:
        self.calls.append("start")

    def worker_args(self) -> dict[str, Any]:
        return WHERE

    def wait_for(self) -> None:
        self.calls.append("wait")

    def free(self) -> None:
        self.calls.append("free")


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]) -> Iterator[Standins]:
    """Make this process rank 0 of twelve; threads are the others."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.setenv("HOPSGPU_COORDINATOR", f"{address[0]}:{address[1]}")
    with ThreadPoolExecutor(11) as pool:
        others = [pool.submit(xgboost._find_tracker, address, rank) for rank in range(1, 12)]
        yield Standins(monkeypatch)
        assert [other.result(HANG_SECONDS) for other in others] == [WHERE] * 11


def test_the_tracker_outlives_the_last_rank(standins: Standins) -> None:
    with xgboost.communicator():
        # Its tasks are sorted as text: 10 comes after 09.
        assert standins.calls == ["start", "init 00"]
    assert standins.calls[2:] == ["finalize", "wait", "free"]


def test_failure_is_reported_before_the_others_lose_their_connections(standins: Standins) -> None:
    with pytest.raises(LookupError), xgboost.communicator():
        raise LookupError
    assert standins.calls[2:] == ["free"]


def test_single_rank_needs_no_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with xgboost.communicator():
        pass
