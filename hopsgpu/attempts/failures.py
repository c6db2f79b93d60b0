"""Errors for failed ranks: where the rank was, how it ended, the likely cause, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hopsgpu.attempts.native_failures import why_aborted
from hopsgpu.core.container_ids import describe_log
from hopsgpu.core.gang import Exclusions, RankPlacement
from hopsgpu.core.gpu_idle import IdleVerdict
from hopsgpu.errors import GpusIdle, RankFailed, RunTimeout
from hopsgpu.gpu.driver_events import GpuEvent
from hopsgpu.gpu.node.health import HEALTHY
from hopsgpu.packaging.sources import add_source_lines
from hopsgpu.rank.entry import SUCCESSFUL

# When a rank is killed or crashes, its peers raise exceptions, which may be reported earlier.
_SILENT_EXIT_SECONDS = 0.05
# Lines of the log in the error of a rank that called sys.exit; usage messages have several lines.
_EXIT_LINES = 10
_STACKS = "the stacks of all threads are at the end of the logs"


class FailedComponent(Enum):
    """The component that caused a failure; the next attempt excludes it."""

    NOTHING = "nothing"
    GPU = "GPU"
    HOST = "host"


_GPU_MEMORY = (
    r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|OutOfMemoryError: CUDA|OOM when allocating tensor"
)
_HOST_MEMORY = (
    r"^MemoryError|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: can't allocate"
)
_NO_TERMINAL = "a rank has no terminal: to debug the function, call it without launch()"
_UUIDS = "CUDA_VISIBLE_DEVICES contains UUIDs: use range(torch.cuda.device_count()) instead"
_NO_STORE = "a second process group of all ranks needs a store of its own (docs/pytorch.md)"
# A pattern of an error's text (the most specific first), the remedy, and the failed component.
_ADVICE = (
    (
        r"driver on your system is too old|CUDA driver version is insufficient"
        r"|cudaErrorInsufficientDriver|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH|no kernel image is avail",
        "the NVIDIA driver or GPU of {host} does not support the CUDA version of the ranks' Python"
        " environment: use an environment for a CUDA version that they support, or ask an"
        " administrator to update the driver of that node",
        FailedComponent.HOST,
    ),
    (
        _GPU_MEMORY,
        "the memory of GPU {gpus} is full: use smaller batches or a smaller model, and check with"
        " nvidia-smi on {host} whether another process uses that GPU",
        FailedComponent.NOTHING,
    ),
    (
        r"uncorrectable ECC|cudaErrorECCUncorrectable|GPU is lost|fallen off the bus"
        r"|cudaErrorHardwareStackError|CUDA_ERROR_ECC_UNCORRECTABLE|unknown error.*nvml",
        "GPU {gpus} of {host} is broken or lost: ask an administrator to check it",
        FailedComponent.GPU,
    ),
    (
        r"No CUDA GPUs are available|no CUDA-capable device|CUDA_ERROR_NO_DEVICE"
        r"|cudaErrorDevicesUnavailable|busy or unavailable",
        "the rank cannot open GPU {gpus} of {host}",
        FailedComponent.GPU,
    ),
    (
        _HOST_MEMORY,
        "the system refused it more memory: raise memory_per_worker, or use less memory",
        FailedComponent.NOTHING,
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk of {host} is full, or a quota on it is exhausted: write less there, or ask an"
        " administrator to free space",
        FailedComponent.NOTHING,
    ),
    (
        r"^(ModuleNotFoundError|ImportError)",
        "the ranks' Python (spark.pyspark.python) lacks it, and it is not one of your own modules"
        " that hopsgpu sent: install it with python_env=",
        FailedComponent.NOTHING,
    ),
    (r"^(EOFError: EOF when|BdbQuit)", _NO_TERMINAL, FailedComponent.NOTHING),
    (r"invalid literal for int\(\) .*'(GPU|MIG)-", _UUIDS, FailedComponent.NOTHING),
    (r"Gloo connectFullMesh failed", _NO_STORE, FailedComponent.NOTHING),
)
_NO_GPU = (
    "this process has no GPU, because it is a parameter server or gpus_per_worker=0: request GPUs,"
    " or use only the CPU"
)
# Lines of an exception's message that are shown before its traceback.
_MAX_LINES = 3
_KILLS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS")


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended, as its agent reported it.

    Attributes:
        at: seconds since the epoch, by the driver's clock.
        outcome: what the rank recorded: "status", and "error" and "traceback" if it failed.
        oom_kills: processes of the container that the kernel killed because memory ran out.
        gpu_events: events of the rank's GPUs that the NVIDIA driver reported.
    """

    place: RankPlacement
    at: float
    exit_code: int | None
    signal: str | None
    outcome: Mapping[str, str]
    log_tail: Sequence[str]
    was_stopped: bool
    oom_kills: int = 0
    gpu_events: Sequence[GpuEvent] = ()
    was_pruned: bool = False

    @property
    def status(self) -> str | None:
        """The recorded status; None if the rank recorded nothing."""
        return self.outcome.get("status")

    @property
    def has_returned(self) -> bool:
        return self.status in SUCCESSFUL


