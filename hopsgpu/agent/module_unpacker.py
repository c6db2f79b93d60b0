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

# A trial follows within milliseconds; what outlives a rank may change files later.
_KNOWN_SECONDS = 1.0

_State = dict[str, tuple[int, int] | None]


class UnpackedModules:
    """A directory with the content of an archive, unpacked again only if that has changed.

    A launch on a held gang mostly brings the modules of the previous launch, and unpacking hundreds
    of them takes longer than everything else. Files that a rank has written there are removed for
    the next attempt; only Python's compiled files stay, which depend on the sources beside them.
    The class is thread-safe.

    Attributes:
        attempts: number of attempts that received the directory.
    """

    def __init__(self) -> None:
        self.attempts = 0
        self._lock = threading.Lock()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._name = ""
        self._state: _State = {}
        # Until when it is known to be what it was.
        self._same_until = float("-inf")

    def close(self) -> None:
        """Remove the directory."""
        with self._lock:
            self._remove()

    def look(self, attempts: int) -> None:
        """Check what the ranks of an attempt have changed there, once they are gone.

        Args:
            attempts: value of `attempts` when they got the directory; if others have it by now,
                nothing is done.
        """
        with self._lock:
            if attempts == self.attempts and self._is_same():
                self._same_until = time.monotonic() + _KNOWN_SECONDS

    def prepare(self, name: str, archive: bytes) -> None:
        """Unpack an archive before any attempt wants it.

        Args:
            name, archive: as for `roots`.

        Raises:
            OSError: the files cannot be written.
        """
        with self._lock:
            if name != self._name or not self._is_same():
                self._fill(name, archive)
                # No rank knows the directory yet.
                self._same_until = time.monotonic() + _KNOWN_SECONDS

    def roots(self, name: str, archive: bytes, count: int) -> list[str]:
        """Return the directories to import from.

        Args:
            name: name that differs for different archives.
            archive: a zip with the top-level directories "0", "1", …
            count: number of these directories.

        Raises:
            OSError: the files cannot be written.
        """
        with self._lock:
            same = time.monotonic() < self._same_until or self._is_same()
            self.attempts, self._same_until = self.attempts + 1, float("-inf")
            held = self._directory
            if held is None or name != self._name or not same:
                held = self._fill(name, archive)
            return [str(Path(held.name, str(number))) for number in range(count)]

    def _is_same(self) -> bool:
        try:
            return self._directory is not None and _state_of(self._directory.name) == self._state
        except OSError:
            return False  # somebody removes files, or has made them unreadable

    def _remove(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _fill(self, name: str, archive: bytes) -> tempfile.TemporaryDirectory[str]:
        self._remove()
        home = Path("hopsgpu").resolve()
        home.mkdir(mode=0o700, exist_ok=True)
        # What a rank has made unremovable stays until the container's end.
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
    """Return what tells whether files are still the same: no program can set the time of a
    change.
    """
    found: _State = {}
    for path, below, files in os.walk(directory):
        below[:] = [name for name in below if name != "__pycache__"]
        found.update((f"{path}/{name}", None) for name in below)
        for name in files:
            file = f"{path}/{name}"
            there = os.lstat(file)
            found[file] = (there.st_ino, there.st_ctime_ns)
    return found
