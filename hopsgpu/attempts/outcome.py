"""The ends of an attempt's ranks, and the first failure with its cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hopsgpu.attempts import failures
from hopsgpu.attempts.failures import RankExit
from hopsgpu.attempts.retry_policy import (
    FailureCause,
    failure_cause,
    has_exceeded_memory,
    suspect_host,
    was_preempted,
)
from hopsgpu.control.channel import Message
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import Exclusions, GangExecutor, RankPlacement, World
from hopsgpu.core.gpu_idle import IdleVerdict
from hopsgpu.errors import RankFailed
from hopsgpu.gpu.driver_events import GpuEvent

# A lost container is a cause; its consequences in other ranks can be reported before the loss.
_LOST_SECONDS = 1.0


def rank_exit(place: RankPlacement, message: Message) -> RankExit:
    return RankExit(
        place=place,
        at=message["time"] + place.container.clock,
        exit_code=message["exit_code"],
        signal=message["signal"],
        outcome=message["outcome"],
        log_tail=message["log_tail"],
        was_stopped=bool(message["stopped"]),
        oom_kills=message["oom_kills"],
        gpu_events=tuple(GpuEvent(**event) for event in message["gpu_events"]),
        was_pruned=bool(message.fields.get("pruned")),
    )


def unusual_exit_warnings(end: RankExit) -> list[str]:
    """Return warnings about a rank that returned a value but whose process ended unusually.

    There are none about a rank that returned no value, because that is a failure.
    """
    if not end.has_returned:
        return []
    warnings = []
    rank = end.place.rank
    if end.status == "exited normally":
        warnings.append(f"rank {rank} called sys.exit(0); its value is None")
    if (end.signal or end.exit_code) and not end.was_stopped:
        how = end.signal or f"exit code {end.exit_code}"
        over = end.outcome.get("error")
        why = f": it exceeded its memory limit: {over}" if over else ""
        warnings.append(f"rank {rank} returned, and then its process ended with {how}{why}")
    return warnings


@dataclass(frozen=True)
class AttemptFailure:
    """Why an attempt failed.

    Attributes:
        error: the error for the first failure by time.
        exclusions: the GPU or node to blame for it, and GPUs of any rank that failed.
        suspect_host: the node that may be to blame for a lost executor, or for a rank that failed
            because of the infrastructure; or None.
        was_preempted: whether YARN took the executor for another queue.
        is_loss: whether something was lost: an executor, a node, a GPU, or a rank that something
            other than hopsgpu killed. The user's code is then not the cause.
        reason: the reason of the run's end, if the run is not retried.
    """

    error: RankFailed
    cause: FailureCause
    exclusions: Exclusions = Exclusions()
    suspect_host: str | None = None
    was_preempted: bool = False
    is_loss: bool = False
    reason: EndReason = EndReason.USER_ERROR


@dataclass(frozen=True)
class IdleEnd:
    """Why ranks were stopped whose GPUs idled.

    Attributes:
        timeout: how long they might idle, in seconds.
        rank: the first rank that was still running.
    """

    verdict: IdleVerdict
    timeout: float
    rank: int


@dataclass(frozen=True)
class _Loss:
    place: RankPlacement
    at: float
    reason: str


class RankEnds:
    """Collects the ends of an attempt's ranks.

    Attributes:
        pending: the ranks that have not ended.
    """

    def __init__(self, world: World, log_url: Callable[[int], str]) -> None:
        self._world = world
        self._log_url = log_url
        self._ends: dict[int, RankExit] = {}
        self._losses: list[_Loss] = []
        self.pending = {place.rank for place in world.processes}

    @property
    def chief_has_returned(self) -> bool:
        """Return whether rank 0 has returned where there are parameter servers, which never do."""
        chief = self._ends.get(0)
        return bool(self._world.servers) and chief is not None and chief.has_returned

    def end(self, end: RankExit) -> None:
        self._ends[end.place.rank] = end
        self.pending.discard(end.place.rank)

    def lose(self, place: RankPlacement, reason: str, at: float) -> None:
        """Record that a rank was lost with its executor."""
        self.pending.discard(place.rank)
        self._losses.append(_Loss(place, at - _LOST_SECONDS, reason))

    def conclude(
        self,
        reason: Callable[[GangExecutor], str],
        overdue: Sequence[int] = (),
        timeout: float | None = None,
        idle: IdleEnd | None = None,
    ) -> AttemptFailure | None:
        """Return why the attempt failed, or None if it did not.

        Args:
            reason: asks Spark and the cluster manager why an executor was lost, and returns their
                answer; "" if they do not know.
            overdue: the ranks that had not ended at the timeout, in order.
            timeout: seconds that the ranks were allowed.
            idle: why the ranks were stopped, if their GPUs idled for too long.
        """
        ends = list(self._ends.values())
        first, failed_gpus = failures.first_failure(ends), failures.failed_gpus(ends)
        loss = self._losses[0] if self._losses else None
        if self.chief_has_returned:
            chief = self._ends[0]
            # Failures after the chief's return are consequences of it, and do not count.
            first = first if first is not None and first.at < chief.at else None
            loss = loss if loss is not None and loss.at < chief.at else None
        elif overdue:
            return self._conclude_timeout(overdue, timeout or 0.0)
        elif idle is not None:
            return self._conclude_idle(idle)
        if loss is not None and (first is None or loss.at <= first.at):
            why = reason(loss.place.container) or _describe(loss.reason)
            url, likely = self._log_url(loss.place.rank), failures.likely_cause(loss.place, ends)
            return AttemptFailure(
                failures.executor_lost_error(loss.place, why, url, likely),
                FailureCause.INFRASTRUCTURE,
                failed_gpus,
                suspect_host=suspect_host(loss.place.container.host, why),
                was_preempted=was_preempted(why),
                is_loss=True,
                reason=EndReason.GPU_FAILED if failed_gpus.is_any else _reason_of_loss(why),
            )
        if first is None:
            return None
        workers = [end for rank, end in self._ends.items() if rank < self._world.size]
        cause, exclusions = failure_cause(first, workers), failures.exclusions_after(first)
        is_infrastructure = cause is FailureCause.INFRASTRUCTURE
        url, likely = self._log_url(first.place.rank), failures.likely_cause(first.place, ends)
        return AttemptFailure(
            failures.rank_error(first, url, likely),
            cause,
            exclusions | failed_gpus,
            first.place.container.host if is_infrastructure else None,
            is_loss=is_infrastructure
            or failures.was_killed(first)
            or (exclusions | failed_gpus).is_any,
            reason=_reason_of_end(first, cause, failed_gpus),
        )

    def _conclude_idle(self, idle: IdleEnd) -> AttemptFailure:
        place, rank = self._world.processes[idle.rank], idle.rank
        failure = failures.idle_error(
            place, idle.verdict, idle.timeout, self._ends.get(rank), self._log_url(rank)
        )
        return AttemptFailure(failure, FailureCause.IDLE, reason=EndReason.GPUS_IDLE)

    def _conclude_timeout(self, overdue: Sequence[int], timeout: float) -> AttemptFailure:
        rank, ends = overdue[0], list(self._ends.values())
        place = self._world.processes[rank]
        failure = failures.timeout_error(
            place,
            timeout,
            overdue,
            self._ends.get(rank),
            self._log_url(rank),
            failures.likely_cause(place, ends),
        )
        failed_gpus = failures.failed_gpus(ends)
        reason = EndReason.GPU_FAILED if failed_gpus.is_any else EndReason.TIMEOUT
        return AttemptFailure(failure, FailureCause.RANK, failed_gpus, reason=reason)


def _reason_of_loss(why: str) -> EndReason:
    if was_preempted(why):
        return EndReason.PREEMPTED
    return EndReason.OUT_OF_MEMORY if has_exceeded_memory(why) else EndReason.EXECUTOR_LOST


def _reason_of_end(first: RankExit, cause: FailureCause, failed_gpus: Exclusions) -> EndReason:
    if (failures.exclusions_after(first) | failed_gpus).gpus:
        return EndReason.GPU_FAILED
    if failures.is_out_of_memory(first):
        return EndReason.OUT_OF_MEMORY
    if cause is FailureCause.INFRASTRUCTURE:
        return EndReason.NOT_STARTED
    return EndReason.KILLED if failures.was_killed(first) else EndReason.USER_ERROR


def _describe(reason: str) -> str:
    """Return why an executor was lost, if only the control channel knows something."""
    if reason.startswith("no heartbeat"):
        return reason
    # The cluster manager counts a node as lost only after a while.
    how = f" ({reason})" if reason else ""
    return f"its connection ended{how}, and nothing more is known; its node may be down"
