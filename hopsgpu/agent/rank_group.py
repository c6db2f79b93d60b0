"""The ranks of one attempt in one container: start, supervision, end and files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hopsgpu.agent.daemon_client import DaemonClient
from hopsgpu.agent.oom_kills import oom_kills
from hopsgpu.agent.rank_environment import (
    ServerSpec,
    own_variables,
    package_path,
    rank_environment,
    server_spec,
)
from hopsgpu.agent.rank_logs import (
    OutputCut,
    follow,
    follow_output,
    follow_reports,
    follow_warnings,
)
from hopsgpu.agent.rank_process import RankProcess, RankProcessExit
from hopsgpu.agent.script_files import ScriptFiles
from hopsgpu.agent.sent_log import send_log
from hopsgpu.agent.unsaved_results import unsaved_results
from hopsgpu.agent.uploader import MirrorUploads, RankUploads
from hopsgpu.artifacts.checkpoints import SaveResult
from hopsgpu.control.channel import Channel, Message
from hopsgpu.core import metrics
from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.core.gpu_usage import GpuSample
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.frameworks import accelerate
from hopsgpu.frameworks.proxies import direct_environment
from hopsgpu.frameworks.torch import script_environment
from hopsgpu.gpu.container_gpus import read_container_gpus
from hopsgpu.gpu.driver_events import GpuEvent
from hopsgpu.gpu.sampling import NOT_INSTALLED, sampling
from hopsgpu.packaging.python_env.environment import RankPython
from hopsgpu.rank.blocked_time import BlockedTime
from hopsgpu.rank.checkpoint_agreement import ProposalWords
from hopsgpu.rank.context import DATA, KEPT, Context
from hopsgpu.rank.entry import PRUNED, SUCCESSFUL, reserve_outcome
from hopsgpu.rank.files import WORK
from hopsgpu.rank.inbox import InboxWriter
from hopsgpu.rank.trial import ask_to_end, has_seen_end
from hopsgpu.storage.bounded_calls import BoundedCall
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# Larger values go through the lake, because the driver's memory holds the values of all ranks.
_MAX_INLINE = 2**20

# Time to write a value of at most 100 MB to the lake, as for a checkpoint.
_VALUE_SECONDS = 120.0
# Status of a rank whose output or outcome cannot be read.
_FILES_LOST = "files lost"
# Status of a rank that the agent killed because its GPU failed.
_GPU_FAILED = "gpu failed"
# Time for a rank to fail with its own traceback before it is killed because of its GPU.
_BROKEN_SECONDS = 5.0
# A failed rank whose output takes longer to send is reported as failing.
_OUTPUT_SECONDS = 1.0
# Interval of reports of a rank's blocked time.
_BLOCKED_SECONDS = 5.0
# A poll of a rank's answer takes a microsecond.
_ANSWER_SECONDS = 0.01

_Send = Callable[[bytes], Awaitable[None]]
_Follower = Callable[[Path, asyncio.Event, _Send, OutputCut], Awaitable[int]]


@dataclass(frozen=True)
class _ReturnedValue:
    """A rank's pickled value, or the name and digest of its file on the lake."""

    inline: bytes = b""
    file: Mapping[str, str] | None = None


