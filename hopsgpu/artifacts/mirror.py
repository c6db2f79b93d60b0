"""A local copy of a directory on the lake whose files grow."""

from __future__ import annotations

from pathlib import Path

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.lake import FileStatus, LakePath, is_draft

_CHUNK = 4 * 2**20
# Part of the names of TensorBoard's event files, which only grow.
_EVENTS = "tfevents"
_MAX_DEPTH = 16


class Mirror:
    """A copy of a directory on the lake, in a local directory. The source need not exist yet.

    Only the new end of an event file is read. An event file that has become smaller, or another
    file that has changed, is read again from the start. Files that are removed from the lake stay
    in the copy.
    """

    def __init__(self, source: LakePath, target: Path) -> None:
        self._source = source
        self._target = target
        # URL → size and modification time at the last copy, for files that are copied as a whole.
        self._copied: dict[str, tuple[int, int]] = {}

    def update(self) -> int:
        """Copy the changes since the last call; return the number of files on the lake.

        Raises:
            StoreError: the lake refused the operation, or the directories are nested too deep.
        """
        return self._update(self._source, self._target, 0)

    def _update(self, source: LakePath, target: Path, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise StoreError(
                f"cannot copy {source.url}: its directories are nested more than {_MAX_DEPTH} deep"
            )
        if not source.exists():
            return 0
        files = 0
        for entry in source.entries():
            if is_draft(entry.name):
                continue
            try:
                below = source / entry.name
            except ConfigError:  # not a file of hopsgpu
                continue
            if entry.is_directory:
                (target / entry.name).mkdir(exist_ok=True)
                files += self._update(below, target / entry.name, depth + 1)
            else:
                if _EVENTS in entry.name:
                    _append_new(below, entry, target / entry.name)
                else:
                    self._copy_if_changed(below, entry, target / entry.name)
                files += 1
        return files

    def _copy_if_changed(self, source: LakePath, status: FileStatus, target: Path) -> None:
        state = (status.size, status.modified)
        if self._copied.get(source.url) != state:
            source.download(target)
            self._copied[source.url] = state


def _append_new(source: LakePath, status: FileStatus, target: Path) -> None:
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
