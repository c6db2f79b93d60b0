"""The results of a run: frozen values with a readable repr."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol


class Published(Protocol):
    """A published model."""

    @property
    def url(self) -> str:
        """Return the model's URL on the lake."""


@dataclass(frozen=True)
class Timeline:
    """The times at which a run passed each point, in seconds since the epoch; None if not passed.

    If a run was retried, granted, started and returned are those of the last attempt.

    Attributes:
        requested: the run began.
        prepared: its data were written, and its Python environment existed; only for a run that
            has either.
        retried: the last attempt began; only for a run that was retried.
        granted: all executors had arrived.
        started: the function ran in all ranks.
        returned: the last rank had ended.
        published: the model was on the lake.
        released: the cluster manager showed that the GPUs were released.
    """

    __module__ = "hopsgpu.types"

    requested: float | None = None
    prepared: float | None = None
    retried: float | None = None
    granted: float | None = None
    started: float | None = None
    returned: float | None = None
    published: float | None = None
    released: float | None = None

    def phases(self) -> tuple[tuple[str, float], ...]:
        """Return the names of the run's phases in their order, with the seconds that each took.

        The names are "earlier attempts", "prepared", "waited", "started" (starting the ranks, until
        the function ran in all of them), "trained", "published" and "released". A run that ended
        early has only the phases that it reached.
        """
        if self.requested is None:
            return ()
        done, last, due = [], self.requested, 0
        if self.retried is not None:
            done.append(("earlier attempts", self.retried - last))
            last = self.retried
        for number, (point, word) in enumerate(_PHASES):
            at = getattr(self, point)
            # Preparation belongs to the first attempt.
            if at is None or (point == "prepared" and self.retried is not None):
                continue
            if point not in _OPTIONAL:
                # If points between were not passed, the run ended in the first of their phases.
                word = next(w for p, w in _PHASES[due : number + 1] if p not in _OPTIONAL)
            done.append((word, max(at - last, 0.0)))
            last, due = at, number + 1
        return tuple(done)

    def __str__(self) -> str:
        shown = (f"{word} {seconds:.1f} s" for word, seconds in self.phases())
        return f"Timeline({', '.join(shown)})"


# The phase that ends at each point.
_PHASES = (
    ("prepared", "prepared"),
    ("granted", "waited"),
    ("started", "started"),
    ("returned", "trained"),
    ("published", "published"),
    ("released", "released"),
)
# The points that not all runs pass.
_OPTIONAL = ("prepared", "published")


@dataclass(frozen=True)
class GpuSeconds:
    """The GPU seconds of a run.

    `held` is the sum of `training`, `publishing` and `idle`. The other fields are parts of these;
    `kinds` has all of them as kinds that do not overlap.

    Attributes:
        held: from each executor's arrival at the driver to its release, times its GPUs.
        training: while the function ran in all ranks, until the last had ended; of all attempts. In
            an elastic gang, a lost executor counts until the loss.
        publishing: from the return until the model was on the lake, for the executors that took
            part.
        idle: held minus training and publishing.
        waiting_for_data: of training: while a rank's main thread waited for rows of
            `context().data`. A loader of the user's own is not seen.
        checkpointing: of training: while a rank's main thread was in `save_checkpoint`,
            `latest_checkpoint` or `best_checkpoint` of `context()`.
        unused: of training: while the GPU's utilisation was under 5 %, without the seconds of
            `waiting_for_data` and `checkpointing`; 0 if the utilisation is unknown, and then
            `RankReport.gpu_utilisation` is None.
        starting: of idle: from the grant until the function ran in all ranks; of an elastic gang
            from the start of each world. 0 for a search, whose trials count from their start.
    """

    __module__ = "hopsgpu.types"

    held: float = 0.0
    training: float = 0.0
    publishing: float = 0.0
    idle: float = 0.0
    waiting_for_data: float = 0.0
    checkpointing: float = 0.0
    unused: float = 0.0
    starting: float = 0.0

    def kinds(self) -> Mapping[str, float]:
        """Return the GPU seconds by kind, whose sum is `held`.

        Unlike the field, "training" leaves out "waiting for data", "checkpointing" and "unused",
        and "idle" leaves out "starting".
        """
        lost = self.waiting_for_data + self.checkpointing + self.unused
        return {
            "training": self.training - lost,
            "waiting for data": self.waiting_for_data,
            "checkpointing": self.checkpointing,
            "unused": self.unused,
            "publishing": self.publishing,
            "starting": self.starting,
            "idle": self.idle - self.starting,
        }

    def __str__(self) -> str:
        parts = (
            f"{field.name} {getattr(self, field.name):.1f}"
            for field in fields(self)
            # Kinds that few runs have are left out if they are 0.
            if field.name in _ALWAYS or getattr(self, field.name) >= _MIN_SHOWN
        )
        return f"GpuSeconds({', '.join(parts)})"


