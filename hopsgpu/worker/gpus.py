"""How busy a rank's GPUs are: samples from NVML, and what they come to."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.worker.gpu_events import GpuEvent, lost, xid_events

SAMPLE_SECONDS = 1.0
_JOIN_SECONDS = 1.0
_IDLE_SHARE = 0.95
_IDLE_SECONDS = 10.0


@dataclass(frozen=True)
class GpuSample:
    """A GPU at a moment, as NVML tells it; None for what it does not tell.

    Attributes:
        time: seconds since the epoch, by the node's clock.
        uuid: of the GPU.
        utilisation: share in [0, 1] of NVML's last sample period (1/6 to 1 s) in which a kernel
            ran.
        memory_used: bytes, of all processes.
        memory_total: bytes.
        power: W.
        temperature: °C.
        problem: why nothing is told, or "".
    """

    time: float
    uuid: str
    utilisation: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    temperature: float | None = None
    problem: str = ""

    def readings(self) -> dict[str, float]:
        """What NVML told, by name."""
        names = ("utilisation", "memory_used", "memory_total", "power", "temperature")
        told = ((name, getattr(self, name)) for name in names)
        return {name: value for name, value in told if value is not None}

    def fields(self) -> Mapping[str, object]:
        """What there is of it but for the time."""
        problem = {"problem": self.problem} if self.problem else {}
        return {"uuid": self.uuid, **self.readings(), **problem}


@dataclass(frozen=True)
class GpuUse:
    """How a GPU was used over all samples.

    Attributes:
        samples: that tell its utilisation.
        idle: of these the ones with a utilisation of 0.
        busy: sum of the utilisations.
        peak_memory: bytes, the most that was used; None where it was not told.
        began: time of the first sample, seconds since the epoch.
        ended: of the last.
        problem: the last one, or "".
    """

    samples: int = 0
    idle: int = 0
    busy: float = 0.0
    peak_memory: int | None = None
    began: float | None = None
    ended: float | None = None
    problem: str = ""

    def after(self, sample: GpuSample) -> GpuUse:
        """The use with one sample more."""
        told = sample.utilisation is not None
        memories = [m for m in (self.peak_memory, sample.memory_used) if m is not None]
        return GpuUse(
            samples=self.samples + told,
            idle=self.idle + (sample.utilisation == 0),
            busy=self.busy + (sample.utilisation or 0.0),
            peak_memory=max(memories, default=None),
            began=sample.time if told and self.began is None else self.began,
            ended=sample.time if told else self.ended,
            problem=sample.problem or self.problem,
        )

    @property
    def utilisation(self) -> float | None:
        """The mean share in [0, 1]; None where it was never told."""
        return self.busy / self.samples if self.samples else None

    @property
    def idle_share(self) -> float | None:
        """The share of samples in which the GPU did nothing; None where there are none."""
        return self.idle / self.samples if self.samples else None

    @property
    def seconds(self) -> float:
        """From the first to the last sample that tells the utilisation."""
        return 0.0 if self.began is None or self.ended is None else self.ended - self.began


def idle_warning(rank: int, host: str, gpu: str, share: float | None, seconds: float) -> str | None:
    """What to say of a GPU that idled through training, or None of one that did not.

    Args:
        rank: whose GPU it is.
        host: the node.
        gpu: its UUID.
        share: of the samples in which it did nothing, in [0, 1]; None where there are none.
        seconds: for which it was sampled.
    """
    if share is None or share < _IDLE_SHARE or seconds < _IDLE_SECONDS:
        return None
    return (
        f"rank {rank} on {host}: {gpu} idled for {share:.0%} of {seconds:.0f} s of training. Does"
        " the function put its model and its batches on the GPU?"
    )


@contextlib.asynccontextmanager
async def sampling(
    gpus: Sequence[str],
    tell: Callable[[GpuSample], None],
    nvml: Any = None,
    seconds: float = SAMPLE_SECONDS,
    broken: Callable[[], None] = lambda: None,
) -> AsyncIterator[Sequence[GpuEvent]]:
    """Samples GPUs while inside, and gives what befell them, which grows meanwhile.

    A call of NVML that never returns holds up neither the caller nor the end of its process. A
    GPU that NVML does not know, and every one where NVML cannot be had, is told of once, with the
    problem, and not sampled; one that is lost is told of once and asked again.

    Args:
        gpus: UUIDs; without any there is no thread.
        tell: is given each sample, in a thread; never after the end. It may raise OSError, which
            ends the sampling.
        nvml: the module pynvml, by default imported, where it is installed.
        seconds: between two samples of a GPU.
        broken: called in a thread, once a GPU is beyond hope.
    """
    if not gpus:
        yield ()
        return
    # A rank that reports needs the values above, and not what takes some 40 ms to import.
    import asyncio

    sampler = _Sampler(gpus, tell, nvml, seconds, broken)
    # A daemon: an interpreter that ends does not wait for a call that hangs in the driver.
    thread = threading.Thread(target=sampler.run, name="hopsgpu-nvml", daemon=True)
    thread.start()
    try:
        yield sampler.events
    finally:
        sampler.stop()
        await asyncio.to_thread(thread.join, _JOIN_SECONDS)


class _Sampler:
    def __init__(
        self,
        gpus: Sequence[str],
        tell: Callable[[GpuSample], None],
        nvml: Any,
        seconds: float,
        broken: Callable[[], None],
    ) -> None:
        self.events: list[GpuEvent] = []
        self._broken = broken
        self._gpus = gpus
        self._told = tell
        self._nvml = nvml
        self._seconds = seconds
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()

    def run(self) -> None:
        """The thread's body."""
        try:
            self._run()
        except OSError:
            # The node's disk is full: the rank's own output and reports say so.
            return

    def _run(self) -> None:
        try:
            nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            self._refuse(self._gpus, "nvidia-ml-py is not installed for the executors' Python")
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._refuse(self._gpus, f"NVML cannot be had: {error}")
            return
        try:
            self._sample(nvml)
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _sample(self, nvml: Any) -> None:
        handles = {}
        for uuid in self._gpus:
            try:
                handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
            except nvml.NVMLError as error:
                self._refuse([uuid], f"NVML does not know it: {error}")
        said: dict[str, str] = {}
        with xid_events(nvml, handles) as take:
            while handles and not self._stopped.is_set():
                for uuid, handle in handles.items():
                    sample, is_lost = _look(nvml, uuid, handle)
                    if not sample.problem or sample.problem != said.get(uuid):
                        self._tell(sample)
                        self._note([lost(uuid, sample.problem)] if is_lost else [])
                    said[uuid] = sample.problem
                self._note(take())
                self._stopped.wait(self._seconds)
            # What has ended a rank may have come with its end.
            self._note(take())

    def _note(self, events: Sequence[GpuEvent]) -> None:
        self.events += events
        if any(event.is_fatal for event in events):
            self._broken()

    def _refuse(self, gpus: Sequence[str], problem: str) -> None:
        for uuid in gpus:
            self._tell(GpuSample(time.time(), uuid, problem=problem))

    def _tell(self, sample: GpuSample) -> None:
        with self._lock:
            if not self._stopped.is_set():
                self._told(sample)


def _look(nvml: Any, uuid: str, handle: Any) -> tuple[GpuSample, bool]:
    """A sample, and whether the GPU is lost."""

    def told(call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(handle, *arguments)
        except nvml.NVMLError_NotSupported:
            return None  # utilisation of a MIG device, power of some boards

    now = time.time()
    try:
        rates = told(nvml.nvmlDeviceGetUtilizationRates)
        memory = told(nvml.nvmlDeviceGetMemoryInfo)
        milliwatts = told(nvml.nvmlDeviceGetPowerUsage)
        temperature = told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    except nvml.NVMLError as error:
        is_lost = isinstance(error, nvml.NVMLError_GpuIsLost)
        return GpuSample(now, uuid, problem=str(error)), is_lost
    sample = GpuSample(
        time=now,
        uuid=uuid,
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        power=None if milliwatts is None else milliwatts / 1000,
        temperature=temperature,
    )
    return sample, False
