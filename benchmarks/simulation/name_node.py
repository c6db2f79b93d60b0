"""A NameNode in memory: one directory of empty files, and how many operations it was asked for."""

from __future__ import annotations

import contextlib
import functools
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hopsgpu.storage.filesystem import FileStatus, FileSystem
from hopsgpu.storage.lake import LakePath

# dfs.ls.limit: a listing of more files takes several calls.
_FILES_OF_A_CALL = 1000


class NameNode:
    """The files of one directory.

    Args:
        clock: returns the time in seconds since the epoch.

    Attributes:
        operations: number of calls of its protocol, by their names in Hadoop's ClientProtocol.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._files: dict[str, FileStatus] = {}
        self.operations: Counter[str] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the files."""
        return tuple(self._files)

    def directory(self, user: str) -> LakePath:
        """Return the directory, for a user's client."""
        return _OfNameNode("hdfs://simulated/line", client=_Client(self, user))

    def entries(self) -> tuple[FileStatus, ...]:
        """Return the status of all files."""
        self.operations["getListing"] += max(-(-len(self._files) // _FILES_OF_A_CALL), 1)
        return tuple(self._files.values())

    def stat(self, name: str) -> FileStatus:
        """Return the status of a file."""
        self.operations["getFileInfo"] += 1
        return self._file(name)

    def write(self, name: str, user: str, *, should_replace: bool) -> None:
        """Create an empty file, for which no block is asked."""
        self.operations["create"] += 1
        if name in self._files and not should_replace:
            raise FileExistsError(name)
        self.operations["complete"] += 1
        self._files[name] = FileStatus(name, int(self._clock() * 1000), user, 0o644, False)

    def rename(self, name: str, target: str, *, should_replace: bool) -> None:
        """Rename a file; it keeps the time at which it was written."""
        self.operations["rename2"] += 1
        status = self._file(name)
        if target in self._files and not should_replace:
            raise FileExistsError(target)
        del self._files[name]
        self._files[target] = FileStatus(target, status.modified, status.owner, status.mode, False)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self.operations["delete"] += 1
        self._files.pop(name, None)

    def _file(self, name: str) -> FileStatus:
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name]


class _Client:
    """A user's client; it can do what the queue of gangs needs."""

    def __init__(self, node: NameNode, user: str) -> None:
        self._node = node
        self._user = user

    def make(self, path: str) -> None:
        raise NotImplementedError

    def set_mode(self, path: str, mode: int) -> None:
        raise NotImplementedError

    def stat(self, path: str) -> FileStatus:
        return self._node.stat(_name(path))

    def entries(self, path: str) -> tuple[FileStatus, ...]:
        return self._node.entries()

    def read(self, path: str) -> contextlib.AbstractContextManager[io.RawIOBase]:
        raise NotImplementedError

    def blocks(self, path: str) -> Iterator[bytes]:
        raise NotImplementedError

    def write(self, path: str, blocks: Iterable[bytes], *, should_replace: bool) -> None:
        if any(blocks):
            raise NotImplementedError("a file with content")
        self._node.write(_name(path), self._user, should_replace=should_replace)

    def append(self, path: str, content: bytes) -> None:
        raise NotImplementedError

    def rename(self, source: str, target: str, *, should_replace: bool) -> None:
        self._node.rename(_name(source), _name(target), should_replace=should_replace)

    def remove(self, path: str) -> None:
        self._node.remove(_name(path))


@dataclass(frozen=True)
class _OfNameNode(LakePath):
    """A place whose client is given."""

    client: FileSystem | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def files(self) -> FileSystem:
        if self.client is None:
            raise NotImplementedError("a place without a client")
        return self.client


def _name(path: str) -> str:
    return path.rpartition("/")[2]
