"""Python environments on the lake: each is uploaded once, and found by a key of its content.

    <root>/environments/<key>/environment.json   the description, with key and archive's name
    <root>/environments/<key>/<archive>
    <root>/environments/<key>/used               written at most once a day, when it is used
    <root>/environments/_staging/<id>/           an environment that is being uploaded

One rename makes an environment, so it is complete. If two processes make the same environment, the
second process uses that of the first. Environments unused for 30 days are removed.

Ranks run what is in an environment, and anybody can compute its key. So an environment must belong
to the user or to the owner of the root, and nobody else may write there. An object store has no
owners: its policies decide who may write.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hopsgpu.artifacts import stale_uploads
from hopsgpu.artifacts.version_commit import discard_by_rename
from hopsgpu.artifacts.versions import STAGING
from hopsgpu.core.bounded_reads import MAX_RECORD_BYTES
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, PERMISSION
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.names import UNSAFE_CHARACTERS
from hopsgpu.storage.transfer import upload_files

Description = Mapping[str, Any]

log = logging.getLogger(__name__)

DIRECTORY = "environments"
SCHEMA = 1
UNUSED_MILLISECONDS = 30 * 24 * 3600 * 1000
_FILE, _ARCHIVE, _USED = "environment.json", "archive", "used"
_TOUCH_SECONDS = 24 * 3600
# Longest wait for another process that is between the two steps of renaming a local directory.
_CLAIM_SECONDS = 5.0
# Permission bits: the group's and all others' right to write.
_OTHERS_WRITE = 0o022
_POLL_SECONDS = 0.02
_MAX_TRIES = 5


def find(root: LakePath, key: str) -> Description | None:
    """Return the description of an environment, or None; record the use on the lake.

    Raises:
        StoreError: the lake refused the operation, or the description is invalid. Others could have
            put the environment there, or changed it: the kind is "permission".
    """
    home = root / DIRECTORY
    description = _read_description(home / key)
    if description is None:
        log.debug("no Python environment %s is in %s", key, home.url)
        return None
    entries = {entry.name: entry for entry in (home / key).entries()}
    check_not_of_others(root, home / key)
    archive = entries.get(str(description.get(_ARCHIVE)))
    if archive is None or archive.size != description.get("bytes"):
        # Somebody has changed the environment: it must be uploaded again.
        log.info("removes %s: its archive is missing or has another size", (home / key).url)
        _discard(home, home / key)
        return None
    _record_use(home, home / key, max(entry.modified for entry in entries.values()))
    return description


def upload(
    root: LakePath, key: str, archive: Path, description: Description, stop: threading.Event
) -> Description:
    """Upload an environment, unless another process has uploaded it meanwhile.

    Args:
        archive: a file on this machine.
        description: JSON that includes the archive's `bytes`.
        stop: event; once it is set, the upload ends early with Cancelled.

    Returns:
        The description of the environment that is on the lake.

    Raises:
        StoreError: as `find`.
    """
    home = root / DIRECTORY
    unique = uuid.uuid4().hex
    suffix = "".join(archive.suffixes[-2:]) if ".tar" in archive.suffixes else archive.suffix
    if home.is_object_store:
        name = f"{_ARCHIVE}-{unique}{suffix}"
        content = {"schema": SCHEMA, "key": key, **description, _ARCHIVE: name}
        return _upload_in_place(home, key, archive, content, stop)
    content = {"schema": SCHEMA, "key": key, **description, _ARCHIVE: f"{_ARCHIVE}{suffix}"}
    staging = home / STAGING / unique
    staging.make()
    try:
        upload_files({content[_ARCHIVE]: archive}, staging, stop=stop)
        (staging / _FILE).write(json.dumps(content, indent=1).encode())
        for path in (staging, *(staging / name for name in (_FILE, content[_ARCHIVE]))):
            mode = path.stat().mode
            if mode & _OTHERS_WRITE:  # the umask lets others of the group write
                path.set_mode(mode & ~_OTHERS_WRITE)
        sweep(home, (staging / _FILE).stat().modified)
        on_lake = _rename_or_reuse(home, staging, key, content)
        check_not_of_others(root, home / key)
        return on_lake
    finally:
        # After success there is nothing left to remove. A sweep removes what cannot be removed now.
        with contextlib.suppress(StoreError):
            staging.remove()


def _upload_in_place(
    home: LakePath, key: str, archive: Path, content: Description, stop: threading.Event
) -> Description:
    """Upload to a lake without renames: an environment exists once its description exists."""
    place = home / key
    uploaded = place / content[_ARCHIVE]
    try:
        upload_files({content[_ARCHIVE]: archive}, place, stop=stop)
        description = json.dumps(content, indent=1).encode()
        is_ours = (place / _FILE).create(description)
        on_lake = content if is_ours else _read_description(place)
    except BaseException:
        with contextlib.suppress(StoreError):  # report the first error
            uploaded.remove()
        raise
    if on_lake is None:
        raise StoreError(f"{place.url} was removed while it was written: try again", ABSENT)
    if on_lake != content:  # both are equal if only the answer to our creation was lost
        log.info("uses %s, which another process has uploaded meanwhile", place.url)
        uploaded.remove()
    sweep(home, (place / _FILE).stat().modified)
    return on_lake


def check_not_of_others(root: LakePath, place: LakePath) -> None:
    """Raise StoreError if others could have put an environment there, or may change it."""
    if root.is_object_store:
        return
    statuses = [place.stat(), *(entry for entry in place.entries() if entry.name != _USED)]
    owners = {status.owner for status in statuses} - {root.stat().owner}
    # Only a root that is another user's needs the name of this one.
    foreign = owners - {_own_name(root / DIRECTORY)} if owners else owners
    if foreign:
        raise StoreError(
            f"{place.url} belongs to {min(foreign)}, and not to you or to the owner of {root.url}:"
            " ranks would run that user's code. Remove it, or have its owner or the owner of the"
            " root remove it; or set spark.hopsgpu.root to a directory of your own",
            PERMISSION,
        )
    if writable := [status for status in statuses if status.mode & _OTHERS_WRITE]:
        raise StoreError(
            f"{place.url}: other users may write there ({writable[0].name} has the mode"
            f" {writable[0].mode:o}), and ranks would run what they write: remove it, and hopsgpu"
            " builds it again",
            PERMISSION,
        )


def _own_name(home: LakePath) -> str:
    """Return the user of this process on the lake, as the lake itself names them."""
    probe = home / STAGING / uuid.uuid4().hex
    probe.make()
    try:
        return probe.stat().owner
    finally:
        probe.remove()


def archive_of(root: LakePath, key: str, described: Description) -> LakePath:
    return root / DIRECTORY / key / str(described[_ARCHIVE])


def sweep(home: LakePath, now: int, age: int = UNUSED_MILLISECONDS) -> list[str]:
    """Remove environments that nobody has used for a long time, and leftovers of dead uploads.

    If the lake refuses a removal, that entry is skipped: another sweep may be removing it.

    Args:
        now: the lake's time, in milliseconds since the epoch.
        age: minimum time without use, in milliseconds.

    Returns:
        The names of the removed entries.
    """
    removed = stale_uploads.sweep(home, now)
    for entry in home.entries():
        # Another user may have put a name there that no environment has.
        if entry.name == STAGING or UNSAFE_CHARACTERS.search(entry.name):
            continue
        if now - entry.modified <= age:
            continue
        place = home / entry.name
        with contextlib.suppress(StoreError):
            if now - stale_uploads.newest(place, entry) > age:
                _discard(home, place)
                log.info("removed the Python environment %s: nobody has used it lately", place.url)
                removed.append(entry.name)
    return removed


def _discard(home: LakePath, place: LakePath) -> None:
    """Remove an environment; readers see it complete or not at all."""
    if home.is_object_store:
        (place / _FILE).remove()
        place.remove()
    else:
        discard_by_rename(home, place)


def _rename_or_reuse(
    home: LakePath, staging: LakePath, key: str, content: Description
) -> Description:
    place = home / key
    for _ in range(_MAX_TRIES):
        if staging.rename(place):
            log.info("put the Python environment %s on the lake", place.url)
            return content
        on_lake = _wait_for_other(place)
        if on_lake is not None:
            log.info("uses %s, which another process has uploaded meanwhile", place.url)
            return on_lake
        # On a local lake, renaming a directory takes two steps; a kill between them leaves an empty
        # directory.
        if not place.names():
            with contextlib.suppress(StoreError):
                _discard(home, place)
    raise StoreError(
        f"{place.url} is not a Python environment, but has the name of one: remove it", DAMAGED
    )


def _wait_for_other(place: LakePath) -> Description | None:
    """Return the description in a place; wait if another process is about to write it."""
    log.debug("%s exists: waits for the process that makes it", place.url)
    deadline = time.monotonic() + _CLAIM_SECONDS
    while (on_lake := _read_description(place)) is None and time.monotonic() < deadline:
        if place.names() or not place.exists():
            return _read_description(place)  # it may have been written since the last poll
        time.sleep(_POLL_SECONDS)  # the other process sends no signal
    return on_lake


def _read_description(place: LakePath) -> Description | None:
    try:
        description = json.loads((place / _FILE).read(MAX_RECORD_BYTES))
    except StoreError as error:
        if error.kind == ABSENT:
            return None
        raise
    except ValueError as error:
        raise StoreError(
            f"{(place / _FILE).url} is not JSON: remove {place.url}", DAMAGED
        ) from error
    if not isinstance(description, dict) or description.get("schema") != SCHEMA:
        raise StoreError(
            f"{(place / _FILE).url} has a schema that this version of hopsgpu does not read:"
            f" remove {place.url}",
            DAMAGED,
        )
    if description.get("key") != place.url.rpartition("/")[2]:
        # The writers of a root could rename environments of others.
        raise StoreError(
            f"{place.url} is the environment {description.get('key')!r:.99}, under another name:"
            " remove it",
            DAMAGED,
        )
    return description


def _record_use(home: LakePath, place: LakePath, newest: int) -> None:
    """Record the use of an environment, at most once a day; then also sweep unused ones."""
    if time.time() - newest / 1000 <= _TOUCH_SECONDS:
        return
    # If the record fails, the environment may have to be uploaded again after a month.
    with contextlib.suppress(StoreError):
        used = place / _USED
        used.write(b"")
        sweep(home, used.stat().modified)
