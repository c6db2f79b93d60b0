"""Heartbeats: a lost peer is reported in time, and no other peer is."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import time
from typing import Any

import pytest

from hopsgpu.control.channel import Channel, new_secret
from hopsgpu.control.handshake import connect
from hopsgpu.control.heartbeat import HeartbeatCheck, HeartbeatState, check_heartbeat
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.control.streams import Inbox
from tests.bounds import HANG_SECONDS
from tests.unit.peers import process

SECRET = new_secret()


@pytest.mark.parametrize(
    "state, now, check",
    [
        # Nothing is due: check again when the next heartbeat is.
        (
            HeartbeatState(sent_at=100, received_at=100),
            105,
            HeartbeatCheck(False, False, False, 110),
        ),
        # The other end is the next to be due.
        (
            HeartbeatState(sent_at=100, received_at=75),
            102,
            HeartbeatCheck(False, False, False, 105),
        ),
        (HeartbeatState(sent_at=90, received_at=99), 101, HeartbeatCheck(False, True, False, 111)),
        # Silence, seen once, then twice, then not any more.
        (HeartbeatState(sent_at=100, received_at=70), 100, HeartbeatCheck(False, False, True, 101)),
        (
            HeartbeatState(sent_at=100, received_at=70, has_missed=True),
            101,
            HeartbeatCheck(True, False, True, 102),
        ),
        (
            HeartbeatState(sent_at=100, received_at=101, has_missed=True),
            101,
            HeartbeatCheck(False, False, False, 110),
        ),
        # Whoever does not listen judges nobody.
        (
            HeartbeatState(sent_at=100, received_at=0, is_reading=False),
            101,
            HeartbeatCheck(False, False, False, 110),
        ),
        (
            HeartbeatState(sent_at=0, received_at=0, is_reading=False, has_missed=True),
            101,
            HeartbeatCheck(False, True, False, 111),
        ),
    ],
)
def test_a_check(state: HeartbeatState, now: float, check: HeartbeatCheck) -> None:
    assert check_heartbeat(state, heartbeat=30, now=now) == check


def test_a_look_is_never_in_the_past() -> None:
    for received_at in (0.0, 70.0, 71.0, 100.0):
        for sent_at in (0.0, 95.0, 100.0):
            for is_reading in (True, False):
                check = check_heartbeat(
                    HeartbeatState(sent_at, received_at, is_reading), heartbeat=30, now=100
                )
                assert 100 < check.next_check < math.inf


class Source(asyncio.Transport):
    """Can be paused, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def test_unread_bytes_are_no_silence() -> None:
    """Only time in which bytes could have come is held against the other end."""
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop)
    inbox.set_transport(Source())
    inbox._time = lambda: 100.0
    inbox.feed_data(b"some")
    assert (inbox.received_at, inbox.is_reading) == (100, True)
    inbox._time = lambda: 150.0
    assert loop.run_until_complete(inbox.readexactly(4)) == b"some"
    assert (inbox.received_at, inbox.is_reading) == (100, True)
    inbox.feed_data(bytes(200_000))
    assert (inbox.received_at, inbox.is_reading) == (150, False)
    inbox._time = lambda: 200.0
    loop.run_until_complete(inbox.readexactly(1))
    assert (inbox.received_at, inbox.is_reading) == (200, False)
    inbox._time = lambda: 250.0
    loop.run_until_complete(inbox.readexactly(199_000))
    assert (inbox.received_at, inbox.is_reading) == (250, True)
    loop.close()


def test_blocked_sender_notices_a_lost_peer() -> None:
    """A driver that is stopped takes nothing; what it said before is not read yet."""

    async def stuck(port: int, pid: int) -> str:
        channel = await connect("127.0.0.1", port, SECRET, heartbeat=1)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ConnectionError):
            await channel.send("output", bytes(50 * 2**20))
        assert await channel.receive() is None
        return channel.reason

    with process("driver", SECRET, 30) as driver:
        assert driver.stdout is not None
        port = int(driver.stdout.readline())
        assert asyncio.run(stuck(port, driver.pid)) == "no heartbeat for 1 s"


