"""Sizes and digests that identify files; those of an upload are known before its end.

The digests find damage, not tampering: each lies beside its file, and none is cryptographic.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.errors import ConfigError
from hopsgpu.storage.filesystem import BLOCK
from hopsgpu.storage.names import is_path_below
from hopsgpu.units import MIB

# A 128-bit digest that detects damage, at 10 GB/s or more per core. It is not cryptographic.
DIGEST = "xxh3_128"
# A second reader digests the last part of a large file, in a tenth of a second. HDFS writes the
# manifest while this part is uploaded.
_AHEAD_BYTES = 256 * 2**20
MIN_AHEAD_BYTES = 16 * 2**20
# The bound of a manifest or a checkpoint's record: it has about 130 bytes for each file, so this is
# enough for 60,000 files.
MAX_LIST_BYTES = 8 * MIB
# No file system has a larger file.
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class FileFacts:
    """The size and digest (`DIGEST`, in hexadecimal) that identify a file."""

    bytes: int
    digest: str


def read_facts(content: Any, digest: str) -> dict[str, FileFacts]:
    """Return the facts of files from parsed JSON: by path, {"bytes": size, digest: hexadecimal}.

    Raises:
        ValueError: there are no files, a path is not inside the directory, or a size or digest is
            invalid. Unexpected content may also raise the other errors of `JSON_ERRORS`.
    """
    files = {path: FileFacts(fields["bytes"], fields[digest]) for path, fields in content.items()}
    if not files:
        raise ValueError("it lists no files")
    for path, facts in files.items():
        if not is_path_below(path):
            raise ValueError(f"{path!r:.99} is not a path inside the directory")
        if type(facts.bytes) is not int or not 0 <= facts.bytes <= _MAX_BYTES:
            raise ValueError(f"{facts.bytes!r:.99} is not a size of {path!r}")
        if not isinstance(facts.digest, str):
            raise ValueError(f"{facts.digest!r:.99} is not a digest of {path!r}")
    return files


def check_list(content: bytes, count: int) -> bytes:
    """Return the content of a file with the facts of `count` files; refuse what nobody could read.

    Raises:
        ConfigError: the content has more than `MAX_LIST_BYTES`.
    """
    if len(content) > MAX_LIST_BYTES:
        raise ConfigError(
            f"the list of {count} files has {len(content)} bytes, and at most {MAX_LIST_BYTES} are"
            " accepted: put the files into fewer ones, such as an archive, or shorten what"
            " describes them"
        )
    return content


class Digest:
    def __init__(self) -> None:
        import xxhash

        self._bytes = 0
        self._state: Any = xxhash.xxh3_128()

    def update(self, block: bytes | memoryview) -> None:
        self._bytes += len(block)
        self._state.update(block)

    def copy(self) -> Digest:
        other = Digest.__new__(Digest)
        other._bytes, other._state = self._bytes, self._state.copy()
        return other

    @property
    def facts(self) -> FileFacts:
        return FileFacts(self._bytes, self._state.hexdigest())


class DigestingReader:
    """Reads a local file once.

    Args:
        on_facts: called with the file's facts at the end; for a large file also earlier, by a
            second reader of the last part. Compare early facts with `facts`: the file may change
            in between.
        ahead_bytes: size of the last part.
        min_ahead_bytes: size of the smallest file with a second reader.
    """

    def __init__(
        self,
        source: Path,
        on_facts: Callable[[FileFacts], None] | None,
        ahead_bytes: int = _AHEAD_BYTES,
        min_ahead_bytes: int = MIN_AHEAD_BYTES,
    ) -> None:
        self._ahead_bytes = ahead_bytes
        self._min_ahead_bytes = min_ahead_bytes
        self._source = source
        self._on_facts = on_facts
        self._digest = Digest()

    @property
    def facts(self) -> FileFacts:
        return self._digest.facts

    def blocks(self) -> Generator[bytes, None, None]:
        """Yield the file's bytes in blocks.

        Raises:
            ConfigError: the file cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(self._source.open("rb", buffering=0))
            except OSError as error:
                raise ConfigError(f"{self._source} cannot be read: {error.strerror}") from error
            size = os.fstat(file.fileno()).st_size
            is_large = size >= self._min_ahead_bytes
            ahead_from = max(size - self._ahead_bytes, 0) if is_large else None
            offset = 0
            while block := file.read(BLOCK):
                if self._on_facts is not None and ahead_from is not None and offset >= ahead_from:
                    ahead_from = None
                    stack.enter_context(
                        _digest_ahead(file.fileno(), offset, self._digest, self._on_facts)
                    )
                self._digest.update(block)
                offset += len(block)
                yield block
        if self._on_facts is not None:
            self._on_facts(self.facts)


@contextlib.contextmanager
def _digest_ahead(
    file: int, begin: int, digest: Digest, on_facts: Callable[[FileFacts], None]
) -> Iterator[None]:
    """Read the rest of an open file and report its facts, in a thread during the context."""
    digest = digest.copy()
    stopped = threading.Event()

    def read() -> None:
        at = begin
        # Reuse one buffer: new memory for each block costs more than reading and digesting it.
        buffer = memoryview(bytearray(BLOCK))
        # The reader for the upload raises the same error.
        with contextlib.suppress(OSError):
            while not stopped.is_set():
                size = os.preadv(file, [buffer], at)
                if not size:
                    on_facts(digest.facts)
                    return
                digest.update(buffer[:size])
                at += size

    thread = threading.Thread(target=read, name="hopsgpu-digest", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can start: the facts are known at the file's end
        yield
        return
    try:
        yield
    finally:
        stopped.set()
        thread.join()
