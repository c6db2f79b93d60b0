"""What files are recognised by, also before all of one is uploaded."""

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

# Of 128 bits, no shield against forgers: what is damaged is found, at 10 GB/s and more a core.
DIGEST = "xxh3_128"
# To read so much takes a tenth of a second, and to upload it longer than HDFS takes to write the
# manifest beside it.
_AHEAD = 256 * 2**20
_LEAST_AHEAD = 16 * 2**20
# No file system has a larger file.
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Facts:
    """What a file is recognised by.

    Attributes:
        bytes: its size.
        digest: of its content, by the algorithm `DIGEST`, in hexadecimal.
    """

    bytes: int
    digest: str


def read_facts(told: Any, digest: str) -> dict[str, Facts]:
    """What files are recognised by, of JSON: by path, {"bytes": size, digest: hexadecimal}.

    Args:
        told: as it was read; anything.
        digest: the key of the digests.

    Raises:
        ValueError: no files, a path that is not inside, or what is no size or no digest of a
            file; or what else `ODD_JSON` has.
    """
    files = {path: Facts(each["bytes"], each[digest]) for path, each in told.items()}
    if not files:
        raise ValueError("no files")
    for path, facts in files.items():
        if not is_path_below(path):
            raise ValueError(f"{path!r:.99} is no path inside")
        if type(facts.bytes) is not int or not 0 <= facts.bytes <= _LARGEST:
            raise ValueError(f"{facts.bytes!r:.99} is no size of {path!r}")
        if not isinstance(facts.digest, str):
            raise ValueError(f"{facts.digest!r:.99} is no digest of {path!r}")
    return files


class Digest:
    """Of bytes that come one block after another."""

    def __init__(self) -> None:
        import xxhash

        self._bytes = 0
        self._state: Any = xxhash.xxh3_128()

    def update(self, block: bytes) -> None:
        """Takes in the next block."""
        self._bytes += len(block)
        self._state.update(block)

    def copy(self) -> Digest:
        """Another, which has taken in the same."""
        other = Digest.__new__(Digest)
        other._bytes, other._state = self._bytes, self._state.copy()
        return other

    @property
    def facts(self) -> Facts:
        """Of what it has taken in."""
        return Facts(self._bytes, self._state.hexdigest())


class Reading:
    """A local file, read once from its beginning to its end.

    Args:
        source: the file.
        known: told what the file is recognised by: once all was read, and where the file is large
            once before, by a second reader of its last part. What is said before is to be compared
            with `facts`: the file may be changed meanwhile.
    """

    def __init__(self, source: Path, known: Callable[[Facts], None] | None) -> None:
        self._source = source
        self._known = known
        self._digest = Digest()

    @property
    def facts(self) -> Facts:
        """Of what `blocks` gave."""
        return self._digest.facts

    def blocks(self) -> Generator[bytes, None, None]:
        """Its bytes, in blocks; to be asked for once.

        Raises:
            ConfigError: it cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(self._source.open("rb", buffering=0))
            except OSError as error:
                raise ConfigError(f"{self._source} cannot be read: {error.strerror}") from error
            size = os.fstat(file.fileno()).st_size
            ahead_from = max(size - _AHEAD, 0) if size >= _LEAST_AHEAD else None
            done = 0
            while block := file.read(BLOCK):
                if self._known is not None and ahead_from is not None and done >= ahead_from:
                    ahead_from = None
                    stack.enter_context(_ahead(file.fileno(), done, self._digest, self._known))
                self._digest.update(block)
                done += len(block)
                yield block
        if self._known is not None:
            self._known(self.facts)


@contextlib.contextmanager
def _ahead(file: int, begin: int, digest: Digest, known: Callable[[Facts], None]) -> Iterator[None]:
    """While inside, the rest of an open file is read by another thread, which tells its facts."""
    digest = digest.copy()
    over = threading.Event()

    def read() -> None:
        at = begin
        # Whoever reads it for its upload meets an error too, and raises it.
        with contextlib.suppress(OSError):
            while not over.is_set():
                block = os.pread(file, BLOCK, at)
                if not block:
                    known(digest.facts)
                    return
                digest.update(block)
                at += len(block)

    thread = threading.Thread(target=read, name="hopsgpu-digest", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # of threads there may be no more: it is known at its end
        yield
        return
    try:
        yield
    finally:
        over.set()
        thread.join()
