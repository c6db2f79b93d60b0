"""The driver's end: its port, its queue, and floods of connections and of output."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.control.admission import GRACE_SECONDS, max_unproven, seconds_until_room
from hopsgpu.control.channel import MAX_PAYLOAD, Message, new_secret
from hopsgpu.control.events import MAX_QUEUED, Event, EventQueue
from hopsgpu.control.handshake import connect
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.errors import ConfigError, HopsGpuError
from tests.bounds import HANG_SECONDS
from tests.unit.peers import process

SECRET = new_secret()
FRAME = 65536


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with serve(SECRET, "127.0.0.1") as running:
        yield running


def message(size: int) -> Message:
    return Message("output", {}, size=size)


def test_connections_and_their_ends_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.control")

    async def agent(port: int) -> None:
        channel = await connect("127.0.0.1", port, SECRET)
        await channel.send("hello")
        await channel.close()

    with serve(SECRET, "127.0.0.1") as server:
        port = server.port
        asyncio.run(agent(port))
        while (event := server.next_event(HANG_SECONDS)) is not None and event.message is not None:
            pass
    logged = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert f"127.0.0.1, port {port}" in logged[0]
    assert "agent 0 has connected" in logged
    assert any("agent 0 has ended: " in text for text in logged)
    assert SECRET.hex() not in caplog.text


class Puts:
    """A queue in an event loop of its own; a put is done, or waits for room."""

    def __init__(self, most: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.queue = EventQueue(self.loop, most)

    def put(self, peer: int, size: int) -> asyncio.Task[None]:
        task = self.loop.create_task(self.queue.put(Event(peer, message(size))))
        self.settle()
        return task

    def settle(self) -> None:
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def take(self) -> int | None:
        event = self.queue.take(0)
        self.settle()
        return event and event.peer


@pytest.fixture
def puts() -> Iterator[Puts]:
    made = Puts(10_000)
    yield made
    made.loop.close()


def test_full_queue_delays_events_and_keeps_their_order(puts: Puts) -> None:
    # An event that is larger than the whole queue must not wait forever.
    assert puts.put(1, 50_000).done()
    waiting = [puts.put(2, 10_000), puts.put(3, 10)]
    assert not any(task.done() for task in waiting)
    assert puts.take() == 1
    assert [task.done() for task in waiting] == [True, False]
    assert puts.take() == 2
    assert waiting[1].done()
    assert (puts.take(), puts.take()) == (3, None)


def test_end_of_a_connection_needs_no_room(puts: Puts) -> None:
    puts.put(1, 50_000)
    puts.queue.put_end(Event(2, None, "closed"))
    assert (puts.take(), puts.take()) == (1, 2)


def test_events_of_a_peer_that_is_sent_to_do_not_wait(puts: Puts) -> None:
    puts.put(1, 50_000)
    waiting = [puts.put(2, 10), puts.put(3, 10)]
    with puts.queue.sending_to(3):
        puts.settle()
        assert [task.done() for task in waiting] == [False, True]
        assert puts.put(3, 10).done()
    later = puts.put(3, 10)
    assert not later.done()
    assert [puts.take() for _ in range(5)] == [1, 3, 3, 2, 3]


def test_cancelled_put_is_forgotten(puts: Puts) -> None:
    puts.put(1, 50_000)
    abandoned, waiting = puts.put(2, 10), puts.put(3, 10)
    abandoned.cancel()
    assert puts.take() == 1
    assert abandoned.cancelled() and waiting.done()
    assert (puts.take(), puts.take()) == (3, None)


def resident() -> int:
    """MiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20


