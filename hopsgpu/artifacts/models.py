"""Published models, `<root>/<name>/<version>/`: a version is complete or absent."""

from __future__ import annotations

import concurrent.futures
import itertools
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
    is_listed,
    is_version,
    lacks_manifest,
    missing_manifest_error,
    numbers,
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

_MAX_PARALLEL_CHECKS = 8
_HIGHEST = int("9" * DIGITS)


class ModelStore:
    """The models below a URL on the lake.

    Args:
        url: an absolute hdfs://, viewfs://, webhdfs://, s3://, gs://, abfss:// or file:// URL. None
            means the directory `models` of the root that a session here uses; `launch` and
            `hopsgpu models` use that directory too.

    Raises:
        ConfigError: the URL is invalid, or the configuration of the cluster cannot be read.
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

        Concurrent publishers each get a version of their own.

        Args:
            local_dir: directory with the version's files; links are followed.
            name: name of the model.
            metrics: numbers by name.
            signature: the model's inputs and outputs, as samples or as a JSON description. Names,
                types and shapes are inferred from a pair of samples, or from a mapping with the
                keys "inputs" and "outputs". A sample is an array of a batch (of NumPy, torch,
                TensorFlow or JAX), a mapping of names to arrays, a list of arrays, or a pandas
                DataFrame. The default is the content of the directory's `signature.json`, if that
                file exists.
            tags: tags to point at the version.
            run_id: id of the run that made the model.

        Raises:
            ConfigError: a name or a value is invalid, or the directory does not exist; nothing was
                written.
            StoreError: the lake refused the operation, or the directory has no files. There is no
                version, unless the message says otherwise.
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
        # Skip entries of others: files, names that no model can have, and unreadable directories.
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
            return any(is_listed(home, number) for number in candidates)

        with concurrent.futures.ThreadPoolExecutor(_MAX_PARALLEL_CHECKS) as pool:
            is_model = list(pool.map(has_version, names))
        return tuple(itertools.compress(names, is_model))

    @public
    def versions(self, name: str) -> tuple[ModelVersion, ...]:
        """Return all versions of a model, the oldest first; none if there is no such model.

        Damaged and unreadable versions are included: reading them raises the error.
        """
        home = self._home(name)
        candidates = _candidates(home)[::-1]
        with concurrent.futures.ThreadPoolExecutor(_MAX_PARALLEL_CHECKS) as pool:
            has_entry = list(pool.map(lambda number: is_listed(home, number), candidates))
        versions = itertools.compress(candidates, has_entry)
        return tuple(self._version(home, number) for number in versions)

    @public
    def get(self, name: str, version: int | str = LATEST) -> ModelVersion:
        """Return one version of a model.

        Args:
            name: name of the model.
            version: a number, a tag, or "latest" for the highest number.

        Raises:
            ConfigError: `name` or `version` is invalid.
            StoreError: there is no such model or version (the message lists those that exist), or
                the version's manifest is missing (kind "damaged").
        """
        home = self._home(name)
        number = self._number(home, version)
        if not is_version(home, number):
            if _is_damaged(home, number):
                raise missing_manifest_error(home / str(number))
            raise self._absent_error(home, version)
        return self._version(home, number)

    @public
    def tag(self, name: str, version: int | str, tag: str) -> None:
        """Point a tag, new or existing, at a version.

        Args:
            name: name of the model.
            version: as for `get`.
            tag: a name; it cannot be "latest" or consist of digits alone.

        Raises:
            ConfigError: `tag` is invalid.
            StoreError: there is no such version, or the lake refused the operation.
        """
        wanted = tag_name(tag)
        tags.put_tag(self._home(name), wanted, self.get(name, version).version)

    @public
    def rollback(self, name: str, tag: str) -> ModelVersion:
        """Point a tag at the version that it pointed at before its last change.

        A second rollback goes back further. Deleted versions are skipped.

        Args:
            name: name of the model.
            tag: a tag that exists.

        Returns:
            The version that the tag points at now.

        Raises:
            ConfigError: `tag` is invalid.
            StoreError: there is no such tag, or none of its earlier versions exists (kind
                "absent"); the tag is damaged; or the lake refused the operation.
        """
        home, wanted = self._home(name), tag_name(tag)
        current = tags.read_tag(home, wanted)
        if current is None:
            raise self._absent_error(home, wanted)
        changes = tags.read_changes(home, wanted) or ()
        for number in tags.earlier_versions(changes, current):
            if is_version(home, number):
                tags.put_tag(home, wanted, number, action=tags.ROLLBACK)
                return self._version(home, number)
            log.info("rollback of tag %r skips version %d: deleted", wanted, number)
        raise StoreError(
            f"cannot roll back tag {wanted!r} of {home.url}: it points at version {current}, and"
            " its history has no earlier version that still exists; to choose a version, use"
            f" ModelStore.tag or `hopsgpu models tag {home.url.rpartition('/')[2]} VERSION"
            f" {wanted}`",
            ABSENT,
        )

    @public
    def history(self, name: str, tag: str) -> tuple[TagChange, ...]:
        """Return the changes of a tag, the oldest first.

        Setting a tag to the same version again is no change. The last 1000 changes are kept.
        Versions of hopsgpu without a history recorded no changes.

        Args:
            name: name of the model.
            tag: a tag that exists or was removed.

        Raises:
            ConfigError: `tag` is invalid.
            StoreError: there never was such a tag, its file is damaged, or the lake refused the
                operation.
        """
        home, wanted = self._home(name), tag_name(tag)
        changes = tags.read_changes(home, wanted)
        if changes is None:
            raise self._absent_error(home, wanted)
        return changes

    @public
    def untag(self, name: str, tag: str) -> None:
        """Remove a tag; the version stays, and so does the tag's history.

        Raises:
            ConfigError: `tag` is invalid.
            StoreError: there is no such tag, or the lake refused the operation.
        """
        home, wanted = self._home(name), tag_name(tag)
        if not tags.drop_tag(home, wanted):
            raise self._absent_error(home, wanted)

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
            raise self._absent_error(home, version)
        _refuse_tagged(home, number)
        # A version that hopsgpu did not publish has no claim yet.
        (home / CLAIMS).make()
        (home / CLAIMS / str(number)).create()
        # Another process may tag the version meanwhile: it writes the tag, and then checks that the
        # version exists (`tags.put_tag`).
        #
        # - If the tag is written before the tags are read here, the version is restored. The other
        #   process may have checked in between: then it removes the tag, and both operations fail.
        # - If the tag is written later, the other process removes it: its check finds no version.
        #
        # If this process is killed here, the version is deleted. If the other process is killed
        # before its check, its tag stays. Readers of the tag raise an error until the tag is set
        # again or removed. It never points at another version: numbers are not used again.
        commit_of(home).withdraw(home, number, lambda: _refuse_tagged(home, number))
        log.info("deleted version %d of %s", number, home.url)

    def _home(self, name: str) -> LakePath:
        wanted = model_name(name)
        return self._root_with_client() / wanted

    def _root_with_client(self) -> LakePath:
        """Return the root with a new client, which all paths and threads of a call share.

        An earlier client may be old, or another process's.
        """
        return LakePath(self._root.url).with_client()

    def _version(self, home: LakePath, number: int) -> ModelVersion:
        return ModelVersion(home.url.rpartition("/")[2], number, f"{home.url}/{number}")

    def _number(self, home: LakePath, version: int | str) -> int:
        """Return the number that `version` means; the version need not exist."""
        if isinstance(version, bool) or not isinstance(version, (int, str)):
            raise ConfigError(f"version={version!r}: must be a number, a tag or {LATEST!r}")
        if _is_too_long(version):
            raise ConfigError(
                f"version: a version number has at most {DIGITS} digits;"
                " ModelStore.versions(name) lists the versions"
            )
        if not isinstance(version, str) or numbers([version]):
            return int(version)
        is_latest = version == LATEST
        number = self._latest(home) if is_latest else tags.read_tag(home, tag_name(version))
        if number is None:
            raise self._absent_error(home, version)
        return number

    def _latest(self, home: LakePath) -> int | None:
        for number in _candidates(home):
            try:
                if is_version(home, number):
                    return number
            except StoreError as error:
                if error.kind != PERMISSION:
                    raise
                # An older version would be another model than the requested one.
                raise StoreError(
                    f"version {number} of {home.url} is the latest, but you may not read it:"
                    f" {error}; to get an older version, pass its number or a tag",
                    PERMISSION,
                ) from error
        return None

    def _absent_error(self, home: LakePath, version: int | str) -> StoreError:
        name = home.url.rpartition("/")[2]
        versions = self.versions(name)
        if not versions:
            models = self.list()
            return StoreError(
                f"no model {name!r} in {self._root.url}; models: {', '.join(models) or 'none'}",
                kind="absent",
            )
        tagged = [f"{tag} → {number}" for tag, number in self.tags(name).items()]
        return StoreError(
            f"no version {version!r} of {name!r} in {self._root.url}; versions:"
            f" {', '.join(str(v.version) for v in versions)}; tags: {', '.join(tagged) or 'none'}",
            kind="absent",
        )


def _signature(argument: Any, files: Mapping[str, Path]) -> Any:
    """Return a publisher's signature, or else that in `signature.json`, as JSON values."""
    file = files.get(model_signature.FILE)
    if argument is not None or file is None:
        return model_signature.infer_if_samples(argument)
    try:
        return model_signature.load(file.read_bytes())
    except (*JSON_ERRORS, OSError) as error:
        raise ConfigError(f"{file} is not a signature in JSON: {error}") from error


def _candidates(home: LakePath) -> list[int]:
    return sorted(numbers(home.names(only_directories=True)), reverse=True)


def _is_damaged(home: LakePath, number: int) -> bool:
    """Return whether a version has lost its manifest.

    The claim shows that it was a version: other programs create directories, but no claims.
    """
    return (home / CLAIMS / str(number)).exists() and lacks_manifest(home / str(number))


def _is_too_long(version: int | str) -> bool:
    """Return whether a version is a number that Python may refuse to parse or to print."""
    if isinstance(version, str):
        return version.isdigit() and len(version) > DIGITS
    return abs(version) > _HIGHEST


def _refuse_tagged(home: LakePath, number: int) -> None:
    pointing = sorted(tag for tag, target in tags.read_tags(home).items() if target == number)
    if pointing:
        raise StoreError(
            f"version {number} of {home.url} is tagged {', '.join(map(repr, pointing))}: before you"
            " delete it, point the tag at another version or remove the tag"
        )
