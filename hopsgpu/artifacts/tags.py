"""A model's tags: `<root>/<name>/_tags/<tag>`, a small file with the number of a version."""

from __future__ import annotations

import json
import logging

from hopsgpu.artifacts import manifest
from hopsgpu.artifacts.versions import TAGS, numbers
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, EXISTS, ODD_JSON
from hopsgpu.storage.lake import Lake

log = logging.getLogger(__name__)


def put_tag(home: Lake, tag: str, version: int) -> None:
    """Point a tag at a version; a reader at that moment gets the old or the new version.

    Args:
        home: directory of the model.
        tag: tag as `manifest.tag_name` returns it.
        version: number of the version.

    Raises:
        StoreError: the lake refused the operation; or the version was deleted meanwhile (kind
            "absent"), and then the tag does not exist any more.
    """
    file = home / TAGS / tag
    (home / TAGS).make()
    file.replace(json.dumps({"version": version}).encode())
    # `ModelStore.delete` moves the version away and then reads the tags. This is the other order:
    # if both happen at once, at least one of them sees what the other did.
    if not is_version(home, version):
        if read_tag(home, tag) == version:  # another process may have moved the tag since
            file.remove()
        raise StoreError(
            f"cannot set tag {tag!r}: version {version} of {home.url} was deleted in the meantime",
            ABSENT,
        )
    log.info("tag %r of %s points at version %d", tag, home.url, version)


def is_version(home: Lake, number: int) -> bool:
    """Return whether a version exists: its manifest appears with the directory, by one rename."""
    try:
        return (home / str(number) / manifest.FILE).exists()
    except StoreError as error:
        if error.kind == EXISTS:  # a file has the number as its name
            return False
        raise


def drop_tag(home: Lake, tag: str) -> bool:
    """Remove a tag, even a damaged one; return False if it does not exist.

    Raises:
        StoreError: the lake refused the operation.
    """
    file = home / TAGS / tag
    if not file.exists():
        return False
    file.remove()
    return True


def read_tag(home: Lake, tag: str) -> int | None:
    """Return the number of the version that a tag points at; None if the tag does not exist.

    Raises:
        StoreError: the lake refused the operation, or the tag is damaged.
    """
    file = home / TAGS / tag
    try:
        written = file.read()
    except StoreError as error:
        if error.kind == ABSENT:
            return None
        raise
    try:
        version = json.loads(written)["version"]
        if type(version) is not int or not numbers([str(version)]):
            raise ValueError(f"{version!r:.99} is not a version number")
    except ODD_JSON as error:
        raise StoreError(
            f"{file.url} is damaged: it is not a tag; set the tag again", DAMAGED
        ) from error
    return version


def read_tags(home: Lake) -> dict[str, int]:
    """Return all tags of a model, with the numbers of the versions that they point at.

    Raises:
        StoreError: the lake refused the operation, or a tag is damaged.
    """
    # While a tag is replaced, there is for a moment a draft with another name beside it.
    names = [name for name in (home / TAGS).names() if name[0] not in "._"]
    found = {tag: read_tag(home, tag) for tag in names}
    return {tag: version for tag, version in found.items() if version is not None}
