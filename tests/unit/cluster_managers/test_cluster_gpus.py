"""The cluster's GPUs: from answers of real daemons, and from daemons that are stood in for.

tests/unit/hadoop_answers holds answers of Hadoop 3.5.0, shortened.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hopsgpu
from hopsgpu.backends.inventory import cluster_gpus
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode, GpuType
from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.node_gpu_list import Devices, NodeAnswers, NodeGpu
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.shortage import obtainable, shortage
from hopsgpu.cluster_managers.snapshot import Node, Overview, Queue, Snapshot, User
from hopsgpu.cluster_managers.yarn.answer_lists import with_lists
from hopsgpu.cluster_managers.yarn.node_manager import NodeManagers, devices_of
from hopsgpu.core.queue_policy import Bound
from hopsgpu.errors import ConfigError, HopsGpuError
from tests.bounds import HANG_SECONDS
from tests.unit.cluster_managers.test_capacity import Recorded, yarn_answers
from tests.unit.rest import Daemon, serving

A100 = NodeGpu("NVIDIA A100-SXM4-80GB", 81559, "GPU-a", 0)
DEVICES = Devices((A100, A100), "550.54.15")
NOW = 1_795_300_000.0
RESOURCES = "/ws/v1/node/resources/yarn.io%2Fgpu"


def seen(name: str, user: str = "alice", told: NodeAnswers = NodeAnswers({}, {})) -> ClusterGpus:  # noqa: B008
    return cluster_gpus(Recorded(name).overview(user), told, user, NOW)


def found_by(manager: Recorded, user: str = "alice") -> ClusterGpus:
    return cluster_gpus(manager.overview(user), NodeAnswers({}, {}), user, NOW)


def found_on(*nodes: Node, told: NodeAnswers = NodeAnswers({}, {})) -> ClusterGpus:  # noqa: B008
    return cluster_gpus(Overview(nodes, {}, {}, (), {}), told, "x", NOW)


def node(host: str, gpus: int = 2, used: int = 0, state: str = "RUNNING", **more: str) -> Node:
    given = {"id": f"{host}:1", "web": f"{host}:8042", **more}
    return Node(
        host=host, state=state, total=Amount(gpus, 8, 2**15), used=Amount(used, 1, 1), **given
    )


# Put together.


def test_a_capacity_scheduler() -> None:
    found = seen("capacity_half")
    assert (found.total, found.used, found.free, found.unhealthy) == (4, 2, 2, 0)
    assert [n.host for n in found.nodes] == ["node1", "node2"]
    assert [(u.user, u.name, u.queue, u.gpus) for u in found.users] == [
        ("alice", "probe-a", "root.a", 2)
    ]
    queues = {queue.path: queue for queue in found.queues}
    # 50 % of 4 GPUs, maximum 50 %, both in use.
    a = queues["root.a"]
    assert (a.guaranteed, a.maximum, a.used, a.obtainable) == (2, 2, 2, 0)
    assert (a.bound, a.bound_queue) == ("queue", "root.a")
    assert queues["root"].obtainable is None
    assert queues["root.closed"].state == "STOPPED"
    assert (queues["root.closed"].obtainable, queues["root.closed"].bound) == (0, "state")
    assert found.obtainable == max(q.obtainable or 0 for q in found.queues)


def test_the_user_is_who_counts() -> None:
    alice = {queue.path: queue for queue in seen("capacity_user_limit").queues}["root.b"]
    assert (alice.obtainable, alice.bound) == (0, "user")
    bob = {queue.path: queue for queue in seen("capacity_user_limit", "bob").queues}["root.b"]
    # 25 % guaranteed (1 GPU), user-limit-factor 1: the executor that passes the limit is granted.
    assert bob.obtainable == 2


def test_each_label_has_its_queues() -> None:
    found = seen("capacity_labels")
    assert {(n.host, n.label) for n in found.nodes} == {("node1", ""), ("node2", "slow")}
    assert {(q.path, q.label) for q in found.queues} >= {("root.a", ""), ("root.a", "slow")}
    # Of both labels.
    assert [(u.user, u.gpus) for u in found.users] == [("alice", 3), ("bob", 1)]
    assert found.unexplained == 0


def test_a_fair_scheduler_tells_of_containers() -> None:
    found = seen("fair_child")
    assert [(u.gpus, dict(u.hosts)) for u in found.users] == [(1, {"node2": 1})]
    assert found.unexplained == 0
    hidden = seen("fair")
    assert (hidden.users, hidden.unexplained) == ((), 2)


def with_containers(name: str, *granted: int) -> ClusterGpus:
    manager = Recorded(name)
    app = manager.answers["apps"]["apps"]["app"][0]
    app["startedTime"] = 1_795_000_000_000
    manager.answers["containers"] = {
        "container": [
            {
                "containerId": f"container_1_1_01_{i:06}",
                "nodeId": "node2:24317",
                "startedTime": when,
                "allocatedResources": {"entry": [{"key": "yarn.io/gpu", "value": str(gpus)}]},
            }
            for i, (when, gpus) in enumerate(zip(granted, (0, 1, 1), strict=True), 1)
        ]
    }
    return found_by(manager)


def test_containers_of_an_old_resource_manager() -> None:
    manager = Recorded("fair_child")
    for container in manager.answers["containers"]["container"]:
        container["assignedNodeId"] = container.pop("nodeId")
    expected = seen("fair_child").users
    assert found_by(manager).users == expected
    for container in manager.answers["containers"]["container"]:
        del container["assignedNodeId"]
    (user,) = found_by(manager).users
    assert user.gpus == expected[0].gpus
    assert user.hosts == {}


def test_since_when_is_that_of_the_containers_with_gpus() -> None:
    # The application master is older, and has none.
    (user,) = with_containers("capacity_half", 1_000, 3_000, 2_500).users
    assert (user.since, user.started) == (2.5, 1_795_000_000.0)
    assert dict(user.hosts) == {"node2": 2}
    (user,) = seen("capacity_half").users
    assert (user.since, dict(user.hosts)) == (None, {})


def test_pending_gpus() -> None:
    def asked(memory: int, gpus: int) -> dict[str, Any]:
        values = {"memory-mb": memory, "yarn.io/gpu": gpus}
        listed = [{"name": name, "value": value} for name, value in values.items()]
        return {"resourceInformations": {"resourceInformation": listed}}

    manager = Recorded("capacity_half")
    queues = manager.answers["scheduler"]["scheduler"]["schedulerInfo"]["queues"]["queue"]
    for queue in queues:
        usage = queue.setdefault("resources", {}).setdefault("resourceUsagesByPartition", [])
        if not usage:
            usage.append({"partitionName": ""})
        usage[0]["pending"] = asked(1024, 3 if queue["queueName"] == "a" else 0)
    found = {queue.path: queue for queue in found_by(manager).queues}
    assert (found["root.a"].pending, found["root.b"].pending, found["root"].pending) == (3, 0, 3)
    assert seen("capacity_half").queues[0].pending is None
    fair = Recorded("fair")
    leaf = fair.answers["scheduler"]["scheduler"]["schedulerInfo"]["rootQueue"]
    leaf["demandResources"] = asked(10**6, 4)
    assert fair.overview("x").queues[""][0].pending == Amount(2, 0, 10**6 - 3072)


@pytest.mark.parametrize(
    ("state", "free", "unhealthy"),
    [
        ("RUNNING", 3, 0),
        ("UNHEALTHY", 0, 3),
        ("LOST", 0, 3),
        ("SHUTDOWN", 0, 3),
        ("DECOMMISSIONING", 0, 0),
        ("NEW", 0, 0),
    ],
)
def test_only_running_nodes_have_free_gpus(state: str, free: int, unhealthy: int) -> None:
    one = node("n", 4, 1, state, health="ERROR no GPU answers" if unhealthy else "")
    found = found_on(one)
    assert (found.total, found.used, found.free, found.unhealthy) == (4, 1, free, unhealthy)
    assert found.nodes[0].health == one.health


def test_nodes_that_are_not_there() -> None:
    gone = node("n1", state="LOST", id="n1:1", web="")
    back = node("n1", id="n1:2")
    retired = node("n2", state="DECOMMISSIONED")
    lost = node("n10", state="LOST", web="")
    plain = node("n3", 0)
    found = found_on(lost, gone, back, retired, plain)
    assert [(n.host, n.state) for n in found.nodes] == [("n1", "RUNNING"), ("n10", "LOST")]
    assert found.nodes_without == 1


def test_types_and_problems() -> None:
    nodes = [node(f"n{i}") for i in (10, 9, 2, 1, 3, 4)]
    other = NodeGpu("NVIDIA H100", None, "")
    told = NodeAnswers(
        {"n1:1": DEVICES, "n2:1": Devices((A100, other), "535.1")},
        {f"n{i}:1": "timed out" if i != 4 else "HTTP 404" for i in (10, 9, 3, 4)},
    )
    found = found_on(*nodes, told=told)
    assert found.nodes[1].types == (GpuType(A100.name, 81559, 1), GpuType("NVIDIA H100", None, 1))
    assert found.types == (GpuType(A100.name, 81559, 3), GpuType("NVIDIA H100", None, 1))
    assert [found.nodes[n].driver for n in (0, 5)] == ["550.54.15", ""]
    assert found.nodes[5].types == ()
    assert found.problems == ("n3, n9, n10: timed out", "n4: HTTP 404")
    many = [node(f"n{i}") for i in range(1, 8)]
    told = NodeAnswers({}, {one.id: "timed out" for one in many})
    found = found_on(*many, told=told)
    assert found.problems == ("n1, n2, n3, n4, 3 more: timed out",)


def test_an_executor_above_the_largest_container_is_not_obtainable() -> None:
    manager = Recorded("capacity_half")
    queues = manager.answers["scheduler"]["scheduler"]["schedulerInfo"]["queues"]["queue"]
    b = next(queue for queue in queues if queue["queueName"] == "b")
    for entry in b["maximumAllocation"]["resourceInformations"]["resourceInformation"]:
        entry["value"] = 1
    found = found_by(manager)
    queue = next(queue for queue in found.queues if queue.path == "root.b")
    assert (queue.obtainable, queue.bound) == (0, "container")


@pytest.mark.parametrize("acls", ["true", "false", None])
def test_whether_queues_have_acls(acls: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.cluster_managers import test_capacity

    if acls is not None:
        monkeypatch.setitem(test_capacity.MINIMUM, "yarn.acl.enable", acls)
    assert seen("capacity_half").acls == {"true": True, "false": False, None: None}[acls]


@pytest.mark.parametrize(
    "name", ["capacity_half", "capacity_user_limit", "capacity_child", "capacity_labels", "fair"]
)
def test_obtainable_is_where_a_shortage_begins(name: str) -> None:
    manager = Recorded(name)
    for user_snapshots in manager.overview("bob").user_snapshots.values():
        for standing in user_snapshots:
            container = Amount(1, 1, 768)
            most, tightest = obtainable(container, standing)
            if most:
                none = shortage(Demand(container, most), standing)
                assert none.bound is Bound.NONE
            lacking = shortage(Demand(container, most + 1), standing)
            assert lacking.bound is not Bound.NONE
            assert tightest.bound is not Bound.NONE


@pytest.mark.parametrize("seed", range(20))
def test_the_sums_of_nodes_say_what_all_nodes_do(seed: int) -> None:
    chance = random.Random(seed)

    def some(of: Amount) -> Amount:
        return Amount(*(chance.randint(0, part) for part in of.parts))

    whole = Amount(8, 32, 2**17)
    # Those of another label count for shares of the cluster alone.
    sizes = {"": whole, "x": whole, "own": dataclasses.replace(whole, memory_mib=2**22)}
    nodes = [
        Node(f"n{i}:1", f"n{i}", state, sizes[label], some(whole), label)
        for i in range(30)
        for state in [chance.choice(("RUNNING", "RUNNING", "RUNNING", "LOST"))]
        for label in [chance.choice(("", "", "x", "own"))]
    ]
    most = chance.choice((whole * 40, some(whole * 30)))
    queues = tuple(
        Queue(path, "RUNNING", path != "root", most, NOTHING, some(whole * 4), whole)
        for path in ("root.q", "root")
    )
    limit = chance.choice((None, some(whole * 6), some(whole * 6)))
    standing = Snapshot(
        "", "", tuple(nodes), queues, User("u", NOTHING, limit), shared=frozenset(["x"])
    )
    looked = Overview(standing.nodes, {"": queues}, {"": (standing,)}, (), {})
    found = cluster_gpus(looked, NodeAnswers({}, {}), "u", NOW)
    executor = Amount(1, 3, 6144)
    assert found.executor == str(executor)
    room, tightest = obtainable(executor, standing)
    (queue,) = [queue for queue in found.queues if queue.leaf]
    assert queue.obtainable == room
    if queue.bound != "nodes":
        assert (queue.bound, queue.bound_queue) == (tightest.bound.value, tightest.queue)


def test_the_repr_says_it_in_a_line() -> None:
    found = seen("capacity_half", told=NodeAnswers({"node2:24317": DEVICES}, {}))
    assert repr(found) == (
        "ClusterGpus(2 of 4 GPUs free, 2 used, 0 unhealthy; 2 nodes"
        " (2 × NVIDIA A100-SXM4-80GB), 1 user, alice could get"
        f" {found.obtainable} now)"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.user = "x"  # type: ignore[misc]


def test_json_has_numbers_and_sums() -> None:
    found = with_containers("capacity_half", 1_000, 3_000, 2_500)
    said = json.loads(json.dumps(found.to_json()))
    sums = {"total": 4, "used": 2, "free": 2, "unhealthy": 0, "unexplained": 0}
    assert said["gpus"] == {**sums, "obtainable": found.obtainable}
    assert said["users"][0]["hosts"] == {"node2": 2}
    assert set(said["nodes"][0]) == {field.name for field in dataclasses.fields(GpuNode)}
    assert isinstance(said["queues"][0]["maximum"], int)


# The NodeManagers' answers.

XML_NAMES = {
    "gpuDeviceInformation": {
        "driver_version": "550.54.15",
        "gpu": [
            {
                "product_name": "NVIDIA A100-SXM4-80GB",
                "uuid": "GPU-a",
                "minor_number": 0,
                "fb_memory_usage": {"used": "559 MiB", "free": "81000 MiB"},
            },
            {
                "product_name": "NVIDIA T4",
                "uuid": "GPU-b",
                "minor_number": 1,
                "fb_memory_usage": {"used": "0 MiB", "free": "15360 MiB"},
            },
        ],
    },
    "totalGpuDevices": [{"index": 0, "minorNumber": 0}],
    "assignedGpuDevices": [],
}
FIELD_NAMES = {
    "gpuDeviceInformation": {
        "driverVersion": "550.54.15",
        "gpus": [
            {
                "productName": "NVIDIA A100-SXM4-80GB",
                "uuid": "GPU-a",
                "minorNumber": 0,
                "gpuMemoryUsage": {"usedMemoryMiB": 559, "totalMemoryMiB": 81559},
            }
        ],
    }
}


@pytest.mark.parametrize("answer", [XML_NAMES, FIELD_NAMES])
def test_both_spellings(answer: dict[str, Any]) -> None:
    assert devices_of(answer) == Devices((A100,), "550.54.15")


def test_a_list_of_one_may_be_the_one_itself() -> None:
    said = FIELD_NAMES["gpuDeviceInformation"]
    one = {"gpuDeviceInformation": {"driverVersion": "N/A", "gpu": said["gpus"][0]}}
    assert devices_of(with_lists(one)) == Devices((A100,), "")


@pytest.mark.parametrize("usage", [{}, {"used": "-1 MiB", "free": "5 MiB"}, {"used": 5}])
def test_memory_that_is_not_told(usage: dict[str, Any]) -> None:
    gpu = {"product_name": "X", "fb_memory_usage": usage, "bar1_memory_usage": {"total": "9 MiB"}}
    assert devices_of({"gpuDeviceInformation": {"gpu": [gpu]}}).gpus[0].memory_mib is None


@pytest.mark.parametrize("odd", ["N/A", "\u00b2", -1, "", None, "ERR!", "9" * 30, [], {}])
def test_an_odd_number_hides_no_gpu(odd: object) -> None:
    gpu = {"product_name": "X", "minor_number": odd, "fb_memory_usage": {"total": odd}}
    answer = {
        "gpuDeviceInformation": {"gpu": [gpu]},
        "totalGpuDevices": [{"index": 0, "minorNumber": 0}],
    }
    assert devices_of(answer).gpus == (NodeGpu("X", None, ""),)


def test_devices_that_a_linux_container_executor_lists_without_fields_hide_no_gpu() -> None:
    answer = {**XML_NAMES, "totalGpuDevices": [{}, {}]}
    assert [gpu.uuid for gpu in devices_of(answer).gpus] == ["GPU-a", "GPU-b"]


@pytest.mark.parametrize("answer", [{}, {"gpuDeviceInformation": None}, [], "x", {"a": 1}])
def test_no_description(answer: object) -> None:
    assert devices_of(answer).gpus == ()


def test_mig_devices_that_yarn_counts_as_gpus() -> None:
    small, large = (f"NVIDIA A100-SXM4-80GB MIG {profile}" for profile in ("1g.10gb", "3g.40gb"))

    def listed(*minors: int) -> Devices:
        gpus = [NodeGpu(small, 9728, f"MIG-{n}", minor) for n, minor in enumerate(minors)]
        return Devices((*gpus, NodeGpu(large, 38912, "MIG-l", 1)), "550.54.15")

    told = NodeAnswers({"n1:1": listed(0, 0, 1), "n2:1": listed(1)}, {})
    found = found_on(node("n1"), node("n2"), told=told)
    assert found.nodes[0].types == (GpuType(small, 9728, 3, 2), GpuType(large, 38912, 1, 1))
    assert found.types == (GpuType(small, 9728, 4, 3), GpuType(large, 38912, 2, 2))
    assert str(found.types[0]) == f"4 × {small} of 3 GPUs"
    assert f"2 × {large} of 2 GPUs" in repr(found)


# The NodeManagers.


def test_a_resource_of_another_name_may_have_no_description() -> None:
    """As the framework for devices answers, and a NodeManager without a plugin of that name."""
    path = "/ws/v1/node/resources/nvidia%2Fmiggpu"
    for answer in ({"type": "NMDeviceResourceInfo", "totalDevices": [{"id": 0}]}, {}):
        with serving({path: answer}) as daemon:
            one = node("n1", web=daemon.address)
            told = NodeManagers({}.get, gpu_resource="nvidia/miggpu").devices([one])
        assert told == NodeAnswers({"n1:1": Devices((), "")}, {})
        assert found_on(one, told=told).nodes[0].types == ()


@pytest.fixture
def manager_of_one() -> Iterator[tuple[Daemon, Node]]:
    with serving({RESOURCES: XML_NAMES}) as daemon:
        yield daemon, node("n1", web=daemon.address)


def test_what_a_node_manager_told_is_remembered_for_minutes(
    manager_of_one: tuple[Daemon, Node],
) -> None:
    daemon, one = manager_of_one
    now = [0.0]
    managers = NodeManagers({}.get, clock=lambda: now[0])
    for _ in range(3):
        assert managers.devices([one]).devices == {"n1:1": Devices((A100,), "550.54.15")}
    assert daemon.asked == [RESOURCES]
    now[0] = 301.0
    managers.devices([one])
    assert len(daemon.asked) == 2
    # One that did not answer is asked again sooner, and not at once.
    silent = node("n3", web=daemon.address)
    del daemon.answers[RESOURCES]
    problem = {"n3:1": "the NodeManager does not describe its GPUs: HTTP 404 Not Found"}
    for _ in range(2):
        assert managers.devices([silent]).problems == problem
    assert len(daemon.asked) == 3
    daemon.answers[RESOURCES] = XML_NAMES
    now[0] += 31
    assert set(managers.devices([silent]).devices) == {"n3:1"}
    assert managers.devices([node("n2", web="")]) == NodeAnswers({}, {})


def test_node_managers_are_asked_at_once_and_one_that_hangs_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hopsgpu.cluster_managers.yarn.node_manager._SECONDS", (5.0, 5.0))
    met, release = threading.Barrier(2, timeout=HANG_SECONDS), threading.Event()

    def together() -> object:
        met.wait()
        return FIELD_NAMES

    with (
        serving({RESOURCES: together}) as first,
        serving({RESOURCES: together}) as second,
        serving({RESOURCES: lambda: release.wait(HANG_SECONDS)}) as hung,
        serving({RESOURCES: [1]}) as odd,
        serving(
            {
                RESOURCES: {"gpuDeviceInformation": {"gpu": ["x"]}},
                "/ws/v1/node/info": {"nodeInfo": {"hadoopVersion": "3.4.1"}},
            }
        ) as unknown,
    ):
        webs = [daemon.address for daemon in (first, second, hung, odd, unknown)]
        webs.insert(3, "127.0.0.1:1")
        nodes = [node(f"n{number}", web=web) for number, web in enumerate(webs, start=1)]
        try:
            told = NodeManagers({}.get).devices(nodes)
        finally:
            release.set()
    assert set(told.devices) == {"n1:1", "n2:1"}
    assert told.problems["n3:1"] == "the NodeManager does not describe its GPUs: timed out"
    assert told.problems["n4:1"] == "the NodeManager does not describe its GPUs: Connection refused"
    assert "describes no GPU" in told.problems["n5:1"]
    for words in (
        "Hadoop 3.4.1",
        RESOURCES,
        "the field gpuDeviceInformation.gpu has an unexpected",
    ):
        assert words in told.problems["n6:1"]


def test_names_that_only_yarn_knows(manager_of_one: tuple[Daemon, Node], tmp_path: Path) -> None:
    daemon, _ = manager_of_one
    hosts = tmp_path / "hosts"
    hosts.write_text("# private\n\n127.0.0.1 localhost n1 # mine\n127.0.0.9 n1\n")
    one = node("n1", web=f"n1:{daemon.port}")
    told = NodeManagers({"hopsgpu.hosts": str(hosts)}.get).devices([one])
    assert set(told.devices) == {"n1:1"}
    with pytest.raises(ConfigError, match=r"hopsgpu\.hosts.*nowhere"):
        NodeManagers({"hopsgpu.hosts": str(tmp_path / "nowhere")}.get)


def test_https_where_the_cluster_speaks_it(manager_of_one: tuple[Daemon, Node]) -> None:
    _, one = manager_of_one
    told = NodeManagers({"yarn.http.policy": "HTTPS_ONLY"}.get).devices([one])
    assert "SSL" in told.problems["n1:1"] or "wrong version" in told.problems["n1:1"].lower()


# The whole of it, over HTTP.


def configuration(directory: Path, **properties: str) -> Path:
    listed = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in properties.items()
    )
    (directory / "yarn-site.xml").write_text(f"<configuration>{listed}</configuration>")
    return directory


@pytest.fixture
def yarn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A ResourceManager and a NodeManager, stood in for by one server; node1's is not there."""
    with serving({**yarn_answers("capacity_half"), RESOURCES: FIELD_NAMES}) as daemon:
        for one in daemon.answers["/ws/v1/cluster/nodes"]["nodes"]["node"]:
            here = one["nodeHostName"] == "node2"
            one["nodeHTTPAddress"] = daemon.address if here else "127.0.0.1:1"
        site = {"yarn.resourcemanager.webapp.address": daemon.address}
        monkeypatch.setenv("HADOOP_CONF_DIR", str(configuration(tmp_path, **site)))
        monkeypatch.delenv("YARN_CONF_DIR", raising=False)
        monkeypatch.setenv("HADOOP_USER_NAME", "alice")
        yield daemon


