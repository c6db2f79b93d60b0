"""A rank's failure in words: where it was, how it ended, why, and what to do.

Nothing here asks anyone; what the agents told goes in, a RankFailed comes out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hopsgpu.core.gang import Avoid, Container, RankPlace
from hopsgpu.errors import RankFailed
from hopsgpu.gpu.driver_events import GpuEvent
from hopsgpu.gpu.node.health import HEALTHY
from hopsgpu.launcher.native_failures import why_aborted
from hopsgpu.packaging.sources import with_sources
from hopsgpu.rank.main import WELL

# Ends without a word are causes; what follows from them is raised, and can be told earlier.
_WITHOUT_A_WORD_SECONDS = 0.05
# Of its log, in the error of a rank that has called sys.exit: a usage of several lines.
_EXIT_LINES = 10


class Blame(Enum):
    """What is at fault besides the code: it gets no rank in a next attempt."""

    NOTHING = "nothing"
    GPU = "GPU"
    HOST = "host"


_NO_TERMINAL = "a rank has no terminal: to debug the function, call it without launch()"
_UUIDS = "CUDA_VISIBLE_DEVICES holds UUIDs: count GPUs by range(torch.cuda.device_count())"
_NO_STORE = "a second process group of all ranks needs a store of its own (docs/pytorch.md)"
# What an error's text says of its cause, the most telling first; what to do; what is to blame.
_ADVICE = (
    (
        r"driver on your system is too old|CUDA driver version is insufficient"
        r"|cudaErrorInsufficientDriver|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH|no kernel image is avail",
        "the NVIDIA driver or GPU of {host} does not serve the CUDA that the ranks' Python"
        " environment was built for: take an environment for its CUDA, or have the driver of that"
        " node renewed",
        Blame.HOST,
    ),
    (
        r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        r"|OutOfMemoryError: CUDA|OOM when allocating tensor",
        "the memory of GPU {gpus} is full: take smaller batches or a smaller model, and see by"
        " nvidia-smi on {host} whether another process is on that GPU",
        Blame.NOTHING,
    ),
    (
        r"uncorrectable ECC|cudaErrorECCUncorrectable|GPU is lost|fallen off the bus"
        r"|cudaErrorHardwareStackError|CUDA_ERROR_ECC_UNCORRECTABLE|unknown error.*nvml",
        "GPU {gpus} of {host} is broken or lost: have an administrator look at it",
        Blame.GPU,
    ),
    (
        r"No CUDA GPUs are available|no CUDA-capable device|CUDA_ERROR_NO_DEVICE"
        r"|cudaErrorDevicesUnavailable|busy or unavailable",
        "the rank cannot open GPU {gpus} of {host}",
        Blame.GPU,
    ),
    (
        r"^MemoryError|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: can't allocate",
        "the node gave it no more memory: raise memory_per_worker, or use less",
        Blame.NOTHING,
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk of {host}, or a quota on it, is full: write less there, or have it cleared",
        Blame.NOTHING,
    ),
    (
        r"^(ModuleNotFoundError|ImportError)",
        "the ranks' Python (spark.pyspark.python) lacks it, and it is none of your modules that"
        " travelled: python_env= can bring it",
        Blame.NOTHING,
    ),
    (r"^(EOFError: EOF when|BdbQuit)", _NO_TERMINAL, Blame.NOTHING),
    (r"invalid literal for int\(\) .*'(GPU|MIG)-", _UUIDS, Blame.NOTHING),
    (r"Gloo connectFullMesh failed", _NO_STORE, Blame.NOTHING),
)
_NO_GPU = (
    "this process has no GPU, as gpus_per_worker=0 and parameter servers want it: ask for GPUs, or"
    " keep the function to the CPU"
)
# Lines of an exception's own words, ahead of its traceback.
_MOST_SAID = 3
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS")


@dataclass(frozen=True)
class Ended:
    """A rank's end, as its agent told it.

    Attributes:
        place: of the rank.
        at: when, in seconds since the epoch by the driver's clock.
        exit_code: None where a signal ended it.
        signal: its name, or None.
        outcome: what the rank left: "status", and "error" and "traceback" where it failed.
        log_tail: the last lines of its output.
        stopped: whether we ended it.
        oom_kills: processes that the kernel killed in its container for want of memory.
        gpu_events: what the driver told of its GPUs meanwhile.
    """

    place: RankPlace
    at: float
    exit_code: int | None
    signal: str | None
    outcome: Mapping[str, str]
    log_tail: Sequence[str]
    stopped: bool
    oom_kills: int = 0
    gpu_events: Sequence[GpuEvent] = ()

    @property
    def status(self) -> str | None:
        """How the rank says it ended; None where it said nothing."""
        return self.outcome.get("status")

    @property
    def has_returned(self) -> bool:
        """Whether there is a value."""
        return self.status in WELL


def first_failure(ends: Sequence[Ended]) -> Ended | None:
    """The end that was the first failure by time, None where none failed.

    What we stopped is no failure. Who was killed or crashed may have brought down another that
    told of its exception within the same moment, so such an end counts as 50 ms earlier.
    """
    failed = [end for end in ends if not end.has_returned and not end.stopped]
    return min(failed, key=_when, default=None)


def _when(end: Ended) -> float:
    return end.at - (0.0 if end.status == "raised" else _WITHOUT_A_WORD_SECONDS)


def rank_failed(end: Ended, log_url: str, cause: str = "") -> RankFailed:
    """The error of a rank's end: where, how, the user's traceback and the last of its log.

    Args:
        end: of the rank.
        log_url: of its log.
        cause: what `likely_cause` says.
    """
    how, (advice, _) = _how(end), _known(end)
    # In the first line, which is all that is kept of an attempt that is tried again.
    because = f"failed, likely because {cause}. It " if cause else ""
    parts = [f"{where(end.place)} {because}{how}" + (f": {advice}" if advice else "")]
    if besides := end.outcome.get("besides"):
        parts.append(_below(*besides.splitlines()))
    traceback = end.outcome.get("traceback")
    if traceback:
        if end.status == "exited" and end.log_tail:
            parts.append(_tail(end.log_tail[-_EXIT_LINES:]))
        traceback = with_sources(traceback)
        parts.append(traceback)
    elif end.log_tail:
        parts.append(_tail(end.log_tail))
    parts.append(f"whole log: {log_url}")
    return _error(
        end.place,
        "\n".join(parts),
        exit_code=end.exit_code,
        signal=end.signal,
        traceback=traceback,
        log_tail=tuple(end.log_tail),
        log_url=log_url,
    )


def ran_too_long(
    place: RankPlace,
    seconds: float,
    running: Sequence[int],
    end: Ended | None,
    log_url: str,
    cause: str = "",
) -> RankFailed:
    """The error of ranks that had not returned within `run_timeout`.

    Args:
        place: of the first of them.
        seconds: run_timeout.
        running: the ranks that were still running.
        end: of that rank once it was stopped, where it was told.
        log_url: of its log.
        cause: what `likely_cause` says.
    """
    which = ", ".join(map(str, running[:20])) + (", ..." if len(running) > 20 else "")
    others = f", as were {len(running)} in all (ranks {which})" if len(running) > 1 else ""
    parts = [
        f"{where(place)} was still running after run_timeout={seconds:g} s{others}{_likely(cause)};"
        " the stacks of all threads are at the end of the logs"
    ]
    tail = tuple(end.log_tail) if end is not None else ()
    if tail:
        parts.append(_tail(tail))
    parts.append(f"whole log: {log_url}")
    return _error(
        place,
        "\n".join(parts),
        exit_code=end.exit_code if end is not None else None,
        signal=end.signal if end is not None else None,
        log_tail=tail,
        log_url=log_url,
    )


def executor_lost(place: RankPlace, reason: str, log_url: str, cause: str = "") -> RankFailed:
    """The error of a rank whose executor was lost.

    Args:
        place: of the rank.
        reason: YARN's, Spark's or the control channel's.
        log_url: what had arrived of the rank's log.
        cause: what `likely_cause` says.
    """
    container = place.container
    logs = f"Its log: yarn logs -containerId {container.container_id}; the rank's"
    if container.container_id.startswith("local-"):
        logs = "The rank's log"
    advice = "; memory_per_worker is what to raise" if "memory limit" in reason else ""
    return _error(
        place,
        f"the executor of rank {place.rank} on {container.host} was lost (container"
        f" {container.container_id}): {reason.rstrip('.')}{advice}{_likely(cause)}. {logs},"
        f" as far as it came: {log_url}",
        log_url=log_url,
    )


def where(place: RankPlace) -> str:
    """A rank's place in words."""
    container = place.container
    name = "parameter server" if place.role == "ps" else "rank"
    return (
        f"{name} {place.rank} on {container.host} (container {container.container_id},"
        f" GPU {', '.join(place.gpus) or 'none'})"
    )


