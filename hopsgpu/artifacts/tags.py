"""A model's tags: `<home>/_tags/<tag>`, a small file with the number of a version.

The same file has the changes of the tag, the oldest first, so one step replaces the tag and its
last change. `_tags/_removed/<tag>` keeps the changes of a removed tag.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hopsgpu.artifacts.versions import TAGS, is_version, numbers
from hopsgpu.core.bounded_reads import MAX_RECORD_BYTES
from hopsgpu.core.formats import utc_time
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, JSON_ERRORS
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# The actions of a change.
TAG = "tag"
ROLLBACK = "rollback"
UNTAG = "untag"
# Directory of the changes of removed tags; no tag begins with `_`.
_REMOVED = "_removed"
# The whole file is read at each use of a tag, so the number of changes is bounded.
_MAX_CHANGES = 1000


@dataclass(frozen=True)
class TagChange:
    """A change of a tag.

    Attributes:
        version: number of the new version; None if the tag was removed.
        previous: number of the version before; None if there was no such tag.
        user: user name on the lake of the process that changed the tag.
        time: time by the clock of that process: UTC, RFC 3339 with milliseconds.
        action: "tag", "rollback" or "untag".
    """

    __module__ = "hopsgpu.types"

    version: int | None
    previous: int | None
    user: str
    time: str
    action: str


@dataclass(frozen=True)
class _Tag:
    """The content of a tag's file; `changes` is None if the changes are damaged."""

    version: int | None
    changes: tuple[TagChange, ...] | None


def put_tag(
    home: LakePath, tag: str, version: int, *, action: str = TAG, now: float | None = None
) -> None:
    """Point a tag at a version; a reader at that moment gets the old or the new version.

    If two processes change a tag at the same moment, the later change counts, and the history may
    lack the other change.

    Raises:
        StoreError: the lake refused the operation; or the version was deleted meanwhile (kind
            "absent"), and the tag was removed.
    """
    file = home / TAGS / tag
    (home / TAGS).make()
    before = _read_for_change(home, tag)
    changes = before.changes or ()
    if before.version != version:
        changes = (*changes, _change(home, before.version, version, action, now))
    file.replace(_serialize(version, changes))
    # `ModelStore.delete` first hides the version and then reads the tags. Here the order is the
    # reverse, so at least one of two concurrent processes notices the other.
    if not is_version(home, version):
        if read_tag(home, tag) == version:  # another process may have moved the tag since
            drop_tag(home, tag, now=now)
        raise StoreError(
            f"cannot set tag {tag!r}: version {version} of {home.url} was deleted in the meantime",
            ABSENT,
        )
    log.info("tag %r of %s points at version %d", tag, home.url, version)


def drop_tag(home: LakePath, tag: str, *, now: float | None = None) -> bool:
    """Remove a tag, even a damaged one, and keep its changes; return False if it does not exist."""
    file = home / TAGS / tag
    if not file.exists():
        return False
    before = _read_for_change(home, tag)
    changes = (*(before.changes or ()), _change(home, before.version, None, UNTAG, now))
    removed = home / TAGS / _REMOVED
    removed.make()
    (removed / tag).replace(_serialize(None, changes))
    file.remove()
    log.info("removed tag %r of %s", tag, home.url)
    return True


def read_tag(home: LakePath, tag: str) -> int | None:
    """Return the number of the version that a tag points at; None if the tag does not exist."""
    content = _read(home / TAGS / tag)
    return None if content is None else content.version


def read_tags(home: LakePath) -> dict[str, int]:
    """Return all tags of a model, with the numbers of the versions that they point at."""
    # While a tag is being replaced, there is a draft with another name beside it.
    names = [name for name in (home / TAGS).names() if name[0] not in "._"]
    versions = {tag: read_tag(home, tag) for tag in names}
    return {tag: version for tag, version in versions.items() if version is not None}


def read_changes(home: LakePath, tag: str) -> tuple[TagChange, ...] | None:
    """Return the changes of a tag, the oldest first; None if there never was such a tag."""
    for file in (home / TAGS / tag, home / TAGS / _REMOVED / tag):
        content = _read(file)
        if content is not None:
            if content.changes is None:
                raise StoreError(
                    f"{file.url} is damaged: its changes cannot be read; set the tag again to begin"
                    " a new history",
                    DAMAGED,
                )
            return content.changes
    return None


def earlier_versions(changes: Sequence[TagChange], current: int) -> list[int]:
    """Return the versions that a rollback may return to, the preferred one first. Pure.

    A version that a rollback has left is not included, so a second rollback goes back further.
    """
    first = changes[0].previous if changes else None
    stack = [] if first is None else [first]
    for change in changes:
        if change.version is None:
            continue
        if change.action == ROLLBACK and change.version in stack:
            while stack[-1] != change.version:
                stack.pop()
        else:
            stack.append(change.version)
    return [number for number in dict.fromkeys(reversed(stack)) if number != current]


def _read_for_change(home: LakePath, tag: str) -> _Tag:
    """Return a tag before a change. A damaged tag counts as absent: the change repairs it."""
    try:
        content = _read(home / TAGS / tag) or _read(home / TAGS / _REMOVED / tag)
    except StoreError as error:
        if error.kind != DAMAGED:
            raise
        log.warning("begins a new history of tag %r: %s", tag, error)
        content = None
    return content or _Tag(None, ())


def _change(
    home: LakePath, previous: int | None, version: int | None, action: str, now: float | None
) -> TagChange:
    user = (home / TAGS).user()
    return TagChange(version, previous, user, utc_time(time.time() if now is None else now), action)


def _serialize(version: int | None, changes: Sequence[TagChange]) -> bytes:
    history = [asdict(change) for change in changes[-_MAX_CHANGES:]]
    return json.dumps({"version": version, "history": history}).encode()


def _read(file: LakePath) -> _Tag | None:
    try:
        text = file.read(MAX_RECORD_BYTES)
    except StoreError as error:
        if error.kind == ABSENT:
            return None
        raise
    try:
        content = json.loads(text)
        version = content["version"]
        was_removed = version is None and file.parent.url.endswith(f"/{_REMOVED}")
        if not was_removed and not _is_number(version):
            raise ValueError(f"{version!r:.99} is not a version number")
    except JSON_ERRORS as error:
        raise StoreError(
            f"{file.url} is damaged: it is not a tag; set the tag again", DAMAGED
        ) from error
    return _Tag(version, _changes_of(content))


def _changes_of(content: Mapping[str, Any]) -> tuple[TagChange, ...] | None:
    """Return the changes in a tag's file, or None if they are damaged."""
    try:
        changes = tuple(TagChange(**entry) for entry in content.get("history", ()))
        if all(map(_is_valid, changes)):
            return changes
    except JSON_ERRORS as error:
        log.debug("changes of a tag cannot be read: %s", error)
    return None


def _is_valid(change: TagChange) -> bool:
    texts = (change.user, change.time, change.action)
    ends = (change.version, change.previous)
    return all(isinstance(text, str) for text in texts) and all(
        number is None or _is_number(number) for number in ends
    )


def _is_number(version: object) -> bool:
    return type(version) is int and bool(numbers([str(version)]))
