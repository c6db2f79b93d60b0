"""HDFS by hdfs-native: hdfs:// and viewfs://.

hdfs-native reads the Hadoop configuration, but neither follows includes nor expands variables. So
hopsgpu passes the values to hdfs-native.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hopsgpu.storage.bounded_calls import Steps, WorkerThreadPool
from hopsgpu.storage.error_messages import NO_CREDENTIALS, NO_KDC, StoreRefusal, refusal
from hopsgpu.storage.filesystem import FileStatus, SizedReader
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.hadoop_tokens import hdfs_services, name_tokens
from hopsgpu.storage.kerberos import NO_TICKET, has_tokens, meaning
from hopsgpu.storage.umask import creation_mask
from hopsgpu.storage.viewfs import complete_mount_table

T = TypeVar("T")

log = logging.getLogger(__name__)

# hdfs-native's defaults are 15 attempts with pauses of up to 15 s. Here `retrying.RetryLimits`
# retries calls, also after errors that hdfs-native does not retry.
_PATIENT = {
    "dfs.client.failover.max.attempts": "6",
    "dfs.client.failover.sleep.base.millis": "200",
    "dfs.client.failover.sleep.max.millis": "3000",
}
_QUICK = {
    "dfs.client.failover.max.attempts": "2",
    "dfs.client.failover.sleep.base.millis": "200",
    "dfs.client.failover.sleep.max.millis": "1000",
}
# The property that names the provider of encryption keys, and its older name in Hadoop.
_KEY_PROVIDER = "hadoop.security.key.provider.path"
_OLD_KEY_PROVIDER = "dfs.encryption.key.provider.uri"
# The form of a provider that hdfs-native accepts, for example kms://https@kms1;kms2:9600/kms.
_KMS = re.compile(r"kms://https?@[^/;:]+(;[^/;:]+)*(:\d+)?(/.*)?")
# hdfs-native waits forever for a NameNode's answer. A write may also wait 60 s for a lost DataNode,
# and then for the next DataNode.
_ANSWER_SECONDS = 60.0
_QUICK_ANSWER_SECONDS = 5.0
_DATA_SECONDS = 180.0
# hdfs-native waits for a lost DataNode as long as TCP does; a new connection may work earlier.
_READ_SECONDS = 60.0
# Number of 64 kB packets that a thread hands over at a time. Each handover may wait for the GIL: a
# download with 4 packets takes twice as long as with 64. Each open file has two such groups, 8 MB.
_PACKETS = 64
# The text of hdfs-native's errors: RPCError("org.apache…Exception", "message").
_RPC = re.compile(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)"\)', re.DOTALL)
_CLIENT_ERROR = re.compile(r'(\w+)(?:\("?(.*?)"?\))?', re.DOTALL)


class Hdfs:
    """A `FileSystem` on HDFS.

    Args:
        url: URL of the file system, without a path.
        should_fail_fast: whether to give up on a NameNode after some seconds.
        write_seconds: the longest write of a block.
    """

    def __init__(
        self, url: str, *, should_fail_fast: bool, write_seconds: float = _DATA_SECONDS
    ) -> None:
        from hdfs_native import Client

        log.debug(
            "HDFS client (hdfs-native) of %s, %s", url, "quick" if should_fail_fast else "patient"
        )
        limits = _QUICK if should_fail_fast else _PATIENT
        # In a container: the tokens there name a NameNode by its IP address.
        name_tokens([urlsplit(url).netloc], os.environ)
        settings = HadoopConf.load_hdfs(os.environ).all_values()
        settings |= _key_provider_of(settings) | complete_mount_table(url, settings)
        self._client = Client(url, {**settings, **limits})
        self._answer = _QUICK_ANSWER_SECONDS if should_fail_fast else _ANSWER_SECONDS
        self._write_seconds = write_seconds
        self._mask = creation_mask(os.environ)
        self._threads = WorkerThreadPool("hopsgpu-hdfs")

    def make(self, path: str) -> None:
        self._call(lambda: self._client.mkdirs(path, 0o777 & ~self._mask, True))

    def set_mode(self, path: str, mode: int) -> None:
        self._call(lambda: self._client.set_permission(path, mode))

    def stat(self, path: str) -> FileStatus:
        return _status(self._call(lambda: self._client.get_file_info(path)))

    def entries(self, path: str) -> tuple[FileStatus, ...]:
        return tuple(map(_status, self._call(lambda: list(self._client.list_status(path)))))

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[io.RawIOBase]:
        yield _Reader(self._call(lambda: self._client.read(path)), self._threads)

    def blocks(self, path: str) -> Iterator[bytes]:
        def open_stream() -> Iterator[bytes]:
            reader = self._client.read(path)
            return iter(reader.read_range_stream(0, len(reader)))

        # The first step also opens the file: waking a thread costs as much as reading a small file.
        return _packets(self._threads, open_stream, min(self._answer, _READ_SECONDS))

    def range(self, path: str, start: int, end: int | None) -> bytes:
        def read() -> bytes:
            reader = self._client.read(path)
            stop = len(reader) if end is None else min(end, len(reader))
            content: bytes = reader.read_range(start, stop - start) if start < stop else b""
            return content

        # One step of a thread opens and reads: waking a thread takes as long as a small read.
        return _call_within(self._threads, _READ_SECONDS, read)

    def write(self, path: str, blocks: Iterable[bytes], *, should_replace: bool) -> None:
        from hdfs_native import WriteOptions

        options = WriteOptions(
            permission=0o666 & ~self._mask, overwrite=should_replace, create_parent=False
        )
        self._fill(self._call(lambda: self._client.create(path, options)), blocks)

    def append(self, path: str, content: bytes) -> None:
        """Append to an existing file.

        A killed writer, or one whose answer was lost, may still have the file open. This call then
        requests that HDFS close the file, and raises StoreRefusal; a later call can succeed.
        """
        try:
            writer = self._call(lambda: self._client.append(path))
        except FileExistsError as error:
            # HDFS raises AlreadyBeingCreatedException while a dead writer's lease lasts.
            closed = self._call(lambda: self._client.recover_lease(path))
            log.info(
                "asked HDFS to close %s, which another client has open for writing: %s",
                path,
                "closed" if closed else "not closed yet",
            )
            outcome = "; HDFS has closed it now" if closed else ""
            raise StoreRefusal(
                "AlreadyBeingCreatedException",
                f"another client has {path} open for writing{outcome}",
            ) from error
        self._fill(writer, [content])

    def rename(self, source: str, target: str, *, should_replace: bool) -> None:
        self._call(lambda: self._client.rename(source, target, should_replace))

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda: self._client.delete(path, True))

    def _call(self, call: Callable[[], T]) -> T:
        return _call_within(self._threads, self._answer, call)

    def _fill(self, writer: Any, blocks: Iterable[bytes]) -> None:
        seconds = self._write_seconds

        def fill(steps: Steps) -> None:
            # One thread fetches and writes: a block that it has read is still in its core's cache.
            for block in blocks:
                if block:
                    with _errors(seconds):
                        steps.run(functools.partial(writer.write, block))
            with _errors(seconds):
                steps.run(writer.close)

        with self._threads.borrow() as thread:
            try:
                thread.run_steps(fill, seconds)
            except TimeoutError as error:
                if thread.is_idle:  # no block could be fetched
                    raise
                log.debug("a write to HDFS has not returned after %g s: abandons it", seconds)
                raise _no_answer(seconds) from error


def _key_provider_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the setting of the key provider that hdfs-native accepts; empty for no provider.

    Only files in encryption zones need a provider. With a provider of another form, such as
    `jceks://`, hdfs-native would refuse to read any file.
    """
    provider = settings.get(_KEY_PROVIDER) or settings.get(_OLD_KEY_PROVIDER) or ""
    if provider and not _KMS.fullmatch(provider):
        log.info(
            "%s=%s is not used: files in encryption zones cannot be read, because only"
            " kms://http@host:port/kms and kms://https@host:port/kms are supported",
            _KEY_PROVIDER,
            provider,
        )
        provider = ""
    # An empty value, because hdfs-native also reads the files itself: without the property, it
    # would use theirs.
    return {_KEY_PROVIDER: provider} if provider or _KEY_PROVIDER in settings else {}


