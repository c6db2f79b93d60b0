"""MIG devices on a real YARN, by both names of their resource; the devices are simulated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu import devcluster
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.storage.hadoop_conf import HadoopConf
from tests.bounds import HANG_SECONDS
from tests.conftest import conf_of_cluster, gpus_become
from tests.contention import start_script

PROFILES = ("3g.40gb", "1g.10gb", "1g.10gb", "1g.10gb")
DEVICES = 2 * len(PROFILES)
# YARN counts the devices twice: by its own plugin, and as NVIDIA's plugin names them. The leases
# alone keep two executors from one device.
PLUGIN, NVIDIA = "yarn.io/gpu", "nvidia/miggpu"
CONF: dict[str, dict[str, object]] = {
    "resource-types": {"yarn.resource-types": f"{PLUGIN},{NVIDIA}"},
    "yarn-site": {f"yarn.nodemanager.resource-type.{NVIDIA}": DEVICES},
}

TRAINING = """
    import json, sys
    import hopsgpu

    def connect(backend):
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group(backend)
        total = torch.ones(1)
        dist.all_reduce(total)
        return hopsgpu.context().gpus, os.environ["CUDA_VISIBLE_DEVICES"], total.item()

    def tell(name, value):
        print(json.dumps([name, value]), flush=True)

    def error_of(call):
        try:
            call()
        except hopsgpu.HopsGpuError as error:
            return type(error).__name__, str(error)

    hopsgpu.session("slices")
    plan = lambda **options: lambda: hopsgpu.plan(connect, args=("gloo",), **options)
    tell("two slices of a rank", error_of(plan(gpus_per_worker=2)))
    tell("two of a profile", error_of(plan(gpus_per_worker=2, gpu_type="1g.10gb")))
    tell("no such profile", error_of(plan(gpu_type="7g.80gb")))
    waits = []
    with hopsgpu.hold(workers=3, memory_per_worker="1g", progress="off") as gang:
        note = lambda status: waits.extend(status.waiting_details)
        result = gang.launch(connect, args=("gloo",), progress=note)
        tell("gloo", result.values)
        tell("said before the start", [text for text in waits if "NCCL" in text])
        nccl = lambda: gang.launch(connect, args=("nccl",), progress="off")
        tell("nccl", error_of(nccl))
        tell("holds", None)
        sys.stdin.readline()
    result = hopsgpu.launch(
        lambda: hopsgpu.context().gpus, workers=2, gpu_type="3g.40gb", progress="off"
    )
    tell("large", [result.values, result.warnings])
"""
OTHER_NAME = """
    import json, sys
    import hopsgpu

    hopsgpu.session("other name", conf={"spark.hopsgpu.gpu.resource": "nvidia/miggpu"})
    with hopsgpu.hold(workers=2, memory_per_worker="1g", progress="off") as gang:
        values = gang.launch(lambda: hopsgpu.context().gpus, progress="off").values
        told = ["other name", [values, hopsgpu.inventory().to_json()]]
        print(json.dumps(told), flush=True)
        sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def mig_dir(tmp_path_factory: pytest.TempPathFactory, own_tmpdir: Path) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("mig")
    conf: dict[str, dict[str, object]] = conf_of_cluster(str(own_tmpdir))
    for file, properties in CONF.items():
        conf[file] = {**conf.get(file, {}), **properties}
    try:
        devcluster.up(directory, nodes=1, mig="3g.40gb:1,1g.10gb:3", conf=conf)
        yield directory
    finally:
        devcluster.down(directory)


@pytest.fixture(scope="module")
def mig_env(mig_dir: Path) -> dict[str, str]:
    return {**os.environ, **devcluster.environment(mig_dir)}


@pytest.fixture
def managers(mig_env: dict[str, str]) -> Iterator[dict[str, ResourceManager]]:
    """By resource; at the end of the test nobody has any of its devices."""
    addresses = web_addresses(HadoopConf.load(mig_env).get)
    by_name = {name: ResourceManager(addresses, gpu_resource=name) for name in (PLUGIN, NVIDIA)}
    yield by_name
    for name, manager in by_name.items():
        assert gpus_become(manager, 0), f"{manager.gpus()} of {name} in use"


