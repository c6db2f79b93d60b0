"""Ways to copy between a local directory and the lake, each run in its own process.

`python -m benchmarks.transfers WAY LOCAL URL [THREADS]` prints the cost as JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.storage.filesystem import BLOCK

MODEL = "measured"


def main(way: str, local: str, url: str, threads: str = "1") -> None:
    """Run one way, and print its seconds, its CPU seconds and its peak memory, in MiB.

    It also prints how long hdfs-native took to close the largest file that it wrote.
    """
    closing = _Closing()
    closing.watch()
    began, cpu = time.monotonic(), time.process_time()
    WAYS[way](Path(local), url, int(threads))
    took, used = time.monotonic() - began, time.process_time() - cpu
    told = {"seconds": took, "cpu": used, "memory": _peak(), "closing": closing.seconds}
    print(json.dumps(told))


def publish(local: Path, url: str, threads: int) -> None:
    """Upload with hopsgpu."""
    ModelStore(url).publish(local, MODEL)


def download(local: Path, url: str, threads: int) -> None:
    """Download with hopsgpu."""
    ModelStore(url).get(MODEL).download(local)


def raw_write(local: Path, url: str, threads: int) -> None:
    """Upload with hdfs-native's writer only: no digests, no manifest, no staging."""
    from hdfs_native import Client

    client, root = Client(url), urlsplit(url).path
    client.mkdirs(root, create_parent=True)

    def write(file: Path) -> None:
        with file.open("rb") as source, client.create(f"{root}/{file.name}") as target:
            for chunk in _chunks(source.read):
                target.write(chunk)

    _each(write, sorted(local.iterdir()), threads)


def raw_read(local: Path, url: str, threads: int) -> None:
    """Download with hdfs-native's reader only, in the faster of its two ways."""
    from hdfs_native import Client

    client, root = Client(url), urlsplit(url).path

    def read(name: str) -> None:
        with client.read(f"{root}/{name}") as source, (local / name).open("wb") as target:
            for chunk in source.read_range_stream(0, len(source)):
                target.write(chunk)

    local.mkdir()
    names = [status.path.rpartition("/")[2] for status in client.list_status(root)]
    _each(read, names, threads)


def web_write(local: Path, url: str, threads: int) -> None:
    """Upload with the package `hdfs`."""
    from hdfs import InsecureClient

    InsecureClient(os.environ["BENCH_WEB"]).upload(
        urlsplit(url).path, str(local), n_threads=threads, chunk_size=BLOCK
    )


def web_read(local: Path, url: str, threads: int) -> None:
    """Download with the package `hdfs`."""
    from hdfs import InsecureClient

    InsecureClient(os.environ["BENCH_WEB"]).download(
        urlsplit(url).path, str(local), n_threads=threads, chunk_size=BLOCK
    )


def copy(local: Path, url: str, threads: int) -> None:
    """Copy on the local disk, which has the data when this returns."""
    target = Path(urlsplit(url).path)
    target.mkdir()
    for file in local.iterdir():
        with file.open("rb") as source, (target / file.name).open("wb") as copied:
            shutil.copyfileobj(source, copied, BLOCK)
            copied.flush()
            os.fsync(copied.fileno())


WAYS: dict[str, Callable[[Path, str, int], None]] = {
    "publish": publish,
    "download": download,
    "raw-write": raw_write,
    "raw-read": raw_read,
    "web-write": web_write,
    "web-read": web_read,
    "copy": copy,
}


class _Closing:
    """How long hdfs-native took to close the largest file that it wrote.

    It sleeps half a second if it asks the name node before the DataNode has reported the last
    block. That is random, and a fifth of the time of a large file.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._largest = 0
        self._sizes: dict[int, int] = {}

    def watch(self) -> None:
        """Watch all writers of this process from now on."""
        from hdfs_native import FileWriter

        write, close = FileWriter.write, FileWriter.close

        def watched_write(writer: FileWriter, block: bytes) -> int:
            self._sizes[id(writer)] = self._sizes.get(id(writer), 0) + len(block)
            return write(writer, block)

        def watched_close(writer: FileWriter) -> None:
            began = time.monotonic()
            close(writer)
            if (size := self._sizes.pop(id(writer), 0)) > self._largest:
                self._largest, self.seconds = size, time.monotonic() - began

        FileWriter.write, FileWriter.close = watched_write, watched_close


def _each(work: Callable[[Any], None], items: Iterable[object], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, item) for item in items]:
            done.result()


def _chunks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while chunk := read(BLOCK):
        yield chunk


def _peak() -> float:
    """Return the most memory that this program had.

    getrusage() also counts the memory of the process that started this one, which was shared until
    this program was executed.
    """
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM")
    return int(found[1]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
