"""The queue of gangs in Leases of the namespace, where no lake has renames.

A directory is the Leases with one value of a label, and a file is a Lease. The name of a Lease is
derived from that of its file, so the API server lets only one client create a file. The true name
is an annotation; a Lease with another name than its annotation gives is no file.

The time of a file is the API server's: that of its creation, or of the last change of its
renewTime, which the server writes into managedFields. Both are rounded down to seconds, so a file
looks older by up to one second. API servers of one cluster may have several clocks, which must not
be seconds apart.

A rename creates the target and deletes the source: for a moment, both exist. The target has the
source's time in an annotation, until it is renewed.

Kubernetes records no creator of an object, so the owner of a file is an annotation that its writer
sets. A user who may write Leases in the namespace can forge it, and can set the time of a file.

Source: the Kubernetes documentation, "Leases", "Server-Side Apply" (managedFields) and "Object
Names and IDs".
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from hopsgpu.cluster_managers.http_client import NoAccess, NoAnswer, NotUnderstood
from hopsgpu.cluster_managers.kubernetes.api_client import ApiClient, ApiError
from hopsgpu.cluster_managers.kubernetes.pods import list_of, mapping_of, seconds_of, text_of
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION, UNREACHABLE, UNSUPPORTED
from hopsgpu.storage.filesystem import FileStatus

T = TypeVar("T")

log = logging.getLogger(__name__)

LABEL = "hopsgpu/queue"
# Name and owner of the file; the time of modification that a rename has kept.
_FILE, _OWNER, _KEPT_TIME = "hopsgpu/file", "hopsgpu/user", "hopsgpu/modified"
_SELF_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_CONFLICT, _NOT_FOUND, _TOO_MANY_REQUESTS = 409, 404, 429
# A directory that has more Leases is not read. Users may have a hundred tickets each.
_MAX_LEASES = 10_000
_MAX_FILE_NAME, _MAX_OWNER = 255, 200
# The rest of a Lease's name has 47 characters, and the whole at most 253.
_MAX_READABLE = 150
# Retries are for as long as those of a queue on the lake.
_RETRY_SECONDS = 4.0
_FIRST_PAUSE, _MAX_PAUSE = 0.1, 1.0
# Number of times that a renewal tries again because another client changed the Lease.
_MAX_CONFLICTS = 5
# Number of files whose versions a directory remembers.
_MAX_REMEMBERED = 1000
_FILE_MODE, _DIRECTORY_MODE = 0o666, 0o777


def lease_name(partition: str, file: str) -> str:
    """Return the name of a file's Lease, with a readable part of the file's name."""
    readable = re.sub(r"[^a-z0-9]+", "-", file.lower())[:_MAX_READABLE].strip("-")
    digest = hashlib.sha256(f"{partition}/{file}".encode(errors="replace")).hexdigest()[:32]
    return f"hopsgpu-queue-{readable}-{digest}"


def file_status(answer: Mapping[str, Any], partition: str) -> FileStatus | None:
    """Return the status of the file that a Lease is; None if it is no file of the queue."""
    metadata = mapping_of(answer, "metadata")
    annotations = mapping_of(metadata, "annotations")
    name = annotations.get(_FILE)
    if not isinstance(name, str) or len(name) > _MAX_FILE_NAME:
        return None
    if text_of(metadata, "name") != lease_name(partition, name):
        return None
    times = [entry.get("time") for entry in list_of(metadata, "managedFields")]
    modified = max(map(seconds_of, (metadata.get("creationTimestamp"), *times)))
    if kept := seconds_of(annotations.get(_KEPT_TIME)):
        modified = min(modified, kept)
    owner = text_of(annotations, _OWNER)[:_MAX_OWNER]
    return FileStatus(name, int(modified * 1000), owner, _FILE_MODE, is_directory=False)


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _version_of(answer: Mapping[str, Any]) -> str:
    return text_of(mapping_of(answer, "metadata"), "resourceVersion")


def _holder_of(answer: Mapping[str, Any]) -> str:
    return text_of(mapping_of(answer, "spec"), "holderIdentity")


def _kind(error: NoAnswer | NotUnderstood) -> str:
    if isinstance(error, NotUnderstood):
        return ""
    if isinstance(error, NoAccess):
        return PERMISSION
    if error.status == _NOT_FOUND:
        return ABSENT
    is_overloaded = error.status is None or error.status in (_TOO_MANY_REQUESTS, *range(500, 600))
    return UNREACHABLE if is_overloaded else ""


def _retry(doing: str, url: str, attempt: Callable[[int], T]) -> T:
    """Return the result of the first attempt that the API server answers, within seconds.

    Args:
        attempt: called with its number, from 0.

    Raises:
        StoreError: the API server refused, or did not answer.
    """
    first_failure: float | None = None
    number = 0
    while True:
        try:
            return attempt(number)
        except (NoAnswer, NotUnderstood) as error:
            kind = _kind(error)
            pause = min(_FIRST_PAUSE * 2**number, _MAX_PAUSE) * (0.5 + random.random())
            now = time.monotonic()
            first_failure = now if first_failure is None else first_failure
            if kind != UNREACHABLE or now - first_failure + pause > _RETRY_SECONDS:
                raise StoreError(f"cannot {doing} {url}: {error}", kind) from error
            log.info("attempt %d to %s %s failed: %s", number + 1, doing, url, error)
        number += 1
        time.sleep(pause)


@dataclass(frozen=True)
class _Written:
    """A Lease as this process wrote it: its version and time of modification, in ms."""

    version: str
    modified: int


class LeaseQueueDirectory:
    """The directory of a queue: the Leases with one value of a label. Threads may share it.

    All methods raise StoreError if the API server refuses, or does not answer for some seconds.

    Args:
        path: path of the namespace's Leases on the API server.
        partition: the value of the label.
        find_owner: returns the user who owns the files that are written here.
    """

    def __init__(
        self, client: ApiClient, path: str, partition: str, find_owner: Callable[[], str]
    ) -> None:
        self._client = client
        self._path = path
        self._partition = partition
        self._find_owner = find_owner
        self._lock = threading.Lock()
        self._written: dict[str, _Written] = {}
        # Sources of renames that are to be deleted: the API server failed after the target was
        # created.
        self._leftovers: set[str] = set()

    @property
    def url(self) -> str:
        return f"{self._client.address}{self._path} ({LABEL}={self._partition})"

    def __truediv__(self, name: str) -> LeaseQueueFile:
        return LeaseQueueFile(self, name)

    def entries(self) -> tuple[FileStatus, ...]:
        """Return all files; delete those that a rename has left.

        Raises:
            StoreError: there are more Leases than are accepted. A part of them could lack the
                highest generation, whose number must not be used twice.
        """

        def attempt(_: int) -> list[Mapping[str, Any]]:
            # A list without a version is of the present, not of a cache.
            leases = self._client.items(self._path, labelSelector=f"{LABEL}={self._partition}")
            return list(itertools.islice(leases, _MAX_LEASES + 1))

        answers = _retry("list", self.url, attempt)
        if len(answers) > _MAX_LEASES:
            raise StoreError(
                f"{self.url} has more than the {_MAX_LEASES} Leases that are accepted: an"
                f" administrator can delete them (kubectl delete leases -l {LABEL})"
            )
        files = [file_status(answer, self._partition) for answer in answers]
        return tuple(f for f in files if f is not None and not self._remove_leftover(f.name))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(entry.name for entry in self.entries()))

    @functools.cached_property
    def _owner(self) -> str:
        return _retry("find the user of", self.url, lambda _: self._find_owner())[:_MAX_OWNER]

    def _stat(self, name: str) -> FileStatus:
        url = self._url_of(name)
        answer = _retry("get the status of", url, lambda _: self._client.get(self._path_of(name)))
        status = file_status(answer, self._partition)
        if status is None:
            raise StoreError(f"{url} is no file of the queue of gangs", ABSENT)
        return status

    def _write(self, name: str) -> None:
        """Create or renew a file."""

        def attempt(_: int) -> Mapping[str, Any]:
            written = self._written.get(name)
            version = "" if written is None else written.version
            for _ in range(_MAX_CONFLICTS):
                body = self._body(name, version)
                try:
                    if version:
                        # A Lease that was deleted meanwhile is created.
                        return self._client.replace(self._path_of(name), body)
                    return self._client.create(self._path, body)
                except ApiError as error:
                    if error.status != _CONFLICT:
                        raise
                version = self._own_version(name)
            raise StoreError(f"cannot write {self._url_of(name)}: others change it all the time")

        self._remember(name, _retry("write", self._url_of(name), attempt))

    def _own_version(self, name: str) -> str:
        """Return the version of a file that exists; "" if it does not exist any more.

        Raises:
            StoreError: the file is another user's, as in a sticky directory.
        """
        present = self._find(name)
        if present is None:
            return ""
        status = file_status(present, self._partition)
        if status is None or status.owner != self._owner:
            owner = "no file of the queue of gangs" if status is None else f"of {status.owner}"
            raise StoreError(f"cannot write {self._url_of(name)}: it is {owner}", PERMISSION)
        return _version_of(present)

    def _rename(self, name: str, target: str) -> bool:
        written = self._written.get(name)
        modified = self._stat(name).modified if written is None else written.modified
        body = self._body(target, kept_ms=modified)

        def try_create(number: int) -> bool:
            try:
                answer = self._client.create(self._path, body)
            except ApiError as error:
                if error.status != _CONFLICT:
                    raise
                # The answer to an earlier attempt may have been lost.
                present = self._find(target) if number else None
                if present is None or _holder_of(present) != _holder_of(body):
                    return False
                answer = present
            self._remember(target, answer)
            return True

        if not _retry("rename", self._url_of(name), try_create):
            return False
        try:
            self._remove(name)
        except StoreError as error:
            if error.kind == PERMISSION:
                raise
            # The rename has succeeded: others see the target.
            log.info("deletes a file of the queue of gangs later: %s", error)
            with self._lock:
                self._leftovers.add(name)
        return True

    def _remove(self, name: str) -> None:
        def attempt(_: int) -> None:
            try:
                self._client.delete(self._path_of(name))
            except ApiError as error:
                if error.status != _NOT_FOUND:
                    raise

        _retry("remove", self._url_of(name), attempt)
        with self._lock:
            self._written.pop(name, None)
            self._leftovers.discard(name)

    def _remove_leftover(self, name: str) -> bool:
        """Delete a file if a rename has left it; return whether one has."""
        if name not in self._leftovers:
            return False
        try:
            self._remove(name)
        except StoreError as error:
            log.info("deletes a file of the queue of gangs later: %s", error)
        return True

    def _find(self, name: str) -> Mapping[str, Any] | None:
        try:
            return self._client.get(self._path_of(name))
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def _remember(self, name: str, answer: Mapping[str, Any]) -> None:
        status = file_status(answer, self._partition)
        with self._lock:
            self._leftovers.discard(name)
            self._written.pop(name, None)
            if status is not None:
                self._written[name] = _Written(_version_of(answer), status.modified)
            while len(self._written) > _MAX_REMEMBERED:
                del self._written[next(iter(self._written))]

    def _body(self, name: str, version: str = "", kept_ms: int = 0) -> dict[str, Any]:
        """Return a file for the API server, with an identity of its own.

        Args:
            version: the version that is replaced; "" for a new Lease.
            kept_ms: time of modification that a rename keeps; 0 for the time of this write.
        """
        annotations = {_FILE: name, _OWNER: self._owner}
        if kept_ms:
            annotations[_KEPT_TIME] = _time_text(kept_ms / 1000)
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": lease_name(self._partition, name),
                "labels": {LABEL: self._partition},
                "annotations": annotations,
                **({"resourceVersion": version} if version else {}),
            },
            "spec": {
                "holderIdentity": f"{socket.gethostname()}_{uuid.uuid4().hex}",
                # The server sets the time in managedFields only if a value changes.
                "renewTime": _time_text(time.time()),
            },
        }

    def _path_of(self, name: str) -> str:
        return f"{self._path}/{lease_name(self._partition, name)}"

    def _url_of(self, name: str) -> str:
        return f"{self._client.address}{self._path_of(name)}"


@dataclass(frozen=True)
class LeaseQueueFile:
    """A file of a queue that may exist: a Lease."""

    directory: LeaseQueueDirectory
    name: str

    def stat(self) -> FileStatus:
        return self.directory._stat(self.name)

    def write(self, content: bytes) -> None:
        """Create the file, or renew it, which only its owner may.

        Raises:
            StoreError: the file is another user's, or there is content, which Leases lack.
        """
        if content:
            raise StoreError(f"{self.directory.url}: Leases have no content", UNSUPPORTED)
        self.directory._write(self.name)

    def rename(self, target: LeaseQueueFile) -> bool:
        """Create the target and delete this file; return False if the target exists."""
        return self.directory._rename(self.name, target.name)

    def remove(self) -> None:
        """Remove the file, if it exists."""
        self.directory._remove(self.name)


class LeaseQueueRoot:
    """The directory that has a directory for each of some partitions.

    Args:
        path: path of the namespace's Leases on the API server.
        find_owner: returns the user who owns the files that are written here.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        partitions: Collection[str],
        find_owner: Callable[[], str],
    ) -> None:
        self._client = client
        self._path = path
        self._partitions = tuple(partitions)
        self._find_owner = find_owner

    @property
    def url(self) -> str:
        return f"{self._client.address}{self._path} ({LABEL})"

    @property
    def is_local(self) -> bool:
        return False

    def __truediv__(self, partition: str) -> LeaseQueueDirectory:
        return LeaseQueueDirectory(self._client, self._path, partition, self._find_owner)

    def entries(self) -> tuple[FileStatus, ...]:
        """Return the directories, with the API server's present time.

        The server writes it into the answer to a question that everybody may ask. Times of Leases
        could be forged.
        """
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = _retry(
            "get the time of", self.url, lambda _: self._client.create(_SELF_REVIEWS, body)
        )
        now = int(seconds_of(mapping_of(answer, "metadata").get("creationTimestamp")) * 1000)
        return tuple(
            FileStatus(name, now, "", _DIRECTORY_MODE, is_directory=True)
            for name in self._partitions
        )
