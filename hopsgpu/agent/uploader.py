"""Upload of what a rank saves while it runs: its checkpoints and logs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hopsgpu.agent.kept_mirror import KeptMirror, explain_problem
from hopsgpu.artifacts import log_dir_upload
from hopsgpu.artifacts.checkpoint_upload import PendingCheckpoints
from hopsgpu.artifacts.checkpoints import Checkpoints, SaveResult
from hopsgpu.artifacts.log_dir_upload import LogDirUploader
from hopsgpu.rank.context import Context
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# Time for an upload to notice that it was stopped, before its task is cancelled.
_CANCEL_SECONDS = 5.0
# An idle poll takes some microseconds.
_POLL_SECONDS = 0.1
_ROUND_SECONDS = 3.0
_MIRROR_SECONDS = 0.5
# Pause after a failed round of the mirror.
_MIRROR_RETRY_SECONDS = 10.0


@dataclass(frozen=True)
class UploadLimits:
    """How long a rank's exit waits for its uploads.

    Attributes:
        save_seconds: for checkpoints, plus time for the pending bytes.
        failed_save_seconds: for those of a rank that failed or was stopped: other ranks or the next
            attempt may wait for it.
        report_seconds: pause between reports during the wait.
    """

    save_seconds: float = 120.0
    save_bytes_per_second: float = 20e6
    failed_save_seconds: float = 30.0
    log_seconds: float = 20.0
    report_seconds: float = 1.0


@dataclass(eq=False)
class _UploadThread:
    pool: ThreadPoolExecutor
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None
    deadline: float = 0.0

    def start(self, upload: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.create_task(upload)

    def stop_if_overdue(self, now: float) -> None:
        if self.task is None or self.task.done():
            return
        if now >= self.deadline:
            self.stop.set()
        if now >= self.deadline + _CANCEL_SECONDS:
            self.task.cancel()


class RankUploads:
    """Context manager that uploads a rank's checkpoints and logs to the lake; see `finish`.

    Args:
        stopping: event, set when the attempt must end.
        dropping: event, set when no attempt will resume from checkpoints that are not uploaded yet.
        tensorboard: a directory that is uploaded besides `context().log_dir`.
    """

    def __init__(
        self,
        directory: Path,
        context: Context,
        stopping: asyncio.Event,
        dropping: asyncio.Event,
        warn: Callable[[str], Awaitable[None]],
        on_saved: Callable[[SaveResult], Awaitable[None]],
        limits: UploadLimits = UploadLimits(),  # noqa: B008 - immutable
        *,
        tensorboard: Path | None = None,
    ) -> None:
        self._limits = limits
        self._rank = context.rank
        self._saves = PendingCheckpoints(directory)
        self._checkpoints = Checkpoints(
            LakePath(context.checkpoint_dir), context.rank, context.attempt, context.world_size
        )
        self._stopping = stopping
        self._dropping = dropping
        self._warn = warn
        self._on_saved = on_saved
        self._ended = asyncio.Event()
        self._saving = _UploadThread(ThreadPoolExecutor(1, thread_name_prefix="hopsgpu-saves"))
        self._logging = _UploadThread(ThreadPoolExecutor(1, thread_name_prefix="hopsgpu-logs"))
        target = LakePath(context.log_dir_url, should_fail_fast=True) / f"rank-{context.rank}"
        log_dirs = [directory / log_dir_upload.DIRECTORY, *filter(None, (tensorboard,))]
        self._log_dirs = [
            LogDirUploader(log_dir, target, self._logging.stop) for log_dir in log_dirs
        ]

    async def __aenter__(self) -> RankUploads:
        self._saving.start(self._upload_saves())
        self._logging.start(self._upload_logs())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = []
        for thread in (self._saving, self._logging):
            thread.stop.set()
            assert thread.task is not None
            thread.task.cancel()
            thread.pool.shutdown(wait=False)
            tasks.append(thread.task)
        # Errors were reported as warnings. They must not stop other ranks of the container.
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_behind(self) -> bool:
        return bool(self._saves.pending())

    async def finish(
        self, report_progress: Callable[[], Awaitable[None]], *, has_returned: bool
    ) -> None:
        """Wait, within bounded time, until all files are uploaded; warn of missing ones.

        Args:
            report_progress: is awaited every `report_seconds` during the wait.
        """
        self._ended.set()
        now = time.monotonic()
        limits = self._limits
        seconds = self._save_seconds() if has_returned else limits.failed_save_seconds
        self._saving.deadline, self._logging.deadline = now + seconds, now + limits.log_seconds
        if pending := len(self._saves.pending()):
            if self._dropping.is_set():
                log.info("rank %d has ended: abandons %d checkpoints", self._rank, pending)
                self._saving.stop.set()
            else:
                text = "rank %d has ended: uploads %d checkpoints for at most %.0f s"
                log.info(text, self._rank, pending, seconds)
        threads = (self._saving, self._logging)
        while tasks := [t.task for t in threads if t.task is not None and not t.task.done()]:
            await asyncio.wait(tasks, timeout=limits.report_seconds)
            if all(task.done() for task in tasks):
                break
            now = time.monotonic()
            if self._stopping.is_set():
                self._saving.deadline = min(self._saving.deadline, now + limits.failed_save_seconds)
            for thread in threads:
                thread.stop_if_overdue(now)
            await report_progress()
        await self._warn_of_missing(seconds)

    def _save_seconds(self) -> float:
        seconds = self._limits.save_seconds
        try:
            return seconds + self._saves.pending_bytes() / self._limits.save_bytes_per_second
        except OSError:
            return seconds

    async def _warn_of_missing(self, seconds: float) -> None:
        lost = 0 if self._dropping.is_set() else len(self._saves.pending())
        if lost:
            await self._warn_and_log(
                f"{lost} of rank {self._rank}'s checkpoints did not reach the lake: their upload"
                f" was abandoned after at most {seconds:.0f} s"
            )
        if self._logging.stop.is_set():
            await self._warn_and_log(
                f"the last TensorBoard logs of rank {self._rank} did not reach the lake: their"
                f" upload was abandoned after {self._limits.log_seconds:g} s"
            )

    async def _warn_and_log(self, warning: str) -> None:
        log.info("%s", warning)
        await self._warn(warning)

    async def _upload_saves(self) -> None:
        loop, stop = asyncio.get_running_loop(), self._saving.stop
        while True:
            is_last = self._ended.is_set()
            for save in self._saves.pending():
                if stop.is_set():
                    return
                upload = functools.partial(self._saves.upload, save, self._checkpoints, stop)
                try:
                    saved, problem = await loop.run_in_executor(self._saving.pool, upload)
                except Exception as error:  # noqa: BLE001 - a rank waits; its thread may not start
                    saved, problem = None, self._saves.refuse(save, self._rank, error)
                if saved is not None:
                    await self._on_saved(saved)
                if problem is not None:
                    await self._warn(problem)
            if is_last:
                return
            await self._pause(_POLL_SECONDS)

    async def _upload_logs(self) -> None:
        loop, has_failed = asyncio.get_running_loop(), False
        while True:
            await self._pause(_ROUND_SECONDS)
            is_last = self._ended.is_set()
            for log_dir in self._log_dirs:
                if not log_dir.is_needed:
                    continue
                upload = functools.partial(log_dir.upload_changes, is_last=is_last)
                try:
                    warnings = await loop.run_in_executor(self._logging.pool, upload)
                except Exception as error:  # noqa: BLE001 - warns once, and retries
                    warnings = [] if has_failed else [f"log_dir is not on the lake: {error!r:.500}"]
                    has_failed = True
                for warning in warnings:
                    await self._warn(f"rank {self._rank}: {warning}")
            if is_last:
                return

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()


class MirrorUploads:
    """Context manager that mirrors directories of a script to the lake; see `finish`.

    The ranks of a container share the directories, so one mirror serves all of them.

    Args:
        stopping: event, set when the attempt must end.
    """

    def __init__(
        self,
        mirror: KeptMirror,
        stopping: asyncio.Event,
        warn: Callable[[str], Awaitable[None]],
        on_saved: Callable[[SaveResult], Awaitable[None]],
        limits: UploadLimits = UploadLimits(),  # noqa: B008 - immutable
    ) -> None:
        self._mirror = mirror
        self._stopping = stopping
        self._warn = warn
        self._on_saved = on_saved
        self._limits = limits
        self._ended = asyncio.Event()
        self._was_killed = False
        pool = ThreadPoolExecutor(1, thread_name_prefix="hopsgpu-mirror")
        self._thread = _UploadThread(pool, mirror.stop)

    async def __aenter__(self) -> MirrorUploads:
        self._thread.start(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        thread = self._thread
        thread.stop.set()
        assert thread.task is not None
        thread.task.cancel()
        # The thread may still read the mirror's files.
        await asyncio.to_thread(thread.pool.shutdown)
        await asyncio.gather(thread.task, return_exceptions=True)
        self._mirror.close()

    async def finish(
        self,
        report_progress: Callable[[], Awaitable[None]],
        *,
        has_returned: bool,
        was_killed: bool,
    ) -> None:
        """Wait, within bounded time, until the files that ranks have left are uploaded.

        Args:
            report_progress: is awaited every `report_seconds` during the wait.
            has_returned: whether no rank failed or was stopped.
            was_killed: whether a signal ended a rank, so that a file may be incomplete.
        """
        self._was_killed = was_killed
        self._ended.set()
        limits, thread = self._limits, self._thread
        seconds = limits.save_seconds if has_returned else limits.failed_save_seconds
        thread.deadline = time.monotonic() + seconds
        assert thread.task is not None
        while not thread.task.done():
            await asyncio.wait([thread.task], timeout=limits.report_seconds)
            now = time.monotonic()
            if self._stopping.is_set():
                thread.deadline = min(thread.deadline, now + limits.failed_save_seconds)
            thread.stop_if_overdue(now)
            await report_progress()
        if thread.stop.is_set():
            await self._warn(
                "the last files of the kept directories did not reach the lake: their upload was"
                f" abandoned after at most {seconds:.0f} s"
            )

    async def _run(self) -> None:
        """Mirror until the ranks have exited; warn once per kind of problem."""
        mirror, loop = self._mirror, asyncio.get_running_loop()
        reported, snapshots = "", 0
        while True:
            is_last, pause = self._ended.is_set(), _MIRROR_SECONDS
            finish = functools.partial(mirror.finish, was_killed=self._was_killed)
            poll = finish if is_last else mirror.poll
            try:
                warnings = await loop.run_in_executor(self._thread.pool, poll)
            except Exception as error:  # noqa: BLE001 - warns once, and retries
                problem, pause = explain_problem(error), _MIRROR_RETRY_SECONDS
                when = "" if is_last else " yet"
                warnings = [f"kept files are not on the lake{when}: {problem}"]
                if problem == reported and not is_last:
                    warnings = []
                reported = problem
            for warning in warnings:
                await self._warn(warning)
            if mirror.snapshots != snapshots:
                # An elastic gang may change its size now.
                snapshots = mirror.snapshots
                await self._on_saved(SaveResult(snapshots, is_complete=True))
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._ended.wait()
