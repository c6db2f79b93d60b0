"""The control channel against agents, strangers and forgers, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import pytest

from hopsgpu.agent.addresses import held_ports
from hopsgpu.backends.spark.barrier_job import reason_of
from hopsgpu.control.channel import MAX_PAYLOAD, Channel, ChannelError, new_secret
from hopsgpu.control.events import Event
from hopsgpu.control.handshake import UnreachableError, connect
from hopsgpu.control.server import ControlServer, serve
from tests.bounds import HANG_SECONDS

SECRET = new_secret()
NO_PAUSES = (0.0, 0.0)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with serve(SECRET, "127.0.0.1") as running:
        yield running


def raw(server: ControlServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS)


@contextlib.asynccontextmanager
async def connected(server: ControlServer) -> AsyncIterator[Channel]:
    """An agent's end, closed at the end."""
    channel = await connect("127.0.0.1", server.port, SECRET)
    try:
        yield channel
    finally:
        await channel.close()


def next_event(server: ControlServer) -> Event:
    event = server.next_event(HANG_SECONDS)
    assert event is not None
    return event


def test_frames_go_both_ways(server: ControlServer) -> None:
    async def agent() -> tuple[str, bytes]:
        async with connected(server) as channel:
            await channel.send("hello", b"\x00\xffpayload", rank=3, name="grüße")
            message = await channel.receive()
            assert message is not None
            return message["word"], message.payload

    async def both() -> tuple[str, bytes]:
        talking = asyncio.create_task(agent())
        heard = asyncio.create_task(asyncio.to_thread(next_event, server))
        await asyncio.wait((talking, heard), return_when=asyncio.FIRST_COMPLETED)
        if talking.done():
            talking.result()  # raises: it ends by an error only, since nobody has answered
        event = await heard
        assert event.message is not None and event.reason == ""
        assert (event.message.kind, event.message.payload) == ("hello", b"\x00\xffpayload")
        assert event.message.fields == {"rank": 3, "name": "grüße"}
        sent = await asyncio.to_thread(server.send, event.peer, "run", b"x" * 300_000, word="go")
        assert sent
        return await talking

    word, payload = asyncio.run(both())
    assert (word, payload) == ("go", b"x" * 300_000)
    end = next_event(server)
    assert (end.message, end.reason) == (None, "closed")
    assert server.send(end.peer, "run") is False


@pytest.mark.parametrize(
    "text", [os.fsdecode(b"caf\xe9"), "\ud83d\ude00", '\0\x1b"\\é😀'], ids=ascii
)
def test_any_text_goes_both_ways(server: ControlServer, text: str) -> None:
    async def agent() -> Any:
        async with connected(server) as channel:
            await channel.send("said", word=text)
            event = await asyncio.to_thread(next_event, server)
            assert event.message is not None and event.message["word"] == text
            await asyncio.to_thread(server.send, event.peer, "run", word=text)
            message = await channel.receive()
            assert message is not None
            return message["word"]

    assert asyncio.run(agent()) == text


def test_agent_with_a_wrong_secret_is_refused(server: ControlServer) -> None:
    with pytest.raises(ChannelError, match="closed"):
        asyncio.run(connect("127.0.0.1", server.port, new_secret(), pauses=NO_PAUSES))
    assert server.next_event(0.2) is None


@pytest.mark.parametrize("reflected", [False, True])
def test_driver_without_the_secret_is_refused(reflected: bool) -> None:
    """The driver invents a proof, or returns the agent's own."""

    async def false_driver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hopsgpu1" + bytes(32))
        answer = await reader.readexactly(72)
        writer.write(answer[40:] if reflected else bytes(32))
        await writer.drain()
        writer.close()

    async def meet() -> None:
        listening = await asyncio.start_server(false_driver, "127.0.0.1", 0)
        async with listening:
            await connect(*listening.sockets[0].getsockname(), SECRET)

    with pytest.raises(ChannelError, match="not the driver"):
        asyncio.run(meet())


def test_server_with_another_protocol_is_refused() -> None:
    async def web_server(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def meet() -> None:
        async with await asyncio.start_server(web_server, "127.0.0.1", 0) as listening:
            await connect(*listening.sockets[0].getsockname(), SECRET)

    with pytest.raises(ChannelError, match="hopsgpu's protocol"):
        asyncio.run(meet())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x05cos\nsystem\n(S'true'\ntR." * 4,
        b"hopsgpu1" + bytes(16),
        b"hopsgpu1" + bytes(64),
        struct.pack("!IQ", 2**32 - 1, 2**63) * 6,
        bytes(100_000),
    ],
)
def test_strangers_do_no_harm(server: ControlServer, sent: bytes) -> None:
    with raw(server) as stranger:
        assert len(stranger.recv(40, socket.MSG_WAITALL)) == 40
        # The server disconnects, by FIN or, if it has not read all bytes, by RST.
        with contextlib.suppress(OSError):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert server.next_event(0.1) is None
    test_frames_go_both_ways(server)


