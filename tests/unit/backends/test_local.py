"""Gangs on this machine: what fits, who waits, and which master is one of this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import hopsgpu
from hopsgpu.backends.local import gpu_leases as gpus_module
from hopsgpu.backends.local import machine_gpus as inventory_module
from hopsgpu.backends.local.container import ContainerRequest
from hopsgpu.backends.local.container_process import ContainerJob
from hopsgpu.backends.local.gpu_leases import NoLongerNeeded, take_gpus
from hopsgpu.backends.local.machine import NO_GPU, Machine, fit_on_machine, usable
from hopsgpu.backends.local.machine_gpus import machine_gpus
from hopsgpu.cluster_managers.cluster_gpus import GpuType
from hopsgpu.cluster_managers.local_masters import is_local
from hopsgpu.cluster_managers.manager_table import default_master
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.core.spec import GangSpec, GpuRequest
from hopsgpu.core.wait_reasons import WaitReason, other_gang_here
from hopsgpu.devcluster.node_gpus import PlannedGpu
from hopsgpu.devcluster.nvidia_smi_standin import standin_script
from hopsgpu.errors import CapacityError, ConfigError, DiscoveryError
from hopsgpu.gpu.node.devices import GpuDevice, GpuProcess
from hopsgpu.gpu.node.health import Readings
from hopsgpu.gpu.node.leases import Leases, lease_directory, try_lock
from hopsgpu.storage.root import choose_root
from tests.bounds import HANG_SECONDS
from tests.conftest import until

TWO = tuple(GpuDevice(f"GPU-{n}", "NVIDIA A100-SXM4-40GB") for n in "ab")
BAD = GpuDevice("GPU-c", "NVIDIA A100-SXM4-40GB", readings=Readings("fell off the bus"))
LAPTOP, WORKSTATION = Machine(4, 16384), Machine(8, 65536, (BAD, *TWO))


@pytest.mark.parametrize(
    ("master", "here"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[4]", True),
        ("local[4, 2]", True),
        ("local-cluster[1,1,1024]", False),
        ("local[]", False),
        ("yarn", False),
        ("spark://local:7077", False),
        (None, False),
    ],
)
def test_masters_of_this_machine(master: str | None, here: bool) -> None:
    assert is_local(master) is here


def test_the_master_is_this_machine_only_where_nothing_else_was_said(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.master yarn\n")
    defaults = {"SPARK_CONF_DIR": str(tmp_path)}
    assert default_master({}, {}) == "local[*]"
    assert default_master({}, defaults) == "yarn"
    assert default_master({}, {"HADOOP_CONF_DIR": "/etc/hadoop"}) == "yarn"
    assert default_master({}, {"YARN_CONF_DIR": "/etc/hadoop"}) == "yarn"
    assert default_master({}, {"PYSPARK_GATEWAY_PORT": "4711"}) is None
    # A standalone master that is named counts, and HADOOP_CONF_DIR is then the lake's.
    (tmp_path / "spark-defaults.conf").write_text("spark.master spark://m:7077\n")
    assert default_master({}, {**defaults, "HADOOP_CONF_DIR": "/etc/hadoop"}) == "spark://m:7077"
    (tmp_path / "spark-defaults.conf").write_text("spark.master local[4]\n")
    assert default_master({}, {**defaults, "HADOOP_CONF_DIR": "/etc/hadoop"}) == "yarn"
    assert default_master({}, defaults) == "local[4]"
    assert (
        default_master({"spark.master": "local[2]"}, {"HADOOP_CONF_DIR": "/etc/hadoop"})
        == "local[2]"
    )


def test_without_a_file_system_of_a_cluster_the_root_is_at_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    assert choose_root(None, None, "alice") == "file:///home/alice/hopsgpu"
    assert choose_root(None, "file:///", "alice") == "file:///home/alice/hopsgpu"
    assert choose_root(None, "hdfs://lake/", "alice") == "hdfs://lake/user/alice/hopsgpu"
    assert choose_root("hdfs://lake/team/", None, "alice") == "hdfs://lake/team"


def test_a_gang_for_gpus_runs_on_cpus_where_there_are_none() -> None:
    spec, shape, warnings = fit_on_machine(GangSpec("run", workers=2, gpu_type="A100"), LAPTOP)
    assert (spec.gpus.per_worker, spec.gpu_type, shape.gpus, shape.cores) == (0, None, 0, 2)
    assert warnings == (NO_GPU,)


def test_all_ranks_share_one_container_with_their_gpus() -> None:
    spec, shape, warnings = fit_on_machine(
        GangSpec("run", workers=2, cores_per_worker=3), WORKSTATION
    )
    assert (spec.gpus.per_worker, shape.gpus, shape.cores, shape.overhead_mib) == (1, 2, 6, 8192)
    assert warnings == ()
    assert (
        fit_on_machine(GangSpec("run", workers=4, gpus=GpuRequest(0.5)), WORKSTATION)[1].gpus == 2
    )


def test_more_gpus_than_there_are_good_ones_can_never_be_had() -> None:
    with pytest.raises(CapacityError, match="needs 3 GPUs, .* has 2 .*GPU-c is bad: fell off"):
        fit_on_machine(GangSpec("run", workers=3), WORKSTATION)
    with pytest.raises(ConfigError, match="gpu_type='H100'.*It has: 'NVIDIA A100"):
        fit_on_machine(GangSpec("run", gpu_type="H100"), WORKSTATION)


def test_what_is_not_reserved_here_is_told() -> None:
    spec = GangSpec(
        "run",
        workers=2,
        gpus=GpuRequest(0),
        cores_per_worker=4,
        memory_per_worker=2**36,
        placement="spread",
    )
    told = "; ".join(fit_on_machine(spec, LAPTOP)[2])
    assert "request 8 cores, but share the 4" in told
    assert "131072 MiB together, which is more than the 16384 MiB" in told
    assert "spread: all ranks run on this machine" in told


def test_gpus_to_be_avoided_are_no_choice() -> None:
    assert usable(WORKSTATION.gpus, None, ["GPU-a"]) == (TWO[1],)


def test_what_a_container_is_asked_for_survives_its_way_there() -> None:
    driver = DriverEndpoint("127.0.0.1", 4711, b"\x00secret", None, job="j")
    wanted = ContainerRequest(driver, 2, "A100", ("GPU-a",), 42)
    assert ContainerRequest.from_line(wanted.dump()) == wanted
    assert wanted.dump().count(b"\n") == 1


@pytest.fixture
def taking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, Leases, Callable[[str], bool]], list[str]]:
    """Takes GPUs of a machine that has two."""
    monkeypatch.setenv("HOPSGPU_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setattr(gpus_module, "own_gpus", lambda: TWO)

    def take(wanted: int, leases: Leases, wait: Callable[[str], bool]) -> list[str]:
        directory = lease_directory({"HOPSGPU_LEASE_DIR": str(tmp_path / "leases")})
        found = take_gpus(wanted, None, (), leases, directory, wait, pytest.fail)
        return [gpu.address for gpu in found]

    return take


def test_a_gang_waits_for_another_ones_gpus(
    tmp_path: Path, taking: Callable[..., list[str]]
) -> None:
    with Leases(tmp_path / "leases") as first, Leases(tmp_path / "leases") as second:
        assert taking(1, first, pytest.fail) == ["GPU-a"]
        said: list[WaitReason] = []

        def wait(why: WaitReason) -> bool:
            said.append(why)
            first.release("GPU-a")
            return True

        assert taking(2, second, wait) == ["GPU-a", "GPU-b"]
        assert len(said) == 1 and "GPU-a is leased to another gang" in str(said[0])


def test_one_gang_at_a_time_collects_gpus(tmp_path: Path, taking: Callable[..., list[str]]) -> None:
    turn = try_lock(lease_directory({"HOPSGPU_LEASE_DIR": str(tmp_path / "leases")}) / "turn")
    assert turn is not None
    said: list[WaitReason] = []
    with Leases(tmp_path / "leases") as leases:
        with pytest.raises(NoLongerNeeded):
            taking(1, leases, lambda why: bool(said.append(why)))  # type: ignore[func-returns-value]
        assert not leases.addresses
    assert said == [other_gang_here()]


def test_a_container_that_waits_ends_with_whoever_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = "GPU-11111111-1111-2222-3333-444444444444"
    smi, own = tmp_path / "nvidia-smi", tmp_path / "container"
    smi.write_text(standin_script((PlannedGpu(0, 0, gpu, "Simulated A100", 40960),)))
    smi.chmod(0o755)
    own.mkdir()
    monkeypatch.setenv("HOPSGPU_NVIDIA_SMI", str(smi))
    monkeypatch.setenv("HOPSGPU_LEASE_DIR", str(tmp_path / "leases"))
    driver = DriverEndpoint("127.0.0.1", 1, b"secret", None)
    with Leases(lease_directory(os.environ)) as leases:
        assert leases.take(gpu)
        job = ContainerJob(ContainerRequest(driver, 1, None, (), os.getpid()), own, pytest.fail)
        try:
            assert until(lambda: "leased to another gang" in str(job.wait_reason)), job.reason(0)
            job.close()
            assert job.ended.wait(HANG_SECONDS) and job.problem is None
            assert "exit code 0" in job.reason(0)
        finally:
            job.kill()
    job = ContainerJob(ContainerRequest(driver, 1, None, (), os.getpid()), own, pytest.fail)
    assert job.ended.wait(HANG_SECONDS)
    # It has its GPU, and nobody listens for it.
    assert "127.0.0.1" in job.reason(0)
    job.close()
    with Leases(tmp_path / "leases") as leases:
        assert leases.take(gpu)


def test_the_gpus_of_this_machine_are_told_as_a_clusters() -> None:
    found = machine_gpus(WORKSTATION.gpus, {"GPU-a"}, "desk", "alice", 1.0)
    assert (found.total, found.used, found.free, found.unhealthy) == (3, 1, 1, 1)
    (node,) = found.nodes
    assert (node.host, node.state, node.health) == (
        "desk",
        "RUNNING",
        "GPU-c is bad: fell off the bus",
    )
    assert found.types == (GpuType("NVIDIA A100-SXM4-40GB", None, 3),)
    assert found.obtainable is None and "could get" not in repr(found)
    assert found.unexplained == 1 and "desk" in found._repr_html_()
    none = machine_gpus((), (), "laptop", "alice", 1.0)
    assert (none.total, none.nodes, none.nodes_without, none.types) == (0, (), 1, ())
    assert json.dumps(none.to_json())


def test_a_gpu_that_another_program_computes_on_is_said() -> None:
    mine = GpuProcess(os.getpid(), "python")
    used = GpuDevice("GPU-a", "NVIDIA A100-SXM4-40GB", processes=(mine,))
    found = machine_gpus((used,), (), "desk", "alice", 1.0)
    assert found.free == 1 and f"GPU-a is in use by process {os.getpid()}" in found.problems[0]
    # The ranks of who has leased it are no others.
    assert machine_gpus((used,), {"GPU-a"}, "desk", "alice", 1.0).problems == ()


def test_inventory_is_of_this_machine_where_launches_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOPSGPU_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setattr(inventory_module, "own_gpus", lambda: TWO)
    with Leases(lease_directory(os.environ)) as leases:
        leases.take("GPU-b")
        assert (hopsgpu.inventory().total, hopsgpu.inventory().used) == (2, 1)
    assert hopsgpu.inventory(user="bob").user == "bob"
    with pytest.raises(ConfigError, match="the name of a user"):
        hopsgpu.inventory(user="")
    # A session on a local master, beside a cluster.
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="no yarn-site.xml"):
        hopsgpu.inventory()
    monkeypatch.setattr(
        "pyspark.SparkContext._active_spark_context", SimpleNamespace(master="local[2]")
    )
    assert hopsgpu.inventory().total == 2
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    # Who has said YARN is not answered with a laptop.
    monkeypatch.delenv("HADOOP_CONF_DIR")
    (tmp_path / "spark-defaults.conf").write_text("spark.master yarn\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="HADOOP_CONF_DIR is not set"):
        hopsgpu.inventory()
    monkeypatch.delenv("SPARK_CONF_DIR")
    monkeypatch.setenv("HOPSGPU_LEASE_DIR", "relative")
    with pytest.raises(DiscoveryError, match="leases of this machine's GPUs cannot be read"):
        hopsgpu.inventory()
