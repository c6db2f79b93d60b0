"""TLS below the control channel: the bytes on the wire, and the identity of the driver."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu.control.channel import ChannelError, new_secret
from hopsgpu.control.handshake import connect
from hopsgpu.control.peer import DriverEndpoint, connect_to_driver
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.control.tls import is_network_encrypted, new_identity
from hopsgpu.errors import ConfigError
from tests.bounds import HANG_SECONDS
from tests.unit.peers import process

SECRET = new_secret()
WORD = b"a word that is not to be read by others"


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with serve(SECRET, "127.0.0.1", encrypted=True) as running:
        yield running


@pytest.mark.parametrize(
    ("settings", "encrypted"),
    [
        ({}, False),
        ({"spark.network.crypto.enabled": "true", "spark.authenticate": "true"}, True),
        ({"spark.network.crypto.enabled": " TRUE "}, True),
        ({"spark.network.crypto.enabled": "false"}, False),
        ({"spark.authenticate.enableSaslEncryption": "true"}, True),
        ({"spark.ssl.rpc.enabled": "true"}, True),
        # The setting is for the web pages; RPC does not inherit it.
        ({"spark.ssl.enabled": "true"}, False),
        ({"spark.authenticate": "true"}, False),
        # The setting is for files.
        ({"spark.io.encryption.enabled": "true"}, False),
    ],
)
def test_sparks_network_encryption_is_known(settings: dict[str, str], encrypted: bool) -> None:
    assert is_network_encrypted(settings.get) is encrypted


def on_the_wire(server: ControlServer, certificate: bytes | None) -> bytes:
    """Return all bytes between the driver and an agent that exchange WORD."""
    passed: list[bytes] = []
    passed_on = asyncio.Event()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            passed.append(data)
            writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pass_on(reader, onward[1]), pass_on(onward[0], writer))
        passed_on.set()

    async def talk() -> None:
        async with await asyncio.start_server(between, "127.0.0.1", 0) as listening:
            host, port = listening.sockets[0].getsockname()
            channel = await connect(host, port, SECRET, certificate=certificate)
            await channel.send("hello", WORD)
            event = await asyncio.to_thread(server.next_event, HANG_SECONDS)
            assert event is not None and event.message is not None
            assert event.message.payload == WORD
            assert await asyncio.to_thread(server.send, event.peer, "run", WORD * 10_000)
            message = await channel.receive()
            assert message is not None and message.payload == WORD * 10_000
            await channel.close()
            await passed_on.wait()

    asyncio.run(talk())
    end = server.next_event(HANG_SECONDS)
    assert end is not None and end.reason == "closed"
    return b"".join(passed)


def test_bytes_on_the_wire_are_encrypted(server: ControlServer) -> None:
    passed = on_the_wire(server, server.certificate)
    assert len(passed) > len(WORD) * 10_000
    assert WORD not in passed and b"hello" not in passed and b"hopsgpu" not in passed


def test_bytes_on_the_wire_are_readable_without_encryption() -> None:
    with serve(SECRET, "127.0.0.1") as server:
        assert server.certificate is None
        assert WORD in on_the_wire(server, None)


def test_channel_has_tls_1_3_and_the_secret_is_proved_within(server: ControlServer) -> None:
    async def version() -> object:
        driver = DriverEndpoint(
            "127.0.0.1", server.port, SECRET, None, certificate=server.certificate
        )
        channel = await connect_to_driver(driver)
        spoken = channel._writer.get_extra_info("ssl_object").version()
        await channel.close()
        return spoken

    assert asyncio.run(version()) == "TLSv1.3"
    hello, end = server.next_event(HANG_SECONDS), server.next_event(HANG_SECONDS)
    assert hello is not None and hello.message is not None and hello.message.kind == "hello"
    assert end is not None and end.message is None
    with pytest.raises(ChannelError, match="closed"):
        connecting = connect(
            "127.0.0.1", server.port, new_secret(), certificate=server.certificate, pauses=()
        )
        asyncio.run(connecting)
    assert server.next_event(0.1) is None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain)


def test_other_certificate_is_refused(server: ControlServer) -> None:
    """Its owner may know the secret: a driver of the same run that was killed."""
    with pytest.raises(ChannelError, match="CERTIFICATE_VERIFY"):
        asyncio.run(
            connect("127.0.0.1", server.port, SECRET, certificate=new_identity().certificate)
        )
    assert server.next_event(0.1) is None


def test_driver_without_tls_is_refused() -> None:
    with serve(SECRET, "127.0.0.1") as server:
        with pytest.raises(ChannelError, match="not the driver"):
            asyncio.run(
                connect("127.0.0.1", server.port, SECRET, certificate=new_identity().certificate)
            )
        assert server.next_event(0.1) is None


@pytest.mark.parametrize("sent", [b"", b"hopsgpu1" + bytes(64), b"\x16\x03\x01\x02\x00\x01" * 50])
def test_strangers_do_no_harm(server: ControlServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_SECONDS) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1000):
            pass
    assert server.next_event(0.1) is None
    assert on_the_wire(server, server.certificate)


def test_heartbeats_keep_an_encrypted_connection() -> None:
    with serve(SECRET, "127.0.0.1", heartbeat=6, encrypted=True) as server:
        options = {"heartbeat": 6, "certificate": server.certificate}
        with process("agents", server.port, SECRET, 1, options):
            hello = server.next_event(HANG_SECONDS)
            assert hello is not None and hello.message is not None
            assert server.next_event(7) is None
            assert server.send(hello.peer, "say", word="still here")
            echo = server.next_event(HANG_SECONDS)
            assert echo is not None and echo.message is not None
        assert (end := server.next_event(HANG_SECONDS)) is not None and end.message is None


def test_identity_is_new_each_time_and_leaves_no_file() -> None:
    def open_files() -> list[str]:
        return [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()]

    first, second = new_identity(), new_identity()
    assert first.certificate != second.certificate
    assert not [name for name in open_files() if "memfd:hopsgpu" in name]
    assert "context" not in repr(first)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"'cryptography'.*hopsgpu\[encryption\]"):
        serve(SECRET, "127.0.0.1", encrypted=True).__enter__()
    with serve(SECRET, "127.0.0.1"):
        pass


def test_repr_of_the_driver_has_neither_secret_nor_certificate() -> None:
    shown = repr(DriverEndpoint("127.0.0.1", 1, b"hush-hush", None, certificate=b"long"))
    assert "hush" not in shown and "long" not in shown
