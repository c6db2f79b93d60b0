"""HDFS by hdfs-native: hdfs:// and viewfs://.

hdfs-native itself reads the Hadoop configuration, also for high availability and Kerberos, but
neither what a file includes nor variables in values, so it is given the values.
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
from hopsgpu.storage.filesystem import FileStatus
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.hadoop_tokens import hdfs_services, name_tokens
from hopsgpu.storage.kerberos import NO_TICKET, has_tokens, meaning
from hopsgpu.storage.umask import creation_mask
from hopsgpu.storage.viewfs import complete_mount_table

T = TypeVar("T")

log = logging.getLogger(__name__)

# hdfs-native's defaults are 15 attempts with pauses of up to 15 s. Here, `retrying.RetryLimits`
# repeats calls, and also waits after errors for which hdfs-native does not.
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
# hdfs-native waits forever for a NameNode's answer. A write may also wait for a DataNode that is
# lost (60 s), and for another one.
_ANSWER_SECONDS = 60.0
_QUICK_ANSWER_SECONDS = 5.0
_DATA_SECONDS = 180.0
# hdfs-native waits for a DataNode that is gone as long as TCP does; another connection may work.
_READ_SECONDS = 60.0
# Packets of 64 kB for one handover from thread to thread. Each handover may wait for the
# interpreter: a download with 4 packets takes twice the time of one with 64. Two handovers, 8 MB,
# are held for each file that is read.
_PACKETS = 64
# The text of hdfs-native's errors: RPCError("org.apache…Exception", "what was said").
_RPC = re.compile(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)"\)', re.DOTALL)
_OWN = re.compile(r'(\w+)(?:\("?(.*?)"?\))?', re.DOTALL)


class Hdfs:
    """A `FileSystem` on HDFS.

    Args:
        url: URL of the file system, without a path.
        should_fail_fast: whether to give up on a NameNode after some seconds.
    """

    def __init__(self, url: str, *, should_fail_fast: bool) -> None:
        from hdfs_native import Client

        log.debug(
            "HDFS client (hdfs-native) of %s, %s", url, "quick" if should_fail_fast else "patient"
        )
        limits = _QUICK if should_fail_fast else _PATIENT
        # In a container, whose tokens know a NameNode by its IP address.
        name_tokens([urlsplit(url).netloc], os.environ)
        settings = HadoopConf.load_hdfs(os.environ).filled()
        settings |= _key_provider_of(settings) | complete_mount_table(url, settings)
        self._client = Client(url, {**settings, **limits})
        self._answer = _QUICK_ANSWER_SECONDS if should_fail_fast else _ANSWER_SECONDS
        self._mask = creation_mask(os.environ)
        self._hands = WorkerThreadPool("hopsgpu-hdfs")

    def make(self, path: str) -> None:
        """Create a directory, and those above it."""
        self._ask(lambda: self._client.mkdirs(path, 0o777 & ~self._mask, True))

    def set_mode(self, path: str, mode: int) -> None:
        """Set permission bits."""
        self._ask(lambda: self._client.set_permission(path, mode))

    def stat(self, path: str) -> FileStatus:
        """Return the status of a file or directory."""
        return _status(self._ask(lambda: self._client.get_file_info(path)))

    def entries(self, path: str) -> tuple[FileStatus, ...]:
        """Return the status of all files and directories in a directory."""
        return tuple(map(_status, self._ask(lambda: list(self._client.list_status(path)))))

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[io.RawIOBase]:
        """Yield a reader of a file's bytes."""
        yield _Reader(self._ask(lambda: self._client.read(path)), self._hands)

    def blocks(self, path: str) -> Iterator[bytes]:
        """Return a file's bytes in order, as an iterator."""

        def begin() -> Iterator[bytes]:
            reader = self._client.read(path)
            return iter(reader.read_range_stream(0, len(reader)))

        # The first step also opens the file: waking a thread costs as much as reading a small file.
        return _packets(self._hands, begin, min(self._answer, _READ_SECONDS))

    def write(self, path: str, blocks: Iterable[bytes], *, replace: bool) -> None:
        """Create a file from blocks."""
        from hdfs_native import WriteOptions

        options = WriteOptions(
            permission=0o666 & ~self._mask, overwrite=replace, create_parent=False
        )
        self._fill(self._ask(lambda: self._client.create(path, options)), blocks)

    def append(self, path: str, content: bytes) -> None:
        """Append to a file that exists.

        If a writer that was killed, or whose answer was lost, holds the file open, this call has
        HDFS close it, and raises StoreRefusal; a later call can succeed.
        """
        try:
            writer = self._ask(lambda: self._client.append(path))
        except FileExistsError as error:  # AlreadyBeingCreatedException
            closed = self._ask(lambda: self._client.recover_lease(path))
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

    def rename(self, source: str, target: str, *, replace: bool) -> None:
        """Rename a file or directory."""
        self._ask(lambda: self._client.rename(source, target, replace))

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all below it."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self._client.delete(path, True))

    def _ask(self, call: Callable[[], T]) -> T:
        return _within(self._hands, self._answer, call)

    def _fill(self, writer: Any, blocks: Iterable[bytes]) -> None:
        def fill(steps: Steps) -> None:
            # One thread fetches and writes: what it has read is still in its core's cache.
            for block in blocks:
                if block:
                    with _errors(_DATA_SECONDS):
                        steps.do(functools.partial(writer.write, block))
            with _errors(_DATA_SECONDS):
                steps.do(writer.close)

        with self._hands.one() as hand:
            try:
                hand.do_steps(fill, _DATA_SECONDS)
            except TimeoutError as error:
                if hand.free:  # no block could be fetched
                    raise
                log.debug("a write to HDFS has not returned after %g s: abandons it", _DATA_SECONDS)
                raise _no_answer(_DATA_SECONDS) from error


