from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hopsgpu.core.gang import (
    PART_SECONDS,
    AcquisitionProgress,
    Device,
    Exclusions,
    GangExecutor,
    GangState,
    Verdict,
    assign_ranks,
    backoff_seconds,
    decide_acquire,
    duplicate_gpu,
    exclusion_reason,
    may_follow,
    shared_hosts,
    slices_of_one_gpu,
)

RELEASING, FINISHING = GangState.RELEASING, GangState.FINISHING


def container(key: int, host: str, *gpus: str) -> GangExecutor:
    return GangExecutor(key, f"container_{key}", host, f"10.0.0.{key}", gpus)


TO_STARTING = (GangState.REQUESTED, GangState.WAITING, GangState.GRANTED, GangState.READY)
WAY = (*TO_STARTING, GangState.STARTING, GangState.RUNNING, GangState.PUBLISHING)


def test_a_gang_passes_its_states_in_order() -> None:
    for end in (GangState.SUCCEEDED, GangState.FAILED, GangState.CANCELLED):
        assert all(itertools.starmap(may_follow, itertools.pairwise((*WAY, RELEASING, end))))
        assert all(itertools.starmap(may_follow, itertools.pairwise((*WAY, FINISHING, end))))
    # A gang that is held is no run.
    assert may_follow(FINISHING, GangState.HELD) and may_follow(RELEASING, GangState.RELEASED)
    assert not may_follow(GangState.REQUESTED, GangState.RUNNING)
    assert not may_follow(GangState.PUBLISHING, GangState.RUNNING)
    assert not may_follow(GangState.READY, GangState.RUNNING)
    assert not may_follow(GangState.RUNNING, GangState.SUCCEEDED)
    assert not may_follow(GangState.RUNNING, GangState.FAILED)
    assert not may_follow(RELEASING, GangState.HELD)


def test_a_launch_on_a_whole_gang_is_ready_at_once() -> None:
    assert may_follow(GangState.REQUESTED, GangState.READY)


@pytest.mark.parametrize("state", [*WAY])
def test_every_state_has_a_way_out(state: GangState) -> None:
    assert may_follow(state, RELEASING)
    assert may_follow(state, FINISHING)


@pytest.mark.parametrize("state", [s for s in GangState if s.is_terminal])
def test_nothing_follows_the_end(state: GangState) -> None:
    assert not any(may_follow(state, following) for following in GangState)


def test_the_ends() -> None:
    ends = {"succeeded", "failed", "cancelled", "held", "released"}
    assert {state.value for state in GangState if state.is_terminal} == ends


@pytest.mark.parametrize(
    ("progress", "deadline", "now", "verdict"),
    [
        (AcquisitionProgress(1, 1, 0.0), 10.0, 9.9, Verdict.WAIT),
        (AcquisitionProgress(1, 1, 0.0), 10.0, 10.0, Verdict.TIMED_OUT),
        (AcquisitionProgress(2, 2, 0.0), 10.0, 11.0, Verdict.GRANTED),
        (AcquisitionProgress(), None, 1e9, Verdict.WAIT),
        # A part is held for a bounded time, and a request that nothing comes of too.
        (AcquisitionProgress(1, 1, 0.0), None, PART_SECONDS - 0.1, Verdict.WAIT),
        (AcquisitionProgress(1, 1, 0.0), None, PART_SECONDS, Verdict.GIVE_BACK),
        (AcquisitionProgress(0, 0, 0.0), None, PART_SECONDS, Verdict.GIVE_BACK),
        (AcquisitionProgress(1, 1, 5.0), None, PART_SECONDS, Verdict.WAIT),
        # What YARN has granted whole may take its time to start.
        (AcquisitionProgress(0, 2, 0.0), None, 1e9, Verdict.WAIT),
        (AcquisitionProgress(1, 1, 0.0), PART_SECONDS, PART_SECONDS, Verdict.TIMED_OUT),
        # Containers that end again and again.
        (AcquisitionProgress(0, 2, 0.0, lost=3), None, 1.0, Verdict.WAIT),
        (AcquisitionProgress(0, 2, 0.0, lost=4), None, 1.0, Verdict.GIVE_BACK),
    ],
)
def test_acquire(
    progress: AcquisitionProgress, deadline: float | None, now: float, verdict: Verdict
) -> None:
    assert decide_acquire(progress, wanted=2, deadline=deadline, now=now) is verdict


def test_back_off_grows_with_chance_and_is_bounded() -> None:
    assert backoff_seconds(1, 0.0) == 1.0
    assert backoff_seconds(1, 0.5) == 2.0
    assert backoff_seconds(3, 0.5) == 5.0
    assert backoff_seconds(60, 0.999) < 32


def test_hosts_that_are_shared() -> None:
    containers = [container(0, "b"), container(1, "a"), container(2, "b"), container(3, "c")]
    assert shared_hosts(containers) == ("b",)
    assert shared_hosts(containers[:2]) == ()


def test_neighbours_in_rank_share_a_node() -> None:
    containers = [container(key, host, f"g{key}") for key, host in enumerate("baba")]
    world = assign_ranks(containers, 1)
    assert [p.container.host for p in world.places] == ["a", "a", "b", "b"]
    assert [p.rank for p in world.places] == [0, 1, 2, 3]
    assert [p.node_rank for p in world.places] == [0, 1, 2, 3]
    assert assign_ranks(containers[::-1], 1) == world