@pytest.mark.usefixtures("yarn")
def test_inventory_asks_rest_alone() -> None:
    found = hopsgpu.inventory()
    assert found.user == "alice"
    assert (found.total, found.free) == (4, 2)
    assert {n.host: len(n.types) for n in found.nodes} == {"node1": 0, "node2": 1}
    assert found.problems == (
        "node1: the NodeManager does not describe its GPUs: Connection refused",
    )
    assert hopsgpu.inventory(user="bob").user == "bob"


KLIST = """Ticket cache: FILE:/tmp/krb5cc_0
Default principal: alice@LAKE.EXAMPLE

Valid starting     Expires            Service principal
11/26/26 12:47:19  11/26/66 22:47:19  krbtgt/LAKE.EXAMPLE@LAKE.EXAMPLE
	renew until 12/03/66 12:47:19"""


def test_who_asks(yarn: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.delenv("HADOOP_USER_NAME")
    assert hopsgpu.inventory().user == own
    # On a cluster with Kerberos the ResourceManager says who one is.
    (tmp_path / "core-site.xml").write_text(
        '<configuration><property name="hadoop.security.authentication" value="kerberos"/>'
        "</configuration>"
    )
    monkeypatch.setenv("HADOOP_USER_NAME", "mallory")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "krb5.conf").write_text("[libdefaults]\n default_realm = LAKE.EXAMPLE\n")
    monkeypatch.setenv("KRB5_CONFIG", str(tmp_path / "krb5.conf"))
    klist = tmp_path / "klist"
    klist.write_text("#!/bin/sh\nexit 1\n")
    klist.chmod(0o755)
    yarn.answers["/ws/v1/cluster/userinfo"] = {"clusterUserInfo": {"requestedUser": "dr.who"}}
    # Nor do they need a ticket.
    assert hopsgpu.inventory().user == own
    klist.write_text(f"#!/bin/sh\necho '{KLIST}'\n")
    # Of the web addresses that ask nobody, all callers are dr.who.
    for said, user in (("carol", "carol"), ("dr.who", "alice"), (None, "alice")):
        yarn.answers["/ws/v1/cluster/userinfo"] = {"clusterUserInfo": {"requestedUser": said}}
        assert hopsgpu.inventory().user == user
    del yarn.answers["/ws/v1/cluster/userinfo"]
    assert hopsgpu.inventory().user == "alice"


