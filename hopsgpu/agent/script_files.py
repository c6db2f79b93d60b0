"""The files of a script on a node: unpacked once for all containers, copied for each container.

As under torchrun, the ranks of a container share the working directory, HOME and TMPDIR: rank 0 may
write what the others read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopsgpu.agent.kept_mirror import KeptMirror
from hopsgpu.artifacts.kept_files import KeptFile, RankIndex, download, place_of
from hopsgpu.errors import StoreError
from hopsgpu.packaging.python_env import archives
from hopsgpu.packaging.script import KeptDirectories, StoredScript
from hopsgpu.rank.files import TEMPORARY, WORK
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.error_messages import DAMAGED
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.node_copies import ensure_copy, shared_directories

_DIRECTORY = "hopsgpu-scripts"
_RESTORED = "restored"
# Name in the attempt's directory.
_SHARED = "shared"
_HOME = "home"


@dataclass(frozen=True)
class ScriptFiles:
    """The files of the script that a `run` message names.

    Attributes:
        restored: files that are put back before the script starts.
        restored_from: URL of the run that has them.
    """

    stored: StoredScript
    kept: KeptDirectories
    restored: tuple[KeptFile, ...]
    restored_from: str

    @classmethod
    def parse(cls, values: Mapping[str, Any], payload: bytes) -> ScriptFiles:
        """Return what `fields` and `dump_restored` returned.

        Args:
            payload: ends with the result of `dump_restored`.
        """
        size = int(values["restored_bytes"])
        restored = tuple(
            KeptFile(**{**fields, "facts": FileFacts(*fields["facts"])})
            for fields in json.loads(payload[len(payload) - size :])
        )
        return cls(
            StoredScript.from_fields(values["stored"]),
            KeptDirectories.from_fields(values["kept"]),
            restored,
            values["restored_from"],
        )

    def fields(self, restored_bytes: int) -> dict[str, Any]:
        return {
            "stored": self.stored.as_fields(),
            "kept": self.kept.as_fields(),
            "restored_bytes": restored_bytes,
            "restored_from": self.restored_from,
        }

    def dump_restored(self) -> bytes:
        """Return the list of restored files, which may be too long for a message's fields."""
        return json.dumps(
            [
                {**vars(file), "facts": [file.facts.bytes, file.facts.digest]}
                for file in self.restored
            ]
        ).encode()

    def unpack(self, environ: Mapping[str, str], container: Path) -> Path:
        """Return the directory of this node with the unpacked archive.

        Args:
            environ: environment of the container.
            container: the container's own directory.

        Raises:
            ConfigError: it is no archive, or has unsafe entries.
            StoreError: the archive is missing on the lake, or has changed there.
            OSError: the directory cannot be written.
        """

        def fill(home: Path) -> None:
            archive = home.parent / f"{self.stored.digest}-{self.stored.url.rpartition('/')[2]}"
            try:
                LakePath(self.stored.url).download(archive)
                with archive.open("rb") as content:
                    digest = hashlib.file_digest(content, "sha256").hexdigest()
                if digest != self.stored.digest:
                    raise StoreError(
                        f"{self.stored.url} has changed: SHA-256 mismatch: expected"
                        f" {self.stored.digest}, found {digest}: remove its directory, and hopsgpu"
                        " stores the script again",
                        DAMAGED,
                    )
                archives.unpack(archive, "", home, ())
            finally:
                archive.unlink(missing_ok=True)

        places = shared_directories(environ, container, _DIRECTORY)
        return ensure_copy(places, self.stored.digest, fill)

    def download_restored(self, directory: Path) -> Path:
        """Download the files that are put back, once for all ranks of the container.

        Raises:
            StoreError: the lake failed, or a file is damaged.
            OSError: the directory cannot be written.
        """
        target = directory / _RESTORED
        target.mkdir(mode=0o700)
        download(self.restored, LakePath(self.restored_from), target)
        return target

    def copy_to(self, unpacked: Path, restored: Path, directory: Path) -> Path:
        """Copy the script for the ranks of a container, with the files that are put back.

        Args:
            directory: the directory of the container's attempt.

        Returns:
            The directory that the ranks share.

        Raises:
            OSError: the directory cannot be written.
        """
        home = directory / _SHARED
        for source, target in (("work", WORK), ("script", "script"), ("modules", "modules")):
            shutil.copytree(unpacked / source, home / target, symlinks=True)
        for name in (_HOME, TEMPORARY):
            (home / name).mkdir(mode=0o700)
        if self.kept.checkpoints is not None and self.restored:
            # The lake's files replace those that have travelled with the script.
            shutil.rmtree(home / WORK / self.kept.checkpoints, ignore_errors=True)
        for file in self.restored:
            target_file = home / WORK / file.name
            target_file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(restored / file.name, target_file)
        return home

    def link(self, shared: Path, rank_directory: Path) -> None:
        """Let a rank use the shared directories as its own.

        Raises:
            OSError: the directory cannot be written.
        """
        for name in (WORK, _HOME, TEMPORARY):
            (rank_directory / name).symlink_to(shared / name)

    def roots(self, home: Path) -> list[str]:
        """Return the directories that a rank imports the user's modules from."""
        modules = [str(home / "modules" / str(number)) for number in range(self.stored.roots)]
        return [*(str(home / WORK / path) for path in self.stored.paths), *modules]

    def mirror(self, run: LakePath, attempt: int, rank: int, home: Path) -> KeptMirror | None:
        """Return the mirror of the shared directories; None if none is kept.

        Args:
            rank: the first rank of the container.
            home: what `copy_to` returned.
        """
        directories: Sequence[str] = self.kept.mirrored_paths
        if not directories:
            return None
        names = frozenset(file.name for file in self.restored)
        place, index = run / place_of(attempt, rank), RankIndex(attempt, rank)
        checkpoints = self.kept.checkpoints
        return KeptMirror(home / WORK, directories, place, index, names, checkpoints=checkpoints)