def was_killed(end: RankExit) -> bool:
    """Return whether something other than hopsgpu killed the rank, not because of its memory."""
    return (
        end.signal in _KILLS
        and not end.was_stopped
        and end.status != "over memory"
        and not end.oom_kills
    )


def is_out_of_memory(end: RankExit) -> bool:
    """Return whether a rank failed because the memory of the host or of a GPU ran out."""
    if end.status == "over memory" or end.oom_kills:
        return True
    error = end.outcome.get("error", "") if end.status == "raised" else ""
    return re.search(f"{_GPU_MEMORY}|{_HOST_MEMORY}", error, re.MULTILINE) is not None


def first_failure(ends: Sequence[RankExit]) -> RankExit | None:
    """Return the end that was the first failure by time; None if no rank failed.

    Ranks that hopsgpu stopped did not fail. Every exit except an exception counts as 50 ms earlier:
    when a rank is killed or crashes, the exception of another rank may be reported first.
    """
    failed = [end for end in ends if not end.has_returned and not end.was_stopped]
    return min(failed, key=_failure_time, default=None)


def _failure_time(end: RankExit) -> float:
    return end.at - (0.0 if end.status == "raised" else _SILENT_EXIT_SECONDS)


def rank_error(end: RankExit, log_url: str, cause: str = "") -> RankFailed:
    """Return the error for a rank's exit, with the user's traceback and the end of the log.

    Args:
        cause: the result of `likely_cause`.
    """
    how, (advice, _) = _describe_exit(end), _find_advice(end)
    # The cause is in the first line, because only that line survives a retry.
    because = f"failed, likely because {cause}. It " if cause else ""
    parts = [f"{where(end.place)} {because}{how}" + (f": {advice}" if advice else "")]
    if besides := end.outcome.get("besides"):
        parts.append(_indent_below(*besides.splitlines()))
    traceback = end.outcome.get("traceback")
    if traceback:
        if end.status == "exited" and end.log_tail:
            parts.append(_tail(end.log_tail[-_EXIT_LINES:]))
        traceback = add_source_lines(traceback)
        parts.append(traceback)
    elif end.log_tail:
        parts.append(_tail(end.log_tail))
    parts.append(f"whole log: {log_url}")
    fields = _error_fields(end.place, end, log_url)
    return RankFailed("\n".join(parts), summary=_summarize_exit(end), traceback=traceback, **fields)


def _summarize_exit(end: RankExit) -> str:
    """Return how a rank failed in one line, without its place; an exception comes first."""
    if end.status == "raised":
        return end.outcome["error"].strip().partition("\n")[0]
    return f"{_name(end.place)} {_describe_exit(end)}".partition("\n")[0]


def timeout_error(
    place: RankPlacement,
    seconds: float,
    running: Sequence[int],
    end: RankExit | None,
    log_url: str,
    cause: str = "",
) -> RunTimeout:
    """Return the error for ranks that did not return within `run_timeout`.

    Args:
        place: the place of the first running rank.
        running: the ranks that were still running.
        end: the exit of the first running rank after it was stopped; None if it was not reported.
        cause: the result of `likely_cause`.
    """
    which = ", ".join(map(str, running[:20])) + (", ..." if len(running) > 20 else "")
    summary = f"run_timeout={seconds:g} s: {_name(place)} was still running"
    peers = f"; {len(running)} ranks were still running ({which})" if len(running) > 1 else ""
    text = f"{where(place)} was still running after run_timeout={seconds:g} s{peers}"
    text += f"{_likely_suffix(cause)}; {_STACKS}"
    fields = _error_fields(place, end, log_url)
    return RunTimeout(_with_log(text, end, log_url), summary=summary, **fields)


