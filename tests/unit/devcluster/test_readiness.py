"""What is missing until a cluster is ready."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopsgpu.devcluster.config import ClusterSpec, SiteConf
from hopsgpu.devcluster.probe import HdfsStatus, NodeStatus
from hopsgpu.devcluster.readiness import (
    describe_unready_hdfs,
    describe_unready_masters,
    describe_unready_nodes,
)

HDFS = HdfsStatus({"namenode": "active"}, "Operational", 1, ("RUNNING",))
PAIR = {"namenode": "active", "namenode2": "standby"}


@pytest.mark.parametrize(
    ("hdfs", "unmet"),
    [
        (HDFS, ""),
        (replace(HDFS, roles=PAIR), ""),
        (replace(HDFS, roles={"namenode": None}), "namenode to answer"),
        (replace(HDFS, roles={**PAIR, "namenode2": None}), "namenode2 to answer"),
        (
            replace(HDFS, roles=dict.fromkeys(PAIR, "standby")),
            "one NameNode to become active (namenode is standby, namenode2 is standby)",
        ),
        (replace(HDFS, datanode_states=None), "datanode to answer"),
        # Safe mode is the consequence, not the cause.
        (
            replace(HDFS, file_system="safeMode", live_datanodes=0),
            "datanode to register with the NameNode",
        ),
        (replace(HDFS, file_system="safeMode"), "the NameNode to leave safe mode"),
        (
            replace(HDFS, datanode_states=("CONNECTING",)),
            "datanode to be RUNNING (it is CONNECTING)",
        ),
        (replace(HDFS, datanode_states=()), "datanode to be RUNNING (it is starting)"),
    ],
)
def test_hdfs(hdfs: HdfsStatus, unmet: str) -> None:
    assert describe_unready_hdfs(hdfs) == unmet


SPEC = ClusterSpec(nodes=2, gpus_per_node=2)
NODE1 = NodeStatus("node1", "RUNNING", 2, 0, 1024, 0, 7, 0, heard=100.0, health_report="")
NODE2 = replace(NODE1, name="node2")


@pytest.mark.parametrize(
    ("nodes", "unmet"),
    [
        ((NODE1, NODE2), ""),
        (None, "resourcemanager to answer"),
        ((), "0 of 2 nodes ready; node1 has not registered; node2 has not registered"),
        ((NODE1,), "1 of 2 nodes ready; node2 has not registered"),
        ((NODE1, replace(NODE2, gpus=1)), "1 of 2 nodes ready; node2 has 1 of 2 GPUs"),
        ((NODE1, replace(NODE2, heard=49.0)), "node2 has not reported since it was started"),
        (
            (NODE1, replace(NODE2, state="UNHEALTHY", health_report="1/1 log-dirs are bad")),
            "node2 is UNHEALTHY: 1/1 log-dirs are bad",
        ),
    ],
)
def test_nodes(nodes: tuple[NodeStatus, ...] | None, unmet: str) -> None:
    found = describe_unready_nodes(nodes, SPEC, {"node2": 50.0})
    assert bool(found) is bool(unmet)
    assert unmet in found


@pytest.mark.parametrize(
    ("masters", "unmet"),
    [
        ({}, ""),
        ({"master": "ALIVE"}, ""),
        ({"master": "STANDBY", "master2": "ALIVE"}, ""),
        ({"master": "", "master2": "ALIVE"}, "master to answer"),
        ({"master": "RECOVERING"}, "a Master to become ALIVE (master is RECOVERING)"),
    ],
)
def test_masters(masters: dict[str, str], unmet: str) -> None:
    assert describe_unready_masters(masters) == unmet


@pytest.mark.parametrize(
    ("node", "unmet"),
    [
        (replace(NODE2, state="ALIVE"), ""),
        (replace(NODE2, state="DEAD"), "the Workers (0 of 1 node ready; node2 is DEAD)"),
        (replace(NODE2, state="ALIVE", gpus=1), "node2 has 1 of 2 GPUs"),
        (replace(NODE2, state="ALIVE", heard=49.0), "node2 has not reported since"),
    ],
)
def test_workers(node: NodeStatus, unmet: str) -> None:
    spec = ClusterSpec(nodes=1, is_standalone=True)
    problem = describe_unready_nodes((replace(node, name="node1"),), spec, {"node1": 50.0})
    assert bool(problem) is bool(unmet)
    assert unmet.replace("node2", "node1") in problem
    assert describe_unready_nodes(None, spec, {}) == "master to answer"


def test_nodes_whose_gpu_plugin_the_user_configures() -> None:
    plugin = {"yarn.nodemanager.resource-plugins.gpu.allowed-gpu-devices": "0:0"}
    spec = replace(SPEC, conf=SiteConf(nodes={"node2": plugin}))
    assert describe_unready_nodes((NODE1, replace(NODE2, gpus=1)), spec, {}) == ""
