"""The configuration as values, and the files that are written from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hopsgpu.cluster_managers.yarn.resource_manager import web_addresses
from hopsgpu.devcluster import site_files
from hopsgpu.devcluster.boot import heap_mib
from hopsgpu.devcluster.config import ClusterSpec, SiteConf
from hopsgpu.devcluster.config_files import write_conf, write_spark_conf
from hopsgpu.devcluster.daemons import MARKER
from hopsgpu.devcluster.layout import MASTERS, ClusterLayout, address_of, node_names
from hopsgpu.devcluster.node_gpus import GpuPlan, PlannedGpu, plan_gpus
from hopsgpu.devcluster.ports import port_names
from hopsgpu.devcluster.standalone import command_of
from hopsgpu.devcluster.standby import arguments_of
from hopsgpu.devcluster.state import ClusterState
from hopsgpu.errors import ConfigError
from hopsgpu.storage.spark_defaults import read_properties
from tests.bounds import HANG_SECONDS

WHOLE = ClusterSpec(kerberos=True, https=True, namenode_ha=True, resourcemanager_ha=True)


def ports_of(spec: ClusterSpec) -> dict[str, int]:
    return {name: 20000 + i for i, name in enumerate(port_names(spec.daemons))}


PORTS = ports_of(ClusterSpec())


def state(spec: ClusterSpec) -> ClusterState:
    ports = ports_of(spec)
    return ClusterState(spec, "simulated", "/jdk", ports)


def properties(file: Path) -> dict[str, str]:
    rows = ET.parse(file).getroot().findall("property")
    return {str(r.findtext("name")): str(r.findtext("value")) for r in rows}


def written(tmp_path: Path, spec: ClusterSpec) -> ClusterLayout:
    layout = ClusterLayout(tmp_path)
    write_conf(layout, state(spec), plan_gpus(tmp_path, spec.nodes, spec.gpus_per_node))
    return layout


def test_a_site_file_survives_what_xml_means() -> None:
    said = {"a": "<b> & 'c' \"d\"", "e": ""}
    rows = ET.fromstring(site_files.xml_text(said)).findall("property")
    assert {r.findtext("name"): r.findtext("value") for r in rows} == said


def test_python_clients_meet_addresses_only(tmp_path: Path) -> None:
    layout = ClusterLayout(tmp_path)
    for site in (
        site_files.core_site(layout, ClusterSpec(), PORTS, "me"),
        site_files.hdfs_site(layout, ClusterSpec(), PORTS),
        site_files.yarn_site(layout, ClusterSpec(), PORTS),
    ):
        addresses = [v for k, v in site.items() if re.search(r"address$|defaultFS|hostname$", k)]
        assert addresses
        assert all("127.0.0.1" in a for a in addresses)


def test_a_node_has_room_for_its_gang_beside_am_and_etl() -> None:
    memory, cores = site_files.node_size(2)
    assert memory >= 2 * (4096 + 512) + 1024 + 1536
    assert cores >= 2 + 1 + 1


def test_every_port_of_a_daemon_is_its_own(tmp_path: Path) -> None:
    layout = written(tmp_path, ClusterSpec(nodes=3))
    used: list[str] = []
    for name in ("client", *node_names(3)):
        for file in ("core-site", "hdfs-site", "yarn-site"):
            said = properties(tmp_path / "conf" / name / f"{file}.xml").items()
            used += [v for k, v in said if k.endswith("address") and not v.endswith(":0")]
    assert len(set(used)) == len(port_names(ClusterSpec(nodes=3).daemons))
    assert layout.conf("node2") == tmp_path / "conf" / "node2"


def test_two_clusters_of_one_machine_share_no_directory(tmp_path: Path) -> None:
    """Hadoop's defaults, hadoop.tmp.dir among them, are in /tmp."""
    stores = {
        "core-site": {"hadoop.tmp.dir"},
        "hdfs-site": {"dfs.namenode.name.dir", "dfs.datanode.data.dir"},
        "yarn-site": {
            "yarn.node-attribute.fs-store.root-dir",
            "yarn.node-labels.fs-store.root-dir",
            "yarn.nodemanager.local-dirs",
            "yarn.nodemanager.log-dirs",
        },
    }
    layout = written(tmp_path, ClusterSpec(nodes=2))
    own: list[str] = []
    for node in node_names(2):
        for file, names in stores.items():
            said = properties(layout.conf(node) / f"{file}.xml")
            places = {name: said[name].removeprefix("file://") for name in names}
            assert all(Path(place).is_relative_to(tmp_path) for place in places.values()), places
            own += [place for name, place in places.items() if "nodemanager" in name]
    assert len(set(own)) == len(own) == 4


