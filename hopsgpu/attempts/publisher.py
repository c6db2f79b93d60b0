"""Publishes the files that ranks left: their agents upload, the driver commits the version."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hopsgpu.agent.model_upload import ModelFiles, load_model_files, load_parts
from hopsgpu.artifacts import publication, stale_uploads
from hopsgpu.artifacts.manifest import VersionDescription, framework_of
from hopsgpu.artifacts.models import ModelVersion
from hopsgpu.artifacts.versions import CLAIMS, PROBE, STAGING
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.control.subscriptions import Subscription
from hopsgpu.core.bounded_reads import MAX_RECORD_BYTES
from hopsgpu.core.gang import GangExecutor, World
from hopsgpu.errors import Cancelled, ConfigError, HopsGpuError, StoreError
from hopsgpu.serving import model_signature
from hopsgpu.serving.model_formats import pickle_warning
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.error_messages import JSON_ERRORS
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# StoreError kind: an executor was lost before its ranks' files were uploaded.
EXECUTOR_LOST = "executor lost"
# Wait for stopped uploads. An upload that waits for the lake may take longer.
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Agents:
    """The agents of an attempt, and how to communicate with them.

    Attributes:
        explain_loss: returns why an executor was lost, or "".
    """

    world: World
    channel: Subscription
    next_event: Callable[[], Event | None]
    cancelled: threading.Event
    explain_loss: Callable[[GangExecutor], str] = lambda _: ""

    def by_key(self, ranks: Collection[int]) -> dict[int, list[int]]:
        """Group ranks by the key of their agent."""
        keys: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            keys.setdefault(self.world.processes[rank].container.key, []).append(rank)
        return keys


class Publisher:
    """Publishes the files that the ranks of one attempt left.

    Args:
        ranks: the ranks that have returned.

    Attributes:
        kept: the uploaded files if a publish failed, because they may be the only copy; its owner
            may `discard` them.
    """

    def __init__(
        self, name: str, agents: Agents, ranks: Collection[int], warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._name = name
        self._agents = agents
        self._ranks = agents.by_key(ranks)
        self.kept: LakePath | None = None
        # Keys of the agents that are uploading.
        self._busy: set[int] = set()

    def find_files(self) -> dict[int, ModelFiles]:
        """Ask the agents for the files that their ranks left; return them by rank.

        Raises:
            StoreError: an agent was lost; its kind is EXECUTOR_LOST.
            Cancelled: the run was cancelled meanwhile.
        """
        files: dict[int, ModelFiles] = {}
        log.debug("%s: asks %d agents for the files of their ranks", self._name, len(self._ranks))
        for key, ranks in self._ranks.items():
            self._agents.channel.send(key, "left", ranks=ranks)
        for message in self._answers("left", set(self._ranks)):
            files |= load_model_files(message.payload)
        return {
            rank: model_files
            for rank, model_files in sorted(files.items())
            if model_files.files or model_files.problem
        }

    def idle_agents(self, files_by_rank: Mapping[int, ModelFiles]) -> set[int]:
        """Return the keys of the agents without files to upload."""
        all_keys = {place.container.key for place in self._agents.world.processes}
        return all_keys - self._agents.by_key(files_by_rank).keys()

    def publish(
        self, models_url: str, files_by_rank: Mapping[int, ModelFiles], about: VersionDescription
    ) -> ModelVersion:
        """Let the agents upload their ranks' files, and commit these as the next version.

        Raises:
            StoreError: the lake refused, an executor was lost, a rank's files cannot be published,
                or two ranks left different content under one path. Uploaded files stay, and the
                error says where: they may be the only copy.
            Cancelled: the run was cancelled; the upload was removed as far as possible.
        """
        uploading = self._agents.by_key(
            {rank for rank, files in files_by_rank.items() if not files.problem}
        )
        if not uploading:
            self._check(files_by_rank)
        staging = publication.begin(LakePath(models_url), self._name)
        log.info("%s: %d agents upload to %s", self._name, len(uploading), staging.url)
        parts: dict[int, dict[str, FileFacts]] = {}
        try:
            for key, ranks in uploading.items():
                self._busy.add(key)
                self._agents.channel.send(key, "publish", ranks=ranks, staging_url=staging.url)
            try:
                for message in self._answers("uploaded", set(uploading)):
                    parts |= load_parts(message.payload)
            except BaseException:
                self._stop()
                raise
            self._check(files_by_rank)
            # A new client: an idle connection may have been dropped during a long upload.
            staging = LakePath(staging.url)
            if any(map(framework_of, parts.values())):
                # The files tell the framework more reliably than the function's imports.
                about = replace(about, framework=None)
            about, warnings = self._add_signature(about, staging, parts)
            version = publication.commit(staging, parts, about)
        except BaseException as error:
            uploaded = [rank for rank, files in sorted(parts.items()) if files]
            if not uploaded or isinstance(error, Cancelled) or not isinstance(error, Exception):
                _abandon(staging, error)
                raise
            self.kept = staging
            note = self._kept_note(staging.url, uploaded)
            if not isinstance(error, HopsGpuError):
                error.add_note(note)
                raise
            raise StoreError(f"{error}. {note}", getattr(error, "kind", "")) from error
        for warning in (*warnings, *self._pickle_warnings(parts)):
            self._warn(warning)
        return version

    def _pickle_warnings(self, parts: Mapping[int, Mapping[str, FileFacts]]) -> list[str]:
        warning = pickle_warning({path for files in parts.values() for path in files})
        return [] if warning is None else [f"{self._name!r}: {warning}"]

    def _check(self, files_by_rank: Mapping[int, ModelFiles]) -> None:
        for rank, files in sorted(files_by_rank.items()):
            if files.problem:
                raise StoreError(
                    f"{self._name!r} is not published: rank {rank} left files that cannot be"
                    f" published: {files.problem}",
                    files.trouble,
                )

    def _kept_note(self, staging: str, ranks: Sequence[int]) -> str:
        """Say where the uploaded files are that did not become a version."""
        whose = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        until = time.strftime(
            "%Y-%m-%d %H:%M %Z", time.localtime(time.time() + stale_uploads.AGE_MILLISECONDS / 1000)
        )
        return (
            f"The files that {whose} uploaded are kept for a day in {staging}/<rank>, or all in one"
            f" of these: copy them before {until}, after which a publish of {self._name!r} removes"
            " them"
        )

    def _add_signature(
        self,
        about: VersionDescription,
        staging: LakePath,
        parts: Mapping[int, Mapping[str, FileFacts]],
    ) -> tuple[VersionDescription, tuple[str, ...]]:
        """Add the signature that a rank left; return warnings if it is invalid."""
        file = model_signature.FILE
        rank = next((rank for rank, files in sorted(parts.items()) if file in files), None)
        if rank is None:
            return about, ()
        try:
            model_signature.check_size(parts[rank][file].bytes)
            content = (publication.part_of(staging, rank) / file).read(MAX_RECORD_BYTES)
            signature = model_signature.load(content)
            return replace(about, signature=signature), ()
        except (*JSON_ERRORS, ConfigError) as error:
            problem = (
                f"the manifest of {self._name!r} has no signature: {file}, which rank {rank} left,"
                f" is not valid JSON ({error})"
            )
            return about, (problem,)

    def _answers(self, kind: str, keys: Collection[int]) -> Iterator[Message]:
        """Yield one answer of each agent, in order of arrival."""
        waiting = set(keys)
        while waiting:
            if self._agents.cancelled.is_set():
                raise Cancelled(f"the run was cancelled while it published {self._name!r}")
            if lost := waiting.difference(self._agents.channel.connected):
                log.info("%s: agents %s were lost during %r", self._name, sorted(lost), kind)
                why = f"{self._name!r} is not published: {self._describe_loss(lost)}"
                raise StoreError(why, EXECUTOR_LOST)
            event = self._next_event()
            if event is None or event.peer not in waiting or event.message is None:
                continue
            if event.message.kind == "publish-failed":
                raise StoreError(
                    f"{self._name!r} is not published: {event.message['reason']}",
                    event.message["trouble"],
                )
            if event.message.kind == kind:
                waiting.discard(event.peer)
                log.debug("%s: agent %d: %s; %d left", self._name, event.peer, kind, len(waiting))
                yield event.message

    def _describe_loss(self, keys: Collection[int]) -> str:
        ranks = sorted(rank for key in keys for rank in self._ranks[key])
        reason = self._agents.explain_loss(self._agents.world.processes[ranks[0]].container)
        why = f" ({reason})" if reason else ""
        if len(ranks) == 1:
            return f"rank {ranks[0]}'s executor was lost{why}"
        return f"the executors of ranks {', '.join(map(str, ranks))} were lost{why}"

    def _next_event(self) -> Event | None:
        event = self._agents.next_event()
        message = None if event is None else event.message
        if event is not None and message and message.kind in ("uploaded", "publish-failed"):
            self._busy.discard(event.peer)
        return event

    def _stop(self) -> None:
        """Stop the uploads, so that no agent writes into a removed directory."""
        for key in self._busy:
            self._agents.channel.send(key, "stop", dump_stacks=False, drop_saves=False)
        deadline = time.monotonic() + _STOP_SECONDS
        while (
            self._busy.intersection(self._agents.channel.connected) and time.monotonic() < deadline
        ):
            self._next_event()


def discard(kept: LakePath) -> str:
    """Remove a kept upload, because a later publish of its run succeeded.

    Returns:
        A warning if the lake refuses; else "".
    """
    try:
        publication.abandon(LakePath(kept.url))
    except HopsGpuError as problem:
        return f"an earlier upload stays on the lake until a later publish removes it: {problem}"
    return ""


def _abandon(staging: LakePath, error: BaseException) -> None:
    try:
        publication.abandon(staging)
    except HopsGpuError as problem:
        error.add_note(
            f"the uploaded files stay on the lake until a later publish removes them: {problem}"
        )


def check_writable(models_url: str, name: str, run_id: str, *, should_write_block: bool) -> None:
    """Create and remove small files where a publish writes, to check the permissions.

    Args:
        models_url: the directory of all models; created if missing.
        should_write_block: whether to write a byte too, which takes HDFS half a second: a space
            quota counts blocks, and an empty file has none.

    Raises:
        StoreError: the lake refuses; the message says why.
    """
    models = LakePath(models_url)
    home = models / name
    probe = f"{PROBE}{run_id}"  # no name of a model, a version or a claim has this prefix
    content = b"\n" if should_write_block else b""
    try:
        models.make()
        if not home.exists():
            (models / probe).check_create(content)
            return
        (home / probe).check_create(content)
        for place in (home / STAGING, home / CLAIMS):
            if place.exists():
                (place / probe).check_create()
    except StoreError as error:
        raise StoreError(f"model={name!r} could not be published: {error}", error.kind) from error
