"""The user's modules as files in the container, for the ranks of successive attempts."""

from __future__ import annotations

import io
import os
import stat
import tempfile
import threading
import time
import zipfile
from pathlib import Path

# A search's next trial starts within milliseconds. For longer a check does not hold: processes that
# outlive a rank may change files.
_UNCHANGED_SECONDS = 1.0

_State = dict[str, tuple[int, int] | None]


class UnpackedModules:
    """A directory with the content of an archive, unpacked again only after a change. Thread-safe.

    Most launches on a held gang have the modules of the previous launch. Unpacking hundreds of
    modules takes longer than the rest of the start. Files that a rank has written are removed
    before the next attempt, except for Python's compiled files.

    Attributes:
        uses: number of attempts that received the directory.
    """

    def __init__(self, unchanged_seconds: float = _UNCHANGED_SECONDS) -> None:
        self.uses = 0
        self._unchanged_seconds = unchanged_seconds
        self._lock = threading.Lock()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._name = ""
        self._state: _State = {}
        # Time until which the directory is assumed unchanged.
        self._unchanged_until = float("-inf")

    def close(self) -> None:
        with self._lock:
            self._remove()

    def verify(self, uses: int) -> None:
        """Check for changes once the ranks of the attempt have exited that was number `uses`."""
        with self._lock:
            if uses == self.uses and self._is_same():
                self._unchanged_until = time.monotonic() + self._unchanged_seconds

    def prepare(self, name: str, archive: bytes) -> None:
        """Unpack an archive before an attempt needs it."""
        with self._lock:
            if name != self._name or not self._is_same():
                self._fill(name, archive)
                # No rank knows the directory yet.
                self._unchanged_until = time.monotonic() + self._unchanged_seconds

    def roots(self, name: str, archive: bytes, count: int) -> list[str]:
        """Return the directories to import from, for one attempt.

        Args:
            name: differs for different archives.
            archive: a zip with `count` top-level directories "0", "1", …
        """
        with self._lock:
            is_same = time.monotonic() < self._unchanged_until or self._is_same()
            self.uses, self._unchanged_until = self.uses + 1, float("-inf")
            directory = self._directory
            if directory is None or name != self._name or not is_same:
                directory = self._fill(name, archive)
            return [str(Path(directory.name, str(number))) for number in range(count)]

    def _is_same(self) -> bool:
        try:
            return self._directory is not None and _state_of(self._directory.name) == self._state
        except OSError:
            return False  # a process removes files, or has made them unreadable

    def _remove(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _fill(self, name: str, archive: bytes) -> tempfile.TemporaryDirectory[str]:
        self._remove()
        home = Path("hopsgpu").resolve()
        home.mkdir(mode=0o700, exist_ok=True)
        # Ignore errors: files that a rank has made unremovable stay until the container's end.
        self._directory = tempfile.TemporaryDirectory(
            prefix="modules-", dir=home, ignore_cleanup_errors=True
        )
        with zipfile.ZipFile(io.BytesIO(archive)) as packed:
            packed.extractall(self._directory.name)
            for entry in packed.infolist():
                if entry.external_attr >> 16 & stat.S_IXUSR:
                    # zipfile keeps no modes.
                    Path(self._directory.name, entry.filename).chmod(0o700)
        self._name, self._state = name, _state_of(self._directory.name)
        return self._directory


def _state_of(directory: str) -> _State:
    """Return inode and change time by path: no program can set the change time."""
    state: _State = {}
    for path, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if name != "__pycache__"]
        state.update((f"{path}/{name}", None) for name in directories)
        for name in files:
            file = f"{path}/{name}"
            status = os.lstat(file)
            state[file] = (status.st_ino, status.st_ctime_ns)
    return state
