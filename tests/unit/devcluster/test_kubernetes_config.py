"""The size of a cluster on Kubernetes, and what only YARN has."""

from __future__ import annotations

from typing import Any

import pytest

from hopsgpu.devcluster.config import MAX_KUBERNETES_NODES, ClusterSpec, SiteConf
from hopsgpu.devcluster.layout import KUBERNETES_DAEMONS
from hopsgpu.errors import ConfigError

RESOURCE = "spark.hopsgpu.gpu.resource"


def test_kubernetes_takes_the_place_of_yarn() -> None:
    spec = ClusterSpec(nodes=2, is_kubernetes=True)
    assert not spec.is_yarn and ClusterSpec().is_yarn
    assert spec.resourcemanagers == spec.masters == ()
    assert spec.daemons == ("namenode", "datanode", *KUBERNETES_DAEMONS, "node1", "node2")
    assert not set(KUBERNETES_DAEMONS) & set(ClusterSpec().daemons)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kerberos": True}, "leave out --kubernetes or --kerberos"),
        ({"https": True}, "leave out --kubernetes or --https"),
        ({"resourcemanager_ha": True}, "leave out --kubernetes or --resourcemanager-ha"),
        ({"preemption": True}, "leave out --kubernetes or --preemption"),
        ({"has_docker": True}, "leave out --kubernetes or --docker"),
        ({"mig": "1g.10gb:7"}, "leave out --kubernetes or --mig"),
        (
            {"https": True, "preemption": True},
            "kubernetes with https, preemption: .*--https --pree",
        ),
        ({"is_standalone": True}, "a cluster has one cluster manager"),
        ({"has_master_ha": True}, "only a standalone cluster has Masters"),
        ({"conf": SiteConf(sites={"yarn-site": {}})}, "kubernetes with yarn-site in conf"),
        ({"conf": SiteConf(sites={"resource-types": {}})}, "resource-types in conf"),
        ({"conf": SiteConf(sites={"container-executor": {}})}, "container-executor in conf"),
        ({"conf": SiteConf(fair_scheduler="<allocations/>")}, "fair-scheduler in conf"),
        ({"conf": SiteConf(nodes={"node1": {"a": "b"}})}, "kubernetes with nodes in conf"),
    ],
)
def test_what_kubernetes_does_not_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterSpec(is_kubernetes=True, **changes)


def test_the_accepted_files_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterSpec(is_kubernetes=True, conf=SiteConf(sites={"yarn-site": {}}))
    accepted = str(caught.value).partition("accepted are ")[2]
    assert accepted == "core-site, hdfs-site, spark-defaults, hosts"
    sites: dict[str, dict[str, str]] = {name: {} for name in accepted.split(", ")[:-1]}
    assert ClusterSpec(is_kubernetes=True, conf=SiteConf(sites=sites, hosts={"db": "10.0.0.1"}))


def test_a_cluster_has_few_nodes() -> None:
    assert ClusterSpec(nodes=MAX_KUBERNETES_NODES, is_kubernetes=True).nodes == MAX_KUBERNETES_NODES
    words = f"nodes={MAX_KUBERNETES_NODES + 1}: it has at most {MAX_KUBERNETES_NODES} nodes"
    with pytest.raises(ConfigError, match=words):
        ClusterSpec(nodes=MAX_KUBERNETES_NODES + 1, is_kubernetes=True)
    assert ClusterSpec(nodes=MAX_KUBERNETES_NODES + 1).is_yarn


def test_hdfs_may_have_a_second_namenode() -> None:
    spec = ClusterSpec(nodes=1, is_kubernetes=True, namenode_ha=True)
    assert "zookeeper" in spec.daemons and len(spec.namenodes) == 2


def test_the_name_of_the_resource_is_that_of_kubernetes() -> None:
    def spec(name: str) -> ClusterSpec:
        conf = SiteConf(sites={"spark-defaults": {RESOURCE: name}})
        return ClusterSpec(is_kubernetes=True, conf=conf)

    assert ClusterSpec(is_kubernetes=True).gpu_resource == "nvidia.com/gpu"
    assert spec("amd.com/gpu").gpu_resource == "amd.com/gpu"
    with pytest.raises(ConfigError, match=f"{RESOURCE}='gpu'"):
        spec("gpu")


def test_hdfs_has_the_address_that_pods_reach() -> None:
    assert ClusterSpec(is_kubernetes=True, address="10.0.0.1").namenode_host == "10.0.0.1"
