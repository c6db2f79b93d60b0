"""A request for executors: what to acquire, whom to notify, and how long it may take."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hopsgpu.agent.warm_up import WarmUp
from hopsgpu.cluster_managers.demand import Demand, container_of
from hopsgpu.core.gang import (
    AcquisitionProgress,
    Exclusions,
    GangExecutor,
    GangState,
    Verdict,
    decide_acquire,
    exclusion_reason,
)
from hopsgpu.core.rank_requirements import DATA
from hopsgpu.core.spec import ExecutorShape, LaunchPlan
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason
from hopsgpu.errors import Cancelled, GangTimeout
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

_SHOWN = 5


class Watcher(Protocol):
    """Receives the events of an acquisition."""

    def state(self, state: GangState, hosts: Sequence[str], why: WaitReason = NO_WAIT) -> None:
        """Report the state and the hosts granted so far; called repeatedly while waiting."""

    def mark(self, point: str) -> None:
        """Record the time of a point of the timeline."""

    def on_executors_arrived(self, times: Sequence[float]) -> None:
        """Report when executors arrived, in seconds since the epoch."""

    def on_parked(self, hosts: Sequence[str]) -> None:
        """Report the host of each executor that is parked now, because it gets no rank."""

    def warn(self, text: str) -> None:
        """Report a warning that people should find in the result."""


@dataclass(frozen=True)
class Request:
    """A request for the executors of a plan.

    Attributes:
        plan: how many executors, of which shape, where, and how long they may take.
        frameworks: top-level modules that executors import while they wait for the others.
        python_env: Python environment of the ranks, or None.
        imports: top-level modules that the executors' Python must have to unpickle the call.
    """

    run_id: str
    plan: LaunchPlan
    cancelled: threading.Event
    watcher: Watcher
    exclusions: Exclusions = Exclusions()
    frameworks: tuple[str, ...] = ()
    python_env: PythonEnv | None = None
    imports: tuple[str, ...] = ()
    has_data: bool = False

    @property
    def warm_up(self) -> WarmUp:
        return WarmUp(self.frameworks, self.plan.environment, self.python_env)

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the modules that the executors' Python needs, besides those for the lake."""
        # Only the rank knows what its Python environment contains.
        return DATA if self.has_data and self.python_env is None else ()

    def of_executors(self, executors: int) -> Request:
        return replace(self, plan=replace(self.plan, executors=executors))

    def within(self, seconds: float | None) -> Request:
        """Return the request with another time to wait; None for no limit."""
        spec = replace(self.plan.spec, acquire_timeout=seconds)
        return replace(self, plan=replace(self.plan, spec=spec))

    def exclusion_reason(self, container: GangExecutor) -> str | None:
        """Return why a container gets no rank, or None if it may get one.

        A container that gets no rank is parked until the gang is whole, because YARN would
        otherwise grant it again.
        """
        return exclusion_reason(
            container,
            self.exclusions,
            self.plan.spec.gpu_type,
            self.plan.spec.gpus.per_worker,
        )


def demand_of(shape: ExecutorShape, executors: int, placement: str | None) -> Demand:
    return Demand(container_of(shape), executors, is_spread=placement == "spread")


class AcquisitionClock:
    """The time limit of one acquisition, and the reason why it waits.

    Args:
        since: the clock's reading at the start of the acquisition; None for now.
    """

    def __init__(self, request: Request, since: float | None = None) -> None:
        self._request = request
        self._began = time.monotonic() if since is None else since
        timeout = request.plan.spec.acquire_timeout
        self._deadline = None if timeout is None else self._began + timeout
        self._why = WaitReason("Nothing yet")
        self._parked_reasons: set[str] = set()
        self._earlier_failures = ""

    def note_parked(self, reason: str) -> None:
        """Record why an executor was parked, for all later reports of the acquisition."""
        self._parked_reasons.add(reason)

    def failed_before(self, remark: str) -> None:
        """Record which executors ended before a partial release, for all later reports."""
        self._earlier_failures = remark

    def report(self, hosts: Sequence[str], why: WaitReason) -> None:
        text = str(why)
        if self._earlier_failures and "ended unexpectedly" not in text:
            why = why.with_details(f"before that, {self._earlier_failures}")
        earlier = sorted(reason for reason in self._parked_reasons if reason not in text)
        if earlier:
            more = f" and {len(earlier) - _SHOWN} more" if len(earlier) > _SHOWN else ""
            why = why.with_details(f"parked before: {', '.join(earlier[:_SHOWN])}{more}")
        if why != self._why:
            waited = time.monotonic() - self._began
            log.debug("%s: has waited %.1f s, and waits for: %s", self._request.run_id, waited, why)
        self._why = why
        self._request.watcher.state(GangState.WAITING, hosts, self._why)

    def check(self, progress: AcquisitionProgress = AcquisitionProgress()) -> Verdict:  # noqa: B008 - frozen
        """Return what to do next.

        Raises:
            Cancelled: the gang was cancelled.
            GangTimeout: the gang is not whole, and its time is over.
        """
        if self._request.cancelled.is_set():
            raise Cancelled(f"{self._request.run_id} was cancelled while it waited for executors")
        return self.check_time(progress)

    def remove_deadline(self) -> None:
        self._deadline = None

    def check_time(self, progress: AcquisitionProgress = AcquisitionProgress()) -> Verdict:  # noqa: B008 - frozen
        """Return what to do next, as `check` does, but ignore cancellation.

        Raises:
            GangTimeout: the gang is not whole, and its time is over.
        """
        plan = self._request.plan
        verdict = decide_acquire(
            progress, wanted=plan.executors, deadline=self._deadline, now=time.monotonic()
        )
        if verdict is Verdict.TIMED_OUT:
            raise GangTimeout(
                f"{progress.connected} of {count_of(plan.executors, 'executor')} arrived within"
                f" {plan.spec.acquire_timeout:g} s; all were released. The gang waited for:"
                f" {self._why}. Wait longer (acquire_timeout), request fewer workers, or see who"
                " holds the others (hopsgpu gpus)",
                granted=progress.connected,
                wanted=plan.executors,
            )
        return verdict