_ALWAYS = ("held", "training", "publishing", "idle")
_MIN_SHOWN = 0.05


@dataclass(frozen=True)
class RankReport:
    """The outcome of one rank.

    Attributes:
        rank: global rank; a parameter server's number follows those of the workers.
        role: "worker" or "ps".
        host: the node.
        gpus: UUIDs.
        pid: pid of the rank's process on its node.
        exit_code: 0 or above; None if a signal ended it, or if it never ended.
        signal: name of the signal that ended it.
        peak_memory: bytes of the host's memory: the largest resident set of a single process, or
            the most that all processes of the rank were seen to use together, with shared pages
            counted once, whichever is larger. A GPU's memory is among the metrics.
        gpu_utilisation: mean share in [0, 1]; None if it was not measured.
        stopped: True if hopsgpu ended the rank before it had returned.
    """

    __module__ = "hopsgpu.types"

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
class WorldReport:
    """One world of an elastic gang: the ranks that trained together, from their start to their end.

    Attributes:
        generation: number of the world, from 0; `context().generation` in its ranks.
        ranks: the world size.
        hosts: host of each executor.
        began: when its ranks were ordered to start, in seconds since the epoch.
        started: when the function ran in all ranks; None if it never did.
        ended: when the last rank had ended; None while it runs.
        end: why it ended: "returned", "grew", "gave way", "lost", "failed" or "cancelled"; "" while
            it runs.
        why: the reason in words, as "the executor on node3 was lost"; or "".
        resize_seconds: from the order to stop the world before until the function ran in all ranks
            of this one; None for the first.
        gpu_seconds: GPUs of its executors times the seconds from `began` to `ended`; a lost
            executor counts until the loss.
    """

    __module__ = "hopsgpu.types"

    generation: int
    ranks: int
    hosts: tuple[str, ...]
    began: float
    started: float | None = None
    ended: float | None = None
    end: str = ""
    why: str = ""
    resize_seconds: float | None = None
    gpu_seconds: float = 0.0


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run, as values; users get it as a `GangResult`."""

    run_id: str
    values: tuple[Any, ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    model: Published | None = None
    timeline: Timeline = Timeline()
    gpu_seconds: GpuSeconds = GpuSeconds()
    worlds: tuple[WorldReport, ...] = ()
    application: str = ""
    queue: str = ""
    failed_rank: int | None = None


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at one moment.

    Attributes:
        run_id: the run's id.
        state: "requested", "preparing", "waiting", "granted", "ready", "starting" until the
            function runs in all ranks, "running", "publishing", "releasing" ("finishing" on a held
            gang); at the end "succeeded", "failed" or "cancelled". For `hopsgpu.hold` itself, at
            the end "held", and later "released".
        attempt: number of the attempt, from 0.
        granted: executors that have arrived.
        wanted: executors that the gang needs; for an elastic gang, those that it wants at present.
        granted_hosts: host of each executor that has arrived.
        waiting_for: why the run waits, as one sentence; "" if it does not wait.
        elapsed: seconds since it was submitted.
        ranks: reports of the ranks that have ended.
        failed_rank: the rank that failed first and ended the run; or None.
        metrics: last reported metrics of each rank.
        timeline: the times of the points passed so far.
        worlds: the worlds so far of an elastic gang, the present one last.
        sizes: the smallest and the largest world size of an elastic gang; None for a gang of one
            size.
        gpu_seconds: how the GPU time has been spent so far.
        application: ID of the Spark application.
        queue: its YARN queue; "" without YARN.
        model: the published version, or None.
        value: rank 0's value once the run has succeeded; else None.
        waiting_details: further phrases about `waiting_for`, the most useful first.
    """

    __module__ = "hopsgpu.types"

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
    worlds: tuple[WorldReport, ...] = ()
    sizes: tuple[int, int] | None = None
    gpu_seconds: GpuSeconds = GpuSeconds()
    application: str = ""
    queue: str = ""
    failed_rank: int | None = None
    model: Published | None = None
    # Values of any type: comparisons and reprs of statuses must neither be slow nor fail.
    value: Any = field(default=None, compare=False, repr=False)
    waiting_details: tuple[str, ...] = ()
