"""The driver's end of the control channel: one listening port per gang, in its own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from hopsgpu.control.admission import Admission
from hopsgpu.control.channel import Channel, ChannelError
from hopsgpu.control.events import Event
from hopsgpu.control.handshake import HANDSHAKE_SECONDS, accept
from hopsgpu.control.heartbeat import HEARTBEAT_SECONDS
from hopsgpu.control.streams import open_streams
from hopsgpu.control.subscriptions import Router, Subscription
from hopsgpu.control.tls import Identity, new_identity
from hopsgpu.errors import ConfigError, HopsGpuError

log = logging.getLogger(__name__)

_SEND_SECONDS = 60.0
# The kernel limits this to net.core.somaxconn.
_BACKLOG = 4096
# The pause of asyncio's own servers if there is no descriptor or memory for a connection.
_RETRY_SECONDS = 1.0


class ControlServer:
    """Accepts the gang's agents and placeholders, and routes their messages.

    Use `serve`, which owns the port and the thread.
    """

    def __init__(
        self,
        secret: bytes,
        listener: socket.socket,
        *,
        heartbeat: float = HEARTBEAT_SECONDS,
        identity: Identity | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._handshake_seconds = handshake_seconds
        self._secret = secret
        self._listener = listener
        self._heartbeat = heartbeat
        self._identity = identity
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()
        self._channels: dict[int, Channel] = {}
        # Peers that are being disconnected.
        self._leaving: set[int] = set()
        self._kept: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission = Admission(self._loop)
        self._stopped = asyncio.Event()
        self._router = Router(self._loop)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def certificate(self) -> bytes | None:
        """The TLS certificate (DER) that agents must see; None if the channel is not encrypted."""
        return None if self._identity is None else self._identity.certificate

    def next_event(self, seconds: float) -> Event | None:
        """Return the next event that is about no run, or None if none arrives within `seconds`.

        Such events are hellos and the ends of connections. Unread events fill at most 16 MiB; then
        the peers' connections are not read.
        """
        return self._router.next_event(seconds)

    def listening(self, on_event: Callable[[Event], None]) -> AbstractContextManager[None]:
        """Pass the events of `next_event` to a function instead, within the context.

        Args:
            on_event: is called in the server's thread at once; must return soon.
        """
        return self._router.listening(on_event)

    def subscribe(
        self, run_id: str, peers: Collection[int], attempt: int | None = None
    ) -> AbstractContextManager[Subscription]:
        """Provide the messages of some peers about a run, and the ends of their connections.

        The end of a connection that has ended before is among the first events. Messages about a
        run without a subscription are dropped.

        Args:
            attempt: number of the attempt, if messages of other attempts do not count.
        """
        return self._router.subscribed(self, run_id, peers, attempt)

    def is_connected(self, peer: int) -> bool:
        return peer in self._channels and peer not in self._leaving

    def send(self, peer: int, kind: str, payload: bytes = b"", **fields: Any) -> bool:
        """Send to a peer; return False if the peer is not connected."""
        return self._run_in_loop(self._send(peer, kind, payload, fields))

    def keep(self, peer: int, name: str, content: bytes) -> bool:
        """Send bytes to a peer, which keeps them for later messages that refer to their name.

        A peer keeps the last bytes only. Bytes with the same name are not sent again.

        Returns:
            False if the peer is not connected, or reads nothing for a minute.

        Raises:
            HopsGpuError: the content is too large for a message.
        """
        # `_keep` records the name before it sends: later messages follow the bytes.
        return self._kept.get(peer) == name or self._run_in_loop(self._keep(peer, name, content))

    def _run_in_loop(self, sending: Coroutine[Any, Any, bool]) -> bool:
        future = asyncio.run_coroutine_threadsafe(sending, self._loop)
        try:
            return future.result(_SEND_SECONDS)
        except concurrent.futures.TimeoutError:
            future.cancel()
            log.info("an agent did not accept a message within %g s", _SEND_SECONDS)
            return False

    async def _keep(self, peer: int, name: str, content: bytes) -> bool:
        if self._kept.get(peer) == name:
            return True
        # Before the first await, so that messages of other threads follow the bytes.
        self._kept[peer] = name
        was_sent = False
        try:
            was_sent = await self._send(peer, "keep", content, {"name": name})
        finally:
            if not was_sent:
                self._kept.pop(peer, None)
        return was_sent

    async def _send(self, peer: int, kind: str, payload: bytes, fields: dict[str, Any]) -> bool:
        channel = self._channels.get(peer)
        if channel is None:
            return False
        try:
            with self._router.sending_to(peer):
                await channel.send(kind, payload, **fields)
        except OSError:
            return False
        except ChannelError as error:
            raise HopsGpuError(f"{kind!r} cannot be sent to the executors: {error}") from error
        return True

    def disconnect_all(self) -> None:
        """Disconnect every peer: agents stop their ranks, and all tasks end."""
        self.disconnect(tuple(self._channels))

    def disconnect(self, peers: Iterable[int]) -> None:
        """Disconnect some peers, also unresponsive ones; an agent then ends with its ranks."""
        for peer in peers:
            if (channel := self._channels.get(peer)) is not None:
                self._leaving.add(peer)
                self._loop.call_soon_threadsafe(channel.abort)

    def run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _serve(self) -> None:
        accepting = self._loop.create_task(self._accept())
        stopping = self._loop.create_task(self._stopped.wait())
        try:
            await asyncio.wait((accepting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()  # raises: the task ends by an error only
        finally:
            for channel in self._channels.values():
                channel.abort()
            ending = (accepting, stopping, *self._tasks)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _accept(self) -> None:
        self._listener.setblocking(False)
        while True:
            await self._admission.wait_for_room()
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except ConnectionError:
                continue
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            task = self._loop.create_task(self._serve_peer(connection))
            self._tasks.add(task)
            self._admission.enter(task)
            task.add_done_callback(functools.partial(self._on_task_end, connection))

    def _on_task_end(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._admission.leave(task)
        # A task that was cancelled before its start has not closed the connection.
        connection.close()

    async def _serve_peer(self, connection: socket.socket) -> None:
        opened_at = time.time()
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self._handshake_seconds):
                channel = await self._authenticate(connection)
        except (ChannelError, OSError, asyncio.IncompleteReadError) as error:
            log.debug("closed a connection in its handshake: %s", type(error).__name__)
            return
        self._admission.leave(task)
        await self._receive(channel, opened_at)

    async def _authenticate(self, connection: socket.socket) -> Channel:
        inbox, writer = await open_streams(
            lambda protocol: self._loop.connect_accepted_socket(protocol, connection),
            None if self._identity is None else self._identity.context,
            is_server=True,
        )
        try:
            return await accept(inbox, writer, self._secret, self._heartbeat)
        except BaseException:
            writer.transport.abort()
            raise

    async def _receive(self, channel: Channel, opened_at: float) -> None:
        peer = next(self._numbers)
        channel.peer = f"agent {peer}"
        log.info("agent %d has connected", peer)
        self._channels[peer] = channel
        try:
            while (message := await channel.receive()) is not None:
                await self._router.route(Event(peer, message, opened=opened_at))
        except ChannelError:
            pass  # the event of the connection's end has the reason
        finally:
            del self._channels[peer]
            self._leaving.discard(peer)
            self._kept.pop(peer, None)
            channel.abort()
            self._router.route_end(Event(peer, None, channel.reason))


@contextlib.contextmanager
def serve(
    secret: bytes,
    address: str,
    ports: range | None = None,
    *,
    heartbeat: float = HEARTBEAT_SECONDS,
    encrypted: bool = False,
    handshake_seconds: float = HANDSHAKE_SECONDS,
) -> Iterator[ControlServer]:
    """Run a server at the first free port of `ports`; None for any free port.

    Raises:
        ConfigError: this machine lacks the address, no port of the range is free, or the package
            for certificates is not installed.
    """
    identity = new_identity() if encrypted else None
    with _listener(address, ports) as listener:
        server = ControlServer(
            secret,
            listener,
            heartbeat=heartbeat,
            identity=identity,
            handshake_seconds=handshake_seconds,
        )
        thread = threading.Thread(target=server.run, name="hopsgpu-control", daemon=True)
        thread.start()
        log.info("listening for agents on %s, port %d", address, server.port)
        try:
            yield server
        finally:
            server.stop()
            thread.join()


def _listener(address: str, ports: range | None) -> socket.socket:
    problem: OSError | None = None
    for port in ports or (0,):
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            problem = error
    requested = f"ports {ports.start}-{ports.stop - 1}" if ports else "any port"
    raise ConfigError(
        f"the driver cannot listen on {address}, {requested}: {problem}. Executors"
        " reach the driver there: set spark.driver.host, or spark.hopsgpu.address and"
        " spark.hopsgpu.ports, to an address and ports of this machine"
    )
