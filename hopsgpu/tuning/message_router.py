"""Routes the agents' messages to the trials that they concern."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from hopsgpu.control.channel import Message
from hopsgpu.control.server import ControlServer, Event

# A thread that has an event waits one interval for each other thread that computes. Python's
# default, 5 ms, is several times what the driver needs to start a trial.
_SWITCH_SECONDS = 0.0005
_EVENT_SECONDS = 0.2


class TrialAgents:
    """The agents of one trial, as a `backends.grant.Wire`; `MessageRouter.add` creates it.

    Args:
        server: control server of the agents.
        keys: keys of the agents.
        heard: called with each message before it is queued.

    Attributes:
        keys: keys of the agents.
    """

    def __init__(
        self, server: ControlServer, keys: Collection[int], heard: Callable[[Message], None]
    ) -> None:
        self.keys = frozenset(keys)
        self._server = server
        self._heard = heard
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    @property
    def certificate(self) -> bytes | None:
        return self._server.certificate

    def next_event(self, seconds: float) -> Event | None:
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def send(self, peer: int, kind: str, payload: bytes = b"", **fields: Any) -> bool:
        return self._server.send(peer, kind, payload, **fields)

    def keep(self, peer: int, name: str, content: bytes) -> bool:
        return self._server.keep(peer, name, content)

    def hang_up(self, peers: Iterable[int]) -> None:
        self._server.hang_up(peers)

    def put(self, event: Event) -> None:
        """Pass an event to the trial."""
        if event.message is not None:
            self._heard(event.message)
        self._events.put(event)


class MessageRouter:
    """Routes events to trials, by the run id in their agents' messages.

    Args:
        server: control server of the agents.
    """

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._wires: dict[str, TrialAgents] = {}

    def add(
        self, run_id: str, keys: Collection[int], heard: Callable[[Message], None]
    ) -> TrialAgents:
        """Return a wire that from now on receives the events of a trial.

        These are the messages with its run id, and the ends of its agents' connections.

        Args:
            run_id: run id of the trial on the control channel.
            keys: keys of its agents.
            heard: called with each message first, in the thread that routes.
        """
        wire = TrialAgents(self._server, keys, heard)
        with self._lock:
            self._wires[run_id] = wire
        return wire

    def drop(self, run_id: str, wire: TrialAgents) -> None:
        """Stop routing to a wire, whose try is over.

        Later messages with the run id go to the wire of the trial's next try, or to none.
        """
        with self._lock:
            if self._wires.get(run_id) is wire:
                del self._wires[run_id]

    def deal(self, event: Event) -> None:
        """Pass an event to the trials that it concerns."""
        if event.message is None:
            with self._lock:
                concerned = [wire for wire in self._wires.values() if event.peer in wire.keys]
        else:
            with self._lock:
                found = self._wires.get(event.message.fields.get("run_id", ""))
            concerned = [] if found is None else [found]
        for wire in concerned:
            wire.put(event)


@contextlib.contextmanager
def dealing(
    server: ControlServer,
    switch: MessageRouter,
    name: str,
    put: Callable[[Event | Exception], None],
) -> Iterator[None]:
    """Route the control channel's events to the trials within the context, in a thread.

    Args:
        server: server that provides the events.
        switch: routes them to the trials.
        name: name of the thread.
        put: called with the events of executors that arrive and leave, before the trials get them,
            and with errors.
    """
    over = threading.Event()

    def pump() -> None:
        while not over.is_set():
            event = server.next_event(_EVENT_SECONDS)
            if event is None:
                continue
            if event.message is None or event.message.kind == "hello":
                put(event)
            try:
                switch.deal(event)
            except Exception as error:  # noqa: BLE001 - ends the search, and is raised there
                put(error)

    thread = threading.Thread(target=pump, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def quick_switching() -> Iterator[None]:
    """Let threads that start trials interrupt threads that compute sooner, within the context."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        if before > _SWITCH_SECONDS:  # else another search set the interval, and resets it
            sys.setswitchinterval(before)