def test_two_of_each_share_a_name_and_have_addresses_of_their_own(tmp_path: Path) -> None:
    layout = written(tmp_path, WHOLE)
    ports = ports_of(WHOLE)
    core, hdfs, yarn = (
        properties(layout.client / f"{name}.xml")
        for name in ("core-site", "hdfs-site", "yarn-site")
    )
    assert core["fs.defaultFS"] == "hdfs://lake" == state(WHOLE).filesystem
    quorum = f"127.0.0.1:{ports['zookeeper.rpc']}"
    assert core["ha.zookeeper.quorum"] == yarn["yarn.resourcemanager.zk-address"] == quorum
    for number, daemon in enumerate(("namenode", "namenode2"), 1):
        rpc, web = (ports[f"{daemon}.{use}"] for use in ("rpc", "web"))
        assert hdfs[f"dfs.namenode.rpc-address.lake.nn{number}"] == f"localhost:{rpc}"
        assert hdfs[f"dfs.namenode.https-address.lake.nn{number}"] == f"127.0.0.1:{web}"
    # A client that reads these would ask one of the two alone.
    single = ("dfs.namenode.rpc-address", "dfs.namenode.http-address", "dfs.namenode.name.dir")
    assert not {*single} & {*hdfs}
    assert not [name for name in yarn if name.startswith("yarn.resourcemanager.address")][2:]
    asked = web_addresses(yarn.get)
    assert asked == tuple(
        f"https://127.0.0.1:{ports[f'{daemon}.web']}"
        for daemon in ("resourcemanager", "resourcemanager2")
    )
    text = layout.zookeeper_conf.read_text()
    assert f"clientPort={ports['zookeeper.rpc']}\n" in text
    assert "127.0.0.1" in text
    # Its data would bring applications of before the last `down` to life.
    assert str(layout.scratch) in text


@pytest.mark.parametrize(
    ("daemon", "arguments"),
    [
        ("namenode", ("-D", "dfs.ha.namenode.id=nn1")),
        ("zkfc2", ("-D", "dfs.ha.namenode.id=nn2")),
        ("resourcemanager2", ("-D", "yarn.resourcemanager.ha.id=rm2")),
        ("datanode", ()),
        ("node1", ()),
    ],
)
def test_each_of_two_knows_which_one_it_is(daemon: str, arguments: tuple[str, ...]) -> None:
    assert arguments_of(daemon, WHOLE) == arguments
    assert arguments_of(daemon, ClusterSpec()) == ()


def test_the_fence_ends_the_name_node_that_was_active_and_no_other(tmp_path: Path) -> None:
    layout = written(tmp_path, WHOLE)
    running = {
        name: subprocess.Popen(["sleep", "60"], env={MARKER: f"{tmp_path}:{daemon}"})
        for name, daemon in (("nn1", "namenode"), ("nn2", "namenode2"))
    }
    try:
        subprocess.run([layout.fence], env={**os.environ, "target_namenodeid": "nn2"}, check=True)
        assert running["nn2"].wait(HANG_SECONDS) == -signal.SIGKILL
        assert running["nn1"].poll() is None
        unknown = subprocess.run([layout.fence], env={"PATH": os.environ["PATH"]}, check=False)
        assert unknown.returncode == 1
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_clients_get_no_key_of_the_daemons(tmp_path: Path) -> None:
    """Spark sends all of a client's configuration to every container."""
    layout = written(tmp_path, WHOLE)
    assert not (layout.client / "ssl-server.xml").exists()
    said = properties(layout.client / "ssl-client.xml")
    assert said["ssl.client.truststore.location"].endswith("trust.p12")


