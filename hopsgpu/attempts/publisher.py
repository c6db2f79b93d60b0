"""Publishing of what the ranks left: their agents upload it, the driver commits the version."""

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
from hopsgpu.core.gang import World
from hopsgpu.errors import Cancelled, ConfigError, HopsGpuError, StoreError
from hopsgpu.serving import model_signature
from hopsgpu.serving.model_formats import pickle_warning
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.error_messages import JSON_ERRORS
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# The kind of a StoreError: with the executor was lost what its ranks had not uploaded.
EXECUTOR_LOST = "executor lost"
# For an upload that was asked to stop; one that waits for the lake can take longer.
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Agents:
    """The agents of a training, and how to communicate with them.

    Attributes:
        world: their ranks.
        channel: what they say about the run.
        next_event: takes the next event from the channel, and returns it, or None.
        cancelled: event that cancels the run.
        why_lost: returns why the executor on a host was lost, or "".
    """

    world: World
    channel: Subscription
    next_event: Callable[[], Event | None]
    cancelled: threading.Event
    why_lost: Callable[[str], str] = lambda _: ""

    def of(self, ranks: Collection[int]) -> dict[int, list[int]]:
        """Return these ranks grouped by the key of their agent."""
        keys: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            keys.setdefault(self.world.processes[rank].container.key, []).append(rank)
        return keys


@dataclass(frozen=True)
class _Signed:
    """The facts for the manifest, and warnings: why they lack the signature that a rank left."""

    about: VersionDescription
    warnings: tuple[str, ...] = ()


