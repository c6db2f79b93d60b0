"""Where the ranks of a gang meet: asked of their agents before an attempt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from hopsgpu import failures
from hopsgpu.errors import Cancelled, ConfigError, HopsGpuError, RankFailed
from hopsgpu.frameworks.endpoints import Endpoints, endpoints_of, ports_wanted
from hopsgpu.gang import RankPlace, World
from hopsgpu.worker.channel import Message
from hopsgpu.worker.server import Event

# A fork server that does not have torch yet imports it before it can serve a store.
_ANSWER_SECONDS = 90.0
_STORES = "torch"


class Asked(Protocol):
    """What the agents must know of the call."""

    @property
    def run_id(self) -> str: ...
    @property
    def frameworks(self) -> tuple[str, ...]: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def interface(self) -> str | None: ...


@dataclass(frozen=True)
class Meeting:
    """The gang with the addresses and ports of its agents.

    Attributes:
        world: its containers have the address and interface by which the others reach them.
        endpoints: ports that the agents hold.
    """

    world: World
    endpoints: Endpoints


def meet(
    world: World,
    call: Asked,
    send: Callable[..., None],
    next_event: Callable[[], Event | None],
    cancelled: threading.Event,
) -> Meeting | RankFailed:
    """Has every agent hold its ports, and say how others reach it.

    Args:
        world: the gang.
        call: what is to be run.
        send: sends a message to an agent: key, kind, fields.
        next_event: the next of the gang, or None.
        cancelled: set when the run is no longer wanted.

    Returns:
        The meeting, or the failure where an executor was lost meanwhile.

    Raises:
        Cancelled: the run is no longer wanted.
        ConfigError: a node cannot hold a port, or lacks the wanted interface.
        HopsGpuError: an agent did not answer.
    """
    containers = {place.container.key: place for place in reversed(world.places)}
    addresses = [place.container.address for place in containers.values()]
    first = world.places[0].container.key
    for key in containers:
        send(
            key,
            "reserve",
            ports=ports_wanted(world, key),
            store=world.size if key == first and _STORES in call.frameworks else 0,
            frameworks=call.frameworks,
            shared=dict(call.environment),
            interface=call.interface,
            others=addresses,
        )
    answers: dict[int, Message] = {}
    deadline = time.monotonic() + _ANSWER_SECONDS
    while len(answers) < len(containers):
        event = next_event()
        if cancelled.is_set():
            raise Cancelled(f"{call.run_id} was cancelled before its ranks started")
        if event is not None and event.peer in containers:
            if event.message is None:
                return _lost(containers[event.peer], event)
            if event.message.kind == "reserved":
                answers[event.peer] = _answer(event.message)
        elif time.monotonic() > deadline:
            silent = [p.container.host for key, p in containers.items() if key not in answers]
            raise HopsGpuError(
                f"agents on {', '.join(silent)} did not answer for {_ANSWER_SECONDS:g} s"
            )
    return _meeting(world, first, answers)


def _lost(place: RankPlace, event: Event) -> RankFailed:
    reason = event.reason or "its connection ended"
    return failures.executor_lost(place, f"{reason}, before its ranks were started", "(none)")


def _answer(message: Message) -> Message:
    if message.fields.get("problem"):
        raise ConfigError(message["problem"])
    return message


def _meeting(world: World, first: int, answers: Mapping[int, Message]) -> Meeting:
    def located(place: RankPlace) -> RankPlace:
        told = answers[place.container.key]
        container = replace(place.container, address=told["address"], interface=told["interface"])
        return replace(place, container=container)

    places = tuple(map(located, world.places))
    servers = tuple(map(located, world.servers))
    there = replace(world, places=places, servers=servers)
    ports = {key: message["ports"] for key, message in answers.items()}
    return Meeting(there, endpoints_of(there, ports, answers[first]["store"]))
