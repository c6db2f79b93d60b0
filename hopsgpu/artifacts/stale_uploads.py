"""Remove what dead publishers left, by its age on the lake's own clock."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

from hopsgpu.artifacts.versions import CLAIMS, PROBE, STAGING, TAGS, numbers
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION
from hopsgpu.storage.lake import UNFIT, Lake, Status, is_draft

log = logging.getLogger(__name__)

# A live publisher writes something more often.
AGE_MILLISECONDS = 24 * 3600 * 1000


def sweep(home: Lake, now: int, age: int = AGE_MILLISECONDS) -> list[str]:
    """Remove leftovers to which nobody has written for a long time.

    These are staging directories, empty versions, drafts of tags, and probes. Probes are also
    searched in the directory above the model: those of a model that did not exist yet are there.
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
                if entry.is_directory:
                    discard(home, place)
                else:
                    place.remove()
                log.info("removed the leftover %s of a dead publisher", place.url)
                removed.append(entry.name)
        except StoreError as error:
            log.debug("left the leftover %s: %s", place.url, error)
    return removed


def discard(home: Lake, place: Lake) -> None:
    """Remove a directory: rename it out of everybody's way in one step, then delete it.

    Raises:
        StoreError: the lake refused the operation.
    """
    (home / STAGING).make()
    aside = home / STAGING / uuid.uuid4().hex
    place.rename(aside)
    aside.remove()


def _leftovers(home: Lake) -> list[tuple[Lake, Status]]:
    found = _entries(home / STAGING, lambda entry: True)
    found += _entries(home / TAGS, lambda entry: is_draft(entry.name))
    for place in (home.above, home, home / CLAIMS):
        found += _entries(place, lambda entry: entry.name.startswith(PROBE))
    if home.url.startswith("file:"):
        # On a local lake, renaming a directory takes two steps; a kill between them leaves an empty
        # directory.
        versions = _entries(home, lambda entry: entry.is_directory and bool(numbers([entry.name])))
        found += [(place, entry) for place, entry in versions if not place.names()]
    return found


def _entries(place: Lake, wanted: Callable[[Status], bool]) -> list[tuple[Lake, Status]]:
    """Return the wanted entries of a directory; none if it is absent or may not be read."""
    try:
        entries = place.entries()
    except StoreError as error:
        if error.kind not in (ABSENT, PERMISSION):
            raise
        return []
    fit = (entry for entry in entries if not UNFIT.search(entry.name))
    return [(place / entry.name, entry) for entry in fit if wanted(entry)]


def newest(place: Lake, entry: Status) -> int:
    """Return when an entry or anything below it was last written to, in the lake's milliseconds."""
    if not entry.is_directory:
        return entry.modified
    below = [newest(place / inner.name, inner) for inner in place.entries()]
    return max([entry.modified, *below])
