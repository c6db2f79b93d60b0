"""Makes uploaded files a version, and removes a version: each in one step for all readers.

If the lake can rename directories (HDFS, a local file system), one strict rename makes a version:

    <root>/<name>/_staging/<id>/<rank>/    the files of one part
    <root>/<name>/_claims/<n>              an empty file: the number n is taken, permanently
    <root>/<name>/<n>/                     a version, made by the rename

An object store has no rename. There a version exists once its manifest exists:

    <root>/<name>/_claims/<n>              as above; claimed before the upload
    <root>/<name>/<n>/                     the files of all parts, and no version yet
    <root>/<name>/<n>/manifest.json        the commit file, put there only if there is none

A version with an empty `manifest.json` does not exist. A process that removes an unfinished upload
or a version first writes the empty manifest, so that no process commits these files.

Before that step there is no version, and after it there is the complete version, whichever process
is killed. A process claims a number by exclusive creation of the claim. Claims stay, so no number
is used twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hopsgpu.artifacts import manifest
from hopsgpu.artifacts.versions import CLAIMS, STAGING, is_version, numbers
from hopsgpu.errors import StoreError
from hopsgpu.storage.digests import MAX_LIST_BYTES, FileFacts
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, EXISTS, UNREACHABLE
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

_MAX_PARALLEL_RENAMES = 8


@dataclass(frozen=True)
class MergePlan:
    """The moves that make one directory of the parts of several ranks.

    Attributes:
        base: the rank whose part becomes the version.
        moves: path of each file that is moved into the base → the rank whose part has the file.
    """

    files: Mapping[str, FileFacts]
    base: int
    moves: Mapping[str, int]


class VersionCommit(Protocol):
    """Makes and removes versions of a model, in the way that the lake supports."""

    def begin(self, home: LakePath) -> tuple[LakePath, int]:
        """Return the place of a new upload, and the lake's time in milliseconds since the epoch."""

    def home(self, staging: LakePath) -> LakePath: ...

    def part(self, staging: LakePath, rank: int) -> LakePath:
        """Return the directory of a rank's part of an upload."""

    def commit(
        self,
        staging: LakePath,
        plan: MergePlan,
        make_manifest: Callable[[int], bytes],
        finish_uploads: Callable[[], None],
    ) -> int:
        """Make an upload a version, and return its number.

        Raises:
            StoreError: the lake refused the operation, or the upload is no longer complete.
        """

    def withdraw(self, home: LakePath, number: int, check: Callable[[], None]) -> None:
        """Hide a version from everybody at once, and remove it unless a check then refuses.

        If `check` raises StoreError, the version is restored.

        Raises:
            StoreError: of the check; the lake refused the operation; or the version cannot be
                restored (kind "exists").
        """

    def abandon(self, staging: LakePath) -> bool:
        """Remove the caller's own upload; return False, and do nothing, if it is a version."""

    def discard(self, home: LakePath, place: LakePath) -> bool:
        """Remove another process's abandoned upload; one step hides it from all readers.

        Returns:
            False if the upload has become a version meanwhile; then nothing was removed.
        """


def commit_of(place: LakePath) -> VersionCommit:
    return _ByManifest() if place.is_object_store else _ByRename()


def claim(home: LakePath) -> int:
    """Claim the model's next number permanently; concurrent callers get different numbers."""
    claims = home / CLAIMS
    claims.make()
    number = max((*numbers(claims.names()), *numbers(home.names())), default=0)
    while True:
        number += 1
        if (claims / str(number)).create():
            log.debug("claimed version %d of %s", number, home.url)
            return number
        log.info("another publisher has claimed version %d of %s", number, home.url)


def discard_by_rename(home: LakePath, place: LakePath) -> None:
    """Remove a directory: hide it from readers by one rename, then delete it."""
    (home / STAGING).make()
    hidden = home / STAGING / uuid.uuid4().hex
    place.rename(hidden)
    hidden.remove()


