"""The GPU time of a held gang between its launches, kept on the lake for `hopsgpu usage`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hopsgpu.artifacts.run_uses import UsageFiles
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.core.gpu_use import UsePoint, add_point
from hopsgpu.core.run_values import GpuSeconds
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.core.usage_report import HELD, RunUse
from hopsgpu.errors import StoreError
from hopsgpu.launcher.planner import new_run_id
from hopsgpu.storage.background import Background
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# If the driver is killed, the GPU time since the last write is lost.
_WRITE_SECONDS = 20.0


class HeldTime:
    """The GPU seconds that a gang held while it had no launch; launches have their own records.

    Only the thread that owns the gang's allocator calls this.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        application: GangApplication,
        background: Background,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._plan = plan
        self._application = application
        self._background = background
        self._clock = clock
        self._run_id = ""
        self._points: tuple[UsePoint, ...] = ()
        self._executors = 0
        self._since = 0.0
        self._held = self._waited = 0.0
        self._written_at = float("-inf")
        self._was_refused = False

    def record_request(self) -> None:
        """Record that the gang is requested."""
        self._run_id = new_run_id(self._plan.spec.name)
        self._since = self._clock()
        self._points = (UsePoint(self._since),)

    def record_acquisition(self, seconds_waited: float, gpu_seconds_held: float) -> None:
        """Record how long an acquisition took, and what the gang held of its executors meanwhile.

        The acquisition has just ended, whether or not it succeeded.
        """
        self._waited += seconds_waited * self._plan.least_executors * self._plan.shape.gpus
        self._held += gpu_seconds_held
        self._note()

    def record_held(self, executors: int) -> None:
        """Record how many executors the gang holds for no launch from now on."""
        if not self._points:
            return
        now = self._clock()
        self._held += max(now - self._since, 0.0) * self._executors * self._plan.shape.gpus
        has_changed, self._executors, self._since = executors != self._executors, executors, now
        if has_changed or now - self._written_at >= _WRITE_SECONDS:
            self._note()

    def _note(self) -> None:
        now = self._clock()
        self._points = add_point(self._points, GpuSeconds(self._held), self._waited, now)
        if now - self._written_at >= _WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Queue the writing of the GPU seconds until now, unless there are none."""
        if not self._points or not (self._held or self._waited):
            return
        self._written_at = self._clock()
        run = RunUse(
            run_id=self._run_id,
            name=self._plan.spec.name,
            user=self._application.user,
            queue=self._plan.queue,
            state=HELD,
            points=self._points,
        )
        try:
            self._background.try_put(f"the GPU time of {self._run_id}", lambda: self._write(run))
        except RuntimeError as error:
            # No thread can be started: the gang matters more than its GPU time.
            log.info("%s: its GPU time is not written now: %s", self._run_id, error)

    def _write(self, run: RunUse) -> None:
        """Write to the lake; raise StoreError only at the first refusal: there may be thousands."""
        try:
            UsageFiles(LakePath(self._plan.paths["root"])).write_held(run)
        except StoreError as error:
            if self._was_refused:
                log.info("%s: its GPU time was not written: %s", run.run_id, error)
                return
            self._was_refused = True
            raise StoreError(
                f"the held gang's GPU time was not written to the lake: {error}", error.kind
            ) from error
