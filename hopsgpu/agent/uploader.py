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

from hopsgpu.artifacts import log_dir_upload
from hopsgpu.artifacts.checkpoint_upload import PendingCheckpoints
from hopsgpu.artifacts.checkpoints import Checkpoints, SaveResult
from hopsgpu.artifacts.log_dir_upload import LogDirUploader
from hopsgpu.rank.context import Context
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# How long the end of a rank is not told as what it saved is not there yet: of one that returned,
# longer by what an upload takes at the least speed that is borne with, and of one that others may
# wait for, or a next attempt.
SAVE_SECONDS = 120.0
SAVE_BYTES_PER_SECOND = 20e6
FAILED_SAVE_SECONDS = 30.0
_LOG_SECONDS = 20.0
# For a client of the lake to notice that it is to give up.
_GIVE_UP_SECONDS = 5.0
_SIGN_SECONDS = 1.0
# An idle look takes some microseconds.
_LOOK_SECONDS = 0.1
_ROUND_SECONDS = 3.0

_Tell = Callable[[str], Awaitable[None]]
_TellSaved = Callable[[SaveResult], Awaitable[None]]


@dataclass(eq=False)
class _Way:
    """One of the two uploads, in its own thread, so that it can block."""

    pool: ThreadPoolExecutor
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None
    until: float = 0.0

    def start(self, upload: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.create_task(upload)

    def overdue(self, now: float) -> None:
        """End it if its time is over, first gently."""
        if self.task is None or self.task.done():
            return
        if now >= self.until:
            self.stop.set()
        if now >= self.until + _GIVE_UP_SECONDS:
            self.task.cancel()


class RankUploads:
    """Uploads what a rank saves and logs to the lake. A context manager; ended by `finish`.

    Args:
        directory: the rank's.
        context: description of the gang for the rank.
        hurry: event, set when the attempt must end.
        drop: event, set when nobody will resume from what is not on the lake yet.
        warn: receives warnings for people.
        saved: receives each save once it is on the lake.
    """

    def __init__(
        self,
        directory: Path,
        context: Context,
        hurry: asyncio.Event,
        drop: asyncio.Event,
        warn: _Tell,
        saved: _TellSaved,
    ) -> None:
        self._rank = context.rank
        self._saves = PendingCheckpoints(directory)
        self._checkpoints = Checkpoints(
            LakePath(context.checkpoint_dir), context.rank, context.attempt, context.world_size
        )
        self._hurry = hurry
        self._drop = drop
        self._warn = warn
        self._saved = saved
        self._ended = asyncio.Event()
        self._saving = _Way(ThreadPoolExecutor(1, thread_name_prefix="hopsgpu-saves"))
        self._logging = _Way(ThreadPoolExecutor(1, thread_name_prefix="hopsgpu-logs"))
        target = LakePath(context.log_dir_url, should_fail_fast=True) / f"rank-{context.rank}"
        self._log_dir = LogDirUploader(
            directory / log_dir_upload.DIRECTORY, target, self._logging.stop
        )

    async def __aenter__(self) -> RankUploads:
        self._saving.start(self._upload_saves())
        self._logging.start(self._upload_logs())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = []
        for way in (self._saving, self._logging):
            way.stop.set()
            assert way.task is not None
            way.task.cancel()
            way.pool.shutdown(wait=False)
            tasks.append(way.task)
        # What they met was told; other ranks of the container go on.
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_behind(self) -> bool:
        """Whether something that the rank has saved is not on the lake yet."""
        return bool(self._saves.pending())

    async def finish(self, sign: Callable[[], Awaitable[None]], *, returned: bool) -> None:
        """Wait, within bounded time, until all is uploaded; warn of what is not.

        Checkpoints that nobody will resume from are abandoned, and no warning tells of them.

        Args:
            sign: awaited every second meanwhile.
            returned: whether the rank ended by itself, and successfully.
        """
        self._ended.set()
        now = time.monotonic()
        seconds = self._patience() if returned else FAILED_SAVE_SECONDS
        self._saving.until, self._logging.until = now + seconds, now + _LOG_SECONDS
        if pending := len(self._saves.pending()):
            if self._drop.is_set():
                log.info("rank %d has ended: abandons %d checkpoints", self._rank, pending)
                self._saving.stop.set()
            else:
                log.info(
                    "rank %d has ended: uploads %d checkpoints for at most %.0f s",
                    self._rank,
                    pending,
                    seconds,
                )
        ways = [way for way in (self._saving, self._logging) if way.task is not None]
        while left := [way.task for way in ways if way.task is not None and not way.task.done()]:
            await asyncio.wait(left, timeout=_SIGN_SECONDS)
            if all(task.done() for task in left):
                break
            now = time.monotonic()
            if self._hurry.is_set():
                self._saving.until = min(self._saving.until, now + FAILED_SAVE_SECONDS)
            for way in ways:
                way.overdue(now)
            await sign()
        await self._warn_of_the_rest(seconds)

    def _patience(self) -> float:
        try:
            return SAVE_SECONDS + self._saves.pending_bytes() / SAVE_BYTES_PER_SECOND
        except OSError:
            return SAVE_SECONDS

    async def _warn_of_the_rest(self, seconds: float) -> None:
        lost = 0 if self._drop.is_set() else len(self._saves.pending())
        if lost:
            await self._abandoned(
                f"{lost} of rank {self._rank}'s checkpoints did not reach the lake: their upload"
                f" was abandoned after at most {seconds:.0f} s"
            )
        if self._logging.stop.is_set():
            await self._abandoned(
                f"the last TensorBoard logs of rank {self._rank} did not reach the lake: their"
                f" upload was abandoned after {_LOG_SECONDS:g} s"
            )

    async def _abandoned(self, warning: str) -> None:
        log.info("%s", warning)
        await self._warn(warning)

    async def _upload_saves(self) -> None:
        loop, stop = asyncio.get_running_loop(), self._saving.stop
        while True:
            last = self._ended.is_set()
            for handed in self._saves.pending():
                if stop.is_set():
                    return
                upload = functools.partial(self._saves.upload, handed, self._checkpoints, stop)
                try:
                    saved, problem = await loop.run_in_executor(self._saving.pool, upload)
                except Exception as error:  # noqa: BLE001 - a rank waits; its thread may not start
                    saved, problem = None, self._saves.refuse(handed, self._rank, error)
                if saved is not None:
                    await self._saved(saved)
                if problem is not None:
                    await self._warn(problem)
            if last:
                return
            await self._pause(_LOOK_SECONDS)

    async def _upload_logs(self) -> None:
        loop, failed = asyncio.get_running_loop(), False
        while True:
            await self._pause(_ROUND_SECONDS)
            last = self._ended.is_set()
            if self._log_dir.is_needed:
                upload = functools.partial(self._log_dir.round, last=last)
                try:
                    warnings = await loop.run_in_executor(self._logging.pool, upload)
                except Exception as error:  # noqa: BLE001 - told once, and tried again
                    warnings = [] if failed else [f"log_dir is not on the lake: {error!r:.500}"]
                    failed = True
                for warning in warnings:
                    await self._warn(f"rank {self._rank}: {warning}")
            if last:
                return

    async def _pause(self, seconds: float) -> None:
        """Wait for some seconds, or until the rank has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
