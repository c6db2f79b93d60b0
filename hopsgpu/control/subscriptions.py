"""Routing of what agents say to whoever subscribed to the run that they say it about."""

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
        """Send to a peer; return False if its connection is gone."""

    def keep(self, peer: int, name: str, content: bytes) -> bool:
        """Have a peer keep some bytes for later messages."""

    def hang_up(self, peers: Collection[int]) -> None:
        """Disconnect some peers."""


class Subscription:
    """What some agents say about a run, and the ends of their connections, in order.

    `ControlServer.subscribe` makes one. Only one thread may use it, but for `wake`.

    Attributes:
        connected: the agents whose end `next_event` has not yet returned, nor `hang_up` caused.
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

        Unread events fill at most 16 MiB; then the agents' connections are not read.
        """
        event = self._events.take(seconds)
        if event is None or event.peer not in self.connected:
            return None
        if event.message is None:
            self.connected.discard(event.peer)
        return event

    def wake(self) -> None:
        """Have `next_event` return at once; callable from any thread."""
        self._events.wake()

    def send(self, agent: int, kind: str, payload: bytes = b"", **fields: Any) -> bool:
        """Send an agent a message about the run; return False if its connection is gone."""
        return self._peers.send(agent, kind, payload, run_id=self._run_id, **fields)

    def keep(self, agent: int, name: str, content: bytes) -> bool:
        """Have an agent keep some bytes, as `ControlServer.keep` does."""
        return self._peers.keep(agent, name, content)

    def hang_up(self, agents: Collection[int]) -> None:
        """Disconnect some of the agents, and ignore what they said last."""
        self._peers.hang_up(agents)
        self.connected.difference_update(agents)

    def is_about(self, message: Message) -> bool:
        """Return whether a message of one of the agents is about this attempt of the run."""
        told = message.fields
        is_attempt = self._attempt in (None, told.get("attempt", self._attempt))
        return is_attempt and told["run_id"] == self._run_id


@dataclass(frozen=True, eq=False)
class _Mailbox:
    subscription: Subscription
    events: EventQueue


class Router:
    """Distributes the events of one server's peers.

    A message about a run goes to the subscription of that run; without one it is dropped, because
    it is a late message about something that is over. Any other message goes to whoever acquires
    the executors, as does the end of each connection, which also goes to the subscriptions of the
    agent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rest = EventQueue(loop)
        # Guards what follows.
        self._lock = threading.Lock()
        self._boxes: dict[int, list[_Mailbox]] = defaultdict(list)
        self._ends: dict[int, Event] = {}
        self._listener: Callable[[Event], None] | None = None

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
                for agent in agents:
                    self._boxes[agent] = [one for one in self._boxes[agent] if one is not box]
            events.close()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[Event], None]) -> Iterator[None]:
        """Implement `ControlServer.listening`."""
        with self._lock:
            self._listener = listener
            self._tell_listener()
        try:
            yield
        finally:
            with self._lock:
                self._listener = None

    async def route(self, event: Event) -> None:
        """Pass a message on; wait until there is room for it."""
        message = event.message
        assert message is not None, "it is no end of a connection"
        if "run_id" in message.fields:
            with self._lock:
                boxes = self._boxes[event.peer]
                found = [box.events for box in boxes if box.subscription.is_about(message)]
            for events in found:
                await events.put(event)
            return
        await self._rest.put(event)
        with self._lock:
            self._tell_listener()

    def route_end(self, event: Event) -> None:
        """Pass on the end of a connection."""
        with self._lock:
            self._ends[event.peer] = event
            for box in self._boxes[event.peer]:
                box.events.put_end(event)
            self._rest.put_end(event)
            self._tell_listener()

    def _tell_listener(self) -> None:
        """Pass what nobody has taken to the listener, if there is one; call it under the lock."""
        if self._listener is not None:
            while (event := self._rest.take(0.0)) is not None:
                self._listener(event)

    @contextlib.contextmanager
    def sending_to(self, peer: int) -> Iterator[None]:
        """Let a peer's messages in while something is sent to it; call it in the loop's thread."""
        with self._lock:
            queues = (self._rest, *(box.events for box in self._boxes[peer]))
        with contextlib.ExitStack() as stack:
            for queue in queues:
                stack.enter_context(queue.sending_to(peer))
            yield
