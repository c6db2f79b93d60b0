"""Tables with a transaction log, which cannot be read by listing their files.

The log names the current files. The directories also contain deleted or rewritten rows, and files
of failed writes. A deletion vector or a position delete may remove rows of a current file.

Source: Delta Lake's protocol (PROTOCOL.md), Iceberg's `HadoopTableOperations`, Hudi's technical
specification, Spark's `FileStreamSink`, Hive's `AcidUtils`, Paimon's specification.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from urllib.parse import unquote

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.error_messages import ABSENT, PERMISSION, SAFE_MODE, UNREACHABLE
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.lake import UNSAFE_CHARACTERS, FileStatus, LakePath
from hopsgpu.storage.root import join_url
from hopsgpu.storage.viewfs import resolve_mount

_THREADS = 8
DELTA, HUDI, ICEBERG, PAIMON = "Delta Lake", "Hudi", "Iceberg", "Paimon"
STREAM, HIVE = "a streaming query of Spark", "transactional Hive"
# The key of Iceberg's schema in the footer of each Parquet file that Iceberg wrote.
ICEBERG_FOOTER_KEY = b"iceberg.schema"

# Entries of a table's directory, or of a partition's directory.
_ENTRIES = {
    "_delta_log": DELTA,
    ".hoodie": HUDI,
    "_spark_metadata": STREAM,
    ".hoodie_partition_metadata": HUDI,
    ".hoodie_partition_metadata.parquet": HUDI,
    ".hoodie_partition_metadata.orc": HUDI,
}
_PARTITION_ENTRY = ".hoodie_partition_metadata"
# Directories of logs whose files have no fixed name.
_LOG_FILES = {
    "metadata": (ICEBERG, re.compile(r"[\w.+-]+\.metadata\.json(\.gz)?")),
    "snapshot": (PAIMON, re.compile(r"snapshot-\d+")),
}
_HIVE_DIRECTORY = re.compile(r"(base_\d+|(delete_)?delta_\d+_\d+(_\d+)?)(_v\d+)?")
# Hive itself pads numbers to seven digits. For parents of the data, only padded names count: a
# parent may be called base_1 for another reason.
_PADDED_HIVE_DIRECTORY = re.compile(r"(base|(delete_)?delta)_\d{7,}(_\d+)*(_v\d+)?")
_READ = {
    DELTA: 'spark.read.format("delta").load({url})',
    HUDI: 'spark.read.format("hudi").load({url})',
    ICEBERG: 'spark.read.format("iceberg").load({url})',
    PAIMON: 'spark.read.format("paimon").load({url})',
    STREAM: "spark.read.parquet({url})",
}


@dataclass(frozen=True)
class LoggedTable:
    """A table with a transaction log.

    Attributes:
        format: name of the table format.
        mark: URL of the entry that identifies the format.
        directory: URL of the directory of the data, after links and mount points are resolved.
        root: URL of the table's directory; "" if unknown.
    """

    format: str
    mark: str
    directory: str
    root: str = ""

    def make_refusal(self, lake: LakePath) -> ConfigError:
        """Return the error for `data=lake` in this table; it has the code that reads the table."""
        return ConfigError(
            f"{lake.url} belongs to a table with a transaction log ({self.format}, {self.mark}):"
            " its directories also contain rows that the table no longer has, so hopsgpu does not"
            f" read its files. {self._describe_remedy()}"
        )

    def _describe_remedy(self) -> str:
        if self.format == HIVE:
            # Spark has no reader of transactional Hive tables (SPARK-15348).
            return (
                "Write its current rows in Hive: INSERT OVERWRITE DIRECTORY '<directory>' STORED AS"
                " PARQUET SELECT * FROM <table>; then pass data='<directory>', or the DataFrame"
                " hive.executeQuery('SELECT * FROM <table>') of the Hive Warehouse Connector"
            )
        code = _READ[self.format].format(url=json.dumps(self.root or "<path of the table>"))
        condition = self._partition_condition() if self.root else ""
        where = f".where({json.dumps(condition)})" if condition else ""
        return f"Read the table as a DataFrame: df = {code}{where}; then pass data=df"

    def _partition_condition(self) -> str:
        """Return the SQL that selects the rows of a partition; "" for the whole table."""
        names = [name for name in self.directory.removeprefix(self.root).split("/") if name]
        if self.format == ICEBERG and names[:1] == ["data"]:
            names = names[1:]
        # A directory of Iceberg is named after a transformed column, which no reader has.
        return " AND ".join(
            f"<rows of {name}>" if self.format == ICEBERG else _condition_of_name(name)
            for name in names
        )


def _condition_of_name(name: str) -> str:
    column, equals, value = name.partition("=")
    if not equals:
        return f"<rows of {name}>"
    if value == "__HIVE_DEFAULT_PARTITION__":
        return f"`{unquote(column)}` IS NULL"
    quoted = unquote(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"`{unquote(column)}` = '{quoted}'"


def find_mark(directory: LakePath, entries: Iterable[FileStatus]) -> LoggedTable | None:
    """Return the table to which a directory belongs according to its entries, or None."""
    log = _LOG_FILES.get(_last_name(directory))
    for entry in sorted(entries, key=lambda entry: entry.name):
        mark = join_url(directory.url, entry.name)
        if table_format := _ENTRIES.get(entry.name):
            # A partition's entry does not say where the table is.
            root = "" if entry.name.startswith(_PARTITION_ENTRY) else directory.url
            return LoggedTable(table_format, mark, directory.url, root)
        if entry.is_directory and _HIVE_DIRECTORY.fullmatch(entry.name):
            return LoggedTable(HIVE, mark, directory.url, directory.url)
        if log is not None and not entry.is_directory and log[1].fullmatch(entry.name):
            return LoggedTable(log[0], mark, directory.parent.url, directory.parent.url)
    return None


def _last_name(place: LakePath) -> str:
    return place.url.rpartition("/")[2]


@dataclass(frozen=True)
class TableSearch:
    """The result of a search of directories for marks of tables.

    Attributes:
        table: the table with a transaction log to which the directories belong, or None.
        unchecked: URLs that could not be examined, because access was denied.
    """

    table: LoggedTable | None
    unchecked: tuple[str, ...] = ()


def search_table(directory: LakePath) -> TableSearch:
    """Search a directory and its parents for marks of tables.

    If the directory is a mount point of viewfs, or a symbolic link of this machine, the target and
    its parents are searched too.

    Raises:
        StoreError: the lake does not answer.
    """
    directories = [directory.with_client()]
    unchecked: tuple[str, ...] = ()
    if (target := _target_of(directory)) is not None:
        if UNSAFE_CHARACTERS.search(target):
            unchecked = (target,)
        else:
            behind = LakePath(
                target, should_fail_fast=directory.should_fail_fast, stop=directory.stop
            )
            directories.append(behind.with_client())
    tables = []
    for below in directories:
        search = _search_lineage(below)
        unchecked += search.unchecked
        if search.table is not None:
            tables.append(search.table)
    return TableSearch(_choose(tables), unchecked)


def _search_lineage(directory: LakePath) -> TableSearch:
    lineage = list(_lineage_of(directory))
    for place in lineage:
        pattern = _HIVE_DIRECTORY if place is directory else _PADDED_HIVE_DIRECTORY
        if pattern.fullmatch(_last_name(place)):
            return TableSearch(LoggedTable(HIVE, place.url, directory.url, place.parent.url))
    with ThreadPoolExecutor(_THREADS) as pool:
        searches = list(pool.map(_search_entries, lineage))
    table = _choose([search.table for search in searches if search.table is not None])
    return TableSearch(
        table and replace(table, directory=directory.url),
        tuple(url for search in searches for url in search.unchecked),
    )


def _choose(tables: Sequence[LoggedTable]) -> LoggedTable | None:
    """Return a table whose directory is known, else the first table."""
    return next((table for table in tables if table.root), next(iter(tables), None))


def _target_of(directory: LakePath) -> str | None:
    """Return the URL of a symbolic link's or a mount point's target; None if there is neither."""
    if directory.is_local:
        target = os.path.realpath(directory.path)
        return None if target == directory.path else f"file://{target}"
    if directory.url.startswith("viewfs:"):
        return resolve_mount(directory.url, HadoopConf.load_hdfs(os.environ).all_values())
    return None


def _lineage_of(place: LakePath) -> Iterator[LakePath]:
    yield place
    while place.path != "/":
        place = place.parent
        yield place


def _search_entries(directory: LakePath) -> TableSearch:
    """Search the entries of a directory, and the logs among them."""
    entries, denied = _find_entries(directory)
    marks = (e for e in entries if not _HIVE_DIRECTORY.fullmatch(e.name) or _is_padded(e.name))
    tables = [find_mark(directory, marks)]
    for entry in entries:
        if entry.is_directory and entry.name in _LOG_FILES:
            log = directory / entry.name
            try:
                tables.append(find_mark(log, log.entries()))
            except StoreError as error:
                if error.kind == PERMISSION:
                    denied.append(log.url)
                elif error.kind != ABSENT:
                    raise
    return TableSearch(_choose([table for table in tables if table is not None]), tuple(denied))


def _is_padded(name: str) -> bool:
    return _PADDED_HIVE_DIRECTORY.fullmatch(name) is not None


def _find_entries(directory: LakePath) -> tuple[Sequence[FileStatus], list[str]]:
    """Return the entries of a directory, and the URLs of entries that could not be examined.

    If the directory cannot be listed, only the known names are searched. The same holds on an
    object store, where the root of a bucket may have millions of objects.
    """
    if not directory.is_object_store:
        try:
            return directory.entries(), []
        except StoreError as error:
            if error.kind in (UNREACHABLE, SAFE_MODE):
                raise
    found_entries, denied = [], []
    for name in (*_ENTRIES, *_LOG_FILES):
        entry = directory / name
        try:
            found_entries.append(entry.stat())
        except StoreError as error:
            # An object store that denies the listing also denies access to a missing object.
            if error.kind == PERMISSION and not directory.is_object_store:
                denied.append(entry.url)
            elif error.kind not in (ABSENT, PERMISSION):
                raise
    return found_entries, denied
