"""Copies of Spark's Python zips that also have bytecode, so that executors start faster.

Spark ships pyspark.zip and py4j-*-src.zip, which have sources only, to each container. Python
caches no bytecode for modules in a zip, so each executor's Python daemon would compile PySpark. The
copies are in the user's cache directory. Spark ships them because PYSPARK_ARCHIVES_PATH names them.
`hopsgpu.spark.bytecode_importer` uses the bytecode. Other processes use the sources.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from pathlib import Path, PurePosixPath
from typing import Any

from hopsgpu.backends.spark.package_archive import unchecked_pyc
from hopsgpu.backends.spark.submit_command import find_spark_submit
from hopsgpu.core.cache_directory import cache_directory, only_creator
from hopsgpu.errors import ConfigError

log = logging.getLogger(__name__)

# The variable that names the files that Spark's YARN client ships instead of SPARK_HOME's.
VARIABLE = "PYSPARK_ARCHIVES_PATH"
_SUMS = "SHA256SUMS"
_BUILDING = "building-"
_KEPT_SECONDS = 30 * 24 * 3600.0
# Errors of reading a damaged zip, or of compiling its content.
_DAMAGED = (zipfile.BadZipFile, zlib.error, SyntaxError, ValueError)
# Packages that the Python daemon of an executor does not import.
_OMITTED = frozenset(
    (
        *("pyspark/ml", "pyspark/mllib", "pyspark/pandas", "pyspark/pipelines", "pyspark/testing"),
        *("pyspark/tests", "pyspark/sql/connect", "pyspark/sql/tests", "pyspark/streaming"),
    )
)


@dataclass(frozen=True)
class PysparkArchives:
    """The copies of Spark's Python zips for one Spark and one minor version of Python.

    Attributes:
        zips: Spark's own zips.
        directory: directory of the copies; its name depends on `zips` and on the version of Python.
    """

    zips: tuple[Path, ...]
    directory: Path

    @classmethod
    def of(cls, home: Path, cache: Path) -> PysparkArchives:
        """Return the copies of a Spark's zips, whether they exist or not.

        Raises:
            OSError: Spark's zips are missing.
        """
        lib = home / "python" / "lib"
        zips = (lib / "pyspark.zip", *sorted(lib.glob("py4j-*-src.zip")))
        if len(zips) == 1:
            raise FileNotFoundError(f"there is no py4j-*-src.zip in {lib}")
        stats = [(file.name, file.stat()) for file in zips]
        facts = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
        key = hashlib.sha256("\n".join((*facts, MAGIC_NUMBER.hex(), *sorted(_OMITTED))).encode())
        return cls(zips, cache / f"{sys.implementation.cache_tag}-{key.hexdigest()[:20]}")

    @property
    def value(self) -> str:
        # As URIs, because Spark splits the value at commas.
        return ",".join((self.directory / file.name).as_uri() for file in self.zips)

    def are_complete(self) -> bool:
        try:
            return (self.directory / _SUMS).read_text() == self._sums(self.directory)
        except (OSError, UnicodeDecodeError):
            return False

    def create(self) -> bool:
        """Create the copies unless they exist undamaged; return False if another process does.

        Raises:
            OSError: the directory cannot be written.
            zipfile.BadZipFile, zlib.error, SyntaxError, ValueError: a zip of Spark is damaged.
        """
        if not self.are_complete():
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            with only_creator(self.directory.parent / "lock") as is_creator:
                if not is_creator:
                    return False
                if not self.are_complete():
                    self._build()
        with contextlib.suppress(OSError):  # it may be read-only
            os.utime(self.directory)
        return True

    def _build(self) -> None:
        began = time.monotonic()
        parent = self.directory.parent
        _sweep(parent)
        with tempfile.TemporaryDirectory(
            prefix=_BUILDING, dir=parent, ignore_cleanup_errors=True
        ) as scratch:
            fresh = Path(scratch, "fresh")
            fresh.mkdir()
            for file in self.zips:
                _copy_with_bytecode(file, fresh / file.name)
            (fresh / _SUMS).write_text(self._sums(fresh))
            if self.directory.exists():  # it is damaged
                self.directory.rename(Path(scratch, "damaged"))
            fresh.rename(self.directory)
        log.info("built %s in %.1f s", self.directory, time.monotonic() - began)

    def _sums(self, directory: Path) -> str:
        lines = []
        for name in (file.name for file in self.zips):
            with (directory / name).open("rb") as content:
                lines.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {name}\n")
        return "".join(lines)


def _copy_with_bytecode(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with (
        zipfile.ZipFile(source) as original,
        zipfile.ZipFile(target, "a", zipfile.ZIP_DEFLATED) as copy,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of Spark's sources
        for name in original.namelist():
            path = PurePosixPath(name)
            if path.suffix != ".py" or any(str(parent) in _OMITTED for parent in path.parents):
                continue
            # The importer replaces the file name in the code.
            code = compile(original.read(name), name, "exec", dont_inherit=True, optimize=0)
            cached = f"{path.stem}.{sys.implementation.cache_tag}.pyc"
            copy.writestr(str(path.parent / "__pycache__" / cached), unchecked_pyc(code))


def _sweep(directory: Path) -> None:
    """Remove copies that were not used for a month, and leftovers of killed processes."""
    oldest = time.time() - _KEPT_SECONDS
    for entry in directory.iterdir():
        if entry.is_dir() and (entry.name.startswith(_BUILDING) or entry.stat().st_mtime < oldest):
            shutil.rmtree(entry, ignore_errors=True)


def with_bytecode(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a JVM whose applications on YARN ship the copies.

    The environment is unchanged if the user has set PYSPARK_ARCHIVES_PATH or there can be no
    copies; Spark then ships its own zips.
    """
    if VARIABLE in environ:
        log.debug("Spark ships the zips that %s names: %s", VARIABLE, environ[VARIABLE])
        return dict(environ)
    try:
        archives = _archives(environ)
        if archives.create():
            log.debug("Spark ships the zips in %s", archives.directory)
            return {**environ, VARIABLE: archives.value}
        log.info("executors compile PySpark: another process is creating %s", archives.directory)
    except (ConfigError, OSError, *_DAMAGED) as error:
        log.info("executors compile PySpark: there is no copy with bytecode: %s", error)
    return dict(environ)


def _archives(environ: Mapping[str, str]) -> PysparkArchives:
    home = environ.get("SPARK_HOME") or find_spark_submit(environ).resolve().parents[1]
    return PysparkArchives.of(Path(home), cache_directory(environ) / "pyspark")


@contextlib.contextmanager
def bytecode_of_new_jvm() -> Iterator[None]:
    """Make the JVM that PySpark starts in this context ship the copies.

    A JVM that already runs is not changed.
    """
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    if jvm is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        log.debug("a JVM already runs, and its %s stays", VARIABLE)
        if jvm is not None and jvm.java.lang.System.getenv(VARIABLE) is not None:
            # The cache directory may have been emptied since that JVM started.
            with_bytecode(os.environ)
        yield
        return
    value = with_bytecode(os.environ).get(VARIABLE)
    if value is None or VARIABLE in os.environ:
        yield
        return
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        del os.environ[VARIABLE]
