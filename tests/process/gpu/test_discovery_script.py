"""The discovery script as Spark runs it: a process in a container's directory."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.core.gpu_names import MIG_PROFILES
from hopsgpu.core.spec import MAX_GPUS
from hopsgpu.gpu import script_archive
from hopsgpu.gpu.node import discovery_script as script
from hopsgpu.gpu.node.devices import GpuDevice
from hopsgpu.gpu.node.discovery_script import WaitLimits
from hopsgpu.gpu.node.health import Readings
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit.discovery_standins import HERE as STANDINS
from tests.unit.discovery_standins import gpu, mig_device
from tests.unit.discovery_standins.node import IMPATIENT, Node, keepers, no_real_driver, pythons

PYTHONS = pythons()
UUIDS = [gpu(number)["uuid"] for number in range(8)]
MIG = [mig_device(number)["uuid"] for number in range(7)]
LOST, UNKNOWN = 15, 999


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path) as one:
        one.play([gpu(number) for number in range(4)])
        yield one


@pytest.fixture(params=["nvml", "nvidia-smi"])
def told(request: pytest.FixtureRequest, node: Node) -> Node:
    """The node, once for each way in which its driver lists GPUs."""
    if request.param == "nvml":
        node.with_nvml()
    return node


def test_the_python_that_runs_this_is_one_of_the_nodes_pythons() -> None:
    assert f"3.{sys.version_info.minor}" in PYTHONS


@pytest.mark.parametrize("version", sorted(PYTHONS))
@pytest.mark.parametrize("nvml", [True, False], ids=["nvml", "nvidia-smi"])
def test_every_python_gives_out_gpus(tmp_path: Path, version: str, nvml: bool) -> None:
    with Node(tmp_path, PYTHONS[version]) as node:
        node.play([gpu(0), gpu(1, mig=[mig_device(0), mig_device(1)]), gpu(2, rows=[0, 2, 0, 1])])
        if nvml:
            node.with_nvml()
        executor = node.start(4)
        assert executor.gpus == [UUIDS[0], MIG[0], MIG[1], UUIDS[2]]
        executor.end()
        assert until(lambda: not keepers(node.root))


@pytest.mark.parametrize(
    "module", [name for name, _ in script_archive.node_modules()], ids=lambda name: Path(name).stem
)
def test_what_the_nodes_run_is_python_3_6(module: str) -> None:
    text = dict(script_archive.node_modules())[module]
    tree = ast.parse(text, feature_version=(3, 6))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {str(node.module).split(".")[0] for node in froms}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    assert names <= sys.stdlib_module_names | {"hopsgpu"}
    assert "__future__" not in names  # annotations are 3.7's


def test_each_executor_gets_other_gpus_and_exactly_its_amount(told: Node) -> None:
    first, second, third = told.start(1), told.start(2), told.start(1)
    assert len(first.gpus) == 1 and len(second.gpus) == 2 and len(third.gpus) == 1
    assert sorted(first.gpus + second.gpus + third.gpus) == UUIDS[:4]


def addresses_and_states(gpus: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(gpu["address"], gpu["state"]) for gpu in gpus]


def test_gpus_that_a_standalone_master_assigned_are_leased(told: Node) -> None:
    first = told.claiming([UUIDS[2], UUIDS[0]])
    assert sorted(addresses_and_states(first.left)) == [
        (UUIDS[0], "healthy"),
        (UUIDS[2], "healthy"),
    ]
    # Another worker of the machine has assigned one of them, too.
    second = told.claim([UUIDS[2], UUIDS[3]])
    assert addresses_and_states(second) == [(UUIDS[2], "bad"), (UUIDS[3], "bad")]
    assert f"{UUIDS[2]} is leased to another executor" in second[0]["reason"]
    # As Spark's own script lists them, by number.
    assert addresses_and_states(told.claim(["1"])) == [(UUIDS[1], "healthy")]
    first.end()
    assert until(lambda: addresses_and_states(told.claim([UUIDS[2]])) == [(UUIDS[2], "healthy")])


def test_an_assigned_gpu_that_the_driver_does_not_list_is_bad(told: Node) -> None:
    there, lost = told.claim([UUIDS[7], UUIDS[0]])
    assert (there["address"], there["state"]) == (UUIDS[0], "healthy")
    assert lost["state"] == "bad" and "does not list it" in lost["reason"]


def test_without_a_directory_of_leases_assigned_gpus_are_bad(node: Node) -> None:
    node.environ["HOPSGPU_LEASE_DIR"] = "not/absolute"
    (gpu_,) = node.claim([UUIDS[0]])
    assert gpu_["state"] == "bad" and "must be an absolute path" in gpu_["reason"]


def test_without_a_driver_assigned_gpus_are_bad(node: Node) -> None:
    node.play([gpu(0)], smi_fails="driver mismatch")
    (lost,) = node.claim(["0"])
    assert lost["state"] == "bad" and "driver mismatch" in lost["reason"]


def test_eight_gpus(told: Node) -> None:
    told.play([gpu(number) for number in reversed(range(8))])
    assert told.start(8).gpus == UUIDS  # by PCI bus id


def test_what_the_agent_is_told(told: Node) -> None:
    told.play([gpu(0, clocks=0x40), gpu(1)])
    healthy, watched = told.start(2).given_out
    assert healthy == {
        "address": UUIDS[1],
        "name": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81559,
        "driver": "550.54.15",
        "state": "healthy",
        "reason": "",
        "parent": "",
    }
    assert watched["state"] == "watch"
    assert "its temperature" in watched["reason"]


def test_a_gpu_ends_with_its_executor_however_that_ends(told: Node) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        holder = told.start(4)
        assert holder.gpus == UUIDS[:4]
        holder.end(number)
    assert told.start(4).gpus == UUIDS[:4]


def test_nothing_is_given_out_twice(told: Node) -> None:
    first = told.start(3)
    lines = first.err.splitlines()
    assert [line.rpartition("gives out ")[2] for line in lines] == [
        f"{uuid}, healthy" for uuid in UUIDS[:3]
    ]
    refusal = told.start(2, IMPATIENT).refusal
    assert re.search("2 GPUs .* has 4, and 1 ", refusal)
    for uuid in UUIDS[:3]:
        assert f"{uuid} is leased" in refusal
    assert "container container_1_0001_01_000002" in refusal
    assert len(told.start(1).gpus) == 1  # what the late one had taken is free again


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ({"smi_fails": "driver mismatch"}, "nvidia-smi failed with exit code 1: driver mismatch"),
        ({"smi_garbage": "No devices were found"}, "exit code 0: No devices were found"),
        ({"smi_garbage": " "}, "no output"),
        ({"smi_garbage": "<nvidia_smi_log><driver_ver"}, "output is incomplete"),
        ({"smi_garbage": "<nvidia_smi_log></nvidia_smi_log>"}, "this node has 0"),
    ],
)
def test_a_driver_that_tells_no_gpus(node: Node, driver: dict[str, Any], words: str) -> None:
    node.play([gpu(0)], **driver)
    assert words in node.start(1, IMPATIENT).refusal


def test_no_gpus(told: Node) -> None:
    told.play([])
    assert re.search("1 GPU .* has 0", told.start(1).refusal)


def test_a_node_without_a_driver(node: Node) -> None:
    (node.bin / "nvidia-smi").unlink()
    refusal = node.start(1).refusal
    if no_real_driver():
        assert "no nvidia-smi" in refusal and "GPU driver" in refusal


@pytest.mark.parametrize("trouble", [{"nvml_error": 12}, {"nvml_error": 9}, {"crashes": True}])
def test_nvidia_smi_tells_what_a_broken_nvml_does_not(node: Node, trouble: dict[str, Any]) -> None:
    node.environ["PYTHONPATH"] = str(STANDINS)
    node.play([gpu(0)], **trouble)
    assert node.start(1).gpus == UUIDS[:1]


def test_both_are_named_where_both_fail(node: Node) -> None:
    node.environ["PYTHONPATH"] = str(STANDINS)
    node.play([gpu(0)], nvml_error=9, smi_fails="no driver")
    refusal = node.start(1).refusal
    assert "no driver" in refusal and "Driver Not Loaded" in refusal


@pytest.mark.parametrize("place", ["file", "directory"])
def test_an_nvidia_smi_can_be_named(node: Node, place: str, tmp_path: Path) -> None:
    """The development cluster names one: its GPUs are not those that NVML lists."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (node.bin / "nvidia-smi").rename(elsewhere / "nvidia-smi")
    named = elsewhere if place == "directory" else elsewhere / "nvidia-smi"
    node.environ["HOPSGPU_NVIDIA_SMI"] = str(named)
    node.environ["PYTHONPATH"] = str(STANDINS)
    node.play([gpu(0)], nvml_error=4)
    assert node.start(1).gpus == UUIDS[:1]
    node.environ["HOPSGPU_NVIDIA_SMI"] = str(tmp_path / "nowhere")
    assert "executable nvidia-smi" in node.start(1).refusal


