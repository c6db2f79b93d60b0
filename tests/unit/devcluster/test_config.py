"""The size of a cluster and the --conf file: accepted and refused values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hopsgpu.devcluster.config import ClusterSpec, SiteConf, parse_conf, read_conf
from hopsgpu.errors import ConfigError


def test_values_become_the_text_of_a_site_file() -> None:
    conf = parse_conf(
        {
            "yarn-site": {"a": True, "b": False, "c": 3, "d": 0.5, "e": "x"},
            "capacity-scheduler": None,
            "fair-scheduler": "<allocations/>",
            "nodes": {"node2": {"m": 1024}},
            "hosts": {"db": "10.0.0.1"},
        }
    )
    assert conf == SiteConf(
        sites={
            "yarn-site": {"a": "true", "b": "false", "c": "3", "d": "0.5", "e": "x"},
            "capacity-scheduler": {},
        },
        fair_scheduler="<allocations/>",
        nodes={"node2": {"m": "1024"}},
        hosts={"db": "10.0.0.1"},
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"yarn": {}}, ("'yarn'", "yarn-site")),
        ([1], ("must map site files",)),
        ({"yarn-site": "a=b"}, ("yarn-site", "must map properties")),
        ({"yarn-site": {"a": [1]}}, ("yarn-site: a", "[1]")),
        ({"fair-scheduler": {"queue": 1}}, ("fair-scheduler", "text")),
        ({"nodes": ["node1"]}, ("nodes", "node1, node2")),
        ({"nodes": {"node1": 3}}, ("nodes: node1",)),
    ],
)
def test_a_wrong_form_is_refused_with_the_right_one(said: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_conf(said, "my.yaml")
    assert "my.yaml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("")
    assert read_conf(file) == SiteConf()
    file.write_text("core-site: {io.file.buffer.size: 8192}")
    assert read_conf(file).sites == {"core-site": {"io.file.buffer.size": "8192"}}
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        read_conf(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_conf(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 0}, ("nodes", "1 to 32", "0")),
        ({"nodes": 33}, ("nodes", "33")),
        ({"nodes": True}, ("nodes", "True")),
        ({"nodes": 1.5}, ("nodes", "1.5")),
        ({"gpus_per_node": -1}, ("gpus_per_node", "0 to 16", "-1")),
        ({"hadoop": "2.10.1"}, ("hadoop", "3.3.0", "2.10.1")),
        ({"hadoop": "3.2.4"}, ("3.2.4", "3.3.6")),
        ({"hadoop": "latest"}, ("latest", "3.3.6")),
        ({"nodes": 2, "conf": SiteConf(nodes={"node3": {}})}, ("node3", "node1, node2")),
    ],
)
def test_a_wrong_size_is_refused(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterSpec(**given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("hadoop", ["3.3.0", "3.3.6", "3.4.2", "3.5.0", "3.10.12"])
def test_releases_of_hadoop(hadoop: str) -> None:
    assert ClusterSpec(hadoop=hadoop).hadoop == hadoop


def test_no_gpus_are_a_cluster_too() -> None:
    assert ClusterSpec(nodes=1, gpus_per_node=0).gpus_per_node == 0


def test_a_standalone_cluster_has_masters_in_place_of_yarn() -> None:
    hdfs = ("namenode", "datanode")
    assert ClusterSpec(nodes=1, is_standalone=True).daemons == (*hdfs, "master", "node1")
    pair = ClusterSpec(nodes=1, is_standalone=True, has_master_ha=True)
    assert pair.daemons == ("zookeeper", *hdfs, "master", "master2", "node1")
    assert pair.masters == ("master", "master2") and pair.resourcemanagers == ()
    assert ClusterSpec().masters == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kerberos": True}, "leave out --standalone or --kerberos"),
        ({"https": True}, "leave out --standalone or --https"),
        ({"resourcemanager_ha": True}, "leave out --standalone or --resourcemanager-ha"),
        ({"preemption": True}, "leave out --standalone or --preemption"),
        ({"has_docker": True}, "leave out --standalone or --docker"),
        ({"mig": "1g.10gb:7"}, "leave out --standalone or --mig"),
        ({"conf": SiteConf(sites={"yarn-site": {}})}, "yarn-site in conf: .* hdfs-site"),
        ({"conf": SiteConf(sites={"capacity-scheduler": {}})}, "capacity-scheduler in conf"),
        ({"conf": SiteConf(sites={"container-executor": {}})}, "container-executor in conf"),
        ({"conf": SiteConf(fair_scheduler="<allocations/>")}, "fair-scheduler in conf"),
        ({"is_standalone": False, "has_master_ha": True}, "--standalone --master-ha"),
    ],
)
def test_what_only_yarn_has_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterSpec(**{"is_standalone": True, **given})


def test_docker_has_its_daemons_first_and_excludes_kerberos_and_mig() -> None:
    assert ClusterSpec(has_docker=True).daemons[:2] == ("containerd", "dockerd")
    with pytest.raises(ConfigError, match="one of --docker and --kerberos"):
        ClusterSpec(has_docker=True, kerberos=True)
    with pytest.raises(ConfigError, match="one of --docker and --mig"):
        ClusterSpec(has_docker=True, mig="1g.10gb:7")