class Publisher:
    """Publishes what the ranks of one training left.

    Attributes:
        kept: what ranks uploaded before a publish failed, if it may be the only copy of it; its
            owner may `discard` it once it is not needed.

    Args:
        name: name of the model.
        agents: the agents of the ranks.
        ranks: the ranks that have returned.
        warn: called with warnings about a version that was published, for people.
    """

    def __init__(
        self, name: str, agents: Agents, ranks: Collection[int], warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._name = name
        self._agents = agents
        self._ranks = agents.of(ranks)
        self.kept: LakePath | None = None
        # Keys of the agents that are uploading.
        self._busy: set[int] = set()

    def left(self) -> dict[int, ModelFiles]:
        """Ask the agents what their ranks left, and return it by rank, without empty entries.

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
        return {rank: left for rank, left in sorted(files.items()) if left.files or left.problem}

    def idle(self, left: Mapping[int, ModelFiles]) -> set[int]:
        """Return the keys of the agents that take no part in the upload."""
        all_keys = {place.container.key for place in self._agents.world.processes}
        return all_keys - self._agents.of(left).keys()

    def publish(
        self, models_url: str, left: Mapping[int, ModelFiles], about: VersionDescription
    ) -> ModelVersion:
        """Have the agents upload what their ranks left, and commit it as the next version.

        Args:
            models_url: the directory of all models.
            left: what each rank left, by rank.
            about: further facts for the manifest.

        Raises:
            StoreError: the lake refused an operation, an executor was lost, a rank left something
                that cannot be published, or two ranks left the same path with different content.
                What ranks have uploaded by then may be the only copy: it stays, and the error says
                where.
            Cancelled: the run was cancelled meanwhile; the upload has been removed from the lake
                as far as possible.
        """
        uploading = self._agents.of({rank for rank, files in left.items() if not files.problem})
        if not uploading:
            self._check(left)
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
            self._check(left)
            # Uploads may take hours, and a connection that is idle so long may be dropped unseen.
            staging = LakePath(staging.url)
            if any(map(framework_of, parts.values())):
                # The files tell the framework more reliably than the function's imports.
                about = replace(about, framework=None)
            signed = self._signed(about, staging, parts)
            version = publication.commit(staging, parts, signed.about)
        except BaseException as error:
            whole = [rank for rank, files in sorted(parts.items()) if files]
            if not whole or isinstance(error, Cancelled) or not isinstance(error, Exception):
                _abandon(staging, error)
                raise
            self.kept = staging
            note = self._kept_note(staging.url, whole)
            if not isinstance(error, HopsGpuError):
                error.add_note(note)
                raise
            raise StoreError(f"{error}. {note}", getattr(error, "kind", "")) from error
        for warning in (*signed.warnings, *self._warnings(parts)):
            self._warn(warning)
        return version

    def _warnings(self, parts: Mapping[int, Mapping[str, FileFacts]]) -> list[str]:
        warning = pickle_warning({path for files in parts.values() for path in files})
        return [] if warning is None else [f"{self._name!r}: {warning}"]

    def _check(self, left: Mapping[int, ModelFiles]) -> None:
        for rank, files in sorted(left.items()):
            if files.problem:
                raise StoreError(
                    f"{self._name!r} is not published: rank {rank} left files that cannot be"
                    f" published: {files.problem}",
                    files.trouble,
                )

    def _kept_note(self, staging: str, ranks: Sequence[int]) -> str:
        """Return a sentence for people about uploaded parts that did not become a version."""
        whose = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        until = time.strftime(
            "%Y-%m-%d %H:%M %Z", time.localtime(time.time() + stale_uploads.AGE_MILLISECONDS / 1000)
        )
        return (
            f"The files that {whose} uploaded are kept for a day in {staging}/<rank>, or all in one"
            f" of these: copy them before {until}, after which a publish of {self._name!r} removes"
            " them"
        )

    def _signed(
        self,
        about: VersionDescription,
        staging: LakePath,
        parts: Mapping[int, Mapping[str, FileFacts]],
    ) -> _Signed:
        """Return the facts for the manifest, with the signature if a rank left one."""
        file = model_signature.FILE
        rank = next((rank for rank, files in sorted(parts.items()) if file in files), None)
        if rank is None:
            return _Signed(about)
        try:
            model_signature.check_size(parts[rank][file].bytes)
            signature = model_signature.load((publication.part_of(staging, rank) / file).read())
            return _Signed(replace(about, signature=signature))
        except (*JSON_ERRORS, ConfigError) as error:
            problem = (
                f"the manifest of {self._name!r} has no signature: {file}, which rank {rank} left,"
                f" is not valid JSON ({error})"
            )
            return _Signed(about, (problem,))

    def _answers(self, kind: str, keys: Collection[int]) -> Iterator[Message]:
        """Yield one answer of each of these agents, in order of arrival."""
        waiting = set(keys)
        while waiting:
            if self._agents.cancelled.is_set():
                raise Cancelled(f"the run was cancelled while it published {self._name!r}")
            if lost := waiting.difference(self._agents.channel.connected):
                log.info("%s: agents %s were lost during %r", self._name, sorted(lost), kind)
                why = f"{self._name!r} is not published: {self._lost(lost)}"
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

    def _lost(self, keys: Collection[int]) -> str:
        ranks = sorted(rank for key in keys for rank in self._ranks[key])
        reason = self._agents.why_lost(self._agents.world.processes[ranks[0]].container.host)
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
        """Stop the uploads, so that no agent writes where everything has been removed."""
        for key in self._busy:
            self._agents.channel.send(key, "stop", dump_stacks=False, drop_saves=False)
        deadline = time.monotonic() + _STOP_SECONDS
        while (
            self._busy.intersection(self._agents.channel.connected) and time.monotonic() < deadline
        ):
            self._next_event()


def discard(kept: LakePath) -> str:
    """Remove an upload that was kept, since a later publish of its training succeeded.

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


def check_writable(models_url: str, name: str, run_id: str, *, blocks: bool) -> None:
    """Check that a version could be written: create and remove small files where a publish writes.

    Args:
        models_url: the directory of all models; created if missing.
        name: name of the model.
        run_id: part of the files' names.
        blocks: whether to write a byte too, which takes HDFS half a second: a space quota counts
            blocks, and an empty file has none.

    Raises:
        StoreError: the lake refuses; the message says why.
    """
    models = LakePath(models_url)
    home = models / name
    probe = f"{PROBE}{run_id}"  # no name of a model, a version or a claim has this prefix
    content = b"\n" if blocks else b""
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
