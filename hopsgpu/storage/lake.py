"""A place on the lake: a file system and a path, with errors that say what to do."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, EXISTS, SAFE_MODE, UNREACHABLE, explain
from hopsgpu.storage.filesystem import BLOCK, FileStatus, FileSystem, empty
from hopsgpu.storage.hdfs import Hdfs
from hopsgpu.storage.identity import own_name
from hopsgpu.storage.local import Local
from hopsgpu.storage.names import UNSAFE_CHARACTERS
from hopsgpu.storage.object_store import SCHEMES as OBJECT_STORES
from hopsgpu.storage.object_store import ObjectStore
from hopsgpu.storage.retrying import FILE_SYSTEM_ERRORS, RetryLimits
from hopsgpu.storage.root import join_url, normalize_url
from hopsgpu.storage.webhdfs import WebHdfs

__all__ = ["UNSAFE_CHARACTERS", "LakePath", "FileStatus", "is_draft"]

T = TypeVar("T")

_SCHEMES = ("hdfs", "viewfs", "webhdfs", "swebhdfs", "file", *OBJECT_STORES)
_PATIENT_SECONDS = 60.0
_QUICK_SECONDS = 4.0
# Content that is written through `open` stays in memory up to this size.
_SPOOLED = 8 * 2**20
DRAFT = ".draft"


@dataclass(frozen=True)
class LakePath:
    """A directory or a file on a file system.

    HDFS is accessed as the user HADOOP_USER_NAME, or with the tokens of HADOOP_TOKEN_FILE_LOCATION.
    If it is unreachable or in safe mode, a call tries again for a minute. All methods raise
    StoreError, which names the path, what happened and what to do, and has its `kind`.

    An object store has no rename, does not append, and has no directories: `make` does nothing
    there, and a file can be written wherever there is none.

    Attributes:
        url: URL with its scheme, without a slash at the end, except for a file system's root.
        should_fail_fast: whether calls give up on a NameNode after seconds instead of a minute.
        stop: set when nobody waits for the answers any more: calls that would try again, and calls
            that begin, then raise Cancelled.

    Raises:
        ConfigError: the URL is not an absolute hdfs://, viewfs://, webhdfs://, swebhdfs://, s3://,
            s3a://, gs://, abfss:// or file:// URL, has `#`, `?` or `;` in it, names no bucket, or
            is a file:// URL of another machine.
    """

    url: str
    should_fail_fast: bool = False
    stop: threading.Event | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        scheme, _, path = self.url.partition("://")
        if scheme in OBJECT_STORES and path and "/" not in path:
            path = f"{path}/"  # the bucket itself
        if scheme not in _SCHEMES or "/" not in path or UNSAFE_CHARACTERS.search(path):
            raise ConfigError(
                f"{self.url!r} cannot hold runs and models: must be an absolute hdfs:// or file://"
                " URL without '#', '?' and ';' (HOPSGPU_ROOT or spark.hopsgpu.root); viewfs,"
                " webhdfs, swebhdfs, s3, s3a, gs and abfss are accepted as well"
            )
        host, _, rest = path.partition("/")
        if scheme == "file" and host not in ("", "localhost"):
            raise ConfigError(
                f"{self.url!r} names the host {host!r}, but a file:// URL is a path on this"
                f" machine: write file:///{host}/{rest}"
            )
        if scheme in OBJECT_STORES and not host:
            raise ConfigError(
                f"{self.url!r} names no bucket: write {scheme}://bucket/{rest.lstrip('/')}"
            )
        object.__setattr__(self, "url", normalize_url(f"{scheme}://{path}"))

    def __truediv__(self, name: str) -> LakePath:
        there = replace(self, url=join_url(self.url, name))
        if "client" in self.__dict__:  # if there is a client, it serves both
            there.__dict__["client"] = self.client
        return there

    @property
    def parent(self) -> LakePath:
        """Return the directory that this place is in."""
        parent = replace(self, url=f"{self.url.rpartition('/')[0]}/")
        parent.__dict__["client"] = self.client
        return parent

    @property
    def is_local(self) -> bool:
        """Return whether it is on this machine, whose clock is that of the files."""
        return self.url.startswith("file:")

    @property
    def is_object_store(self) -> bool:
        """Return whether it is on an object store, which has no rename."""
        return self.url.partition("://")[0] in OBJECT_STORES

    def check_renames(self, use: str, setting: str) -> None:
        """Check that a use that needs renames and appends may be here.

        Args:
            use: what would be here, for the error: a plural.
            setting: the setting that names the place.

        Raises:
            ConfigError: this is on an object store, which has neither.
        """
        if self.is_object_store:
            raise ConfigError(
                f"{self.url!r} is on an object store, which has no rename and does not append to"
                f" files: {use} must be on HDFS (hdfs://), or in a directory that all nodes see"
                f" (file://): set {setting}. Runs, checkpoints, models, and Parquet for data= may"
                " be on an object store"
            )

    @property
    def path(self) -> str:
        """Return the path within the file system."""
        return "/" + self.url.partition("://")[2].partition("/")[2]

    def with_client(self) -> LakePath:
        """Return this place with its client made, which all places below it share from now on.

        This is for threads above all: hdfs-native's clients hand each other their connections to
        DataNodes, and a connection whose own client is gone answers nothing, for a minute.
        """
        self.client  # noqa: B018
        return self

    @functools.cached_property
    def client(self) -> FileSystem:
        """Return the file system's client, which does not retry; every process makes its own.

        The client is kept here and not in a cache of the process: hdfs-native's threads do not
        survive a fork, and a forked child that drops a client waits for them forever.
        """
        scheme, _, rest = self.url.partition("://")
        if scheme == "file":
            return Local()
        root = f"{scheme}://{rest.partition('/')[0]}"
        with store_errors("reach", root):
            if scheme in ("webhdfs", "swebhdfs"):
                return WebHdfs(root, should_fail_fast=self.should_fail_fast)
            if self.is_object_store:
                return ObjectStore(root, should_fail_fast=self.should_fail_fast)
            return Hdfs(root, should_fail_fast=self.should_fail_fast)

    def make(self) -> None:
        """Create the directory, and those above it."""
        self._try("create", lambda: self.client.make(self.path))

    def make_writable(self) -> None:
        """Create the directory, and check that files can be created in it and removed.

        On an object store, where a directory is there with its first file, a file is created and
        removed: nothing else would tell that there is no such bucket, or that it is read-only.

        Raises:
            StoreError: the store refuses; the message says why.
        """
        self.make()
        if self.is_object_store:
            (self / f".{uuid.uuid4().hex}{DRAFT}").try_create()

    def try_create(self, content: bytes = b"") -> None:
        """Create the file here and remove it again; its name must be one that nobody else uses.

        Args:
            content: of the file.

        Raises:
            StoreError: the store refuses; the message says why.
        """
        try:
            self.create(content)
            self.remove()
        except StoreError as error:
            # One that did not answer for a minute is not asked again.
            if error.kind not in (UNREACHABLE, SAFE_MODE):
                with contextlib.suppress(StoreError):  # the first error is raised, with its reason
                    self.remove()
            raise

    def set_mode(self, mode: int) -> None:
        """Set the permission bits of what is here; only its owner may."""
        self._try("change the permissions of", lambda: self.client.set_mode(self.path, mode))

    def stat(self) -> FileStatus:
        """Return the status of the file or directory here."""
        return self._try("get the status of", lambda: self.client.stat(self.path))

    def owner(self) -> str:
        """Return the owner of what is here, which this process has put here.

        That is the user as whom the lake knows this process. An object store knows none: there it
        is HADOOP_USER_NAME, or the user who runs this process.
        """
        if self.is_object_store:
            return os.environ.get("HADOOP_USER_NAME") or own_name()
        return self.stat().owner

    def exists(self) -> bool:
        """Return whether there is a file or a directory here."""
        return self._status() is not None

    def entries(self) -> tuple[FileStatus, ...]:
        """Return the status of all files and directories in the directory."""
        return self._try("list", lambda: self.client.entries(self.path))

    def names(self, *, directories: bool = False) -> tuple[str, ...]:
        """Return the names of what is in the directory, sorted; none if it does not exist.

        Args:
            directories: whether to return only the names of directories.
        """
        try:
            entries = self.entries()
        except StoreError as error:
            if error.kind == ABSENT:
                return ()
            raise
        return tuple(sorted(e.name for e in entries if e.is_directory or not directories))

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[BinaryIO]:
        """Yield the file here, opened "rb" or "wb".

        What is written comes here at the end of the block, and replaces what was here; if the block
        ends with an exception, nothing is written.
        """
        if mode == "rb":
            with self.reader() as file:
                yield file
            return
        with tempfile.SpooledTemporaryFile(_SPOOLED) as draft:
            yield cast(BinaryIO, draft)

            def blocks() -> Iterator[bytes]:
                draft.seek(0)
                while block := draft.read(BLOCK):
                    yield block

            self._write(blocks)

    def reader(self) -> BinaryIO:
        """Return the file here, opened for reading; the caller closes it."""
        held = contextlib.ExitStack()
        reading = self._try("read", lambda: held.enter_context(self.client.read(self.path)))
        return cast(BinaryIO, io.BufferedReader(_NamedReader(reading, self.url, held), BLOCK))

    def read(self, most: int | None = None) -> bytes:
        """Return the whole content of the file here.

        Args:
            most: how many bytes the file may have; a larger one is "damaged". None for any number.
        """

        def attempt() -> bytes:
            with self.client.read(self.path) as file:
                if most is None:
                    return file.readall() or b""
                return io.BufferedReader(file).read(most + 1)

        content = self._try("read", attempt)
        if most is not None and len(content) > most:
            raise StoreError(f"{self.url} has more than {most} bytes, and was not read", DAMAGED)
        return content

    def write(self, content: bytes) -> None:
        """Create or replace the file here; readers may see half of it meanwhile."""
        self._write(lambda: [content])

    def replace(self, content: bytes) -> None:
        """Create or replace the file here; readers see either the old or the new content, whole.

        A draft beside it, `.NAME.xxxxxxxx.draft` (`is_draft`), is renamed to the file. The draft is
        left behind if the process is killed meanwhile, or if the lake cannot be reached or is in
        safe mode. On an object store there is no draft.
        """
        self._replace(lambda draft: draft.write(content))

    def replace_with(self, source: Path) -> None:
        """Stream a local file here, as `replace` does."""
        self._replace(lambda draft: draft.upload(source))

    def _replace(self, fill: Callable[[LakePath], None]) -> None:
        if self.is_object_store:  # where a write is whole by itself
            fill(self)
            return
        name = self.url.rpartition("/")[2]
        draft = self.parent / f".{name}.{uuid.uuid4().hex[:8]}{DRAFT}"

        def rename(attempt: int) -> None:
            try:
                self.client.rename(draft.path, self.path, replace=True)
            except FileNotFoundError:
                if not attempt:  # an earlier attempt's answer may have been lost
                    raise

        try:
            fill(draft)
            self.retry_limits()("replace", self.url, rename)
        except BaseException as error:
            # If the lake does not answer, a removal would wait as long again.
            if getattr(error, "kind", "") not in (UNREACHABLE, SAFE_MODE):
                with contextlib.suppress(StoreError):  # the first error is the one to report
                    draft.remove()
            raise

    def create(self, content: bytes = b"") -> bool:
        """Create the file here; return False, and do nothing, if there is one already.

        It also returns False if the NameNode created the file and its answer was lost.
        """
        try:
            self._try("create", lambda: self.client.write(self.path, [content], replace=False))
        except StoreError as error:
            if error.kind == EXISTS:
                return False
            raise
        return True

    def append(self, content: bytes, at: int) -> int:
        """Add what is missing to the file here, so that it ends with `content` from byte `at`.

        A caller that does not know whether a call worked repeats it. Only one writer at a time.

        Args:
            content: content of the file from byte `at` to its end.
            at: 0 or above; at most the file's present length.

        Returns:
            The file's length: `at + len(content)`.

        Raises:
            StoreError: the file ends before `at`, or is longer already (kind "damaged").
        """
        end = at + len(content)

        def attempt() -> int:
            length = self._length()
            if not at <= length <= end:
                raise StoreError(
                    f"cannot append to {self.url}: expected {at} to {end} bytes, found {length}",
                    DAMAGED,
                )
            missing = content[length - at :]
            if length == 0:
                self.client.write(self.path, [missing], replace=True)
            elif missing:
                self.client.append(self.path, missing)
            return end

        return self._try("append to", attempt)

    def upload(self, source: Path) -> None:
        """Stream a local file here."""

        def blocks() -> Iterator[bytes]:
            with source.open("rb", buffering=0) as file:
                while block := file.read(BLOCK):
                    yield block

        self._write(blocks)

    def download(self, target: Path) -> None:
        """Stream the file here to a local file."""
        with target.open("wb", buffering=0) as file:

            def attempt() -> None:
                empty(file)
                for block in self.client.blocks(self.path):
                    file.write(block)

            self._try("read", attempt)

    def rename(self, target: LakePath) -> bool:
        """Rename strictly: return False, and do nothing, if the target exists already."""

        def attempt(number: int) -> bool:
            try:
                self.client.rename(self.path, target.path, replace=False)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # An earlier attempt's answer may have been lost; the target then has what was here.
                if not number or target._status() is None:
                    raise
            return True

        return self.retry_limits()("rename", self.url, attempt)

    def remove(self) -> None:
        """Remove what is here, with everything below; it is no error if nothing is here."""
        self._try("remove", lambda: self.client.remove(self.path))

    def _status(self) -> FileStatus | None:
        try:
            return self.stat()
        except StoreError as error:
            if error.kind == ABSENT:
                return None
            raise

    def _length(self) -> int:
        try:
            return self.client.stat(self.path).size
        except FileNotFoundError:
            return 0

    def _write(self, blocks: Callable[[], Iterable[bytes]]) -> None:
        self._try("write", lambda: self.client.write(self.path, blocks(), replace=True))

    def retry_limits(self, stop: threading.Event | None = None) -> RetryLimits:
        """Return how long a call here is tried again: not at all once a stop event is set.

        Args:
            stop: the event; by default the one of this lake.
        """
        seconds = _QUICK_SECONDS if self.should_fail_fast else _PATIENT_SECONDS
        return RetryLimits(seconds, stop=stop or self.stop)

    def _try(self, doing: str, call: Callable[[], T]) -> T:
        return self.retry_limits()(doing, self.url, lambda _: call())


def is_draft(name: str) -> bool:
    """Return whether a file name is that of a draft of `LakePath.replace`, in use or left."""
    return name.startswith(".") and name.endswith(DRAFT)


class _NamedReader(io.RawIOBase):
    """A reader whose errors name the path.

    Args:
        reader: reader of the file at `url`.
        url: URL for the errors.
        held: what is closed with the reader.
    """

    def __init__(self, reader: io.RawIOBase, url: str, held: contextlib.ExitStack) -> None:
        self._reader = reader
        self._url = url
        self._held = held

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._reader.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with store_errors("read", self._url):
            return self._reader.seek(offset, whence)

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        with store_errors("read", self._url):
            return self._reader.readinto(buffer) or 0

    def close(self) -> None:
        super().close()
        self._held.close()


@contextlib.contextmanager
def store_errors(doing: str, url: str) -> Iterator[None]:
    """Turn what a file system raises into a StoreError that names the path and the reason."""
    try:
        yield
    except FILE_SYSTEM_ERRORS as error:
        trouble = explain(error)
        raise StoreError(f"cannot {doing} {url}: {trouble}", trouble.kind) from error
