"""Samples and events of a rank's GPUs, from a stand-in for pynvml."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.core.gpu_usage import GpuSample, GpuUsage
from hopsgpu.gpu import sampling as sampling_module
from hopsgpu.gpu.sampling import NOT_INSTALLED, Observations
from tests.bounds import HANG_SECONDS

# Wait long: on a busy machine, a thread may not get a core within a second.
sampling = functools.partial(sampling_module.sampling, join_seconds=HANG_SECONDS)
GPU = "GPU-11111111-2222-3333-4444-555555555555"

RESERVED = 480 << 20


class FakeNvml:
    """The calls of pynvml that are used, over GPUs that a test changes."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        value = 999

    class NVMLError_NotSupported(NVMLError):
        value = 3

    class NVMLError_GpuIsLost(NVMLError):
        value = 15

    class NVMLError_ResetRequired(NVMLError):
        value = 16

    class NVMLError_FunctionNotFound(NVMLError):
        value = 13

    class NVMLError_ArgumentVersionMismatch(NVMLError):
        value = 25

    nvmlEventTypeXidCriticalError = 8
    nvmlMemory_v2 = 2 << 24

    def __init__(self, *gpus: str) -> None:
        self.xids: list[tuple[str, int]] = []
        self.watched: set[int] = set()
        self.event_sets = 0
        self.gpus = list(gpus)
        self.utilisation = 0
        self.problem: Exception | None = None
        self.unsupported: set[str] = set()
        self.lost: set[str] = set()
        self.open = 0
        self.hang: threading.Event | None = None
        self.hangs = threading.Event()

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlEventSetCreate(self) -> object:
        if "event sets" in self.unsupported:
            raise self.NVMLError("Function Not Found")
        self.event_sets += 1
        return self

    def nvmlEventSetFree(self, events: object) -> None:
        self.event_sets -= 1

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: int) -> int:
        raise self.NVMLError("Invalid Argument")

    def _answering(self, handle: int) -> int:
        if self.gpus[handle] in self.lost:
            raise self.NVMLError_GpuIsLost("GPU is lost")
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.gpus[self._answering(handle)]

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return self._answering(index)

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
        # As NVML does, which tries one after another and stops at one that is lost.
        for handle in range(len(self.gpus)):
            if self.nvmlDeviceGetUUID(handle) == uuid:
                return handle
        raise self.NVMLError("Not Found")

    def _called(self, name: str, handle: int) -> None:
        assert self.open > 0
        self._answering(handle)
        if self.hang is not None:
            self.hangs.set()
            self.hang.wait()
        if self.problem is not None:
            raise self.problem
        if name in self.unsupported:
            raise self.NVMLError_NotSupported("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._called("utilisation", handle)
        return SimpleNamespace(gpu=self.utilisation, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        self._called("memory", handle)
        if version is None:  # with what the driver reserves
            return SimpleNamespace(total=80 << 30, used=((1 + handle) << 30) + RESERVED, free=0)
        assert version == self.nvmlMemory_v2
        if "memory_v2" in self.unsupported:
            raise self.NVMLError_FunctionNotFound("Function Not Found")
        return SimpleNamespace(total=80 << 30, used=(1 + handle) << 30, reserved=RESERVED, free=0)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._called("power", handle)
        return 301_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        self._called("temperature", handle)
        return 61


class Samples:
    """Records samples, and sets an event at each."""

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
                return self._more.wait_for(lambda: len(self.told) >= count, HANG_SECONDS)

        assert await asyncio.to_thread(wait)


def sampled(nvml: Any, gpus: list[str], count: int) -> list[GpuSample]:
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


def test_simulated_gpu_is_reported_once_and_not_sampled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.gpu")
    told = sampled(FakeNvml(GPU), ["GPU-sim-0", GPU], 4)
    (problem,) = (s.problem for s in told if s.uuid == "GPU-sim-0")
    assert problem.endswith(": Not Found")
    assert all(sample.utilisation == 0 for sample in told[1:])
    (message,) = caplog.messages
    assert "GPU-sim-0" in message and "Not Found" in message


def test_unsupported_values_are_left_out() -> None:
    nvml = FakeNvml(GPU)
    nvml.unsupported = {"utilisation", "power"}
    (first, *_) = sampled(nvml, [GPU], 1)
    assert set(first.readings()) == {"memory_used", "memory_total", "temperature"}
    assert GpuUsage().with_sample(first).utilisation is None


def test_memory_is_that_of_processes_where_the_driver_can_tell() -> None:
    nvml = FakeNvml(GPU)
    assert sampled(nvml, [GPU], 1)[0].memory_used == 1 << 30
    nvml.unsupported = {"memory_v2"}
    assert sampled(nvml, [GPU], 1)[0].memory_used == (1 << 30) + RESERVED


def test_lost_gpu_is_reported_once_and_queried_again() -> None:
    nvml = FakeNvml(GPU)
    samples = Samples()

    async def go() -> None:
        async with sampling([GPU], samples, nvml, seconds=0.01):
            await samples.until(1)
            nvml.problem = nvml.NVMLError("GPU is lost")
            count = 1
            while not samples.told[count - 1].problem:
                count += 1
                await samples.until(count)
            nvml.problem = None
            await samples.until(count + 1)

    asyncio.run(go())
    problems = [sample.problem for sample in samples.told if sample.problem]
    assert problems == ["GPU is lost"] and not samples.told[-1].problem


def befallen(nvml: FakeNvml, gpus: list[str], change: Callable[[], None]) -> tuple[Any, int]:
    """Return the events after a change, and how often a GPU was reported as unusable."""
    samples, broken = Samples(), threading.Semaphore(0)

    async def go() -> Observations:
        watching = sampling(gpus, samples, nvml, seconds=0.01, on_gpu_failure=broken.release)
        async with watching as seen:
            await samples.until(len(gpus))
            change()
            await samples.until(len(samples.told) + len(gpus))
        return seen

    events = asyncio.run(go()).events
    assert nvml.event_sets == 0
    times = 0
    while broken.acquire(blocking=False):
        times += 1
    return events, times


def test_xid_events_are_reported_with_their_meaning() -> None:
    nvml = FakeNvml(GPU, "GPU-2", "GPU-3")
    change = [("GPU-2", 31), ("GPU-3", 79), (GPU, 79)]
    events, broken = befallen(nvml, [GPU, "GPU-2"], lambda: nvml.xids.extend(change))
    assert [(event.gpu, event.state) for event in events] == [("GPU-2", "healthy"), (GPU, "bad")]
    assert events[1].reason.startswith("XID 79, GPU has fallen off the bus: ")
    assert broken == 1


def test_an_event_that_comes_with_the_end_is_not_missed() -> None:
    nvml = FakeNvml(GPU)

    async def go() -> Observations:
        async with sampling([GPU], samples := Samples(), nvml, seconds=60) as seen:
            await samples.until(1)
            nvml.xids.append((GPU, 48))
        return seen

    (event,) = asyncio.run(go()).events
    assert event.is_fatal and event.reason.startswith("XID 48")


def test_an_event_of_a_gpu_that_tells_no_uuid_counts_for_all_of_the_rank() -> None:
    nvml = FakeNvml(GPU, "GPU-2")

    def lose() -> None:
        nvml.lost.add(GPU)
        nvml.xids += [(GPU, 79), (GPU, 31)]

    events, broken = befallen(nvml, [GPU, "GPU-2"], lose)
    told = {(event.gpu, event.reason.partition(",")[0]) for event in events}
    assert told >= {(gpu, xid) for gpu in (GPU, "GPU-2") for xid in ("XID 79", "XID 31")}
    assert broken >= 1


def seen_until_broken(nvml: FakeNvml, gpus: list[str], change: Callable[[], None]) -> Observations:
    """Return what is observed after a change, until a GPU is reported as unusable."""
    samples, broken = Samples(), threading.Event()

    async def go() -> Observations:
        async with sampling(gpus, samples, nvml, seconds=0.01, on_gpu_failure=broken.set) as seen:
            await samples.until(1)
            change()
            assert await asyncio.to_thread(broken.wait, HANG_SECONDS)
        return seen

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (FakeNvml.NVMLError_GpuIsLost, "GPU is lost"),
        (FakeNvml.NVMLError_ResetRequired, "GPU requires restart"),
    ],
)
def test_a_gpu_that_cannot_be_used_any_more_is_beyond_hope(
    problem: type[Exception], words: str
) -> None:
    nvml = FakeNvml(GPU)

    def fail() -> None:
        nvml.problem = problem(words)

    (event,) = seen_until_broken(nvml, [GPU], fail).events
    assert event.is_fatal and f"({words})" in event.reason


