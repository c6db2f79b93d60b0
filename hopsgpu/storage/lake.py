"""A place on the lake: a file system and a path, with errors that say what to do."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, EXISTS, SAFE_MODE, UNREACHABLE, explain
from hopsgpu.storage.filesystem import BLOCK, FileSystem, Status, empty
from hopsgpu.storage.hdfs import Hdfs
from hopsgpu.storage.local import Local
from hopsgpu.storage.names import UNFIT
from hopsgpu.storage.retrying import RAISED, Patience
from hopsgpu.storage.root import below, trimmed
from hopsgpu.storage.webhdfs import WebHdfs

__all__ = ["UNFIT", "Lake", "Status", "is_draft"]

T = TypeVar("T")

_SCHEMES = ("hdfs", "viewfs", "webhdfs", "swebhdfs", "file")
_PATIENT_SECONDS = 60.0
_QUICK_SECONDS = 4.0
# What is written through `open` stays in memory up to here.
_SPOOLED = 8 * 2**20
_DRAFT = ".draft"


@dataclass(frozen=True)
class Lake:
    """A directory or a file on a file system.

    HDFS is asked as the user HADOOP_USER_NAME, or with the tokens of HADOOP_TOKEN_FILE_LOCATION.
    Where it is unreachable or in safe mode a call tries again for a minute. All methods raise
    StoreError, which names the path, what happened and what to do, and has its `kind`.

    Attributes:
        url: with its scheme, without a slash at the end, but for a file system's root.
        quick: gives up on a name node after some seconds, where others wait a minute for it.
        stop: set where nobody waits for its answers any more: calls that would try again, and
            those that begin, raise Cancelled.

    Raises:
        ConfigError: no absolute hdfs://, viewfs://, webhdfs://, swebhdfs:// or file:// URL, or
            with `#`, `?` or `;` in it; or a file:// URL of another machine.
    """

    url: str
    quick: bool = False
    stop: threading.Event | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        scheme, _, path = self.url.partition("://")
        if scheme not in _SCHEMES or "/" not in path or UNFIT.search(path):
            raise ConfigError(
                f"{self.url!r} cannot hold runs and models: must be an absolute hdfs:// or file://"
                " URL without '#', '?' and ';' (HOPSGPU_ROOT or spark.hopsgpu.root); viewfs,"
                " webhdfs and swebhdfs are accepted as well"
            )
        host, _, rest = path.partition("/")
        if scheme == "file" and host not in ("", "localhost"):
            raise ConfigError(
                f"{self.url!r}: what stands between file:// and the next slash is a host, and"
                f" file:// is this one: write file:///{host}/{rest}"
            )
        object.__setattr__(self, "url", trimmed(self.url))

    def __truediv__(self, name: str) -> Lake:
        there = replace(self, url=below(self.url, name))
        if "files" in self.__dict__:  # one client, where there is one, serves both
            there.__dict__["files"] = self.files
        return there

    @property
    def above(self) -> Lake:
        """The directory that it is in."""
        above = replace(self, url=f"{self.url.rpartition('/')[0]}/")
        above.__dict__["files"] = self.files
        return above

    @property
    def path(self) -> str:
        """The path within the file system."""
        return "/" + self.url.partition("://")[2].partition("/")[2]

    def with_client(self) -> Lake:
        """The same place, with its client made, which all that lies below shares from now on.

        For threads above all: hdfs-native's clients hand each other their connections to DataNodes,
        and one whose own client is gone by then answers nothing, for a minute.
        """
        self.files  # noqa: B018
        return self

    @functools.cached_property
    def files(self) -> FileSystem:
        """The file system's client, without retries; made anew in every process.

        It is kept here and not by a cache of the process: hdfs-native's threads do not survive a
        fork, and a forked child that drops a client waits for them for ever.
        """
        scheme, _, rest = self.url.partition("://")
        if scheme == "file":
            return Local()
        root = f"{scheme}://{rest.partition('/')[0]}"
        with store_errors("reach", root):
            if scheme in ("webhdfs", "swebhdfs"):
                return WebHdfs(root, quick=self.quick)
            return Hdfs(root, quick=self.quick)

    def make(self) -> None:
        """Creates the directory, with those above it."""
        self._try("create", lambda: self.files.make(self.path))

    def share(self, mode: int) -> None:
        """Sets the permission bits of what is here; only its owner may."""
        self._try("change the permissions of", lambda: self.files.share(self.path, mode))

    def stat(self) -> Status:
        """What the file system says of the file or directory here."""
        return self._try("look at", lambda: self.files.stat(self.path))

    def exists(self) -> bool:
        """Whether there is a file or a directory here."""
        return self._status() is not None

    def entries(self) -> tuple[Status, ...]:
        """All that lies in the directory."""
        return self._try("list", lambda: self.files.entries(self.path))

    def names(self, *, directories: bool = False) -> tuple[str, ...]:
        """Names of what lies in the directory, sorted; none where it does not exist.

        Args:
            directories: whether only those of directories.
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
        """The file here, opened "rb" or "wb".

        What is written comes here at the end of the block, and replaces what was here; not where
        the block ends with an exception.
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
        """The file here, opened for reading; whoever has it closes it."""
        held = contextlib.ExitStack()
        reading = self._try("read", lambda: held.enter_context(self.files.read(self.path)))
        return cast(BinaryIO, io.BufferedReader(_Told(reading, self.url, held), BLOCK))

    def read(self) -> bytes:
        """The whole content of the file here."""

        def attempt() -> bytes:
            with self.files.read(self.path) as file:
                return file.readall() or b""

        return self._try("read", attempt)

    def write(self, content: bytes) -> None:
        """Makes the file here, or replaces it; readers may see half of it meanwhile."""
        self._write(lambda: [content])

    def replace(self, content: bytes) -> None:
        """Makes the file here, or replaces it; readers see the old content or the new, whole.

        A draft beside it, `.NAME.xxxxxxxx.draft` (`is_draft`), becomes the file. A process that is
        killed meanwhile leaves it behind, and so does a lake that cannot be reached or is in safe
        mode.
        """
        self._replace(lambda draft: draft.write(content))

    def replace_with(self, source: Path) -> None:
        """Streams a local file here as `replace` does."""
        self._replace(lambda draft: draft.upload(source))

    def _replace(self, fill: Callable[[Lake], None]) -> None:
        name = self.url.rpartition("/")[2]
        draft = self.above / f".{name}.{uuid.uuid4().hex[:8]}{_DRAFT}"

        def rename(attempt: int) -> None:
            try:
                self.files.rename(draft.path, self.path, replace=True)
            except FileNotFoundError:
                if not attempt:  # an earlier attempt's answer may have been lost
                    raise

        try:
            fill(draft)
            self.patience()("replace", self.url, rename)
        except BaseException as error:
            # A removal would wait as long again for a lake that does not answer.
            if getattr(error, "kind", "") not in (UNREACHABLE, SAFE_MODE):
                with contextlib.suppress(StoreError):  # the first problem is the one to tell
                    draft.remove()
            raise

    def create(self, content: bytes = b"") -> bool:
        """Makes the file here; False, and nothing done, where one is there already.

        Also False where the name node made it and its answer was lost.
        """
        try:
            self._try("create", lambda: self.files.write(self.path, [content], replace=False))
        except StoreError as error:
            if error.kind == EXISTS:
                return False
            raise
        return True

    def append(self, content: bytes, at: int) -> int:
        """Adds what is missing to the file here, so that it ends with `content` from byte `at`.

        Whoever does not know whether it worked does it again. One writer at a time.

        Args:
            content: of the file, from byte `at` to its end.
            at: 0 and above; at most the file's present length.

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
                    f"cannot add to {self.url}: it has {length} bytes, and bytes {at} to {end} are"
                    " to be there",
                    DAMAGED,
                )
            missing = content[length - at :]
            if length == 0:
                self.files.write(self.path, [missing], replace=True)
            elif missing:
                self.files.append(self.path, missing)
            return end

        return self._try("add to", attempt)

    def upload(self, source: Path) -> None:
        """Streams a local file here."""

        def blocks() -> Iterator[bytes]:
            with source.open("rb", buffering=0) as file:
                while block := file.read(BLOCK):
                    yield block

        self._write(blocks)

    def download(self, target: Path) -> None:
        """Streams the file here to a local one."""
        with target.open("wb", buffering=0) as file:

            def attempt() -> None:
                empty(file)
                for block in self.files.blocks(self.path):
                    file.write(block)

            self._try("read", attempt)

    def rename(self, target: Lake) -> bool:
        """Renames strictly: False, and nothing done, where the target exists already."""

        def attempt(number: int) -> bool:
            try:
                self.files.rename(self.path, target.path, replace=False)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # An earlier attempt's answer may have been lost: what was here is there then.
                if not number or target._status() is None:
                    raise
            return True

        return self.patience()("rename", self.url, attempt)

    def remove(self) -> None:
        """Removes what is here, with everything below; nothing here is no error."""
        self._try("remove", lambda: self.files.remove(self.path))

    def _status(self) -> Status | None:
        try:
            return self.stat()
        except StoreError as error:
            if error.kind == ABSENT:
                return None
            raise

    def _length(self) -> int:
        try:
            return self.files.stat(self.path).size
        except FileNotFoundError:
            return 0

    def _write(self, blocks: Callable[[], Iterable[bytes]]) -> None:
        self._try("write", lambda: self.files.write(self.path, blocks(), replace=True))

    def patience(self, stop: threading.Event | None = None) -> Patience:
        """For how long a call here is tried again; not at all once `stop`, or ours, is set."""
        seconds = _QUICK_SECONDS if self.quick else _PATIENT_SECONDS
        return Patience(seconds, stop=stop or self.stop)

    def _try(self, doing: str, call: Callable[[], T]) -> T:
        return self.patience()(doing, self.url, lambda _: call())


def is_draft(name: str) -> bool:
    """Whether a file of that name is what `Lake.replace` makes files of, or left behind."""
    return name.startswith(".") and name.endswith(_DRAFT)


class _Told(io.RawIOBase):
    """A reader whose errors name the path.

    Args:
        reader: of the file at `url`.
        url: for the errors.
        held: closed with it.
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
    """What a file system raises becomes a StoreError that names the path and the reason."""
    try:
        yield
    except RAISED as error:
        trouble = explain(error)
        raise StoreError(f"cannot {doing} {url}: {trouble}", trouble.kind) from error
