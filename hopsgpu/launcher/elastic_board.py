"""The status board of an elastic gang: its executors, which arrive and leave, and its worlds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_losses import RankLosses, split_gpu_seconds
from hopsgpu.core.run_values import GpuSeconds, RunStatus, WorldReport
from hopsgpu.core.wait_reasons import WaitReason
from hopsgpu.display.progress import Shielded
from hopsgpu.launcher.elastic_policy import WorldEnd
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.gpu_accounting import GpuAccount
from hopsgpu.runs.status_board import GangBoard


class ElasticBoard(GangBoard):
    """The status board of an elastic gang's run.

    Each world is an attempt. The timeline's `granted` and `started` are those of the first world,
    `returned` is that of the last.

    Args:
        wanted: executors of the largest world.
        sizes: the smallest and the largest world size.
    """

    def __init__(
        self,
        run_id: str,
        wanted: int,
        gpus: int,
        progress: Shielded,
        sizes: tuple[int, int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(run_id, wanted, gpus, progress, clock)
        self._sizes = sizes
        self._account = GpuAccount(gpus, 1)
        # The account of executors that import the frameworks before they can start a rank.
        self._warming_account = GpuAccount(gpus, 1)
        self._held = self._warming = 0
        self._worlds: list[WorldReport] = []
        # The times at which executors were lost, by world.
        self._losses: list[list[float]] = []
        self._stopped_at: float | None = None
        # GPU seconds that ranks of earlier worlds lost.
        self._lost_before = RankLosses()
        # GPU seconds of uploads before the last world.
        self._published_before = 0.0

    def _mark(self, point: str, at: float) -> None:
        first = point in ("granted", "started")
        if not first or getattr(self._timeline, point) is None:
            super()._mark(point, at)

    def _on_state_left(self, state: GangState) -> None:
        super()._on_state_left(state)
        if self._timeline.returned is None:
            # The next world has begun already, and its own upload is still to come.
            self._uploaded = None

    def _set_granted_hosts(self, hosts: Sequence[str]) -> None:
        if self._state.is_terminal:
            self._hosts = ()

    def on_executors_arrived(self, times: Sequence[float]) -> None:
        """Do nothing: executors arrive one by one, and `record_executors` records them."""

    def record_executors(
        self, held: int, hosts: Sequence[str], wanted: int, why: WaitReason, warming: int = 0
    ) -> None:
        """Record the executors.

        Args:
            held: how many have arrived and are not known to be gone.
            wanted: how many the gang wants at present, those that are here included.
            why: what it waits for, and what is to happen to the world soon.
            warming: how many of those that are ready still import the frameworks.
        """
        with self._lock:
            now = self._clock()
            if held != self._held:
                self._account.change_executors(held - self._held, now)
            if warming != self._warming:
                self._warming_account.change_executors(warming - self._warming, now)
            self._warming = warming
            self._held, self._hosts, self._wanted = held, tuple(hosts), max(wanted, len(hosts))
            # Until all ranks run, the state has a reason of its own.
            if self._state is not GangState.STARTING:
                self._why = why

    def start_world(self, hosts: Sequence[str], ranks: int) -> None:
        now = self._clock()
        with self._lock:
            if self._worlds:
                self._attempt += 1
            self._published_before += self._publishing(now)
            self._uploaded = None
            self._lost_before += self._lost_by_ranks
            self._counted = self._ranks
            self._timeline = dataclasses.replace(self._timeline, returned=None)
            self._metrics = ()
            self._worlds.append(WorldReport(len(self._worlds), ranks, tuple(hosts), now))
            self._losses.append([])

    def record_entry(self, at: float) -> None:
        self.mark("started", at)
        with self._lock:
            world = self._worlds[-1]
            cost = None if self._stopped_at is None else max(at - self._stopped_at, 0.0)
            self._worlds[-1] = dataclasses.replace(world, started=at, resize_seconds=cost)
            self._stopped_at = None

    def record_stop(self) -> None:
        """Record that the world is being stopped, or has lost a rank."""
        now = self._clock()
        with self._lock:
            self._note_stop(now)

    def record_loss(self) -> None:
        now = self._clock()
        with self._lock:
            self._note_stop(now)
            self._losses[-1].append(now)

    def _note_stop(self, now: float) -> None:
        if self._stopped_at is None:
            self._stopped_at = now

    def record_end(self, how: WorldEnd, why: str) -> None:
        now = self._clock()
        with self._lock:
            self._note_stop(now)
            world = self._worlds[-1]
            ended = now if world.ended is None else world.ended
            self._worlds[-1] = dataclasses.replace(world, ended=ended, end=how.value, why=why)

    def record_return(self) -> None:
        """Record that the ranks of the world have ended; what they left may still be published."""
        now = self._clock()
        with self._lock:
            self._worlds[-1] = dataclasses.replace(self._worlds[-1], ended=now)

    def status(self) -> RunStatus:
        status, now = super().status(), self._clock()
        with self._lock:
            return dataclasses.replace(status, worlds=self._report_worlds(now), sizes=self._sizes)

    def result(self) -> GangResult:
        result, now = super().result(), self._clock()
        with self._lock:
            return dataclasses.replace(result, worlds=self._report_worlds(now))

    def _report_worlds(self, now: float) -> tuple[WorldReport, ...]:
        return tuple(
            dataclasses.replace(
                world, gpu_seconds=self._split_gpu_seconds(number, world.began, now)
            )
            for number, world in enumerate(self._worlds)
        )

    def _split_gpu_seconds(self, number: int, since: float, now: float) -> float:
        """Return the GPU seconds of a world's executors from a time until the world's end."""
        world, losses = self._worlds[number], self._losses[number]
        until = now if world.ended is None else world.ended
        ends = [*losses, *[until] * (len(world.hosts) - len(losses))]
        return sum(max(min(end, until) - since, 0.0) for end in ends) * self._gpus

    def _seconds(self, now: float) -> GpuSeconds:
        until = self._timeline.released or now
        held = self._account.seconds(until).held
        warming = self._warming_account.seconds(until).held
        in_worlds = training = 0.0
        for number, world in enumerate(self._worlds):
            in_worlds += self._split_gpu_seconds(number, world.began, now)
            if world.started is not None:
                training += self._split_gpu_seconds(number, max(world.started, world.began), now)
        publishing = self._published_before + self._publishing(now)
        losses = self._lost_before + self._lost_by_ranks
        return split_gpu_seconds(held, training, publishing, warming + in_worlds - training, losses)

    def _publishing(self, now: float) -> float:
        """Return the GPU seconds of the last world's upload, until now if it is under way."""
        returned = self._timeline.returned
        until = self._timeline.published or self._uploaded
        if until is None and self._state is GangState.PUBLISHING:
            until = now
        if until is None or returned is None or not self._worlds:
            return 0.0
        stayed = len(self._worlds[-1].hosts) - len(self._losses[-1])
        return max(until - returned, 0.0) * stayed * self._gpus
