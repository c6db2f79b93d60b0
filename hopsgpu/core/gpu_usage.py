"""How busy a rank's GPUs are: what samples tell, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
