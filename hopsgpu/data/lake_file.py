"""A file on the lake that pyarrow can read."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from hopsgpu.storage.lake import LakePath


class LakeFile:
    """A reader of a file on the lake, with the methods that pyarrow requires of a Python file.

    `read` returns whole ranges, although file systems may answer in parts, and retries.
    """

    def __init__(self, lake: LakePath) -> None:
        self._lake = lake
        self._open = contextlib.ExitStack()
        self._raw: io.RawIOBase | None = None
        self._at = 0
        self._retry = lake.retry_limits()
        self.closed = False
        # The size comes from the open file: one request, and no race with a replacement.
        self.size: int = self._retry(
            "read", lake.url, lambda _: self._connect().seek(0, os.SEEK_END)
        )

    def read(self, size: int = -1) -> memoryview:
        remaining = max(self.size - self._at, 0)
        wanted = remaining if size is None or size < 0 else min(size, remaining)
        content: memoryview = self._retry(
            "read", self._lake.url, lambda _: self._read_range(self._at, wanted)
        )
        self._at += len(content)
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True
        self._disconnect()

    def _read_range(self, at: int, wanted: int) -> memoryview:
        import numpy as np

        content = np.empty(wanted, np.uint8).data
        filled = 0
        try:
            raw = self._connect()
            raw.seek(at)
            while filled < wanted:
                count = raw.readinto(content[filled:])
                if not count:
                    raise OSError(f"the file ended {wanted - filled} bytes early")
                filled += count
        except BaseException:
            self._disconnect()  # the next attempt opens another connection
            raise
        return content

    def _connect(self) -> io.RawIOBase:
        if self._raw is None:
            self._raw = self._open.enter_context(self._lake.client.read(self._lake.path))
        return self._raw

    def _disconnect(self) -> None:
        self._raw = None
        self._open.close()


@contextlib.contextmanager
def open_lake_file(lake: LakePath) -> Iterator[tuple[Any, LakeFile]]:
    """Yield a file on the lake as a pyarrow.NativeFile and as a LakeFile."""
    import pyarrow as pa

    with contextlib.closing(LakeFile(lake)) as file:
        yield pa.PythonFile(file, mode="r"), file
