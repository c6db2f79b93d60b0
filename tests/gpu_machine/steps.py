"""The checks of a machine with GPUs; `python -m tests.gpu_machine.steps NAME DIRECTORY` runs one.

Each check runs in a process of its own. So its time limit holds even if the driver hangs, and a
crash ends no other check.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hopsgpu
from hopsgpu.core.gpu_usage import GpuSample
from hopsgpu.gpu.node import nvidia_smi
from hopsgpu.gpu.node.devices import DriverError, GpuDevice, NoDriverError, list_devices
from hopsgpu.gpu.node.leases import VARIABLE, LeaseError, read_leases
from hopsgpu.gpu.sampling import sampling
from hopsgpu.gpu.script_archive import pack_scripts
from tests.gpu_machine import rank_functions
from tests.gpu_machine.results import Verdict, as_text
from tests.gpu_machine.situation import Situation
from tests.gpu_machine.verdicts import (
    LeaseFacts,
    Leftovers,
    judge_discovery,
    judge_health,
    judge_idle,
    judge_lease,
    judge_out_of_memory,
    judge_release,
    judge_sampling,
    judge_sums,
    judge_training,
    reject,
)
from tests.matrix.behaviours import first_line

ROOT = Path(__file__).resolve().parents[2]
_HEALTH_CHECK = ROOT / "yarn-scripts" / "gpu-health-check"
# The discovery script leases GPUs for the process that runs it, as for an executor.
_HOLDER = (
    "import subprocess, sys, time; subprocess.run(sys.argv[1:], check=True);"
    "print('leased', flush=True); time.sleep(600)"
)
# A request that does not wait for leased GPUs as long as an executor does.
_SECOND = (
    "import sys; from hopsgpu.gpu.node.discovery_script import WaitLimits, main;"
    "sys.exit(main(1, WaitLimits(leased=1.0, bad=0.0)))"
)
_DRIVER_SECONDS = 20.0
_FREE_SECONDS = 10.0
_POLL_SECONDS = 0.1
_SAMPLES = 3
# Without persistence mode, the driver initialises each GPU again.
_NVML_SECONDS = 5.0
_TRAINING_SECONDS = 5.0
_IDLE_WARNING_SECONDS = 3.0
_IDLE_SECONDS = 9.0
_LAUNCH_SECONDS = 50.0


@dataclass(frozen=True)
class Step:
    """A check.

    Attributes:
        name: as the page names it.
        seconds: time limit.
        needs_cuda: whether it needs a PyTorch that has CUDA.
        needs_two_gpus: whether it needs two usable GPUs that are no MIG devices.
        needs_idle_gpus: whether other programs that compute on the GPUs would change its result.
    """

    name: str
    seconds: float
    check: Callable[[Situation], Verdict]
    needs_cuda: bool = False
    needs_two_gpus: bool = False
    needs_idle_gpus: bool = False


def check_discovery(situation: Situation) -> Verdict:
    listed = [gpu.address for gpu in list_devices(_DRIVER_SECONDS).devices]
    by_tool = _list_by_tool()
    with tempfile.TemporaryDirectory(dir=situation.directory) as scratch:
        script = unpack_scripts(Path(scratch)) / f"gpus-{len(listed)}"
        ran = subprocess.run(
            [sys.executable, script],
            cwd=scratch,
            env=_with_leases_in(Path(scratch)),
            capture_output=True,
            text=True,
            check=False,
        )
    addresses = None if by_tool is None else [gpu.address for gpu in by_tool]
    return judge_discovery(ran.returncode, ran.stdout, ran.stderr, listed, addresses)


def check_health(situation: Situation) -> Verdict:
    devices = list_devices(_DRIVER_SECONDS).devices
    command = [sys.executable, str(_HEALTH_CHECK), str(_DRIVER_SECONDS)]
    # The program records a hang of the driver in TMPDIR, where a real health check may find it.
    environ = {**os.environ, "TMPDIR": str(situation.directory)}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return judge_health(devices, _list_by_tool(), ran.stdout)


def _list_by_tool() -> Sequence[GpuDevice] | None:
    """Return the GPUs that nvidia-smi lists; None if it is not installed."""
    try:
        return nvidia_smi.read(os.environ, _DRIVER_SECONDS).devices
    except NoDriverError:
        return None


def unpack_scripts(directory: Path) -> Path:
    """Unpack the archive of the discovery script, as YARN does; return its directory."""
    archive = pack_scripts(directory / "scripts.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(directory / "scripts", filter="data")
    return directory / "scripts"


def _with_leases_in(directory: Path) -> dict[str, str]:
    """Return an environment with leases of its own, so that no other user's gang has to wait."""
    return {**os.environ, VARIABLE: str(directory / "leases")}