def test_overrides_win_and_a_nodes_own_last(tmp_path: Path) -> None:
    key = "yarn.nodemanager.resource.memory-mb"
    conf = SiteConf(
        sites={
            "yarn-site": {key: "9000", "yarn.resourcemanager.scheduler.class": "Fair"},
            "capacity-scheduler": {"yarn.scheduler.capacity.root.queues": "a,b"},
            "spark-defaults": {"spark.master": "local"},
        },
        fair_scheduler="<allocations/>",
        nodes={"node2": {key: "3000"}},
        hosts={"db": "10.0.0.9"},
    )
    layout = written(tmp_path, ClusterSpec(nodes=2, conf=conf))
    client = properties(layout.client / "yarn-site.xml")
    assert client[key] == "9000"
    assert client["yarn.resourcemanager.scheduler.class"] == "Fair"
    assert properties(layout.conf("node1") / "yarn-site.xml")[key] == "9000"
    assert properties(layout.conf("node2") / "yarn-site.xml")[key] == "3000"
    queues = properties(layout.client / "capacity-scheduler.xml")
    assert queues["yarn.scheduler.capacity.root.queues"] == "a,b"
    assert "DominantResourceCalculator" in queues["yarn.scheduler.capacity.resource-calculator"]
    assert (layout.client / "fair-scheduler.xml").read_text() == "<allocations/>"
    assert "10.0.0.9 db\n" in layout.hosts.read_text()
    # And without it the next time, the file is gone.
    written(tmp_path, ClusterSpec(nodes=2))
    assert not (layout.client / "fair-scheduler.xml").exists()


def test_only_a_cluster_with_preemption_takes_back_what_a_queue_has_above_its_share(
    tmp_path: Path,
) -> None:
    monitored = "yarn.resourcemanager.scheduler.monitor.enable"
    at_once = "yarn.resourcemanager.monitor.capacity.preemption.natural_termination_factor"
    layout = written(tmp_path, ClusterSpec(nodes=2, preemption=True))
    assert properties(layout.client / "yarn-site.xml")[monitored] == "true"
    queues = properties(layout.client / "capacity-scheduler.xml")
    assert queues[at_once] == "1.0"
    # Half of the GPUs each, and all of them while the other queue is idle.
    for queue in ("default", "training"):
        assert queues[f"yarn.scheduler.capacity.root.{queue}.capacity"] == "50"
        assert queues[f"yarn.scheduler.capacity.root.{queue}.maximum-capacity"] == "100"
    written(tmp_path, ClusterSpec(nodes=2))
    assert monitored not in properties(layout.client / "yarn-site.xml")


def test_each_pyspark_has_its_own_spark_defaults(tmp_path: Path) -> None:
    """A client with the jars of another PySpark on its class path does not start."""
    layout = ClusterLayout(tmp_path)
    conf = SiteConf(sites={"spark-defaults": {"spark.master": "local"}})
    texts = {}
    for spark in (Path("/a/pyspark"), Path("/b/pyspark")):
        directory = write_spark_conf(layout, state(ClusterSpec(conf=conf)), spark)
        assert directory == layout.spark_conf(spark)
        texts[spark] = (directory / "spark-defaults.conf").read_text()
    for spark, other in (("/a", "/b"), ("/b", "/a")):
        text = texts[Path(spark, "pyspark")]
        assert f"spark.yarn.jars local:{spark}/pyspark/jars/*\n" in text
        assert other + "/pyspark" not in text
        assert "spark.master local\n" in text
    assert not (layout.client / "spark-defaults.conf").exists()


def test_clients_of_a_standalone_cluster_find_no_yarn(tmp_path: Path) -> None:
    written(tmp_path, ClusterSpec(nodes=1))
    spec = ClusterSpec(nodes=1, is_standalone=True, has_master_ha=True)
    layout = written(tmp_path, spec)
    names = {"core-site.xml", "hdfs-site.xml"}
    for conf in (layout.client, layout.conf("node1")):
        assert {file.name for file in conf.glob("*.xml")} == names
    directory = write_spark_conf(layout, state(spec), Path("/spark"))
    client = read_properties(directory / "spark-defaults.conf")
    ports = ports_of(spec)
    rpc, web = (
        [f"127.0.0.1:{ports[f'{daemon}.{use}']}" for daemon in ("master", "master2")]
        for use in ("rpc", "web")
    )
    assert client["spark.master"] == f"spark://{','.join(rpc)}"
    assert client["spark.hopsgpu.master.ui"] == f"http://{web[0]},http://{web[1]}"
    assert str(layout.hosts) in client["spark.executor.defaultJavaOptions"]