def test_a_gpu_that_is_lost_before_it_is_sampled_is_beyond_hope() -> None:
    nvml = FakeNvml("GPU-0", GPU)
    nvml.lost.add(GPU)
    seen = seen_until_broken(nvml, [GPU], lambda: None)
    (event,) = seen.events
    assert (event.gpu, event.is_fatal) == (GPU, True) and seen.problems == {}


def test_another_lost_gpu_of_the_node_harms_none() -> None:
    nvml = FakeNvml("GPU-0", GPU)
    nvml.lost.add("GPU-0")
    assert befallen(nvml, [GPU], lambda: None) == ([], 0)


def test_a_driver_without_events_is_sampled_all_the_same() -> None:
    nvml = FakeNvml(GPU)
    nvml.unsupported = {"events"}
    assert befallen(nvml, [GPU], lambda: nvml.xids.append((GPU, 79))) == ([], 0)


def problems(nvml: Any, missing: str | None = None) -> tuple[list[GpuSample], dict[str, str]]:
    """Return the problems of a GPU that is sampled twice."""
    samples = Samples()

    async def go() -> Observations:
        async with sampling([GPU], samples, nvml, seconds=0.01) as seen:
            await samples.until(1 if missing else 2)
        return seen

    return samples.told, asyncio.run(go()).problems


