"""Record batches on the local disk, mapped in windows that are let go of after use.

Mapped pages count as memory of a YARN container, and of an address range that is advised away they
no longer do.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.stores.bounded import Hand

# Of a disk's size: YARN gives up on disks that are over 90 % full.
_KEPT_FREE = 0.15
_PAGE = mmap.PAGESIZE
# A disk that takes longer for some megabytes hangs.
_WRITE_SECONDS = 60.0


@dataclass(frozen=True)
class Chunk:
    """A record batch.

    Attributes:
        batch: Arrow's.
        release: to be called when the batch has been used: its pages no longer count as memory.
            Reading it again is slower, and safe.
    """

    batch: Any
    release: Callable[[], None]


def in_memory(batch: Any) -> Chunk:
    """A record batch that goes with its last reference."""
    return Chunk(batch, lambda: None)


def default_budget(directory: Path, ranks: int) -> int:
    """Bytes that each of so many ranks on this disk may take, so that YARN finds enough free."""
    usage = shutil.disk_usage(directory)
    return max(0, int(usage.free - _KEPT_FREE * usage.total) // ranks)


class Cache:
    """Files of record batches in a directory.

    Several threads and processes may use it at the same time.

    Args:
        directory: where they are; its owner makes and removes it.
        budget: bytes that its files may have in all; what does not fit is not kept.
    """

    def __init__(self, directory: Path, budget: int) -> None:
        self._directory = directory
        self._budget = budget
        self._full = False

    def read(self, key: str) -> Iterator[Chunk] | None:
        """The record batches kept under the key; None where there are none."""
        try:
            file = (self._directory / key).open("rb")
        except FileNotFoundError:
            return None
        with file:
            return _mapped(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @contextlib.contextmanager
    def keeping(self, key: str, schema: Any) -> Iterator[Callable[[Any], None]]:
        """Keeps the record batches that are given to the function, if the context ends well.

        Where the budget or the disk is too small, they are not kept, which is no error.
        """
        draft = None if self._full else self._draft(key)
        if draft is None:
            self._full = True
            yield lambda _: None
            return
        try:
            with _Writer(draft, schema, self._budget - self._used()) as writer:
                yield writer.write
                self._full = not writer.finish(self._directory / key)
        finally:
            draft.unlink(missing_ok=True)

    def _draft(self, key: str) -> Path | None:
        """A new file; None where the disk has no room, or the directory was removed."""
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
            with contextlib.suppress(FileNotFoundError):  # another's, not kept
                used += entry.lstat().st_size
        return used


class _Writer:
    """Writes a file of record batches, and gives up where they are too many.

    In a thread of its own, while the next batch is decoded.
    """

    def __init__(self, path: Path, schema: Any, room: int) -> None:
        import pyarrow as pa

        self._path = path
        self._file = pa.OSFile(str(path), "wb")
        self._room = room
        self._writer: Any = pa.ipc.new_file(self._file, schema)
        self._hand = Hand("hopsgpu-keep", lambda _: False)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *problem: object) -> None:
        try:
            self._settle()
        finally:
            self._hand.end()
            if self._hand.free:  # else a disk that hangs has it
                self._file.close()

    def write(self, batch: Any) -> None:
        self._settle()
        if self._writer is not None:
            self._hand.begin(functools.partial(self._write, batch))

    def _write(self, batch: Any) -> None:
        import pyarrow as pa

        self._check(self._file.tell() + pa.ipc.get_record_batch_size(batch))
        self._writer.write_batch(batch)

    def _settle(self) -> None:
        """Waits until what was given is written."""
        if self._writer is None or self._hand.free:
            return
        try:
            self._hand.end_of(_WRITE_SECONDS)
        except OSError:  # the disk is full, or hangs: the lake has it all
            self._writer = None

    def finish(self, target: Path) -> bool:
        """Renames the file; False where not all was written, or there is no directory any more."""
        self._settle()
        if self._writer is None:
            return False
        try:
            self._writer.close()
            self._check(self._file.tell())
            self._file.close()
            self._path.rename(target)
        except OSError:  # as above
            return False
        return True

    def _check(self, size: int) -> None:
        if size > self._room:
            raise OSError("over the budget")


def _mapped(mapping: mmap.mmap) -> Iterator[Chunk]:
    import numpy as np
    import pyarrow as pa

    whole = pa.py_buffer(mapping)
    pages = np.frombuffer(whole, np.uint8)
    file = pa.ipc.open_file(pa.BufferReader(whole))
    begin = 0
    for number in range(file.num_record_batches):
        batch = file.get_batch(number)
        end = _end(batch, whole.address + begin) - whole.address
        # Here, where it keeps nobody waiting, and not in the training; it leaves others the GIL.
        pages[begin:end:_PAGE].max(initial=0)
        yield Chunk(batch, _release(mapping, begin, end))
        begin = end


def _end(batch: Any, begin: int) -> int:
    """The address after the batch's last byte; where it has none, as it begins."""
    buffers = (buffer for column in batch.columns for buffer in column.buffers())
    # An empty one may be anywhere, and not in the file.
    return max(
        (int(b.address + b.size) for b in buffers if b is not None and b.size), default=begin
    )


def _release(mapping: mmap.mmap, begin: int, end: int) -> Callable[[], None]:
    first = begin // _PAGE * _PAGE
    length = -(-(end - first) // _PAGE) * _PAGE

    def release() -> None:
        mapping.madvise(mmap.MADV_DONTNEED, first, min(length, len(mapping) - first))

    return release
