"""The use of a rank's GPUs: single samples, and their sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# A GPU that is less busy than this does not train.
UNUSED_UTILISATION = 0.05
# The state of a GPU between two samples that are further apart is unknown.
_MAX_GAP_SECONDS = 5.0
_IDLE_SHARE = 0.95
_IDLE_SECONDS = 10.0


@dataclass(frozen=True)
class GpuSample:
    """A GPU at one moment, as NVML reports it; None for each value that it does not report.

    Attributes:
        time: seconds since the epoch, by the node's clock.
        utilisation: share in [0, 1] of NVML's last sample period (1/6 to 1 s) in which a kernel
            ran.
        memory_used: bytes that all processes use together.
        memory_total: bytes.
        power: W.
        temperature: °C.
        problem: why NVML reports nothing, or "".
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
        names = ("utilisation", "memory_used", "memory_total", "power", "temperature")
        values = ((name, getattr(self, name)) for name in names)
        return {name: value for name, value in values if value is not None}

    def fields(self) -> Mapping[str, object]:
        problem = {"problem": self.problem} if self.problem else {}
        return {"uuid": self.uuid, **self.readings(), **problem}


@dataclass(frozen=True)
class GpuUsage:
    """The use of a GPU over all samples that have a utilisation.

    Attributes:
        samples: their number.
        idle: number of samples whose utilisation is 0.
        busy: sum of the utilisations.
        peak_memory: largest number of bytes in use; None if it was never reported.
        began: time of the first sample, seconds since the epoch.
        ended: time of the last sample.
        unused: seconds in which the utilisation was under 5 %.
        problem: the last problem, or "".
    """

    samples: int = 0
    idle: int = 0
    busy: float = 0.0
    peak_memory: int | None = None
    began: float | None = None
    ended: float | None = None
    unused: float = 0.0
    problem: str = ""

    def with_sample(self, sample: GpuSample) -> GpuUsage:
        is_measured = sample.utilisation is not None
        memories = [m for m in (self.peak_memory, sample.memory_used) if m is not None]
        return GpuUsage(
            samples=self.samples + is_measured,
            idle=self.idle + (sample.utilisation == 0),
            busy=self.busy + (sample.utilisation or 0.0),
            peak_memory=max(memories, default=None),
            began=sample.time if is_measured and self.began is None else self.began,
            ended=sample.time if is_measured else self.ended,
            unused=self.unused + self._unused_until(sample),
            problem=sample.problem or self.problem,
        )

    def _unused_until(self, sample: GpuSample) -> float:
        if sample.utilisation is None or sample.utilisation >= UNUSED_UTILISATION:
            return 0.0
        gap = 0.0 if self.ended is None else sample.time - self.ended
        return gap if 0.0 < gap <= _MAX_GAP_SECONDS else 0.0

    @property
    def utilisation(self) -> float | None:
        """The mean share in [0, 1], or None if it was never reported."""
        return self.busy / self.samples if self.samples else None

    @property
    def idle_share(self) -> float | None:
        return self.idle / self.samples if self.samples else None

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last sample."""
        return 0.0 if self.began is None or self.ended is None else self.ended - self.began


def idle_warning(rank: int, host: str, gpu: str, share: float | None, seconds: float) -> str | None:
    """Return a warning about a GPU that idled during training, or None if it did not.

    Args:
        share: share of the samples in which the GPU was idle, in [0, 1]; None without samples.
        seconds: how long the GPU was sampled.
    """
    if share is None or share < _IDLE_SHARE or seconds < _IDLE_SECONDS:
        return None
    return (
        f"rank {rank} on {host}: {gpu} idled for {share:.0%} of {seconds:.0f} s of training. Does"
        " the function put its model and its batches on the GPU?"
    )
