"""The interface of the file systems on which a lake can be."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, BinaryIO, Protocol

# Bytes that are read or written at a time: each call of a client has a cost, and larger blocks do
# not fit into the CPU caches.
BLOCK = 2**20


@dataclass(frozen=True)
class FileStatus:
    """The status of a file or directory.

    Attributes:
        name: name within its directory.
        modified: milliseconds since the epoch, by the file system's own clock.
        mode: permission bits.
        size: bytes of a file; 0 for a directory.
    """

    name: str
    modified: int
    owner: str
    mode: int
    is_directory: bool
    size: int = 0


class FileSystem(Protocol):
    """A file system, by calls on absolute paths, each bounded in time.

    The calls raise FileNotFoundError and FileExistsError, and otherwise errors that
    `error_messages.explain` knows.
    """

    def make(self, path: str) -> None:
        """Create a directory and its parents, unless they exist."""

    def set_mode(self, path: str, mode: int) -> None: ...

    def stat(self, path: str) -> FileStatus: ...

    def entries(self, path: str) -> tuple[FileStatus, ...]: ...

    def read(self, path: str) -> contextlib.AbstractContextManager[io.RawIOBase]:
        """Return a reader of a file's bytes, which can seek, as a context manager."""

    def blocks(self, path: str) -> Iterator[bytes]:
        """Return a file's bytes in order, in blocks of any size; faster than `read`."""

    def range(self, path: str, start: int, end: int | None) -> bytes:
        """Return the bytes from `start` to before `end`, or fewer at the end of the file.

        This takes fewer requests than `read`. The bytes are in memory at once.
        """

    def write(self, path: str, blocks: Iterable[bytes], *, should_replace: bool) -> None:
        """Create a file in a directory that exists.

        Args:
            should_replace: whether to replace an existing file, instead of a FileExistsError.
        """

    def append(self, path: str, content: bytes) -> None:
        """Append to an existing file."""

    def rename(self, source: str, target: str, *, should_replace: bool) -> None:
        """Rename a file or directory.

        Args:
            should_replace: whether to replace an existing file, atomically. Otherwise an existing
                file or directory, even an empty one, is a FileExistsError.
        """

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with its content, if it exists."""


class SizedReader(io.RawIOBase):
    """The base of readers of a file whose size is known; `_at` is the offset."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at


def read_blocks(file: IO[bytes] | io.RawIOBase) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block


def read_range(file: IO[bytes] | io.RawIOBase, start: int, end: int | None) -> bytes:
    """Return the bytes of `FileSystem.range`, from a reader."""
    file.seek(start)
    if end is None:
        return b"".join(read_blocks(file))
    blocks: list[bytes] = []
    missing = end - start
    while missing > 0 and (block := file.read(min(missing, BLOCK))):
        blocks.append(block)
        missing -= len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def empty(file: BinaryIO | io.FileIO) -> None:
    """Empty a local file for another attempt to write it.

    A file that is still empty is not truncated: ext4 writes truncated files to the disk when they
    are closed (mount option auto_da_alloc), which takes longer than the transfer.
    """
    if file.tell():
        file.seek(0)
        file.truncate()
