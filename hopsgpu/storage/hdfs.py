"""HDFS by hdfs-native: hdfs:// and viewfs://, high availability and Kerberos by its own reading
of the Hadoop configuration.

A name service with several name nodes is built to hdfs-native's documentation, and untried here.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hopsgpu.storage.bounded_calls import Hands, Steps
from hopsgpu.storage.error_messages import Refused, refusal
from hopsgpu.storage.filesystem import Status
from hopsgpu.storage.umask import creation_mask

T = TypeVar("T")

# hdfs-native's own are 15 attempts with pauses of up to 15 s; those here come again by
# `patience.Patience`, which also waits for what hdfs-native does not.
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
# It waits for a name node's answer for ever. A write may also wait for a DataNode that is lost
# (60 s), and for another.
_ANSWER_SECONDS = 60.0
_QUICK_ANSWER_SECONDS = 5.0
_DATA_SECONDS = 180.0
# hdfs-native waits for a DataNode that is gone as long as TCP does; another connection may do.
_READ_SECONDS = 60.0
# Of 64 kB: few, since many files are read at a time, and enough to pass from thread to thread.
_PACKETS = 4
# As hdfs-native names its errors: RPCError("org.apache…Exception", "what was said").
_RPC = re.compile(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)"\)', re.DOTALL)
_OWN = re.compile(r'(\w+)(?:\("?(.*?)"?\))?', re.DOTALL)


class Hdfs:
    """A `FileSystem` on HDFS.

    Args:
        url: of the file system, without a path.
        quick: gives up on a name node after some seconds.
    """

    def __init__(self, url: str, *, quick: bool) -> None:
        from hdfs_native import Client

        self._client = Client(url, _QUICK if quick else _PATIENT)
        self._answer = _QUICK_ANSWER_SECONDS if quick else _ANSWER_SECONDS
        self._mask = creation_mask(os.environ)
        self._hands = Hands("hopsgpu-hdfs")

    def make(self, path: str) -> None:
        """Creates a directory, with those above it."""
        self._ask(lambda: self._client.mkdirs(path, 0o777 & ~self._mask, True))

    def share(self, path: str, mode: int) -> None:
        """Sets permission bits."""
        self._ask(lambda: self._client.set_permission(path, mode))

    def stat(self, path: str) -> Status:
        """Of a file or directory."""
        return _status(self._ask(lambda: self._client.get_file_info(path)))

    def entries(self, path: str) -> tuple[Status, ...]:
        """Of what lies in a directory."""
        return tuple(map(_status, self._ask(lambda: list(self._client.list_status(path)))))

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[io.RawIOBase]:
        """A file's bytes."""
        yield _Reader(self._ask(lambda: self._client.read(path)), self._hands)

    def blocks(self, path: str) -> Iterator[bytes]:
        """A file's bytes in a row."""

        def begin() -> Iterator[bytes]:
            reader = self._client.read(path)
            return iter(reader.read_range_stream(0, len(reader)))

        # Opened in the first step too: to wake a thread costs as much as to read a small file.
        return _packets(self._hands, begin, min(self._answer, _READ_SECONDS))

    def write(self, path: str, blocks: Iterable[bytes], *, replace: bool) -> None:
        """Makes a file of blocks."""
        from hdfs_native import WriteOptions

        options = WriteOptions(
            permission=0o666 & ~self._mask, overwrite=replace, create_parent=False
        )
        self._fill(self._ask(lambda: self._client.create(path, options)), blocks)

    def append(self, path: str, content: bytes) -> None:
        """Adds to the end of a file that is there.

        What a writer that was killed, or whose answer was lost, holds open is taken from it.
        """
        try:
            writer = self._ask(lambda: self._client.append(path))
        except FileExistsError as error:  # AlreadyBeingCreatedException
            closed = self._ask(lambda: self._client.recover_lease(path))
            what = "is open for writing elsewhere" + (", and was closed now" if closed else "")
            raise Refused("AlreadyBeingCreatedException", f"{path} {what}") from error
        self._fill(writer, [content])

    def rename(self, source: str, target: str, *, replace: bool) -> None:
        """Renames."""
        self._ask(lambda: self._client.rename(source, target, replace))

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with all below it."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self._client.delete(path, True))

    def _ask(self, call: Callable[[], T]) -> T:
        return _within(self._hands, self._answer, call)

    def _fill(self, writer: Any, blocks: Iterable[bytes]) -> None:
        def fill(steps: Steps) -> None:
            # One thread fetches and writes: what it has read is in its core's cache still.
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
                raise _no_answer(_DATA_SECONDS) from error


class _Reader(io.RawIOBase):
    """hdfs-native's reader, which has no `readinto`, as other readers of Python."""

    def __init__(self, reader: Any, hands: Hands) -> None:
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
        # hdfs-native panics where it is told to seek past the end.
        self._reader.seek(min(max(start + offset, 0), len(self._reader)))
        return self.tell()

    def read(self, size: int | None = -1) -> bytes:
        wanted = -1 if size is None else size
        content: bytes = _within(self._hands, _DATA_SECONDS, lambda: self._reader.read(wanted))
        return content

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """The quick way for many bytes: `read` has them in memory three times, new each time."""
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


def _packets(hands: Hands, begin: Callable[[], Iterator[bytes]], seconds: float) -> Iterator[bytes]:
    """Bytes of a file in a row, read ahead by hdfs-native, in packets of 64 kB.

    Args:
        hands: in which it is waited for.
        begin: gives hdfs-native's stream.
        seconds: that it may take until the first packets.
    """
    with hands.one() as hand:
        with _errors(seconds):
            packets, some = hand.do(functools.partial(_begun, begin), seconds)
        more = functools.partial(_some, packets)
        while len(some) == _PACKETS:
            # The next ones are fetched while these are worked on.
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


def _within(hands: Hands, seconds: float, call: Callable[[], T]) -> T:
    """What a call of hdfs-native returns, where it does in time; else it goes on in its thread."""
    with hands.one() as hand, _errors(seconds):
        return hand.do(call, seconds)


@contextlib.contextmanager
def _errors(seconds: float) -> Iterator[None]:
    """hdfs-native's errors are told apart."""
    try:
        yield
    except TimeoutError as error:
        raise _no_answer(seconds) from error
    except RuntimeError as error:
        raise told(str(error)) from error


def _no_answer(seconds: float) -> OSError:
    return OSError(f"no answer in {seconds:.0f} s")


def told(text: str) -> Exception:
    """What hdfs-native's text of an error says."""
    if found := _RPC.search(text):
        java, said = found.groups()
    elif found := _OWN.fullmatch(text.strip()):
        java, said = found[1], found[2] or found[1]
    else:
        java, said = "", text
    return refusal(java, said.replace("\\n", "\n").replace('\\"', '"').replace("\\t", " "))


def _status(found: Any) -> Status:
    return Status(
        found.path.rstrip("/").rpartition("/")[2],
        found.modification_time,
        found.owner,
        found.permission,
        found.isdir,
        0 if found.isdir else found.length,
    )
