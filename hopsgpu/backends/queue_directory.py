"""The operations that a queue of gangs needs: `LakePath` has them, and Leases on Kubernetes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, Self, runtime_checkable

from hopsgpu.storage.filesystem import FileStatus


class GangQueueFile(Protocol):
    """A file that may exist in the directory of a queue. All methods may raise StoreError."""

    def stat(self) -> FileStatus: ...

    def write(self, content: bytes, /) -> None:
        """Create or renew the file; the content is always empty."""
        ...

    def rename(self, target: Self, /) -> bool:
        """Rename strictly: return False, and do nothing, if the target exists.

        The file keeps its time of modification. Only one of many calls with one target succeeds.
        """
        ...

    def remove(self) -> None:
        """Remove the file, if it exists."""
        ...


class GangQueueDirectory(Protocol):
    """The directory of a queue. Times of its files are by the clock of a server, in ms."""

    @property
    def url(self) -> str: ...

    def __truediv__(self, name: str, /) -> GangQueueFile: ...

    def entries(self) -> tuple[FileStatus, ...]:
        """Return the status of each file, as of one moment after the call began.

        Raises:
            StoreError: the kind is "absent" if the directory does not exist.
        """
        ...


class GangQueueRoot(Protocol):
    """The directory that has a directory for each cluster partition."""

    @property
    def url(self) -> str: ...

    @property
    def is_local(self) -> bool:
        """Return whether times are by this machine's clock."""
        ...

    def __truediv__(self, name: str, /) -> GangQueueDirectory: ...

    def entries(self) -> tuple[FileStatus, ...]:
        """Return the status of each partition's directory.

        A directory is modified when one of its files is.
        """
        ...


@runtime_checkable
class GangQueueHost(Protocol):
    """A cluster manager that can hold the queues of gangs itself."""

    def queue_root(self, partitions: Collection[str]) -> GangQueueRoot: ...
