"""The driver's end of the control channel: one listening port per gang, in its own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.worker.channel import Channel, ChannelError, Message, accept

_SEND_SECONDS = 60.0


@dataclass(frozen=True)
class Event:
    """Something that a peer did.

    Attributes:
        peer: its number, in the order of arrival.
        message: what it said, or None when its connection ended.
    """

    peer: int
    message: Message | None


class ControlServer:
    """Accepts the gang's agents and holders and queues what they say.

    Use `serve`, which owns the port and the thread.
    """

    def __init__(self, secret: bytes, listener: socket.socket) -> None:
        self._secret = secret
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()
        self._channels: dict[int, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def next_event(self, seconds: float) -> Event | None:
        """The next event, or None when none came within `seconds`."""
        try:
            return self.events.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None

    def send(self, peer: int, kind: str, payload: bytes = b"", **fields: Any) -> bool:
        """Sends to a peer; False where its connection is gone, which `events` tells too."""
        sent = asyncio.run_coroutine_threadsafe(self._send(peer, kind, payload, fields), self._loop)
        try:
            return sent.result(_SEND_SECONDS)
        except concurrent.futures.TimeoutError:
            sent.cancel()
            return False

    async def _send(self, peer: int, kind: str, payload: bytes, fields: dict[str, Any]) -> bool:
        channel = self._channels.get(peer)
        if channel is None:
            return False
        try:
            await channel.send(kind, payload, **fields)
        except OSError:
            return False
        except ChannelError as error:
            raise HopsGpuError(f"{kind!r} cannot be sent to the executors: {error}") from error
        return True

    def end_all(self) -> None:
        """Hangs up on every peer: agents stop their ranks, and all tasks end."""
        self.hang_up(tuple(self._channels))

    def hang_up(self, peers: Iterable[int]) -> None:
        """Closes the connections of some peers, stuck ones too: their tasks end at once."""
        for peer in peers:
            if (channel := self._channels.get(peer)) is not None:
                self._loop.call_soon_threadsafe(channel.abort)

    def run(self) -> None:
        """The thread's body: serves until `stop`."""
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    def stop(self) -> None:
        """Ends `run`; every connection is closed."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._peer, sock=self._listener)
        try:
            await self._stopped.wait()
        finally:
            server.close()
            for channel in self._channels.values():
                channel.abort()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._listen_to(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _listen_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await accept(reader, writer, self._secret)
        except ChannelError:
            return  # a stranger: hung up on, no harm done
        peer = next(self._numbers)
        self._channels[peer] = channel
        try:
            while (message := await channel.receive()) is not None:
                self.events.put(Event(peer, message))
        except ChannelError as error:
            self.events.put(Event(peer, Message("broken", {"reason": str(error)})))
        finally:
            del self._channels[peer]
            self.events.put(Event(peer, None))


@contextlib.contextmanager
def serve(secret: bytes, address: str, ports: range | None = None) -> Iterator[ControlServer]:
    """A running server on `address`, at a port of `ports` (any free one by default).

    Raises:
        ConfigError: no such address here, or no port of the range is free.
    """
    with _listener(address, ports) as listener:
        server = ControlServer(secret, listener)
        thread = threading.Thread(target=server.run, name="hopsgpu-control", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


def _listener(address: str, ports: range | None) -> socket.socket:
    problem: OSError | None = None
    for port in ports or (0,):
        try:
            return socket.create_server((address, port), backlog=1024)
        except OSError as error:
            problem = error
    raise ConfigError(
        f"the driver cannot listen on {address}, ports {ports or 'any'}: {problem}. Executors"
        " reach the driver there: set spark.driver.host, or spark.hopsgpu.address and"
        " spark.hopsgpu.ports, to an address and ports of this machine"
    )
