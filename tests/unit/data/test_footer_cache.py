"""A table that was read before: only the footers of new and changed files are read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data import footer_cache, source
from hopsgpu.data.footer_cache import FooterCache
from hopsgpu.data.source import ParquetSource, read_source
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import LakePath


class Table:
    """A table, its cache, and the names of files whose footers were read last."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = root / "table"
        self.directory.mkdir()
        self.cache = FooterCache(root / "cache", "alice")
        self.footers: list[str] = []
        read = source.read_footer

        def noted(lake: LakePath, handle: object) -> object:
            self.footers.append(lake.url.rpartition("/")[2])
            return read(lake, handle)

        monkeypatch.setattr(source, "read_footer", noted)

    def write(self, name: str, rows: int = 3, column: str = "x", age: float = 60) -> None:
        path = self.directory / name
        parquet.write_table(pa.table({column: range(rows)}), path)
        modified = time.time() - age
        os.utime(path, (modified, modified))

    def read(self, cache: FooterCache | None = None) -> ParquetSource:
        self.footers.clear()
        return read_source(LakePath(f"file://{self.directory}"), cache=cache or self.cache)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table(tmp_path, monkeypatch)
    for name in ("a", "b", "c"):
        table.write(name)
    return table


def test_a_known_table_is_listed_and_no_footer_is_read(table: Table) -> None:
    first = table.read()
    assert sorted(table.footers) == ["a", "b", "c"]
    assert table.read() == first
    assert table.footers == []


def test_changed_and_new_files_are_read_and_removed_ones_forgotten(table: Table) -> None:
    table.read()
    table.write("b", age=30)  # as long as before, and newer
    table.write("d", rows=5)
    (table.directory / "a").unlink()
    found = table.read()
    assert sorted(table.footers) == ["b", "d"]
    assert [(file.name, file.groups) for file in found.files] == [
        ("b", (3,)),
        ("c", (3,)),
        ("d", (5,)),
    ]
    assert table.read() == found and table.footers == []


def test_a_file_that_may_still_change_is_read_again(table: Table) -> None:
    """Another file of the same length and time may take its place within the clock's step."""
    table.write("c", age=0)
    table.read()
    table.read()
    assert table.footers == ["c"]


def test_a_new_file_with_other_columns_is_refused(table: Table) -> None:
    table.read()
    table.write("d", column="y")
    with pytest.raises(ConfigError, match="a and d have different columns"):
        table.read()


def test_a_table_that_was_written_anew_is_another_one(table: Table) -> None:
    table.read()
    for name in ("a", "b", "c"):
        table.write(name, column="y", age=30)
    assert table.read().arrow_schema.names == ["y"]


def test_each_user_of_the_lake_has_a_cache(table: Table, tmp_path: Path) -> None:
    table.read()
    table.read(FooterCache(tmp_path / "cache", "bob"))
    assert sorted(table.footers) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 1}',
        '{"version": 2}',
        json.dumps({"version": 1, "url": "file:///elsewhere", "kinds": [], "files": []}),
        json.dumps({"version": 1, "kinds": [], "files": [["a", 1, 1, [3], 8, 7]]}),
    ],
)
def test_a_damaged_cache_is_read_over(table: Table, tmp_path: Path, content: str) -> None:
    first = table.read()
    (path,) = (tmp_path / "cache").iterdir()
    url = f"file://{table.directory}"
    path.write_text(content.replace('"version": 1,', f'"version": 1, "url": "{url}",', 1))
    assert table.read() == first
    assert sorted(table.footers) == ["a", "b", "c"]
    assert table.read() == first and table.footers == []


def test_a_disk_that_cannot_be_written_is_no_error(table: Table, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = FooterCache(tmp_path / "file" / "cache", "alice")
    assert table.read(cache) == table.read(FooterCache(None, "alice"))


def test_only_the_latest_tables_are_kept(tmp_path: Path) -> None:
    cache = FooterCache(tmp_path, "alice")
    urls = [f"hdfs://cluster/{number}" for number in range(footer_cache._MAX_TABLES + 3)]
    for number, url in enumerate(urls):
        cache.store(url, b"", [], 0)
        os.utime(cache._path_of(url) or tmp_path, (number, number))
    assert [cache.load(url) is not None for url in urls] == [False] * 3 + [True] * (len(urls) - 3)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
