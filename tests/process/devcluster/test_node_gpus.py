"""Real or simulated GPUs, and the nvidia-smi of a node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hopsgpu.devcluster.admin import MIG_AS_GPUS
from hopsgpu.devcluster.node_gpus import PlannedGpu, parse_query, plan_gpus
from hopsgpu.devcluster.nvidia_smi_standin import FIELDS, standin_script, wrapper_script
from hopsgpu.gpu.node import nvidia_smi
from tests.bounds import HANG_SECONDS

REAL = tuple(PlannedGpu(i, 7 - i, f"GPU-{i}", "NVIDIA <H100> & co", 81559) for i in range(4))


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(smi: Path, *args: str) -> subprocess.CompletedProcess[str]:
    # Without a PATH: the stand-in starts no other program.
    return subprocess.run(
        [str(smi), *args], env={}, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )


@pytest.fixture
def smi(tmp_path: Path) -> Path:
    return script(tmp_path / "nvidia-smi", standin_script(plan_gpus(tmp_path, 1, 2).nodes["node1"]))


@pytest.fixture
def no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    directory = tmp_path / "path"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory


@pytest.mark.parametrize("args", [("-x", "-q"), ("-q", "-x"), ("-qx",)])
def test_the_query_has_what_yarns_plugin_reads(smi: Path, args: tuple[str, ...]) -> None:
    said = run(smi, *args)
    assert said.returncode == 0
    root = ET.fromstring(said.stdout)
    assert root.findtext("driver_version")
    assert len(root.findall("gpu")) == 2
    for gpu in root.findall("gpu"):
        for path in (
            "product_name",
            "uuid",
            "minor_number",
            "utilization/gpu_util",
            "fb_memory_usage/used",
            "fb_memory_usage/free",
            "temperature/gpu_temp",
            "temperature/gpu_temp_max_threshold",
            "temperature/gpu_temp_slow_threshold",
        ):
            assert gpu.findtext(path), path
    assert [g.index for g in parse_query(said.stdout)] == [0, 1]


def test_csv_has_exactly_the_fields_asked_for(smi: Path, tmp_path: Path) -> None:
    first, second = plan_gpus(tmp_path, 1, 2).nodes["node1"]
    said = run(smi, "--query-gpu=index,uuid,memory.total,utilization.gpu", "--format=csv")
    assert said.stdout.splitlines() == [
        "index, uuid, memory.total [MiB], utilization.gpu [%]",
        f"0, {first.uuid}, 40960 MiB, 0 %",
        f"1, {second.uuid}, 40960 MiB, 0 %",
    ]
    said = run(smi, "--query-gpu=memory.used, name", "--format=csv,noheader,nounits")
    assert said.stdout.splitlines() == ["3, Simulated A100"] * 2
    said = run(smi, "--query-gpu=memory.used", "--format=csv,nounits,noheader", "-i", second.uuid)
    assert said.stdout.splitlines() == ["3"]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_answered(smi: Path, field: str) -> None:
    said = run(smi, f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", "1")
    assert said.returncode == 0
    assert said.stdout.strip()


def test_the_listing_and_the_processes(smi: Path) -> None:
    lines = run(smi, "-L").stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("GPU 1: Simulated A100 (UUID: GPU-")
    assert run(smi, "--id=1", "-L").stdout.splitlines() == lines[1:]
    said = run(smi, "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")
    assert (said.returncode, said.stdout) == (0, "")


def test_what_it_does_not_know_is_an_error(smi: Path) -> None:
    said = run(smi, "--query-gpu=index,nonsense", "--format=csv,noheader")
    assert said.returncode == 2
    assert "nonsense" in said.stdout
    assert run(smi, "-i", "7", "-L").returncode == 6
    assert run(smi, "--gpu-reset").returncode == 2


def test_simulated_uuids_are_stable_and_nobody_elses(tmp_path: Path) -> None:
    def uuids(root: Path) -> list[str]:
        return [g.uuid for gpus in plan_gpus(root, 3, 2).nodes.values() for g in gpus]

    assert uuids(tmp_path / "a") == uuids(tmp_path / "a")
    assert len(set(uuids(tmp_path / "a") + uuids(tmp_path / "b"))) == 12


def test_real_gpus_are_shared_out(no_path: Path, tmp_path: Path) -> None:
    script(no_path / "nvidia-smi", standin_script(REAL))
    plan = plan_gpus(tmp_path, 2, 2)
    assert plan.smi == str(no_path / "nvidia-smi")
    assert plan.nodes == {"node1": REAL[:2], "node2": REAL[2:]}
    assert plan.source == "real: 4 of this machine's 4"


@pytest.mark.parametrize(
    ("nodes", "each", "hint"),
    [(3, 2, "--nodes 3 --gpus-per-node 1"), (8, 1, "--nodes 1 --gpus-per-node 4")],
)
def test_too_few_real_gpus_are_said(
    no_path: Path, tmp_path: Path, nodes: int, each: int, hint: str
) -> None:
    script(no_path / "nvidia-smi", standin_script(REAL))
    plan = plan_gpus(tmp_path, nodes, each)
    assert plan.smi is None
    assert plan.source.startswith("simulated: this machine has 4 GPUs")
    assert f"{nodes * each} were requested" in plan.source
    assert hint in plan.source


@pytest.mark.parametrize(
    "text", ["#!/bin/sh\nexit 9\n", "#!/bin/sh\necho not xml\n", standin_script(REAL[:0]), None]
)
def test_an_nvidia_smi_that_does_not_answer(
    no_path: Path, tmp_path: Path, text: str | None
) -> None:
    if text:
        script(no_path / "nvidia-smi", text)
    plan = plan_gpus(tmp_path, 1, 1)
    assert (plan.smi, plan.source) == (None, "simulated: nvidia-smi does not answer")


def test_another_clusters_stand_in_is_no_real_gpu(no_path: Path, tmp_path: Path) -> None:
    script(no_path / "nvidia-smi", standin_script(plan_gpus(tmp_path, 1, 2).nodes["node1"]))
    assert plan_gpus(tmp_path, 1, 1).smi is None


def test_the_wrapper_shows_a_nodes_own_gpus(tmp_path: Path) -> None:
    real = script(tmp_path / "re al" / "nvidia-smi", standin_script(REAL))
    own = script(tmp_path / "own" / "nvidia-smi", wrapper_script(str(real), REAL[2:]))
    assert [line[:5] for line in run(own, "-L").stdout.splitlines()] == ["GPU 2", "GPU 3"]
    fields = ("--query-gpu=index", "--format=csv,noheader")
    assert run(own, *fields).stdout.split() == ["2", "3"]
    assert [g.index for g in parse_query(run(own, "-x", "-q").stdout)] == [0, 1]
    assert [g.uuid for g in parse_query(run(own, "-x", "-q").stdout)] == ["GPU-2", "GPU-3"]
    assert run(own, *fields, "-i", "0").stdout.split() == ["0"]
    assert len(run(own).stdout.splitlines()) == 2


def test_no_gpus(tmp_path: Path) -> None:
    plan = plan_gpus(tmp_path, 2, 0)
    assert plan.nodes == {"node1": (), "node2": ()}
    assert plan.source == "none"


def test_mig_devices_as_nvidia_smi_shows_them_and_as_yarn_counts_them(tmp_path: Path) -> None:
    (gpu,) = plan_gpus(tmp_path, 1, 1, ("3g.20gb", "1g.5gb")).nodes["node1"]
    smi = script(tmp_path / "nvidia-smi", standin_script((gpu,)))
    large, small = gpu.slices
    listing = nvidia_smi.read({"HOPSGPU_NVIDIA_SMI": str(smi)}, HANG_SECONDS)
    assert [(d.address, d.name, d.memory_mib, d.parent) for d in listing.devices] == [
        (large.uuid, "Simulated A100 MIG 3g.20gb", 19456, gpu.uuid),
        (small.uuid, "Simulated A100 MIG 1g.5gb", 4864, gpu.uuid),
    ]
    answers = [
        subprocess.run([smi, *options], capture_output=True, text=True, check=True).stdout
        for options in (["-L"], ["--query-gpu=mig.mode.current", "--format=csv,noheader"])
    ]
    assert f"  MIG 1g.5gb      Device  1: (UUID: {small.uuid})\n" in answers[0]
    assert answers[1] == "Enabled\n"

    # The program for YARN finds the node's nvidia-smi, and not itself.
    directory = tmp_path / "yarn"
    directory.mkdir()
    program = Path(shutil.copy(MIG_AS_GPUS, directory / "nvidia-smi"))
    environ = {"PATH": f"{directory}:{tmp_path}:{os.environ['PATH']}"}
    for options, count in ((["-x", "-q"], 2), (["-L"], 0)):
        ran = subprocess.run(
            [program, *options], env=environ, capture_output=True, text=True, check=True
        )
        if count:
            gpus = ET.fromstring(ran.stdout).findall("gpu")
            assert [(g.findtext("uuid"), g.findtext("minor_number")) for g in gpus] == [
                (large.uuid, "0"),
                (small.uuid, "0"),
            ]
            assert gpus[1].findtext("product_name") == "Simulated A100 MIG 1g.5gb"
            assert gpus[1].findtext("fb_memory_usage/total") == "4864 MiB"
        else:
            assert ran.stdout == answers[0]
    without = {"PATH": str(directory), "HOPSGPU_NVIDIA_SMI": str(tmp_path / "absent")}
    ran = subprocess.run(
        [sys.executable, program, "-x", "-q"], env=without, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (1, "") and "must be an executable" in ran.stderr