class _Reader(SizedReader):
    """hdfs-native's reader with the interface of Python's readers."""

    def __init__(self, reader: Any, threads: WorkerThreadPool) -> None:
        super().__init__(len(reader))
        self._reader = reader
        self._threads = threads

    def tell(self) -> int:
        return int(self._reader.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # hdfs-native panics if it has to seek past the end.
        self._reader.seek(min(super().seek(offset, whence), self._size))
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        wanted = -1 if size is None else size
        content: bytes = _call_within(
            self._threads, _DATA_SECONDS, lambda: self._reader.read(wanted)
        )
        return content

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer: `read` copies the bytes three times."""
        at = filled = self.tell()
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._reader) - at)

        def open_stream() -> Iterator[bytes]:
            return iter(self._reader.read_range_stream(at, size))

        for packet in _packets(self._threads, open_stream, _READ_SECONDS) if size else ():
            view[filled - at : filled - at + len(packet)] = packet
            filled += len(packet)
        self.seek(filled)
        return filled - at


def _packets(
    threads: WorkerThreadPool, open_stream: Callable[[], Iterator[bytes]], seconds: float
) -> Iterator[bytes]:
    """Yield the bytes of a file in order, in packets of 64 kB that hdfs-native reads ahead.

    Args:
        open_stream: returns hdfs-native's stream.
        seconds: how long the first group of packets may take.
    """

    def fetch(packets: Iterator[bytes]) -> list[bytes]:
        return list(itertools.islice(packets, _PACKETS))

    def fetch_first() -> tuple[Iterator[bytes], list[bytes]]:
        packets = open_stream()
        return packets, fetch(packets)

    with threads.borrow() as thread:
        with _errors(seconds):
            packets, group = thread.run(fetch_first, seconds)
        while len(group) == _PACKETS:
            # The thread fetches the next group while the caller works on this one.
            thread.start(functools.partial(fetch, packets))
            yield from group
            with _errors(_READ_SECONDS):
                group = thread.next_result(_READ_SECONDS)
        yield from group


def _call_within(threads: WorkerThreadPool, seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call of hdfs-native; a late call continues in its thread."""
    with threads.borrow() as thread, _errors(seconds):
        return thread.run(call, seconds)


@contextlib.contextmanager
def _errors(seconds: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise _no_answer(seconds) from error
    except RuntimeError as error:
        raise as_exception(str(error)) from error


def _no_answer(seconds: float) -> OSError:
    return OSError(f"no answer in {seconds:.0f} s")


def as_exception(text: str) -> Exception:
    """Return the exception for the text of an hdfs-native error."""
    rpc = _RPC.search(text)
    if rpc is None and (problem := meaning(text)) is not None:
        return StoreRefusal(NO_KDC if "no KDC" in problem else NO_CREDENTIALS, _name_token(problem))
    if rpc is not None:
        java, message = rpc.groups()
    elif match := _CLIENT_ERROR.fullmatch(text.strip()):
        java, message = match[1], match[2] or match[1]
    else:
        java, message = "", text
    return refusal(java, message.replace("\\n", "\n").replace('\\"', '"').replace("\\t", " "))


def _name_token(problem: str) -> str:
    """Return a problem with credentials; in a container with tokens, name the missing token."""
    if not (problem == NO_TICKET and has_tokens(os.environ)):
        return problem
    held = ", ".join(hdfs_services(os.environ)) or "no HDFS"
    return (
        f"this container has no delegation token for this NameNode (it has those for {held}): name"
        " the file system in spark.kerberos.access.hadoopFileSystems"
    )


def _status(info: Any) -> FileStatus:
    return FileStatus(
        info.path.rstrip("/").rpartition("/")[2],
        info.modification_time,
        info.owner,
        info.permission,
        info.isdir,
        0 if info.isdir else info.length,
    )
