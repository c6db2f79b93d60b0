"""Updates of a run's record and logs on the lake while it runs, and checks for cancel requests."""

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
# Readers regard a run as lost if its record is older than `artifacts.runs.LOST_SECONDS`.
_RECORD_SECONDS = 10.0
_CANCEL_SECONDS = 2.5
_LOG_SECONDS = 3.0
# Appends per second, so that the logs of a large gang do not keep the NameNode busy.
_MOST_APPENDS = 40


def _nothing() -> None:
    return None


class LogSource(Protocol):
    """An attempt whose logs are written to the lake while it runs."""

    def grown_logs(self) -> Sequence[tuple[str, Work]]:
        """Return for each log that has grown its URL, and a function that appends the new part."""

    def log_sizes(self) -> Mapping[str, int]:
        """Return the bytes of each log so far, by its path in the run's directory."""

    def ranks(self) -> tuple[tuple[RankReport, bool], ...]:
        """Return, in order, the report of each rank that has started, and whether it has ended."""


class RecordedRun(Protocol):
    """The part of a run's status that a record needs.

    Attributes:
        state: value of a GangState.
        attempt: number of the latest attempt, from 0.
    """

    @property
    def state(self) -> str: ...

    @property
    def attempt(self) -> int: ...


class RecordKeeper(Protocol):
    """The part of a run's status board that a record needs."""

    @property
    def run_id(self) -> str:
        """The id of the run."""

    def status(self) -> RecordedRun:
        """Return the run's status now."""


class Recording:
    """Keeps a run's record and logs on the lake up to date, without ever waiting for the lake.

    Args:
        plan: the run's plan.
        board: the run's status board.
        directory: the run's directory.
        application: YARN's application id.
        user: user who submitted the run.
        environment: returns the result of `run_record.environment`; called in the background.
        result: returns the result, as far as there is one yet.
        background: does the writes to the lake.
        cancelled: set if a cancel request is found on the lake.
        data: returns the description of the data that the ranks read, or None.
        python_env: returns the Python environment of the ranks once it is on the lake, or None.
        search: returns the part of a record that only a search has, or None.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        board: RecordKeeper,
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
        self._followed: LogSource | None = None
        self._ranks: tuple[tuple[RankReport, bool], ...] = ()
        self._logs: dict[str, int] = {}
        self._logs_at = 0.0
        self._turn = 0

    def put(self, state: str, error: str | None = None) -> None:
        """Have the run's state written to its record."""
        with self._lock:
            self._background.put(self._key, self._work(state, error))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep record and logs up to date, and check for a cancel request, until the exit."""
        ended = threading.Event()
        name = f"hopsgpu-{self._board.run_id}-watch"
        threading.Thread(target=self._watch, args=(ended,), name=name, daemon=True).start()
        try:
            yield
        finally:
            # Wait for an update in progress, so that the record that is put next is the latest.
            with self._lock:
                ended.set()

    @contextlib.contextmanager
    def following(self, attempt: LogSource) -> Iterator[None]:
        """Append an attempt's logs to the lake until the exit; begin no append afterwards."""
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

    def _look_at(self, attempt: LogSource) -> None:
        self._ranks = attempt.ranks()
        self._logs |= attempt.log_sizes()

    def _work(self, state: str, error: str | None) -> Work:
        if self._followed is not None:
            self._look_at(self._followed)
        standing = run_record.RunSnapshot(
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
        # Begin where the last call stopped, so that all logs have their turn on a slow lake.
        first = self._turn % len(grown) if grown else 0
        for taken, (url, work) in enumerate([*grown[first:], *grown[:first]]):
            if not self._background.offer(url, work):
                self._turn = first + taken
                return

    def _look_for_cancel(self) -> None:
        # A lake that does not answer must not end the run; the check is soon repeated.
        with contextlib.suppress(StoreError):
            if self._wish.exists():
                if not self._cancelled.is_set():
                    log.info("%s: to be cancelled, by a wish on the lake", self._board.run_id)
                self._cancelled.set()