def test_a_replayed_handshake_is_refused(server: ControlServer) -> None:
    async def recorded() -> bytes:
        """Return the proof of a genuine agent."""
        proofs: list[bytes] = []

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            driver_reader, driver_writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(await driver_reader.readexactly(40))
            proofs.append(await reader.readexactly(72))
            driver_writer.write(proofs[0])
            writer.write(await driver_reader.readexactly(32))
            driver_writer.close()
            writer.close()

        async with await asyncio.start_server(between, "127.0.0.1", 0) as listening:
            channel = await connect(*listening.sockets[0].getsockname(), SECRET)
            assert await channel.receive() is None
            await channel.close()
        return proofs[0]

    genuine = asyncio.run(recorded())
    assert next_event(server).reason == "closed"
    with raw(server) as stranger:
        stranger.recv(40, socket.MSG_WAITALL)
        stranger.sendall(genuine)
        assert stranger.recv(1) == b""
    assert server.next_event(0.1) is None


def recorded_frame(channel: Channel, body: bytes = b'{"kind": "hello"}') -> bytes:
    """Return a genuine frame, which is not sent."""
    parts: list[bytes] = []
    writelines = channel._writer.writelines
    channel._writer.writelines = parts.extend  # type: ignore[method-assign]
    channel._write(body, b"")
    channel._writer.writelines = writelines  # type: ignore[method-assign]
    return b"".join(parts)


def attack(server: ControlServer, *frames: bytes | None) -> Event:
    """Return the driver's event after an agent that knows the secret has sent these bytes.

    None stands for a genuine first frame.
    """

    async def send() -> None:
        async with connected(server) as channel:
            first = recorded_frame(channel)
            for frame in frames:
                channel._writer.write(first if frame is None else frame)
            if len(b"".join(f or first for f in frames)) < len(first):
                channel._writer.write_eof()
            assert await channel.receive() is None

    asyncio.run(send())
    return next_event(server)


HELLO = b'{"kind": "hello"}'
WRONG_CODE = "wrong authentication code"


def test_forged_replayed_and_huge_frames_break_the_connection(server: ControlServer) -> None:
    async def of_another_connection() -> bytes:
        async with connected(server) as channel:
            return recorded_frame(channel)

    other = asyncio.run(of_another_connection())
    assert next_event(server).reason == "closed"
    forged = struct.pack("!IQ", len(HELLO), 0) + HELLO + bytes(32)
    assert WRONG_CODE in attack(server, forged).reason
    assert WRONG_CODE in attack(server, other).reason
    for lengths in ((2**31, 0), (0, 2**40), (10, 2**63)):
        end = attack(server, struct.pack("!IQ", *lengths))
        assert "{} + {}".format(*lengths) in end.reason
    # The genuine frame is accepted, its repetition is not.
    assert attack(server, None, None).message is not None
    assert WRONG_CODE in next_event(server).reason


def test_truncated_frame_is_no_message(server: ControlServer) -> None:
    end = attack(server, struct.pack("!IQ", len(HELLO), 0) + HELLO[:5])
    assert end.message is None and "middle of a frame" in end.reason


def test_frames_sent_back_to_their_sender_are_refused(server: ControlServer) -> None:
    async def mirror() -> None:
        async with connected(server) as channel:
            await channel.send("hello")
            event = await asyncio.to_thread(next_event, server)
            await asyncio.to_thread(server.send, event.peer, "run")
            channel._writer.write(await channel._inbox.read(1000))
            assert await channel.receive() is None

    asyncio.run(mirror())
    assert WRONG_CODE in next_event(server).reason


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 500_000 + b"]" * 500_000,
        b'{"kind":' * 100_000 + b"1" + b"}" * 100_000,
        b'["kind"]',
        b"7",
        b"{}",
        b'{"kind": 7}',
        b'{"kind": null, "rank": 1}',
        b"\xff\xfe",
        b"{",
        b'{"kind": "hello", "rank": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: body[:20].decode(errors="replace"),
)
def test_frame_that_is_no_message_breaks_only_its_connection(
    server: ControlServer, body: bytes
) -> None:
    async def send() -> None:
        async with connected(server) as channel:
            channel._write(body, b"")
            assert await channel.receive() is None

    asyncio.run(send())
    end = next_event(server)
    assert end.message is None
    assert end.reason.startswith("broke the protocol: ")
    test_frames_go_both_ways(server)


