"""The streams below a channel: they record when data arrived, and use little memory for TLS."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable
from typing import Any

_TLS_CLOSE_SECONDS = 5

Attach = Callable[
    [Callable[[], asyncio.BaseProtocol]],
    Awaitable[tuple[asyncio.Transport, asyncio.BaseProtocol]],
]


class Inbox(asyncio.StreamReader):
    """A stream reader that records the loop's time of the last byte, or of the last pause's end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._time = loop.time
        self._source: asyncio.ReadTransport | None = None
        self.received_at = loop.time()

    @property
    def is_reading(self) -> bool:
        """False while the buffer is full."""
        return self._source is None or self._source.is_reading()

    def set_transport(self, transport: asyncio.BaseTransport) -> None:
        super().set_transport(transport)
        assert isinstance(transport, asyncio.ReadTransport)
        self._source = transport

    def feed_data(self, data: Any) -> None:
        self.received_at = self._time()
        super().feed_data(data)

    async def readexactly(self, n: int) -> bytes:
        if not self.is_reading:
            # Data that the other end sent during the pause may be in the kernel's buffer.
            self.received_at = self._time()
        return await super().readexactly(n)


class _LightTls(SSLProtocol):
    """asyncio's TLS with a buffer of one TLS record instead of 256 KiB per connection."""

    max_size = 16 * 1024


async def open_streams(
    attach: Attach, tls: ssl.SSLContext | None, *, is_server: bool
) -> tuple[Inbox, asyncio.StreamWriter]:
    """Open streams over a new connection; the caller must bound the time.

    Args:
        attach: creates the transport for a protocol: `loop.create_connection` with its address, or
            `loop.connect_accepted_socket` with its socket.

    Raises:
        ssl.SSLError: the other end does not speak TLS, or its certificate is not trusted.
        OSError: there is no connection, or it was lost.
    """
    loop = asyncio.get_running_loop()
    inbox = Inbox(loop)
    opened: asyncio.Future[asyncio.StreamWriter] = loop.create_future()
    plain = asyncio.StreamReaderProtocol(inbox, lambda _, writer: opened.set_result(writer), loop)
    if tls is None:
        await attach(lambda: plain)
        return inbox, opened.result()
    secured: asyncio.Future[None] = loop.create_future()
    secure = _LightTls(
        loop,
        plain,
        tls,
        secured,
        server_side=is_server,
        ssl_shutdown_timeout=_TLS_CLOSE_SECONDS,
    )
    transport, _ = await attach(lambda: secure)
    try:
        await secured
    except asyncio.CancelledError:
        transport.abort()
        raise
    if not opened.done():
        raise ConnectionResetError("the connection was lost before TLS was negotiated")
    return inbox, opened.result()