def test_cuda_visible_devices_hides_nothing(told: Node) -> None:
    told.environ["CUDA_VISIBLE_DEVICES"] = "3"
    assert told.start(4).gpus == UUIDS[:4]


def test_a_hung_driver_is_not_waited_for(told: Node) -> None:
    """Nor a process that cannot be killed; the executor sees the end of the script's output."""
    told.play([gpu(0)], hangs=True)
    began = time.monotonic()
    assert "the driver hangs" in told.start(1, IMPATIENT._replace(driver=1.0)).refusal
    assert time.monotonic() - began < HANG_SECONDS


def test_mig_devices_are_addresses_and_their_gpu_is_not(told: Node) -> None:
    told.play([gpu(0, mig=[mig_device(n) for n in range(3)]), gpu(1, mig=[])])
    assert told.start(2).gpus == MIG[:2]
    assert told.start(1).gpus == MIG[2:3]
    assert "this node has 3" in told.start(1, IMPATIENT).refusal


def test_mig_devices_whose_uuids_old_drivers_tell_elsewhere(node: Node) -> None:
    old = f"MIG-{UUIDS[0]}/1/0"
    node.play(
        [gpu(0, mig=[mig_device(0, uuid=old), mig_device(1)]), gpu(1), gpu(2, mig=[mig_device(2)])],
        mig_uuids=False,
    )
    assert node.start(4).gpus == [old, MIG[1], UUIDS[1], MIG[2]]
    assert "another executor (pid" in node.start(1, IMPATIENT).refusal


