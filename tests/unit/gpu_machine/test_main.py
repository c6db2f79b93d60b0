"""`python -m tests.gpu_machine` where there is no GPU, or none that can be listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.gpu.node.devices import GpuDevice, HungDriverError, Listing, NoDriverError
from tests.gpu_machine import __main__ as program
from tests.gpu_machine.results import FAILED, NO_GPU, PASSED, GpuRun, Outcome
from tests.unit.gpu_machine.machines import run_of


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (NoDriverError("no nvidia-smi"), NO_GPU, "gpu: this machine has no NVIDIA GPU: no nvidia"),
        (HungDriverError("it hangs"), FAILED, "gpu: the GPUs cannot be listed: it hangs"),
    ],
)
def test_without_a_list_of_gpus(
    error: Exception,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(seconds: float) -> Listing:
        raise error

    monkeypatch.setattr(program, "list_devices", refuse)
    assert program.main(["--record"]) == code
    assert capsys.readouterr().err.startswith(text)


def test_a_driver_without_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "list_devices", lambda seconds: Listing(()))
    assert program.main([]) == NO_GPU
    assert "its driver lists none" in capsys.readouterr().err


@pytest.mark.parametrize("is_simulated", [True, False])
@pytest.mark.parametrize(
    ("outcome", "code"), [(Outcome.OK, PASSED), (Outcome.FAILED, FAILED), (Outcome.NOT_RUN, FAILED)]
)
def test_a_run(
    outcome: Outcome,
    code: int,
    is_simulated: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded: list[GpuRun] = []
    run, directories = run_of(outcome), list[Path]()

    def run_checks(devices: object, directory: Path, began: float) -> GpuRun:
        directories.append(directory)
        return run

    if is_simulated:
        monkeypatch.setenv("HOPSGPU_NVIDIA_SMI", "/simulated")
    else:
        monkeypatch.delenv("HOPSGPU_NVIDIA_SMI", raising=False)
    monkeypatch.setattr(program, "list_devices", lambda seconds: Listing((GpuDevice("GPU-1"),)))
    monkeypatch.setattr(program, "run_checks", run_checks)
    monkeypatch.setattr(program, "record_run", recorded.append)
    assert program.main(["--record"]) == code
    assert recorded == ([] if is_simulated else [run])
    # The logs stay only if they can explain something.
    assert directories[0].exists() is (code != PASSED)
    assert (str(directories[0]) in capsys.readouterr().out) is (code != PASSED)
