"""Keeps a run's record and logs on the lake while it goes on, and looks for a wish to cancel it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hopsgpu.artifacts.runs import CANCEL
from hopsgpu.core.run_values import RankReport
from hopsgpu.errors import StoreError
from hopsgpu.launcher import run_record
from hopsgpu.launcher.background import Background, Work
from hopsgpu.launcher.gang_result import GangResult
from hopsgpu.storage.lake import Lake

if TYPE_CHECKING:
    from hopsgpu.core.spec import LaunchPlan
    from hopsgpu.packaging.python_env.environment import PythonEnv

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
# A reader takes a run for lost after `stores.runs.LOST_SECONDS`.
_RECORD_SECONDS = 10.0
_CANCEL_SECONDS = 2.5
_LOG_SECONDS = 3.0
# Of a large gang, so that its logs do not keep the NameNode busy.
_MOST_APPENDS = 40


def _nothing() -> None:
    return None


class Followed(Protocol):
    """An attempt whose logs are brought to the lake while it goes on."""

    def grown_logs(self) -> Sequence[tuple[str, Work]]:
        """For each log that has grown its URL, and what brings the new part to the lake."""

    def log_sizes(self) -> Mapping[str, int]:
        """Bytes of each log so far, by its path in the run's directory."""

    def ranks(self) -> tuple[tuple[RankReport, bool], ...]:
        """A report of each rank that has started, in order, and whether it was seen to end."""


class Standing(Protocol):
    """How a run stands.

    Attributes:
        state: a GangState's value.
        attempt: the latest, from 0.
    """

    @property
    def state(self) -> str: ...

    @property
    def attempt(self) -> int: ...


class Stood(Protocol):
    """On which a run writes how it stands."""

    @property
    def run_id(self) -> str:
        """Names the run."""

    def status(self) -> Standing:
        """How it stands now."""


class Recording:
    """A run's record and logs, on their way to the lake; nothing here waits for the lake.

    Args:
        plan: of the run.
        board: on which it writes how it stands.
        directory: of the run.
        application: YARN's application id.
        user: who submitted it.
        environment: gives `records.environment`; called in the background.
        result: gives what there is of a result.
        background: brings what is written to the lake.
        cancelled: set where the lake says that the run is no longer wanted.
        data: gives the reference to what the ranks read, or None.
        python_env: gives what they run with, once it is there; or None.
        search: gives what the record of a search has beside; or None.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        board: Stood,
        directory: Lake,
        *,
        application: str,
        user: str,
        environment: Callable[[], Mapping[str, Any]],
        result: Callable[[], GangResult],
        background: Background,
        cancelled: threading.Event,
        data: Callable[[], Mapping[str, Any] | None] = _nothing,
        python_env: Callable[[], PythonEnv | None] = _nothing,
        search: Callable[[], Mapping[str, Any] | None] = _nothing,
    ) -> None:
        self._plan = plan
        self._board = board
        self._application = application
        self._user = user
        self._environment = environment
        self._result = result
        self._background = background
        self._cancelled = cancelled
        self._data = data
        self._python_env = python_env
        self._search = search
        self._directory = directory
        self._wish = Lake(directory.url, quick=True) / CANCEL
        self._lock = threading.Lock()
        self._followed: Followed | None = None
        self._ranks: tuple[tuple[RankReport, bool], ...] = ()
        self._logs: dict[str, int] = {}
        self._logs_at = 0.0
        self._turn = 0

    def put(self, state: str, error: str | None = None) -> None:
        """Has it written how the run stands."""
        with self._lock:
            self._background.put(self._key, self._work(state, error))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, record and logs follow what happens, and a wish to cancel is looked for."""
        ended = threading.Event()
        name = f"hopsgpu-{self._board.run_id}-watch"
        threading.Thread(target=self._watch, args=(ended,), name=name, daemon=True).start()
        try:
            yield
        finally:
            # A look that has begun comes to its end, so that what is put next is the latest.
            with self._lock:
                ended.set()

    @contextlib.contextmanager
    def following(self, attempt: Followed) -> Iterator[None]:
        """While inside, an attempt's logs are brought to the lake; none is begun afterwards."""
        with self._lock:
            self._followed = attempt
            self._logs_at = time.monotonic() + _LOG_SECONDS
        try:
            yield
        finally:
            with self._lock:
                self._look_at(attempt)
                self._followed = None

    @property
    def _key(self) -> str:
        return f"the record of {self._board.run_id}"

    def _look_at(self, attempt: Followed) -> None:
        self._ranks = attempt.ranks()
        self._logs |= attempt.log_sizes()

    def _work(self, state: str, error: str | None) -> Work:
        if self._followed is not None:
            self._look_at(self._followed)
        standing = run_record.Standing(
            plan=self._plan,
            result=self._result(),
            application=self._application,
            user=self._user,
            state=state,
            attempt=self._board.status().attempt,
            updated=time.time(),
            error=error,
            ranks=self._ranks,
            logs=dict(self._logs),
            data=self._data(),
            python_env=self._python_env(),
            search=self._search(),
        )
        return lambda: run_record.write(
            self._directory, run_record.content(standing, self._environment())
        )

    def _watch(self, ended: threading.Event) -> None:
        now = time.monotonic()
        state, record_at, cancel_at = "", now + _RECORD_SECONDS, now + _CANCEL_SECONDS
        while not ended.wait(_LOOK_SECONDS):
            now, before, state = time.monotonic(), state, self._board.status().state
            with self._lock:
                if ended.is_set():
                    return
                if state != before or now >= record_at:
                    self._background.offer(self._key, self._work(state, None))
                    record_at = now + _RECORD_SECONDS
                if now >= self._logs_at:
                    self._bring_logs(now)
            if now >= cancel_at:
                key = f"whether {self._board.run_id} is to be cancelled"
                self._background.offer(key, self._look_for_cancel)
                cancel_at = now + _CANCEL_SECONDS

    def _bring_logs(self, now: float) -> None:
        if self._followed is None:
            return
        grown = list(self._followed.grown_logs())
        self._logs_at = now + max(_LOG_SECONDS, len(grown) / _MOST_APPENDS)
        # Where the lake does not keep up each has its turn.
        first = self._turn % len(grown) if grown else 0
        for taken, (url, work) in enumerate([*grown[first:], *grown[:first]]):
            if not self._background.offer(url, work):
                self._turn = first + taken
                return

    def _look_for_cancel(self) -> None:
        # A lake that does not answer is asked again soon, and ends no run.
        with contextlib.suppress(StoreError):
            if self._wish.exists():
                if not self._cancelled.is_set():
                    log.info("%s: to be cancelled, by a wish on the lake", self._board.run_id)
                self._cancelled.set()
