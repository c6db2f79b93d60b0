"""A model's tags: `<root>/<name>/_tags/<tag>`, a small file with the number of a version.

The same file has the changes of the tag, the oldest first, so that the tag and its last change are
replaced in one step. `_tags/_removed/<tag>` keeps the changes of a tag that was removed.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hopsgpu.artifacts.versions import TAGS, is_version, numbers
from hopsgpu.core.formats import utc_time
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, JSON_ERRORS
from hopsgpu.storage.lake import DRAFT, LakePath

log = logging.getLogger(__name__)

# The actions of a change.
TAG = "tag"
ROLLBACK = "rollback"
UNTAG = "untag"
# Directory of the changes of removed tags; no tag begins with `_`.
_REMOVED = "_removed"
# A tag is read whole at each use, so that the oldest changes are dropped at some point.
_MOST_CHANGES = 1000


@dataclass(frozen=True)
class TagChange:
    """One change of a tag.

    Attributes:
        version: number of the version that the tag points at since then; None if it was removed.
        previous: number of the version that it pointed at before; None if there was no such tag.
        user: who changed it, by the user name on the lake.
        time: when, by the clock of the process that changed it: UTC, RFC 3339 with milliseconds.
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
    """The content of a tag's file: where it points, and its changes, which may be damaged."""

    version: int | None
    changes: tuple[TagChange, ...] | None


def put_tag(
    home: LakePath, tag: str, version: int, *, action: str = TAG, now: float | None = None
) -> None:
    """Point a tag at a version; a reader at that moment gets the old or the new version.

    If two processes change a tag at the same moment, the later change counts, and the tag's history
    may lack the other one.

    Args:
        home: directory of the model.
        tag: tag as `manifest.tag_name` returns it.
        version: number of the version.
        action: TAG or ROLLBACK.
        now: epoch seconds; by default the time of this machine.

    Raises:
        StoreError: the lake refused the operation; or the version was deleted meanwhile (kind
            "absent"), and then the tag does not exist any more.
    """
    file = home / TAGS / tag
    (home / TAGS).make()
    before = _before(home, tag)
    changes = before.changes or ()
    if before.version != version:
        changes = (*changes, _change(home, before.version, version, action, now))
    file.replace(_written(version, changes))
    # `ModelStore.delete` hides the version and then reads the tags. This is the other order:
    # if both happen at once, at least one of them sees what the other did.
    if not is_version(home, version):
        if read_tag(home, tag) == version:  # another process may have moved the tag since
            drop_tag(home, tag, now=now)
        raise StoreError(
            f"cannot set tag {tag!r}: version {version} of {home.url} was deleted in the meantime",
            ABSENT,
        )
    log.info("tag %r of %s points at version %d", tag, home.url, version)


def drop_tag(home: LakePath, tag: str, *, now: float | None = None) -> bool:
    """Remove a tag, even a damaged one; return False if it does not exist. Its changes are kept.

    Args:
        home: directory of the model.
        tag: tag as `manifest.tag_name` returns it.
        now: epoch seconds; by default the time of this machine.

    Raises:
        StoreError: the lake refused the operation.
    """
    file = home / TAGS / tag
    if not file.exists():
        return False
    before = _before(home, tag)
    changes = (*(before.changes or ()), _change(home, before.version, None, UNTAG, now))
    removed = home / TAGS / _REMOVED
    removed.make()
    (removed / tag).replace(_written(None, changes))
    file.remove()
    log.info("removed tag %r of %s", tag, home.url)
    return True


def read_tag(home: LakePath, tag: str) -> int | None:
    """Return the number of the version that a tag points at; None if the tag does not exist.

    Raises:
        StoreError: the lake refused the operation, or the tag is damaged.
    """
    found = _read(home / TAGS / tag)
    return None if found is None else found.version


def read_tags(home: LakePath) -> dict[str, int]:
    """Return all tags of a model, with the numbers of the versions that they point at.

    Raises:
        StoreError: the lake refused the operation, or a tag is damaged.
    """
    # While a tag is replaced, there is for a moment a draft with another name beside it.
    names = [name for name in (home / TAGS).names() if name[0] not in "._"]
    found = {tag: read_tag(home, tag) for tag in names}
    return {tag: version for tag, version in found.items() if version is not None}


def read_changes(home: LakePath, tag: str) -> tuple[TagChange, ...] | None:
    """Return the changes of a tag, the oldest first; None if there never was such a tag.

    Raises:
        StoreError: the lake refused the operation, or the tag or its changes are damaged.
    """
    for file in (home / TAGS / tag, home / TAGS / _REMOVED / tag):
        found = _read(file)
        if found is not None:
            if found.changes is None:
                raise StoreError(
                    f"{file.url} is damaged: its changes cannot be read; set the tag again to begin"
                    " a new history",
                    DAMAGED,
                )
            return found.changes
    return None


def earlier_versions(changes: Sequence[TagChange], current: int) -> list[int]:
    """Return the versions that a rollback may return to, the preferred one first. Pure.

    A version that was left by a rollback is not among them, so that a second rollback goes back
    further.

    Args:
        changes: changes of a tag, the oldest first.
        current: number of the version that the tag points at now.
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


def _before(home: LakePath, tag: str) -> _Tag:
    """Return a tag before a change. What is damaged counts as absent: the change repairs it."""
    try:
        found = _read(home / TAGS / tag) or _read(home / TAGS / _REMOVED / tag)
    except StoreError as error:
        if error.kind != DAMAGED:
            raise
        log.warning("begins a new history of tag %r: %s", tag, error)
        found = None
    return found or _Tag(None, ())


def _change(
    home: LakePath, previous: int | None, version: int | None, action: str, now: float | None
) -> TagChange:
    # The user as whom the lake knows this process is the owner of a file that it creates.
    probe = home / TAGS / f".{uuid.uuid4().hex}{DRAFT}"
    probe.create()
    user = probe.owner()
    probe.remove()
    return TagChange(version, previous, user, utc_time(time.time() if now is None else now), action)


def _written(version: int | None, changes: Sequence[TagChange]) -> bytes:
    history = [asdict(change) for change in changes[-_MOST_CHANGES:]]
    return json.dumps({"version": version, "history": history}).encode()


def _read(file: LakePath) -> _Tag | None:
    try:
        written = file.read()
    except StoreError as error:
        if error.kind == ABSENT:
            return None
        raise
    try:
        content = json.loads(written)
        version = content["version"]
        removed = version is None and file.parent.url.endswith(f"/{_REMOVED}")
        if not removed and not _is_number(version):
            raise ValueError(f"{version!r:.99} is not a version number")
    except JSON_ERRORS as error:
        raise StoreError(
            f"{file.url} is damaged: it is not a tag; set the tag again", DAMAGED
        ) from error
    return _Tag(version, _changes_of(content))


def _changes_of(content: Mapping[str, Any]) -> tuple[TagChange, ...] | None:
    """Return the changes in a tag's file; none in a file of hopsgpu that kept no changes."""
    try:
        changes = tuple(TagChange(**entry) for entry in content.get("history", ()))
        if all(map(_is_whole, changes)):
            return changes
    except JSON_ERRORS as error:
        log.debug("changes of a tag cannot be read: %s", error)
    return None


def _is_whole(change: TagChange) -> bool:
    texts = (change.user, change.time, change.action)
    ends = (change.version, change.previous)
    return all(isinstance(text, str) for text in texts) and all(
        number is None or _is_number(number) for number in ends
    )


def _is_number(version: object) -> bool:
    return type(version) is int and bool(numbers([str(version)]))
