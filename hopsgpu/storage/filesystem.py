"""What a lake asks of a file system."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

# What is read and written at once: a call of a client costs, and larger ones leave the caches.
BLOCK = 2**20


@dataclass(frozen=True)
class Status:
    """What a file system says of a file or directory.

    Attributes:
        name: within its directory.
        modified: milliseconds since the epoch, by the file system's own clock.
        owner: the user whose it is.
        mode: permission bits.
        is_directory: whether it is one.
        size: bytes of a file; 0 of a directory.
    """

    name: str
    modified: int
    owner: str
    mode: int
    is_directory: bool
    size: int = 0


class FileSystem(Protocol):
    """Calls on absolute paths, each bounded in time.

    They raise FileNotFoundError and FileExistsError, and otherwise what `troubles.explain` knows.
    """

    def make(self, path: str) -> None:
        """Creates a directory, with those above it; one that is there is none the worse."""

    def share(self, path: str, mode: int) -> None:
        """Sets permission bits."""

    def stat(self, path: str) -> Status:
        """Of a file or directory."""

    def entries(self, path: str) -> tuple[Status, ...]:
        """Of what lies in a directory."""

    def read(self, path: str) -> contextlib.AbstractContextManager[io.RawIOBase]:
        """A file's bytes: read and seek."""

    def blocks(self, path: str) -> Iterator[bytes]:
        """A file's bytes in a row, in pieces of any size: the fastest way."""

    def write(self, path: str, blocks: Iterable[bytes], *, replace: bool) -> None:
        """Makes a file of blocks, in a directory that is there.

        Args:
            replace: what is there already; otherwise that is a FileExistsError.
        """

    def append(self, path: str, content: bytes) -> None:
        """Adds to the end of a file that is there."""

    def rename(self, source: str, target: str, *, replace: bool) -> None:
        """Renames.

        Args:
            replace: a file that is there, at once; otherwise all that is there is a
                FileExistsError, an empty directory too.
        """

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with all below it; nothing there is no error."""


def empty(file: BinaryIO | io.FileIO) -> None:
    """Has a local file that is being written begin again.

    One that nothing was written to is left alone: a file that was cut to nothing, ext4 writes to
    the disk while it is closed (its mount option auto_da_alloc), which takes longer than all else.
    """
    if file.tell():
        file.seek(0)
        file.truncate()