def idle_error(
    place: RankPlacement, verdict: IdleVerdict, timeout: float, end: RankExit | None, log_url: str
) -> GpusIdle:
    """Return the error for a gang whose GPUs idled for `gpu_idle_timeout`.

    Args:
        place: the place of the first rank that was still running.
        timeout: gpu_idle_timeout, in seconds.
        end: the exit of that rank after it was stopped; None if it was not reported.
    """
    text = (
        f"{verdict}, and gpu_idle_timeout={timeout:g} s ended the run; {where(place)} was still"
        f" running; {_STACKS}. Does the function wait for data or for a lock, or compute on the CPU"
        " alone? Do that before the launch, or give a longer gpu_idle_timeout"
    )
    summary = f"gpu_idle_timeout={timeout:g} s: {verdict}"
    fields = _error_fields(place, end, log_url)
    return GpusIdle(
        _with_log(text, end, log_url), summary=summary, seconds=verdict.seconds, **fields
    )


def _with_log(text: str, end: RankExit | None, log_url: str) -> str:
    tail = [_tail(end.log_tail)] if end is not None and end.log_tail else []
    return "\n".join([text, *tail, f"whole log: {log_url}"])


def _error_fields(place: RankPlacement, end: RankExit | None, log_url: str) -> dict[str, Any]:
    return {
        "rank": place.rank,
        "host": place.container.host,
        "container": place.container.container_id,
        "gpus": place.gpus,
        "exit_code": end.exit_code if end is not None else None,
        "signal": end.signal if end is not None else None,
        "log_tail": tuple(end.log_tail) if end is not None else (),
        "log_url": log_url,
    }


def executor_lost_error(
    place: RankPlacement, reason: str, log_url: str, cause: str = ""
) -> RankFailed:
    """Return the error for a rank whose executor was lost.

    Args:
        reason: the reason from YARN, Spark or the control channel.
        cause: the result of `likely_cause`.
    """
    container = place.container
    logs = describe_log(container.container_id, container.host)
    logs = f"{logs} " if logs else ""
    advice = "; raise memory_per_worker" if "memory limit" in reason else ""
    return RankFailed(
        f"the executor of rank {place.rank} on {container.host} was lost (container"
        f" {container.container_id}): {reason.rstrip('.')}{advice}{_likely_suffix(cause)}. {logs}"
        f"The rank's log, as far as it arrived: {log_url}",
        summary=f"the executor of rank {place.rank} was lost: {reason.rstrip('.')}",
        **_error_fields(place, None, log_url),
    )


def where(place: RankPlacement) -> str:
    container = place.container
    return (
        f"{_name(place)} on {container.host} (container {container.container_id},"
        f" GPU {', '.join(place.gpus) or 'none'})"
    )


def _name(place: RankPlacement) -> str:
    return f"{'parameter server' if place.role == 'ps' else 'rank'} {place.rank}"


def _likely_suffix(cause: str) -> str:
    return f", likely because {cause}" if cause else ""


def _tail(lines: Sequence[str]) -> str:
    return _indent_below("the last lines of its log:", *lines)


def _indent_below(heading: str, *lines: str) -> str:
    return "\n".join(
        [heading, *(f"  {line}" for line in add_source_lines("\n".join(lines)).splitlines())]
    )


def _describe_exit(end: RankExit) -> str:
    outcome = end.outcome
    match end.status:
        case "raised":
            # The traceback has the whole message, and any tracebacks that the message contains.
            lines = outcome["error"].strip().splitlines()
            return f"raised {outcome['error'] if len(lines) <= _MAX_LINES else lines[0] + ' ...'}"
        case "exited":
            how = f"called sys.exit: exit code {end.exit_code}"
            # The last line usually has the reason, for instance argparse's error below the usage.
            last = next(filter(str.strip, reversed(end.log_tail)), "")
            reason = outcome.get("error", last).strip()
            return f"{how}: {reason}" if reason else how
        case "unpicklable":
            return f"returned {outcome['error']}; return plain data, or leave it in model_dir"
        case "too large":
            return f"returned a value of {outcome['error']}; leave large results in model_dir"
        case "value lost":
            return f"returned a value that could not be stored: {outcome['error']}"
        case "over memory":
            return f"exceeded its memory limit: {outcome['error']}"
        case "gpu failed":
            return "was stopped by hopsgpu: its GPU has failed, and it did not end by itself"
        case "files lost":
            return f"could not read or write its files (is the disk full?): {outcome['error']}"
        case "not started":
            return f"could not be started: {outcome['error']}"
    return _describe_silent_exit(end)


