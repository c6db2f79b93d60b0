"""Python environments on the lake: each is made once, and found by a key of its content.

    <root>/environments/<key>/environment.json   the description, with the name of the
    <root>/environments/<key>/<archive>
    <root>/environments/<key>/used               written at most once a day, when it is used
    <root>/environments/_staging/<id>/           an environment that is being uploaded

One strict rename turns a staging directory into an environment, so an environment is complete. If
two processes make the same environment, the second uses what the first has made. Environments that
nobody has used for 30 days are removed.
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
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.transfer import upload_files

Description = Mapping[str, Any]

log = logging.getLogger(__name__)

DIRECTORY = "environments"
SCHEMA = 1
UNUSED_MILLISECONDS = 30 * 24 * 3600 * 1000
_FILE, _ARCHIVE, _USED = "environment.json", "archive", "used"
_TOUCH_SECONDS = 24 * 3600
# Longest wait for another process between the two steps in which it renames a local directory.
_CLAIM_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_TRIES = 5


def find(root: LakePath, key: str) -> Description | None:
    """Return the description of an environment; None if it does not exist.

    The use is noted on the lake.

    Args:
        root: root on the lake.
        key: key of the environment.

    Raises:
        StoreError: the lake refused the operation, or the description is invalid.
    """
    home = root / DIRECTORY
    found = _described(home / key)
    if found is None:
        log.debug("no Python environment %s is in %s", key, home.url)
        return None
    there = {entry.name: entry for entry in (home / key).entries()}
    archive = there.get(str(found[_ARCHIVE]))
    if archive is None or archive.size != found["bytes"]:
        # Somebody has changed it: it must be made anew.
        log.info("removes %s: its archive is missing or has another size", (home / key).url)
        _discard(home, home / key)
        return None
    _note_use(home, home / key, max(entry.modified for entry in there.values()))
    return found


def put(
    root: LakePath, key: str, archive: Path, described: Description, stop: threading.Event
) -> Description:
    """Upload an environment, unless another process has done so meanwhile.

    Args:
        root: root on the lake.
        key: key of the environment.
        archive: the archive, a file on this machine.
        described: description of the environment: JSON that includes its `bytes`.
        stop: event; once it is set, the upload ends early.

    Returns:
        The description of the environment that is on the lake.

    Raises:
        StoreError: the lake refused the operation.
        Cancelled: `stop` was set.
    """
    home = root / DIRECTORY
    unique = uuid.uuid4().hex
    suffix = "".join(archive.suffixes[-2:]) if ".tar" in archive.suffixes else archive.suffix
    if home.is_object_store:
        content = {"schema": SCHEMA, **described, _ARCHIVE: f"{_ARCHIVE}-{unique}{suffix}"}
        return _put_in_place(home, key, archive, content, stop)
    content = {"schema": SCHEMA, **described, _ARCHIVE: f"{_ARCHIVE}{suffix}"}
    staging = home / STAGING / unique
    staging.make()
    try:
        upload_files({content[_ARCHIVE]: archive}, staging, stop=stop)
        (staging / _FILE).write(json.dumps(content, indent=1).encode())
        sweep(home, (staging / _FILE).stat().modified)
        return _published(home, staging, key, content)
    finally:
        # After success it was renamed and is gone. A sweep removes what cannot be removed now.
        with contextlib.suppress(StoreError):
            staging.remove()


def _put_in_place(
    home: LakePath, key: str, archive: Path, content: Description, stop: threading.Event
) -> Description:
    """Upload an environment where there are no renames: it exists once its description does."""
    place = home / key
    uploaded = place / content[_ARCHIVE]
    try:
        upload_files({content[_ARCHIVE]: archive}, place, stop=stop)
        description = json.dumps(content, indent=1).encode()
        is_ours = (place / _FILE).create(description)
        there = content if is_ours else _described(place)
    except BaseException:
        with contextlib.suppress(StoreError):  # the first problem is the one to report
            uploaded.remove()
        raise
    if there is None:
        raise StoreError(f"{place.url} was removed while it was written: try again", ABSENT)
    if there != content:  # of a creation whose answer was lost, it is what was written
        log.info("uses %s, which another process has uploaded meanwhile", place.url)
        uploaded.remove()
    sweep(home, (place / _FILE).stat().modified)
    return there


def archive_of(root: LakePath, key: str, described: Description) -> LakePath:
    """Return the place of an environment's archive on the lake."""
    return root / DIRECTORY / key / str(described[_ARCHIVE])


def sweep(home: LakePath, now: int, age: int = UNUSED_MILLISECONDS) -> list[str]:
    """Remove environments that nobody has used for a long time, and what dead uploads left.

    If the lake refuses a removal, that entry is skipped: another sweep may be removing it.

    Args:
        home: directory of the environments.
        now: the lake's time, in milliseconds since the epoch.
        age: least time without use, in milliseconds.

    Returns:
        The names of what was removed.
    """
    removed = stale_uploads.sweep(home, now)
    for entry in home.entries():
        place = home / entry.name
        if entry.name == STAGING or now - entry.modified <= age:
            continue
        with contextlib.suppress(StoreError):
            if now - stale_uploads.newest(place, entry) > age:
                _discard(home, place)
                log.info("removed the Python environment %s: nobody has used it lately", place.url)
                removed.append(entry.name)
    return removed


def _discard(home: LakePath, place: LakePath) -> None:
    """Remove an environment; it is complete for its readers, or absent."""
    if home.is_object_store:
        (place / _FILE).remove()
        place.remove()
    else:
        discard_by_rename(home, place)


def _published(home: LakePath, staging: LakePath, key: str, content: Description) -> Description:
    place = home / key
    for _ in range(_TRIES):
        if staging.rename(place):
            log.info("put the Python environment %s on the lake", place.url)
            return content
        there = _settled(place)
        if there is not None:
            log.info("uses %s, which another process has uploaded meanwhile", place.url)
            return there
        # On a local lake, renaming a directory takes two steps; a kill between them leaves an empty
        # directory.
        if not place.names():
            with contextlib.suppress(StoreError):
                _discard(home, place)
    raise StoreError(
        f"{place.url} is not a Python environment, but has the name of one: remove it", DAMAGED
    )


def _settled(place: LakePath) -> Description | None:
    """Return the description of what is in the place; wait if its maker is about to fill it."""
    log.debug("%s exists: waits for the process that makes it", place.url)
    until = time.monotonic() + _CLAIM_SECONDS
    while (there := _described(place)) is None and time.monotonic() < until:
        if place.names() or not place.exists():
            return _described(place)  # it may have been filled since the last look
        time.sleep(_LOOK_SECONDS)  # the maker is another process and sends no signal
    return there


def _described(place: LakePath) -> Description | None:
    try:
        found = json.loads((place / _FILE).read())
    except StoreError as error:
        if error.kind == ABSENT:
            return None
        raise
    except ValueError as error:
        raise StoreError(
            f"{(place / _FILE).url} is not JSON: remove {place.url}", DAMAGED
        ) from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise StoreError(
            f"{(place / _FILE).url} has a schema that this version of hopsgpu does not read:"
            f" remove {place.url}",
            DAMAGED,
        )
    return found


def _note_use(home: LakePath, place: LakePath, newest: int) -> None:
    """Note the use of an environment, at most once a day; then also sweep the unused ones."""
    if time.time() - newest / 1000 <= _TOUCH_SECONDS:
        return
    # If this fails, the environment must at worst be made again after a month.
    with contextlib.suppress(StoreError):
        used = place / _USED
        used.write(b"")
        sweep(home, used.stat().modified)
