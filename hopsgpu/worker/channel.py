"""The control channel: mutually authenticated frames between the driver and its agents.

Both ends prove that they know the run's secret before anything else is read, by HMAC-SHA256
over both ends' nonces; each direction then has a key of its own, and every frame carries an
HMAC over its number and content, so that nothing can be forged, changed, replayed or left
out. A frame is a JSON object and some bytes:

    4 bytes   length of the JSON, big endian
    8 bytes   length of the payload
    …         JSON (UTF-8), payload
    32 bytes  HMAC-SHA256 under the direction's key

The channel does not hide what it carries. It never unpickles anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HANDSHAKE_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
MOST_JSON = 2**20
MOST_PAYLOAD = 256 * 2**20

_MAGIC = b"hopsgpu1"
_NONCE = 32
_DIGEST = 32
_LENGTHS = struct.Struct("!IQ")


class ChannelError(Exception):
    """The peer is not who it should be, or does not speak the protocol."""


@dataclass(frozen=True)
class Message:
    """One frame.

    Attributes:
        kind: what it is about.
        fields: the rest of the JSON object.
        payload: bytes beside it.
    """

    kind: str
    fields: Mapping[str, Any]
    payload: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def _watch_peer(connection: socket.socket) -> None:
    """Has the kernel end a connection whose other node has been silent for some 30 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("IDLE", 10), ("INTVL", 5), ("CNT", 4)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def new_secret() -> bytes:
    """A fresh secret of 32 bytes."""
    return secrets.token_bytes(32)


def _mac(key: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()


class Channel:
    """One end of an authenticated connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        send_key: bytes,
        receive_key: bytes,
    ) -> None:
        self._reader = reader
        self._writer = writer
        _watch_peer(writer.get_extra_info("socket"))
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0

    @property
    def local_address(self) -> str:
        """The address of this end, at which other nodes reach this one."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Sends one frame and waits until the transport takes more.

        Raises:
            ChannelError: the frame is over the limits; nothing was sent.
            OSError: the connection is lost.
        """
        body = json.dumps({"kind": kind, **fields}).encode()
        if len(body) > MOST_JSON or len(payload) > MOST_PAYLOAD:
            raise ChannelError(
                f"a {kind!r} frame of {len(body)} + {len(payload)} bytes is over the limit of"
                f" {MOST_JSON} + {MOST_PAYLOAD}"
            )
        head = _LENGTHS.pack(len(body), len(payload))
        number = self._sent.to_bytes(8, "big")
        self._sent += 1
        tag = _mac(self._send_key, number, head, body, payload)
        # One call, so that frames of concurrent senders cannot mix.
        self._writer.writelines((head, body, payload, tag))
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """The next frame, or None at the end of the connection.

        Raises:
            ChannelError: a frame over the limits, or one that the peer did not send so.
        """
        try:
            head = await self._reader.readexactly(_LENGTHS.size)
            body_length, payload_length = _LENGTHS.unpack(head)
            if body_length > MOST_JSON or payload_length > MOST_PAYLOAD:
                raise ChannelError(f"a frame of {body_length} + {payload_length} bytes announced")
            body = await self._reader.readexactly(body_length)
            payload = await self._reader.readexactly(payload_length)
            tag = await self._reader.readexactly(_DIGEST)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        number = self._received.to_bytes(8, "big")
        self._received += 1
        if not hmac.compare_digest(tag, _mac(self._receive_key, number, head, body, payload)):
            raise ChannelError("a frame with a wrong authentication code")
        fields = json.loads(body)
        return Message(fields.pop("kind"), fields, payload)

    def abort(self) -> None:
        """Closes the connection at once, whatever is still unsent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Closes the connection once all is sent; a peer that is gone or stuck is no error."""
        self._writer.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._writer.wait_closed()
        except OSError:  # TimeoutError is one
            self.abort()


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> Channel:
    """The driver's side of the handshake.

    Raises:
        ChannelError: the peer did not prove the secret, or took too long; whatever it sent
            has been read to 72 bytes at most and nothing was made of it.
    """
    ours = secrets.token_bytes(_NONCE)
    writer.write(_MAGIC + ours)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await writer.drain()
            answer = await reader.readexactly(len(_MAGIC) + _NONCE + _DIGEST)
    except (asyncio.IncompleteReadError, TimeoutError, OSError) as error:
        raise ChannelError("the peer did not finish the handshake") from error
    magic, theirs, proof = answer[:8], answer[8:40], answer[40:]
    if magic != _MAGIC or not hmac.compare_digest(proof, _mac(secret, b"agent", ours, theirs)):
        raise ChannelError("the peer does not know the run's secret")
    writer.write(_mac(secret, b"driver", ours, theirs))
    return Channel(
        reader,
        writer,
        send_key=_mac(secret, b"to agent", ours, theirs),
        receive_key=_mac(secret, b"to driver", ours, theirs),
    )


async def connect(host: str, port: int, secret: bytes) -> Channel:
    """The agent's side: connects, proves the secret and has the driver prove it.

    Raises:
        ChannelError: the other end is not the run's driver.
        OSError: it cannot be reached.
    """
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            hello = await reader.readexactly(len(_MAGIC) + _NONCE)
            theirs, ours = hello[8:], secrets.token_bytes(_NONCE)
            if hello[:8] != _MAGIC:
                raise ChannelError(f"{host}:{port} does not speak hopsgpu's protocol")
            writer.write(_MAGIC + ours + _mac(secret, b"agent", theirs, ours))
            proof = await reader.readexactly(_DIGEST)
            if not hmac.compare_digest(proof, _mac(secret, b"driver", theirs, ours)):
                raise ChannelError(f"{host}:{port} is not the driver of this run")
        except asyncio.IncompleteReadError as error:
            writer.close()
            raise ChannelError(f"{host}:{port} ended the handshake") from error
        except BaseException:
            writer.close()
            raise
    return Channel(
        reader,
        writer,
        send_key=_mac(secret, b"to driver", theirs, ours),
        receive_key=_mac(secret, b"to agent", theirs, ours),
    )