def _key_provider_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the setting of the key provider that hdfs-native accepts; empty for no provider.

    Only files in encryption zones need a provider. With a provider of another form, such as
    `jceks://`, hdfs-native would refuse to read any file.

    Args:
        settings: Hadoop's properties, as the configuration's files have them.
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
    # hdfs-native also reads the files itself, so that a missing property would change nothing.
    return {_KEY_PROVIDER: provider} if provider or _KEY_PROVIDER in settings else {}


class _Reader(io.RawIOBase):
    """hdfs-native's reader with the interface of Python's readers; its own lacks `readinto`."""

    def __init__(self, reader: Any, hands: WorkerThreadPool) -> None:
        self._reader = reader
        self._hands = hands

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._reader.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: len(self._reader)}[whence]
        # hdfs-native panics if it has to seek past the end.
        self._reader.seek(min(max(start + offset, 0), len(self._reader)))
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        wanted = -1 if size is None else size
        content: bytes = _within(self._hands, _DATA_SECONDS, lambda: self._reader.read(wanted))
        return content

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, which is the fast way for many bytes.

        `read` has the bytes in memory three times, in new memory each time.
        """
        at = filled = self.tell()
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._reader) - at)

        def begin() -> Iterator[bytes]:
            return iter(self._reader.read_range_stream(at, size))

        for packet in _packets(self._hands, begin, _READ_SECONDS) if size else ():
            view[filled - at : filled - at + len(packet)] = packet
            filled += len(packet)
        self.seek(filled)
        return filled - at


def _packets(
    hands: WorkerThreadPool, begin: Callable[[], Iterator[bytes]], seconds: float
) -> Iterator[bytes]:
    """Yield the bytes of a file in order, in packets of 64 kB that hdfs-native reads ahead.

    Args:
        hands: hands that wait for the packets.
        begin: returns hdfs-native's stream.
        seconds: how long the first packets may take.
    """
    with hands.one() as hand:
        with _errors(seconds):
            packets, some = hand.do(functools.partial(_begun, begin), seconds)
        more = functools.partial(_some, packets)
        while len(some) == _PACKETS:
            # The hand fetches the next packets while the caller works on these.
            hand.begin(more)
            yield from some
            with _errors(_READ_SECONDS):
                some = hand.end_of(_READ_SECONDS)
        yield from some


def _begun(begin: Callable[[], Iterator[bytes]]) -> tuple[Iterator[bytes], list[bytes]]:
    packets = begin()
    return packets, _some(packets)


def _some(packets: Iterator[bytes]) -> list[bytes]:
    return list(itertools.islice(packets, _PACKETS))


def _within(hands: WorkerThreadPool, seconds: float, call: Callable[[], T]) -> T:
    """Return what a call of hdfs-native returns in time; a late call goes on in its thread."""
    with hands.one() as hand, _errors(seconds):
        return hand.do(call, seconds)


@contextlib.contextmanager
def _errors(seconds: float) -> Iterator[None]:
    """Turn the errors of hdfs-native into exceptions for each kind."""
    try:
        yield
    except TimeoutError as error:
        raise _no_answer(seconds) from error
    except RuntimeError as error:
        raise as_exception(str(error)) from error


def _no_answer(seconds: float) -> OSError:
    return OSError(f"no answer in {seconds:.0f} s")


def as_exception(text: str) -> Exception:
    """Return the exception that the text of an hdfs-native error stands for."""
    if not _RPC.search(text) and (told := meaning(text)) is not None:
        return StoreRefusal(NO_KDC if "no KDC" in told else NO_CREDENTIALS, _without_token(told))
    if found := _RPC.search(text):
        java, said = found.groups()
    elif found := _OWN.fullmatch(text.strip()):
        java, said = found[1], found[2] or found[1]
    else:
        java, said = "", text
    return refusal(java, said.replace("\\n", "\n").replace('\\"', '"').replace("\\t", " "))


def _without_token(told: str) -> str:
    """Return the error about credentials; in a container, which has tokens, name the missing one.

    Args:
        told: the meaning of the client's error.
    """
    if not (told == NO_TICKET and has_tokens(os.environ)):
        return told
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