class RankGroup:
    """The ranks of one `run` message.

    Attributes:
        started: event, set once a rank was started or failed to start.
        ended: event, set once the exits of all ranks are reported.
    """

    def __init__(self, channel: Channel, tasks: asyncio.TaskGroup, message: Message) -> None:
        self.run_id = message["run_id"]
        self._notify = functools.partial(
            channel.notify, run_id=self.run_id, attempt=message["attempt"]
        )
        self._tasks = tasks
        self._message = message
        self._run_url = LakePath(message["run_url"])
        name = f"{self.run_id}-{message['attempt']}"
        self._directory = Path("hopsgpu", name).resolve()
        self._daemon: DaemonClient | None = None
        self._ranks: dict[int, RankProcess] = {}
        fields = message.fields.get("script")
        self._script = None if fields is None else ScriptFiles.parse(fields, message.payload)
        # The directory that a script's ranks share, and its mirror.
        self._shared: Path | None = None
        self._mirror: MirrorUploads | None = None
        self._exits: list[RankProcessExit] = []
        self._resources = contextlib.AsyncExitStack()
        # Ranks whose exits were reported, or are about to be.
        self._ended: set[int] = set()
        self._has_failed = False
        # The agreement files of the ranks that run, and the step of the open proposal.
        self._proposals: dict[int, ProposalWords] = {}
        self._proposed: int | None = None
        self._inboxes: dict[int, InboxWriter] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._oom_kills_before = 0
        self._warned_problems: set[str] = set()
        self._stopping = asyncio.Event()
        self._dropping = asyncio.Event()
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def start(self, daemon: DaemonClient, roots: Sequence[str], python: RankPython) -> None:
        """Start the ranks, each with a task that reports its exit or failed start."""
        message = self._message
        ranks = ", ".join(str(described["context"]["rank"]) for described in message["ranks"])
        log.info("%s: attempt %d: starts ranks %s", self.run_id, message["attempt"], ranks)
        self._daemon = daemon
        sizes = [described["data_bytes"] for described in message["ranks"]]
        call, *shards = _split(message.payload, [message["call_bytes"], *sizes])
        self._directory.mkdir(parents=True, mode=0o700)
        spec = spec_of(message, python)
        # Run in a thread: a download may take minutes.
        homes = await asyncio.to_thread(self._prepare_homes)
        await self._start_mirror()
        simulated = read_container_gpus().simulated_addresses
        self._oom_kills_before = oom_kills()
        while daemon.warnings:
            await self._warn(daemon.warnings.pop(0))
        for described, shard in zip(message["ranks"], shards, strict=True):
            number = described["context"]["rank"]
            home = homes[number]
            if shard:
                # Run in a thread: the event loop must keep sending heartbeats.
                await asyncio.to_thread((home / DATA).write_bytes, shard)
            context = Context.from_fields(described["context"], self._model_dir(home))
            path = [*self._script_roots(), *roots, *python.packages, package_path()]
            gpus = described["context"]["gpus"]
            assigned = {
                **accelerate.environment({*gpus} - simulated),
                **described["environment"],
                **self._script_variables(context, home),
                # Last, because the user's variables may name other interfaces.
                **message["shared"],
            }
            environment = rank_environment(os.environ, assigned, path)
            environment |= direct_environment(environment, message.fields.get("direct", ()))
            variables, memory = own_variables(environment, spec), message.fields.get("memory")
            is_script = self._script is not None
            rank = RankProcess(daemon, home, context, spec, variables, memory, is_script)
            self._ranks[rank.rank] = rank
            running = self._run(daemon, rank, call, gpus)
            self._watching.append(self._tasks.create_task(running))

    def _prepare_homes(self) -> dict[int, Path]:
        """Create the directories of the ranks, with the files of their script.

        Raises:
            OSError: a directory cannot be written, or the lake does not have the script's files.
        """
        script, homes = self._script, {}
        for described in self._message["ranks"]:
            number = described["context"]["rank"]
            homes[number] = self._directory / f"rank-{number}"
            homes[number].mkdir(mode=0o700)
        if script is None:
            return homes
        try:
            unpacked = script.unpack(os.environ, self._directory.parent)
            restored = script.download_restored(self._directory)
        except HopsGpuError as error:
            raise OSError(str(error)) from error
        self._shared = shared = script.copy_to(unpacked, restored, self._directory)
        for home in homes.values():
            script.link(shared, home)
        return homes

    @property
    def _first_rank(self) -> int:
        """The rank that stands for the container where its ranks share files."""
        return min(int(described["context"]["rank"]) for described in self._message["ranks"])

    async def _start_mirror(self) -> None:
        """Mirror the script's directories, until `_finish_mirror`."""
        if self._script is None or self._shared is None:
            return
        attempt, first = self._message["attempt"], self._first_rank
        # Run in a thread: the directories may have many files.
        mirror = await asyncio.to_thread(
            self._script.mirror, self._run_url, attempt, first, self._shared
        )
        if mirror is not None:
            on_saved = functools.partial(self._report_saved, first)
            uploads = MirrorUploads(mirror, self._stopping, self._warn, on_saved)
            self._mirror = await self._resources.enter_async_context(uploads)

    async def _finish_mirror(
        self, rank_exit: RankProcessExit, report_progress: Callable[[], Awaitable[None]]
    ) -> None:
        """Record an exit; after the last one of the container, upload what the ranks have left."""
        self._exits.append(rank_exit)
        if self._mirror is None or len(self._exits) < len(self._message["ranks"]):
            return
        await self._mirror.finish(
            report_progress,
            has_returned=not any(map(_has_failed, self._exits)),
            was_killed=any(end.signal is not None for end in self._exits),
        )

    def _model_dir(self, home: Path) -> Path:
        script = self._script
        kept = None if script is None else script.kept.model
        return home / "model" if kept is None else home / WORK / kept

    def _script_roots(self) -> list[str]:
        if self._script is None or self._shared is None:
            return []
        return self._script.roots(self._shared)

    def _script_variables(self, context: Context, home: Path) -> dict[str, str]:
        """Return variables for scripts: hopsgpu's own, and those that only torchrun sets."""
        if self._script is None:
            return {}
        return {
            "HOPSGPU_MODEL_DIR": str(context.model_dir),
            "HOPSGPU_RUN_ID": context.run_id,
            **script_environment(home),
        }

    async def refuse(self, error: OSError) -> None:
        """Report that the ranks cannot be started, except those that already were."""
        for described in self._message["ranks"]:
            if (rank := described["context"]["rank"]) not in self._ranks:
                await self._report_not_started(rank, error, was_stopped=False)
        self.started.set()

    async def stop(
        self, *, should_dump_stacks: bool = False, should_drop_saves: bool = False
    ) -> None:
        """Stop the ranks as `RankProcess.stop` does.

        Saved checkpoints are still uploaded, within bounded time, for a later attempt or run.

        Args:
            should_drop_saves: whether to abandon these uploads, because the next attempt resumes
                from an earlier checkpoint.
        """
        if should_drop_saves:
            self._dropping.set()
        self._stopping.set()
        ranks = self._ranks.values()
        await asyncio.gather(*(rank.stop(should_dump_stacks=should_dump_stacks) for rank in ranks))

    async def prune(self) -> None:
        for rank in self._ranks.values():
            try:
                ask_to_end(rank.directory)
            except OSError as error:
                await self._warn(f"rank {rank.rank} could not be asked to end its trial: {error}")

    async def send_line(self, line: str) -> None:
        """Write a line to the inboxes of the ranks that run.

        If an inbox cannot be written, its rank is killed: the driver would wait for it forever.
        """
        for rank in self._ranks.values():
            if rank.rank in self._ended:
                continue
            try:
                if rank.rank not in self._inboxes:
                    self._inboxes[rank.rank] = InboxWriter(rank.directory)
                self._inboxes[rank.rank].write(line)
            except OSError as error:
                await self._warn(
                    f"rank {rank.rank} could not be handed its next task, and is killed: {error}"
                )
                rank.kill()

    async def report_steps(self, number: int) -> None:
        ranks = [described["context"]["rank"] for described in self._message["ranks"]]
        shared = {rank: self._proposals.get(rank) for rank in ranks}
        asked = [[rank, words and words.last_asked_step] for rank, words in shared.items()]
        await self._notify("steps", number=number, asked=asked)

    def propose(self, step: int) -> None:
        """Propose to the ranks to save a checkpoint at a step; report their answers."""
        log.debug("%s: proposes a checkpoint at step %d", self.run_id, step)
        self._proposed = step
        for words in self._proposals.values():
            words.propose(step)
        self._tasks.create_task(self._report_answers(step))

    def decide(self, step: int, *, is_committed: bool) -> None:
        """Pass on the driver's decision; after a commit, report when each rank passes the step."""
        log.debug("%s: step %d is %s", self.run_id, step, "agreed" if is_committed else "given up")
        self._proposed = None
        for words in self._proposals.values():
            if is_committed:
                words.commit(step)
            else:
                words.abort(step)
        if is_committed:
            self._tasks.create_task(self._report_passed(step))

    async def _report_answers(self, step: int) -> None:
        pending = dict(self._proposals)
        while self._proposed == step and (pending := self._running(pending)):
            for rank, words in list(pending.items()):
                if (accepted := words.answer(step)) is not None:
                    kind = "accepted" if accepted else "rejected"
                    await self._notify(kind, rank=rank, step=step)
                    del pending[rank]
            # The rank is another process and sends no signal.
            await asyncio.sleep(_ANSWER_SECONDS)

    async def _report_passed(self, step: int) -> None:
        pending = dict(self._proposals)
        while pending := self._running(pending):
            for rank, words in list(pending.items()):
                if words.has_passed(step):
                    await self._notify("passed", rank=rank, step=step)
                    del pending[rank]
            # The rank is another process and sends no signal.
            await asyncio.sleep(_ANSWER_SECONDS)

    def _running(self, shared: Mapping[int, ProposalWords]) -> dict[int, ProposalWords]:
        return {rank: words for rank, words in shared.items() if rank in self._proposals}

    async def end(self) -> None:
        """Stop the ranks, and remove the attempt's files on this node."""
        await self.stop()
        if self._watching:
            await asyncio.wait(self._watching)
        await self._resources.aclose()
        self._remove_links()
        await self._remove(self._directory)

    @property
    def is_trial(self) -> bool:
        return self._message["ranks"][0]["context"].get("trial") is not None

    async def end_in_background(self, next_started: asyncio.Event) -> None:
        """Like `end`, but after the exit of all ranks remove the files after `next_started`."""
        if len(self._ended) < len(self._message["ranks"]):
            await self.end()
            return
        await self._resources.aclose()
        self._remove_links()
        # The next attempt may have the same name, and must not wait for the removal.
        with contextlib.suppress(FileNotFoundError):
            renamed = self._directory.rename(f"{self._directory}-left-{time.monotonic_ns()}")
            self._tasks.create_task(self._remove_after(next_started, renamed))

    def _remove_links(self) -> None:
        if self._daemon is not None:
            self._daemon.remove_links(self._directory)

    async def _remove_after(self, started: asyncio.Event, directory: Path) -> None:
        await started.wait()
        await self._remove(directory)

    async def _remove(self, directory: Path) -> None:
        if directory.exists():
            # Ignore errors: an unreadable directory stays until the end of the container.
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def model_dir(self, rank: int) -> Path:
        if self._script is not None and rank != self._first_rank:
            # The first rank publishes the files that all ranks of the container have left.
            return self._directory / f"rank-{rank}" / "model"
        return self._ranks[rank].model_dir

    async def _run(
        self, daemon: DaemonClient, rank: RankProcess, call: bytes, gpus: list[str]
    ) -> None:
        try:
            reserve_outcome(rank.directory)
            self._proposals[rank.rank] = ProposalWords(rank.directory)
            blocked = BlockedTime(rank.directory)
            started = await rank.start(call)
        except OSError as error:
            await self._report_not_started(rank.rank, error, was_stopped=rank.was_stopped)
            return
        finally:
            self.started.set()
        how = "forked" if started.warning is None else "not forked"
        log.debug("%s: rank %d started: pid %d, %s", self.run_id, rank.rank, started.pid, how)
        await self._notify("started", rank=rank.rank, pid=started.pid)
        if started.warning is not None:
            await self._warn(f"rank {rank.rank} was not forked: {started.warning}")
        kill = functools.partial(daemon.signal, started.pid, signal.SIGKILL, "tree")
        try:
            async with RankUploads(
                rank.directory,
                rank.context,
                self._stopping,
                self._dropping,
                self._warn,
                functools.partial(self._report_saved, rank.rank),
                tensorboard=self._tensorboard_dir(rank),
            ) as uploads:
                await self._watch(rank, gpus, kill, uploads, blocked)
        finally:
            # A held gang keeps the rank's other files until the next launch.
            if (rank.directory / KEPT).exists():
                await asyncio.to_thread(shutil.rmtree, rank.directory / KEPT, ignore_errors=True)

    def _tensorboard_dir(self, rank: RankProcess) -> Path | None:
        kept = None if self._script is None else self._script.kept.tensorboard
        if kept is None or rank.rank != self._first_rank:
            return None
        return rank.directory / WORK / kept

    async def _report_not_started(self, rank: int, error: OSError, *, was_stopped: bool) -> None:
        log.info("%s: rank %d not started: %s", self.run_id, rank, error)
        outcome = {"status": "not started", "error": str(error)}
        await self._notify("started", rank=rank, pid=0)
        await self._report(rank, _exit_without_status(outcome, was_stopped=was_stopped))

    async def _watch(
        self,
        rank: RankProcess,
        gpus: list[str],
        kill: Callable[[], None],
        uploads: RankUploads,
        blocked: BlockedTime,
    ) -> None:
        ended = asyncio.Event()
        file = rank.directory / metrics.FILE
        problems: list[OSError] = []
        gpu_broken, loop = asyncio.Event(), asyncio.get_running_loop()

        def append_sample(sample: GpuSample) -> None:
            metrics.append(file, metrics.sample_line(sample))

        def on_gpu_broken() -> None:
            log.info("%s: a GPU of rank %d can no longer be used", self.run_id, rank.rank)
            loop.call_soon_threadsafe(gpu_broken.set)

        cut = OutputCut(self._message["log_limit"], self._stopping)

        async def follow_or_kill(follower: _Follower, path: Path, send: _Send) -> int:
            try:
                return await follower(path, ended, send, cut)
            except OSError as error:
                # The rest of the rank's output would be lost.
                problems.append(error)
                kill()
                return 0

        async with asyncio.TaskGroup() as following:
            killing = following.create_task(_kill_when(gpu_broken, kill))
            following.create_task(self._report_entry(rank, ended))
            following.create_task(self._report_blocked(rank.rank, blocked, ended))
            following.create_task(self._report_warnings(rank, ended))
            follow_shown = functools.partial(
                follow_output, should_keep_own=rank.should_show_all_frames
            )
            followers = {
                kind: following.create_task(
                    follow_or_kill(
                        follower, path, functools.partial(self._send_chunk, kind, rank.rank)
                    )
                )
                for kind, path, follower in (
                    ("output", rank.log, follow_shown),
                    ("record", file, follow),
                    ("reports", file, follow_reports),
                )
            }
            async with sampling(gpus, append_sample, on_gpu_failure=on_gpu_broken) as seen:
                rank_exit = await self._wait_exit(rank, kill)
            ended.set()
            was_killed = not killing.cancel()
            has_returned = rank_exit.outcome.get("status") in SUCCESSFUL
            is_failing = not has_returned and not rank_exit.was_stopped
            _, unsent = await asyncio.wait(followers.values(), timeout=_OUTPUT_SECONDS)
            # Other ranks need not wait until the driver has all output of this one.
            await self._report_failing(rank.rank, rank_exit, is_due=is_failing and bool(unsent))
        log.debug("%s: rank %d: all its output was sent", self.run_id, rank.rank)
        if missing := followers["record"].result():
            await self._warn(f"{missing:,} bytes of the metrics of rank {rank.rank} were not sent")
        for problem in problems[:1]:
            await self._warn(f"the output of rank {rank.rank} is incomplete: {problem}")
        await self._warn_of_unwatched_gpus(seen.problems)
        try:
            unsaved = await asyncio.to_thread(self._unsaved_results, rank)
        except OSError as error:
            unsaved = [f"the working directory of rank {rank.rank} could not be read: {error}"]
        for text in unsaved:
            await self._warn(text)
        # Other ranks may wait for this one. The driver can stop them before the upload ends.
        is_behind = uploads.is_behind or self._mirror is not None
        await self._report_failing(rank.rank, rank_exit, is_due=is_failing and is_behind)
        # The next attempt starts once all exits are reported, and all its ranks must see the same
        # checkpoints.
        report_saving = functools.partial(self._notify, "saving", rank=rank.rank)
        await uploads.finish(report_saving, has_returned=has_returned and not rank_exit.was_stopped)
        await self._finish_mirror(rank_exit, report_saving)
        explained = _with_cause(rank_exit, problems, seen.events if was_killed else ())
        await self._report(rank.rank, explained, seen.events)

    def _unsaved_results(self, rank: RankProcess) -> list[str]:
        if self._script is not None and rank.rank != self._first_rank:
            return []
        kept = () if self._script is None else self._script.kept.all
        return unsaved_results(rank.rank, rank.directory / WORK, kept)

    async def _report_failing(self, rank: int, rank_exit: RankProcessExit, *, is_due: bool) -> None:
        if is_due:
            await self._notify("failing", rank=rank, raised="traceback" in rank_exit.outcome)

    async def _report_entry(self, rank: RankProcess, ended: asyncio.Event) -> None:
        if (entered_at := await rank.wait_entry(ended)) is not None:
            await self._notify("entered", rank=rank.rank, time=entered_at)

    async def _report_blocked(self, rank: int, blocked: BlockedTime, ended: asyncio.Event) -> None:
        """Report the seconds for which a rank was blocked, at each change, until its exit."""
        reported = RankLosses()
        is_last = False
        while not is_last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BLOCKED_SECONDS):
                    await ended.wait()
            is_last, now = ended.is_set(), blocked.read()
            if now != reported:
                reported = now
                await self._notify("blocked", rank=rank, data=now.data, checkpoints=now.checkpoints)

    async def _report_warnings(self, rank: RankProcess, ended: asyncio.Event) -> None:
        try:
            await follow_warnings(rank.directory, ended, self._warn)
        except OSError as error:
            await self._warn(f"the warnings of rank {rank.rank} could not be read: {error}")

    async def _warn(self, text: str) -> None:
        await self._notify("warning", text=text)

    async def _report_saved(self, rank: int, saved: SaveResult) -> None:
        is_complete, agreed = saved.is_complete, saved.agreed
        await self._notify("saved", rank=rank, step=saved.step, complete=is_complete, agreed=agreed)

    async def _warn_of_unwatched_gpus(self, problems: Mapping[str, str]) -> None:
        """Warn, once in this container, why events of its GPUs may go unnoticed."""
        simulated = read_container_gpus().simulated_addresses if problems else ()
        real = {problem for gpu, problem in problems.items() if gpu not in simulated}
        for problem in sorted(real - self._warned_problems):
            self._warned_problems.add(problem)
            host = self._message["ranks"][0]["context"]["host"]
            # All nodes have the same Python: without a host, the driver warns only once.
            whose = "the ranks' GPUs" if problem == NOT_INSTALLED else f"GPUs of {host}"
            await self._warn(f"XID events or the loss of {whose} may go unnoticed: {problem}")

    async def _wait_exit(self, rank: RankProcess, kill: Callable[[], None]) -> RankProcessExit:
        try:
            return await rank.wait()
        except* OSError as group:
            problem = group.exceptions[0]
        # The agent may never see the rank's exit, so `stop` must not wait for the rank.
        del self._ranks[rank.rank]
        kill()
        outcome = {"status": _FILES_LOST, "error": str(problem)}
        return _exit_without_status(outcome, was_stopped=rank.was_stopped)

    async def _send_chunk(self, kind: str, rank: int, chunk: bytes) -> None:
        await self._notify(kind, chunk, rank=rank)

    async def _report(
        self, rank: int, end: RankProcessExit, events: Sequence[GpuEvent] = ()
    ) -> None:
        outcome = dict(end.outcome)
        log.info(
            "%s: rank %d ended: %s, %s%s",
            self.run_id,
            rank,
            end.signal or f"exit code {end.exit_code}",
            outcome.get("status", "no outcome"),
            ", stopped" if end.was_stopped else "",
        )
        has_seen_request = has_seen_end(self._directory / f"rank-{rank}")
        try:
            value = await self._store_value(rank, end.value)
        except StoreError as error:
            value, outcome = _ReturnedValue(), {"status": "value lost", "error": str(error)}
        # Record the exit before its report: the driver may start the next attempt at once.
        self._ended.add(rank)
        self._proposals.pop(rank, None)
        if (inbox := self._inboxes.pop(rank, None)) is not None:
            inbox.close()
        self._has_failed |= end.was_stopped or outcome.get("status") not in SUCCESSFUL
        if self._has_failed and len(self._ended) == len(self._message["ranks"]):
            # Before the last exit: the driver ignores later messages of this attempt.
            await send_log(self._notify, None if self._daemon is None else self._daemon.pid)
        await self._notify(
            "ended",
            value.inline,
            rank=rank,
            value=value.file,
            exit_code=end.exit_code,
            signal=end.signal,
            peak_memory=end.peak_memory,
            outcome=outcome,
            log_tail=end.log_tail,
            time=end.time,
            stopped=end.was_stopped,
            oom_kills=oom_kills() - self._oom_kills_before,
            gpu_events=[event.fields() for event in events],
            pruned=outcome.get("status") == PRUNED
            or (has_seen_request and outcome.get("status") in SUCCESSFUL),
        )
        if len(self._ended) == len(self._message["ranks"]):
            self.ended.set()

    async def _store_value(self, rank: int, value: bytes) -> _ReturnedValue:
        if len(value) <= _MAX_INLINE:
            return _ReturnedValue(value)
        name = f"values/attempt-{self._message['attempt']}-rank-{rank}.pickle"
        directory = self._run_url / "values"

        def write() -> None:
            directory.make()
            (self._run_url / name).write(value)

        # A daemon thread, because neither GPUs nor the agent's end must wait for a lake that hangs.
        call = BoundedCall("hopsgpu-value", write)
        try:
            await asyncio.to_thread(call.result, _VALUE_SECONDS)
        except TimeoutError as error:
            raise StoreError(
                f"{(self._run_url / name).url} was not written within {_VALUE_SECONDS:g} s"
            ) from error
        return _ReturnedValue(file={"name": name, "digest": hashlib.sha256(value).hexdigest()})


