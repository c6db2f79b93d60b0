"""A place on the lake: an fsspec file system and a path, with errors that say what to do."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from hopsgpu.errors import ConfigError, StoreError

_CHUNK = 4 * 2**20


@dataclass(frozen=True)
class Lake:
    """A directory on a file system.

    Attributes:
        url: with its scheme, without a slash at the end.
    """

    url: str

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("hdfs", "viewfs", "file") or not parts.path.startswith("/"):
            raise ConfigError(
                f"{self.url!r} is no place for runs and models: an absolute hdfs:// or file://"
                " URL is wanted (HOPSGPU_ROOT or spark.hopsgpu.root)"
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def __truediv__(self, name: str) -> Lake:
        return Lake(f"{self.url}/{name}")

    @property
    def path(self) -> str:
        """The path within the file system."""
        return urlsplit(self.url).path or "/"

    @property
    def files(self) -> Any:
        """The fsspec file system."""
        parts = urlsplit(self.url)
        if parts.scheme == "file":
            from fsspec.implementations.local import LocalFileSystem

            return LocalFileSystem()
        from hdfs_native.fsspec import HdfsFileSystem, ViewfsFileSystem

        kind = HdfsFileSystem if parts.scheme == "hdfs" else ViewfsFileSystem
        # fsspec drops its cached instances in every forked child, and hdfs-native's then waits
        # there for threads that the fork left behind: a subprocess with a preexec_fn (PySpark's
        # launch of its JVM has one) would hang.
        return kind(host=parts.hostname, port=parts.port, skip_instance_cache=True)

    def make(self) -> None:
        """Creates the directory, with those above it."""
        with store_errors("create", self.url):
            self.files.makedirs(self.path, exist_ok=True)

    def exists(self) -> bool:
        with store_errors("look for", self.url):
            return bool(self.files.exists(self.path))

    def names(self) -> tuple[str, ...]:
        """Names of what lies in the directory, sorted; none where it does not exist."""
        with store_errors("list", self.url):
            try:
                entries = self.files.ls(self.path, detail=False)
            except FileNotFoundError:
                return ()
        return tuple(sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries))

    def walk(self) -> Iterator[tuple[str, int]]:
        """(path relative to here, bytes) of every file below."""
        pending = [""]
        while pending:
            below = pending.pop()
            with store_errors("list", self.url):
                entries = self.files.ls(f"{self.path}/{below}".rstrip("/"), detail=True)
            for entry in sorted(entries, key=lambda e: str(e["name"])):
                name = below + str(entry["name"]).rstrip("/").rpartition("/")[2]
                if entry["type"] == "directory":
                    pending.append(name + "/")
                else:
                    yield name, int(entry["size"])

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[BinaryIO]:
        """The file here, opened "rb" or "wb" (which replaces it)."""
        with store_errors("read" if mode == "rb" else "write", self.url):
            file = self.files.open(self.path, mode)
            try:
                yield cast(BinaryIO, file)
            finally:
                file.close()

    def read(self) -> bytes:
        """The whole content of the file here."""
        with self.open() as file:
            return file.read()

    def write(self, content: bytes) -> None:
        """Makes the file here, or replaces it."""
        with self.open("wb") as file:
            file.write(content)

    def upload(self, source: Path) -> None:
        """Streams a local file here."""
        with source.open("rb") as local, self.open("wb") as remote:
            shutil.copyfileobj(local, remote, _CHUNK)

    def download(self, target: Path) -> None:
        """Streams the file here to a local one."""
        with self.open() as remote, target.open("wb") as local:
            while chunk := remote.read(_CHUNK):
                local.write(chunk)

    def rename(self, target: Lake) -> bool:
        """Renames strictly: False, and nothing done, where the target exists already."""
        with store_errors("rename", self.url):
            if urlsplit(self.url).scheme == "file":
                return _rename_local(Path(self.path), Path(target.path))
            try:
                self.files.mv(self.path, target.path, overwrite=False)
            except FileExistsError:
                return False
        return True

    def remove(self) -> None:
        """Removes what is here, with everything below; nothing here is no error."""
        with store_errors("remove", self.url), contextlib.suppress(FileNotFoundError):
            self.files.rm(self.path, recursive=True)


def _rename_local(source: Path, target: Path) -> bool:
    # rename(2) replaces an empty directory: the claim by mkdir makes it strict.
    try:
        target.mkdir()
    except FileExistsError:
        return False
    source.rename(target)
    return True


@contextlib.contextmanager
def store_errors(doing: str, url: str) -> Iterator[None]:
    """What a file system raises becomes a StoreError that names the path and the reason."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StoreError(f"cannot {doing} {url}: {reason}") from error
