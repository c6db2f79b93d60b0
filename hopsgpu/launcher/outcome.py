"""The ends of an attempt's ranks, and the conclusion from them: the first failure and its fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hopsgpu.control.channel import Message
from hopsgpu.core.gang import Exclusions, RankPlace, World
from hopsgpu.errors import RankFailed
from hopsgpu.gpu.driver_events import GpuEvent
from hopsgpu.launcher import failures
from hopsgpu.launcher.failures import EndedRank
from hopsgpu.launcher.retry_policy import Fault, fault_of, suspect

# A lost container is a cause; its consequences in other ranks can be reported before the loss.
_LOST_SECONDS = 1.0
# When a rank ends, its checkpoints may still be uploading to the lake.
_SAVING_SECONDS = 120.0


def ended_rank(place: RankPlace, message: Message) -> EndedRank:
    """Return a rank's end, from its agent's message."""
    return EndedRank(
        place=place,
        at=message["time"] + place.container.clock,
        exit_code=message["exit_code"],
        signal=message["signal"],
        outcome=message["outcome"],
        log_tail=message["log_tail"],
        stopped=bool(message["stopped"]),
        oom_kills=message["oom_kills"],
        gpu_events=tuple(GpuEvent(**event) for event in message["gpu_events"]),
    )


def odd_end(end: EndedRank) -> list[str]:
    """Return warnings about a rank that returned a value but whose process ended unusually."""
    warnings = []
    rank = end.place.rank
    if end.status == "exited normally":
        warnings.append(f"rank {rank} called sys.exit(0); its value is None")
    if (end.signal or end.exit_code) and not end.stopped:
        how = end.signal or f"exit code {end.exit_code}"
        over = end.outcome.get("error")
        why = f": it used more memory than it may: {over}" if over else ""
        warnings.append(f"rank {rank} returned, and then its process ended with {how}{why}")
    return warnings


@dataclass(frozen=True)
class Conclusion:
    """Why an attempt failed.

    Attributes:
        failure: the first failure by time.
        fault: whose fault it was.
        avoid: the GPU or node to blame for it, and GPUs of any rank that failed.
        suspect: the node that may be to blame for a lost executor, or for a rank that failed
            because of the infrastructure; or None.
    """

    failure: RankFailed
    fault: Fault
    avoid: Exclusions = Exclusions()
    suspect: str | None = None


@dataclass(frozen=True)
class _Loss:
    place: RankPlace
    at: float
    reason: str


class RankEnds:
    """Collects the ends of an attempt's ranks.

    Args:
        world: the attempt's ranks.
        log_url: returns the URL of a rank's log.

    Attributes:
        pending: the ranks that have not ended.
        overdue: the ranks that had not ended at the timeout.
    """

    def __init__(self, world: World, log_url: Callable[[int], str]) -> None:
        self._world = world
        self._log_url = log_url
        self._ends: dict[int, EndedRank] = {}
        self._losses: list[_Loss] = []
        # Ranks that have ended, except that their checkpoints are still uploading, and since when.
        self._saving: dict[int, float] = {}
        self.pending = {place.rank for place in world.processes}
        self.overdue: tuple[int, ...] = ()

    def end(self, end: EndedRank) -> bool:
        """Record an end; return whether other ranks may be about to raise the same exception."""
        self._ends[end.place.rank] = end
        self.pending.discard(end.place.rank)
        return end.status == "raised" and bool(self.pending)

    def is_sign_of_life(self, message: Message | None) -> bool:
        """Return whether a message is a reason to wait longer for ranks that are being stopped.

        The message that a rank has ended but still uploads checkpoints is one for two minutes.
        """
        if message is None or message.kind != "saving":
            return True
        now = time.monotonic()
        return now - self._saving.setdefault(message["rank"], now) < _SAVING_SECONDS

    def lose(self, place: RankPlace, reason: str) -> None:
        """Record that a rank was lost with its executor."""
        self.pending.discard(place.rank)
        self._losses.append(_Loss(place, time.time() - _LOST_SECONDS, reason))

    def run_out_of_time(self) -> None:
        """Record the timeout of the ranks that still run, except those that only upload."""
        self.overdue = tuple(sorted(self.pending - self._saving.keys()))

    def conclude(self, timeout: float | None, reason: Callable[[str], str]) -> Conclusion | None:
        """Return why the attempt failed, or None if it did not.

        Args:
            timeout: seconds that the ranks were allowed.
            reason: asks Spark and YARN why the executor on a host was lost, and returns their
                answer; "" if they do not know.
        """
        ends = list(self._ends.values())
        first, failed_gpus = failures.first_failure(ends), failures.failed_gpus(ends)
        loss = self._losses[0] if self._losses else None
        chief = self._ends.get(0)
        if self._world.servers and chief is not None and chief.has_returned:
            # Failures after the chief's return are consequences of it, and do not count.
            first = first if first is not None and first.at < chief.at else None
            loss = loss if loss is not None and loss.at < chief.at else None
        elif self.overdue:
            return self._too_late(timeout or 0.0)
        if loss is not None and (first is None or loss.at <= first.at):
            why = reason(loss.place.container.host) or loss.reason or "its connection ended"
            url, cause = self._log_url(loss.place.rank), failures.likely_cause(loss.place, ends)
            return Conclusion(
                failures.executor_lost(loss.place, why, url, cause),
                Fault.INFRASTRUCTURE,
                failed_gpus,
                suspect=suspect(loss.place.container.host, why),
            )
        if first is None:
            return None
        workers = [end for rank, end in self._ends.items() if rank < self._world.size]
        fault = fault_of(first, workers)
        url, cause = self._log_url(first.place.rank), failures.likely_cause(first.place, ends)
        return Conclusion(
            failures.rank_failed(first, url, cause),
            fault,
            failures.to_avoid(first) | failed_gpus,
            first.place.container.host if fault is Fault.INFRASTRUCTURE else None,
        )

    def _too_late(self, timeout: float) -> Conclusion:
        rank, ends = self.overdue[0], list(self._ends.values())
        place = self._world.processes[rank]
        failure = failures.timed_out(
            place,
            timeout,
            self.overdue,
            self._ends.get(rank),
            self._log_url(rank),
            failures.likely_cause(place, ends),
        )
        return Conclusion(failure, Fault.RANK, failures.failed_gpus(ends))
