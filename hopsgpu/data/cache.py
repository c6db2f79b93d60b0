"""A cache of record batches on the local disk, mapped in windows that are released after use.

Mapped pages count as memory of a YARN container, until madvise(2) releases their address range.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.storage.bounded_calls import WorkerThread
from hopsgpu.units import MIB

log = logging.getLogger(__name__)

# The part of a disk's size that stays free: YARN stops using disks that are over 90 % full.
_KEPT_FREE = 0.15
_PAGE = mmap.PAGESIZE
# Record batches that may wait to be written: the disk is not always as fast as the decoder.
_LATE = 3
# The bytes that the kernel reads ahead of a reader that does not touch pages itself.
_READ_AHEAD = 24 * MIB
# A disk that takes longer than this to write some megabytes hangs.
_WRITE_SECONDS = 60.0


@dataclass(frozen=True)
class Chunk:
    """A record batch, and how to release its memory.

    Attributes:
        batch: the Arrow record batch.
        release: to be called when the batch has been used: its pages then no longer count as
            memory. Reading the batch again is slower, but safe.
        name: name of the batch among all that the cache has; None for one that is not from it.
    """

    batch: Any
    release: Callable[[], None]
    name: tuple[str, int] | None = None


def memory_chunk(batch: Any) -> Chunk:
    """Return a chunk of a record batch whose memory is freed with the last reference to it."""
    return Chunk(batch, lambda: None)


def default_budget(directory: Path, ranks: int) -> int:
    """Return the bytes that each of the ranks on this disk may use, so that enough stays free."""
    usage = shutil.disk_usage(directory)
    return max(0, int(usage.free - _KEPT_FREE * usage.total) // ranks)


class Cache:
    """A directory with files of record batches.

    Several threads and processes may use it at the same time.

    Args:
        directory: the directory; its owner creates and removes it.
        budget: the most bytes of all files together; what does not fit is not cached.
    """

    def __init__(self, directory: Path, budget: int) -> None:
        self._directory = directory
        self._budget = budget
        self._full = False
        # What was checked of which record batches, which do not change.
        self.checked: set[Hashable] = set()

    def holds(self, key: str) -> bool:
        """Return whether record batches are cached under the key."""
        return (self._directory / key).exists()

    def read(self, key: str, *, touched: bool = True) -> Iterator[Chunk] | None:
        """Return the record batches that are cached under the key, or None if there are none.

        Args:
            key: the key.
            touched: whether the pages of a record batch are in memory when it is returned; else the
                kernel reads them ahead, and whoever uses the values maps them.
        """
        try:
            file = (self._directory / key).open("rb")
        except FileNotFoundError:
            return None
        with file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if touched:
                return _mapped(key, mapping, _touch(mapping))
            ahead = _ReadAhead(mapping, os.dup(file.fileno()))
        ahead(0, 0)
        return _mapped(key, mapping, ahead)

    @contextlib.contextmanager
    def keeping(
        self, key: str, schema: Any, scribe: CacheWriter
    ) -> Iterator[Callable[[Any], None]]:
        """Yield a function that caches record batches under the key, if the context ends well.

        They can be read once the scribe has ended, or its `wait_for` has returned. If the budget or
        the disk is too small, they are not cached, which is not an error.
        """
        draft = None if self._full else self._draft(key)
        if draft is None:
            self._stop_caching()
            yield lambda _: None
            return
        writer = _CacheFile(draft, schema, self._room)
        try:
            yield lambda batch: scribe.give(functools.partial(writer.write, batch))
            scribe.give(lambda: self._ended(writer, self._directory / key), key)
        except BaseException:
            scribe.give(writer.abandon)
            raise

    def _room(self) -> int:
        return self._budget - self._used()

    def _ended(self, writer: _CacheFile, target: Path) -> None:
        if not writer.end(target):
            self._stop_caching()

    def _stop_caching(self) -> None:
        if not self._full:
            log.info(
                "caches no more rows in %s: the budget of %d bytes or the disk is exhausted, and"
                " later epochs read the other rows from the lake",
                self._directory,
                self._budget,
            )
        self._full = True

    def _draft(self, key: str) -> Path | None:
        """Return a new file, or None if the disk has no room or the directory was removed."""
        try:
            (self._directory / key).parent.mkdir(mode=0o700, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".", dir=self._directory)
        except OSError:
            return None
        os.close(descriptor)
        return Path(name)

    def _used(self) -> int:
        used = 0
        for entry in self._directory.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # another writer's draft, removed since
                used += entry.lstat().st_size
        return used


class CacheWriter:
    """The writer of what one reader caches, in a thread of its own, while the reader goes on.

    A context manager, whose exit waits until all is written; for use in one thread.
    """

    def __init__(self) -> None:
        self._hand: WorkerThread | None = None
        self._hangs = False
        # The keys of the work that is under way, in its order.
        self._keys: deque[str | None] = deque()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *problem: object) -> None:
        self._settle(0)
        if self._hand is not None:
            self._hand.end()

    def give(self, work: Callable[[], None], key: str | None = None) -> None:
        """Have the thread do some work after earlier work; drop it if the disk hangs.

        Args:
            work: the work, which raises no exception.
            key: key of the file that the work completes.
        """
        self._settle(_LATE - 1)
        if self._hangs:
            return
        if self._hand is None:
            self._hand = WorkerThread("hopsgpu-keep", lambda _: False)
        self._keys.append(key)
        self._hand.begin(work)

    def wait_for(self, key: str) -> None:
        """Wait until the file of a key is complete, if it is being written."""
        if key in self._keys:
            self._settle(0)

    def _settle(self, late: int) -> None:
        """Wait until at most `late` calls are under way, or the disk hangs."""
        while self._hand is not None and len(self._keys) > late and not self._hangs:
            try:
                self._hand.end_of(_WRITE_SECONDS)
            except TimeoutError:  # no error: the lake has all the data
                log.info("the disk hangs: a write took over %g s; caches no more", _WRITE_SECONDS)
                self._hangs = True
            self._keys.popleft()


class _CacheFile:
    """The writer of a file of record batches; it gives up at the budget's end or on a full disk.

    Only the scribe's thread uses it.

    Args:
        draft: the file, which is removed unless it is renamed.
        schema: schema of the record batches.
        room: returns the bytes that the file may have; called before the first record batch.
    """

    def __init__(self, draft: Path, schema: Any, room: Callable[[], int]) -> None:
        self._draft = draft
        self._schema = schema
        self._room = room
        self._most = 0
        self._file: Any = None
        self._writer: Any = None
        self._failed = False

    def write(self, batch: Any) -> None:
        if self._failed:
            return
        try:
            self._write(batch)
        except OSError:  # the disk is full, which is no error: the lake has all the data
            self._failed = True

    def _write(self, batch: Any) -> None:
        import pyarrow as pa

        if self._writer is None:
            self._most = self._room()
            # Not "wb", which truncates the file: ext4 would then write it to the disk while it is
            # closed (`hopsgpu.storage.filesystem.empty`).
            self._file = pa.OSFile(str(self._draft), "ab")
            self._writer = pa.ipc.new_file(self._file, self._schema)
        self._check(self._file.tell() + pa.ipc.get_record_batch_size(batch))
        self._writer.write_batch(batch)

    def end(self, target: Path) -> bool:
        """Rename the file; return False if not all was written, or the directory is gone."""
        try:
            if self._failed or self._writer is None:
                return False
            self._writer.close()
            self._check(self._file.tell())
            self._file.close()
            self._draft.rename(target)
        except OSError:  # as above
            return False
        else:
            return True
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file, and remove it if it was not renamed."""
        with contextlib.suppress(OSError):  # the disk is full, or was taken away
            if self._file is not None:
                self._file.close()
            self._draft.unlink(missing_ok=True)

    def _check(self, size: int) -> None:
        if size > self._most:
            raise OSError("over the budget")


