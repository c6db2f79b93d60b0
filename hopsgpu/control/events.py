"""Bounded queues of peers' events, from the server's thread to the thread that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hopsgpu.control.channel import Message

# In addition, each connection keeps one frame that waits for room.
MAX_QUEUED = 16 * 2**20
# Memory of an event in addition to its bytes.
_OVERHEAD = 1024


@dataclass(frozen=True)
class Event:
    """A message of a peer, or the end of its connection.

    Attributes:
        peer: number of the peer, in the order of arrival.
        message: None at the end of the connection.
        reason: why the connection ended ("no heartbeat for 30 s", "connection reset", "closed",
            "broke the protocol: …"); empty with a message, or if it is unknown.
        opened: when the connection was accepted, in seconds since the epoch, or None.
        at: when the event was noticed, in seconds since the epoch.
    """

    peer: int
    message: Message | None
    reason: str = ""
    opened: float | None = field(default=None, compare=False)
    at: float = field(default_factory=time.time, compare=False)


@dataclass(frozen=True, eq=False)
class _Waiting:
    event: Event
    admitted: asyncio.Future[None]


class EventQueue:
    """Events in order, bounded by their size: a peer that adds more waits until some are taken.

    Tasks of one event loop put events in, and any thread takes them out. A peer to which this end
    is sending does not wait, because both could block otherwise: the peer reads only after its
    events are taken, and the thread that sends takes none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = MAX_QUEUED) -> None:
        self._loop = loop
        self._limit = limit
        # `None` wakes the consumer without an event.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        # Guards the attributes below; the queue has its own lock.
        self._lock = threading.Lock()
        self._queued = 0
        self._waiting: deque[_Waiting] = deque()
        self._receiving_peers: list[int] = []
        self._is_closed = False

    async def put(self, event: Event) -> None:
        """Queue an event once there is room for it, after the events that waited before.

        After `close` the event is dropped.
        """
        with self._lock:
            if self._is_closed:
                return
            has_room = self._queued < self._limit and not self._waiting
            if has_room or event.peer in self._receiving_peers:
                self._put(event)
                return
            waiting = _Waiting(event, self._loop.create_future())
            self._waiting.append(waiting)
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            with self._lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
            raise

    def put_end(self, event: Event) -> None:
        """Queue the end of a connection, which needs no room."""
        with self._lock:
            self._put(event)

    def take(self, seconds: float) -> Event | None:
        """Return the next event, or None if none arrives within `seconds`, or `wake` is called."""
        try:
            event = self._events.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None
        if event is None:
            return None
        with self._lock:
            self._queued -= _size(event)
            can_admit = bool(self._waiting) and self._queued < self._limit
        if can_admit:
            # On a closed loop no task waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._admit_waiting)
        return event

    def wake(self) -> None:
        """Make `take` return None after the events so far."""
        self._events.put(None)

    def close(self) -> None:
        """Drop the events that wait for room, and all later events."""
        with self._lock:
            self._is_closed = True
        # On a closed loop no task waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._admit_waiting)

    @contextlib.contextmanager
    def sending_to(self, peer: int) -> Iterator[None]:
        """Let a peer add events while this end sends to it; call this in the loop's thread."""
        with self._lock:
            self._receiving_peers.append(peer)
        self._admit_waiting()
        try:
            yield
        finally:
            with self._lock:
                self._receiving_peers.remove(peer)

    def _admit_waiting(self) -> None:
        with self._lock:
            while self._waiting and (self._is_closed or self._queued < self._limit):
                self._admit(self._waiting.popleft())
            for waiting in [w for w in self._waiting if w.event.peer in self._receiving_peers]:
                self._waiting.remove(waiting)
                self._admit(waiting)

    def _admit(self, waiting: _Waiting) -> None:
        if not waiting.admitted.cancelled():
            self._put(waiting.event)
            waiting.admitted.set_result(None)

    def _put(self, event: Event) -> None:
        if not self._is_closed:
            self._queued += _size(event)
            self._events.put(event)


def _size(event: Event) -> int:
    return _OVERHEAD + (0 if event.message is None else event.message.size)