def test_a_lost_gpu_is_given_out_last_and_as_bad(told: Node) -> None:
    told.play([gpu(0, error=LOST), gpu(1)])
    good, lost = told.start(2).given_out
    assert (good["address"], good["state"]) == (UUIDS[1], "healthy")
    assert (lost["address"], lost["state"]) == (UUIDS[0], "bad")
    assert "GPU is lost" in lost["reason"]


def test_a_lost_gpu_without_a_uuid(node: Node) -> None:
    node.play([gpu(0, handle_error=LOST), gpu(1)], new_words=True)
    _, lost = node.start(2).given_out
    assert lost["address"] == "PCI-00000000:01:00.0"
    assert "Unknown Error" in lost["reason"]


def test_a_gpu_that_tells_no_uuid_costs_itself_alone(node: Node) -> None:
    """The error is not that of a lost GPU, and there is no nvidia-smi."""
    node.with_nvml()
    node.play([gpu(0, uuid_error=UNKNOWN), gpu(1)])
    good, bad = node.start(2).given_out
    assert (good["address"], good["state"]) == (UUIDS[1], "healthy")
    assert (bad["address"], bad["state"]) == ("PCI-00000000:01:00.0", "bad")
    assert "Unknown Error" in bad["reason"]


def test_a_bad_gpu_is_taken_where_the_better_ones_are_others(told: Node) -> None:
    """YARN counts the bad GPU: the executor that it sent here must start, to be parked."""
    told.play([gpu(0, recovery=1), gpu(1)])
    assert told.start(1).gpus == [UUIDS[1]]
    (bad,) = told.start(1, WaitLimits(bad=0.2)).given_out
    assert (bad["address"], bad["state"]) == (UUIDS[0], "bad")
    assert "'Reset'" in bad["reason"]


