"""Events of peers, passed from the server's thread to the thread that waits for them; bounded."""

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

# Beside it, each connection keeps the one frame that waits for room.
MOST_QUEUED = 16 * 2**20
# What an event takes beside its bytes.
_OVERHEAD = 1024


@dataclass(frozen=True)
class Event:
    """Something that a peer did.

    Attributes:
        peer: number of the peer, in the order of arrival.
        message: message of the peer, or None when its connection ended.
        reason: why its connection ended ("no heartbeat for 30 s", "connection reset", "closed",
            "broke the protocol: …"); empty with a message, or if it is unknown.
        opened: when its connection was accepted, in seconds since the epoch; `at` if not given.
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
    granted: asyncio.Future[None]


class EventQueue:
    """Events in order, bounded by their size: a peer that adds more waits until some are taken.

    Tasks of one event loop put events in, and any thread takes them out. A peer that is being sent
    something does not wait: it may not read until its events are taken, while the thread that sends
    to it takes none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int = MOST_QUEUED) -> None:
        self._loop = loop
        self._most = most
        # None for whoever takes events, to return at once.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        # Guards what follows; the queue has a lock of its own.
        self._lock = threading.Lock()
        self._queued = 0
        self._waiting: deque[_Waiting] = deque()
        self._sent_to: list[int] = []
        self._closed = False

    async def put(self, event: Event) -> None:
        """Queue an event once there is room for it, after the events that waited before.

        After `close` the event is dropped.
        """
        with self._lock:
            if self._closed:
                return
            room = self._queued < self._most and not self._waiting
            if room or event.peer in self._sent_to:
                self._put(event)
                return
            waiting = _Waiting(event, self._loop.create_future())
            self._waiting.append(waiting)
        try:
            await waiting.granted
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
            room = bool(self._waiting) and self._queued < self._most
        if room:
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._grant)
        return event

    def wake(self) -> None:
        """Have `take` return None after the events so far; callable from any thread."""
        self._events.put(None)

    def close(self) -> None:
        """Drop the events that wait and all later ones: nobody takes them any more."""
        with self._lock:
            self._closed = True
        # A loop that is closed has nobody who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._grant)

    @contextlib.contextmanager
    def sending_to(self, peer: int) -> Iterator[None]:
        """Let a peer add events while something is sent to it; call it in the loop's thread."""
        with self._lock:
            self._sent_to.append(peer)
        self._grant()
        try:
            yield
        finally:
            with self._lock:
                self._sent_to.remove(peer)

    def _grant(self) -> None:
        """Admit waiting events while there is room; once closed, drop them."""
        with self._lock:
            while self._waiting and (self._closed or self._queued < self._most):
                self._let_in(self._waiting.popleft())
            for waiting in [w for w in self._waiting if w.event.peer in self._sent_to]:
                self._waiting.remove(waiting)
                self._let_in(waiting)

    def _let_in(self, waiting: _Waiting) -> None:
        if not waiting.granted.cancelled():
            self._put(waiting.event)
            waiting.granted.set_result(None)

    def _put(self, event: Event) -> None:
        if not self._closed:
            self._queued += _size(event)
            self._events.put(event)


def _size(event: Event) -> int:
    return _OVERHEAD + (0 if event.message is None else event.message.size)
