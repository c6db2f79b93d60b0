"""A rank's GPUs while it runs: samples of their use, and their error events, from NVML."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.core.gpu_usage import GpuSample
from hopsgpu.gpu.driver_events import GpuEvent, failure_event, xid_events
from hopsgpu.gpu.node.nvml import FATAL, as_text

log = logging.getLogger(__name__)

NOT_INSTALLED = "nvidia-ml-py is not installed for the executors' Python"
_SECONDS = 1.0
_JOIN_SECONDS = 1.0


@dataclass(frozen=True)
class Observations:
    """Events and problems of GPUs; they grow while the GPUs are sampled.

    Attributes:
        problems: why a GPU is not watched, or not for all events, by its UUID.
    """

    events: list[GpuEvent] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def sampling(
    gpus: Sequence[str],
    report: Callable[[GpuSample], None],
    nvml: Any = None,
    seconds: float = _SECONDS,
    on_gpu_failure: Callable[[], None] = lambda: None,
    join_seconds: float = _JOIN_SECONDS,
) -> AsyncIterator[Observations]:
    """Sample GPUs in a thread while inside the context.

    A call of NVML that never returns delays neither the caller nor the exit of the process. A GPU
    that NVML does not know is reported once, with the problem, and not sampled; so is every GPU if
    NVML is not available. A GPU that can no longer be used is reported once and queried again.

    Args:
        gpus: UUIDs of the GPUs; if there are none, no thread is started.
        report: called in a thread with each sample, but not after the context. If the function
            raises OSError, the sampling ends.
        nvml: the module pynvml; None imports it if it is installed.
        seconds: interval of a GPU's samples.
        on_gpu_failure: called in a thread when a GPU can no longer be used.
        join_seconds: longest wait for a sample in progress at the exit.
    """
    if not gpus:
        yield Observations()
        return
    sampler = _Sampler(gpus, report, nvml, seconds, on_gpu_failure)
    # A daemon thread: the exit of the interpreter does not wait for a call that hangs in the
    # driver.
    thread = threading.Thread(target=sampler.run, name="hopsgpu-nvml", daemon=True)
    thread.start()
    try:
        yield sampler.observations
    finally:
        sampler.stop()
        await asyncio.to_thread(thread.join, join_seconds)


class _Sampler:
    def __init__(
        self,
        gpus: Sequence[str],
        report: Callable[[GpuSample], None],
        nvml: Any,
        seconds: float,
        on_gpu_failure: Callable[[], None],
    ) -> None:
        self.observations = Observations()
        self._on_gpu_failure = on_gpu_failure
        self._gpus = gpus
        self._report = report
        self._nvml = nvml
        self._seconds = seconds
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()

    def run(self) -> None:
        """Run in the thread until `stop`."""
        try:
            self._run()
        except OSError as error:
            # The node's disk is full. Other parts of the agent report that.
            log.info("samples no more GPUs: %s", error)

    def _run(self) -> None:
        try:
            nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            self._refuse(self._gpus, NOT_INSTALLED)
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._refuse(self._gpus, f"NVML is not available: {error}")
            return
        try:
            self._sample(nvml)
        except (nvml.NVMLError, AttributeError) as error:
            # AttributeError: the module pynvml is too old, or is not that of nvidia-ml-py.
            self._refuse(self._gpus, f"NVML failed: {error}")
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _sample(self, nvml: Any) -> None:
        handles = self._handles(nvml)
        if not handles:
            return
        last: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            take_events: Callable[[], list[GpuEvent]] = list
            try:
                take_events = stack.enter_context(xid_events(nvml, handles))
            except nvml.NVMLError as error:
                problem = f"NVML reports no events: {error}"
                log.info("%s", problem)
                self.observations.problems.update(dict.fromkeys(handles, problem))
            while not self._stopped.is_set():
                for uuid, handle in handles.items():
                    sample, is_usable = _sample_gpu(nvml, uuid, handle)
                    if not sample.problem or sample.problem != last.get(uuid):
                        self._send(sample)
                        self._record([] if is_usable else [failure_event(uuid, sample.problem)])
                    if sample.problem != last.get(uuid, ""):
                        outcome = f"failed: {sample.problem}" if sample.problem else "works again"
                        log.info("the sample of GPU %s %s", uuid, outcome)
                    last[uuid] = sample.problem
                self._record(take_events())
                self._stopped.wait(self._seconds)
            # The event that ended a rank may arrive only when the rank ends.
            self._record(take_events())

    def _handles(self, nvml: Any) -> dict[str, Any]:
        handles = {}
        for uuid in self._gpus:
            try:
                handles[uuid] = _handle(nvml, uuid)
            except nvml.NVMLError as error:
                if error.value in FATAL and not uuid.startswith("MIG-"):
                    self._send(GpuSample(time.time(), uuid, problem=str(error)))
                    self._record([failure_event(uuid, str(error))])
                else:
                    self._refuse([uuid], f"NVML does not know the GPU: {error}")
        return handles

    def _record(self, events: Sequence[GpuEvent]) -> None:
        for event in events:
            log.info("GPU %s is %s: %s", event.gpu, event.state, event.reason)
        self.observations.events.extend(events)
        if any(event.is_fatal for event in events):
            self._on_gpu_failure()

    def _refuse(self, gpus: Sequence[str], problem: str) -> None:
        log.info("does not sample %s: %s", ", ".join(gpus), problem)
        self.observations.problems.update(dict.fromkeys(gpus, problem))
        for uuid in gpus:
            self._send(GpuSample(time.time(), uuid, problem=problem))

    def _send(self, sample: GpuSample) -> None:
        with self._lock:
            if not self._stopped.is_set():
                self._report(sample)


def _handle(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of a GPU.

    Raises:
        NVMLError: NVML does not know the GPU; or the GPU is no MIG device and cannot be used.
    """
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        if error.value not in FATAL:
            raise
        # NVML tries the GPUs one by one, and gives the same error if another GPU is lost.
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if as_text(nvml.nvmlDeviceGetUUID(handle)) == uuid:
                    return handle
        raise


def _memory(nvml: Any, handle: Any) -> Any:
    """Return NVML's memory information, in which `used` counts only the memory of processes.

    The first version of the call also counts the driver's reserve, about 500 MB on an H100.
    """
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_ArgumentVersionMismatch):
        return nvml.nvmlDeviceGetMemoryInfo(handle)  # drivers before 510


def _sample_gpu(nvml: Any, uuid: str, handle: Any) -> tuple[GpuSample, bool]:
    """Return a sample, and whether the GPU can still be used."""

    def ask(call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(handle, *arguments)
        except nvml.NVMLError_NotSupported:
            return None  # such as the utilisation of a MIG device, or the power of some boards

    now = time.time()
    try:
        rates = ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = ask(functools.partial(_memory, nvml))
        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
        temperature = ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    except nvml.NVMLError as error:
        return GpuSample(now, uuid, problem=str(error)), error.value not in FATAL
    sample = GpuSample(
        time=now,
        uuid=uuid,
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        power=None if milliwatts is None else milliwatts / 1000,
        temperature=temperature,
    )
    return sample, True
