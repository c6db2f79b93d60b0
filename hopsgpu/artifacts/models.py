"""Published models: `<root>/<name>/<version>/`, a version is there whole or not at all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hopsgpu.artifacts import publication, tags
from hopsgpu.artifacts.manifest import LATEST, About, tag_name
from hopsgpu.artifacts.versions import (
    CLAIMS,
    DIGITS,
    STAGING,
    ModelVersion,
    lacks_manifest,
    numbers,
    without_manifest,
)
from hopsgpu.core.boundary import public
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.storage.error_messages import EXISTS, PERMISSION, UNREACHABLE
from hopsgpu.storage.lake import Lake
from hopsgpu.storage.names import is_model_name, local_path, model_name

__all__ = ["ModelStore", "ModelVersion"]

_LOOKS_AT_ONCE = 8
_HIGHEST = int("9" * DIGITS)


class ModelStore:
    """The models below a URL on the lake.

    Args:
        url: hdfs://, viewfs://, webhdfs:// or file://, absolute.

    Raises:
        ConfigError: another URL.
    """

    __module__ = "hopsgpu"

    @public
    def __init__(self, url: str) -> None:
        if not isinstance(url, str):
            raise ConfigError(f"ModelStore({url!r}): must be a URL, as hdfs:///user/ann/models")
        self._root = Lake(url)

    def __repr__(self) -> str:
        return f"ModelStore({self._root.url!r})"

    @public
    def publish(
        self,
        local_dir: str | Path,
        name: str,
        *,
        metrics: Mapping[str, Any] | None = None,
        signature: Any = None,
        tags: Iterable[str] | None = None,
        run_id: str | None = None,
    ) -> ModelVersion:
        """Uploads a directory and makes it the model's next version.

        Of several publishers at once each gets a version of its own.

        Args:
            local_dir: its files become the version's; links are followed.
            name: of the model.
            metrics: numbers by name.
            signature: what goes in and out of the model, as JSON has it.
            tags: that are to lead to the version.
            run_id: of the run that made it.

        Raises:
            ConfigError: a name or a value that cannot be, or no such directory; nothing was
                written.
            StoreError: the lake refused, or there are no files; no version of it is there, but
                where the error says so.
        """
        directory = local_path(local_dir, "local_dir")
        if not directory.exists():
            raise ConfigError(f"{directory} does not exist")
        if not directory.is_dir():
            raise ConfigError(f"{directory} is a file: give the directory that it is in")
        about = About(metrics=metrics, signature=signature, tags=tags, run_id=run_id)
        files = publication.files_of(directory)
        if not files:
            raise StoreError(f"{local_dir} holds no file to publish as {name!r}")
        staging = publication.begin(self._root.url, name)
        try:
            return publication.publish(staging, files, about)
        except BaseException as error:
            try:
                publication.abandon(staging)
            except HopsGpuError as problem:
                error.add_note(f"what was uploaded goes with a later publish: {problem}")
            raise

    @public
    def list(self) -> tuple[str, ...]:
        """Names of the models that have a version, sorted."""
        # What others put there is passed over: files, names that no model can have, and
        # directories into which nobody else may look.
        names = [name for name in self._root.names(directories=True) if is_model_name(name)]

        def has_version(name: str) -> bool:
            home = self._root / name
            try:
                candidates = _candidates(home)
            except StoreError as error:
                if error.kind != PERMISSION:
                    raise
                return False
            return any(_is_listed(home, number) for number in candidates)

        with concurrent.futures.ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
            found = list(pool.map(has_version, names))
        return tuple(name for name, listed in zip(names, found, strict=True) if listed)

    @public
    def versions(self, name: str) -> tuple[ModelVersion, ...]:
        """All versions of a model, oldest first; none where there is no such model.

        One that may not be read is among them, as a damaged one is: reading it says so.
        """
        home = self._home(name)
        candidates = _candidates(home)[::-1]
        with concurrent.futures.ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
            listed = list(pool.map(lambda number: _is_listed(home, number), candidates))
        return tuple(
            self._version(home, number)
            for number, there in zip(candidates, listed, strict=True)
            if there
        )

    @public
    def get(self, name: str, version: int | str = LATEST) -> ModelVersion:
        """One version of a model.

        Args:
            name: of the model.
            version: its number, a tag, or "latest" for the highest.

        Raises:
            ConfigError: no name, or nothing that can be a version.
            StoreError: there is no such model or version; the error says what there is. Or its
                manifest is missing (kind "damaged").
        """
        home = self._home(name)
        number = self._number(home, version)
        if not tags.is_version(home, number):
            if _is_damaged(home, number):
                raise without_manifest(home / str(number))
            raise self._unknown(home, version)
        return self._version(home, number)

    @public
    def tag(self, name: str, version: int | str, tag: str) -> None:
        """Has a tag lead to a version, wherever it led before.

        Args:
            name: of the model.
            version: as for `get`.
            tag: a name; not "latest", and not of digits alone.

        Raises:
            ConfigError: no name of a tag.
            StoreError: there is no such version, or the lake refused.
        """
        wanted = tag_name(tag)
        tags.put_tag(self._home(name), wanted, self.get(name, version).version)

    @public
    def untag(self, name: str, tag: str) -> None:
        """Removes a tag; the version stays.

        Raises:
            ConfigError: no name of a tag.
            StoreError: there is no such tag, or the lake refused.
        """
        home, wanted = self._home(name), tag_name(tag)
        if not tags.drop_tag(home, wanted):
            raise self._unknown(home, wanted)

    @public
    def tags(self, name: str) -> dict[str, int]:
        """All tags of a model, with the numbers of the versions that they lead to."""
        return tags.read_tags(self._home(name))

    @public
    def delete(self, name: str, version: int | str) -> None:
        """Removes a version; its number is never used again.

        Args:
            name: of the model.
            version: as for `get`.

        Raises:
            StoreError: there is no such version, a tag leads to it, or the lake refused.
        """
        home = self._home(name)
        number = self._number(home, version)
        if not tags.is_version(home, number) and not _is_damaged(home, number):
            raise self._unknown(home, version)
        _refuse_tagged(home, number)
        # One that was not published by hopsgpu has none yet.
        (home / CLAIMS).make()
        (home / CLAIMS / str(number)).create()
        _withdraw(home, number)

    def _home(self, name: str) -> Lake:
        return self._root / model_name(name)

    def _version(self, home: Lake, number: int) -> ModelVersion:
        return ModelVersion(home.url.rpartition("/")[2], number, f"{home.url}/{number}")

    def _number(self, home: Lake, version: int | str) -> int:
        """The number that is meant, whether or not there is such a version.

        Raises:
            ConfigError: nothing that can be a version.
            StoreError: there is no such tag, or no version at all.
        """
        if isinstance(version, bool) or not isinstance(version, (int, str)):
            raise ConfigError(f"version={version!r}: must be a number, a tag or {LATEST!r}")
        if _is_too_long(version):
            raise ConfigError(
                f"version: the number that was given has more than {DIGITS} digits, and no version"
                " has: give one of those that there are"
            )
        if not isinstance(version, str) or numbers([version]):
            return int(version)
        latest = version == LATEST
        number = self._latest(home) if latest else tags.read_tag(home, tag_name(version))
        if number is None:
            raise self._unknown(home, version)
        return number

    def _latest(self, home: Lake) -> int | None:
        for number in _candidates(home):
            try:
                if tags.is_version(home, number):
                    return number
            except StoreError as error:
                if error.kind != PERMISSION:
                    raise
                # An older one in its place would be another model than was asked for.
                raise StoreError(
                    f"version {number} of {home.url} is the latest and may not be read: {error};"
                    " an older version can be had by its number or a tag",
                    PERMISSION,
                ) from error
        return None

    def _unknown(self, home: Lake, version: int | str) -> StoreError:
        name = home.url.rpartition("/")[2]
        there = self.versions(name)
        if not there:
            models = self.list()
            are = "are" if len(models) > 1 else "is"
            return StoreError(
                f"there is no model {name!r} in {self._root.url}; there {are}"
                f" {', '.join(models) or 'none'}",
                kind="absent",
            )
        tagged = [f"{tag} → {number}" for tag, number in self.tags(name).items()]
        return StoreError(
            f"no version {version!r} of {name!r} in {self._root.url}; versions:"
            f" {', '.join(str(v.version) for v in there)}; tags: {', '.join(tagged) or 'none'}",
            kind="absent",
        )


def _candidates(home: Lake) -> list[int]:
    """Numbers of what may be versions, the highest first."""
    return sorted(numbers(home.names(directories=True)), reverse=True)


def _is_listed(home: Lake, number: int) -> bool:
    """Whether a version is there, or something that may not be looked into."""
    try:
        return tags.is_version(home, number)
    except StoreError as error:
        if error.kind != PERMISSION:
            raise
        return True


def _is_damaged(home: Lake, number: int) -> bool:
    """Whether what was a version has lost its manifest: others make directories, but no claims."""
    return (home / CLAIMS / str(number)).exists() and lacks_manifest(home / str(number))


def _is_too_long(version: int | str) -> bool:
    """Whether it is a number that Python itself may refuse to read or to show."""
    if isinstance(version, str):
        return version.isdigit() and len(version) > DIGITS
    return abs(version) > _HIGHEST


def _refuse_tagged(home: Lake, number: int) -> None:
    leading = sorted(tag for tag, to in tags.read_tags(home).items() if to == number)
    if leading:
        raise StoreError(
            f"version {number} of {home.url} is tagged {', '.join(map(repr, leading))}: tag another"
            " version so, or untag it, and delete it then"
        )


def _withdraw(home: Lake, number: int) -> None:
    """Takes a version out of everybody's way at once, and removes it if no tag leads to it then.

    Who tags it meanwhile writes the tag and looks for the version then (`tags.put_tag`):

    - A tag written before the tags are read here has the version come back. A look in between
      does not find it: then the tag goes as well, both are refused, and either may try again.
    - A tag written later is followed by a look that finds no version, and goes.

    Of a process that is killed here the version stays aside, and a sweep removes it a day later:
    it is deleted. One that is killed before its look leaves its tag. A tag that leads nowhere for
    either reason tells its readers so and never leads to anything else, as the number is not used
    again; it can be set anew, or removed.

    Raises:
        StoreError: a tag leads to it, which is there as before, or the lake refused.
    """
    place, aside = home / str(number), home / STAGING / uuid.uuid4().hex
    # A new directory around it: by its own age a sweep would take it before it can come back.
    aside.make()
    kept = aside / str(number)
    try:
        place.rename(kept)
    except StoreError as error:
        with contextlib.suppress(StoreError):  # the first problem is the one to tell
            # What did not answer may have it renamed, and then a sweep removes it.
            if error.kind != UNREACHABLE and not kept.names():
                aside.remove()
        raise
    try:
        _refuse_tagged(home, number)
    except StoreError as refusal:
        # An answer that was lost leaves False to the second try.
        if not kept.rename(place) and not tags.is_version(home, number):
            raise StoreError(
                f"{place.url} was taken meanwhile; the version itself is {kept.url}, until it is"
                f" swept a day from now: rename it ({refusal})",
                EXISTS,
            ) from refusal
        aside.remove()
        raise
    aside.remove()
