"""A published version, for reading; and the names in a model's directory."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from hopsgpu import html
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.stores import manifest
from hopsgpu.stores.digests import Facts
from hopsgpu.stores.lake import Lake
from hopsgpu.stores.manifest import Manifest
from hopsgpu.stores.names import local_path
from hopsgpu.stores.transfer import check_files, download_files

# Beside the versions; those that serve models pass over what is no number.
STAGING = "_staging"
CLAIMS = "_claims"
TAGS = "_tags"
# Begins the names of files that are written only to see whether they can be.
PROBE = "_probe-"
# As TensorFlow Serving and Triton read it: none begins with a zero, or is too long for an int64.
DIGITS = 18
_NUMBER = re.compile(rf"[1-9][0-9]{{0,{DIGITS - 1}}}")


def numbers(names: Iterable[str]) -> list[int]:
    """Those names that are numbers of versions."""
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


@dataclass(frozen=True)
class ModelVersion:
    """A published version.

    Attributes:
        name: of the model.
        version: an integer, 1 and up.
        url: its directory on the lake.
    """

    name: str
    version: int
    url: str

    def _repr_html_(self) -> str:
        # Of the manifest nothing: a look at the lake may take long.
        return html.box(html.title(self.name, f"version {self.version}", self.url))

    @property
    def manifest(self) -> dict[str, Any]:
        """What was said of it when it was published: `hopsgpu.stores.manifest` has the schema.

        Raises:
            StoreError: it cannot be read, or is damaged.
        """
        return dict(self._manifest.content)

    @property
    def files(self) -> dict[str, Facts]:
        """Sizes and digests of its files, by path."""
        return dict(self._manifest.files)

    @functools.cached_property
    def _manifest(self) -> Manifest:
        file = Lake(self.url) / manifest.FILE
        return manifest.parse(file.read(), file.url)

    def download(self, dst: str | Path) -> Path:
        """Copies the version's files into a local directory, which is made.

        They get their names when all have come and agree with the manifest: of a download that
        fails no file is left.

        Args:
            dst: a directory; files of other names in it stay.

        Raises:
            ConfigError: `dst` is no path, or a file.
            StoreError: a file is missing or damaged, the lake refused, or `dst` cannot be
                written.
        """
        target = local_path(dst, "dst")
        if target.exists() and not target.is_dir():
            raise ConfigError(
                f"cannot download into {target}: it is a file, and a directory is wanted"
            )
        files = self.files
        draft = target / f".{uuid.uuid4().hex}.download"
        try:
            with _local_errors(target):
                draft.mkdir(mode=0o700, parents=True)
                _refuse_ways_out(target, files)
                download_files(files, Lake(self.url), draft)
                for directory in {PurePosixPath(path).parent for path in files}:
                    (target / directory).mkdir(parents=True, exist_ok=True)
                for path in files:
                    (draft / path).replace(target / path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    def verify(self) -> None:
        """Reads all files, and compares them with the manifest.

        Raises:
            StoreError: a file is missing or damaged; it is named.
        """
        check_files(self.files, Lake(self.url))

    @contextlib.contextmanager
    def open(self, path: str | PurePosixPath) -> Iterator[BinaryIO]:
        """One file of the version, for reading bytes.

        Args:
            path: as the manifest has it.

        Raises:
            StoreError: the version has no such file, or the lake refused.
        """
        path = str(path)
        if path not in self._manifest.files:
            there = sorted(self._manifest.files)
            more = "" if len(there) <= 10 else f" and {len(there) - 10} more"
            raise StoreError(
                f"{self.url} has no file {path!r}: {', '.join(there[:10])}{more}", kind="absent"
            )
        with (Lake(self.url) / path).open() as file:
            yield file


def _refuse_ways_out(target: Path, files: Iterable[str]) -> None:
    """A link in the directory that leads elsewhere is not written through."""
    root = target.resolve()
    for directory in {path.rpartition("/")[0] for path in files}:
        if not (root / directory).resolve().is_relative_to(root):
            raise StoreError(f"{target}/{directory} leads out of {target}: nothing is written")


@contextlib.contextmanager
def _local_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot download into {target}: {error}") from error
