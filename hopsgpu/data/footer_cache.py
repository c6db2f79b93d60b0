"""Facts from the footers of Parquet files, on this machine's disk, for later launches of a user.

A launch on a known table lists its files. It reads the footers of new files, and of files whose
length or time of modification has changed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hopsgpu.core.bounded_reads import read_file
from hopsgpu.core.cache_directory import cache_directory
from hopsgpu.errors import ConfigError, StoreError

log = logging.getLogger(__name__)

_VERSION = 1
_DIRECTORY = "footers"
# The most tables whose facts are cached, and the most bytes of one table's facts, of some hundred
# thousand files.
_MAX_TABLES = 32
_MAX_BYTES = 128 * 2**20
# A file that is as young as this when it is read may be replaced by one with the same time.
_SETTLED_MS = 3_000


class FooterFacts(NamedTuple):
    """Facts from one file's footer.

    Attributes:
        name: path below the table's URL; "" if the URL is the file's own.
        modified: milliseconds since the epoch, by the file system's clock.
        groups: number of rows of each row group.
        row_bytes: bytes of all rows in memory.
        list_lengths: from `sizes.FooterSizes`.
        refused, instants: as in `source.ParquetSource`, of this file.
    """

    name: str
    size: int
    modified: int
    groups: tuple[int, ...]
    row_bytes: int
    list_lengths: tuple[int, ...]
    refused: Mapping[str, str]
    instants: tuple[str, ...]


@dataclass(frozen=True)
class TableFacts:
    """Facts of the files of one table, all of which have one schema, as Arrow serialises it."""

    schema: bytes
    files: Mapping[str, FooterFacts]


class FooterCache:
    """A directory with the facts of tables, one file for each URL and user of the lake.

    Nothing depends on it: if the directory cannot be used, all footers are read.

    Args:
        directory: created if it does not exist; None for no cache.
        user: name of the user on the lake. A table's facts are used for the user who has read it.
    """

    def __init__(self, directory: Path | None, user: str) -> None:
        self._directory = directory
        self._user = user

    def load(self, url: str) -> TableFacts | None:
        """Return the facts of a table, or None."""
        path = self._path_of(url)
        if path is None:
            return None
        try:
            content = json.loads(read_file(path, _MAX_BYTES))
            if content["version"] != _VERSION or content["url"] != url:
                return None
            kinds = [
                (tuple(lengths), dict(refused), tuple(instants))
                for lengths, refused, instants in content["kinds"]
            ]
            files = {
                name: FooterFacts(name, size, modified, tuple(groups), row_bytes, *kinds[kind])
                for name, size, modified, groups, row_bytes, kind in content["files"]
            }
            os.utime(path)
            return TableFacts(base64.b64decode(content["schema"]), files)
        except FileNotFoundError:
            return None
        except (OSError, StoreError, ValueError, KeyError, TypeError, IndexError) as error:
            log.info("the cached facts of %s cannot be used, all footers are read: %s", url, error)
            return None

    def store(self, url: str, schema: bytes, files: Iterable[FooterFacts], now: float) -> None:
        """Store the facts of a table, except of files that may still be replaced unnoticed.

        Args:
            now: seconds since the epoch before the files were listed.
        """
        path = self._path_of(url)
        if path is None:
            return
        settled = now * 1000 - _SETTLED_MS
        kinds: list[list[Any]] = []
        rows = []
        for facts in files:
            if facts.modified > settled:
                continue
            kind = [facts.list_lengths, facts.refused, facts.instants]
            # Nearly always, all files have the same.
            if not kinds or kinds[-1] != kind:
                kinds.append(kind)
            rows.append([*facts[:5], len(kinds) - 1])
        content = {
            "version": _VERSION,
            "url": url,
            "schema": base64.b64encode(schema).decode(),
            "kinds": kinds,
            "files": rows,
        }
        encoded = json.dumps(content, separators=(",", ":")).encode()
        if len(encoded) > _MAX_BYTES:
            log.info("the facts of %s take %d bytes: they are not cached", url, len(encoded))
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(path, encoded)
            self._prune(path.parent)
        except OSError as error:
            log.info("the facts of %s are not cached: %s", url, error)

    def _path_of(self, url: str) -> Path | None:
        if self._directory is None:
            return None
        digest = hashlib.sha256(f"{self._user}\n{url}".encode()).hexdigest()
        return self._directory / f"{digest[:32]}.json"

    def _prune(self, directory: Path) -> None:
        ages = sorted((path.stat().st_mtime, path) for path in directory.glob("*.json"))
        for _, path in ages[:-_MAX_TABLES]:
            path.unlink(missing_ok=True)


def user_cache(user: str) -> FooterCache:
    """Return the cache below the user's cache directory; one that is empty if there is none."""
    try:
        return FooterCache(cache_directory(os.environ) / _DIRECTORY, user)
    except ConfigError as error:
        log.info("footers are not cached: %s", error)
        return FooterCache(None, user)


def _replace(path: Path, content: bytes) -> None:
    descriptor, draft = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(draft).rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(draft).unlink()
        raise