@pytest.mark.parametrize("user", ["", " ", 5, []])
def test_what_is_no_user(yarn: Daemon, user: Any) -> None:
    with pytest.raises(ConfigError, match="user=.*the name of a user"):
        hopsgpu.inventory(user=user)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        *((path, answer) for path in ("apps", "scheduler", "nodes") for answer in ([], None, "x")),
        ("scheduler", {}),
        ("scheduler", {"scheduler": 1}),
    ],
)
def test_a_resource_manager_that_answers_in_another_form(
    yarn: Daemon, path: str, answer: object
) -> None:
    """A proxy, say, or another service."""
    yarn.answers[f"/ws/v1/cluster/{path}"] = answer
    yarn.answers["/ws/v1/cluster/info"] = {"clusterInfo": {"hadoopVersion": "3.9.0"}}
    with pytest.raises(HopsGpuError, match=r"in an unknown form: .*webapp\.address") as error:
        hopsgpu.inventory()
    assert f"at {yarn.url} (Hadoop 3.9.0) answered /ws/v1/cluster/{path} " in str(error.value)


def test_no_resource_manager(yarn: Daemon) -> None:
    yarn.answers.clear()
    with pytest.raises(HopsGpuError, match="the ResourceManager does not answer") as error:
        hopsgpu.inventory()
    assert "\n" not in str(error.value)