def test_a_bad_gpu_waits_for_a_better_one_to_come_back(told: Node) -> None:
    told.play([gpu(0, recovery=1), gpu(1)])
    holder = told.start(1)
    with subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {holder.process.pid}"]):
        assert told.start(1, WaitLimits(bad=20.0)).gpus == [UUIDS[1]]


@pytest.fixture
def stranger() -> Iterator[int]:
    """The pid of a process that computes, according to the driver, and has no lease."""
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]  # who reaps it is not this test
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        yield pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def used(number: int, pid: int, name: str = "python train.py") -> dict[str, Any]:
    return gpu(number, processes=[{"pid": pid, "name": name}])


def test_a_gpu_in_use_is_passed_over(told: Node, stranger: int) -> None:
    told.play([used(0, stranger), gpu(1)])
    assert told.start(1, IMPATIENT).gpus == [UUIDS[1]]


def test_gpu_in_use_is_given_out_as_bad_if_there_is_no_other(told: Node, stranger: int) -> None:
    told.play([used(0, stranger), used(1, stranger)])
    (first,) = told.start(1, IMPATIENT).given_out
    assert (first["address"], first["state"]) == (UUIDS[0], "bad")
    user = pwd.getpwuid(os.getuid()).pw_name
    assert f" {stranger} (python train.py, user {user})" in first["reason"]
    assert told.start(1, IMPATIENT).gpus == [UUIDS[1]]
    assert "is leased" in told.start(1, IMPATIENT).refusal


def test_a_gpu_in_use_is_given_out_after_the_bad_ones(told: Node, stranger: int) -> None:
    told.play([used(0, stranger), gpu(1, recovery=1), gpu(2)])
    first = told.start(2, IMPATIENT).given_out
    assert [one["address"] for one in first] == [UUIDS[2], UUIDS[1]]
    assert told.start(1, IMPATIENT).gpus == [UUIDS[0]]


def test_a_gpu_in_use_is_given_out_after_others_were_waited_for(told: Node, stranger: int) -> None:
    told.play([used(0, stranger), gpu(1)])
    holder = told.start(1, IMPATIENT)
    assert holder.gpus == [UUIDS[1]]
    with subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {holder.process.pid}"]):
        late = told.start(1, IMPATIENT._replace(leased=20.0))
    assert late.gpus == [UUIDS[1]]


def test_more_gpus_than_there_are_even_such(told: Node, stranger: int) -> None:
    told.play([used(0, stranger)])
    refusal = told.start(2, IMPATIENT).refusal
    assert re.search("2 GPUs .* has 1", refusal)


def test_a_process_on_its_way_out_is_waited_for(told: Node, stranger: int) -> None:
    told.play([used(0, stranger)])
    with subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {stranger}"]):
        assert told.start(1, WaitLimits(busy=20.0)).gpus == UUIDS[:1]


@pytest.mark.parametrize("name", ["", "/usr/bin/nvidia-cuda-mps-server"])
def test_processes_that_take_nothing(told: Node, name: str) -> None:
    """They are invisible (another namespace, or dead), or CUDA's own server."""
    pid = os.getpid() if name else 2**22 + 1
    told.play([used(0, pid, name)])
    assert told.start(1, IMPATIENT).gpus == UUIDS[:1]


def test_a_process_on_another_mig_device(node: Node, stranger: int) -> None:
    running = [{"pid": stranger, "name": "python"}]
    node.play([gpu(0, mig=[mig_device(0, processes=running), mig_device(1)])])
    assert node.start(1, IMPATIENT).gpus == [MIG[1]]


def test_a_stale_file_is_not_left(node: Node, tmp_path: Path) -> None:
    """The agent would take it for its own container's."""
    node.play([])
    (tmp_path / script.CONTAINER_GPUS).write_text("stale")
    assert script_in(node, tmp_path).returncode == 1
    assert not (tmp_path / script.CONTAINER_GPUS).exists()


