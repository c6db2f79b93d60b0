"""The checks of `make gpu` against simulated GPUs: all that need no CUDA.

Stand-ins replace nvidia-smi and NVML, and the ranks compute on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hopsgpu.gpu.node.devices import list_devices
from tests import nvml_standin
from tests.gpu_machine import __main__ as program
from tests.gpu_machine.results import GpuMachine, Outcome
from tests.gpu_machine.runner import run_in_process
from tests.gpu_machine.situation import Situation
from tests.gpu_machine.steps import STEPS, Step
from tests.local_scripts import UUIDS, simulate_gpus

TRAINING = "training with DDP and a DataLoader"


@pytest.fixture
def simulated_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = simulate_gpus(tmp_path / "nvidia-smi", UUIDS[1:])
    nvml = nvml_standin.install(tmp_path / "nvml", "0")
    monkeypatch.setenv("HOPSGPU_NVIDIA_SMI", str(smi))
    monkeypatch.setenv("HOPSGPU_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("PYTHONPATH", str(nvml))


def machine_without_cuda(devices: object) -> GpuMachine:
    return GpuMachine(("Simulated A100",) * 2, 40960, "", "", "", "installed", "")


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(STEPS[:4], id="without-a-launch"),
        pytest.param(STEPS, id="all", marks=pytest.mark.soak),
    ],
)
def test_checks_pass_on_simulated_gpus(
    steps: Sequence[Step], simulated_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "describe_machine", machine_without_cuda)
    monkeypatch.setattr(program, "STEPS", steps)
    directory = tmp_path / "run"
    directory.mkdir()
    run = program.run_checks(list_devices().devices, directory, time.monotonic())
    expected = {s.name: Outcome.NOT_APPLICABLE if s.needs_cuda else Outcome.OK for s in steps}
    logs = [file.read_text() for file in directory.glob("*.log")]
    assert {check.name: check.outcome for check in run.checks} == expected, (run.checks, logs)


@pytest.mark.soak
def test_the_training_runs_on_cpus(simulated_gpus: None, tmp_path: Path) -> None:
    gpus = tuple(UUIDS[1:])
    situation = Situation(machine_without_cuda(None), gpus, gpus, (), {}, tmp_path)
    situation.save()
    step = next(step for step in STEPS if step.name == TRAINING)
    verdict = run_in_process(step, step.seconds, situation)
    assert verdict.outcome is Outcome.OK, situation.log_file(step.name).read_text()
    assert verdict.detail.startswith("2 ranks, loss ")


def test_the_software_of_this_machine_is_described(simulated_gpus: None) -> None:
    machine = program.describe_machine(list_devices().devices)
    assert machine.title == "2 × Simulated A100" and machine.driver
    assert machine.torch == torch.__version__
    assert (machine.torch_cuda or None) == torch.version.cuda
