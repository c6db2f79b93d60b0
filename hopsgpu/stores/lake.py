"""A place on the lake: an fsspec file system and a path, with errors that say what to do."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from hopsgpu.errors import ConfigError, StoreError

_CHUNK = 4 * 2**20


# hdfs-native's own are 15 attempts with pauses of up to 15 s.
_QUICK = {
    "dfs.client.failover.max.attempts": "4",
    "dfs.client.failover.sleep.base.millis": "200",
    "dfs.client.failover.sleep.max.millis": "1000",
}
# What fsspec's and hdfs-native's handling of URLs cuts a path at.
UNFIT = re.compile(r"[#?;\x00-\x1f]")


@dataclass(frozen=True)
class Status:
    """What a file system says of a file or directory.

    Attributes:
        name: within its directory.
        modified: milliseconds since the epoch, by the file system's own clock.
        owner: the user whose it is.
        mode: permission bits.
        is_directory: whether it is one.
    """

    name: str
    modified: int
    owner: str
    mode: int
    is_directory: bool


def _status(info: Mapping[str, Any]) -> Status:
    name = str(info["name"]).rstrip("/").rpartition("/")[2]
    directory = info["type"] == "directory"
    if "mtime" in info:  # a local file's
        owner = _user_name(info["uid"])
        return Status(name, int(info["mtime"] * 1000), owner, info["mode"] & 0o7777, directory)
    return Status(name, info["modification_time"], info["owner"], info["permission"], directory)


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


@dataclass(frozen=True)
class Lake:
    """A directory or a file on a file system.

    Attributes:
        url: with its scheme, without a slash at the end.
        quick: gives up on a name node after some seconds, where others wait minutes for it.

    Raises:
        ConfigError: no absolute hdfs://, viewfs:// or file:// URL, or with `#`, `?` or `;` in it.
    """

    url: str
    quick: bool = False

    def __post_init__(self) -> None:
        scheme, _, path = self.url.partition("://")
        if scheme not in ("hdfs", "viewfs", "file") or "/" not in path or UNFIT.search(path):
            raise ConfigError(
                f"{self.url!r} is no place for runs and models: an absolute hdfs:// or file:// URL"
                " without '#', '?' and ';' is wanted (HOPSGPU_ROOT or spark.hopsgpu.root)"
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def __truediv__(self, name: str) -> Lake:
        below = Lake(f"{self.url}/{name}", self.quick)
        if "files" in self.__dict__:  # one client, where there is one, serves both
            below.__dict__["files"] = self.files
        return below

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def path(self) -> str:
        """The path within the file system."""
        return "/" + self.url.partition("://")[2].partition("/")[2]

    @functools.cached_property
    def files(self) -> Any:
        """The fsspec file system."""
        if self._scheme == "file":
            from fsspec.implementations.local import LocalFileSystem

            return LocalFileSystem()
        from hdfs_native.fsspec import HdfsFileSystem, ViewfsFileSystem

        kind = HdfsFileSystem if self._scheme == "hdfs" else ViewfsFileSystem
        host, _, port = self.url.partition("://")[2].partition("/")[0].partition(":")
        # fsspec drops its cached instances in every forked child, and hdfs-native's then waits
        # there for threads that the fork left behind: a subprocess with a preexec_fn (PySpark's
        # launch of its JVM has one) would hang.
        options = _QUICK if self.quick else {}
        return kind(
            host=host, port=int(port) if port else None, skip_instance_cache=True, **options
        )

    def make(self) -> None:
        """Creates the directory, with those above it."""
        with store_errors("create", self.url):
            self.files.makedirs(self.path, exist_ok=True)

    def share(self, mode: int) -> None:
        """Sets the permission bits of what is here; only its owner may."""
        with store_errors("change the permissions of", self.url):
            if self._scheme == "file":
                Path(self.path).chmod(mode)
            else:
                self.files.client.set_permission(self.path, mode)

    def stat(self) -> Status:
        """What the file system says of the file or directory here."""
        with store_errors("look at", self.url):
            return _status(self.files.info(self.path))

    def entries(self) -> tuple[Status, ...]:
        """All that lies in the directory."""
        with store_errors("list", self.url):
            return tuple(_status(entry) for entry in self.files.ls(self.path, detail=True))

    def names(self) -> tuple[str, ...]:
        """Names of what lies in the directory, sorted; none where it does not exist."""
        with store_errors("list", self.url):
            try:
                entries = self.files.ls(self.path, detail=False)
            except FileNotFoundError:
                return ()
        return tuple(sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries))

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[BinaryIO]:
        """The file here, opened "rb" or "wb" (which replaces it)."""
        doing = "read" if mode == "rb" else "write"
        with store_errors(doing, self.url):
            file = self.files.open(self.path, mode)
        try:
            yield cast(BinaryIO, file)
        finally:
            with store_errors(doing, self.url):
                file.close()

    def read(self) -> bytes:
        """The whole content of the file here."""
        with self.open() as file, store_errors("read", self.url):
            return file.read()

    def write(self, content: bytes) -> None:
        """Makes the file here, or replaces it."""
        with self.open("wb") as file, store_errors("write", self.url):
            file.write(content)

    def upload(self, source: Path) -> None:
        """Streams a local file here."""
        with source.open("rb") as local, self.open("wb") as remote:
            while chunk := local.read(_CHUNK):
                with store_errors("write", self.url):
                    remote.write(chunk)

    def download(self, target: Path) -> None:
        """Streams the file here to a local one."""
        with self.open() as remote, target.open("wb") as local:
            while True:
                with store_errors("read", self.url):
                    chunk = remote.read(_CHUNK)
                if not chunk:
                    return
                local.write(chunk)

    def rename(self, target: Lake) -> bool:
        """Renames strictly: False, and nothing done, where the target exists already."""
        with store_errors("rename", self.url):
            if self._scheme == "file":
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
    if not source.is_dir():
        # rename(2) replaces a file, and link(2) does not.
        try:
            os.link(source, target)
        except FileExistsError:
            return False
        source.unlink()
        return True
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
