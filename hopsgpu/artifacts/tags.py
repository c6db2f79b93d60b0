"""A model's tags: `<root>/<name>/_tags/<tag>`, a small file that says which version is meant."""

from __future__ import annotations

import json

from hopsgpu.artifacts import manifest
from hopsgpu.artifacts.versions import TAGS, numbers
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, EXISTS, ODD_JSON
from hopsgpu.storage.lake import Lake


def put_tag(home: Lake, tag: str, version: int) -> None:
    """Has a tag lead to a version; whoever reads it finds the old or the new one.

    Args:
        home: of the model.
        tag: as `manifest.tag_name` gives it.
        version: a number.

    Raises:
        StoreError: the lake refused; or the version was deleted meanwhile (kind "absent"), and then
            there is no such tag any more.
    """
    file = home / TAGS / tag
    (home / TAGS).make()
    file.replace(json.dumps({"version": version}).encode())
    # `ModelStore.delete` takes the version away and reads the tags then. This is the other order:
    # of two at once, one at least sees what the other did.
    if not is_version(home, version):
        if read_tag(home, tag) == version:  # somebody may have had it lead elsewhere by now
            file.remove()
        raise StoreError(
            f"version {version} of {home.url} was deleted meanwhile: it cannot be tagged {tag!r}",
            ABSENT,
        )


def is_version(home: Lake, number: int) -> bool:
    """Whether a version is there: the manifest comes with the directory, by one rename."""
    try:
        return (home / str(number) / manifest.FILE).exists()
    except StoreError as error:
        if error.kind == EXISTS:  # a file bears the number
            return False
        raise


def drop_tag(home: Lake, tag: str) -> bool:
    """Removes a tag, also a damaged one; False where there is none.

    Raises:
        StoreError: the lake refused.
    """
    file = home / TAGS / tag
    if not file.exists():
        return False
    file.remove()
    return True


def read_tag(home: Lake, tag: str) -> int | None:
    """The version that a tag leads to; None where there is no such tag.

    Raises:
        StoreError: the lake refused, or the tag is damaged.
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
            raise ValueError(f"{version!r:.99} is no number of a version")
    except ODD_JSON as error:
        raise StoreError(f"{file.url} is damaged: no tag; set it again", DAMAGED) from error
    return version


def read_tags(home: Lake) -> dict[str, int]:
    """All tags of a model, with the versions that they lead to.

    Raises:
        StoreError: the lake refused, or a tag is damaged.
    """
    # What is being replaced has a file of another name beside it for a moment.
    names = [name for name in (home / TAGS).names() if name[0] not in "._"]
    found = {tag: read_tag(home, tag) for tag in names}
    return {tag: version for tag, version in found.items() if version is not None}
