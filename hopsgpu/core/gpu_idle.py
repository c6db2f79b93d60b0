"""Decides from samples whether a gang's GPUs idle while its function runs. Pure.

A GPU idles while NVML reports a utilisation under 5 %. NVML reports none for simulated GPUs
and MIG devices. Without a utilisation the state is unknown: there is no warning, and the run does
not end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hopsgpu.core.gpu_usage import UNUSED_UTILISATION, GpuSample

# `spark.hopsgpu.idle_warning`
WARNING_SECONDS = 600.0
# Samples arrive every second. If none arrives for this long, the state is unknown.
_KNOWN_SECONDS = 30.0
_MAX_RANKS = 8


@dataclass(frozen=True)
class IdleBounds:
    """How long GPUs may idle, in seconds.

    Attributes:
        warning: idle time before a warning; None for no warning.
        timeout: idle time of all GPUs of the gang before the run ends; None for no end.
    """

    warning: float | None = WARNING_SECONDS
    timeout: float | None = None


class IdleStep(Enum):
    NOTHING = "nothing"
    WARN = "warn"
    END = "end"


@dataclass(frozen=True)
class IdleVerdict:
    """The action against idle GPUs, and the reason.

    Attributes:
        seconds: how long the GPUs have idled at least.
        gpus: how many GPUs have idled for so long.
        gang_gpus: number of the gang's GPUs.
        ranks: the ranks that use the idle GPUs, in order.
    """

    step: IdleStep = IdleStep.NOTHING
    seconds: float = 0.0
    gpus: int = 0
    gang_gpus: int = 0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        total = self.gang_gpus
        if self.gpus == total:
            which = "the gang's GPU has" if total == 1 else f"all {total} GPUs have"
        else:
            listed = ", ".join(map(str, self.ranks[:_MAX_RANKS]))
            more = ", …" if len(self.ranks) > _MAX_RANKS else ""
            noun = "rank" if len(self.ranks) == 1 else "ranks"
            verb = "has" if self.gpus == 1 else "have"
            which = f"{self.gpus} of {total} GPUs (of {noun} {listed}{more}) {verb}"
        return f"{which} idled for {_duration(self.seconds)} (utilisation under 5 %)"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass
class _RankGpu:
    """One GPU of one rank.

    Attributes:
        idle_since: None if the GPU does not idle, or if that is unknown.
        known_at: when the utilisation was last known; None if it never was.
        has_rank_ended: the GPU then stays idle.
    """

    rank: int
    uuid: str
    idle_since: float | None = None
    known_at: float | None = None
    has_rank_ended: bool = False

    def is_known(self, now: float) -> bool:
        return self.has_rank_ended or (
            self.known_at is not None and now - self.known_at <= _KNOWN_SECONDS
        )

    def idle_seconds(self, now: float) -> float:
        if self.idle_since is None or not self.is_known(now):
            return 0.0
        return now - self.idle_since


class GpuIdleWatch:
    """Watches the GPUs of one attempt; `gpus` has the UUIDs of each rank's own GPUs."""

    def __init__(self, gpus: Mapping[int, Sequence[str]], bounds: IdleBounds, now: float) -> None:
        self._gpus = {
            (rank, uuid): _RankGpu(rank, uuid) for rank, uuids in gpus.items() for uuid in uuids
        }
        self._bounds = bounds
        self._began = now
        self._gang_gpus = len({uuid for _, uuid in self._gpus})
        # Number of idle GPUs at the last call of `verdict`.
        self._warned_gpu_count = 0
        self._has_warned_unwatched = False
        # Ranks in which the function has started.
        self._started_ranks: set[int] = set()

    def add_samples(self, rank: int, samples: Sequence[GpuSample], now: float) -> None:
        for sample in samples:
            gpu = self._gpus.get((rank, sample.uuid))
            if gpu is None or sample.utilisation is None:
                continue
            was_known, gpu.known_at = gpu.is_known(now), now
            if sample.utilisation >= UNUSED_UTILISATION:
                gpu.idle_since = None
            elif gpu.idle_since is None or not was_known:
                gpu.idle_since = now

    def record_function_start(self, rank: int, now: float) -> None:
        """Record that the function runs in a rank: earlier idle time of its GPUs does not count."""
        self._started_ranks.add(rank)
        for gpu in self._gpus.values():
            if gpu.rank == rank and gpu.idle_since is not None:
                gpu.idle_since = now

    def record_rank_end(self, rank: int, now: float) -> None:
        """Record that a rank has ended: its GPUs idle from now on, or idled before."""
        for gpu in self._gpus.values():
            self._started_ranks.add(rank)
            if gpu.rank == rank and not gpu.has_rank_ended:
                if not gpu.is_known(now) or gpu.idle_since is None:
                    gpu.idle_since = now
                gpu.has_rank_ended = True

    def verdict(self, now: float) -> IdleVerdict:
        """Return the present action; each warning is returned once."""
        if not self._gpus:
            return IdleVerdict()
        timeout, warning = self._bounds.timeout, self._bounds.warning
        if timeout is not None:
            ending = self._idle_for(timeout, now, IdleStep.END)
            if ending.gpus == self._gang_gpus:
                return ending
        if warning is None:
            return IdleVerdict()
        idle = self._idle_for(warning, now, IdleStep.WARN)
        before, self._warned_gpu_count = self._warned_gpu_count, idle.gpus
        # Warn once when some GPUs idle and once when all do; warn again after they were busy.
        if idle.gpus and (not before or before < idle.gpus == self._gang_gpus):
            # A repeated warning has the same text, so that people see it once.
            return replace(idle, seconds=warning)
        return IdleVerdict()

    def _idle_for(self, seconds: float, now: float, step: IdleStep) -> IdleVerdict:
        """Return the GPUs that have idled for so long, in all ranks that share them."""
        busy = {
            gpu.uuid
            for gpu in self._gpus.values()
            if gpu.rank not in self._started_ranks or gpu.idle_seconds(now) < seconds
        }
        idle = [gpu for gpu in self._gpus.values() if gpu.uuid not in busy]
        return IdleVerdict(
            step,
            min((gpu.idle_seconds(now) for gpu in idle), default=0.0),
            len({gpu.uuid for gpu in idle}),
            self._gang_gpus,
            tuple(sorted({gpu.rank for gpu in idle})),
        )

    def unwatched_ranks(self, now: float) -> tuple[int, ...]:
        """Return, once, the ranks with a GPU that a timeout cannot watch; empty without a timeout.

        NVML has never reported the utilisation of these GPUs.
        """
        is_early = now - self._began <= _KNOWN_SECONDS
        if self._bounds.timeout is None or self._has_warned_unwatched or is_early:
            return ()
        unwatched = {
            gpu.rank
            for gpu in self._gpus.values()
            if gpu.known_at is None and not gpu.has_rank_ended
        }
        self._has_warned_unwatched = bool(unwatched)
        return tuple(sorted(unwatched))
