"""What the driver makes of agents that cannot reserve what an attempt needs."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from hopsgpu.attempts.rendezvous import Rendezvous, RendezvousFailure, arrange_rendezvous
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.core.gang import Exclusions, GangExecutor, assign_ranks
from hopsgpu.errors import ConfigError
from hopsgpu.frameworks import environment
from hopsgpu.frameworks.torch import Restarts
from hopsgpu.packaging.code_variables import Setting
from hopsgpu.packaging.preload import StaticFindings
from tests.unit import plans

WORLD = assign_ranks(
    [
        GangExecutor(key, f"container_{key}", f"node{key}", "10.0.0.1", (f"g{key}",))
        for key in (0, 1)
    ],
    1,
)
ADDRESS = {"address": "10.0.0.1", "interface": "lo"}
CALL = dataclasses.replace(plans.call(), run_id="r")


def met(**said: Any) -> Rendezvous | RendezvousFailure:
    """What comes of it where agent 1 says this, and agent 0 nothing yet."""
    events = [Event(1, Message("reserved", {"run_id": "r", **said}))]
    return arrange_rendezvous(
        WORLD,
        CALL,
        lambda *_, **__: True,
        lambda _: None,
        lambda: events.pop() if events else None,
        threading.Event(),
    )


@pytest.mark.parametrize(
    ("ranks", "own_master", "store"), [(1, False, 0), (2, False, 2), (2, True, 0)]
)
def test_only_ranks_that_meet_there_need_a_store_of_an_agent(
    ranks: int, own_master: bool, store: int
) -> None:
    world = assign_ranks([WORLD.places[0].container], ranks)
    sets = frozenset({Setting("MASTER_ADDR", is_default=False)}) if own_master else frozenset()
    function = plans.function(foreseen=StaticFindings(("torch",), sets))
    call = dataclasses.replace(CALL, function=function, slots={0: 4})
    asked: list[dict[str, Any]] = []
    told = Message("reserved", {"ports": range(9), "store": 7 if store else None, **ADDRESS})
    met = arrange_rendezvous(
        world,
        call,
        lambda key, kind, **fields: asked.append(fields) is None,
        lambda _: None,
        lambda: Event(0, told),
        threading.Event(),
    )
    assert isinstance(met, Rendezvous)
    assert [(fields["store"], fields["slot"]) for fields in asked] == [(store, 4)]
    said = environment(met.world, met.world.places[0], met.endpoints, Restarts("r"))
    assert said.get("TORCHELASTIC_USE_AGENT_STORE") == ("True" if store else None)


def test_agents_get_the_modules_while_they_reserve() -> None:
    done: list[tuple[int, str]] = []
    said = {"ports": range(9), "store": None, **ADDRESS}
    events = [Event(key, Message("reserved", said)) for key in (0, 1)]

    def hear() -> Event:
        done.append((events[0].peer, "answers"))
        return events.pop(0)

    met = arrange_rendezvous(
        WORLD,
        CALL,
        lambda key, kind, **fields: done.append((key, kind)) is None,
        lambda key: done.append((key, "modules")),
        hear,
        threading.Event(),
    )
    assert isinstance(met, Rendezvous)
    assert [kind for _, kind in done] == ["reserve"] * 2 + ["modules"] * 2 + ["answers"] * 2
    assert {key for key, kind in done if kind == "modules"} == {0, 1}


def test_a_gpu_that_cannot_be_opened_is_named_and_avoided() -> None:
    unmet = met(unopened={"g1": "cuInit: CUDA_ERROR_NO_DEVICE"})
    assert isinstance(unmet, RendezvousFailure)
    message = str(unmet.error)
    assert "container_1, GPU g1)" in message and "cuInit: CUDA_ERROR_NO_DEVICE" in message
    assert unmet.exclusions == Exclusions(gpus=frozenset({("node1", "g1")}))


def test_what_an_agent_lacks_is_infrastructure_and_its_host_is_named() -> None:
    unmet = met(problem="TimeoutError()", configured=False)
    assert isinstance(unmet, RendezvousFailure) and not unmet.exclusions.is_any
    assert "rank 1 on node1" in str(unmet.error) and "TimeoutError()" in str(unmet.error)


def test_an_interface_that_a_node_lacks_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="node1: no interface 'ib0'"):
        met(problem="no interface 'ib0'", configured=True)


def test_an_agent_that_unpacks_an_environment_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 10_000, 60))  # more than half of what an answer may take, at each look
    monkeypatch.setattr("hopsgpu.attempts.rendezvous.time.monotonic", lambda: float(next(clock)))
    told = [Message("preparing", {"run_id": "r"})] * 5
    told.append(Message("reserved", {"run_id": "r", "problem": "full", "configured": False}))
    events = [Event(1, message) for message in told]
    unmet = arrange_rendezvous(
        WORLD,
        CALL,
        lambda *_, **__: True,
        lambda _: None,
        lambda: events.pop(0) if events else None,
        threading.Event(),
    )
    assert isinstance(unmet, RendezvousFailure) and unmet.silent == () and not events


def test_modules_that_the_ranks_python_lacks_are_named() -> None:
    words = "refer to own_torch, own_net, which the ranks' Python on node1 lacks: pass python_env="
    with pytest.raises(ConfigError, match=words):
        met(ports=range(9), store=None, lacks=["own_torch", "own_net"], **ADDRESS)
