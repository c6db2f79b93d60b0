"""The doctor's checks: pure functions of the facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopsgpu.backends.spark.settings import session_defaults
from hopsgpu.cli.doctor import describe_check
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode, GpuType, GpuUser
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Node, Queue
from hopsgpu.doctor import machine_checks, node_checks, settings_checks, yarn_checks
from hopsgpu.doctor.free_nodes import nodes_to_inspect
from hopsgpu.doctor.lake_checks import LakeFacts, check_lake
from hopsgpu.doctor.machine_checks import DriverMachine, HadoopClient
from hopsgpu.doctor.node_probe import (
    ContainerFacts,
    ContainerGpu,
    Framework,
    LeaseDirectory,
    NodeFacts,
)
from hopsgpu.doctor.report import Check, CheckState, join_names, ok, unknown, wrong
from hopsgpu.doctor.yarn_checks import YarnFacts
from hopsgpu.frameworks.cuda import oldest_driver, version_of

HERE = DriverMachine(
    17, "/jdk/bin/java, by JAVA_HOME", "3.11.7", "python3", "4.3.0", "4.3.0", "/spark"
)
CLIENT = HadoopClient(("/conf",), "", "hdfs://nn:8020", ("http://rm:8088",), ("yarn.io/gpu",))
BIG = Amount(2, 8, 65536)


def test_the_line_of_a_check() -> None:
    assert describe_check(ok("java", "17", ["more"])).endswith("java             17")
    lines = describe_check(wrong("queue", "none", "another", ["one", "two"])).splitlines()
    assert [line.strip() for line in lines[1:3]] == ["one", "two"]
    assert lines[3].strip().endswith(": another")
    assert unknown("x", "y").to_json() == {
        "name": "x",
        "state": "unknown",
        "seen": "y",
        "mend": "",
        "details": [],
    }
    assert join_names("abcdefghij") == "a, b, c, d, e, f, g, h, and 2 more"


def state_of(check: Check, seen: str = "", fix: str = "") -> CheckState:
    assert seen in " ".join((check.seen, *check.details)), check
    assert fix in check.fix, check
    assert (check.state is CheckState.WRONG) <= bool(check.fix), "what is wrong has a fix"
    return check.state


@pytest.mark.parametrize(
    ("java", "state"),
    [(17, "ok"), (21, "ok"), (11, "wrong"), (8, "wrong"), (25, "unknown"), (None, "wrong")],
)
def test_java(java: int | None, state: str) -> None:
    check = machine_checks.check_java(replace(HERE, java=java))
    assert state_of(check, "/jdk/bin/java", "" if state == "ok" else "JAVA_HOME") == state


def test_java_and_python_by_the_version_of_spark() -> None:
    older = replace(HERE, spark="3.5.9", pyspark="3.5.9")
    for java in (8, 11, 17):
        assert machine_checks.check_java(replace(older, java=java)).state == "ok"
    check = machine_checks.check_java(replace(older, java=21))
    assert state_of(check, "newer than the versions", "8, 11 or 17") == "unknown"
    assert machine_checks.check_python(older).state == "ok"
    newer = machine_checks.check_python(replace(older, python="3.12.4"))
    assert state_of(newer, "PySpark 3.5.9 names versions up to 3.11", "Python 3.11") == "unknown"


def test_spark() -> None:
    assert state_of(machine_checks.check_spark(HERE), "4.3.0") == "ok"
    # Found by findspark: Python has none of its own.
    assert state_of(machine_checks.check_spark(replace(HERE, pyspark=None))) == "ok"
    other = machine_checks.check_spark(replace(HERE, pyspark="4.0.0"))
    assert state_of(other, "imports PySpark 4.0.0", "pyspark==4.3.0") == "wrong"
    for named in ("3.5.6-amzn-2", "3.5.4.3.5.7191000.0-30"):
        theirs = replace(HERE, spark=named, pyspark=named[:5])
        assert "imports PySpark" not in machine_checks.check_spark(theirs).seen
        other = machine_checks.check_spark(replace(theirs, pyspark="4.0.0"))
        assert state_of(other, "imports PySpark 4.0.0", f'pyspark=={named[:5]}"') == "wrong"
    none = machine_checks.check_spark(replace(HERE, spark=None))
    assert state_of(none, "in /spark", "SPARK_HOME") == "wrong"
    older = machine_checks.check_spark(replace(HERE, spark="3.5.1", pyspark="3.5.9"))
    assert state_of(older, "3.5.1 (/spark); Python imports PySpark 3.5.9") == "ok"
    old = machine_checks.check_spark(replace(HERE, spark="3.3.2", pyspark=None))
    assert state_of(old, "/spark is Spark 3.3.2", 'pip install "pyspark>=3.5,<5"') == "wrong"


def test_hadoop_conf() -> None:
    assert state_of(machine_checks.check_hadoop_conf(CLIENT), "http://rm:8088") == "ok"
    unset = machine_checks.check_hadoop_conf(replace(CLIENT, places=(), problem="no"))
    assert state_of(unset, "is not set", "HADOOP_CONF_DIR") == "wrong"
    bare = machine_checks.check_hadoop_conf(replace(CLIENT, filesystem="file:///", managers=()))
    assert state_of(bare, "fs.defaultFS=file:///") == "wrong"
    assert len(bare.details) == 2


def test_resource_types() -> None:
    check = machine_checks.check_resource_types
    gpu = "yarn.io/gpu"
    assert state_of(check(CLIENT, gpu)) == "ok"
    assert state_of(check(replace(CLIENT, types=None), gpu), "", "resource-types.xml") == "wrong"
    other = replace(CLIENT, types=("a",))
    assert state_of(check(other, gpu), "yarn.resource-types=a lacks") == "wrong"
    assert state_of(check(CLIENT, "nvidia/miggpu"), "", "name nvidia/miggpu") == "wrong"
    assert state_of(check(other, "a")) == "ok"


def gpu_node(host: str, used: int = 0, state: str = "RUNNING", total: int = 2) -> GpuNode:
    free = total - used if state == "RUNNING" else 0
    ill = total if state == "UNHEALTHY" else 0
    kind = (GpuType("A100", 40960, total),)
    health = "ERROR no GPU of this node can be used" if ill else ""
    return GpuNode(host, state, "", kind, "550.54.15", total, used, free, ill, health)


def gpus(*found: GpuNode, users: tuple[GpuUser, ...] = ()) -> ClusterGpus:
    return ClusterGpus(
        time=0.0,
        user="me",
        nodes=found,
        nodes_without=0,
        users=users,
        queues=(),
        unexplained=0,
        acls=False,
        executor="",
        problems=(),
    )


def node(host: str, used: Amount = NOTHING, state: str = "RUNNING") -> Node:
    return Node(f"{host}:1", host, state, BIG, used)


def queue(path: str, most: int = 4, state: str = "RUNNING", leaf: bool = True) -> Queue:
    return Queue(path, state, leaf, BIG * most, BIG, NOTHING, BIG)


CLUSTER = YarnFacts(
    address="http://rm:8088",
    version="3.5.0",
    scheduler="capacityScheduler",
    policy="",
    has_gpu_type=True,
    gpus=gpus(gpu_node("node1"), gpu_node("node2")),
    nodes=(node("node1"), node("node2")),
    queues=(queue("root", leaf=False), queue("root.default")),
)


@pytest.mark.parametrize(
    ("changes", "state", "fix"),
    [
        ({}, "ok", ""),
        ({"has_gpu_type": False}, "wrong", "DominantResourceCalculator"),
        ({"scheduler": "fairScheduler", "policy": "DRF"}, "ok", ""),
        ({"scheduler": "fairScheduler", "policy": "fair"}, "wrong", "drf"),
        ({"scheduler": "fifoScheduler"}, "unknown", ""),
    ],
)
def test_the_resource_calculator(changes: dict[str, object], state: str, fix: str) -> None:
    assert state_of(yarn_checks.check_calculator(replace(CLUSTER, **changes)), "", fix) == state  # type: ignore[arg-type]


def test_gpus_of_the_nodes() -> None:
    assert state_of(yarn_checks.check_gpus(CLUSTER), "4 on 2 nodes (node1 2, node2 2)") == "ok"
    none = yarn_checks.check_gpus(replace(CLUSTER, gpus=gpus()))
    assert state_of(none, "(2 nodes running)", "resource-plugins=yarn.io/gpu") == "wrong"
    ill = gpus(gpu_node("node1"), gpu_node("node2", state="UNHEALTHY"))
    check = yarn_checks.check_gpus(replace(CLUSTER, gpus=ill))
    assert state_of(check, "node2 is UNHEALTHY: ERROR no GPU") == "wrong"


def test_node_managers_that_do_not_tell_are_no_fault() -> None:
    assert state_of(yarn_checks.check_node_managers(CLUSTER), "4 × A100; driver 550.54.15") == "ok"
    silent = replace(CLUSTER.gpus, problems=("node2: timed out",))
    check = yarn_checks.check_node_managers(replace(CLUSTER, gpus=silent))
    assert state_of(check, "node2: timed out", "allowed-gpu-devices") == "unknown"


def test_the_queue() -> None:
    assert state_of(yarn_checks.check_submission(CLUSTER, "default"), "at most 8") == "ok"
    assert (
        state_of(yarn_checks.check_submission(CLUSTER, "other"), "no queue other", "--queue")
        == "wrong"
    )
    stopped = replace(CLUSTER, queues=(queue("root", leaf=False), queue("root.a", state="STOPPED")))
    assert state_of(yarn_checks.check_submission(stopped, "a"), "STOPPED") == "wrong"
    # The maximum of a parent counts too.
    cpus = replace(CLUSTER, queues=(queue("root", 0, leaf=False), queue("root.a")))
    assert (
        state_of(yarn_checks.check_submission(cpus, "a"), "at most 0", "share of GPUs") == "wrong"
    )
    acls = replace(CLUSTER, gpus=replace(CLUSTER.gpus, acls=True))
    assert state_of(yarn_checks.check_submission(acls, "default"), "access control") == "ok"
    assert state_of(yarn_checks.check_submission(stopped, "default"), "may create it") == "unknown"


def test_nodes_without_room_are_not_waited_for() -> None:
    user = GpuUser("application_7", "nightly", "alice", "root.a", 2, None, 0.0, {"node2": 2})
    full = node("node3", Amount(0, 8, 0))
    cluster = replace(
        CLUSTER,
        gpus=gpus(
            gpu_node("node1"),
            gpu_node("node2", used=2),
            gpu_node("node3"),
            gpu_node("node4", state="LOST"),
            users=(user,),
        ),
        nodes=(
            node("node1"),
            node("node2", Amount(2, 2, 2)),
            full,
            node("node4", state="LOST"),
        ),
    )
    free, why = nodes_to_inspect(cluster.nodes, cluster.gpus)
    assert free == ("node1",)
    assert "2 GPUs" in why["node2"] and "application_7 'nightly' of alice (2)" in why["node2"]
    assert why["node3"].startswith("it has 2 GPUs, 0 cores")
    assert why["node4"] == "it is LOST"
    free, why = nodes_to_inspect(cluster.nodes, cluster.gpus, "fast")
    assert free == ()
    assert "'fast'" in why["node1"]


def test_settings() -> None:
    assert (
        state_of(settings_checks.check_settings("yarn", {}, {}, 2), "other contexts cannot yet")
        == "ok"
    )
    whole = {
        "spark.master": "yarn",
        **session_defaults("yarn"),
        "spark.yarn.dist.archives": "x#hopsgpu-",
    }
    whole["spark.yarn.dist.archives"] += "discovery"
    assert (
        state_of(settings_checks.check_settings("yarn", whole, {}, 2), "so can every context")
        == "ok"
    )
    bad = {"spark.decommission.enabled": "true", "spark.excludeOnFailure.enabled": "true"}
    # Our sessions replace such defaults of a company, and not what the user asks for.
    assert state_of(settings_checks.check_settings("yarn", bad, {}, 2)) == "ok"
    check = settings_checks.check_settings("yarn", {}, bad, 2)
    assert state_of(check, "decommission.enabled=true: set it to false") == "wrong"
    assert "excludeOnFailure" in check.details[0]
    few = settings_checks.check_settings(
        "yarn", {}, {"spark.dynamicAllocation.maxExecutors": "1"}, 2
    )
    assert state_of(few, "maxExecutors=1 is below the 2 executors") == "wrong"
    rapids = {"spark.executor.resource.gpu.amount": "1", "spark.task.resource.gpu.amount": "0.5"}
    held = settings_checks.check_settings("yarn", rapids, {}, 2)
    assert state_of(held, "every executor holds GPUs", "spark-defaults.conf") == "wrong"


def test_the_lake() -> None:
    assert state_of(check_lake(LakeFacts("hdfs://a/b", "", 0.2)), "0.2 s") == "ok"
    refused = check_lake(LakeFacts("hdfs://a/b", "cannot write hdfs://a/b", 0.2))
    assert state_of(refused, "cannot write", "HOPSGPU_ROOT") == "wrong"
    assert state_of(check_lake(LakeFacts("hdfs://a/b", "given up", None)), "given up") == "unknown"


A100 = ContainerGpu("GPU-1", "NVIDIA A100", "550.54.15", "healthy", "")
TORCH = Framework("torch", "2.9.0", "12.8")
NODE = NodeFacts(
    host="node1",
    python="3.11.9",
    executable="/env/bin/python",
    java="17.0.1",
    spark="4.3.0",
    gpus=(A100,),
    visible=2,
    is_isolated=False,
    leases=LeaseDirectory("/leases", ""),
    frameworks=(TORCH,),
    nvml="13.580.82",
    container=ContainerFacts(2**30, 65536, -1, 1000, "alice", "none", "", False, True),
)


def seen(
    *facts: NodeFacts,
    failed: dict[str, str] | None = None,
    skipped: dict[str, str] | None = None,
    problem: str = "",
    totals: int = 2,
    remedies: node_checks.NodeRemedies = yarn_checks.NODE_REMEDIES,
) -> dict[str, Check]:
    checks = node_checks.check_nodes(
        facts,
        failed or {},
        skipped or {},
        problem,
        python="3.11.7",
        spark="4.3.0",
        totals={fact.host: totals for fact in facts},
        remedies=remedies,
    )
    assert tuple(check.name for check in checks) == node_checks.NAMES
    return {check.name: check for check in checks}


def test_nodes_where_all_is_well() -> None:
    found = seen(NODE, replace(NODE, host="node2"))
    assert {check.state for check in found.values()} == {CheckState.OK}
    assert found["isolation"].seen.startswith("off: node1, node2")
    assert found["cuda"].seen == "torch 2.9.0 (CUDA 12.8); driver 550.54.15"


def test_discovery_names_the_nodes_and_why() -> None:
    found = seen(NODE, failed={"node2": "no nvidia-smi"}, skipped={"node3": "in use"})["discovery"]
    assert state_of(found, "node2: no nvidia-smi", "python3 on the PATH") == "wrong"
    assert "node3 not checked: in use" in found.details
    found = seen(NODE, skipped={"node2": "in use", "node3": "in use"})["discovery"]
    assert state_of(found, "node2, node3 not checked: in use") == "unknown"
    bad = replace(NODE, gpus=(replace(A100, state="bad", reason="XID 79"),))
    assert state_of(seen(bad)["discovery"], "GPU-1 (NVIDIA A100) is bad: XID 79") == "wrong"
    watched = replace(NODE, gpus=(replace(A100, state="watch", reason="hot"),))
    assert state_of(seen(watched)["discovery"], "is watch: hot") == "ok"
    assert state_of(seen(replace(NODE, gpus=()))["discovery"], "left no list") == "wrong"


def test_without_a_node_the_rest_is_unknown() -> None:
    found = seen(skipped={"node1": "in use"})
    assert {check.state for check in found.values()} == {CheckState.UNKNOWN}
    told = "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in"
    found = seen(skipped={"node1": "the gang failed"}, problem=f"{told} driver: 3.11,")
    check = found["executor python"]
    assert state_of(check, "3.12", "PYSPARK_PYTHON (or spark.pyspark.python) = a Python 3.11")
    assert check.state == "wrong"


def test_without_nvml_it_is_said_what_is_lost() -> None:
    found = seen(NODE, replace(NODE, host="node2", nvml=""))["gpu events"]
    assert state_of(found, "node2: nvidia-smi lists", "pip install nvidia-ml-py") == "wrong"
    assert "XIDs and lost GPUs are not noticed" in found.seen
    simulated = replace(NODE, nvml="", gpus=(replace(A100, name="Simulated GPU"),))
    assert seen(simulated)["gpu events"].state == "unknown"
    assert seen(NODE)["gpu events"].seen == "nvidia-ml-py 13.580.82"


def test_the_executors_python_and_spark_are_the_drivers() -> None:
    other = replace(NODE, host="node2", python="3.12.1", spark="4.0.0")
    found = seen(NODE, other)
    assert state_of(found["executor python"], "node2: Python 3.12.1", "Python 3.11") == "wrong"
    assert state_of(found["executor spark"], "node2: Spark 4.0.0", "spark.yarn.archive") == "wrong"
    assert found["executor java"].state == "ok"
    silent = seen(replace(NODE, java="", spark=""))
    assert silent["executor java"].state == "unknown"
    assert silent["executor spark"].state == "unknown"


def test_leases() -> None:
    broken = replace(NODE, host="node2", leases=LeaseDirectory("", "/leases has mode 755"))
    found = seen(NODE, broken)["gpu leases"]
    assert state_of(found, "node2: /leases has mode 755", "1777") == "wrong"


@pytest.mark.parametrize(
    ("visible", "is_isolated", "totals", "state", "words"),
    [
        (2, False, 2, "ok", "off: node1"),
        (1, False, 2, "ok", "on: node1"),
        (1, True, 2, "ok", "on: node1"),
        (1, False, 1, "unknown", "could have seen more"),
        (None, False, 2, "unknown", "could have seen more"),
    ],
)
def test_isolation(
    visible: int | None, is_isolated: bool, totals: int, state: str, words: str
) -> None:
    found = seen(replace(NODE, visible=visible, is_isolated=is_isolated), totals=totals)
    assert state_of(found["isolation"], words) == state


def test_the_node_whose_driver_is_too_old_is_named() -> None:
    thirteen = replace(NODE, frameworks=(Framework("torch", "2.15", "13.2"),))
    new = replace(thirteen, host="node2", gpus=(replace(A100, driver="580.65.06"),))
    found = seen(thirteen, new)["cuda"]
    assert found.details == (
        "node1: torch 2.15 (CUDA 13.2) needs driver 580, but it has 550.54.15",
    )
    assert state_of(found, "", "newer NVIDIA driver") == "wrong"
    # jax's plugin tells the major version alone.
    jax = replace(NODE, frameworks=(Framework("jax", "0.10", "13"),))
    assert seen(jax)["cuda"].state == "wrong"


def test_frameworks_without_cuda() -> None:
    bare = Framework("tensorflow", "2.21.0", "")
    assert seen(replace(NODE, frameworks=(TORCH, bare)))["cuda"].state == "ok"
    alone = seen(replace(NODE, frameworks=(bare,)))["cuda"]
    assert state_of(alone, "would train on the CPU") == "wrong"
    assert seen(replace(NODE, frameworks=()))["cuda"].state == "unknown"
    assert seen(NODE, replace(NODE, host="node2", gpus=()))["cuda"].state == "ok"
    assert seen(replace(NODE, gpus=()))["cuda"].state == "unknown"
    simulated = replace(NODE, gpus=(replace(A100, name="Simulated A100"),), frameworks=(bare,))
    assert state_of(seen(simulated)["cuda"], "simulated") == "unknown"


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [
        ("13.2", "580"),
        ("12", "525"),
        ("12.8", "525"),
        ("11.8", "450.80.02"),
        ("10.2", "440.33"),
        ("9.0", None),
        ("99.1", None),
    ],
)
def test_the_oldest_driver_of_a_cuda(cuda: str, driver: str | None) -> None:
    assert oldest_driver(cuda) == driver


def test_versions_are_compared_by_their_numbers() -> None:
    assert version_of("550.54.15") > version_of("525")
    assert version_of("450.80.02") > version_of("450.51")
    assert version_of("97.1") < version_of("525")
