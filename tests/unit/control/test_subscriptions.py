"""Each subscription gets what its agents say about its run, and the ends of their connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hopsgpu.control.channel import Channel, new_secret
from hopsgpu.control.events import MAX_QUEUED, Event
from hopsgpu.control.handshake import connect
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.control.subscriptions import Subscription
from tests.bounds import HANG_SECONDS
from tests.conftest import until

SECRET = new_secret()


class Agent:
    """An agent of a server; it is connected, and what it has said has been routed."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._channel: Channel = self._do(connect("127.0.0.1", server.port, SECRET))
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.say("hello")
        event = server.next_event(HANG_SECONDS)
        assert event is not None
        self.key = event.peer

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG_SECONDS)

    def say(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        self._do(self._channel.send(kind, payload, **fields))

    def hear(self) -> tuple[str, dict[str, Any]]:
        message = self._do(self._channel.receive())
        return message.kind, dict(message.fields)

    def leave(self) -> None:
        """Ends the connection; returns once the server knows."""
        self._do(self._channel.close())
        assert until(lambda: not self._server.is_connected(self.key))

    def end(self) -> None:
        self._do(self._channel.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with serve(SECRET, "127.0.0.1") as running:
        yield running


@pytest.fixture
def agent(server: ControlServer) -> Iterator[Callable[[], Agent]]:
    with contextlib.ExitStack() as stack:

        def make() -> Agent:
            made = Agent(server)
            stack.callback(made.end)
            return made

        yield make


def heard(subscription: Subscription) -> list[tuple[int, str]]:
    """What has arrived: who said what; "" for the end of a connection."""
    found = []
    while (event := subscription.next_event(0.3)) is not None:
        found.append((event.peer, event.message.kind if event.message is not None else ""))
    return found


def test_events_come_to_the_runs_that_they_concern(
    server: ControlServer, agent: Callable[[], Agent]
) -> None:
    first, second = agent(), agent()
    with (
        server.subscribe("s-trial-1", [first.key]) as one,
        server.subscribe("s-trial-2", [first.key, second.key]) as two,
    ):
        first.say("started", run_id="s-trial-1")
        first.say("ended", run_id="s-trial-7")
        second.say("started", run_id="s-trial-1")
        first.leave()
        second.leave()
        assert heard(one) == [(first.key, "started"), (first.key, "")]
        assert sorted(heard(two)) == [(first.key, ""), (second.key, "")]
        assert one.connected == two.connected == set()


def test_what_is_about_no_run_comes_to_whoever_acquires_the_executors(
    server: ControlServer, agent: Callable[[], Agent]
) -> None:
    one = agent()
    with server.subscribe("run-1", [one.key]) as run:
        one.say("hello")
        one.leave()
        assert heard(run) == [(one.key, "")]
    assert (hello := server.next_event(HANG_SECONDS)) is not None
    assert hello.message is not None and hello.message.kind == "hello"
    assert (end := server.next_event(HANG_SECONDS)) is not None and end.message is None


def test_earlier_end_of_a_connection_is_an_event(
    server: ControlServer, agent: Callable[[], Agent]
) -> None:
    one = agent()
    assert server.is_connected(one.key)
    one.leave()
    assert until(lambda: server.next_event(0.1) is not None)
    with server.subscribe("run-1", [one.key]) as run:
        event = run.next_event(HANG_SECONDS)
        assert event is not None and event.message is None and event.reason == "closed"


def test_only_the_attempt_that_is_subscribed_to_counts(
    server: ControlServer, agent: Callable[[], Agent]
) -> None:
    one = agent()
    with (
        server.subscribe("run-1", [one.key], attempt=0) as late,
        server.subscribe("run-1", [one.key], attempt=1) as run,
    ):
        one.say("ended", run_id="run-1", attempt=0)
        one.say("started", run_id="run-1", attempt=1)
        one.say("left", run_id="run-1")
        assert heard(late) == [(one.key, "ended"), (one.key, "left")]
        assert heard(run) == [(one.key, "started"), (one.key, "left")]


def test_disconnected_peer_is_lost_at_once(
    server: ControlServer, agent: Callable[[], Agent]
) -> None:
    one, other = agent(), agent()
    with server.subscribe("run-1", [one.key, other.key]) as run:
        one.say("started", run_id="run-1")
        run.disconnect([one.key])
        assert not server.is_connected(one.key) and run.connected == {other.key}
        other.say("started", run_id="run-1")
        seen = []
        while (other.key, "started") not in seen:
            seen += heard(run)
        assert seen == [(other.key, "started")]


def test_a_message_names_the_run(server: ControlServer, agent: Callable[[], Agent]) -> None:
    one = agent()
    with server.subscribe("run-1", [one.key]) as run:
        assert run.send(one.key, "stop", dump_stacks=False)
        assert run.keep(one.key, "modules", b"")
    assert one.hear() == ("stop", {"run_id": "run-1", "dump_stacks": False})
    assert one.hear() == ("keep", {"name": "modules"})


def test_words_about_a_run_that_is_over_hold_nobody_up(
    server: ControlServer, agent: Callable[[], Agent]
) -> None:
    """An agent that says more than a queue takes is read again once its run is over."""
    one = agent()
    thread = threading.Thread(
        target=lambda: [
            one.say("output", bytes(2**20), run_id="run-1") for _ in range(2 * MAX_QUEUED // 2**20)
        ],
        daemon=True,
    )
    with server.subscribe("run-1", [one.key]):
        thread.start()
    thread.join(HANG_SECONDS)
    one.say("hello")
    assert (event := server.next_event(HANG_SECONDS)) is not None and event.message is not None


def test_a_listener_is_told_at_once_and_of_what_it_missed(
    server: ControlServer, agent: Callable[[], Agent]
) -> None:
    one = agent()
    one.say("hello")
    told: list[Event] = []
    with server.listening(told.append):
        one.say("started", run_id="run-1")
        one.leave()
        assert until(lambda: len(told) == 2)
    assert [event.message and event.message.kind for event in told] == ["hello", None]
    assert server.next_event(0.0) is None


def test_waiting_thread_is_woken_and_loses_no_event(
    server: ControlServer, agent: Callable[[], Agent]
) -> None:
    one = agent()
    with server.subscribe("run", {one.key}) as told:
        threading.Timer(0.1, told.wake).start()
        began = time.monotonic()
        assert told.next_event(HANG_SECONDS) is None
        assert time.monotonic() - began < HANG_SECONDS / 2
        told.wake()
        one.say("started", run_id="run")
        assert told.next_event(HANG_SECONDS) is None
        event = told.next_event(HANG_SECONDS)
        assert event is not None and event.message is not None and event.message.kind == "started"
