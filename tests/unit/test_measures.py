"""What ranks report, from the user's function to the driver, and what NVML tells of their GPUs."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hopsgpu
from hopsgpu.errors import ConfigError
from hopsgpu.worker import measures
from hopsgpu.worker.context import VARIABLE, Context, context
from hopsgpu.worker.gpu_events import GpuEvent
from hopsgpu.worker.gpus import GpuSample, GpuUse, idle_warning, sampling
from hopsgpu.worker.logs import follow_reports
from hopsgpu.worker.measures import Fold, Metrics, append, report_line, sample_line

SECONDS = 20.0
GPU = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A rank's file of reports; `context()` is that rank's."""
    described = tmp_path / "context.json"
    places = (tmp_path / "model", f"file://{tmp_path}/checkpoints")
    Context(1, 0, 2, "node1", (GPU,), "worker", "r", 0, *places).dump(described)
    monkeypatch.setenv(VARIABLE, str(described))
    return tmp_path / measures.FILE


def records(file: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def folded(file: Path) -> Metrics:
    """What the driver makes of a file of rank 1."""
    fold, metrics = Fold(), Metrics([0, 1])
    fold.take(file.read_bytes())
    metrics.take(1, fold.flush())
    return metrics


def test_a_report_reaches_the_driver_with_its_step(reports: Path) -> None:
    context().report(3, loss=0.5, accuracy=np.float32(0.25), done=True, self=1)
    context().report(step=np.int64(4), loss=torch.tensor(0.125, requires_grad=True))
    assert [record["step"] for record in records(reports)] == [3, 4]
    assert folded(reports).last() == (
        {},
        {"step": 4, "loss": 0.125, "accuracy": 0.25, "done": 1.0, "self": 1.0},
    )


def test_nan_and_the_infinities_survive_json(reports: Path) -> None:
    context().report(0, nan=math.nan, up=math.inf, down=-math.inf)
    assert records(reports)[0]["metrics"] == {"nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    last = folded(reports).last()[1]
    assert math.isnan(last["nan"]) and (last["up"], last["down"]) == (math.inf, -math.inf)


def test_a_name_that_is_no_utf8_can_be_shown(reports: Path) -> None:
    context().report(0, **{os.fsdecode(b"caf\xe9"): 1.0})
    (name,) = folded(reports).last()[1].keys() - {"step"}
    assert name == r"caf\udce9"


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (-1, {}, r"step=-1.*\[0, 2\*\*63\)"),
    (2**63, {}, "step=9223372036854775808"),
    (10**5000, {}, "step=an int too long"),
    (1.5, {}, "step=1.5"),
    (True, {}, "step=True"),
    ("3", {}, "step='3'"),
    (0, {"loss": "0.5"}, "loss='0.5'"),
    (0, {"loss": b"1"}, "loss=b'1'"),
    (0, {"loss": None}, "loss=None"),
    (0, {"loss": 1j}, "loss=1j"),
    (0, {"loss": [1.0]}, r"loss=\[1.0\]"),
    (0, {"loss": 10**400}, "loss=1000"),
    (0, {"loss": torch.ones(2)}, "loss=tensor"),
    (0, {"loss": np.ones(2)}, "loss=array"),
    (0, {"fine": 1.0, "": 2.0}, "named ''"),
    (0, {"x" * 201: 1.0}, "named 'xxx.*1 to 200"),
    (0, {f"m{number}": 1.0 for number in range(1001)}, "1001 metrics.*1000"),
]


@pytest.mark.parametrize(("step", "given", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_a_bad_report_is_named_and_changes_nothing(
    reports: Path, monkeypatch: pytest.MonkeyPatch, step: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        context().report(step, **given)
    assert not reports.exists()
    # Outside a gang the same is refused.
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=said):
        context().report(step, **given)


def test_an_error_of_the_gpu_is_not_called_a_bad_report(reports: Path) -> None:
    class Failing:
        """A tensor on a GPU on which an earlier kernel failed."""

        def detach(self) -> Failing:
            return self

        def numel(self) -> int:
            return 1

        def __float__(self) -> float:
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        context().report(0, loss=Failing())
    assert not reports.exists()


def test_a_loss_with_a_gradient_is_reported_without_a_warning(reports: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context().report(0, loss=torch.ones(1, requires_grad=True).sum())
    assert folded(reports).last()[1] == {"step": 0, "loss": 1.0}


def test_outside_a_gang_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("RANK", "0")
    hopsgpu.context().report(0, loss=1.0)
    assert list(tmp_path.iterdir()) == []


def test_threads_and_forked_children_report_whole_lines(reports: Path) -> None:
    def report(thread: int) -> None:
        for step in range(300):
            context().report(step, **{f"t{thread}": step, "long" * 40: 1.0})

    code = (
        "import hopsgpu\n"
        "for step in range(300): hopsgpu.context().report(step, child=step, filler=1.0)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    threads = [threading.Thread(target=report, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert child.wait(SECONDS) == 0
    assert len(records(reports)) == 1500
    last = folded(reports).last()[1]
    assert all(last[name] == 299 for name in ("t0", "t1", "t2", "t3", "child"))


def follow_while(file: Path, work: Callable[[], None]) -> tuple[Metrics, int]:
    """What comes of a file while something is done in a thread, and in how many messages."""
    metrics = Metrics([0])
    sent = 0

    async def go() -> None:
        nonlocal sent
        ended = asyncio.Event()

        async def send(content: bytes) -> None:
            nonlocal sent
            sent += 1
            metrics.take(0, content)

        following = asyncio.create_task(follow_reports(file, ended, send))
        await asyncio.to_thread(work)
        ended.set()
        await following

    asyncio.run(go())
    return metrics, sent


def test_what_a_killed_rank_reported_is_kept(reports: Path) -> None:
    code = (
        "import hopsgpu, os, signal\n"
        "for step in range(2000): hopsgpu.context().report(step, loss=1 / (step + 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    def work() -> None:
        assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL

    metrics, sent = follow_while(reports, work)
    assert metrics.last()[0] == {"step": 1999, "loss": 1 / 2000}
    assert len(records(reports)) == 2000
    assert 0 < sent < 100


def test_many_reports_within_a_moment_are_one_message(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(report_line(n, {"loss": n, "x" * 99: 0}, 0.0) for n in range(10_000)))
    metrics = Metrics([0])
    sent: list[float] = []

    async def go() -> None:
        ended = asyncio.Event()
        ended.set()

        async def send(content: bytes) -> None:
            metrics.take(0, content)
            sent.append(metrics.last()[0]["step"])

        await follow_reports(file, ended, send, clock=lambda: 7.0)

    asyncio.run(go())
    # The first chunk's at once, and then all others': the clock stands still.
    assert len(sent) == 2 and sent[1] == 9999


def test_a_rank_that_reports_nothing_sends_nothing(tmp_path: Path) -> None:
    metrics, sent = follow_while(tmp_path / "metrics.jsonl", lambda: None)
    assert (metrics.last(), sent) == (({},), 0)


def test_a_line_that_a_full_disk_cut_off_harms_no_other(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, report_line(1, {"loss": 1.0}, 0.0))
    append(file, b'{"time": 1, "st\n')
    append(file, report_line(2, {"accuracy": 2.0}, 0.0))
    append(file, b'{"time": 1, "step": 3, "metr')
    assert folded(file).last()[1] == {"step": 2, "loss": 1.0, "accuracy": 2.0}


def test_names_without_end_do_not_fill_the_drivers_memory() -> None:
    metrics = Metrics([0])
    for step in range(3000):
        fold = Fold()
        fold.take(report_line(step, {f"loss{step}": 1.0, "loss": step}, 0.0))
        metrics.take(0, fold.flush())
    last = metrics.last()[0]
    assert len(last) == 1001 and last["loss"] == last["step"] == 2999
    assert "more than 1000 different metrics" in metrics.warnings(0, "node1")[0]


class FakeNvml:
    """The calls of pynvml that are used, over GPUs that a test changes."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_GpuIsLost(NVMLError):
        pass

    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *gpus: str) -> None:
        self.xids: list[tuple[str, int]] = []
        self.watched: set[int] = set()
        self.event_sets = 0
        self.gpus = list(gpus)
        self.utilisation = 0
        self.problem: Exception | None = None
        self.unsupported: set[str] = set()
        self.open = 0
        self.hang: threading.Event | None = None

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlEventSetCreate(self) -> object:
        self.event_sets += 1
        return self

    def nvmlEventSetFree(self, events: object) -> None:
        self.event_sets -= 1

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: int) -> int:
        raise self.NVMLError("Invalid Argument")

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.gpus[handle]

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:
        assert events is self and kinds == self.nvmlEventTypeXidCriticalError
        if "events" in self.unsupported:
            raise self.NVMLError_NotSupported("Not Supported")
        self.watched.add(handle)

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> Any:
        assert milliseconds == 0
        while self.xids:
            gpu, xid = self.xids.pop(0)
            if (device := self.gpus.index(gpu)) in self.watched:
                return SimpleNamespace(device=device, eventData=xid)
        raise self.NVMLError("Timeout")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.gpus:
            raise self.NVMLError("Not Found")
        return self.gpus.index(uuid)

    def _called(self, name: str, handle: int) -> None:
        assert self.open > 0 and handle < len(self.gpus)
        if self.hang is not None:
            self.hang.wait()
        if self.problem is not None:
            raise self.problem
        if name in self.unsupported:
            raise self.NVMLError_NotSupported("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._called("utilisation", handle)
        return SimpleNamespace(gpu=self.utilisation, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._called("memory", handle)
        return SimpleNamespace(total=80 << 30, used=(1 + handle) << 30, free=0)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._called("power", handle)
        return 301_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        self._called("temperature", handle)
        return 61


class Samples:
    """What a sampler told, and a word when something more has come."""

    def __init__(self) -> None:
        self.told: list[GpuSample] = []
        self._more = threading.Condition()

    def __call__(self, sample: GpuSample) -> None:
        with self._more:
            self.told.append(sample)
            self._more.notify_all()

    async def until(self, count: int) -> None:
        def wait() -> bool:
            with self._more:
                return self._more.wait_for(lambda: len(self.told) >= count, SECONDS)

        assert await asyncio.to_thread(wait)


def sampled(nvml: Any, gpus: list[str], count: int) -> list[GpuSample]:
    """The first samples that a sampler tells."""
    samples = Samples()

    async def go() -> None:
        async with sampling(gpus, samples, nvml, seconds=0.01):
            await samples.until(count)

    asyncio.run(go())
    assert "hopsgpu-nvml" not in {thread.name for thread in threading.enumerate()}
    return samples.told


def test_gpus_are_sampled_by_uuid_in_the_units_that_are_promised() -> None:
    nvml = FakeNvml(GPU, "GPU-2")
    nvml.utilisation = 87
    told = sampled(nvml, ["GPU-2", GPU], 4)
    assert [sample.uuid for sample in told[:4]] == ["GPU-2", GPU] * 2
    assert told[0].readings() == {
        "utilisation": 0.87,
        "memory_used": 2 << 30,
        "memory_total": 80 << 30,
        "power": 301.5,
        "temperature": 61,
    }
    assert nvml.open == 0


def test_a_simulated_gpu_is_told_of_once_and_not_sampled() -> None:
    told = sampled(FakeNvml(GPU), ["GPU-sim-0", GPU], 4)
    assert [s.problem for s in told if s.uuid == "GPU-sim-0"] == [
        "NVML does not know it: Not Found"
    ]
    assert all(sample.utilisation == 0 for sample in told[1:])


def test_what_a_gpu_does_not_support_is_left_out() -> None:
    nvml = FakeNvml(GPU)
    nvml.unsupported = {"utilisation", "power"}
    (first, *_) = sampled(nvml, [GPU], 1)
    assert set(first.readings()) == {"memory_used", "memory_total", "temperature"}
    assert GpuUse().after(first).utilisation is None


def test_a_lost_gpu_is_told_of_once_and_asked_again() -> None:
    nvml = FakeNvml(GPU)
    samples = Samples()

    async def go() -> None:
        async with sampling([GPU], samples, nvml, seconds=0.01):
            await samples.until(1)
            nvml.problem = nvml.NVMLError("GPU is lost")
            while not samples.told[-1].problem:
                await samples.until(len(samples.told) + 1)
            nvml.problem = None
            await samples.until(len(samples.told) + 1)

    asyncio.run(go())
    problems = [sample.problem for sample in samples.told if sample.problem]
    assert problems == ["GPU is lost"] and not samples.told[-1].problem


def befallen(nvml: FakeNvml, gpus: list[str], change: Callable[[], None]) -> tuple[Any, int]:
    """What befell GPUs after a change, and how often one was said to be beyond hope."""
    samples, broken = Samples(), threading.Semaphore(0)

    async def go() -> Sequence[GpuEvent]:
        watching = sampling(gpus, samples, nvml, seconds=0.01, broken=broken.release)
        async with watching as events:
            await samples.until(len(gpus))
            change()
            await samples.until(len(samples.told) + len(gpus))
        return events

    events = list(asyncio.run(go()))
    assert nvml.event_sets == 0
    times = 0
    while broken.acquire(blocking=False):
        times += 1
    return events, times


def test_xid_events_are_told_with_what_they_mean() -> None:
    nvml = FakeNvml(GPU, "GPU-2", "GPU-3")
    change = [("GPU-2", 31), ("GPU-3", 79), (GPU, 79)]
    events, broken = befallen(nvml, [GPU, "GPU-2"], lambda: nvml.xids.extend(change))
    assert [(event.gpu, event.state) for event in events] == [("GPU-2", "healthy"), (GPU, "bad")]
    assert events[1].reason.startswith("XID 79, GPU has fallen off the bus: ")
    assert broken == 1


def test_an_event_that_comes_with_the_end_is_not_missed() -> None:
    nvml = FakeNvml(GPU)

    async def go() -> Sequence[GpuEvent]:
        async with sampling([GPU], samples := Samples(), nvml, seconds=60) as events:
            await samples.until(1)
            nvml.xids.append((GPU, 48))
        return events

    (event,) = asyncio.run(go())
    assert event.is_fatal and event.reason.startswith("XID 48")


def test_a_lost_gpu_is_beyond_hope() -> None:
    nvml = FakeNvml(GPU)

    def lose() -> None:
        nvml.problem = nvml.NVMLError_GpuIsLost("GPU is lost")

    samples, broken = Samples(), threading.Event()

    async def go() -> Sequence[GpuEvent]:
        async with sampling([GPU], samples, nvml, seconds=0.01, broken=broken.set) as events:
            await samples.until(1)
            lose()
            assert await asyncio.to_thread(broken.wait, SECONDS)
        return events

    (event,) = asyncio.run(go())
    assert event.is_fatal and "the driver has lost it (GPU is lost)" in event.reason


def test_a_driver_without_events_is_sampled_all_the_same() -> None:
    nvml = FakeNvml(GPU)
    nvml.unsupported = {"events"}
    assert befallen(nvml, [GPU], lambda: nvml.xids.append((GPU, 79))) == ([], 0)


def test_a_call_that_hangs_keeps_nobody() -> None:
    nvml = FakeNvml(GPU)
    nvml.hang = threading.Event()
    samples = Samples()

    async def go() -> None:
        async with sampling([GPU], samples, nvml, seconds=0.01):
            pass

    asyncio.run(asyncio.wait_for(go(), SECONDS))
    (thread,) = (t for t in threading.enumerate() if t.name == "hopsgpu-nvml")
    assert thread.daemon
    nvml.hang.set()
    thread.join(SECONDS)
    assert samples.told == []  # it was over by then


def test_a_full_disk_ends_the_sampling_alone() -> None:
    nvml = FakeNvml(GPU)
    full = threading.Event()

    def tell(sample: GpuSample) -> None:
        full.set()
        raise OSError(28, "No space left on device")

    async def go() -> None:
        async with sampling([GPU], tell, nvml, seconds=0.01):
            assert await asyncio.to_thread(full.wait, SECONDS)

    asyncio.run(go())
    assert nvml.open == 0


def test_without_a_driver_the_reason_is_known() -> None:
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        said = f"NVML cannot be had: {error}"
    else:
        nvml.nvmlShutdown()
        said = "NVML does not know it"
    (first,) = sampled(None, [GPU], 1)
    assert first.problem.startswith(said)


def test_without_pynvml_the_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (first,) = sampled(None, [GPU], 1)
    assert "nvidia-ml-py is not installed" in first.problem


def test_without_gpus_there_is_no_thread() -> None:
    async def go() -> set[str]:
        async with sampling([], Samples(), FakeNvml()):
            return {thread.name for thread in threading.enumerate()}

    assert "hopsgpu-nvml" not in asyncio.run(go())


def test_samples_come_to_a_mean_a_peak_and_an_idle_share() -> None:
    use = functools.reduce(
        GpuUse.after,
        [
            GpuSample(10.0, GPU, utilisation=0.0, memory_used=5),
            GpuSample(11.0, GPU, utilisation=0.5, memory_used=9),
            GpuSample(12.0, GPU, problem="GPU is lost"),
            GpuSample(14.0, GPU, utilisation=1.0, memory_used=7),
            GpuSample(15.0, GPU, utilisation=0.0),
        ],
        GpuUse(),
    )
    assert (use.utilisation, use.idle_share) == (0.375, 0.5)
    assert (use.peak_memory, use.seconds, use.problem) == (9, 5.0, "GPU is lost")
    assert (GpuUse().utilisation, GpuUse().idle_share, GpuUse().seconds) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("share", "seconds", "said"),
    [(0.97, 10.0, "97%"), (0.95, 3600.0, "95%"), (0.94, 60.0, ""), (1.0, 9.9, ""), (None, 60, "")],
)
def test_an_idle_gpu_is_said_so_with_the_share(
    share: float | None, seconds: float, said: str
) -> None:
    warning = idle_warning(3, "node2", GPU, share, seconds)
    if not said:
        assert warning is None
    else:
        assert warning is not None
        assert warning.startswith(f"rank 3 on node2: {GPU} idled for {said} of {seconds:.0f} s")


def test_samples_travel_with_the_reports(reports: Path) -> None:
    context().report(7, loss=1.0)
    for second in range(31):
        utilisation = 0.9 if second == 5 else 0.0
        used = 70 if second == 5 else second
        sample = GpuSample(100.0 + second, GPU, utilisation, used, 80, 250.5, 60)
        append(reports, sample_line(sample))
        append(reports, sample_line(GpuSample(100.0 + second, "GPU-2", 0.5)))
    append(reports, sample_line(GpuSample(100.0, "GPU-sim", problem="NVML does not know it")))
    metrics = folded(reports)
    assert metrics.last()[1] == {
        "step": 7,
        "loss": 1.0,
        "gpu.0.utilisation": 0.0,
        "gpu.0.memory_used": 30,
        "gpu.0.memory_peak": 70,
        "gpu.0.memory_total": 80,
        "gpu.0.power": 250.5,
        "gpu.0.temperature": 60,
        "gpu.1.utilisation": 0.5,
    }
    assert metrics.utilisation(1) == pytest.approx((0.9 / 31 + 0.5) / 2)
    assert metrics.utilisation(0) is None
    assert metrics.gpus(1)[GPU].peak_memory == 70
    (warning,) = metrics.warnings(1, "node2")
    assert f"{GPU} idled for 97% of 30 s" in warning


def test_a_report_takes_microseconds_and_waits_for_nobody(reports: Path) -> None:
    """Nobody reads the file; 20,000 reports fill no queue."""
    asked = context()
    for step in range(20_000):
        asked.report(step, loss=0.1)
    assert len(records(reports)) == 20_000
    assert reports.stat().st_mode & 0o077 == 0