def check_lease(situation: Situation) -> Verdict:
    with tempfile.TemporaryDirectory(dir=situation.directory) as scratch:
        return judge_lease(situation.all_gpus, _lease_and_kill(situation, Path(scratch)))


def _lease_and_kill(situation: Situation, scratch: Path) -> LeaseFacts:
    environ = _with_leases_in(scratch)
    script = unpack_scripts(scratch) / f"gpus-{len(situation.all_gpus)}"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, sys.executable, script],
        cwd=scratch,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        # The second line says that the script has ended; the end of the output, that it failed.
        holder.stdout.readline()
        holder.stdout.readline()
        leased = held_leases(environ)
        second = subprocess.run(
            [sys.executable, "-c", _SECOND],
            cwd=scratch,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        holder.kill()
        holder.wait()
        killed_at = time.monotonic()
    is_free = wait_until(lambda: not held_leases(environ), _FREE_SECONDS)
    seconds = time.monotonic() - killed_at if is_free else None
    return LeaseFacts(leased, second.returncode, second.stderr, seconds)


def held_leases(environ: dict[str, str]) -> list[str]:
    return [lease.address for lease in read_leases(environ) if lease.is_held]


def wait_until(is_true: Callable[[], bool], seconds: float) -> bool:
    """Poll until a condition is true, or some seconds have passed; return whether it is."""
    deadline = time.monotonic() + seconds
    while not (result := is_true()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return result


def check_sampling(situation: Situation) -> Verdict:
    gpus = situation.usable_gpus
    return judge_sampling(gpus, sample_gpus(gpus, _SAMPLES))


def sample_gpus(gpus: Sequence[str], count: int) -> list[GpuSample]:
    """Return so many samples of each GPU, one a second; fewer if NVML reports no more in time."""
    samples: list[GpuSample] = []
    deadline = time.monotonic() + _NVML_SECONDS + count

    async def collect() -> None:
        async with sampling(gpus, samples.append):
            while len(samples) < count * len(gpus) and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)

    asyncio.run(collect())
    return samples


@contextlib.contextmanager
def local_session(**conf: str) -> Iterator[None]:
    """Start a session on a local master, and stop it."""
    properties = {"spark.ui.enabled": "false", **conf}
    spark = hopsgpu.session("gpu-machine", master="local[2]", conf=properties)
    try:
        yield
    finally:
        spark.stop()


def check_launch(situation: Situation) -> Verdict:
    return _add_up(situation, "gloo")


def check_nccl(situation: Situation) -> Verdict:
    return _add_up(situation, "nccl")


def _add_up(situation: Situation, backend: str) -> Verdict:
    with local_session():
        result = hopsgpu.launch(
            rank_functions.add_up,
            args=(backend,),
            workers=situation.workers,
            run_timeout=_LAUNCH_SECONDS,
            progress="lines",
        )
    return judge_sums(result.values, backend)


def check_out_of_memory(situation: Situation) -> Verdict:
    with local_session():
        try:
            hopsgpu.launch(
                rank_functions.ask_for_too_much_memory,
                workers=1,
                run_timeout=_LAUNCH_SECONDS,
                progress="lines",
            )
        except hopsgpu.RankFailed as error:
            return judge_out_of_memory(str(error), first_line(error.summary), error.gpus)
    return reject("the rank got more memory than its GPU has")


def check_training(situation: Situation) -> Verdict:
    device = situation.device_type
    with local_session():
        result = hopsgpu.launch(
            rank_functions.train,
            args=(device, _TRAINING_SECONDS),
            workers=situation.workers,
            memory_per_worker="8g",
            run_timeout=_LAUNCH_SECONDS,
            progress="lines",
        )
    return judge_training(result.values, [rank.gpu_utilisation for rank in result.ranks], device)


def check_idle_warning(situation: Situation) -> Verdict:
    with local_session(**{"spark.hopsgpu.idle_warning": f"{_IDLE_WARNING_SECONDS:g}s"}):
        result = _hold_gpus(situation, _IDLE_SECONDS)
    return judge_idle(result.warnings, _IDLE_WARNING_SECONDS)


def check_release(situation: Situation) -> Verdict:
    with local_session():
        result = _hold_gpus(situation, 1.0)
        returned_at = time.monotonic()
        pids = [rank.pid for rank in result.ranks]
        gpus = [gpu for rank in result.ranks for gpu in rank.gpus]
        wait_until(lambda: not _leftovers(situation, pids, gpus).sentences(), _FREE_SECONDS)
        seconds = time.monotonic() - returned_at
        leftovers = _leftovers(situation, pids, gpus)
    return judge_release(leftovers, result.timeline.released is not None, seconds)


def _hold_gpus(situation: Situation, seconds: float) -> hopsgpu.GangResult:
    return hopsgpu.launch(
        rank_functions.hold_gpu,
        args=(situation.device_type, seconds),
        workers=situation.workers,
        run_timeout=_LAUNCH_SECONDS,
        progress="lines",
    )


def _leftovers(situation: Situation, pids: Sequence[int], gpus: Sequence[str]) -> Leftovers:
    on_gpus = processes_on_gpus(list_devices(_DRIVER_SECONDS).devices)
    leased = held_leases(dict(os.environ))
    before = situation.memory_before
    return Leftovers(
        rank_pids=[pid for pid in pids if Path(f"/proc/{pid}").exists()],
        gpu_pids=[pid for pid in on_gpus if pid not in situation.pids_before],
        leased=[gpu for gpu in gpus if gpu in leased],
        memory={
            gpu: used - before[gpu]
            for gpu, used in used_memory(gpus).items()
            # Other programs may allocate memory meanwhile.
            if gpu in before and not situation.pids_before
        },
    )


def processes_on_gpus(devices: Sequence[GpuDevice]) -> list[int]:
    """Return the visible processes that compute on the GPUs."""
    return [process.pid for gpu in devices for process in gpu.processes]


def used_memory(gpus: Sequence[str]) -> dict[str, int]:
    """Return the bytes in use on each GPU, without those of which NVML does not report them."""
    samples = sample_gpus(gpus, 1)
    return {s.uuid: s.memory_used for s in samples if s.memory_used is not None}


# In this order: what later checks build on comes first.
STEPS = (
    Step("discovery", 60.0, check_discovery),
    Step("health", 60.0, check_health),
    Step("lease", 45.0, check_lease),
    Step("sampling", 20.0, check_sampling),
    Step("launch on a local master", 60.0, check_launch),
    Step("NCCL between two GPUs", 60.0, check_nccl, needs_cuda=True, needs_two_gpus=True),
    Step("CUDA out of memory is named", 60.0, check_out_of_memory, needs_cuda=True),
    Step("training with DDP and a DataLoader", 60.0, check_training, needs_cuda=True),
    Step("warning of idle GPUs", 60.0, check_idle_warning, needs_idle_gpus=True),
    Step("release", 60.0, check_release),
)


def main(name: str, directory: Path) -> None:
    """Run a check, and write its verdict into the directory."""
    situation = Situation.load(directory)
    check = next(step.check for step in STEPS if step.name == name)
    try:
        verdict = check(situation)
    except hopsgpu.RankFailed as error:
        traceback.print_exc()
        # The summary leaves out where the rank was, so that the error fits into the line.
        verdict = reject(first_line(f"a rank failed: {error.summary}"))
    except (hopsgpu.HopsGpuError, DriverError, LeaseError, OSError) as error:
        traceback.print_exc()
        verdict = reject(first_line(f"{type(error).__name__}: {error}"))
    situation.verdict_file(name).write_text(as_text(verdict), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
