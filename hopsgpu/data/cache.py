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
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.storage.bounded_calls import Hand

# Of a disk's size: YARN gives up on disks that are over 90 % full.
_KEPT_FREE = 0.15
_PAGE = mmap.PAGESIZE
# Record batches that may wait to be written: the disk is not always as fast as what decodes.
_LATE = 3
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
    def keeping(self, key: str, schema: Any, scribe: Scribe) -> Iterator[Callable[[Any], None]]:
        """Keeps the record batches that are given to the function, if the context ends well.

        They are there once the scribe has ended, or was asked for them. Where the budget or the
        disk is too small, they are not kept, which is no error.
        """
        draft = None if self._full else self._draft(key)
        if draft is None:
            self._full = True
            yield lambda _: None
            return
        writer = _Writer(draft, schema, self._room)
        try:
            yield lambda batch: scribe.give(functools.partial(writer.write, batch))
            scribe.give(lambda: self._ended(writer, self._directory / key), key)
        except BaseException:
            scribe.give(writer.abandon)
            raise

    def _room(self) -> int:
        return self._budget - self._used()

    def _ended(self, writer: _Writer, target: Path) -> None:
        if not writer.end(target):
            self._full = True

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


class Scribe:
    """Writes what one reader keeps, in a thread: some things while the next ones are made.

    A context manager, at whose end all is written; of use in one thread.
    """

    def __init__(self) -> None:
        self._hand: Hand | None = None
        self._hangs = False
        # Of what is under way, in its order.
        self._keys: deque[str | None] = deque()

    def __enter__(self) -> Scribe:
        return self

    def __exit__(self, *problem: object) -> None:
        self._settle(0)
        if self._hand is not None:
            self._hand.end()

    def give(self, work: Callable[[], None], key: str | None = None) -> None:
        """Has something done after what was given before; of a disk that hangs nothing.

        Args:
            work: which raises nothing.
            key: of the file that is there by it.
        """
        self._settle(_LATE - 1)
        if self._hangs:
            return
        if self._hand is None:
            self._hand = Hand("hopsgpu-keep", lambda _: False)
        self._keys.append(key)
        self._hand.begin(work)

    def wait_for(self, key: str) -> None:
        """Until a file is there that is about to be."""
        if key in self._keys:
            self._settle(0)

    def _settle(self, late: int) -> None:
        """Waits until no more than so many things are under way."""
        while self._hand is not None and len(self._keys) > late and not self._hangs:
            try:
                self._hand.end_of(_WRITE_SECONDS)
            except TimeoutError:  # the lake has it all
                self._hangs = True
            self._keys.popleft()


class _Writer:
    """Writes a file of record batches, and gives up where they are too many, or the disk is full.

    Used by the scribe's thread alone.

    Args:
        draft: the file, which goes if it does not become another.
        schema: of the record batches.
        room: bytes that it may have, asked when it begins.
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
        except OSError:  # the disk is full: the lake has it all
            self._failed = True

    def _write(self, batch: Any) -> None:
        import pyarrow as pa

        if self._writer is None:
            self._most = self._room()
            # Not "wb", which cuts what is there to nothing: ext4 would write it to the disk while
            # it is closed (`stores.filesystem.empty`).
            self._file = pa.OSFile(str(self._draft), "ab")
            self._writer = pa.ipc.new_file(self._file, self._schema)
        self._check(self._file.tell() + pa.ipc.get_record_batch_size(batch))
        self._writer.write_batch(batch)

    def end(self, target: Path) -> bool:
        """Renames the file; False where not all was written, or there is no directory any more."""
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
        """Removes what has not become another file."""
        with contextlib.suppress(OSError):  # of a disk that is full, or was taken away
            if self._file is not None:
                self._file.close()
            self._draft.unlink(missing_ok=True)

    def _check(self, size: int) -> None:
        if size > self._most:
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
