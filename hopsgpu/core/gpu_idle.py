"""Whether a gang's GPUs idle while its function runs, from samples and a clock's reading. Pure.

A GPU idles while NVML gives a utilisation under 5 %. Where it gives none, as for simulated GPUs and
MIG devices, and where no samples arrive, it is unknown whether a GPU idles. The unknown never leads
to a warning or to the end of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hopsgpu.core.gpu_usage import UNUSED_UTILISATION, GpuSample

# `spark.hopsgpu.idle_warning`
WARNING_SECONDS = 600.0
# Samples come every second; for longer than this without one, nothing is known.
_KNOWN_SECONDS = 30.0
_MOST_RANKS = 8


@dataclass(frozen=True)
class IdleBounds:
    """How long GPUs may idle, in seconds.

    Attributes:
        warning: until people are told; None for never.
        timeout: until the run ends, if all GPUs of the gang idle; None for never.
    """

    warning: float | None = WARNING_SECONDS
    timeout: float | None = None


class IdleStep(Enum):
    """What to do about GPUs that idle."""

    NOTHING = "nothing"
    WARN = "warn"
    END = "end"


@dataclass(frozen=True)
class IdleVerdict:
    """What to do, and why.

    Attributes:
        step: what to do.
        seconds: how long the GPUs have idled at least.
        gpus: how many GPUs idle for so long.
        of: number of the gang's GPUs.
        ranks: the ranks that have them, in order.
    """

    step: IdleStep = IdleStep.NOTHING
    seconds: float = 0.0
    gpus: int = 0
    of: int = 0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return which GPUs have idled, and for how long."""
        if self.gpus == self.of:
            which = "the gang's GPU has" if self.of == 1 else f"all {self.of} GPUs have"
        else:
            listed = ", ".join(map(str, self.ranks[:_MOST_RANKS]))
            more = ", …" if len(self.ranks) > _MOST_RANKS else ""
            noun = "rank" if len(self.ranks) == 1 else "ranks"
            verb = "has" if self.gpus == 1 else "have"
            which = f"{self.gpus} of {self.of} GPUs (of {noun} {listed}{more}) {verb}"
        return f"{which} idled for {_lasted(self.seconds)} (utilisation under 5 %)"


def _lasted(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass
class _Gpu:
    """What is known of one GPU of one rank.

    Attributes:
        rank, uuid: which one it is.
        idle_since: the clock's reading; None if it does not idle, or if that is unknown.
        heard: when its utilisation was last known; None if it never was.
        ended: whether its rank has ended, which leaves it idle.
    """

    rank: int
    uuid: str
    idle_since: float | None = None
    heard: float | None = None
    ended: bool = False

    def is_known(self, now: float) -> bool:
        return self.ended or (self.heard is not None and now - self.heard <= _KNOWN_SECONDS)

    def idled(self, now: float) -> float:
        """Return for how many seconds it is known to idle."""
        known = self.idle_since is not None and self.is_known(now)
        return now - self.idle_since if known and self.idle_since is not None else 0.0


class GpuIdleWatch:
    """Watches the GPUs of the ranks of one attempt.

    Args:
        gpus: UUIDs of each rank's own GPUs.
        bounds: how long they may idle.
        now: the clock's reading.
    """

    def __init__(self, gpus: Mapping[int, Sequence[str]], bounds: IdleBounds, now: float) -> None:
        self._gpus = {(rank, uuid): _Gpu(rank, uuid) for rank, own in gpus.items() for uuid in own}
        self._bounds = bounds
        self._began = now
        self._of = len({uuid for _, uuid in self._gpus})
        # How many GPUs people were told of.
        self._told = 0
        self._told_unknown = False
        # The ranks in which the function runs, or ran.
        self._entered: set[int] = set()

    def sampled(self, rank: int, samples: Sequence[GpuSample], now: float) -> None:
        """Record samples of a rank's GPUs that have arrived."""
        for sample in samples:
            gpu = self._gpus.get((rank, sample.uuid))
            if gpu is None or sample.utilisation is None:
                continue
            was_known, gpu.heard = gpu.is_known(now), now
            if sample.utilisation >= UNUSED_UTILISATION:
                gpu.idle_since = None
            elif gpu.idle_since is None or not was_known:
                gpu.idle_since = now

    def entered(self, rank: int, now: float) -> None:
        """Record that the function runs in a rank: what its GPUs did before does not count."""
        self._entered.add(rank)
        for gpu in self._gpus.values():
            if gpu.rank == rank and gpu.idle_since is not None:
                gpu.idle_since = now

    def ended(self, rank: int, now: float) -> None:
        """Record that a rank has ended: its GPUs idle from now on, if they did not before."""
        for gpu in self._gpus.values():
            self._entered.add(rank)
            if gpu.rank == rank and not gpu.ended:
                if not gpu.is_known(now) or gpu.idle_since is None:
                    gpu.idle_since = now
                gpu.ended = True

    def verdict(self, now: float) -> IdleVerdict:
        """Return what to do now; each warning is returned once."""
        if not self._gpus:
            return IdleVerdict()
        timeout, warning = self._bounds.timeout, self._bounds.warning
        if timeout is not None:
            late = self._idle_for(timeout, now, IdleStep.END)
            if late.gpus == self._of:
                return late
        if warning is None:
            return IdleVerdict()
        found = self._idle_for(warning, now, IdleStep.WARN)
        told, self._told = self._told, found.gpus
        # Once of a part, and once of all; again if they were busy between.
        if found.gpus and (not told or told < found.gpus == self._of):
            # The same text each time, which people read once.
            return replace(found, seconds=warning)
        return IdleVerdict()

    def _idle_for(self, seconds: float, now: float, step: IdleStep) -> IdleVerdict:
        """Return the GPUs that have idled for so long, in all of the ranks that share them."""
        busy = {
            gpu.uuid
            for gpu in self._gpus.values()
            if gpu.rank not in self._entered or gpu.idled(now) < seconds
        }
        idle = [gpu for gpu in self._gpus.values() if gpu.uuid not in busy]
        return IdleVerdict(
            step,
            min((gpu.idled(now) for gpu in idle), default=0.0),
            len({gpu.uuid for gpu in idle}),
            self._of,
            tuple(sorted({gpu.rank for gpu in idle})),
        )

    def unknown(self, now: float) -> tuple[int, ...]:
        """Return, once, the ranks with a GPU that a timeout cannot watch; empty without a timeout.

        These are the ranks of whose GPUs no utilisation has been known since the beginning.
        """
        late = now - self._began > _KNOWN_SECONDS
        if self._bounds.timeout is None or self._told_unknown or not late:
            return ()
        found = {gpu.rank for gpu in self._gpus.values() if gpu.heard is None and not gpu.ended}
        self._told_unknown = bool(found)
        return tuple(sorted(found))
