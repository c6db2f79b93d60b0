"""The control channel against friends, strangers and forgers: real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.worker import channel as channel_module
from hopsgpu.worker.channel import ChannelError, connect, new_secret
from hopsgpu.worker.server import ControlServer, serve

SECRET = new_secret()
SECONDS = 5.0


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with serve(SECRET, "127.0.0.1") as running:
        yield running


def raw(server: ControlServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)


def test_frames_go_both_ways(server: ControlServer) -> None:
    async def agent() -> tuple[str, bytes]:
        channel = await connect("127.0.0.1", server.port, SECRET)
        await channel.send("hello", b"\x00\xffpayload", rank=3, name="grüße")
        message = await channel.receive()
        assert message is not None
        await channel.close()
        return message["word"], message.payload

    async def both() -> tuple[str, bytes]:
        talking = asyncio.create_task(agent())
        event = await asyncio.to_thread(server.next_event, SECONDS)
        assert event is not None and event.message is not None
        assert (event.message.kind, event.message.payload) == ("hello", b"\x00\xffpayload")
        assert event.message.fields == {"rank": 3, "name": "grüße"}
        sent = await asyncio.to_thread(server.send, event.peer, "run", b"x" * 300_000, word="go")
        assert sent
        return await talking

    word, payload = asyncio.run(both())
    assert (word, payload) == ("go", b"x" * 300_000)
    end = server.next_event(SECONDS)
    assert end is not None and end.message is None
    assert server.send(end.peer, "run") is False


def test_a_wrong_secret_is_turned_away(server: ControlServer) -> None:
    with pytest.raises(ChannelError, match="ended the handshake"):
        asyncio.run(connect("127.0.0.1", server.port, new_secret()))
    assert server.next_event(0.2) is None


def test_a_driver_that_does_not_know_the_secret_is_left() -> None:
    async def false_driver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hopsgpu1" + bytes(32))
        await reader.readexactly(72)
        writer.write(bytes(32))
        await writer.drain()
        writer.close()

    async def meet() -> None:
        listening = await asyncio.start_server(false_driver, "127.0.0.1", 0)
        async with listening:
            await connect(*listening.sockets[0].getsockname(), SECRET)

    with pytest.raises(ChannelError, match="is not the driver of this run"):
        asyncio.run(meet())


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x05" * 36, b"hopsgpu1" + bytes(64), bytes(100_000)],
)
def test_strangers_do_no_harm(server: ControlServer, said: bytes) -> None:
    with raw(server) as stranger:
        assert len(stranger.recv(40, socket.MSG_WAITALL)) == 40
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        # Hung up on, whether by FIN or by RST for bytes that were never read.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert server.next_event(0.1) is None
    test_frames_go_both_ways(server)


def test_a_silent_stranger_is_hung_up_on(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_SECONDS", 0.2)
    with raw(server) as stranger:
        stranger.recv(40, socket.MSG_WAITALL)
        assert stranger.recv(1) == b""


def test_a_changed_a_repeated_and_a_huge_frame_break_the_connection(server: ControlServer) -> None:
    body = b'{"kind": "hello"}'

    async def attack(frames: list[bytes]) -> None:
        channel = await connect("127.0.0.1", server.port, SECRET)
        for frame in frames:
            channel._writer.write(frame)
        await channel._writer.drain()
        assert await channel.receive() is None

    async def recorded() -> bytes:
        """A genuine first frame of one connection, to be played into another."""
        channel = await connect("127.0.0.1", server.port, SECRET)
        sent: list[bytes] = []
        channel._writer.writelines = lambda parts: sent.extend(parts)  # type: ignore[method-assign]
        await channel.send("hello")
        await channel.close()
        return b"".join(sent)

    forged = struct.pack("!IQ", len(body), 0) + body + bytes(32)
    for frames in ([forged], [asyncio.run(recorded())], [struct.pack("!IQ", 2**31, 0)]):
        asyncio.run(attack(frames))
    kinds = []
    while (event := server.next_event(0.2)) is not None:
        kinds.append(event.message.kind if event.message is not None else None)
    assert kinds.count("broken") == 3
    assert "hello" not in kinds


def test_too_large_a_frame_is_refused_before_it_is_sent(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send() -> None:
        channel = await connect("127.0.0.1", server.port, SECRET)
        monkeypatch.setattr(channel_module, "MOST_PAYLOAD", 10)
        with pytest.raises(ChannelError, match="over the limit"):
            await channel.send("value", bytes(11))
        monkeypatch.undo()
        await channel.send("fine", bytes(11))
        await channel.close()

    asyncio.run(send())
    event = server.next_event(SECONDS)
    assert event is not None and event.message is not None and event.message.kind == "fine"


def test_hang_up_and_the_end_of_the_server_close_connections() -> None:
    async def ended(port: int) -> bool:
        channel = await connect("127.0.0.1", port, SECRET)
        await channel.send("hello")
        return await channel.receive() is None

    async def hung_up(server: ControlServer) -> bool:
        talking = asyncio.create_task(ended(server.port))
        event = await asyncio.to_thread(server.next_event, SECONDS)
        assert event is not None
        await asyncio.to_thread(server.hang_up, [event.peer])
        return await talking

    with serve(SECRET, "127.0.0.1") as server:
        assert asyncio.run(hung_up(server))
        port = server.port
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


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
        assert held and (event := server.next_event(SECONDS)) is not None
        threading.Thread(
            target=server.send, args=(event.peer, "run", bytes(50 * 2**20)), daemon=True
        ).start()
        server.end_all()
    assert time.monotonic() - began < 5
    loop.close()


def test_an_address_or_a_port_that_cannot_be_had_is_a_config_error(server: ControlServer) -> None:
    taken = range(server.port, server.port + 1)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*spark\.hopsgpu\.ports"):
        serve(SECRET, "127.0.0.1", taken).__enter__()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        serve(SECRET, "192.0.2.1").__enter__()