def _has_failed(rank_exit: RankProcessExit) -> bool:
    return rank_exit.was_stopped or rank_exit.outcome.get("status") not in SUCCESSFUL


def _exit_without_status(outcome: Mapping[str, str], *, was_stopped: bool) -> RankProcessExit:
    return RankProcessExit(None, None, 0, outcome, b"", (), time.time(), was_stopped)


def _split(payload: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = list(itertools.accumulate(sizes, initial=0))
    return [payload[begin:end] for begin, end in itertools.pairwise(ends)]


async def _kill_when(gpu_broken: asyncio.Event, kill: Callable[[], None]) -> None:
    """Kill a rank whose GPU is broken: the rank might wait for the GPU forever."""
    await gpu_broken.wait()
    await asyncio.sleep(_BROKEN_SECONDS)
    kill()


def _with_cause(
    end: RankProcessExit, problems: Sequence[OSError], killed_for: Sequence[GpuEvent]
) -> RankProcessExit:
    """Return an exit with its cause, if the rank has not recorded an outcome."""
    if "status" in end.outcome or end.was_stopped:
        return end
    fatal = [event for event in killed_for if event.is_fatal]
    if fatal and end.signal == signal.SIGKILL.name:
        error = f"{fatal[0].gpu}: {fatal[0].reason}"
        return replace(end, outcome={"status": _GPU_FAILED, "error": error})
    if problems:
        error = str(problems[0])
    elif end.exit_code == os.EX_IOERR:
        error = "the rank could not write its outcome; the end of its log may say why"
    else:
        return end
    return replace(end, outcome={"status": _FILES_LOST, "error": error})


def spec_of(message: Message, python: RankPython) -> ServerSpec:
    return server_spec(os.environ, message["shared"], message["frameworks"], python)
