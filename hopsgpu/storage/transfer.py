"""Transfers of many files to the lake and back: parallel, streamed, and checked by digests."""

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

# How many files to transfer at once, by their smallest size: a large file is as fast as its
# DataNode. Each holds up to 15 MB that are on their way.
_LARGE_AT_ONCE = ((16 * 2**20, 2), (256 * 2**10, 4))
# The same for smaller files. Writing one takes the half second that closing waits for the
# DataNode's report to the NameNode. Reading one takes milliseconds, and most of any further
# threads would wait for the interpreter.
_WRITTEN_AT_ONCE = 64
_READ_AT_ONCE = 16
# A transfer of more bytes, or one that took longer, is logged at INFO: people wait for it.
_LARGE_BYTES = 256 * MIB
_LONG_SECONDS = 5.0


def upload_files(
    files: Mapping[str, Path],
    root: LakePath,
    *,
    stop: threading.Event | None = None,
    on_facts: Callable[[str, FileFacts], None] | None = None,
) -> dict[str, FileFacts]:
    """Stream local files to a directory, which is created with those below it.

    Args:
        files: local files by their paths below the directory.
        root: the directory.
        stop: ends the upload when another thread sets it.
        on_facts: called, in some thread, with each file and its facts when these are known: for a
            large file ahead of its end, and again at its end; for a file that is tried again,
            again. The facts must be compared with what is returned.

    Returns:
        Sizes and digests of what was read and written, in the order of `files`.

    Raises:
        ConfigError: a path is not inside the directory, or a file cannot be read.
        StoreError: a file cannot be uploaded; this is the first error. The other uploads are
            stopped, and what was uploaded stays.
        Cancelled: `stop` was set.
    """
    paths = {path_below(name): source for name, source in files.items()}
    _make_directories(paths, root)
    found: dict[str, FileFacts] = {}

    def upload(name: str, stopped: threading.Event) -> None:
        report = None if on_facts is None else functools.partial(on_facts, name)
        found[name] = _upload(paths[name], root / name, stopped, report)

    sizes = {name: _size(source) for name, source in paths.items()}
    with _logged(f"upload to {root.url}", sizes):
        _each(sizes, _WRITTEN_AT_ONCE, upload, stop)
    return {name: found[name] for name in paths}


