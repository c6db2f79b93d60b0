"""Removes leftovers of dead publishers, by their age on the lake's own clock."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable

from hopsgpu.artifacts.version_commit import commit_of
from hopsgpu.artifacts.versions import CLAIMS, PROBE, STAGING, TAGS, is_listed, numbers
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION
from hopsgpu.storage.lake import UNSAFE_CHARACTERS, FileStatus, LakePath, is_draft

log = logging.getLogger(__name__)

# A live publisher writes more often than this.
AGE_MILLISECONDS = 24 * 3600 * 1000
_MAX_PARALLEL_CHECKS = 8


def sweep(home: LakePath, now: int, age: int = AGE_MILLISECONDS) -> list[str]:
    """Remove leftovers to which nobody has written for a long time; return their names.

    Leftovers are staging directories, empty versions, drafts of tags, probes, and on an object
    store uploads without a manifest. The probes of a model that did not exist yet are in the
    directory above the model. If the lake refuses to remove a leftover, it is skipped: it may
    belong to another user, or another sweep may be removing it.

    Args:
        now: the lake's time, in milliseconds since the epoch.
        age: minimum age of a leftover, in milliseconds.
    """
    removed = []
    for place, entry in _leftovers(home):
        try:
            if now - entry.modified > age and now - newest(place, entry) > age:
                if not entry.is_directory:
                    place.remove()
                elif not commit_of(home).discard(home, place):
                    continue
                log.info("removed the leftover %s of a dead publisher", place.url)
                removed.append(entry.name)
        except StoreError as error:
            log.debug("left the leftover %s: %s", place.url, error)
    return removed


def _leftovers(home: LakePath) -> list[tuple[LakePath, FileStatus]]:
    leftovers = _entries(home / STAGING, lambda entry: True)
    leftovers += _entries(home / TAGS, lambda entry: is_draft(entry.name))
    for place in (home.parent, home, home / CLAIMS):
        leftovers += _entries(place, lambda entry: entry.name.startswith(PROBE))
    if home.url.startswith("file:"):
        # On a local lake, renaming a directory takes two steps; a kill between them leaves an empty
        # directory.
        versions = _entries(home, lambda entry: entry.is_directory and bool(numbers([entry.name])))
        leftovers += [(place, entry) for place, entry in versions if not place.names()]
    if home.is_object_store:
        leftovers += _uploads(home)
    return leftovers


def _uploads(home: LakePath) -> list[tuple[LakePath, FileStatus]]:
    """Return the directories of an object store with a publisher's files and no version.

    Other programs create directories with such names, but no claims.
    """
    claimed = {str(number) for number in numbers((home / CLAIMS).names())}
    places = _entries(home, lambda entry: entry.is_directory and entry.name in claimed)
    with concurrent.futures.ThreadPoolExecutor(_MAX_PARALLEL_CHECKS) as pool:
        is_version = pool.map(lambda place: is_listed(home, int(place[1].name)), places)
        return [place for place, exists in zip(places, is_version, strict=True) if not exists]


def _entries(
    place: LakePath, is_wanted: Callable[[FileStatus], bool]
) -> list[tuple[LakePath, FileStatus]]:
    """Return the wanted entries of a directory; none if it is absent or unreadable."""
    try:
        entries = place.entries()
    except StoreError as error:
        if error.kind not in (ABSENT, PERMISSION):
            raise
        return []
    safe = (entry for entry in entries if not UNSAFE_CHARACTERS.search(entry.name))
    return [(place / entry.name, entry) for entry in safe if is_wanted(entry)]


def newest(place: LakePath, entry: FileStatus) -> int:
    """Return the latest modification time of an entry and all below it, in milliseconds."""
    if not entry.is_directory:
        return entry.modified
    below = [newest(place / inner.name, inner) for inner in place.entries()]
    return max([entry.modified, *below])