def hello(server: ControlServer) -> int:
    event = server.next_event(HANG_SECONDS)
    assert event is not None and event.message is not None and event.message.kind == "hello"
    return event.peer


def echoes(server: ControlServer, peer: int) -> bool:
    """Whether a peer still answers."""
    server.send(peer, "say", word="still here")
    event = server.next_event(HANG_SECONDS)
    return event is not None and event.message is not None and event.peer == peer


def test_a_stopped_agent_is_lost_within_the_bound() -> None:
    with (
        serve(SECRET, "127.0.0.1", heartbeat=4) as server,
        process("agents", server.port, SECRET, 1, {"heartbeat": 4}) as agent,
    ):
        peer = hello(server)
        stopped = time.monotonic()
        os.kill(agent.pid, signal.SIGSTOP)
        event = server.next_event(HANG_SECONDS)
        assert event is not None
        assert (event.peer, event.message, event.reason) == (peer, None, "no heartbeat for 4 s")
        assert 2 < time.monotonic() - stopped < 60
        assert server.send(peer, "say") is False


def test_a_stopped_driver_is_lost_within_the_bound() -> None:
    async def lost(port: int, pid: int) -> tuple[float, Any, str]:
        channel = await connect("127.0.0.1", port, SECRET, heartbeat=4)
        stopped = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        message = await channel.receive()
        return time.monotonic() - stopped, message, channel.reason

    with process("driver", SECRET, 4) as driver:
        assert driver.stdout is not None
        port = int(driver.stdout.readline())
        seconds, message, reason = asyncio.run(lost(port, driver.pid))
    assert (message, reason) == (None, "no heartbeat for 4 s")
    assert 2 < seconds < 60


def test_silent_peers_stay_connected() -> None:
    with (
        serve(SECRET, "127.0.0.1", heartbeat=6) as server,
        process("agents", server.port, SECRET, 1, {"heartbeat": 6}),
    ):
        peer = hello(server)
        assert server.next_event(7) is None
        assert echoes(server, peer)


def test_a_frame_that_takes_long_is_a_sign_of_life() -> None:
    """Bytes with pauses of 0.8 s, twice as long in all as the heartbeat."""

    async def send_slowly(port: int) -> Channel:
        # This end gives no signs of its own within the test.
        channel = await connect("127.0.0.1", port, SECRET, heartbeat=600)
        parts: list[bytes] = []
        write = channel._writer.write
        channel._writer.writelines = parts.extend  # type: ignore[method-assign]
        await channel.send("value", bytes(90_000))
        frame = b"".join(parts)
        for start in range(0, len(frame), 10_000):
            write(frame[start : start + 10_000])
            await asyncio.sleep(0.8)
        return channel

    with serve(SECRET, "127.0.0.1", heartbeat=4) as server:
        loop = asyncio.new_event_loop()
        channel = loop.run_until_complete(send_slowly(server.port))
        event = server.next_event(HANG_SECONDS)
        assert event is not None and event.message is not None, event
        assert event.message.payload == bytes(90_000)
        # And then it is silent.
        end = server.next_event(HANG_SECONDS)
        assert end is not None and end.reason == "no heartbeat for 4 s"
        channel.abort()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_a_driver_that_held_the_gil_loses_nobody() -> None:
    hold = ctypes.PyDLL(None).usleep
    with (
        serve(SECRET, "127.0.0.1", heartbeat=6) as server,
        # Their own bound is longer, but they send a heartbeat each 3.7 s.
        process("agents", server.port, SECRET, 20, {"heartbeat": 11}),
    ):
        peers = [hello(server) for _ in range(20)]
        for _ in range(2):
            hold(6_500_000)
            assert server.next_event(1) is None
        assert all(echoes(server, peer) for peer in peers)
