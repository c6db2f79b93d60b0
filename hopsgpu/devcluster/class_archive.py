"""The class-data archive: Spark's classes in a form that its JVMs map at their start.

A JVM spends most of its start reading and verifying its classes. A JVM with an archive of the same
JDK and jars maps them; any other starts as it would without.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.core.cache_directory import cache_directory, only_creator
from hopsgpu.devcluster.daemons import MARKER, last_lines, marker, members, stop
from hopsgpu.devcluster.java import QUICK
from hopsgpu.devcluster.layout import BORNE, Layout

_MAKER = "classes"
_SECONDS, _GRACE_S = 600.0, 2.0


@dataclass(frozen=True)
class Archive:
    """Where the archive for a JDK and a PySpark is.

    Attributes:
        file: the archive; it exists, complete, once an `up` has created it.
        base: the JDK's own archive, on which it builds.
        jars: jars that must come first on the class path.
    """

    file: Path
    base: Path
    jars: Path

    @property
    def options(self) -> str:
        """Return the options for a JVM, which silently ignores a missing or unsuitable archive."""
        return f"-XX:SharedArchiveFile={self.base}:{self.file} -Xlog:cds=off -Xlog:cds+dynamic=off"

    @property
    def class_path(self) -> str:
        return f"{self.jars}/*"


def archive_of(java: Path, spark: Path) -> Archive | None:
    """Return the archive for a JDK and a PySpark; None if they cannot have one.

    Args:
        java: the JDK's home.
        spark: the PySpark's.
    """
    base, jars = java / "lib" / "server" / "classes.jsa", spark / "jars"
    if not base.is_file() or not jars.is_dir() or not _fits(java):
        return None
    place = hashlib.sha256(f"{base}\n{jars}".encode())
    # The facts that the JVM itself compares; and the names, which are the class path.
    stats = [(f.name, f.stat()) for f in (base, *sorted(jars.glob("*.jar")))]
    facts = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    state = hashlib.sha256(facts.encode())
    name = f"spark-classes-{place.hexdigest()[:12]}-{state.hexdigest()[:12]}.jsa"
    file = cache_directory(os.environ) / name
    if not all(BORNE.fullmatch(str(path)) for path in (base, jars, file)):
        return None  # the path could not be part of a JVM's options
    return Archive(file, base, jars)


def _fits(java: Path) -> bool:
    """Return whether it is a JDK 17; later ones relocate what they map, so that it uses memory."""
    release = java / "release"
    return release.is_file() and 'JAVA_VERSION="17' in release.read_text()


def make_archive(
    archive: Archive,
    layout: Layout,
    environ: Mapping[str, str],
    url: str,
    say: Callable[[str], object],
) -> None:
    """Create an archive unless it exists, or somebody else is creating it.

    A failure is only reported: JVMs then start without the archive.

    Args:
        environ: environment of a client of the running cluster in `layout`.
        url: a directory in its HDFS to write and remove.
    """
    if archive.file.exists():
        return
    archive.file.parent.mkdir(parents=True, exist_ok=True)
    with only_creator(archive.file.parent / "spark-classes.lock") as alone:
        if not alone or archive.file.exists():
            return
        say(f"caching Spark's loaded classes (about 200 MB, once) in {archive.file}")
        log = layout.logs / f"{_MAKER}.log"
        with tempfile.TemporaryDirectory(dir=archive.file.parent, prefix="making-") as scratch:
            target = Path(scratch) / archive.file.name
            failed = _run(archive, target, layout, environ, url, log)
            if failed or not target.is_file():
                say(f"Spark's JVMs start without the class cache: it could not be created ({log}):")
                say(last_lines(log, 5))
                return
            target.rename(archive.file)
        # Archives for the same paths, from before the JDK or its jars were replaced.
        family = archive.file.name.rpartition("-")[0]
        for other in archive.file.parent.glob(f"{family}-*.jsa"):
            if other != archive.file:
                other.unlink(missing_ok=True)


def _run(
    archive: Archive, target: Path, layout: Layout, environ: Mapping[str, str], url: str, log: Path
) -> int | None:
    """Run a Spark whose JVM writes the archive at its end; return its exit code."""
    options = " ".join([f"-Djdk.net.hosts.file={layout.hosts}", *QUICK])
    submit = [
        *("--conf", f"spark.driver.extraClassPath={archive.class_path}"),
        # These options replace the default ones, which name the archive.
        *("--conf", f"spark.driver.defaultJavaOptions={options} -XX:ArchiveClassesAtExit={target}"),
        "pyspark-shell",
    ]
    environ = {
        **os.environ,
        **environ,
        "PYSPARK_SUBMIT_ARGS": shlex.join(submit),
        MARKER: marker(layout.root, _MAKER),
    }
    argv = [sys.executable, "-m", "hopsgpu.backends.spark.class_data", url]
    with log.open("wb") as out:
        try:
            making = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
            try:
                return making.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                return None
            finally:
                making.kill()
                making.wait()
        finally:
            # Found by their marker: the JVM, or a process that is not known here yet.
            stop(members(layout.root, _MAKER), _GRACE_S)