def download_files(
    facts: Mapping[str, FileFacts],
    root: LakePath,
    target: Path,
    *,
    stop: threading.Event | None = None,
) -> None:
    """Stream files of a directory to a local one, which is created, and check them.

    Args:
        facts: the facts that the files must have, by their paths below the directory.
        root: the directory.
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

            def keep() -> Callable[[bytes], object]:
                empty(file)
                return functools.partial(_keep, file, locals_[name])

            _check(facts[name], root / name, stopped, keep)

    _read_all(f"download of {root.url}", facts, root, download, stop)


def check_files(
    facts: Mapping[str, FileFacts], root: LakePath, *, stop: threading.Event | None = None
) -> None:
    """Read and check files of a directory, without keeping anything.

    Raises:
        ConfigError, StoreError, Cancelled: as for `download_files`.
    """

    def check(name: str, stopped: threading.Event) -> None:
        _check(facts[name], root / path_below(name), stopped, lambda: len)

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
    with _logged(title, sizes):
        _each(sizes, _READ_AT_ONCE, work, stop)


@contextlib.contextmanager
def _logged(title: str, sizes: Mapping[str, int]) -> Iterator[None]:
    """Log the begin and the end of a transfer, with its bytes, time and rate.

    Args:
        title: what is transferred, and from or to where.
        sizes: bytes of each file.
    """
    total, began = sum(sizes.values()), time.monotonic()
    is_large = total >= _LARGE_BYTES
    log.log(_level(is_large), "%s: begins, %d files, %d bytes", title, len(sizes), total)
    try:
        yield
    except BaseException as error:
        seconds = time.monotonic() - began
        log.info("%s: ended after %.1f s by %s", title, seconds, type(error).__name__)
        raise
    seconds = time.monotonic() - began
    log.log(
        _level(is_large or seconds >= _LONG_SECONDS),
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
    above = {PurePosixPath(name).parent for name in names} - {PurePosixPath(".")}
    needless = {outer for inner in above for outer in inner.parents}
    root.make()
    for directory in sorted(above - needless):
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
    reading = DigestingReader(source, on_facts)

    def blocks() -> Generator[bytes, None, None]:
        with contextlib.closing(reading.blocks()) as read:
            for block in read:
                _check_stop(stop, target)
                yield block

    def attempt(number: int) -> None:
        nonlocal reading
        reading = DigestingReader(source, on_facts)
        # Without this, the frames of an error would keep the file open.
        with contextlib.closing(blocks()) as content:
            target.client.write(target.path, content, replace=True)

    target.retry_limits(stop)("write", target.url, attempt)
    return reading.facts


def _check(
    facts: FileFacts,
    source: LakePath,
    stop: threading.Event,
    keep: Callable[[], Callable[[bytes], object]],
) -> None:
    """Read a file from its beginning to its end, and check it.

    Args:
        keep: prepares to keep what is read, at each attempt; returns a function that takes a block.
    """

    def attempt(number: int) -> FileFacts:
        take, digest = keep(), Digest()
        for block in source.client.blocks(source.path):
            _check_stop(stop, source)
            digest.update(block)
            take(block)
        return digest.facts

    try:
        found = source.retry_limits(stop)("read", source.url, attempt)
    except StoreError as error:
        if error.kind == ABSENT:
            raise StoreError(f"{source.url} is missing", DAMAGED) from error
        if error.kind == EXISTS:
            raise StoreError(
                f"{source.url} is damaged: it is a directory, or a directory above it is a file",
                DAMAGED,
            ) from error
        raise
    if found.bytes != facts.bytes:
        raise StoreError(
            f"{source.url} is damaged: size mismatch: expected {facts.bytes} bytes, found"
            f" {found.bytes}",
            DAMAGED,
        )
    if found != facts:
        raise StoreError(
            f"{source.url} is damaged: {DIGEST} mismatch: expected {facts.digest},"
            f" found {found.digest}",
            DAMAGED,
        )


def _keep(file: BinaryIO, path: Path, block: bytes) -> None:
    try:
        file.write(block)
    except OSError as error:
        trouble = explain(error)
        raise StoreError(f"cannot write {path}: {trouble}", trouble.kind) from error


def _check_stop(stop: threading.Event, place: LakePath) -> None:
    if stop.is_set():
        raise Cancelled(f"the transfer was stopped at {place.url}")


def _each(
    sizes: Mapping[str, int],
    small_at_once: int,
    work: Callable[[str, threading.Event], None],
    stop: threading.Event | None,
) -> None:
    """Work on all files, small ones many at a time and large ones few; raise the first error."""
    stopped = threading.Event()
    problems: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    threads = []
    for names, most in _by_size(sizes, small_at_once):
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            waiting.put(name)
        work_off = functools.partial(_work_off, waiting, work, stopped, problems)
        threads += [threading.Thread(target=work_off) for _ in range(min(most, len(names)))]
    _run(threads, stopped, stop)
    if not problems.empty():
        raise problems.get()
    if stop is not None and stop.is_set():
        raise Cancelled("the transfer was stopped")


def _run(
    threads: Sequence[threading.Thread], stopped: threading.Event, stop: threading.Event | None
) -> None:
    """Run threads to their end, on every path, so that nothing is written after this returns."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                if stop is not None and stop.is_set():
                    stopped.set()
    finally:
        stopped.set()  # transfers that are under way end at their next block
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _by_size(sizes: Mapping[str, int], small_at_once: int) -> Iterator[tuple[list[str], int]]:
    """Yield files of about the same size, with how many of them to transfer at once."""
    above: float = math.inf
    for least, most in (*_LARGE_AT_ONCE, (0, small_at_once)):
        yield [name for name, size in sizes.items() if least <= size < above], most
        above = least


def _work_off(
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
