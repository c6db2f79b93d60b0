"""What dead publishers left is removed by age, by the lake's own clock."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable

from hopsgpu.artifacts.versions import CLAIMS, PROBE, STAGING, TAGS, numbers
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION
from hopsgpu.storage.lake import UNFIT, Lake, Status, is_draft

# A publisher that lives writes something more often.
AGE_MILLISECONDS = 24 * 3600 * 1000


def sweep(home: Lake, now: int, age: int = AGE_MILLISECONDS) -> list[str]:
    """Removes what nobody has written to for long: staging directories, empty versions, drafts of
    tags, and probes.

    Probes are looked for beside the model too: there lie those for which there was no model yet.
    What the lake refuses to have removed is passed over: it may be another user's, or another
    sweep has it.

    Args:
        home: of the model.
        now: the lake's time, in milliseconds since the epoch.
        age: in milliseconds.

    Returns:
        The names of what was removed.
    """
    removed = []
    for place, entry in _leftovers(home):
        with contextlib.suppress(StoreError):
            if now - entry.modified > age and now - newest(place, entry) > age:
                if entry.is_directory:
                    discard(home, place)
                else:
                    place.remove()
                removed.append(entry.name)
    return removed


def discard(home: Lake, place: Lake) -> None:
    """Removes a directory: first, and at once, out of everybody's way, then for good.

    Raises:
        StoreError: the lake refused.
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
        # A local directory's rename takes two steps, and a kill between them leaves an empty one.
        versions = _entries(home, lambda entry: entry.is_directory and bool(numbers([entry.name])))
        found += [(place, entry) for place, entry in versions if not place.names()]
    return found


def _entries(place: Lake, wanted: Callable[[Status], bool]) -> list[tuple[Lake, Status]]:
    """What is wanted of a directory, as far as there is one and others may look into it."""
    try:
        entries = place.entries()
    except StoreError as error:
        if error.kind not in (ABSENT, PERMISSION):
            raise
        return []
    fit = (entry for entry in entries if not UNFIT.search(entry.name))
    return [(place / entry.name, entry) for entry in fit if wanted(entry)]


def newest(place: Lake, entry: Status) -> int:
    """When anything below was last written to, in the lake's milliseconds."""
    if not entry.is_directory:
        return entry.modified
    below = [newest(place / inner.name, inner) for inner in place.entries()]
    return max([entry.modified, *below])
