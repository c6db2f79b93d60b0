"""The control channel: mutually authenticated frames between the driver and its agents.

Both ends first prove that they know the run's secret (`hopsgpu.control.handshake`). Each direction
then has its own key, and every frame an HMAC over its number and content: a frame cannot be forged,
changed, replayed or left out. A frame is a JSON object and some bytes:

    4 bytes   length of the JSON, big endian
    8 bytes   length of the payload
    …         JSON (UTF-8, in which lone surrogates pass), payload
    32 bytes  HMAC-SHA256 under the direction's key

An empty frame is a heartbeat (`hopsgpu.control.heartbeat`), which the channel sends and consumes by
itself. Only TLS (`hopsgpu.control.tls`) hides the content. The channel never unpickles anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.control.heartbeat import HEARTBEAT_SECONDS, HeartbeatState, check_heartbeat
from hopsgpu.control.streams import Inbox

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
MAX_JSON = 2**20
MAX_PAYLOAD = 256 * 2**20

DIGEST = 32
_SURROGATES = "surrogatepass"
_LENGTHS = struct.Struct("!IQ")


class ChannelError(Exception):
    """The peer is not authentic, or does not speak the protocol."""


@dataclass(frozen=True)
class Message:
    """A frame of the channel.

    Attributes:
        fields: the JSON object without `kind`.
        size: bytes of JSON and payload; 0 if the message did not arrive over a channel.
    """

    kind: str
    fields: Mapping[str, Any]
    payload: bytes = b""
    size: int = field(default=0, compare=False)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 (RFC 2104) of the concatenated parts."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()


class Channel:
    """An end of an authenticated connection.

    Attributes:
        reason: why the connection ended, for people; empty while it lasts.
        peer: the other end, for the log.
    """

    def __init__(
        self,
        inbox: Inbox,
        writer: asyncio.StreamWriter,
        *,
        send_key: bytes,
        receive_key: bytes,
        heartbeat: float = HEARTBEAT_SECONDS,
    ) -> None:
        self.reason = ""
        self.peer = "the driver"
        self._inbox = inbox
        self._writer = writer
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._has_missed = False
        self._next_check = self._loop.call_soon(self._check_peer)

    @property
    def local_address(self) -> str:
        """The address of this end on the interface towards the peer."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send one frame, and wait until the transport accepts more.

        Raises:
            ChannelError: the frame exceeds the limits; nothing was sent.
            OSError: the connection is lost.
        """
        # A file name that is not UTF-8 is a str with lone surrogates (PEP 383).
        body = json.dumps({"kind": kind, **fields}, ensure_ascii=False).encode(errors=_SURROGATES)
        if len(body) > MAX_JSON or len(payload) > MAX_PAYLOAD:
            raise ChannelError(
                f"a {kind!r} frame of {len(body)} + {len(payload)} bytes exceeds the limit of"
                f" {MAX_JSON} + {MAX_PAYLOAD}"
            )
        log.debug("to %s: %s, %d bytes", self.peer, kind, len(body) + len(payload))
        # A transport that has lost its peer accepts data, and writes a warning to stderr.
        if not self.reason and not self._writer.transport.is_closing():
            self._write(body, payload)
            await self._writer.drain()
        # drain() also returns when the connection ends while the transport is full.
        if self.reason or self._writer.transport.is_closing():
            raise ConnectionResetError(f"the connection has ended: {self.reason or 'closed'}")

    def _write(self, body: bytes, payload: bytes) -> None:
        head = _LENGTHS.pack(len(body), len(payload))
        number = self._sent.to_bytes(8, "big")
        self._sent += 1
        self._sent_at = self._loop.time()
        tag = mac(self._send_key, number, head, body, payload)
        # Write with a single call, so that frames of concurrent senders cannot mix.
        self._writer.writelines((head, body, payload, tag))

    async def notify(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send one frame if the peer is connected; `receive` reports a disconnection.

        Raises:
            ChannelError: the frame exceeds the limits; nothing was sent.
        """
        with contextlib.suppress(OSError):
            await self.send(kind, payload, **fields)

    async def receive(self) -> Message | None:
        """Return the next message, or None at the end of the connection, whose cause is `reason`.

        Raises:
            ChannelError: a frame exceeds the limits, was not sent by the peer, or is not a message.
        """
        try:
            while (message := await self._frame()) is None:
                pass
            log.debug("from %s: %s, %d bytes", self.peer, message.kind, message.size)
            return message
        except asyncio.IncompleteReadError as error:
            self._end("closed in the middle of a frame" if error.partial else "closed")
        except ConnectionResetError:
            self._end("connection reset")
        except OSError as error:
            self._end(error.strerror or str(error))
        except ChannelError as error:
            self._end(f"broke the protocol: {error}")
            raise
        return None

    async def _frame(self) -> Message | None:
        """Return the next frame, or None for a heartbeat."""
        head = await self._inbox.readexactly(_LENGTHS.size)
        body_length, payload_length = _LENGTHS.unpack(head)
        if body_length > MAX_JSON or payload_length > MAX_PAYLOAD:
            raise ChannelError(
                f"the peer announced a frame of {body_length} + {payload_length} bytes"
            )
        body = await self._inbox.readexactly(body_length)
        payload = await self._inbox.readexactly(payload_length)
        tag = await self._inbox.readexactly(DIGEST)
        number = self._received.to_bytes(8, "big")
        self._received += 1
        if not hmac.compare_digest(tag, mac(self._receive_key, number, head, body, payload)):
            raise ChannelError("a frame has a wrong authentication code")
        return _message(body, payload) if body or payload else None

    def _check_peer(self) -> None:
        """Send a heartbeat if one is due, and close the connection to a lost peer."""
        transport = self._writer.transport
        if self.reason or transport.is_closing():
            return
        now = self._loop.time()
        received_at = self._inbox.received_at
        state = HeartbeatState(self._sent_at, received_at, self._inbox.is_reading, self._has_missed)
        check = check_heartbeat(state, heartbeat=self._heartbeat, now=now)
        if check.has_missed and not self._has_missed:
            log.debug("no heartbeat from %s for %.1f s", self.peer, now - received_at)
        self._has_missed = check.has_missed
        if check.is_lost:
            self.abort(f"no heartbeat for {self._heartbeat:g} s")
            return
        if check.should_send:
            # Bytes that wait in the buffer serve as a heartbeat when they arrive.
            if transport.get_write_buffer_size() == 0:
                self._write(b"", b"")
            self._sent_at = now
        self._next_check = self._loop.call_at(check.next_check, self._check_peer)

    def _end(self, reason: str) -> None:
        if not self.reason:
            log.info("the connection to %s has ended: %s", self.peer, reason)
        self.reason = self.reason or reason
        self._next_check.cancel()

    def abort(self, reason: str = "closed by this side") -> None:
        """Close the connection at once, and discard unsent data."""
        self._end(reason)
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection once all is sent; after 5 s, discard unsent data."""
        self._next_check.cancel()
        self._writer.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._writer.wait_closed()
        except OSError:  # TimeoutError is one
            self.abort()


def _message(body: bytes, payload: bytes) -> Message:
    try:
        fields = json.loads(body.decode(errors=_SURROGATES))
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"a frame has JSON that cannot be read ({error})") from error
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ChannelError("a frame is not a JSON object with a kind")
    return Message(kind, fields, payload, len(body) + len(payload))