def test_a_master_recovers_and_a_worker_offers_its_gpus(tmp_path: Path) -> None:
    conf = SiteConf(nodes={"node2": {"spark.worker.resource.gpu.amount": "1"}})
    spec = ClusterSpec(nodes=2, gpus_per_node=3, is_standalone=True, conf=conf)
    layout = written(tmp_path, spec)
    master, *workers = (
        read_properties(layout.spark_daemon_conf(name)) for name in ("master", "node1", "node2")
    )
    assert master["spark.deploy.recoveryMode"] == "FILESYSTEM"
    # `down` removes it: applications of before must not come back.
    assert Path(master["spark.deploy.recoveryDirectory"]).is_relative_to(layout.scratch)
    assert [w["spark.worker.resource.gpu.amount"] for w in workers] == ["3", "1"]
    assert (layout.node("node1") / "bin" / "nvidia-smi").exists()
    command = command_of("node1", layout, spec, ports_of(spec))
    assert command[command.index("--host") + 1] == "node1"
    assert command[-1].startswith("spark://127.0.0.1:")

    pair = ClusterSpec(nodes=1, gpus_per_node=0, is_standalone=True, has_master_ha=True)
    layout = written(tmp_path, pair)
    master, worker = (
        read_properties(layout.spark_daemon_conf(name)) for name in ("master2", "node1")
    )
    assert master["spark.deploy.recoveryMode"] == "ZOOKEEPER"
    assert master["spark.deploy.zookeeper.url"].endswith(str(ports_of(pair)["zookeeper.rpc"]))
    assert not [name for name in worker if "gpu" in name]


def test_the_gpu_plugin_is_where_the_gpus_are(tmp_path: Path) -> None:
    layout = written(tmp_path, ClusterSpec(nodes=1, gpus_per_node=2))
    node = properties(layout.conf("node1") / "yarn-site.xml")
    assert node["yarn.nodemanager.resource-plugins"] == "yarn.io/gpu"
    key = "yarn.nodemanager.resource-plugins.gpu.path-to-discovery-executables"
    assert (Path(node[key]) / "nvidia-smi").stat().st_mode & 0o111
    assert node["yarn.nodemanager.admin-env.PATH"].startswith(f"{tmp_path}/nodes/node1/bin:")
    assert node[f"yarn.nodemanager.admin-env.{MARKER}"] == f"{tmp_path}:node1"
    client = properties(layout.client / "resource-types.xml")
    assert client == {"yarn.resource-types": "yarn.io/gpu"}

    layout = written(tmp_path, ClusterSpec(nodes=1, gpus_per_node=0))
    node = properties(layout.conf("node1") / "yarn-site.xml")
    assert "yarn.nodemanager.resource-plugins" not in node
    assert not (layout.node("node1") / "bin" / "nvidia-smi").exists()


def test_real_gpus_are_shown_by_the_nodes_own_nvidia_smi(tmp_path: Path) -> None:
    own = (PlannedGpu(2, 5, "GPU-a", "H100", 80000), PlannedGpu(3, 4, "GPU-b", "H100", 80000))
    plan = GpuPlan({"node1": own}, "/usr/bin/nvidia-smi", "real")
    layout = ClusterLayout(tmp_path)
    write_conf(layout, state(ClusterSpec(nodes=1)), plan)
    smi = (layout.node("node1") / "bin" / "nvidia-smi").read_text()
    assert "exec /usr/bin/nvidia-smi -i 2,3 " in smi


def test_hosts_have_the_machines_own_names_once_and_ours() -> None:
    system = "127.0.0.1 localhost box # here\n::1 localhost\n\n10.1.1.1 db node2\n#10.9.9.9 old\n"
    text = site_files.hosts_file(system, "box", 2, {"mine": "10.2.2.2"})
    assert text.splitlines() == [
        "127.0.0.1 localhost",
        "127.0.0.1 box",
        "10.1.1.1 db",
        "127.0.0.11 node1",
        "127.0.0.12 node2",
        "10.2.2.2 mine",
    ]
    assert "127.0.0.1 other\n" in site_files.hosts_file(system, "other", 1, {})


def test_nodes_have_addresses_of_their_own() -> None:
    addresses = {address_of(d) for d in (*MASTERS, *node_names(32))}
    assert len(addresses) == 33
    assert all(a.startswith("127.0.0.") and int(a.split(".")[3]) < 255 for a in addresses)


@pytest.mark.parametrize("nodes", range(1, 9))
def test_the_heaps_stay_under_2_gb(nodes: int) -> None:
    daemons = ClusterSpec(nodes=nodes).daemons
    assert sum(heap_mib(d, nodes) for d in daemons) < 2e9 / 2**20


def test_a_directory_that_yarn_does_not_bear_is_refused(tmp_path: Path) -> None:
    ClusterLayout.at(tmp_path / "a-b_c.d@e+f").check()
    for name in ("a b", "a'b", 'a"b', "a,b", "a:b", "a$b", "ä"):
        with pytest.raises(ConfigError, match="--dir"):
            ClusterLayout.at(tmp_path / name).check()
