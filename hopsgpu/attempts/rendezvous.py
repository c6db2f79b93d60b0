"""The addresses and ports at which a gang's ranks meet, requested from their agents in advance."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hopsgpu.attempts import failures
from hopsgpu.attempts.rank_call import Call
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.core.gang import Exclusions, RankPlacement, World
from hopsgpu.errors import Cancelled, ConfigError, RankFailed
from hopsgpu.frameworks.endpoints import Endpoints, endpoints_of, ports_needed
from hopsgpu.packaging.python_env.missing_modules import missing_modules_error

log = logging.getLogger(__name__)

# Long, because a fork server that has not yet imported torch does so before it can serve a store.
_ANSWER_SECONDS = 90.0
_STORES = "torch"


@dataclass(frozen=True)
class Rendezvous:
    """The gang with the addresses and ports of its agents.

    Attributes:
        world: the gang; each container has the address and interface by which others reach it.
    """

    world: World
    endpoints: Endpoints


@dataclass(frozen=True)
class RendezvousFailure:
    """Why the ranks of a gang cannot meet.

    Attributes:
        silent: keys of the agents that did not answer.
    """

    error: RankFailed
    silent: tuple[int, ...] = ()
    exclusions: Exclusions = Exclusions()


def arrange_rendezvous(
    world: World,
    call: Call,
    send: Callable[..., bool],
    send_modules: Callable[[int], object],
    next_event: Callable[[], Event | None],
    cancelled: threading.Event,
) -> Rendezvous | RendezvousFailure:
    """Have every agent hold its ports, and learn by which address others reach it.

    Args:
        send: sends a message to an agent: key, kind, fields.
        send_modules: sends an agent, by its key, the user's modules, which it unpacks meanwhile.

    Returns:
        The rendezvous, or why there is none.

    Raises:
        Cancelled: the run was cancelled.
        ConfigError: a node lacks the configured interface, or modules that the call needs.
    """
    containers = {place.container.key: place for place in reversed(world.places)}
    _ask(world, call, send, send_modules)
    answers: dict[int, Message] = {}
    began = time.monotonic()
    deadline = began + _ANSWER_SECONDS
    log.debug(
        "%s: waits for %d agents to reserve ports, %g s at most",
        call.run_id,
        len(containers),
        _ANSWER_SECONDS,
    )
    while len(answers) < len(containers):
        event = next_event()
        if cancelled.is_set():
            raise Cancelled(f"{call.run_id} was cancelled before its ranks started")
        if event is not None and event.peer in containers:
            if event.message is None:
                why = event.reason or "its connection ended"
                return RendezvousFailure(_failure(containers[event.peer], why))
            if event.message.kind == "preparing":
                deadline = time.monotonic() + _ANSWER_SECONDS
            if event.message.kind == "reserved":
                answer = answers[event.peer] = event.message
                log.debug(
                    "%s: agent %d answered after %.2f s (%d of %d)",
                    call.run_id,
                    event.peer,
                    time.monotonic() - began,
                    len(answers),
                    len(containers),
                )
                if not answer.fields.keys().isdisjoint(("problem", "unopened")):
                    return _failure_reported(containers[event.peer], answer)
                _check_modules(containers[event.peer].container.host, answer, call)
        elif time.monotonic() > deadline:
            silent = tuple(key for key in containers if key not in answers)
            why = f"its agent did not answer for {_ANSWER_SECONDS:g} s"
            return RendezvousFailure(_failure(containers[silent[0]], why), silent)
    return _rendezvous_of(world, world.places[0].container.key, answers)


def _ask(
    world: World, call: Call, send: Callable[..., bool], send_modules: Callable[[int], object]
) -> None:
    """Ask every agent to reserve, and send it the user's modules."""
    containers = {place.container.key: place.container for place in reversed(world.places)}
    addresses = [container.address for container in containers.values()]
    first = world.places[0].container.key
    foreseen = call.function.foreseen
    has_stores = _STORES in foreseen.imports and not foreseen.has_own_master
    # A trial's own directory is made when it leaves something.
    run_url = call.directory.url.partition("/trials/")[0] if call.trial else call.directory.url
    for key in containers:
        send(
            key,
            "reserve",
            slot=call.slot(key),
            run_url=run_url,
            ports=ports_needed(world, key),
            # A rank 0 that is alone serves a store for itself, which takes no time.
            store=world.size if key == first and world.size > 1 and has_stores else 0,
            frameworks=foreseen.imports,
            shared=dict(call.plan.environment),
            interface=call.interface,
            others=addresses,
            python_env=None if call.python_env is None else call.python_env.as_fields(),
            imports=call.function.needs,
        )
    # The agents unpack the modules while they reserve ports, so `reserve` goes to all agents first.
    for key in containers:
        send_modules(key)


def _check_modules(host: str, answer: Message, call: Call) -> None:
    """Raise ConfigError if the Python of a host's ranks lacks modules to unpickle the call."""
    if lacks := answer.fields.get("lacks"):
        env = None if call.python_env is None else call.python_env.name
        raise missing_modules_error(lacks, f"the ranks' Python on {host}", env)


def _failure(place: RankPlacement, why: str) -> RankFailed:
    return failures.executor_lost_error(place, f"{why}, before its ranks were started", "(none)")


def _failure_reported(place: RankPlacement, answer: Message) -> RendezvousFailure:
    """Return the failure that an agent reports: no access to its GPUs, or no ports or store.

    Raises:
        ConfigError: the node lacks something that was configured.
    """
    host, closed = place.container.host, answer.fields.get("unopened", {})
    problems = [f"{gpu} of {host} cannot be opened ({why})" for gpu, why in closed.items()]
    problem = "; ".join(problems) or answer["problem"]
    if not closed and answer["configured"]:
        raise ConfigError(f"{host}: {problem}")
    outcome = {"status": "not started", "error": problem}
    end = failures.RankExit(place, time.time(), None, None, outcome, (), was_stopped=False)
    exclusions = Exclusions(gpus=frozenset((host, gpu) for gpu in closed))
    return RendezvousFailure(failures.rank_error(end, "(none)"), exclusions=exclusions)


def _rendezvous_of(world: World, first: int, answers: Mapping[int, Message]) -> Rendezvous:
    def locate(place: RankPlacement) -> RankPlacement:
        answer = answers[place.container.key]
        address, interface = answer["address"], answer["interface"]
        container = replace(place.container, address=address, interface=interface)
        return replace(place, container=container)

    places = tuple(map(locate, world.places))
    servers = tuple(map(locate, world.servers))
    located_world = replace(world, places=places, servers=servers)
    ports = {key: message["ports"] for key, message in answers.items()}
    return Rendezvous(located_world, endpoints_of(located_world, ports, answers[first]["store"]))
