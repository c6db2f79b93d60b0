"""Remove what dead publishers left, by its age on the lake's own clock."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable

from hopsgpu.artifacts.version_commit import commit_of
from hopsgpu.artifacts.versions import CLAIMS, PROBE, STAGING, TAGS, is_version, numbers
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION
from hopsgpu.storage.lake import UNSAFE_CHARACTERS, FileStatus, LakePath, is_draft

log = logging.getLogger(__name__)

# A live publisher writes something more often.
AGE_MILLISECONDS = 24 * 3600 * 1000
_LOOKS_AT_ONCE = 8


def sweep(home: LakePath, now: int, age: int = AGE_MILLISECONDS) -> list[str]:
    """Remove leftovers to which nobody has written for a long time.

    These are staging directories, empty versions, on an object store uploads that are no version,
    drafts of tags, and probes. Probes are also searched in the directory above the model: those of
    a model that did not exist yet are there.
    If the lake refuses a removal, that leftover is skipped: it may belong to another user, or
    another sweep may be removing it.

    Args:
        home: directory of the model.
        now: the lake's time, in milliseconds since the epoch.
        age: least age of a leftover, in milliseconds.

    Returns:
        The names of what was removed.
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
    found = _entries(home / STAGING, lambda entry: True)
    found += _entries(home / TAGS, lambda entry: is_draft(entry.name))
    for place in (home.parent, home, home / CLAIMS):
        found += _entries(place, lambda entry: entry.name.startswith(PROBE))
    if home.url.startswith("file:"):
        # On a local lake, renaming a directory takes two steps; a kill between them leaves an empty
        # directory.
        versions = _entries(home, lambda entry: entry.is_directory and bool(numbers([entry.name])))
        found += [(place, entry) for place, entry in versions if not place.names()]
    if home.is_object_store:
        found += _uploads(home)
    return found


def _uploads(home: LakePath) -> list[tuple[LakePath, FileStatus]]:
    """Return the directories of an object store in which a publisher's files are, and no version.

    Others make directories with such names, but no claims.
    """
    claimed = {str(number) for number in numbers((home / CLAIMS).names())}
    places = _entries(home, lambda entry: entry.is_directory and entry.name in claimed)

    def is_upload(number: int) -> bool:
        try:
            return not is_version(home, number)
        except StoreError as error:
            if error.kind != PERMISSION:
                raise
            return False

    with concurrent.futures.ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        found = pool.map(is_upload, [int(entry.name) for _, entry in places])
        return [pair for pair, is_one in zip(places, found, strict=True) if is_one]


def _entries(
    place: LakePath, wanted: Callable[[FileStatus], bool]
) -> list[tuple[LakePath, FileStatus]]:
    """Return the wanted entries of a directory; none if it is absent or may not be read."""
    try:
        entries = place.entries()
    except StoreError as error:
        if error.kind not in (ABSENT, PERMISSION):
            raise
        return []
    fit = (entry for entry in entries if not UNSAFE_CHARACTERS.search(entry.name))
    return [(place / entry.name, entry) for entry in fit if wanted(entry)]


def newest(place: LakePath, entry: FileStatus) -> int:
    """Return when an entry or anything below it was last written to, in the lake's milliseconds."""
    if not entry.is_directory:
        return entry.modified
    below = [newest(place / inner.name, inner) for inner in place.entries()]
    return max([entry.modified, *below])
