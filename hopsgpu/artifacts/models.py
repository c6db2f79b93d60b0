"""Published models, `<root>/<name>/<version>/`: a version is complete or absent."""

from __future__ import annotations

import concurrent.futures
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hopsgpu.artifacts import publication, tags
from hopsgpu.artifacts.manifest import LATEST, VersionDescription, tag_name
from hopsgpu.artifacts.tags import TagChange
from hopsgpu.artifacts.version_commit import commit_of
from hopsgpu.artifacts.versions import (
    CLAIMS,
    DIGITS,
    ModelVersion,
    is_version,
    lacks_manifest,
    numbers,
    without_manifest,
)
from hopsgpu.core.boundary import public
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.serving import model_signature
from hopsgpu.serving.model_formats import ModelFormat, pickle_warning
from hopsgpu.storage.error_messages import ABSENT, JSON_ERRORS, PERMISSION
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.lake_root import session_root
from hopsgpu.storage.names import is_model_name, local_path, model_name
from hopsgpu.storage.root import join_url

__all__ = ["ModelFormat", "ModelStore", "ModelVersion", "TagChange"]

log = logging.getLogger(__name__)

_LOOKS_AT_ONCE = 8
_HIGHEST = int("9" * DIGITS)


class ModelStore:
    """The models below a URL on the lake.

    Args:
        url: an absolute hdfs://, viewfs://, webhdfs://, s3://, gs://, abfss:// or file:// URL; None
            for the directory `models` of the root that a session here uses, where `launch`
            publishes and `hopsgpu models` looks.

    Raises:
        ConfigError: the URL is another one, or the configuration of the cluster cannot be read.
    """

    __module__ = "hopsgpu"

    @public
    def __init__(self, url: str | None = None) -> None:
        if url is None:
            url = join_url(session_root(os.environ), "models")
        if not isinstance(url, str):
            raise ConfigError(f"ModelStore({url!r}): must be a URL, as hdfs:///user/ann/models")
        self._root = LakePath(url)

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
        """Upload a directory and make it the model's next version.

        If several publishers do so at once, each gets a version of its own.

        Args:
            local_dir: directory whose files become the version's; links are followed.
            name: name of the model.
            metrics: numbers by name.
            signature: the model's inputs and outputs: a pair of samples, or a mapping with the keys
                "inputs" and "outputs", from which names, types and shapes are inferred; or a
                description as a JSON value. A sample is an array of a batch (of NumPy, torch,
                TensorFlow or JAX), a mapping of names to arrays, a list of arrays, or a pandas
                DataFrame. By default, the content of the directory's `signature.json`, if there is
                one.
            tags: tags to point at the version.
            run_id: id of the run that made the model.

        Raises:
            ConfigError: a name or a value is invalid, or the directory does not exist; nothing was
                written.
            StoreError: the lake refused the operation, or the directory has no files; unless the
                message says otherwise, there is no version.
        """
        directory = local_path(local_dir, "local_dir")
        if not directory.exists():
            raise ConfigError(f"{directory} does not exist")
        if not directory.is_dir():
            raise ConfigError(f"{directory} is a file: pass the directory that contains it")
        files = publication.files_of(directory)
        about = VersionDescription(
            metrics=metrics,
            signature=_signature(signature, files),
            tags=tags,
            run_id=run_id,
        )
        if not files:
            raise StoreError(f"{local_dir} contains no file to publish as {name!r}")
        if (warning := pickle_warning(files)) is not None:
            log.warning("%s: %s", name, warning)
        staging = publication.begin(self._root, name)
        try:
            return publication.publish(staging, files, about)
        except BaseException as error:
            try:
                publication.abandon(staging)
            except HopsGpuError as problem:
                error.add_note(
                    f"the uploaded files stay until a later publish removes them: {problem}"
                )
            raise

    @public
    def list(self) -> tuple[str, ...]:
        """Return the names of the models that have a version, sorted."""
        # Skip what others put there: files, names that no model can have, and directories that may
        # not be read.
        root = self._root_with_client()
        names = [name for name in root.names(only_directories=True) if is_model_name(name)]

        def has_version(name: str) -> bool:
            home = root / name
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
        """Return all versions of a model, the oldest first; none if there is no such model.

        A version that may not be read is included, and so is a damaged one: reading it raises the
        error.
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
        """Return one version of a model.

        Args:
            name: name of the model.
            version: its number, a tag, or "latest" for the highest number.

        Raises:
            ConfigError: `name` is no model's name, or `version` cannot be a version.
            StoreError: there is no such model or version, and the message says what there is; or
                the version's manifest is missing (kind "damaged").
        """
        home = self._home(name)
        number = self._number(home, version)
        if not is_version(home, number):
            if _is_damaged(home, number):
                raise without_manifest(home / str(number))
            raise self._unknown(home, version)
        return self._version(home, number)

    @public
    def tag(self, name: str, version: int | str, tag: str) -> None:
        """Point a tag at a version, wherever it pointed before.

        Args:
            name: name of the model.
            version: as for `get`.
            tag: a name; it cannot be "latest" or consist of digits alone.

        Raises:
            ConfigError: `tag` cannot be a tag's name.
            StoreError: there is no such version, or the lake refused the operation.
        """
        wanted = tag_name(tag)
        tags.put_tag(self._home(name), wanted, self.get(name, version).version)

    @public
    def rollback(self, name: str, tag: str) -> ModelVersion:
        """Point a tag at the version that it pointed at before its last change.

        A second rollback goes back further. Versions that were deleted are passed over.

        Args:
            name: name of the model.
            tag: a tag that exists.

        Returns:
            The version that the tag points at now.

        Raises:
            ConfigError: `tag` cannot be a tag's name.
            StoreError: there is no such tag, or the tag has pointed at no other version that still
                exists (kind "absent"); the tag is damaged; or the lake refused the operation.
        """
        home, wanted = self._home(name), tag_name(tag)
        current = tags.read_tag(home, wanted)
        if current is None:
            raise self._unknown(home, wanted)
        changes = tags.read_changes(home, wanted) or ()
        for number in tags.earlier_versions(changes, current):
            if is_version(home, number):
                tags.put_tag(home, wanted, number, action=tags.ROLLBACK)
                return self._version(home, number)
            log.info("rollback of tag %r passes over version %d: deleted", wanted, number)
        raise StoreError(
            f"cannot roll back tag {wanted!r} of {home.url}: it points at version {current}, and"
            " its history has no earlier version that still exists; to choose a version, use"
            f" ModelStore.tag or `hopsgpu models tag {home.url.rpartition('/')[2]} VERSION"
            f" {wanted}`",
            ABSENT,
        )

    @public
    def history(self, name: str, tag: str) -> tuple[TagChange, ...]:
        """Return the changes of a tag, the oldest first, also of one that was removed.

        A change to the version at which the tag pointed already is none. The last 1000 changes are
        kept. Those that were made by a hopsgpu that kept no history are missing.

        Args:
            name: name of the model.
            tag: a tag that exists or was removed.

        Raises:
            ConfigError: `tag` cannot be a tag's name.
            StoreError: there never was such a tag, its file is damaged, or the lake refused the
                operation.
        """
        home, wanted = self._home(name), tag_name(tag)
        changes = tags.read_changes(home, wanted)
        if changes is None:
            raise self._unknown(home, wanted)
        return changes

    @public
    def untag(self, name: str, tag: str) -> None:
        """Remove a tag; the version stays, and so does the tag's history.

        Raises:
            ConfigError: `tag` cannot be a tag's name.
            StoreError: there is no such tag, or the lake refused the operation.
        """
        home, wanted = self._home(name), tag_name(tag)
        if not tags.drop_tag(home, wanted):
            raise self._unknown(home, wanted)

    @public
    def tags(self, name: str) -> dict[str, int]:
        """Return all tags of a model, with the numbers of the versions that they point at."""
        return tags.read_tags(self._home(name))

    @public
    def delete(self, name: str, version: int | str) -> None:
        """Remove a version; its number is never used again.

        Args:
            name: name of the model.
            version: as for `get`.

        Raises:
            StoreError: there is no such version, a tag points at it, or the lake refused the
                operation.
        """
        home = self._home(name)
        number = self._number(home, version)
        if not is_version(home, number) and not _is_damaged(home, number):
            raise self._unknown(home, version)
        _refuse_tagged(home, number)
        # A version that hopsgpu did not publish has no claim yet.
        (home / CLAIMS).make()
        (home / CLAIMS / str(number)).create()
        # A process that tags the version meanwhile writes the tag and then checks that the version
        # exists (`tags.put_tag`):
        #
        # - A tag written before the tags are read here makes the version come back. If the other
        #   process checks in between, it does not find the version: then the tag is removed too,
        #   both operations are refused, and either may be tried again.
        # - A tag written later is removed, because the check that follows finds no version.
        #
        # If this process is killed here, the version is deleted. If a process that tags is killed
        # before its check, its tag stays. A tag that points at no version, for either reason, makes
        # its readers raise an error. It never points at another version, because the number is not
        # used again. It can be set anew, or removed.
        commit_of(home).withdraw(home, number, lambda: _refuse_tagged(home, number))
        log.info("deleted version %d of %s", number, home.url)

    def _home(self, name: str) -> LakePath:
        wanted = model_name(name)
        return self._root_with_client() / wanted

    def _root_with_client(self) -> LakePath:
        """Return the root with a client, which all places and threads of a call share.

        It is made anew for each call: the one before may be old, or another process's.
        """
        return LakePath(self._root.url).with_client()

    def _version(self, home: LakePath, number: int) -> ModelVersion:
        return ModelVersion(home.url.rpartition("/")[2], number, f"{home.url}/{number}")

    def _number(self, home: LakePath, version: int | str) -> int:
        """Return the number that `version` means, whether or not that version exists.

        Raises:
            ConfigError: `version` cannot be a version.
            StoreError: there is no such tag, or there is no version at all.
        """
        if isinstance(version, bool) or not isinstance(version, (int, str)):
            raise ConfigError(f"version={version!r}: must be a number, a tag or {LATEST!r}")
        if _is_too_long(version):
            raise ConfigError(
                f"version: a version number has at most {DIGITS} digits;"
                " ModelStore.versions(name) lists the versions"
            )
        if not isinstance(version, str) or numbers([version]):
            return int(version)
        latest = version == LATEST
        number = self._latest(home) if latest else tags.read_tag(home, tag_name(version))
        if number is None:
            raise self._unknown(home, version)
        return number

    def _latest(self, home: LakePath) -> int | None:
        for number in _candidates(home):
            try:
                if is_version(home, number):
                    return number
            except StoreError as error:
                if error.kind != PERMISSION:
                    raise
                # To return an older version would be to return another model than requested.
                raise StoreError(
                    f"version {number} of {home.url} is the latest, but you may not read it:"
                    f" {error}; to get an older version, pass its number or a tag",
                    PERMISSION,
                ) from error
        return None

    def _unknown(self, home: LakePath, version: int | str) -> StoreError:
        name = home.url.rpartition("/")[2]
        there = self.versions(name)
        if not there:
            models = self.list()
            return StoreError(
                f"no model {name!r} in {self._root.url}; models: {', '.join(models) or 'none'}",
                kind="absent",
            )
        tagged = [f"{tag} → {number}" for tag, number in self.tags(name).items()]
        return StoreError(
            f"no version {version!r} of {name!r} in {self._root.url}; versions:"
            f" {', '.join(str(v.version) for v in there)}; tags: {', '.join(tagged) or 'none'}",
            kind="absent",
        )


def _signature(given: Any, files: Mapping[str, Path]) -> Any:
    """Return a publisher's signature as JSON values, else what the file among the files says."""
    file = files.get(model_signature.FILE)
    if given is not None or file is None:
        return model_signature.infer_if_samples(given)
    try:
        return model_signature.load(file.read_bytes())
    except (*JSON_ERRORS, OSError) as error:
        raise ConfigError(f"{file} is not a signature in JSON: {error}") from error


def _candidates(home: LakePath) -> list[int]:
    """Return the numbers of directories that may be versions, the highest first."""
    return sorted(numbers(home.names(only_directories=True)), reverse=True)


def _is_listed(home: LakePath, number: int) -> bool:
    """Return whether a version exists, or a directory that may not be read."""
    try:
        return is_version(home, number)
    except StoreError as error:
        if error.kind != PERMISSION:
            raise
        return True


def _is_damaged(home: LakePath, number: int) -> bool:
    """Return whether a version has lost its manifest.

    Its claim shows that it was a version: others create directories, but no claims.
    """
    return (home / CLAIMS / str(number)).exists() and lacks_manifest(home / str(number))


def _is_too_long(version: int | str) -> bool:
    """Return whether a version is a number that Python itself may refuse to parse or to print."""
    if isinstance(version, str):
        return version.isdigit() and len(version) > DIGITS
    return abs(version) > _HIGHEST


def _refuse_tagged(home: LakePath, number: int) -> None:
    leading = sorted(tag for tag, to in tags.read_tags(home).items() if to == number)
    if leading:
        raise StoreError(
            f"version {number} of {home.url} is tagged {', '.join(map(repr, leading))}: before you"
            " delete it, point the tag at another version or remove the tag"
        )