def test_output_that_is_not_read_stays_with_its_rank() -> None:
    """One peer sends 200 MB, with heartbeats meanwhile; another peer is heard after them."""
    number = 200 * 2**20 // FRAME
    with (
        serve(SECRET, "127.0.0.1", heartbeat=5) as server,
        process("flood", server.port, SECRET, number, {"heartbeat": 5}),
    ):
        before = resident()
        first = server.next_event(HANG_SECONDS)
        assert first is not None and first.message is not None
        # The peer is not lost although nothing is read for longer than the heartbeat.
        assert not threading.Event().wait(7.5)
        assert server._router._rest._queued <= MAX_QUEUED + 2 * FRAME
        assert resident() - before < 60
        with process("agents", server.port, SECRET, 1, {"heartbeat": 5}):
            numbers = [first.message["number"]]
            kinds = []
            while "all" not in kinds or "hello" not in kinds:
                event = server.next_event(HANG_SECONDS)
                assert event is not None and event.message is not None, event
                kinds.append(event.message.kind)
                if event.message.kind == "output":
                    numbers.append(event.message["number"])
    assert numbers == list(range(number))
    assert resident() - before < 100


def test_message_reaches_a_peer_that_is_sending_much(server: ControlServer) -> None:
    """Neither end reads until the other has: the driver then reads beyond its bound."""
    number = 3 * MAX_QUEUED // FRAME

    async def talk() -> int:
        channel = await connect("127.0.0.1", server.port, SECRET)
        for _ in range(number):
            await channel.send("output", bytes(FRAME))
        received = await channel.receive()
        await channel.close()
        return 0 if received is None else len(received.payload)

    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.append(asyncio.run(talk())), daemon=True)
    thread.start()
    first = server.next_event(HANG_SECONDS)
    assert first is not None
    assert server.send(first.peer, "run", bytes(30 * 2**20))
    while (event := server.next_event(HANG_SECONDS)) is not None and event.message is not None:
        pass
    thread.join(HANG_SECONDS)
    assert sizes == [30 * 2**20]


def test_an_event_has_the_time_at_which_its_connection_was_accepted(
    server: ControlServer,
) -> None:
    connected: list[float] = []

    async def talk() -> None:
        channel = await connect("127.0.0.1", server.port, SECRET)
        connected.append(time.time())
        await channel.send("hello")
        await channel.close()

    began = time.time()
    thread = threading.Thread(target=lambda: asyncio.run(talk()), daemon=True)
    thread.start()
    event = server.next_event(HANG_SECONDS)
    thread.join(HANG_SECONDS)
    assert event is not None and event.opened is not None
    assert began <= event.opened <= connected[0] <= event.at


def test_peer_keeps_bytes_until_it_gets_others(server: ControlServer) -> None:
    heard: list[tuple[str, str, bytes]] = []

    async def talk() -> None:
        channel = await connect("127.0.0.1", server.port, SECRET)
        await channel.send("hello")
        while (message := await channel.receive()) is not None and message.kind != "over":
            heard.append((message.kind, message.fields.get("name", ""), message.payload))
        await channel.close()

    thread = threading.Thread(target=lambda: asyncio.run(talk()), daemon=True)
    thread.start()
    first = server.next_event(HANG_SECONDS)
    assert first is not None
    with pytest.raises(HopsGpuError, match="cannot be sent"):
        server.keep(first.peer, "large", bytes(MAX_PAYLOAD + 1))
    for name in ("large", "large", "b", "b", "large"):
        assert server.keep(first.peer, name, name.encode())
        assert server.send(first.peer, "run")
    assert server.send(first.peer, "over")
    thread.join(HANG_SECONDS)
    kept = [f"{kind} {name}".strip() for kind, name, _ in heard]
    assert kept == ["keep large", "run", "run", "keep b", "run", "run", "keep large", "run"]
    assert [bytes_ for kind, _, bytes_ in heard if kind == "keep"] == [b"large", b"b", b"large"]
    gone = server.next_event(HANG_SECONDS)
    assert gone is not None and gone.message is None
    assert not server.keep(first.peer, "large", b"large")
    assert server._kept == {}


@pytest.mark.parametrize(
    ("since", "wait"),
    [({}, None), ({1: 5.0}, None), ({1: 5.0, 2: 9.0}, 0.0), ({1: 9.5, 2: 9.0}, 1.5)],
)
def test_oldest_unproven_connection_is_closed_first(
    since: dict[int, float], wait: float | None
) -> None:
    assert GRACE_SECONDS == 2
    assert seconds_until_room(since, limit=2, now=10.0) == wait


