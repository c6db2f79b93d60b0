"""The class-data archive: Spark's classes in a form that JVMs map into memory at their start.

A JVM spends most of its start reading and verifying classes. A JVM with an archive of the same JDK
and jars maps the classes instead; any other JVM ignores the archive.
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
from hopsgpu.devcluster.layout import ACCEPTED_PATH, ClusterLayout

_MAKER = "classes"
_SECONDS, _GRACE_S = 600.0, 2.0


@dataclass(frozen=True)
class ClassArchive:
    """The archive for a JDK and a PySpark.

    Attributes:
        file: the archive; it exists once an `up` has created it completely.
        base: the JDK's own archive, which the archive extends.
        jars: jars that must come first on the class path.
    """

    file: Path
    base: Path
    jars: Path

    @property
    def options(self) -> str:
        """Options for a JVM, which silently ignores a missing or unsuitable archive."""
        return f"-XX:SharedArchiveFile={self.base}:{self.file} -Xlog:cds=off -Xlog:cds+dynamic=off"

    @property
    def class_path(self) -> str:
        return f"{self.jars}/*"


def archive_of(java: Path, spark: Path) -> ClassArchive | None:
    """Return the archive for the homes of a JDK and a PySpark; None if they cannot have one."""
    base, jars = java / "lib" / "server" / "classes.jsa", spark / "jars"
    if not base.is_file() or not jars.is_dir() or not _is_supported(java):
        return None
    place = hashlib.sha256(f"{base}\n{jars}".encode())
    # The JVM compares the sizes and times; the names are its class path.
    stats = [(f.name, f.stat()) for f in (base, *sorted(jars.glob("*.jar")))]
    facts = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    state = hashlib.sha256(facts.encode())
    name = f"spark-classes-{place.hexdigest()[:12]}-{state.hexdigest()[:12]}.jsa"
    file = cache_directory(os.environ) / name
    if not all(ACCEPTED_PATH.fullmatch(str(path)) for path in (base, jars, file)):
        return None  # the path cannot be part of a JVM's options
    return ClassArchive(file, base, jars)


def _is_supported(java: Path) -> bool:
    """Return whether it is a JDK 17; later JDKs relocate mapped classes, which uses memory."""
    release = java / "release"
    return release.is_file() and 'JAVA_VERSION="17' in release.read_text()


def make_archive(
    archive: ClassArchive,
    layout: ClusterLayout,
    environ: Mapping[str, str],
    url: str,
    report: Callable[[str], object],
) -> None:
    """Create an archive unless it exists, or another process is creating it.

    A failure is only reported: JVMs then start without the archive.

    Args:
        environ: environment of a client of the cluster.
        url: a directory in HDFS to write and remove.
    """
    if archive.file.exists():
        return
    archive.file.parent.mkdir(parents=True, exist_ok=True)
    with only_creator(archive.file.parent / "spark-classes.lock") as has_lock:
        if not has_lock or archive.file.exists():
            return
        report(f"caching Spark's loaded classes (about 200 MB, once) in {archive.file}")
        log = layout.logs / f"{_MAKER}.log"
        with tempfile.TemporaryDirectory(dir=archive.file.parent, prefix="making-") as scratch:
            target = Path(scratch) / archive.file.name
            status = _run(archive, target, layout, environ, url, log)
            if status or not target.is_file():
                report(
                    f"Spark's JVMs start without the class cache: it could not be created ({log}):"
                )
                report(last_lines(log, 5))
                return
            target.rename(archive.file)
        # Remove archives of the same paths from before the JDK or the jars were replaced.
        family = archive.file.name.rpartition("-")[0]
        for other in archive.file.parent.glob(f"{family}-*.jsa"):
            if other != archive.file:
                other.unlink(missing_ok=True)


def _run(
    archive: ClassArchive,
    target: Path,
    layout: ClusterLayout,
    environ: Mapping[str, str],
    url: str,
    log: Path,
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
    argv = [sys.executable, "-P", "-m", "hopsgpu.backends.spark.class_data", url]
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
            # Use the marker: this also finds the JVM, and a process of an interrupted start.
            stop(members(layout.root, _MAKER), _GRACE_S)
