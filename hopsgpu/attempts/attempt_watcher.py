"""The watcher of an attempt: when its ranks are stopped, given up, or presumed lost.

The module is pure: the clock's reading is a parameter. `attempts.attempt` performs the decisions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from hopsgpu.attempts.failures import RankExit
from hopsgpu.attempts.outcome import RankEnds
from hopsgpu.control.channel import Message
from hopsgpu.core.gang import RankPlacement
from hopsgpu.core.gpu_idle import IdleBounds
from hopsgpu.core.output_limits import REST_SECONDS


@dataclass(frozen=True)
class WatchBounds:
    """How long an attempt is waited for, in seconds.

    Attributes:
        stop: from the order to stop until ranks are given up: time for SIGTERM, 5 s of grace,
            SIGKILL, and the agents' messages to the driver.
        rest: more time for the rest of the output, as long as messages arrive.
        alike: after one rank's exception, for others to raise the same exception.
        quiet: without an event after the end of the gang's job, until an agent is presumed lost.
        saving: for the upload of a checkpoint by a rank that has ended.
        idle: for GPUs that idle while the function runs.
    """

    stop: float = 15.0
    rest: float = REST_SECONDS
    alike: float = 0.5
    quiet: float = 2.0
    saving: float = 120.0
    idle: IdleBounds = IdleBounds()


class Step(Enum):
    """The next action on the ranks of an attempt."""

    WAIT = "wait"
    STOP = "stop"
    # The stacks show where overdue ranks, or ranks with idle GPUs, are.
    DUMP_AND_STOP = "dump the stacks and stop"
    GIVE_UP = "give up"


class AttemptWatcher:
    """Watches the ranks of one attempt.

    Attributes:
        overdue: the ranks that had not ended at the timeout.
    """

    def __init__(
        self, ends: RankEnds, timeout: float | None, bounds: WatchBounds = WatchBounds()
    ) -> None:
        self.overdue: tuple[int, ...] = ()
        self._ends = ends
        self._timeout = timeout
        self._bounds = bounds
        self._overdue_at: float | None = None
        self._failed_at: float | None = None
        self._stop_until: float | None = None
        self._rest_until = 0.0
        self._quiet_since: float | None = None
        # Ranks that have ended, except that their checkpoints are still uploading, and since when.
        self._saving: dict[int, float] = {}

    @property
    def has_failed(self) -> bool:
        """Return whether a failure was seen, after which the other ranks are stopped."""
        return self._failed_at is not None

    @property
    def has_only_uploads(self) -> bool:
        """Return whether the ranks that have not ended are gone, and only upload checkpoints."""
        return bool(self._ends.pending) and self._ends.pending <= self._saving.keys()

    def start_timeout(self, now: float) -> None:
        """Record that the ranks were started: the timeout counts from now on."""
        self._overdue_at = None if self._timeout is None else now + self._timeout

    def decide(self, *, is_cancelled: bool, now: float, have_gpus_idled: bool = False) -> Step:
        """Return what to do next."""
        if self._stop_until is not None:
            return Step.GIVE_UP if now > self._stop_until else Step.WAIT
        is_late = self._overdue_at is not None and now >= self._overdue_at
        if is_late and self._failed_at is None:
            # A rank that only uploads is not too late.
            self.overdue = tuple(sorted(self._ends.pending - self._saving.keys()))
        failed = self._failed_at is not None and now >= self._failed_at
        if not (
            is_cancelled
            or failed
            or have_gpus_idled
            or self.overdue
            or self._ends.chief_has_returned
        ):
            return Step.WAIT
        self._stop_until = now + self._bounds.stop
        self._rest_until = self._stop_until + self._bounds.rest
        return Step.DUMP_AND_STOP if self.overdue or have_gpus_idled else Step.STOP

    def record_message(self, message: Message | None, now: float) -> None:
        """Record that a message of an agent, or the end of its connection (None), has arrived.

        Ranks that are being stopped get more time after a message, up to a limit: output may still
        be on its way, and a rank may print faster than its output is processed. A rank that has
        ended but still uploads checkpoints gets two minutes.
        """
        # The agent of a rank that no signal ends continues to report how long the rank is blocked.
        extends_wait, limit = message is None or message.kind != "blocked", self._rest_until
        if message is not None and message.kind == "saving":
            since = self._saving.setdefault(message["rank"], now)
            extends_wait, limit = now - since < self._bounds.saving, float("inf")
        if self._stop_until is not None and extends_wait:
            self._stop_until = max(self._stop_until, min(now + self._bounds.stop, limit))

    def record_failure(self, now: float, *, has_raised: bool) -> None:
        """Record that a rank is about to end as failed."""
        if self._failed_at is None:
            self._failed_at = now + (self._bounds.alike if has_raised else 0.0)

    def record_end(self, end: RankExit, now: float) -> bool:
        """Record the end of a rank; return whether it is the first failure that was seen."""
        self._ends.end(end)
        if end.has_returned or end.was_stopped or self._failed_at is not None:
            return False
        # Other ranks may be about to raise the same exception.
        self.record_failure(now, has_raised=end.status == "raised" and bool(self._ends.pending))
        return True

    def record_loss(self, place: RankPlacement, reason: str, *, at: float, now: float) -> bool:
        """Record that an executor was lost; return whether one of its ranks still ran.

        Args:
            at: the time in seconds since the epoch.
        """
        if place.rank not in self._ends.pending:
            return False
        self._ends.lose(place, reason, at)
        self._failed_at = now
        return True

    def find_presumed_lost(
        self, jobless: Collection[int], *, has_event: bool, now: float
    ) -> int | None:
        """Return the key of an agent to presume lost, or None.

        Spark may detect a lost node, and end the other tasks, while the control channel's
        connection to that node still seems to be open. So if no event arrives for a while after
        the end of its job, an agent that is connected is presumed lost.

        Args:
            jobless: keys of the agents that are connected although their job has ended.
        """
        if has_event or not jobless:
            self._quiet_since = None
            return None
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < self._bounds.quiet:
            return None
        return min(jobless)
