from __future__ import annotations

import itertools

import pytest

from hopsgpu.frameworks import torch
from hopsgpu.gang import (
    Container,
    GangState,
    Verdict,
    assign_ranks,
    decide_acquire,
    duplicate_gpu,
    may_follow,
)


def container(key: int, host: str, *gpus: str) -> Container:
    return Container(key, f"container_{key}", host, f"10.0.0.{key}", gpus)


def test_a_gang_passes_its_states_in_order() -> None:
    out = (GangState.FAILED, GangState.CANCELLED)
    states = [state for state in GangState if state not in out]
    assert all(itertools.starmap(may_follow, itertools.pairwise(states)))
    assert not may_follow(GangState.REQUESTED, GangState.TRAINING)
    assert not may_follow(GangState.PUBLISHING, GangState.TRAINING)


@pytest.mark.parametrize("state", [s for s in GangState if not s.is_terminal])
def test_every_state_has_a_way_out(state: GangState) -> None:
    if state is not GangState.RELEASING:
        assert may_follow(state, GangState.RELEASING)
    assert may_follow(GangState.RELEASING, GangState.FAILED)


@pytest.mark.parametrize("state", [s for s in GangState if s.is_terminal])
def test_nothing_follows_the_end(state: GangState) -> None:
    assert not any(may_follow(state, following) for following in GangState)


@pytest.mark.parametrize(
    ("granted", "deadline", "now", "verdict"),
    [
        (1, 10.0, 9.9, Verdict.WAIT),
        (1, 10.0, 10.0, Verdict.TIMED_OUT),
        (2, 10.0, 11.0, Verdict.GRANTED),
        (0, None, 1e9, Verdict.WAIT),
    ],
)
def test_acquire(granted: int, deadline: float | None, now: float, verdict: Verdict) -> None:
    decided = decide_acquire(granted=granted, wanted=2, deadline=deadline, now=now)
    assert decided is verdict


def test_neighbours_in_rank_share_a_node() -> None:
    containers = [
        container(0, "b", "g0"),
        container(1, "a", "g1"),
        container(2, "b", "g2"),
        container(3, "a", "g3"),
    ]
    world = assign_ranks(containers, 1)
    assert [p.container.host for p in world.places] == ["a", "a", "b", "b"]
    assert [p.rank for p in world.places] == [0, 1, 2, 3]
    assert [p.node_rank for p in world.places] == [0, 1, 2, 3]
    assert assign_ranks(containers[::-1], 1) == world


def test_several_ranks_in_a_container_share_out_its_gpus() -> None:
    world = assign_ranks([container(0, "a", "g0", "g1", "g2", "g3")], 2)
    assert [(p.local_rank, p.gpus) for p in world.places] == [(0, ("g0", "g1")), (1, ("g2", "g3"))]
    assert world.of_container(0) == world.places


def test_duplicates_name_both_sides() -> None:
    one, other = container(0, "a", "g0", "g1"), container(1, "a", "g1")
    assert duplicate_gpu([one, other]) == ("g1", one, other)
    assert duplicate_gpu([one]) is None


def test_torch_environment() -> None:
    world = assign_ranks([container(0, "a", "g0"), container(1, "b", "g1")], 1)
    assert torch.environment(world, world.places[1], ("10.0.0.0", 29500)) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.0",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "g1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
