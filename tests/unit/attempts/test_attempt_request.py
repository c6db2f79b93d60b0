"""What each agent is told of an attempt."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hopsgpu.attempts.attempt_request import run_messages
from hopsgpu.attempts.rank_call import script_name
from hopsgpu.attempts.rendezvous import Rendezvous
from hopsgpu.core.gang import GangExecutor, assign_ranks
from hopsgpu.frameworks.endpoints import endpoints_of
from hopsgpu.rank.trial import Trial
from tests.unit import plans


def messages(data: list[bytes]) -> dict[int, tuple[list[bytes], list[dict[str, Any]]]]:
    """By agent the parts of its payload, and the contexts of its ranks."""
    hosts = ("node1", "node1", "node2")
    world = assign_ranks(
        [GangExecutor(n, f"c{n}", host, "10.0.0.1", ()) for n, host in enumerate(hosts)], 2, 1
    )
    call = plans.call(data=data, script="train.py")
    ports = {key: range(7000, 7020) for key in range(3)}
    told = {}
    for message in run_messages(call, Rendezvous(world, endpoints_of(world, ports, None))):
        ranks = message.fields["ranks"]
        assert message.fields["modules"] == call.function.modules.digest
        sizes = [message.fields["call_bytes"], *(rank["data_bytes"] for rank in ranks)]
        ends = itertools.accumulate(sizes, initial=0)
        parts = [message.payload[begin:end] for begin, end in itertools.pairwise(ends)]
        assert sum(sizes) == len(message.payload)
        told[message.key] = parts, [rank["context"] for rank in ranks]
    return told


def test_each_rank_gets_its_own_data_and_a_parameter_server_none() -> None:
    told = messages([b"zero", b"one", b"two", b"three", b"four", b"five"])
    # The first container has the parameter server too.
    assert [parts for parts, _ in told.values()] == [
        [b"call", b"zero", b"one", b""],
        [b"call", b"two", b"three"],
        [b"call", b"four", b"five"],
    ]
    assert [c["role"] for c in told[0][1]] == ["worker", "worker", "ps"]


def test_without_data_nothing_more_travels() -> None:
    assert {tuple(parts[1:]) for parts, _ in messages([]).values()} == {
        (b"", b"", b""),
        (b"", b""),
    }


@pytest.mark.parametrize("slots", [{}, {0: 2, 1: 3}])
def test_a_trial_runs_in_a_slot_of_each_agent_with_its_share(slots: dict[int, int]) -> None:
    world = assign_ranks([GangExecutor(n, f"c{n}", "node", "a", (f"g{n}",)) for n in range(2)], 1)
    trial = Trial(5, {"lr": 0.1, "kind": Path("x")})
    call = plans.call(slots=slots, trial=trial, memory_share=0.5)
    rendezvous = Rendezvous(world, endpoints_of(world, {0: range(3), 1: range(1)}))
    told = {message.key: message.fields for message in run_messages(call, rendezvous)}
    assert {key: fields["slot"] for key, fields in told.items()} == {0: 0, 1: 0} | slots
    for fields in told.values():
        (rank,) = fields["ranks"]
        assert rank["environment"]["HOPSGPU_MEMORY_SHARE"] == "0.5"
        params = {"lr": 0.1, "kind": repr(Path("x"))}
        assert rank["context"]["trial"] == {"number": 5, "params": params}


def test_a_rank_knows_with_how_many_it_shares_its_nodes_disk() -> None:
    contexts = [context for _, found in messages([]).values() for context in found]
    workers = [c for c in contexts if c["role"] == "worker"]
    assert [c["disk_sharers"] for c in workers] == [4, 4, 4, 4, 2, 2]


def test_ranks_know_their_run_and_attempt_as_under_torchrun() -> None:
    call = plans.call(plans.plan(retries=5), attempt=2)
    world = assign_ranks([GangExecutor(0, "c", "node", "a", ())], 1)
    rendezvous = Rendezvous(world, endpoints_of(world, {0: range(3)}))
    (message,) = run_messages(call, rendezvous)
    (rank,) = message.fields["ranks"]
    elastic = {n: v for n, v in rank["environment"].items() if n.startswith("TORCHELASTIC_")}
    assert elastic == {
        "TORCHELASTIC_RUN_ID": "run-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
    }


@pytest.mark.parametrize("is_independent", [False, True])
def test_independent_ranks_are_worlds_of_one_in_the_gang(is_independent: bool) -> None:
    call = plans.call(plans.plan(workers=2, independent_ranks=is_independent))
    world = assign_ranks([GangExecutor(0, "c", "node", "a", ())], 2)
    rendezvous = Rendezvous(world, endpoints_of(world, {0: range(4)}))
    (message,) = run_messages(call, rendezvous)
    _, second = message.fields["ranks"]
    found = second["environment"]["RANK"], second["environment"]["WORLD_SIZE"]
    assert found == (("0", "1") if is_independent else ("1", "2"))
    known = {name: second["context"][name] for name in ("rank", "world_size", "independent_ranks")}
    assert known == {"rank": 1, "world_size": 2, "independent_ranks": is_independent}


def test_a_rank_knows_the_name_of_the_script_and_none_of_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["jobs/train.py", "--driver-only"])
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert script_name() == ""  # a notebook
    main.__file__ = "/home/me/jobs/train.py"
    assert script_name() == "jobs/train.py"
    monkeypatch.setattr(sys, "argv", [])
    assert script_name() == ""
    assert {c["script"] for _, found in messages([]).values() for c in found} == {"train.py"}