def script_in(node: Node, directory: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [str(node.root / script_archive.ALIAS / "gpus-1")]
    return subprocess.run(
        command,
        cwd=directory,
        env=node.environ,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        capture_output=True,
        **more,
    )


def test_a_directory_that_cannot_be_written(node: Node, tmp_path: Path) -> None:
    directory = tmp_path / "full"
    (directory / f"{script.CONTAINER_GPUS}.new").mkdir(parents=True)
    ran = script_in(node, directory)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "cannot write hopsgpu-gpus.json" in ran.stderr
    assert node.start(4).gpus == UUIDS[:4]  # nothing stays leased


def test_the_archive_has_a_script_for_each_amount(tmp_path: Path) -> None:
    with tarfile.open(script_archive.pack_scripts(tmp_path / "s.tar.gz")) as archive:
        members = {member.name: member for member in archive.getmembers()}
    scripts = {name for name in members if not name.startswith("hopsgpu/")}
    assert scripts == {f"gpus-{n}" for n in range(1, MAX_GPUS + 1)} | {
        f"gpus-1-{profile}" for profile in MIG_PROFILES
    }
    assert all(members[name].mode == 0o755 for name in scripts)
    assert "hopsgpu/__init__.py" in members and "hopsgpu/gpu/node/discovery_script.py" in members
    assert "hopsgpu/gpu/script_archive.py" not in members
    path = f"./{script_archive.ALIAS}/gpus"
    assert script_archive.script_for(2) == f"{path}-2"
    for gpu_type, script_name in (
        ("A100 1g.5gb", "1-1g.5gb"),
        ("mig 3g.20gb", "1-3g.20gb"),
        ("A100", "1"),
        ("1g.999gb", "1"),
        ("mig", "1"),
    ):
        assert script_archive.script_for(1, gpu_type) == f"{path}-{script_name}"
    assert script_archive.script_for(2, "1g.5gb") == f"{path}-2"


def test_the_archive_has_a_script_for_each_marker(tmp_path: Path) -> None:
    home = tmp_path / script_archive.ALIAS
    markers = ["gpu-a100", "example.com/gpu-t4"]
    with tarfile.open(script_archive.pack_scripts(tmp_path / "s.tar.gz", markers)) as archive:
        archive.extractall(home)
    for marker in markers:
        script = script_archive.marker_script(marker)
        ran = subprocess.run([script], cwd=tmp_path, capture_output=True, check=True)
        # As Spark's ResourceDiscoveryScriptPlugin reads it.
        assert json.loads(ran.stdout) == {"name": marker, "addresses": ["0"]}


def test_a_script_prefers_mig_devices_of_its_profile(tmp_path: Path) -> None:
    home = tmp_path / script_archive.ALIAS
    with tarfile.open(script_archive.pack_scripts(tmp_path / "s.tar.gz")) as archive:
        archive.extractall(home)
    launcher = (home / "gpus-1-3g.20gb").read_text()
    assert 'main(1, gpu_type="3g.20gb")' in launcher.replace("'", '"')


def test_mig_devices_of_the_profile_and_of_unused_gpus_first() -> None:
    devices = [
        GpuDevice(f"{parent}{n}", f"A100 MIG {profile}", parent=parent)
        for parent in "AB"
        for n, profile in enumerate(["1g.5gb", "1g.5gb", "3g.20gb"])
    ]
    whole = [*devices, GpuDevice("GPU-c", "A100")]
    choose = script.choose_gpus
    assert choose(whole, [], [], False) == ["A0", "B0", "GPU-c", "A1", "B1", "A2", "B2"]
    assert choose(devices, ["A0"], [], False)[0] == "B0"
    assert choose(devices, [], [], False, "3g.20gb")[:3] == ["A2", "B2", "A0"]
    assert choose(devices, [], ["A2", "B2"], False, "3g.20gb")[0] == "A0"


def test_the_best_are_wanted_first() -> None:
    bad = GpuDevice("GPU-bad", readings=Readings(recovery_action=2))
    watched = GpuDevice("GPU-watched", readings=Readings(sw_thermal=True))
    good = GpuDevice("GPU-good")
    devices = [bad, watched, good]
    assert script.choose_gpus(devices, [], [], False) == ["GPU-good", "GPU-watched"]
    assert script.choose_gpus(devices, [], [], True) == ["GPU-good", "GPU-watched", "GPU-bad"]
    assert script.choose_gpus(devices, ["GPU-good"], ["GPU-watched"], False) == ["GPU-bad"]
