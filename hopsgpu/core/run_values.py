"""What a run gives back: frozen values with a readable repr."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol


class Published(Protocol):
    """A published model."""

    @property
    def url(self) -> str:
        """Where it is on the lake."""


@dataclass(frozen=True)
class Timeline:
    """When a run passed each point, in seconds since the epoch; None for points not passed.

    Of a run that was tried again, granted, started and returned are the last attempt's.

    Attributes:
        requested: the run began.
        prepared: its data were written, and its Python environment was there; of a run that has
            either.
        retried: the last attempt began; of a run that was tried again.
        granted: the gang was whole.
        started: the function ran in all ranks.
        returned: the last rank had ended.
        published: the model was on the lake.
        released: the ResourceManager showed the GPUs gone.
    """

    __module__ = "hopsgpu"

    requested: float | None = None
    prepared: float | None = None
    retried: float | None = None
    granted: float | None = None
    started: float | None = None
    returned: float | None = None
    published: float | None = None
    released: float | None = None

    def phases(self) -> tuple[tuple[str, float], ...]:
        """What was done one after the other, and the seconds that each of it took.

        In words: "prepared", "waited", "started" (the ranks, until the function ran in all of
        them), "trained", "published", "released"; before them "earlier attempts".
        A run that ended early has no more than what it came to.
        """
        if self.requested is None:
            return ()
        done, last, due = [], self.requested, 0
        if self.retried is not None:
            done.append(("earlier attempts", self.retried - last))
            last = self.retried
        for number, (point, word) in enumerate(_PHASES):
            at = getattr(self, point)
            # Prepared is what the first attempt was.
            if at is None or (point == "prepared" and self.retried is not None):
                continue
            if point not in _OPTIONAL:
                # What it was at when it ended, where points between were not passed.
                word = next(w for p, w in _PHASES[due : number + 1] if p not in _OPTIONAL)
            done.append((word, max(at - last, 0.0)))
            last, due = at, number + 1
        return tuple(done)

    def __str__(self) -> str:
        """The seconds of each phase."""
        shown = (f"{word} {seconds:.1f} s" for word, seconds in self.phases())
        return f"Timeline({', '.join(shown)})"


# What comes to its end at each point.
_PHASES = (
    ("prepared", "prepared"),
    ("granted", "waited"),
    ("started", "started"),
    ("returned", "trained"),
    ("published", "published"),
    ("released", "released"),
)
# Which not all runs pass.
_OPTIONAL = ("prepared", "published")


@dataclass(frozen=True)
class GpuSeconds:
    """GPU seconds of a run.

    Attributes:
        held: from each executor's arrival at the driver to its release, times its GPUs.
        training: while the function ran in all ranks, until the last had ended; of all attempts.
        publishing: from return to the model on the lake, of the executors that had a part in it.
        idle: held minus the others.
    """

    __module__ = "hopsgpu"

    held: float = 0.0
    training: float = 0.0
    publishing: float = 0.0
    idle: float = 0.0

    def __str__(self) -> str:
        parts = (f"{f.name} {getattr(self, f.name):.1f}" for f in fields(self))
        return f"GpuSeconds({', '.join(parts)})"


@dataclass(frozen=True)
class RankReport:
    """How one rank fared.

    Attributes:
        rank: global rank; a parameter server's number follows those of the workers.
        role: "worker" or "ps".
        host: the node.
        gpus: UUIDs.
        pid: of the rank's process on its node.
        exit_code: 0 and above; None where a signal ended it or it never ended.
        signal: name of the signal that ended it.
        peak_memory: bytes of the host's memory (a GPU's is among the metrics): the larger of one
            process's largest resident set and the most that was seen of all the rank's processes
            together, shared pages counted once.
        gpu_utilisation: mean share in [0, 1]; None where it was not measured.
        stopped: True where hopsgpu ended it before it had returned.
    """

    __module__ = "hopsgpu"

    rank: int
    role: str
    host: str
    gpus: tuple[str, ...]
    pid: int
    exit_code: int | None = None
    signal: str | None = None
    peak_memory: int | None = None
    gpu_utilisation: float | None = None
    stopped: bool = False


@dataclass(frozen=True)
class RunOutcome:
    """What a run left, as values; `GangResult` is what users get of it."""

    run_id: str
    values: tuple[Any, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    model: Published | None = None
    timeline: Timeline = Timeline()
    gpu_seconds: GpuSeconds = GpuSeconds()


@dataclass(frozen=True)
class RunStatus:
    """A run at a moment.

    Attributes:
        run_id: names the run.
        state: "requested", "preparing", "waiting", "granted", "ready", "starting" until the
            function runs in all ranks, "running", "publishing", "releasing" ("finishing" on a gang
            that is held); at the end "succeeded", "failed" or "cancelled". Of `hopsgpu.hold` itself
            at the end "held", and later "released".
        attempt: counts from 0.
        granted: executors there.
        wanted: executors the gang needs.
        granted_hosts: host of each executor there.
        waiting_for: why it waits, in words with numbers; "" where it does not.
        elapsed: seconds since it was submitted.
        ranks: reports of the ranks that have ended.
        metrics: last reported ones, per rank.
        timeline: when each point was passed so far.
    """

    __module__ = "hopsgpu"

    run_id: str
    state: str
    attempt: int
    granted: int
    wanted: int
    granted_hosts: tuple[str, ...]
    waiting_for: str
    elapsed: float
    ranks: tuple[RankReport, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    timeline: Timeline = Timeline()
