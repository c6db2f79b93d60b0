"""What agents say, dealt to the trials that it is about."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from hopsgpu.control.channel import Message
from hopsgpu.control.server import ControlServer, Event

# Python's own 5 ms, which a thread that has an event waits for each other one that computes, are
# several times what a trial's start takes the driver.
_SWITCH_SECONDS = 0.0005
_EVENT_SECONDS = 0.2


class TrialWire:
    """The agents of one trial, as a `spark.granted.Wire`; `Switch.add` makes it."""

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
        """Has the trial told."""
        if event.message is not None:
            self._heard(event.message)
        self._events.put(event)


class Switch:
    """Deals events to trials, by the run id that their agents' words bear.

    Args:
        server: whose events they are.
    """

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._wires: dict[str, TrialWire] = {}

    def add(
        self, run_id: str, keys: Collection[int], heard: Callable[[Message], None]
    ) -> TrialWire:
        """From now on what is said under a run id, or is the end of a connection, comes there.

        Args:
            run_id: of the trial, on the control channel.
            keys: of its agents.
            heard: told first of what they say, in the thread that deals.
        """
        wire = TrialWire(self._server, keys, heard)
        with self._lock:
            self._wires[run_id] = wire
        return wire

    def drop(self, run_id: str, wire: TrialWire) -> None:
        """The try is over: what is said of it now is nobody's, or that of the trial's next try."""
        with self._lock:
            if self._wires.get(run_id) is wire:
                del self._wires[run_id]

    def deal(self, event: Event) -> None:
        """Brings an event to the trials that it concerns."""
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
    server: ControlServer, switch: Switch, name: str, put: Callable[[Event | Exception], None]
) -> Iterator[None]:
    """While inside, what comes from the control channel is dealt to the trials, in a thread.

    Args:
        server: whose events they are.
        switch: brings them to the trials.
        name: of the thread.
        put: given the events of executors that come and go, before trials are, and what went wrong.
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
    """While inside, threads that compute let others go on soon: those that start trials."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        if before > _SWITCH_SECONDS:  # else it is another search's, which ends it
            sys.setswitchinterval(before)