def test_agent_knows_why_its_driver_has_disconnected() -> None:
    async def hung_up(server: ControlServer) -> tuple[Any, str]:
        async with connected(server) as channel:
            await channel.send("hello")
            event = await asyncio.to_thread(next_event, server)
            await asyncio.to_thread(server.disconnect, [event.peer])
            message = await channel.receive()
            with pytest.raises(ConnectionError, match=f": {channel.reason}"):
                await channel.send("value")
            return message, channel.reason

    with serve(SECRET, "127.0.0.1") as server:
        message, reason = asyncio.run(hung_up(server))
        assert message is None and reason in ("closed", "connection reset")
        assert next_event(server).reason == "closed by this side"


def test_nothing_is_written_for_a_disconnected_driver(caplog: pytest.LogCaptureFixture) -> None:
    """The ranks continue to print: asyncio would warn of each line, on the node's stderr."""

    async def output(server: ControlServer) -> list[str]:
        async with connected(server) as channel:
            await channel.send("hello")
            event = await asyncio.to_thread(next_event, server)
            await asyncio.to_thread(server.disconnect, [event.peer])
            ends = []
            while len(ends) < 20:  # nobody receives: the first few may still reach the kernel
                try:
                    await channel.send("output", b"x" * 100_000)
                except ConnectionError as error:
                    ends.append(str(error))
            await channel.notify("output")
            return ends

    with serve(SECRET, "127.0.0.1") as server:
        assert any(reason.endswith(": closed") for reason in asyncio.run(output(server)))
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_killed_peer_is_noticed(server: ControlServer) -> None:
    async def reset() -> None:
        channel = await connect("127.0.0.1", server.port, SECRET)
        connection = channel._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        channel.abort()
        await asyncio.sleep(0)

    asyncio.run(reset())
    assert next_event(server).reason == "connection reset"


def test_too_large_a_frame_is_refused_before_it_is_sent(server: ControlServer) -> None:
    async def send() -> None:
        async with connected(server) as channel:
            with pytest.raises(ChannelError, match=str(MAX_PAYLOAD)):
                await channel.send("value", bytes(MAX_PAYLOAD + 1))
            await channel.send("fine", bytes(11))

    asyncio.run(send())
    event = next_event(server)
    assert event.message is not None and event.message.kind == "fine"


def unreachable(port: int, seconds: float = HANG_SECONDS) -> UnreachableError:
    with pytest.raises(UnreachableError) as caught:
        asyncio.run(connect("127.0.0.1", port, SECRET, seconds=seconds, pauses=NO_PAUSES))
    error = caught.value
    assert f" 127.0.0.1:{port} " in str(error)
    assert "spark.hopsgpu.address" in str(error) and "spark.hopsgpu.ports" in str(error)
    # Spark carries the whole text to the driver.
    shown = "".join(traceback.format_exception(error))
    spark = f"org.apache.spark.SparkException: Job aborted\n{shown}\n\tat org.apache.spark.X(Y:1)\n"
    assert reason_of(spark) == f"hopsgpu.control.handshake.UnreachableError: {error}"
    return error


def test_driver_that_refuses_connections_is_unreachable() -> None:
    with held_ports(1) as held:
        assert "(Connection refused)" in str(unreachable(held.ports[0]))


def test_silent_driver_is_unreachable() -> None:
    """A firewall that drops packets, or a stopped driver, is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "0.2 s)" in str(unreachable(silent.getsockname()[1], 0.2))


def test_unknown_host_is_unreachable() -> None:
    with pytest.raises(UnreachableError, match=r"driver\.invalid:9 .*spark\.driver\.host"):
        asyncio.run(connect("driver.invalid", 9, SECRET, pauses=NO_PAUSES))


def test_refused_connection_is_tried_again() -> None:
    with held_ports(1) as held, contextlib.ExitStack() as running:
        (port,) = held.ports

        def serve_after_the_first_try() -> Iterable[float]:
            running.enter_context(serve(SECRET, "127.0.0.1", range(port, port + 1)))
            yield 0.0

        async def meet() -> None:
            channel = await connect("127.0.0.1", port, SECRET, pauses=serve_after_the_first_try())
            await channel.close()

        asyncio.run(meet())