def _error(
    place: RankPlace,
    message: str,
    *,
    exit_code: int | None = None,
    signal: str | None = None,
    traceback: str | None = None,
    log_tail: tuple[str, ...] = (),
    log_url: str | None = None,
) -> RankFailed:
    container: Container = place.container
    return RankFailed(
        message,
        rank=place.rank,
        host=container.host,
        container=container.container_id,
        gpus=place.gpus,
        exit_code=exit_code,
        signal=signal,
        traceback=traceback,
        log_tail=log_tail,
        log_url=log_url,
    )


def _likely(cause: str) -> str:
    return f", likely because {cause}" if cause else ""


def _tail(lines: Sequence[str]) -> str:
    return _below("the last lines of its log:", *lines)


def _below(what: str, *lines: str) -> str:
    return "\n".join([what, *(f"  {line}" for line in with_sources("\n".join(lines)).splitlines())])


def _how(end: Ended) -> str:
    outcome = end.outcome
    match end.status:
        case "raised":
            # All of it is in the traceback, as are the tracebacks that some bear.
            lines = outcome["error"].strip().splitlines()
            return f"raised {outcome['error'] if len(lines) <= _MOST_SAID else lines[0] + ' ...'}"
        case "exited":
            how = f"called sys.exit: exit code {end.exit_code}"
            # What it wrote last is mostly why: argparse's error below its usage, for one.
            last = next(filter(str.strip, reversed(end.log_tail)), "")
            said = outcome.get("error", last).strip()
            return f"{how}: {said}" if said else how
        case "unpicklable":
            return f"returned {outcome['error']}; return plain data, or leave it in model_dir"
        case "too large":
            return f"returned a value of {outcome['error']}; leave large results in model_dir"
        case "value lost":
            return f"returned a value that could not be kept: {outcome['error']}"
        case "over memory":
            return f"used more memory than it may: {outcome['error']}"
        case "gpu failed":
            return "was ended by hopsgpu: its GPU has failed, and it did not end by itself"
        case "files lost":
            return f"could not read or write its files, as on a full disk: {outcome['error']}"
        case "not started":
            return f"could not be started: {outcome['error']}"
    return _how_without_a_word(end)