def _describe_silent_exit(end: RankExit) -> str:
    if end.signal is None:
        return (
            f"ended with exit code {end.exit_code} and without a value or an exception: a program"
            " took its place (os.execv, --no-python), or it, or a library, called os._exit"
        )
    if end.signal == "SIGBUS":
        return (
            "was ended by SIGBUS: memory that it had mapped was not available, most often because"
            f" /dev/shm on {end.place.container.host} is full (df -h /dev/shm), which DataLoader"
            " workers and NCCL use; the Python stack of its threads is in its log"
        )
    if end.signal in _CRASHES:
        why = why_aborted(end.log_tail) or "native code crashed or aborted"
        return f"was ended by {end.signal}: {why}; the Python stack of its threads is in its log"
    if end.signal == "SIGKILL" and end.oom_kills:
        return (
            "was ended by SIGKILL: the kernel killed it because its container, or the node, had no"
            " memory left; raise memory_per_worker, or use less memory"
        )
    if end.signal == "SIGKILL":
        return (
            "was ended by SIGKILL, which hopsgpu did not send: somebody ran kill -9, or the kernel"
            f" had no memory left (see dmesg on {end.place.container.host})"
        )
    return f"was ended by {end.signal}, which hopsgpu did not send"


def _find_advice(end: RankExit) -> tuple[str | None, FailedComponent]:
    """Return the remedy for a known error, and the failed component.

    The last lines of a log may report problems that the program overcame. They therefore exclude no
    component, and are ignored if the signal or the rank's status explains the exit. A GPU event
    that a program can cause by itself is less specific than the program's error.
    """
    faults = [event for event in end.gpu_events if event.state != HEALTHY]
    if faults:
        is_fatal = any(event.is_fatal for event in faults)
        component = FailedComponent.GPU if is_fatal else FailedComponent.NOTHING
        return _describe_events(faults, end), component
    raised = end.outcome.get("error") if end.status == "raised" else None
    if raised is None and (end.status is not None or end.signal == "SIGKILL"):
        return None, FailedComponent.NOTHING
    for pattern, advice, component in _ADVICE:
        if re.search(pattern, "\n".join(end.log_tail) if raised is None else raised, re.MULTILINE):
            if not end.place.gpus and "{gpus}" in advice:
                return _NO_GPU, FailedComponent.NOTHING
            host = end.place.container.host
            text = advice.format(host=host, gpus=", ".join(end.place.gpus))
            return text, FailedComponent.NOTHING if raised is None else component
    reports = _describe_events(end.gpu_events, end) if end.gpu_events else None
    return reports, FailedComponent.NOTHING


def _describe_events(events: Sequence[GpuEvent], end: RankExit) -> str:
    host = end.place.container.host
    reports = dict.fromkeys(f"{event.gpu} of {host}: {event.reason}" for event in events)
    return f"the NVIDIA driver reported {'; '.join(reports)}"


def exclusions_after(end: RankExit) -> Exclusions:
    """Return the GPU or node that failed, from the rank's error and the driver's events."""
    host = end.place.container.host
    if (failed := failed_gpus([end])).is_any:
        return failed
    _, component = _find_advice(end)
    if component is FailedComponent.GPU:
        return Exclusions(gpus=frozenset((host, gpu) for gpu in end.place.gpus))
    return Exclusions(hosts=frozenset({host} if component is FailedComponent.HOST else ()))


def failed_gpus(ends: Iterable[RankExit]) -> Exclusions:
    """Return the GPUs of all ranks for which the driver reported a fatal event."""
    return Exclusions(
        gpus=frozenset(
            (end.place.container.host, event.gpu)
            for end in ends
            for event in end.gpu_events
            if event.is_fatal
        )
    )


def likely_cause(place: RankPlacement, ends: Iterable[RankExit]) -> str:
    """Describe the driver's events of other ranks' failed GPUs.

    When a GPU fails, peers of its rank may fail first, because a collective operation was aborted.

    Returns:
        "" if there are no such events, or if a GPU of the rank itself failed.
    """
    failed = [
        (end, events) for end in ends if (events := [e for e in end.gpu_events if e.is_fatal])
    ]
    if any(end.place.rank == place.rank for end, _ in failed):
        return ""
    return "; ".join(
        f"{_describe_events(events, end)} (rank {end.place.rank})" for end, events in failed
    )