def _mapped(key: str, mapping: mmap.mmap, prepare: Callable[[int, int], object]) -> Iterator[Chunk]:
    import pyarrow as pa

    whole = pa.py_buffer(mapping)
    file = pa.ipc.open_file(pa.BufferReader(whole))
    begin = 0
    for number in range(file.num_record_batches):
        batch = file.get_batch(number)
        end = _end(batch, whole.address + begin) - whole.address
        prepare(begin, end)
        yield Chunk(batch, _release(mapping, begin, end), (key, number))
        begin = end


def _touch(mapping: mmap.mmap) -> Callable[[int, int], object]:
    """Return a function that reads the pages of a range.

    It is for a thread that reads ahead, where nobody waits; it releases the GIL.
    """
    import numpy as np

    pages = np.frombuffer(mapping, np.uint8)
    return lambda begin, end: pages[begin:end:_PAGE].max(initial=0)


class _ReadAhead:
    """Has the kernel read what follows a range of a file, unless it has it in memory.

    Args:
        mapping: the file.
        descriptor: the same; it is closed with this object.
    """

    def __init__(self, mapping: mmap.mmap, descriptor: int) -> None:
        self._mapping = mapping
        self._descriptor = descriptor
        self._begun = 0
        weakref.finalize(self, os.close, descriptor)

    def __call__(self, begin: int, end: int) -> None:
        wanted = min(-(-(end + _READ_AHEAD) // _PAGE) * _PAGE, len(self._mapping))
        if wanted <= self._begun:
            return
        try:
            # To ask for the pages takes longer than all else about a record batch.
            os.preadv(self._descriptor, [bytearray(1)], wanted - 1, os.RWF_NOWAIT)
        # The last page is not in memory, or the file system cannot tell; or this Python was built
        # for a libc that has no such call, as conda's are.
        except (OSError, AttributeError, NotImplementedError):
            self._mapping.madvise(mmap.MADV_WILLNEED, self._begun, wanted - self._begun)
        self._begun = wanted // _PAGE * _PAGE


def _end(batch: Any, begin: int) -> int:
    """Return the address after the batch's last byte, or `begin` if it has no bytes."""
    for column in reversed(batch.columns):
        ends = [
            int(buffer.address + buffer.size)
            for buffer in column.buffers()
            # An empty buffer may be anywhere, even outside the file.
            if buffer is not None and buffer.size
        ]
        if ends:  # those of earlier columns lie before
            return max(ends)
    return begin


def _release(mapping: mmap.mmap, begin: int, end: int) -> Callable[[], None]:
    first = begin // _PAGE * _PAGE
    length = -(-(end - first) // _PAGE) * _PAGE

    def release() -> None:
        mapping.madvise(mmap.MADV_DONTNEED, first, min(length, len(mapping) - first))

    return release