class _ByRename:
    def begin(self, home: LakePath) -> tuple[LakePath, int]:
        staging = home / STAGING / uuid.uuid4().hex
        staging.make()
        # The modification time of the new directory is the lake's own time.
        return staging, staging.stat().modified

    def home(self, staging: LakePath) -> LakePath:
        return staging.parent.parent

    def part(self, staging: LakePath, rank: int) -> LakePath:
        return staging / str(rank)

    def commit(
        self,
        staging: LakePath,
        plan: MergePlan,
        make_manifest: Callable[[int], bytes],
        finish_uploads: Callable[[], None],
    ) -> int:
        home, base = self.home(staging), self.part(staging, plan.base)
        self._gather(staging, base, plan.moves)
        while True:
            number = claim(home)
            content = make_manifest(number)
            (base / manifest.FILE).write(content)
            finish_uploads()
            if _rename_version(base, home / str(number), content):
                break
            log.info("%s/%d exists already: claims another number", home.url, number)
        with contextlib.suppress(StoreError):  # a later sweep removes the directory
            staging.remove()
        return number

    def _gather(self, staging: LakePath, base: LakePath, moves: Mapping[str, int]) -> None:
        for directory in sorted({path.rpartition("/")[0] for path in moves} - {""}):
            (base / directory).make()

        def move(path: str) -> None:
            source = self.part(staging, moves[path]) / path
            # The rename returns False if it succeeded before and its answer was lost.
            if not source.rename(base / path) and source.exists():
                raise StoreError(f"{(base / path).url} exists already", kind=EXISTS)

        if moves:
            with concurrent.futures.ThreadPoolExecutor(_MAX_PARALLEL_RENAMES) as pool:
                list(pool.map(move, moves))

    def withdraw(self, home: LakePath, number: int, check: Callable[[], None]) -> None:
        # If the process is killed meanwhile, the version stays in the staging directory, and a
        # sweep removes it a day later.
        place, hidden = home / str(number), home / STAGING / uuid.uuid4().hex
        # A new directory above the version: without it, a sweep could remove an old version before
        # it is restored.
        hidden.make()
        hidden_version = hidden / str(number)
        try:
            place.rename(hidden_version)
        except StoreError as error:
            with contextlib.suppress(StoreError):  # report the first error
                # If the lake did not answer, the rename may have happened: leave it to a sweep.
                if error.kind != UNREACHABLE and not hidden_version.names():
                    hidden.remove()
            raise
        try:
            check()
        except StoreError as refusal:
            # The rename returns False if it succeeded before and its answer was lost.
            if not hidden_version.rename(place) and not is_version(home, number):
                raise StoreError(
                    f"cannot restore {place.url}, because the name is in use again: rename"
                    f" {hidden_version.url} within a day, before a later publish removes it"
                    f" ({refusal})",
                    EXISTS,
                ) from refusal
            log.info("restored version %d of %s: %s", number, home.url, refusal)
            hidden.remove()
            raise
        hidden.remove()

    def abandon(self, staging: LakePath) -> bool:
        staging.remove()
        return True

    def discard(self, home: LakePath, place: LakePath) -> bool:
        discard_by_rename(home, place)
        return True


class _ByManifest:
    def begin(self, home: LakePath) -> tuple[LakePath, int]:
        number = claim(home)
        return home / str(number), (home / CLAIMS / str(number)).stat().modified

    def home(self, staging: LakePath) -> LakePath:
        return staging.parent

    def part(self, staging: LakePath, rank: int) -> LakePath:
        # All parts share a directory, because files cannot be moved later. `merge` refuses
        # different content under one path, so it does not matter which rank uploads the file.
        return staging

    def commit(
        self,
        staging: LakePath,
        plan: MergePlan,
        make_manifest: Callable[[int], bytes],
        finish_uploads: Callable[[], None],
    ) -> int:
        number = int(staging.url.rpartition("/")[2])
        content = make_manifest(number)
        finish_uploads()
        # A sweep may have removed the files, if this process was suspended for a day.
        _check_complete(staging, plan.files)
        file = staging / manifest.FILE
        if not file.create(content) and not _is_ours(staging, content):
            raise StoreError(
                f"{staging.url} is not published: another process has put {file.url} there, as a"
                " publish does that finds an upload a day old; publish again",
                EXISTS,
            )
        return number

    def withdraw(self, home: LakePath, number: int, check: Callable[[], None]) -> None:
        # If the process is killed meanwhile, an empty manifest is left. A sweep removes it and the
        # files a day later.
        file = home / str(number) / manifest.FILE
        content = file.read(MAX_LIST_BYTES)
        file.write(b"")
        try:
            check()
        except StoreError as refusal:
            file.write(content)
            log.info("restored version %d of %s: %s", number, home.url, refusal)
            raise
        self._remove(home / str(number))

    def abandon(self, staging: LakePath) -> bool:
        return self.discard(self.home(staging), staging)

    def discard(self, home: LakePath, place: LakePath) -> bool:
        file = place / manifest.FILE
        if not file.create() and file.stat().size:
            return False
        self._remove(place)
        return True

    def _remove(self, place: LakePath) -> None:
        """Remove a directory whose manifest is empty; the manifest last, as it prevents commits."""
        for name in place.names():
            if name != manifest.FILE:
                (place / name).remove()
        (place / manifest.FILE).remove()


def _check_complete(place: LakePath, files: Mapping[str, FileFacts]) -> None:
    """Raise StoreError if a file of an upload is missing, or has another size."""
    sizes: dict[str, int] = {}
    for directory in {path.rpartition("/")[0] for path in files}:
        try:
            entries = (place / directory if directory else place).entries()
        except StoreError as error:
            if error.kind != ABSENT:
                raise
            entries = ()
        prefix = f"{directory}/" if directory else ""
        sizes |= {f"{prefix}{entry.name}": entry.size for entry in entries}
    for path, facts in files.items():
        if sizes.get(path) != facts.bytes:
            raise StoreError(
                f"{place.url} is not published: {path!r} has {sizes.get(path, 'no')} bytes, and"
                f" {facts.bytes} were uploaded: publish again",
                DAMAGED,
            )


def _rename_version(source: LakePath, target: LakePath, content: bytes) -> bool:
    """Rename; return whether the version is in place, also if the answer was lost."""
    try:
        return source.rename(target) or _is_ours(target, content)
    except StoreError as error:
        if _is_ours(target, content):
            log.info("%s is in place, although its rename failed: %s", target.url, error)
            return True
        raise


def _is_ours(version: LakePath, content: bytes) -> bool:
    try:
        return (version / manifest.FILE).read(len(content)) == content
    except StoreError:
        return False
