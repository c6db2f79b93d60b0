"""Python environments on the lake, made once and found by what they are made of.

    <root>/environments/<key>/environment.json   what it is, with the digest of
    <root>/environments/<key>/<archive>
    <root>/environments/<key>/used               written to on a day of use
    <root>/environments/_staging/<id>/           one that is uploaded

One strict rename makes it an environment, whole; of two that make the same the second takes what
the first has made. Those that nobody has used for a month are removed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hopsgpu.artifacts import stale_uploads
from hopsgpu.artifacts.versions import STAGING
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED
from hopsgpu.storage.lake import Lake
from hopsgpu.storage.transfer import upload_files

Description = Mapping[str, Any]

DIRECTORY = "environments"
SCHEMA = 1
UNUSED_MILLISECONDS = 30 * 24 * 3600 * 1000
_FILE, _ARCHIVE, _USED = "environment.json", "archive", "used"
_TOUCH_SECONDS = 24 * 3600
# Between the two steps of a local directory's rename.
_CLAIM_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_TRIES = 5


def find(root: Lake, key: str) -> Description | None:
    """What is said of an environment that is there; None where there is none.

    Notes that it was used.

    Args:
        root: of the lake.
        key: names it.

    Raises:
        StoreError: the lake refused, or the description is none.
    """
    home = root / DIRECTORY
    found = _described(home / key)
    if found is None:
        return None
    there = {entry.name: entry for entry in (home / key).entries()}
    archive = there.get(str(found[_ARCHIVE]))
    if archive is None or archive.size != found["bytes"]:
        # Somebody has had a hand in it: it is made anew.
        stale_uploads.discard(home, home / key)
        return None
    _note_use(home, home / key, max(entry.modified for entry in there.values()))
    return found


def put(
    root: Lake, key: str, archive: Path, described: Description, stop: threading.Event
) -> Description:
    """Uploads an environment, unless it has come there meanwhile.

    Args:
        root: of the lake.
        key: names it.
        archive: on this machine.
        described: what is said of it; JSON, with its `bytes`.
        stop: set to have it end early.

    Returns:
        What is said of the one that is there.

    Raises:
        StoreError: the lake refused.
        Cancelled: `stop` was set.
    """
    home = root / DIRECTORY
    staging = home / STAGING / uuid.uuid4().hex
    suffix = "".join(archive.suffixes[-2:]) if ".tar" in archive.suffixes else archive.suffix
    content = {"schema": SCHEMA, **described, _ARCHIVE: f"{_ARCHIVE}{suffix}"}
    staging.make()
    try:
        upload_files({content[_ARCHIVE]: archive}, staging, stop=stop)
        (staging / _FILE).write(json.dumps(content, indent=1).encode())
        sweep(home, (staging / _FILE).stat().modified)
        return _published(home, staging, key, content)
    finally:
        # Renamed away where all went well; what cannot be removed now a sweep takes.
        with contextlib.suppress(StoreError):
            staging.remove()


def archive_of(root: Lake, key: str, described: Description) -> Lake:
    """Where the archive of an environment is."""
    return root / DIRECTORY / key / str(described[_ARCHIVE])


def sweep(home: Lake, now: int, age: int = UNUSED_MILLISECONDS) -> list[str]:
    """Removes environments that nobody has used for long, and what dead uploads left.

    What the lake refuses to have removed is passed over, as another sweep may have it.

    Args:
        home: of the environments.
        now: the lake's time, in milliseconds since the epoch.
        age: in milliseconds.

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
                stale_uploads.discard(home, place)
                removed.append(entry.name)
    return removed


def _published(home: Lake, staging: Lake, key: str, content: Description) -> Description:
    place = home / key
    for _ in range(_TRIES):
        if staging.rename(place):
            return content
        there = _settled(place)
        if there is not None:
            return there
        # A local directory's rename takes two steps, and a kill between them leaves an empty one.
        if not place.names():
            with contextlib.suppress(StoreError):
                stale_uploads.discard(home, place)
    raise StoreError(f"{place.url} is in the way, and no environment: remove it", DAMAGED)


def _settled(place: Lake) -> Description | None:
    """What is said of the one that is there; one whose maker is about to fill it is waited for."""
    until = time.monotonic() + _CLAIM_SECONDS
    while (there := _described(place)) is None and time.monotonic() < until:
        if place.names() or not place.exists():
            return _described(place)  # it may have been filled just now
        time.sleep(_LOOK_SECONDS)  # another process, which tells nobody
    return there


def _described(place: Lake) -> Description | None:
    try:
        found = json.loads((place / _FILE).read())
    except StoreError as error:
        if error.kind == ABSENT:
            return None
        raise
    except ValueError as error:
        raise StoreError(
            f"{(place / _FILE).url} is no JSON: remove {place.url}", DAMAGED
        ) from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise StoreError(
            f"{(place / _FILE).url} is of a schema that this hopsgpu does not know: remove"
            f" {place.url}",
            DAMAGED,
        )
    return found


def _note_use(home: Lake, place: Lake, newest: int) -> None:
    """Writes that it was used, once a day; then it is time to look for what is not."""
    if time.time() - newest / 1000 <= _TOUCH_SECONDS:
        return
    # What is not noted is at worst made again in a month.
    with contextlib.suppress(StoreError):
        used = place / _USED
        used.write(b"")
        sweep(home, used.stat().modified)
