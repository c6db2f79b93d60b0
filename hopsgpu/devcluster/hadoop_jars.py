"""The Hadoop daemons' jars: downloaded once by Spark's own resolver, then cached."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.core.cache_directory import cache_directory
from hopsgpu.devcluster.jar_digests import check_jars, known_digests
from hopsgpu.devcluster.java import Java
from hopsgpu.errors import ClusterError

# The ResourceManager's web proxy makes its certificates with Bouncy Castle, which neither PySpark
# nor the minicluster package includes.
_BOUNCY_CASTLE = "1.82"
_BOUNCY_CASTLE_JARS = ("bcprov", "bcpkix", "bcutil")
_MINICLUSTER = "org.apache.hadoop:hadoop-client-minicluster"
# The daemons' own jars; the resolver adds their dependencies. For Hadoop before 3.5 these jars are
# necessary: its minicluster jar answers REST requests in another form than its daemons.
_DAEMONS = (
    "org.apache.hadoop:hadoop-yarn-server-resourcemanager",
    "org.apache.hadoop:hadoop-yarn-server-nodemanager",
    "org.apache.hadoop:hadoop-yarn-server-timelineservice",
    "org.apache.hadoop:hadoop-hdfs",
    "org.apache.hadoop:hadoop-hdfs-client",
    "org.apache.hadoop:hadoop-common",
)
# Dependencies that are not needed at run time.
_ANNOTATIONS = (
    "com.google.errorprone:error_prone_annotations",
    "com.google.j2objc:j2objc-annotations",
    "org.checkerframework:checker-qual",
    "org.codehaus.mojo:animal-sniffer-annotations",
)
# Maven's jar of HDFS has no web pages, and HDFS's daemons do not start without these directories.
_HDFS_PAGES = ("hdfs", "datanode")
_BEFORE_3_5 = ("3.3.", "3.4.")
# The resolver's message about a jar that the repository describes but does not have.
_INCOMPLETE = "download failed"
# Dependencies of the minicluster jar that are not downloaded: PySpark's jars, which are on the
# class path, include the same versions.
_IN_PYSPARK = (
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.slf4j:slf4j-api",
    "org.xerial.snappy:snappy-java",
    "com.google.code.findbugs:jsr305",
    "commons-logging:commons-logging",
)


def pyspark_home() -> Path:
    """Return the directory of the installed PySpark, without importing it."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ClusterError("PySpark is not installed: pip install pyspark")
    return Path(spec.origin).parent


def hadoop_version(spark: Path) -> str:
    for jar in sorted((spark / "jars").glob("hadoop-client-api-*.jar")):
        return jar.stem.removeprefix("hadoop-client-api-")
    raise ClusterError(
        f"{spark / 'jars'} has no hadoop-client-api jar: the cluster needs a PySpark that "
        "includes Hadoop 3 (such as that of `pip install pyspark`)"
    )


def spark_versions(spark: Path) -> tuple[str, str]:
    """Return the versions of Spark and of Scala, from the name of a jar."""
    for jar in sorted((spark / "jars").glob("spark-core_*.jar")):
        scala, _, version = jar.stem.removeprefix("spark-core_").partition("-")
        return version, scala
    raise ClusterError(f"{spark / 'jars'} has no spark-core jar: install PySpark again")


@dataclass(frozen=True)
class DaemonJars:
    """The jars of the daemons of one Hadoop.

    Attributes:
        directory: has `*.jar` and `webapps`.
        extra: directory of PySpark's jars; None if `directory` has all jars.
    """

    version: str
    directory: Path
    extra: Path | None

    @property
    def is_minicluster(self) -> bool:
        """Whether the daemons are those of the minicluster package, with renamed dependencies."""
        return self.extra is not None

    @property
    def class_path(self) -> str:
        # The directory, for its `webapps`, precedes the jar that contains these too.
        path = f"{self.directory}:{self.directory}/*"
        return path if self.extra is None else f"{path}:{self.extra}/*"