def test_containers_of_a_node_have_one_clock() -> None:
    measured = [(0, "a", 0.0), (1, "a", 0.4), (2, "b", -3.1), (3, "b", -3.5)]
    containers = [replace(container(key, host), clock=clock) for key, host, clock in measured]
    places = assign_ranks(containers, 1).places
    assert [p.container.clock for p in places] == [0.0, 0.0, -3.5, -3.5]


def test_several_ranks_in_a_container_share_out_its_gpus() -> None:
    world = assign_ranks([container(0, "a", "g0", "g1", "g2", "g3")], 2)
    assert [(p.local_rank, p.gpus) for p in world.places] == [(0, ("g0", "g1")), (1, ("g2", "g3"))]
    assert world.of_container(0) == world.places


def test_ranks_that_share_a_gpu_are_neighbours() -> None:
    world = assign_ranks([container(0, "a", "g0"), container(1, "b", "g1")], 2)
    assert [p.gpus for p in world.places] == [("g0",), ("g0",), ("g1",), ("g1",)]
    assert [(p.rank, p.local_rank) for p in world.places] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    packed = assign_ranks([container(0, "a", "g0", "g1")], 6)
    assert [p.gpus for p in packed.places] == [("g0",)] * 3 + [("g1",)] * 3
    assert [p.gpus for p in assign_ranks([container(0, "a")], 2).places] == [(), ()]


A100 = "NVIDIA A100-SXM4-40GB"


@pytest.mark.parametrize(
    ("devices", "gpu_type", "why"),
    [
        ((Device("g0", A100),), None, None),
        ((Device("g0", A100),), "a100", None),
        ((Device("g0", A100),), "A100-sxm4", None),
        ((Device("g0", A100), Device("g1", "Tesla T4")), "A100", "node has Tesla T4, not 'A100'"),
        ((Device("g0"),), "A100", "node has a GPU without a product name, not 'A100'"),
        ((Device("g0", A100, bad="XID 79"),), "A100", "g0 of node is bad: XID 79"),
        ((), None, None),
    ],
)
def test_what_gets_no_rank(
    devices: tuple[Device, ...], gpu_type: str | None, why: str | None
) -> None:
    given = GangExecutor(0, "c", "node", "10.0.0.1", tuple(d.gpu for d in devices), devices=devices)
    assert exclusion_reason(given, Exclusions(), gpu_type, 1) == why


def test_what_failed_before_gets_no_rank() -> None:
    given = container(0, "a", "g0")
    assert exclusion_reason(given, Exclusions(gpus=frozenset({("a", "g1")})), None, 1) is None
    for exclusions, words in (
        (Exclusions(gpus=frozenset({("a", "g0")})), "g0 of a failed"),
        (Exclusions(hosts=frozenset({"a"})), "a failed"),
    ):
        assert (exclusion_reason(given, exclusions, None, 1) or "").startswith(words)


def test_mig_devices_get_no_rank_that_requests_several_gpus() -> None:
    for device in (Device("MIG-1", "A100 MIG 1g.5gb"), Device("MIG-1", parent="GPU-1")):
        given = GangExecutor(0, "c", "node", "10.0.0.1", ("MIG-1",), devices=(device,))
        assert exclusion_reason(given, Exclusions(), None, 0.5) is None
        why = exclusion_reason(given, Exclusions(), None, 2)
        assert why is not None and "node has MIG devices" in why and "2 GPUs" in why


def test_two_ranks_with_mig_devices_of_one_gpu() -> None:
    def sliced(key: int, host: str, *parents: str) -> GangExecutor:
        devices = tuple(Device(f"MIG-{key}{n}", parent=p) for n, p in enumerate(parents))
        return replace(container(key, host, *(d.gpu for d in devices)), devices=devices)

    def pair(*containers: GangExecutor, ranks: int = 1) -> tuple[str, int, int] | None:
        gpu_and_places = slices_of_one_gpu(assign_ranks(containers, ranks))
        if gpu_and_places is None:
            return None
        gpu, first, second = gpu_and_places
        return gpu, first.rank, second.rank

    assert pair(sliced(0, "a", "A"), sliced(1, "a", "B"), sliced(2, "a", "A")) == ("A", 0, 2)
    assert pair(sliced(0, "a", "PCI-1"), sliced(1, "b", "PCI-1")) is None
    assert pair(sliced(0, "a", "A", "B", "B"), ranks=3) == ("B", 1, 2)
    assert pair(sliced(0, "a", "A"), sliced(1, "a", "B")) is None
    # Whole GPUs, and two ranks that share a MIG device.
    assert pair(sliced(0, "a", ""), sliced(1, "a", "")) is None
    assert pair(sliced(0, "a", "A"), ranks=2) is None


def test_parameter_servers_are_dealt_to_the_first_containers() -> None:
    containers = [container(0, "b", "g0", "g1"), container(1, "a", "g2", "g3")]
    world = assign_ranks(containers, 2, parameter_servers=3)
    assert world.size == 4
    assert world.places == assign_ranks(containers, 2).places
    servers = [(p.rank, p.node_rank, p.local_rank, p.container.host) for p in world.servers]
    assert servers == [(4, 0, 2, "a"), (5, 1, 2, "b"), (6, 0, 3, "a")]
    assert {(p.role, p.gpus) for p in world.servers} == {("ps", ())}
    assert {p.role for p in world.places} == {"worker"}
    assert [p.rank for p in world.processes] == list(range(7))
    assert [p.rank for p in world.of_container(1)] == [0, 1, 4, 6]


def test_duplicates_name_both_sides() -> None:
    one, other = container(0, "a", "g0", "g1"), container(1, "a", "g1")
    assert duplicate_gpu([one, other]) == ("g1", one, other)
    assert duplicate_gpu([one]) is None
