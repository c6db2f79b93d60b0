"""What a process finds in its environment, for every framework."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest

from hopsgpu import frameworks
from hopsgpu.core.gang import GangExecutor, World, assign_ranks
from hopsgpu.core.spec import RESERVED_VARIABLES
from hopsgpu.errors import ConfigError
from hopsgpu.frameworks import accelerate, lightning
from hopsgpu.frameworks.cuda import visible_gpus
from hopsgpu.frameworks.endpoints import Endpoints, endpoints_of, host_port, ports_needed
from hopsgpu.frameworks.proxies import direct_environment, direct_hosts
from hopsgpu.frameworks.torch import Restarts

RESTARTS = Restarts("run-1", attempt=1, max_restarts=3)


def container(key: int, gpus: tuple[str, ...] = (), interface: str = "") -> GangExecutor:
    return GangExecutor(key, f"container_{key}", f"node{key}", f"10.0.0.{key}", gpus, interface)


def gang(ranks: int = 1, servers: int = 0, gpus: int = 0, interface: str = "") -> World:
    """Two containers, each with so many ranks of so many GPUs."""
    containers = [
        container(key, tuple(f"GPU-{key}{n}" for n in range(ranks * gpus)), interface)
        for key in (1, 2)
    ]
    return assign_ranks(containers, ranks, servers)


def held(world: World) -> dict[int, list[int]]:
    keys = {place.container.key for place in world.processes}
    return {key: [1000 * key + n for n in range(ports_needed(world, key))] for key in keys}


def variables(
    world: World,
    number: int,
    visible: str | None = None,
    store_port: int | None = None,
    memory_share: float | None = None,
    is_independent: bool = False,
) -> dict[str, str]:
    endpoints = endpoints_of(world, held(world), store_port)
    place = world.processes[number]
    return frameworks.environment(
        world, place, endpoints, RESTARTS, visible, memory_share, is_independent=is_independent
    )


def tf_config(variables: Mapping[str, str]) -> Any:
    return json.loads(variables["TF_CONFIG"])


def test_all_variables_of_a_worker() -> None:
    found = variables(gang(gpus=1, interface="eth1"), 1)
    assert tf_config(found) == {
        "cluster": {"worker": ["10.0.0.1:1000", "10.0.0.2:2000"]},
        "task": {"type": "worker", "index": 1},
    }
    del found["TF_CONFIG"]
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "run-1",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1001",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "CUDA_VISIBLE_DEVICES": "GPU-20",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HOPSGPU_COORDINATOR": "10.0.0.1:1002",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1002",
        "JAX_LOCAL_DEVICE_IDS": "0",
        "PL_TRAINER_DEVICES": "1",
        "PL_TRAINER_NUM_NODES": "2",
    }


def test_an_independent_rank_is_a_world_of_one() -> None:
    found = variables(gang(ranks=2, gpus=1), 3, "rank", store_port=777, is_independent=True)
    assert tf_config(found) == {
        "cluster": {"worker": ["10.0.0.2:2001"]},
        "task": {"type": "worker", "index": 0},
    }
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
    assert [found[name] for name in names] == ["0", "1", "0", "1", "0", "0"]
    assert found["GROUP_WORLD_SIZE"] == found["ROLE_WORLD_SIZE"] == "1"
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "0")
    assert (found["CUDA_VISIBLE_DEVICES"], found["JAX_LOCAL_DEVICE_IDS"]) == ("GPU-21", "0")
    assert found["HOPSGPU_COORDINATOR"] == "10.0.0.2:2001"
    assert not {*lightning.VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"} & found.keys()


def test_nodes_are_containers_for_torchelastic_too() -> None:
    """What Lightning multiplies and compares: devices are ranks of a container."""
    found = variables(gang(ranks=2), 3)
    names = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    assert [found[name] for name in names] == ["2", "2", "4", "1", "1"]


def test_a_hosted_store_has_its_own_port() -> None:
    found = variables(gang(), 1, store_port=777)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "777")
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_unknown_interfaces_and_stores_are_not_set() -> None:
    found = variables(gang(), 1)
    assert not [name for name in found if name.endswith(("IFNAME", "AGENT_STORE"))]


def test_parameter_servers() -> None:
    world = gang(ranks=2, servers=3, gpus=1)
    cluster = {
        "chief": ["10.0.0.1:1000"],
        "worker": ["10.0.0.1:1001", "10.0.0.2:2000", "10.0.0.2:2001"],
        "ps": ["10.0.0.1:1002", "10.0.0.2:2002", "10.0.0.1:1003"],
    }
    tasks = []
    for number in range(7):
        config = tf_config(variables(world, number))
        assert config["cluster"] == cluster
        tasks.append((config["task"]["type"], config["task"]["index"]))
    assert tasks[:4] == [("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
    assert tasks[4:] == [("ps", 0), ("ps", 1), ("ps", 2)]


def test_a_parameter_server_has_no_gpu_and_no_rank() -> None:
    found = variables(gang(servers=1, gpus=1), 2, "container")
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert found.keys() == {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_CONFIG"}


@pytest.mark.parametrize(
    ("ranks", "gpus", "visible", "seen", "own"),
    [
        # One GPU each: the container's, so that set_device(LOCAL_RANK) is right.
        (2, 1, None, "GPU-20,GPU-21", "1"),
        (2, 1, "rank", "GPU-21", "0"),
        # Several: the rank's own.
        (2, 2, None, "GPU-22,GPU-23", "0,1"),
        (2, 2, "container", "GPU-20,GPU-21,GPU-22,GPU-23", "2,3"),
        (2, 0, None, "", None),
        (2, 0, "container", "", None),
    ],
)
def test_visible_gpus(
    ranks: int, gpus: int, visible: str | None, seen: str, own: str | None
) -> None:
    found = variables(gang(ranks=ranks, gpus=gpus), 3, visible)
    assert found["LOCAL_RANK"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == seen
    assert found.get("JAX_LOCAL_DEVICE_IDS") == own


def test_a_cpu_rank_in_a_container_with_gpus_sees_none() -> None:
    (place,) = assign_ranks([container(1, ("g0",))], 1).places
    assert visible_gpus(dataclasses.replace(place, gpus=()), "container") == ()


def test_ranks_that_share_a_gpu_see_it_alone() -> None:
    world = assign_ranks([container(1, ("g0", "g1"))], 4)
    seen = [visible_gpus(place, "rank") for place in world.places]
    assert seen == [("g0",), ("g0",), ("g1",), ("g1",)]


@pytest.mark.parametrize("visible", [None, "container", "rank"])
def test_a_rank_sees_its_own_mig_device_only(visible: str | None) -> None:
    """CUDA shows a process one of those that the variable names."""
    world = assign_ranks([container(1, ("MIG-a", "MIG-b")), container(2, ("GPU-c", "MIG-d"))], 2)
    found = [variables(world, number, visible) for number in range(4)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["MIG-a", "MIG-b", "GPU-c", "MIG-d"]
    assert {one["JAX_LOCAL_DEVICE_IDS"] for one in found} == {"0"}


def test_a_rank_cannot_have_several_mig_devices() -> None:
    (place,) = assign_ranks([container(1, ("MIG-a", "MIG-b"))], 1).places
    with pytest.raises(ConfigError, match="rank 0 .*node1 .*MIG-a, MIG-b.*gpus_per_worker=1"):
        visible_gpus(place)


def test_the_list_of_variables_is_whole() -> None:
    """What a rank must not inherit, and a user may not set, is exactly what may be set."""
    hosted = variables(gang(gpus=1, interface="eth0"), 0, store_port=1, memory_share=0.5)
    assert hosted.keys() == frameworks.VARIABLES


def test_a_share_of_the_gpu_is_told_where_there_is_one() -> None:
    name = "HOPSGPU_MEMORY_SHARE"
    assert variables(gang(gpus=1), 0, memory_share=0.25)[name] == "0.25"
    assert name not in variables(gang(gpus=1), 0)
    assert name not in variables(gang(), 0, memory_share=0.25)
    assert name not in variables(gang(servers=1, gpus=1), 2, memory_share=0.25)


def test_users_may_set_interfaces_and_defaults_and_nothing_else_of_ours() -> None:
    ours = {name for name in frameworks.VARIABLES if not name.startswith("HOPSGPU_")}
    interfaces = {name for name in ours if name.endswith("_IFNAME")}
    assert len(interfaces) == 3
    assert ours - RESERVED_VARIABLES == interfaces | set(lightning.VARIABLES)


@pytest.mark.parametrize(
    ("ranks", "containers", "told"), [(2, 2, ("2", "2")), (2, 1, ("2", "1")), (1, 1, None)]
)
def test_lightning_is_told_of_the_ranks_unless_there_is_one(
    ranks: int, containers: int, told: tuple[str, str] | None
) -> None:
    world = assign_ranks([container(key) for key in range(containers)], ranks)
    found = variables(world, 0)
    assert tuple(found.get(name) for name in lightning.VARIABLES) == (told or (None, None))


def test_accelerate_is_told_to_use_cpus_where_there_is_no_gpu() -> None:
    assert accelerate.environment(["GPU-1"]) == {}
    assert accelerate.environment([]) == {"ACCELERATE_USE_CPU": "true"}


def test_every_process_has_an_endpoint_of_its_own() -> None:
    world = gang(ranks=2, servers=3)
    endpoints = endpoints_of(world, held(world))
    assert len({endpoints.master, endpoints.coordinator, *endpoints.servers}) == 9
    for place in world.processes:
        assert endpoints.servers[place.rank][0] == place.container.address


def test_too_few_ports() -> None:
    world = gang()
    with pytest.raises(ValueError, match="container 1 .* 2 .* 3"):
        endpoints_of(world, {**held(world), 1: [1, 2]})


HOSTS = "localhost,127.0.0.1,::1,10.0.0.1,node1,10.0.0.2,node2"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"no_proxy": HOSTS, "NO_PROXY": HOSTS}),
        ({"no_proxy": ""}, {"no_proxy": HOSTS, "NO_PROXY": HOSTS}),
        # Who has said it in one way only has said it in both.
        *(
            ({name: "a.b, .c ,"}, {"no_proxy": f"a.b,.c,{HOSTS}", "NO_PROXY": f"a.b,.c,{HOSTS}"})
            for name in ("no_proxy", "NO_PROXY")
        ),
        (
            {"no_proxy": "a", "NO_PROXY": "b"},
            {"no_proxy": f"a,{HOSTS}", "NO_PROXY": f"b,{HOSTS}"},
        ),
        # All addresses, for all but gRPC, which does not know it; and only where it stands alone.
        ({"NO_PROXY": "*"}, {"no_proxy": "*", "NO_PROXY": "*", "no_grpc_proxy": HOSTS}),
        # gRPC looks at no other then.
        (
            {"no_grpc_proxy": "g"},
            {"no_proxy": HOSTS, "NO_PROXY": HOSTS, "no_grpc_proxy": f"g,{HOSTS}"},
        ),
    ],
)
def test_a_gangs_processes_ask_each_other_without_a_proxy(
    given: dict[str, str], wanted: dict[str, str]
) -> None:
    assert direct_environment(given, direct_hosts(gang(ranks=2, servers=1))) == wanted
    assert direct_environment({**given, **wanted}, direct_hosts(gang())) == wanted


def test_ipv6() -> None:
    world = assign_ranks([GangExecutor(0, "c", "n", "fd00::2", ())], 1)
    address = ("fd00::2", 1)
    endpoints = Endpoints(address, address, (address,))
    found = frameworks.environment(world, world.places[0], endpoints, RESTARTS)
    assert host_port(address) == "[fd00::2]:1"
    assert found["MASTER_ADDR"] == "fd00::2"
    assert found["HOPSGPU_COORDINATOR"] == "[fd00::2]:1"
    assert tf_config(found)["cluster"]["worker"] == ["[fd00::2]:1"]
