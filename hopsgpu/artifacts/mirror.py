"""A local copy of a directory on the lake whose files grow."""

from __future__ import annotations

from pathlib import Path

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.lake import FileStatus, LakePath, is_draft

_CHUNK = 4 * 2**20
# Part of the names of TensorBoard's event files, which are only appended to.
_EVENTS = "tfevents"
_DEEPEST = 16


class Mirror:
    """A copy of a directory on the lake, in a local directory.

    An event file that has grown is read from where the last reading ended. An event file that has
    become smaller is read again from its start, and so is any other file that has changed. Files
    that are removed from the lake stay in the copy.

    Args:
        source: directory on the lake; it need not exist yet.
        target: a local directory.
    """

    def __init__(self, source: LakePath, target: Path) -> None:
        self._source = source
        self._target = target
        # For files that are copied as a whole, by URL: size and modification time at the last copy.
        self._read: dict[str, tuple[int, int]] = {}

    def renew(self) -> int:
        """Copy what has changed since the last call.

        Returns:
            The number of files on the lake.

        Raises:
            StoreError: the lake refused the operation, or the directories are nested too deep.
        """
        return self._renew(self._source, self._target, 0)

    def _renew(self, source: LakePath, target: Path, depth: int) -> int:
        if depth > _DEEPEST:
            raise StoreError(
                f"cannot copy {source.url}: its directories are nested more than {_DEEPEST} deep"
            )
        if not source.exists():
            return 0
        files = 0
        for entry in source.entries():
            if is_draft(entry.name):
                continue
            try:
                below = source / entry.name
            except ConfigError:  # hopsgpu gives no file such a name
                continue
            if entry.is_directory:
                (target / entry.name).mkdir(exist_ok=True)
                files += self._renew(below, target / entry.name, depth + 1)
            else:
                if _EVENTS in entry.name:
                    _read_on(below, entry, target / entry.name)
                else:
                    self._read_anew(below, entry, target / entry.name)
                files += 1
        return files

    def _read_anew(self, source: LakePath, status: FileStatus, target: Path) -> None:
        changed = (status.size, status.modified)
        if self._read.get(source.url) != changed:
            source.download(target)
            self._read[source.url] = changed


def _read_on(source: LakePath, status: FileStatus, target: Path) -> None:
    at = target.stat().st_size if target.exists() else 0
    if at == status.size and target.exists():
        return
    if at > status.size:
        at = 0
    with source.open() as remote, target.open("r+b" if at else "wb") as local:
        remote.seek(at)
        local.seek(at)
        while at < status.size and (chunk := remote.read(min(_CHUNK, status.size - at))):
            at += local.write(chunk)
