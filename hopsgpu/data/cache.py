"""A cache of record batches on the local disk, whose pages are mapped, and released after use.

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

# The fraction of a disk that stays free: YARN stops using disks that are over 90 % full.
_FREE_FRACTION = 0.15
_PAGE = mmap.PAGESIZE
# Maximum number of record batches that wait to be written: the disk may be slower than the decoder.
_MAX_PENDING = 3
# The bytes that the kernel reads ahead of a reader that does not touch pages itself.
_READ_AHEAD = 24 * MIB
# A disk that takes longer than this to write some megabytes counts as hung.
_WRITE_SECONDS = 60.0


@dataclass(frozen=True)
class Chunk:
    """An Arrow record batch, and how to release its memory.

    Attributes:
        release: releases the pages of the batch after its use, so that they no longer count as
            memory. Reading the batch again is slower, but safe.
        name: unique name of a cached batch; None for a batch that is not from the cache.
    """

    batch: Any
    release: Callable[[], None]
    name: tuple[str, int] | None = None


def memory_chunk(batch: Any) -> Chunk:
    """Return a chunk whose memory is freed with the last reference to it."""
    return Chunk(batch, lambda: None)


def default_budget(directory: Path, ranks: int) -> int:
    """Return the bytes of the disk that each of `ranks` ranks may use."""
    usage = shutil.disk_usage(directory)
    return max(0, int(usage.free - _FREE_FRACTION * usage.total) // ranks)


class Cache:
    """A directory with files of record batches, which threads and processes may share.

    Args:
        directory: exists; its owner removes it.
        budget: the most bytes of all files together; other rows are not cached.
    """

    def __init__(self, directory: Path, budget: int) -> None:
        self._directory = directory
        self._budget = budget
        self._is_full = False
        # The checks that cached record batches, which do not change, have passed.
        self.checked: set[Hashable] = set()

    def is_cached(self, key: str) -> bool:
        return (self._directory / key).exists()

    def read(self, key: str, *, should_touch: bool = True) -> Iterator[Chunk] | None:
        """Return the record batches that are cached under the key, or None if there are none.

        Args:
            should_touch: whether to map the pages of a record batch before it is returned. If not,
                the kernel reads them ahead, and the code that uses the values maps them.
        """
        try:
            file = (self._directory / key).open("rb")
        except FileNotFoundError:
            return None
        with file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if should_touch:
                return _read_chunks(key, mapping, _touch(mapping))
            read_ahead = _ReadAhead(mapping, os.dup(file.fileno()))
        read_ahead(0, 0)
        return _read_chunks(key, mapping, read_ahead)

    @contextlib.contextmanager
    def write_batches(
        self, key: str, schema: Any, cache_writer: CacheWriter
    ) -> Iterator[Callable[[Any], None]]:
        """Yield a function that caches record batches under the key, unless the block raises.

        The batches can be read when `cache_writer` has ended, or its `wait_for` has returned. If
        the budget or the disk is too small, they are not cached, and no error is raised.
        """
        draft = None if self._is_full else self._draft(key)
        if draft is None:
            self._stop_caching()
            yield lambda _: None
            return
        file = _CacheFile(draft, schema, self._unused_bytes)
        try:
            yield lambda batch: cache_writer.put(functools.partial(file.write, batch))
            cache_writer.put(lambda: self._complete(file, self._directory / key), key)
        except BaseException:
            cache_writer.put(file.abandon)
            raise

    def _complete(self, file: _CacheFile, target: Path) -> None:
        if not file.try_rename(target):
            self._stop_caching()

    def _stop_caching(self) -> None:
        if not self._is_full:
            log.info(
                "caches no more rows in %s: the budget of %d bytes or the disk is exhausted, and"
                " later epochs read the other rows from the lake",
                self._directory,
                self._budget,
            )
        self._is_full = True

    def _draft(self, key: str) -> Path | None:
        """Return a new file; None if the disk is full or the directory was removed."""
        try:
            (self._directory / key).parent.mkdir(mode=0o700, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".", dir=self._directory)
        except OSError:
            return None
        os.close(descriptor)
        return Path(name)

    def _unused_bytes(self) -> int:
        unused = self._budget
        for entry in self._directory.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # another writer's draft, removed since
                unused -= entry.lstat().st_size
        return unused


class CacheWriter:
    """Writes cache files in a thread, while the reader of the rows continues.

    A context manager; its exit waits for the pending writes. Not thread-safe.
    """

    def __init__(self, write_seconds: float = _WRITE_SECONDS) -> None:
        self._write_seconds = write_seconds
        self._thread: WorkerThread | None = None
        self._is_hung = False
        # The keys of the pending work, in order.
        self._keys: deque[str | None] = deque()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *problem: object) -> None:
        self._await_pending(0)
        if self._thread is not None:
            self._thread.stop()

    def put(self, work: Callable[[], None], key: str | None = None) -> None:
        """Queue work that raises no exception; drop the work if the disk hangs.

        Args:
            key: key of the file that the work completes, if it completes one.
        """
        self._await_pending(_MAX_PENDING - 1)
        if self._is_hung:
            return
        if self._thread is None:
            self._thread = WorkerThread("hopsgpu-keep", lambda _: False)
        self._keys.append(key)
        self._thread.start(work)

    def wait_for(self, key: str) -> None:
        """Wait until the file of a key is complete, if it is being written."""
        if key in self._keys:
            self._await_pending(0)

    def _await_pending(self, pending: int) -> None:
        """Wait until at most `pending` calls are pending, or the disk hangs."""
        while self._thread is not None and len(self._keys) > pending and not self._is_hung:
            try:
                self._thread.next_result(self._write_seconds)
            except TimeoutError:  # no error: the lake has all the data
                text = "the disk hangs: a write took over %g s; caches no more"
                log.info(text, self._write_seconds)
                self._is_hung = True
            self._keys.popleft()


class _CacheFile:
    """A draft of a cache file. If the budget or the disk is exhausted, it drops all batches.

    Only the thread of a `CacheWriter` uses it.

    Args:
        draft: removed unless it is renamed.
        compute_limit: returns the most bytes of the file; called before the first batch.
    """

    def __init__(self, draft: Path, schema: Any, compute_limit: Callable[[], int]) -> None:
        self._draft = draft
        self._schema = schema
        self._compute_limit = compute_limit
        self._limit = 0
        self._file: Any = None
        self._writer: Any = None
        self._is_failed = False

    def write(self, batch: Any) -> None:
        if self._is_failed:
            return
        try:
            self._write(batch)
        except OSError:  # the disk is full, which is no error: the lake has all the data
            self._is_failed = True

    def _write(self, batch: Any) -> None:
        import pyarrow as pa

        if self._writer is None:
            self._limit = self._compute_limit()
            # Not "wb", which truncates the file: ext4 then writes a truncated file to the disk at
            # its close (`hopsgpu.storage.filesystem.empty`).
            self._file = pa.OSFile(str(self._draft), "ab")
            self._writer = pa.ipc.new_file(self._file, self._schema)
        self._check_limit(self._file.tell() + pa.ipc.get_record_batch_size(batch))
        self._writer.write_batch(batch)

    def try_rename(self, target: Path) -> bool:
        """Rename the file; return False if it is incomplete, or the directory was removed."""
        try:
            if self._is_failed or self._writer is None:
                return False
            self._writer.close()
            self._check_limit(self._file.tell())
            self._file.close()
            self._draft.rename(target)
        except OSError:  # the disk is full, or the directory was removed
            return False
        else:
            return True
        finally:
            self.abandon()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full or was removed
            if self._file is not None:
                self._file.close()
            self._draft.unlink(missing_ok=True)

    def _check_limit(self, size: int) -> None:
        if size > self._limit:
            raise OSError("over the budget")


def _read_chunks(
    key: str, mapping: mmap.mmap, prepare: Callable[[int, int], object]
) -> Iterator[Chunk]:
    import pyarrow as pa

    buffer = pa.py_buffer(mapping)
    file = pa.ipc.open_file(pa.BufferReader(buffer))
    begin = 0
    for number in range(file.num_record_batches):
        batch = file.get_batch(number)
        end = _end_address(batch, buffer.address + begin) - buffer.address
        prepare(begin, end)
        yield Chunk(batch, _release(mapping, begin, end), (key, number))
        begin = end


def _touch(mapping: mmap.mmap) -> Callable[[int, int], object]:
    """Return a function that maps the pages of a range without the GIL, for a read-ahead thread."""
    import numpy as np

    pages = np.frombuffer(mapping, np.uint8)
    return lambda begin, end: pages[begin:end:_PAGE].max(initial=0)


class _ReadAhead:
    """Makes the kernel read the bytes after a range of a mapped file, unless they are in memory.

    Args:
        descriptor: closed when this object is garbage-collected.
    """

    def __init__(self, mapping: mmap.mmap, descriptor: int) -> None:
        self._mapping = mapping
        self._descriptor = descriptor
        self._requested = 0
        weakref.finalize(self, os.close, descriptor)

    def __call__(self, begin: int, end: int) -> None:
        wanted = min(-(-(end + _READ_AHEAD) // _PAGE) * _PAGE, len(self._mapping))
        if wanted <= self._requested:
            return
        try:
            # Check first: a request takes longer than all other work on a record batch.
            os.preadv(self._descriptor, [bytearray(1)], wanted - 1, os.RWF_NOWAIT)
        # The last page is not in memory, or RWF_NOWAIT is unknown: to the file system, or to this
        # Python, whose libc (for example, conda's) then has no preadv2.
        except (OSError, AttributeError, NotImplementedError):
            self._mapping.madvise(mmap.MADV_WILLNEED, self._requested, wanted - self._requested)
        self._requested = wanted // _PAGE * _PAGE


def _end_address(batch: Any, begin: int) -> int:
    """Return the address after the batch's last byte; `begin` if the batch has no bytes."""
    for column in reversed(batch.columns):
        ends = [
            int(buffer.address + buffer.size)
            for buffer in column.buffers()
            # An empty buffer may be anywhere, even outside the file.
            if buffer is not None and buffer.size
        ]
        if ends:  # the buffers of earlier columns have lower addresses
            return max(ends)
    return begin


def _release(mapping: mmap.mmap, begin: int, end: int) -> Callable[[], None]:
    first = begin // _PAGE * _PAGE
    length = -(-(end - first) // _PAGE) * _PAGE

    def release() -> None:
        mapping.madvise(mmap.MADV_DONTNEED, first, min(length, len(mapping) - first))

    return release