def devices_of(directory: Path) -> dict[str, tuple[str, str]]:
    """Profile and GPU of each MIG device, as the node's nvidia-smi lists them."""
    smi = directory / "nodes" / "node1" / "bin" / "nvidia-smi"
    lines = subprocess.run([smi, "-L"], capture_output=True, text=True, check=True).stdout
    devices, gpu = {}, ""
    for line in lines.splitlines():
        uuid = line.rpartition("UUID: ")[2].rstrip(")")
        if line.startswith("GPU"):
            gpu = uuid
        else:
            devices[uuid] = line.split()[1], gpu
    return devices


def told_by(script: subprocess.Popen[str], last: str) -> dict[str, Any]:
    """What a script has told up to a name."""
    assert script.stdout is not None and script.stderr is not None
    told: dict[str, Any] = {}
    while last not in told:
        line = script.stdout.readline()
        assert line, script.stderr.read()[-3000:]
        if line.startswith("["):
            name, value = json.loads(line)
            told[name] = value
    return told


def test_gangs_of_mig_devices_by_both_names_of_the_resource(
    mig_dir: Path, mig_env: dict[str, str], managers: dict[str, ResourceManager]
) -> None:
    devices = devices_of(mig_dir)
    assert len(devices) == DEVICES
    training = start_script(mig_env, TRAINING)
    other: subprocess.Popen[str] | None = None
    try:
        told = told_by(training, "holds")
        for name, option in (
            ("two slices of a rank", "gpus_per_worker=2: .*MIG devices .on node1"),
            ("two of a profile", "gpu_type='1g.10gb' with gpus_per_worker=2"),
            ("no such profile", "gpu_type='7g.80gb': .*MIG 1g.10gb' on node1"),
        ):
            kind, text = told[name]
            assert kind == "ConfigError"
            assert re.search(option, text), text
        gpus = [gpu for (gpu,), _, _ in told["gloo"]]
        assert all((visible, total) == (gpu, 3.0) for (gpu,), visible, total in told["gloo"])
        assert len({*gpus} & devices.keys()) == 3
        # The first two of the three have different GPUs.
        assert {devices[gpu][1] for gpu in gpus} == {parent for _, parent in devices.values()}
        for text in (told["said before the start"][0], told["nccl"][1]):
            assert re.search(r"ranks . and . have MIG devices of one GPU, GPU-.*\(.gloo.\)", text)
        assert told["nccl"][0] == "RankFailed"

        assert managers[PLUGIN].gpus() == (3, DEVICES)
        other = start_script(mig_env, OTHER_NAME)
        values, inventory = told_by(other, "other name")["other name"]
        # YARN does not know that both resources are the same devices.
        assert not {gpu for (gpu,) in values} & {*gpus}
        assert {gpu for (gpu,) in values} <= devices.keys()
        assert inventory["resource"] == NVIDIA
        assert inventory["gpus"]["used"] == 2 == managers[NVIDIA].gpus()[0]
        assert managers[PLUGIN].gpus()[0] == 3
        assert inventory["problems"] == []
        other.communicate("\n", timeout=HANG_SECONDS)
        other = None

        assert training.stdin is not None
        training.stdin.write("\n")
        training.stdin.flush()
        values, warnings = told_by(training, "large")["large"]
        assert {devices[gpu][0] for (gpu,) in values} == {"3g.40gb"}
        assert warnings == []
        training.communicate(timeout=HANG_SECONDS)
    finally:
        for script in filter(None, (training, other)):
            script.kill()
            script.communicate()


def test_tables_name_profiles_and_parents(mig_env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "hopsgpu.cli.main", "gpus"]
    said = subprocess.run(command, env=mig_env, capture_output=True, text=True, check=True).stdout
    assert "2 × Simulated A100 80GB MIG 3g.40gb of 2 GPUs" in said
    assert "6 × Simulated A100 80GB MIG 1g.10gb of 2 GPUs" in said
    named = {**mig_env, "HOPSGPU_GPU_RESOURCE": NVIDIA}
    answer = subprocess.run(
        [*command, "--json"], env=named, capture_output=True, text=True, check=True
    ).stdout
    cluster = json.loads(answer)
    assert (cluster["resource"], cluster["gpus"]["total"]) == (NVIDIA, DEVICES)
    assert cluster["types"] == [] and cluster["problems"] == []
    refused = subprocess.run(
        command,
        env={**named, "HOPSGPU_GPU_RESOURCE": "memory-mb"},
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 1 and "HOPSGPU_GPU_RESOURCE='memory-mb'" in refused.stderr