def test_gpus_without_event_sets_are_sampled_with_a_problem() -> None:
    nvml = FakeNvml(GPU)
    nvml.unsupported = {"event sets"}
    told, said = problems(nvml)
    assert said == {GPU: "NVML reports no events: Function Not Found"}
    assert told[1].utilisation == 0 and nvml.open == 0


def test_module_without_a_call_is_a_problem() -> None:
    class Other(FakeNvml):
        @property
        def nvmlEventSetWait_v2(self) -> Any:
            raise AttributeError("no nvmlEventSetWait_v2")

    nvml = Other(GPU)
    told, said = problems(nvml)
    assert said == {GPU: "NVML failed: no nvmlEventSetWait_v2"} == {GPU: told[1].problem}
    assert nvml.open == 0


def test_exit_does_not_wait_for_a_call_that_hangs() -> None:
    nvml = FakeNvml(GPU)
    nvml.hang = threading.Event()
    samples = Samples()

    async def go() -> None:
        async with sampling([GPU], samples, nvml, seconds=0.01, join_seconds=0.1):
            assert await asyncio.to_thread(nvml.hangs.wait, HANG_SECONDS)

    asyncio.run(asyncio.wait_for(go(), HANG_SECONDS))
    (thread,) = (t for t in threading.enumerate() if t.name == "hopsgpu-nvml")
    assert thread.daemon
    nvml.hang.set()
    thread.join(HANG_SECONDS)
    assert samples.told == []  # it was over by then


def test_a_full_disk_ends_the_sampling_alone() -> None:
    nvml = FakeNvml(GPU)
    full = threading.Event()

    def tell(sample: GpuSample) -> None:
        full.set()
        raise OSError(28, "No space left on device")

    async def go() -> None:
        async with sampling([GPU], tell, nvml, seconds=0.01):
            assert await asyncio.to_thread(full.wait, HANG_SECONDS)

    asyncio.run(go())
    assert nvml.open == 0


def test_without_a_driver_the_reason_is_known() -> None:
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        said = f"NVML is not available: {error}"
    else:
        nvml.nvmlShutdown()
        said = "NVML does not know the GPU"
    (first,) = sampled(None, [GPU], 1)
    assert first.problem.startswith(said)


def test_without_pynvml_the_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (first,), said = problems(None, "pynvml")
    assert said == {GPU: NOT_INSTALLED} == {GPU: first.problem}


def test_without_gpus_there_is_no_thread() -> None:
    async def go() -> set[str]:
        async with sampling([], Samples(), FakeNvml()):
            return {thread.name for thread in threading.enumerate()}

    assert "hopsgpu-nvml" not in asyncio.run(go())
