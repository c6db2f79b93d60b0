"""Tables on a local disk and on HDFS, and their readers, each in a process of its own.

CPU and memory are then the reader's own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec.core import url_to_fs
from pyarrow import fs

from benchmarks.data import scratch
from hopsgpu.storage.lake import LakePath

_WRITERS = 16


def run_readers(module: str, commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Run a module with each of some arguments, at the same time; return the JSON of each."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True
        )
        for arguments in commands
    ]
    printed = [reader.communicate()[0] for reader in readers]
    return [json.loads(text) for text in printed]


def arrow_files(url: str) -> tuple[Any, str]:
    """Return a pyarrow.fs.FileSystem for a URL, and the path on it."""
    system, path = url_to_fs(url)
    if url.startswith("file:"):
        return fs.LocalFileSystem(), path
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


@contextlib.contextmanager
def table_places() -> Iterator[dict[str, LakePath]]:
    """Provide a directory on the local disk, and one on HDFS if the environment names an HDFS."""
    with tempfile.TemporaryDirectory() as local, scratch() as lake:
        places = {"local disk": LakePath(f"file://{local}/table")}
        if lake.url.startswith("hdfs:"):
            places["HDFS"] = lake / "table"
        yield places


def write_copies(lake: LakePath, content: bytes, files: int) -> None:
    """Write a Parquet file some number of times into a directory."""
    lake.make()
    with ThreadPoolExecutor(_WRITERS) as threads:
        names = (f"part-{number:05}.parquet" for number in range(files))
        for _ in threads.map(lambda name: (lake / name).write(content), names):
            pass
