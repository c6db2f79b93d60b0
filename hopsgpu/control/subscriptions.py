"""Routing of agents' messages to the subscriptions of their runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event, EventQueue


class Peers(Protocol):
    """The sending end of a control server."""

    def send(self, peer: int, kind: str, payload: bytes = b"", **fields: Any) -> bool:
        """Implement `ControlServer.send`."""

    def keep(self, peer: int, name: str, content: bytes) -> bool:
        """Implement `ControlServer.keep`."""

    def disconnect(self, peers: Collection[int]) -> None:
        """Implement `ControlServer.disconnect`."""


class Subscription:
    """The messages of some agents about a run, and the ends of their connections, in order.

    `ControlServer.subscribe` creates it. Except for `wake`, only one thread may use it.

    Attributes:
        connected: the agents that are connected, as far as `next_event` has returned.
    """

    def __init__(
        self,
        peers: Peers,
        run_id: str,
        agents: Collection[int],
        attempt: int | None,
        events: EventQueue,
    ) -> None:
        self.connected = set(agents)
        self._peers = peers
        self._run_id = run_id
        self._attempt = attempt
        self._events = events

    def next_event(self, seconds: float) -> Event | None:
        """Return the next event, or None if none arrives within `seconds`, or `wake` is called.

        While unread events fill 16 MiB, the agents' connections are not read.
        """
        event = self._events.take(seconds)
        if event is None or event.peer not in self.connected:
            return None
        if event.message is None:
            self.connected.discard(event.peer)
        return event

    def wake(self) -> None:
        """Make `next_event` return at once; callable from any thread."""
        self._events.wake()

    def send(self, agent: int, kind: str, payload: bytes = b"", **fields: Any) -> bool:
        """Send an agent a message about the run; return False if it is not connected."""
        return self._peers.send(agent, kind, payload, run_id=self._run_id, **fields)

    def keep(self, agent: int, name: str, content: bytes) -> bool:
        return self._peers.keep(agent, name, content)

    def disconnect(self, agents: Collection[int]) -> None:
        """Disconnect some of the agents, and ignore their unread events."""
        self._peers.disconnect(agents)
        self.connected.difference_update(agents)

    def is_about(self, message: Message) -> bool:
        fields = message.fields
        is_attempt = self._attempt in (None, fields.get("attempt", self._attempt))
        return is_attempt and fields["run_id"] == self._run_id


@dataclass(frozen=True, eq=False)
class _Mailbox:
    subscription: Subscription
    events: EventQueue


class Router:
    """Distributes the events of one server's peers.

    A message about a run goes to that run's subscriptions; without any, the run is over and the
    message is dropped. Other messages go to the caller of `next_event`, who acquires the executors.
    The end of a connection goes to both.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rest = EventQueue(loop)
        # Guards the attributes below.
        self._lock = threading.Lock()
        self._boxes: dict[int, list[_Mailbox]] = defaultdict(list)
        self._ends: dict[int, Event] = {}
        self._on_event: Callable[[Event], None] | None = None

    def next_event(self, seconds: float) -> Event | None:
        """Return the next event that is about no run, or None if none arrives in time."""
        return self._rest.take(seconds)

    @contextlib.contextmanager
    def subscribed(
        self, peers: Peers, run_id: str, agents: Collection[int], attempt: int | None
    ) -> Iterator[Subscription]:
        """Implement `ControlServer.subscribe`."""
        events = EventQueue(self._loop)
        box = _Mailbox(Subscription(peers, run_id, agents, attempt, events), events)
        with self._lock:
            for agent in box.subscription.connected:
                self._boxes[agent].append(box)
                if agent in self._ends:
                    events.put_end(self._ends[agent])
        try:
            yield box.subscription
        finally:
            with self._lock:
                for agent in set(agents):
                    self._boxes[agent].remove(box)
            events.close()

    @contextlib.contextmanager
    def listening(self, on_event: Callable[[Event], None]) -> Iterator[None]:
        """Implement `ControlServer.listening`."""
        with self._lock:
            self._on_event = on_event
            self._notify_listener()
        try:
            yield
        finally:
            with self._lock:
                self._on_event = None

    async def route(self, event: Event) -> None:
        """Queue a message for its receivers; wait until there is room for it."""
        message = event.message
        assert message is not None, "call route_end for the end of a connection"
        if "run_id" in message.fields:
            with self._lock:
                boxes = self._boxes[event.peer]
                queues = [box.events for box in boxes if box.subscription.is_about(message)]
            for events in queues:
                await events.put(event)
            return
        await self._rest.put(event)
        with self._lock:
            self._notify_listener()

    def route_end(self, event: Event) -> None:
        with self._lock:
            self._ends[event.peer] = event
            for box in self._boxes[event.peer]:
                box.events.put_end(event)
            self._rest.put_end(event)
            self._notify_listener()

    def _notify_listener(self) -> None:
        """Pass unread events to the listener; call this with the lock held."""
        if self._on_event is not None:
            while (event := self._rest.take(0.0)) is not None:
                self._on_event(event)

    @contextlib.contextmanager
    def sending_to(self, peer: int) -> Iterator[None]:
        """Admit a peer's messages while this end sends to it; call this in the loop's thread."""
        with self._lock:
            queues = (self._rest, *(box.events for box in self._boxes[peer]))
        with contextlib.ExitStack() as stack:
            for queue in queues:
                stack.enter_context(queue.sending_to(peer))
            yield
