"""Check hopsgpu on this machine's GPUs, and print one page: `python -m tests.gpu_machine`.

The exit code is 0 if all checks that apply passed, and 1 if one failed or had no time. It is 2 if
this machine has no GPU. `--record` also stores the results for docs/gpus.md.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hopsgpu.gpu.node import nvidia_smi
from hopsgpu.gpu.node.devices import (
    DriverError,
    GpuDevice,
    NoDriverError,
    list_devices,
    run_bounded,
)
from hopsgpu.gpu.node.health import BAD
from tests.gpu_machine.page import text_page
from tests.gpu_machine.results import (
    FAILED,
    NO_GPU,
    PASSED,
    GpuMachine,
    GpuRun,
    exit_code,
    record_run,
)
from tests.gpu_machine.runner import run_in_process, run_steps
from tests.gpu_machine.situation import Situation
from tests.gpu_machine.steps import STEPS, processes_on_gpus, used_memory

_LISTING_SECONDS = 20.0
_SOFTWARE_SECONDS = 180.0
_SOFTWARE = Path(__file__).with_name("software.py")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_machine", description=__doc__)
    parser.add_argument("--record", action="store_true", help="store the results for docs/gpus.md")
    should_record = parser.parse_args(arguments).record
    began = time.monotonic()
    try:
        devices = list_devices(_LISTING_SECONDS).devices
    except NoDriverError as error:
        return _refuse(f"this machine has no NVIDIA GPU: {error}", NO_GPU)
    except DriverError as error:
        return _refuse(f"the GPUs cannot be listed: {error}", FAILED)
    if not devices:
        return _refuse("this machine has no NVIDIA GPU: its driver lists none", NO_GPU)
    directory = Path(tempfile.mkdtemp(prefix="hopsgpu-gpu-"))
    run = run_checks(devices, directory, began)
    print(text_page(run))
    code = exit_code(run.checks)
    if code == PASSED:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"the logs of the checks are in {directory}")
    if should_record:
        _record(run)
    return code


def _refuse(reason: str, code: int) -> int:
    print(f"gpu: {reason}", file=sys.stderr)
    return code


def _record(run: GpuRun) -> None:
    # Only the development cluster and tests set this variable, mostly for simulated GPUs.
    if nvidia_smi.VARIABLE in os.environ:
        print(f"not recorded: {nvidia_smi.VARIABLE} is set, so the GPUs may be simulated")
    else:
        record_run(run)


def run_checks(devices: Sequence[GpuDevice], directory: Path, began: float) -> GpuRun:
    """Run all checks.

    Args:
        directory: an empty directory for logs and runs.
        began: when the program began, by time.monotonic.
    """
    usable = tuple(gpu.address for gpu in devices if gpu.verdict.state != BAD)
    situation = Situation(
        machine=describe_machine(devices),
        all_gpus=tuple(gpu.address for gpu in devices),
        usable_gpus=usable,
        pids_before=tuple(processes_on_gpus(devices)),
        memory_before=used_memory(usable),
        directory=directory,
    )
    situation.save()
    run_step = functools.partial(run_in_process, situation=situation)
    checks = run_steps(STEPS, situation, run_step, began)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return GpuRun(today, situation.machine, tuple(checks))


def describe_machine(devices: Sequence[GpuDevice]) -> GpuMachine:
    """Return the GPUs, and the versions of the driver, Python and PyTorch."""
    software = {"cuda": "", "torch": "", "torch_cuda": ""}
    try:
        # -P: modules beside the program must not hide those of the libraries.
        _, out, err = run_bounded([sys.executable, "-P", str(_SOFTWARE)], _SOFTWARE_SECONDS)
        software |= json.loads(out.strip().splitlines()[-1])
    except DriverError:
        software["torch_problem"] = f"no answer within {_SOFTWARE_SECONDS:.0f} s"
    except (ValueError, IndexError):
        software["torch_problem"] = err.strip()[-200:]
    return GpuMachine(
        gpus=tuple(gpu.name or "GPU" for gpu in devices),
        memory_mib=devices[0].memory_mib,
        driver=next((gpu.driver for gpu in devices if gpu.driver), ""),
        python=platform.python_version(),
        **software,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