def test_strangers_leave_descriptors_to_others() -> None:
    assert (max_unproven(1024), max_unproven(10**6), max_unproven(1)) == (512, 1024, 1)


FLOOD = """
import resource, socket, sys
port, number = int(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
connections = [socket.socket() for _ in range(number)]
for connection in connections:
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
print("connected", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def silent_connections(port: int, number: int) -> Iterator[None]:
    child = subprocess.Popen(
        [sys.executable, "-c", FLOOD, str(port), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == b"connected\n"
        yield
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def test_a_flood_of_silent_connections_keeps_no_agent_out(server: ControlServer) -> None:
    async def join() -> None:
        endpoint = "127.0.0.1", server.port, SECRET
        channels = [await connect(*endpoint, seconds=HANG_SECONDS) for _ in range(3)]
        for channel in channels:
            await channel.send("hello")
        for channel in channels:
            await channel.close()

    with silent_connections(server.port, 2000):
        began = time.monotonic()
        asyncio.run(join())
        print(f"joined beside 2,000 silent connections after {time.monotonic() - began:.1f} s")
        kinds = []
        for _ in range(6):
            event = server.next_event(HANG_SECONDS)
            assert event is not None
            kinds.append(event.message and event.message.kind)
        assert kinds.count("hello") == 3


def test_silent_stranger_is_disconnected() -> None:
    with (
        serve(SECRET, "127.0.0.1", handshake_seconds=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as stranger,
    ):
        stranger.recv(40, socket.MSG_WAITALL)
        assert stranger.recv(1) == b""


def test_disconnect_and_the_end_of_the_server_close_connections() -> None:
    async def ended(port: int) -> bool:
        channel = await connect("127.0.0.1", port, SECRET)
        await channel.send("hello")
        end = await channel.receive()
        await channel.close()
        return end is None

    async def disconnected(server: ControlServer) -> bool:
        talking = asyncio.create_task(ended(server.port))
        event = await asyncio.to_thread(server.next_event, HANG_SECONDS)
        assert event is not None
        await asyncio.to_thread(server.disconnect, [event.peer])
        return await talking

    with serve(SECRET, "127.0.0.1") as server:
        assert asyncio.run(disconnected(server))
        port = server.port
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)


def test_a_peer_that_reads_nothing_delays_nobody() -> None:
    async def stuck(port: int) -> tuple[Any, ...]:
        channel = await connect("127.0.0.1", port, SECRET)
        channel._writer.transport.pause_reading()  # type: ignore[attr-defined]
        await channel.send("hello")
        return (channel,)

    began = time.monotonic()
    with serve(SECRET, "127.0.0.1") as server:
        loop = asyncio.new_event_loop()
        held = loop.run_until_complete(stuck(server.port))
        assert held and (event := server.next_event(HANG_SECONDS)) is not None
        threading.Thread(
            target=server.send, args=(event.peer, "run", bytes(50 * 2**20)), daemon=True
        ).start()
        server.disconnect_all()
    assert time.monotonic() - began < HANG_SECONDS
    loop.close()


def test_unavailable_address_or_port_is_a_config_error(server: ControlServer) -> None:
    first = server.port
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1, .*{first}.*spark\.hopsgpu\.ports"):
        serve(SECRET, "127.0.0.1", range(first, first + 1)).__enter__()
    # TEST-NET-3 (RFC 5737).
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1, any port"):
        serve(SECRET, "203.0.113.1").__enter__()


def test_next_port_of_the_range_is_used_if_one_is_not_free(server: ControlServer) -> None:
    ports = range(server.port, server.port + 50)
    with serve(SECRET, "127.0.0.1", ports) as other:
        assert other.port in ports[1:]
        with serve(SECRET, "127.0.0.1", ports) as third:
            assert third.port in set(ports) - {server.port, other.port}


def test_server_listens_on_its_own_address_only() -> None:
    with serve(SECRET, "127.0.0.2") as server:
        socket.create_connection(("127.0.0.2", server.port), timeout=HANG_SECONDS).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)
