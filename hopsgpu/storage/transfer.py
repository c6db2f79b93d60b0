"""Parallel transfers of many files to and from the lake, checked by digests."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, Digest, DigestingReader, FileFacts
from hopsgpu.storage.error_messages import ABSENT, DAMAGED, EXISTS, explain
from hopsgpu.storage.filesystem import empty
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.names import path_below
from hopsgpu.units import MIB

log = logging.getLogger(__name__)

# Minimum file size → number of concurrent transfers: one large file uses a DataNode's full rate.
# Each transfer has up to 15 MB in memory.
_LARGE_CONCURRENCY = ((16 * 2**20, 2), (256 * 2**10, 4))
# The same for smaller files. A write takes half a second: its close waits for the DataNode's report
# to the NameNode. A read takes milliseconds, and more threads would only wait for the GIL.
_CONCURRENT_WRITES = 64
_CONCURRENT_READS = 16
# Larger or longer transfers are logged at INFO, because people wait for them.
_NOTABLE_BYTES = 256 * MIB
_NOTABLE_SECONDS = 5.0


def upload_files(
    files: Mapping[str, Path],
    root: LakePath,
    *,
    stop: threading.Event | None = None,
    on_facts: Callable[[str, FileFacts], None] | None = None,
) -> dict[str, FileFacts]:
    """Stream local files to a directory, which is created with its subdirectories.

    Args:
        files: local files by their paths below the directory.
        stop: ends the upload when another thread sets it.
        on_facts: called in some thread with a file and its facts as soon as they are known; again
            at the end of a large file and for a retry. Compare them with the result.

    Returns:
        The facts of the bytes that were written, in the order of `files`.

    Raises:
        ConfigError: a path is not inside the directory, or a file cannot be read.
        StoreError: a file cannot be uploaded; this is the first error. The other uploads are
            stopped, and uploaded files stay.
        Cancelled: `stop` was set.
    """
    paths = {path_below(name): source for name, source in files.items()}
    _make_directories(paths, root)
    facts: dict[str, FileFacts] = {}

    def upload(name: str, stopped: threading.Event) -> None:
        report = None if on_facts is None else functools.partial(on_facts, name)
        facts[name] = _upload(paths[name], root / name, stopped, report)

    sizes = {name: _size(source) for name, source in paths.items()}
    with _log_transfer(f"upload to {root.url}", sizes):
        _run_all(sizes, _CONCURRENT_WRITES, upload, stop)
    return {name: facts[name] for name in paths}


def download_files(
    facts: Mapping[str, FileFacts],
    root: LakePath,
    target: Path,
    *,
    stop: threading.Event | None = None,
) -> None:
    """Stream files of a directory to a local directory, which is created, and check them.

    Args:
        facts: the facts that the files must have, by their paths below the directory.
        target: the local directory; files that exist there are replaced.
        stop: ends the download when another thread sets it.

    Raises:
        ConfigError: a path is not inside the directory.
        StoreError: a file cannot be downloaded; this is the first error. Its kind is "damaged" if a
            file is missing, or differs from its facts.
        Cancelled: `stop` was set.
    """
    locals_ = {path_below(name): target / name for name in facts}
    for directory in {file.parent for file in locals_.values()} | {target}:
        directory.mkdir(parents=True, exist_ok=True)

    def download(name: str, stopped: threading.Event) -> None:
        with locals_[name].open("wb") as file:

            def start_attempt() -> Callable[[bytes], object]:
                empty(file)
                return functools.partial(_write_block, file, locals_[name])

            _read_and_check(facts[name], root / name, stopped, start_attempt)

    _read_all(f"download of {root.url}", facts, root, download, stop)


def check_files(
    facts: Mapping[str, FileFacts], root: LakePath, *, stop: threading.Event | None = None
) -> None:
    """Read and check files of a directory; errors as for `download_files`."""

    def check(name: str, stopped: threading.Event) -> None:
        _read_and_check(facts[name], root / path_below(name), stopped, lambda: len)

    _read_all(f"check of {root.url}", facts, root, check, stop)


def _read_all(
    title: str,
    facts: Mapping[str, FileFacts],
    root: LakePath,
    work: Callable[[str, threading.Event], None],
    stop: threading.Event | None,
) -> None:
    root.with_client()
    sizes = {name: fact.bytes for name, fact in facts.items()}
    with _log_transfer(title, sizes):
        _run_all(sizes, _CONCURRENT_READS, work, stop)


@contextlib.contextmanager
def _log_transfer(title: str, sizes: Mapping[str, int]) -> Iterator[None]:
    total, start = sum(sizes.values()), time.monotonic()
    is_large = total >= _NOTABLE_BYTES
    log.log(_level(is_large), "%s: begins, %d files, %d bytes", title, len(sizes), total)
    try:
        yield
    except BaseException as error:
        seconds = time.monotonic() - start
        log.info("%s: ended after %.1f s by %s", title, seconds, type(error).__name__)
        raise
    seconds = time.monotonic() - start
    log.log(
        _level(is_large or seconds >= _NOTABLE_SECONDS),
        "%s: complete, %d files, %d bytes in %.1f s (%.1f MiB/s)",
        title,
        len(sizes),
        total,
        seconds,
        total / MIB / max(seconds, 0.001),
    )


def _level(is_notable: bool) -> int:
    return logging.INFO if is_notable else logging.DEBUG


def _make_directories(names: Mapping[str, object], root: LakePath) -> None:
    parents = {PurePosixPath(name).parent for name in names} - {PurePosixPath(".")}
    implied = {outer for inner in parents for outer in inner.parents}
    root.make()
    for directory in sorted(parents - implied):
        (root / directory.as_posix()).make()


def _size(source: Path) -> int:
    try:
        return source.stat().st_size
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error


def _upload(
    source: Path,
    target: LakePath,
    stop: threading.Event,
    on_facts: Callable[[FileFacts], None] | None,
) -> FileFacts:
    reader = DigestingReader(source, on_facts)

    def blocks() -> Generator[bytes, None, None]:
        with contextlib.closing(reader.blocks()) as blocks_of_file:
            for block in blocks_of_file:
                _check_stop(stop, target)
                yield block

    def attempt(number: int) -> None:
        nonlocal reader
        reader = DigestingReader(source, on_facts)
        # Close the generator: the frames of an error would keep the file open.
        with contextlib.closing(blocks()) as content:
            target.client.write(target.path, content, should_replace=True)

    target.retry_limits(stop)("write", target.url, attempt)
    return reader.facts


def _read_and_check(
    facts: FileFacts,
    source: LakePath,
    stop: threading.Event,
    start_attempt: Callable[[], Callable[[bytes], object]],
) -> None:
    """Read a file and check it; each attempt calls `start_attempt` for a taker of the blocks."""

    def attempt(number: int) -> FileFacts:
        take, digest, size = start_attempt(), Digest(), 0
        for block in source.client.blocks(source.path):
            _check_stop(stop, source)
            digest.update(block)
            size += len(block)
            if size > facts.bytes:
                break  # Another user may have made the file large enough to fill the disk.
            take(block)
        return digest.facts

    try:
        actual = source.retry_limits(stop)("read", source.url, attempt)
    except StoreError as error:
        if error.kind == ABSENT:
            raise StoreError(f"{source.url} is missing", DAMAGED) from error
        if error.kind == EXISTS:
            raise StoreError(
                f"{source.url} is damaged: it is a directory, or a directory above it is a file",
                DAMAGED,
            ) from error
        raise
    if actual.bytes != facts.bytes:
        raise StoreError(
            f"{source.url} is damaged: size mismatch: expected {facts.bytes} bytes, found"
            f" {'more' if actual.bytes > facts.bytes else actual.bytes}",
            DAMAGED,
        )
    if actual != facts:
        raise StoreError(
            f"{source.url} is damaged: {DIGEST} mismatch: expected {facts.digest},"
            f" found {actual.digest}",
            DAMAGED,
        )


def _write_block(file: BinaryIO, path: Path, block: bytes) -> None:
    try:
        file.write(block)
    except OSError as error:
        meaning = explain(error)
        raise StoreError(f"cannot write {path}: {meaning}", meaning.kind) from error


def _check_stop(stop: threading.Event, place: LakePath) -> None:
    if stop.is_set():
        raise Cancelled(f"the transfer was stopped at {place.url}")


def _run_all(
    sizes: Mapping[str, int],
    small_concurrency: int,
    work: Callable[[str, threading.Event], None],
    stop: threading.Event | None,
) -> None:
    """Transfer many small and few large files at a time; raise the first error."""
    stopped = threading.Event()
    problems: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    threads = []
    for names, concurrency in _by_size(sizes, small_concurrency):
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            waiting.put(name)
        process = functools.partial(_process_queue, waiting, work, stopped, problems)
        threads += [threading.Thread(target=process) for _ in range(min(concurrency, len(names)))]
    _run_threads(threads, stopped, stop)
    if not problems.empty():
        raise problems.get()
    if stop is not None and stop.is_set():
        raise Cancelled("the transfer was stopped")


def _run_threads(
    threads: Sequence[threading.Thread], stopped: threading.Event, stop: threading.Event | None
) -> None:
    """Run threads to their end, also after an exception: nothing may be written afterwards."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                if stop is not None and stop.is_set():
                    stopped.set()
    finally:
        stopped.set()  # running transfers end at their next block
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _by_size(sizes: Mapping[str, int], small_concurrency: int) -> Iterator[tuple[list[str], int]]:
    """Yield files of about the same size, with the number of concurrent transfers."""
    limit: float = math.inf
    for min_size, concurrency in (*_LARGE_CONCURRENCY, (0, small_concurrency)):
        yield [name for name, size in sizes.items() if min_size <= size < limit], concurrency
        limit = min_size


def _process_queue(
    waiting: queue.SimpleQueue[str],
    work: Callable[[str, threading.Event], None],
    stopped: threading.Event,
    problems: queue.SimpleQueue[BaseException],
) -> None:
    while not stopped.is_set():
        try:
            name = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            work(name, stopped)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            problems.put(error)
            stopped.set()
