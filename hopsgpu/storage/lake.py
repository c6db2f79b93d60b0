"""A path on the lake: its operations retry, and their errors say what to do."""

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

from hopsgpu.core.bounded_reads import MAX_RECORD_BYTES, check_size
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, EXISTS, SAFE_MODE, UNREACHABLE, explain
from hopsgpu.storage.filesystem import BLOCK, FileStatus, FileSystem, empty, read_blocks
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
_RETRY_SECONDS = 60.0
_FAIL_FAST_SECONDS = 4.0
# Content that is written through `open` stays in memory up to this size.
_SPOOLED = 8 * 2**20
DRAFT = ".draft"


@dataclass(frozen=True)
class LakePath:
    """The path of a directory or a file on the lake.

    The user on HDFS is HADOOP_USER_NAME, or the owner of the tokens in HADOOP_TOKEN_FILE_LOCATION.
    If HDFS is unreachable or in safe mode, a call retries for a minute. All methods raise
    StoreError, whose `kind` says what failed.

    An object store has neither renames, appends nor directories: `make` does nothing there.

    Attributes:
        url: URL without a slash at its end, except for a file system's root.
        should_fail_fast: whether calls give up on a NameNode after seconds instead of a minute.
        stop: set when nobody waits for the answers any more: calls that would retry or start then
            raise Cancelled.

    Raises:
        ConfigError: the scheme of the URL is not supported; or the URL is not absolute, has `#`,
            `?` or `;`, names no bucket, or is a file:// URL of another machine.
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
        child = replace(self, url=join_url(self.url, name))
        if "client" in self.__dict__:  # share the client, if there is one
            child.__dict__["client"] = self.client
        return child

    @property
    def parent(self) -> LakePath:
        parent = replace(self, url=f"{self.url.rpartition('/')[0]}/")
        parent.__dict__["client"] = self.client
        return parent

    @property
    def is_local(self) -> bool:
        """Return whether the path is on this machine, whose clock then gives the timestamps."""
        return self.url.startswith("file:")

    @property
    def is_object_store(self) -> bool:
        return self.url.partition("://")[0] in OBJECT_STORES

    def check_renames(self, use: str, setting: str) -> None:
        """Raise a ConfigError on an object store, which supports neither renames nor appends.

        Args:
            use: a plural noun for the content of this path, for the error.
            setting: the setting that names the path.
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
        return "/" + self.url.partition("://")[2].partition("/")[2]

    def with_client(self) -> LakePath:
        """Create the client, which all paths below then share; return this path.

        Threads should share a client: hdfs-native's clients reuse each other's connections to
        DataNodes, and a connection of a deleted client does not answer for a minute.
        """
        self.client  # noqa: B018
        return self

    @functools.cached_property
    def client(self) -> FileSystem:
        """Return the file system's client, which does not retry; every process creates its own.

        There is no cache of clients in the process: hdfs-native's threads do not survive a fork,
        and a forked there that deletes a client waits for these threads forever.
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
        """Create the directory and its parents."""
        self._try("create", lambda: self.client.make(self.path))

    def make_writable(self) -> None:
        """Create the directory. On an object store, check that files can be created and removed.

        `make` does not find a missing or read-only bucket there.
        """
        self.make()
        if self.is_object_store:
            (self / f".{uuid.uuid4().hex}{DRAFT}").check_create()

    def check_create(self, content: bytes = b"") -> None:
        """Check that this file, whose name nobody else uses, can be created and removed."""
        try:
            self.create(content)
            self.remove()
        except StoreError as error:
            # A file system that did not answer for a minute would take another minute.
            if error.kind not in (UNREACHABLE, SAFE_MODE):
                with contextlib.suppress(StoreError):  # raise the first error, with its reason
                    self.remove()
            raise

    def set_mode(self, mode: int) -> None:
        self._try("change the permissions of", lambda: self.client.set_mode(self.path, mode))

    def stat(self) -> FileStatus:
        return self._try("get the status of", lambda: self.client.stat(self.path))

    def owner(self) -> str:
        """Return the owner of a file of this process, which is the process's user on the lake.

        An object store has no owners: there it is HADOOP_USER_NAME or this machine's user.
        """
        if self.is_object_store:
            return os.environ.get("HADOOP_USER_NAME") or own_name()
        return self.stat().owner

    def user(self) -> str:
        """Return this process's user on the lake: the owner of a file that it creates here."""
        probe = self / f".{uuid.uuid4().hex}{DRAFT}"
        probe.create()
        user = probe.owner()
        probe.remove()
        return user

    def exists(self) -> bool:
        return self._status() is not None

    def entries(self) -> tuple[FileStatus, ...]:
        return self._try("list", lambda: self.client.entries(self.path))

    def names(self, *, only_directories: bool = False) -> tuple[str, ...]:
        """Return the sorted names of the entries; none if the directory does not exist."""
        try:
            entries = self.entries()
        except StoreError as error:
            if error.kind == ABSENT:
                return ()
            raise
        return tuple(sorted(e.name for e in entries if e.is_directory or not only_directories))

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[BinaryIO]:
        """Yield the file, opened "rb" or "wb".

        Written content replaces the file at the end of the block, unless the block raises.
        """
        if mode == "rb":
            with self.reader() as file:
                yield file
            return
        with tempfile.SpooledTemporaryFile(_SPOOLED) as draft:
            yield cast(BinaryIO, draft)

            def blocks() -> Iterator[bytes]:
                draft.seek(0)
                return read_blocks(draft)

            self._write(blocks)

    def reader(self) -> BinaryIO:
        """Return the file, opened for reading; the caller closes it."""
        stack = contextlib.ExitStack()
        reader = self._try("read", lambda: stack.enter_context(self.client.read(self.path)))
        return cast(BinaryIO, io.BufferedReader(_NamedReader(reader, self.url, stack), BLOCK))

    def read(self, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
        """Return the content of the file; more than `max_bytes` is an error of kind "damaged".

        Another user may have written the file, so there is no read without a bound.
        """

        def attempt() -> bytes:
            with self.client.read(self.path) as file:
                return io.BufferedReader(file).read(max_bytes + 1)

        content = self._try("read", attempt)
        check_size(self.url, len(content), max_bytes)
        return content

    def range(self, start: int, end: int | None) -> bytes:
        """Return the bytes from `start` to before `end`, or fewer at the end of the file."""
        return self._try("read", lambda: self.client.range(self.path, start, end))

    def write(self, content: bytes) -> None:
        """Create or replace the file. Readers may see a part of the new content."""
        self._write(lambda: [content])

    def replace(self, content: bytes) -> None:
        """Create or replace the file atomically: readers see either the old or the new content.

        A draft in the same directory, `.NAME.xxxxxxxx.draft` (`is_draft`), is renamed to the file.
        If the process is killed, or the lake is unreachable or in safe mode, the draft remains. On
        an object store there is no draft.
        """
        self._replace(lambda draft: draft.write(content))

    def replace_with(self, source: Path) -> None:
        """Stream a local file here, atomically as in `replace`."""
        self._replace(lambda draft: draft.upload(source))

    def _replace(self, fill: Callable[[LakePath], None]) -> None:
        if self.is_object_store:  # writes are atomic there
            fill(self)
            return
        name = self.url.rpartition("/")[2]
        draft = self.parent / f".{name}.{uuid.uuid4().hex[:8]}{DRAFT}"

        def rename(attempt: int) -> None:
            try:
                self.client.rename(draft.path, self.path, should_replace=True)
            except FileNotFoundError:
                if not attempt:  # in a retry, the answer to an earlier attempt may have been lost
                    raise

        try:
            fill(draft)
            self.retry_limits()("replace", self.url, rename)
        except BaseException as error:
            # If the lake does not answer, a removal would take another minute.
            if getattr(error, "kind", "") not in (UNREACHABLE, SAFE_MODE):
                with contextlib.suppress(StoreError):  # raise the first error
                    draft.remove()
            raise

    def create(self, content: bytes = b"") -> bool:
        """Create the file; return False, and do nothing, if the file exists.

        The result is also False if the NameNode created the file and its answer was lost.
        """
        try:
            self._try(
                "create", lambda: self.client.write(self.path, [content], should_replace=False)
            )
        except StoreError as error:
            if error.kind == EXISTS:
                return False
            raise
        return True

    def append(self, content: bytes, at: int) -> int:
        """Append the missing bytes, so that the file ends with `content` from byte `at`.

        A repeated call does no harm. There must be only one writer at a time.

        Args:
            content: content of the file from byte `at` to its end.
            at: at most the file's present length.

        Returns:
            The file's length.

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
                self.client.write(self.path, [missing], should_replace=True)
            elif missing:
                self.client.append(self.path, missing)
            return end

        return self._try("append to", attempt)

    def upload(self, source: Path) -> None:
        def blocks() -> Iterator[bytes]:
            with source.open("rb", buffering=0) as file:
                yield from read_blocks(file)

        self._write(blocks)

    def download(self, target: Path) -> None:
        with target.open("wb", buffering=0) as file:

            def attempt() -> None:
                empty(file)
                for block in self.client.blocks(self.path):
                    file.write(block)

            self._try("read", attempt)

    def rename(self, target: LakePath) -> bool:
        """Rename strictly: return False, and do nothing, if the target exists."""

        def attempt(number: int) -> bool:
            try:
                self.client.rename(self.path, target.path, should_replace=False)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # If the answer to an earlier attempt was lost, the target has been renamed.
                if not number or target._status() is None:
                    raise
            return True

        return self.retry_limits()("rename", self.url, attempt)

    def remove(self) -> None:
        """Remove the file, or the directory with its content, if it exists."""
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
        self._try("write", lambda: self.client.write(self.path, blocks(), should_replace=True))

    def retry_limits(self, stop: threading.Event | None = None) -> RetryLimits:
        """Return the limits of retries, which `stop`, or this path's own event, ends."""
        seconds = _FAIL_FAST_SECONDS if self.should_fail_fast else _RETRY_SECONDS
        return RetryLimits(seconds, stop=stop or self.stop)

    def _try(self, doing: str, call: Callable[[], T]) -> T:
        return self.retry_limits()(doing, self.url, lambda _: call())


def is_draft(name: str) -> bool:
    """Return whether a file is a current or abandoned draft of `LakePath.replace`, by its name."""
    return name.startswith(".") and name.endswith(DRAFT)


class _NamedReader(io.RawIOBase):
    """A reader whose errors name the URL; its end closes the stack."""

    def __init__(self, reader: io.RawIOBase, url: str, stack: contextlib.ExitStack) -> None:
        self._reader = reader
        self._url = url
        self._stack = stack

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
        self._stack.close()


@contextlib.contextmanager
def store_errors(doing: str, url: str) -> Iterator[None]:
    """Turn the errors of a file system into a StoreError with the URL and the reason."""
    try:
        yield
    except FILE_SYSTEM_ERRORS as error:
        meaning = explain(error)
        raise StoreError(f"cannot {doing} {url}: {meaning}", meaning.kind) from error