def _how_without_a_word(end: Ended) -> str:
    if end.signal is None:
        return (
            f"ended with exit code {end.exit_code} and without a value or an exception: it, or a"
            " library, called os._exit"
        )
    if end.signal == "SIGBUS":
        return (
            "was ended by SIGBUS: memory that it had mapped could not be had, most often because"
            f" /dev/shm on {end.place.container.host} is full (df -h /dev/shm), which DataLoader"
            " workers and NCCL use; the Python stack of its threads is in its log"
        )
    if end.signal in _CRASHES:
        why = why_aborted(end.log_tail) or "native code crashed or gave up"
        return f"was ended by {end.signal}: {why}; the Python stack of its threads is in its log"
    if end.signal == "SIGKILL" and end.oom_kills:
        return (
            "was ended by SIGKILL: the kernel killed it because its container, or the node, had no"
            " memory left; raise memory_per_worker, or use less"
        )
    if end.signal == "SIGKILL":
        return (
            "was ended by SIGKILL, which hopsgpu did not send: somebody's kill -9, or the kernel"
            f" for want of memory (dmesg on {end.place.container.host} tells)"
        )
    return f"was ended by {end.signal}, which hopsgpu did not send"


def _known(end: Ended) -> tuple[str | None, Blame]:
    """What to do about an error that is known, and what is to blame for it.

    The last lines of a log may tell of what was overcome: they blame nobody, and are not asked
    where the signal says all. An event that a program causes says less than its error.
    """
    faults = [event for event in end.gpu_events if event.state != HEALTHY]
    if faults:
        fatal = any(event.is_fatal for event in faults)
        return _told_of(faults, end), Blame.GPU if fatal else Blame.NOTHING
    told = end.outcome.get("error") if end.status == "raised" else None
    if told is None and (end.status is not None or end.signal == "SIGKILL"):
        return None, Blame.NOTHING
    for pattern, advice, blame in _ADVICE:
        if re.search(pattern, "\n".join(end.log_tail) if told is None else told, re.MULTILINE):
            if not end.place.gpus and "{gpus}" in advice:
                return _NO_GPU, Blame.NOTHING
            gpus, host = ", ".join(end.place.gpus), end.place.container.host
            return advice.format(host=host, gpus=gpus), Blame.NOTHING if told is None else blame
    return _told_of(end.gpu_events, end) if end.gpu_events else None, Blame.NOTHING


def _told_of(events: Sequence[GpuEvent], end: Ended) -> str:
    host = end.place.container.host
    said = dict.fromkeys(f"{event.gpu} of {host}: {event.reason}" for event in events)
    return f"the driver told of {'; '.join(said)}"


def to_avoid(end: Ended) -> Avoid:
    """The GPU or node whose fault a rank's end was, as far as its error and the driver tell."""
    host = end.place.container.host
    if (failed := failed_gpus([end])).is_any:
        return failed
    _, blame = _known(end)
    if blame is Blame.GPU:
        return Avoid(gpus=frozenset((host, gpu) for gpu in end.place.gpus))
    return Avoid(hosts=frozenset({host} if blame is Blame.HOST else ()))


def failed_gpus(ends: Iterable[Ended]) -> Avoid:
    """The GPUs that the driver gave up, whichever of the ranks failed first of it."""
    return Avoid(
        gpus=frozenset(
            (end.place.container.host, event.gpu)
            for end in ends
            for event in end.gpu_events
            if event.is_fatal
        )
    )


def likely_cause(place: RankPlace, ends: Iterable[Ended]) -> str:
    """What the driver told of other ranks' GPUs that failed; "" where nothing, or of its own too.

    The peers of a rank whose GPU fails may fail before it does, of a collective that broke off.

    Args:
        place: of the rank whose failure is told.
        ends: of all ranks.
    """
    failed = [
        (end, events) for end in ends if (events := [e for e in end.gpu_events if e.is_fatal])
    ]
    if any(end.place.rank == place.rank for end, _ in failed):
        return ""
    return "; ".join(f"{_told_of(events, end)} (rank {end.place.rank})" for end, events in failed)