def daemon_jars(
    java: Java,
    spark: Path,
    version: str,
    report: Callable[[str], object],
    *,
    needs_zookeeper: bool = False,
    timeout: float | None = None,
) -> DaemonJars:
    """Return the jars of the daemons, downloaded once for each version.

    One rename makes the directory appear, so an existing directory is complete. Then neither the
    network nor the resolver is used. The digests of the jars are checked in any case.

    Args:
        timeout: seconds that a download may take.

    Raises:
        ClusterError: the resolver could not download the jars (the message has its output), or not
            in time, or a jar has another digest than hopsgpu knows.
    """
    is_minicluster = (
        version == hadoop_version(spark)
        and not version.startswith(_BEFORE_3_5)
        # The minicluster's jar has only a part of ZooKeeper's client.
        and not needs_zookeeper
    )
    directory = (
        cache_directory(os.environ)
        / f"hadoop-daemons-{version}-{f'bc-{_BOUNCY_CASTLE}' if is_minicluster else 'unshaded'}"
    )
    result = DaemonJars(version, directory, spark / "jars" if is_minicluster else None)
    packages = [f"{name}:{version}" for name in ((_MINICLUSTER,) if is_minicluster else _DAEMONS)]
    if is_minicluster:
        packages += [
            f"org.bouncycastle:{name}-jdk18on:{_BOUNCY_CASTLE}" for name in _BOUNCY_CASTLE_JARS
        ]
    digests = known_digests(packages)
    if directory.is_dir():
        check_jars(directory, digests, "remove the directory, and `up` downloads its jars again")
        return result
    directory.parent.mkdir(parents=True, exist_ok=True)
    size = 65 if is_minicluster else 95
    report(f"downloading Hadoop {version}'s daemons (about {size} MB, once) to {directory}")
    if not digests:
        report(f"hopsgpu knows no digests of Hadoop {version}'s jars: the repository is trusted")
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetching-") as scratch:
        excluded = _IN_PYSPARK if is_minicluster else _ANNOTATIONS
        webapps = (spark / "jars").glob("hadoop-client-api-*.jar") if is_minicluster else ()
        try:
            jars = _resolve(java, spark, packages, excluded, webapps, Path(scratch), timeout)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"Hadoop {version}'s daemons were not downloaded within {error.timeout:.0f} s"
            ) from error
        check_jars(jars, digests, "check the repository, or the mirror, that Spark downloads from")
        try:
            jars.rename(directory)
        except OSError:
            # Another `up` may have downloaded the same jars first.
            if not directory.is_dir():
                raise
    return result


def _resolve(
    java: Java,
    spark: Path,
    packages: Sequence[str],
    excluded: Sequence[str],
    webapps: Iterable[Path],
    scratch: Path,
    timeout: float | None,
) -> Path:
    """Run spark-submit only for its resolver; the submitted class prints a version.

    Args:
        packages: Maven coordinates of the packages to download.
        excluded: group and name of dependencies to leave out.
        webapps: further jars with the daemons' web pages.
    """
    # Ivy also searches ~/.m2, and fails if that has a dependency's description without its jar.
    # Then retry without that directory.
    ivy = scratch / "ivy"
    run = functools.partial(_run_resolver, java, spark, packages, excluded, ivy, timeout)
    completed = run("-Xshare:auto")
    if completed.returncode and _INCOMPLETE in completed.stdout + completed.stderr:
        shutil.rmtree(ivy)  # Ivy would reuse its cached result
        completed = run(f"-Xshare:auto -Duser.home={scratch}")
    fetched = list((ivy / "jars").glob("*.jar"))
    if completed.returncode or len(fetched) < len(packages):
        lines = [line.strip() for line in (completed.stdout + completed.stderr).splitlines()]
        why = [line for line in lines if re.search(r"not found|unresolved|Exception|ERROR", line)]
        raise ClusterError(
            f"Spark's resolver could not fetch {', '.join(packages)}: this needs the network once, "
            "and a release that Maven Central has (to use a mirror, set spark.jars.ivySettings in "
            "spark-defaults.conf). It said:\n  " + "\n  ".join((why or lines)[-8:])
        )
    jars = scratch / "jars"
    jars.mkdir()
    for jar in fetched:
        shutil.move(jar, jars / jar.name)
    for jar in (*jars.glob("*.jar"), *webapps):
        _unpack_webapps(jar, jars)
    for daemon in _HDFS_PAGES:
        (jars / "webapps" / daemon).mkdir(parents=True, exist_ok=True)
    return jars


def _run_resolver(
    java: Java,
    spark: Path,
    packages: Sequence[str],
    excluded: Sequence[str],
    ivy: Path,
    timeout: float | None,
    options: str,
) -> subprocess.CompletedProcess[str]:
    command = [
        str(spark / "bin" / "spark-submit"),
        *("--master", "local", "--deploy-mode", "client"),
        *("--conf", f"spark.jars.ivy={ivy}"),
        # These options replace those of `cluster env`, which restrict the JVM to cluster hosts.
        *("--conf", f"spark.driver.defaultJavaOptions={options}"),
        *("--exclude-packages", ",".join(excluded)),
        *("--packages", ",".join(packages)),
        *("--class", "org.apache.hadoop.util.VersionInfo", "spark-internal"),
    ]
    environ = {**os.environ, "JAVA_HOME": str(java.home), "SPARK_HOME": str(spark)}
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=timeout, check=False
    )


def _unpack_webapps(jar: Path, target: Path) -> None:
    """Unpack the daemons' web pages; otherwise each daemon would unpack them at each start."""
    with zipfile.ZipFile(jar) as opened:
        pages = [name for name in opened.namelist() if name.startswith("webapps/")]
        opened.extractall(target, pages)
