"""The Hadoop daemons' jars: downloaded once by Spark's own resolver, then cached."""

from __future__ import annotations

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
from hopsgpu.devcluster.java import Java
from hopsgpu.errors import ClusterError

# The ResourceManager's web proxy makes its certificates with Bouncy Castle, which neither
# PySpark nor the minicluster package carries.
_BOUNCY_CASTLE = "1.82"
_BOUNCY_CASTLE_JARS = ("bcprov", "bcpkix", "bcutil")
_MINICLUSTER = "org.apache.hadoop:hadoop-client-minicluster"
# The daemons' own jars, for which the resolver adds what they need. Those of a Hadoop before 3.5
# must be these: its minicluster jar answers REST requests in another form than its daemons do.
_DAEMONS = (
    "org.apache.hadoop:hadoop-yarn-server-resourcemanager",
    "org.apache.hadoop:hadoop-yarn-server-nodemanager",
    "org.apache.hadoop:hadoop-yarn-server-timelineservice",
    "org.apache.hadoop:hadoop-hdfs",
    "org.apache.hadoop:hadoop-hdfs-client",
    "org.apache.hadoop:hadoop-common",
)
# Not needed to run them.
_ANNOTATIONS = (
    "com.google.errorprone:error_prone_annotations",
    "com.google.j2objc:j2objc-annotations",
    "org.checkerframework:checker-qual",
    "org.codehaus.mojo:animal-sniffer-annotations",
)
# Maven's jar of HDFS has no web pages, and its daemons do not start without their directories.
_HDFS_PAGES = ("hdfs", "datanode")
_BEFORE_3_5 = ("3.3.", "3.4.")
# What the resolver says of a jar that its repository describes and does not have.
_INCOMPLETE = "download failed"
# Not downloaded with the minicluster jar, as PySpark's jars, which are on the class path, include
# the same versions.
_CARRIED = (
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.slf4j:slf4j-api",
    "org.xerial.snappy:snappy-java",
    "com.google.code.findbugs:jsr305",
    "commons-logging:commons-logging",
)


def pyspark_home() -> Path:
    """Return the directory of the installed PySpark, found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ClusterError("PySpark is not installed: pip install pyspark")
    return Path(spec.origin).parent


def hadoop_version(spark: Path) -> str:
    """Return the version of Hadoop that a PySpark includes."""
    for jar in sorted((spark / "jars").glob("hadoop-client-api-*.jar")):
        return jar.stem.removeprefix("hadoop-client-api-")
    raise ClusterError(
        f"{spark / 'jars'} has no hadoop-client-api jar: the cluster needs a PySpark that "
        "includes Hadoop 3 (such as that of `pip install pyspark`)"
    )


@dataclass(frozen=True)
class DaemonJars:
    """The jars of the daemons of one Hadoop.

    Attributes:
        version: of Hadoop.
        directory: has `*.jar` and `webapps`.
        beside: directory of further jars on the class path, PySpark's; None if `directory` has all.
    """

    version: str
    directory: Path
    beside: Path | None

    @property
    def class_path(self) -> str:
        """Return the class path of a daemon, without its configuration."""
        # The directory itself, for its `webapps`, precedes the jar that contains them too.
        own = f"{self.directory}:{self.directory}/*"
        return own if self.beside is None else f"{own}:{self.beside}/*"


def daemon_jars(
    java: Java,
    spark: Path,
    version: str,
    say: Callable[[str], object],
    *,
    with_zookeeper: bool = False,
) -> DaemonJars:
    """Return the jars of the daemons, downloaded once for each version.

    Their directory appears by one rename, so it is complete if it exists, and then neither the
    network nor the resolver is used.

    Args:
        java: the JDK that runs the resolver.
        spark: the PySpark's directory.
        version: of Hadoop.
        say: receives one line at a time.
        with_zookeeper: whether the daemons use ZooKeeper.

    Raises:
        ClusterError: the resolver could not download them; the message has its output.
    """
    mini = (
        version == hadoop_version(spark)
        and not version.startswith(_BEFORE_3_5)
        # The minicluster's jar has a part of ZooKeeper's client alone.
        and not with_zookeeper
    )
    directory = (
        cache_directory(os.environ)
        / f"hadoop-daemons-{version}-{f'bc-{_BOUNCY_CASTLE}' if mini else 'unshaded'}"
    )
    found = DaemonJars(version, directory, spark / "jars" if mini else None)
    if directory.is_dir():
        return found
    directory.parent.mkdir(parents=True, exist_ok=True)
    say(
        f"downloading Hadoop {version}'s daemons (about {65 if mini else 95} MB, once) to"
        f" {directory}"
    )
    packages = [f"{name}:{version}" for name in ((_MINICLUSTER,) if mini else _DAEMONS)]
    if mini:
        packages += [
            f"org.bouncycastle:{name}-jdk18on:{_BOUNCY_CASTLE}" for name in _BOUNCY_CASTLE_JARS
        ]
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetching-") as scratch:
        excluded = _CARRIED if mini else _ANNOTATIONS
        webapps = (spark / "jars").glob("hadoop-client-api-*.jar") if mini else ()
        jars = _resolve(java, spark, packages, excluded, webapps, Path(scratch))
        try:
            jars.rename(directory)
        except OSError:
            # Another `up` was quicker: its copy is as good as ours.
            if not directory.is_dir():
                raise
    return found


def _resolve(
    java: Java,
    spark: Path,
    packages: Sequence[str],
    excluded: Sequence[str],
    webapps: Iterable[Path],
    scratch: Path,
) -> Path:
    """Run spark-submit only for its resolver; the class that it starts prints a version.

    Args:
        java: the JDK.
        spark: the PySpark's directory.
        packages: Maven coordinates of what to download.
        excluded: group and name of dependencies to leave out.
        webapps: further jars with the daemons' web pages.
        scratch: a directory to work in.
    """
    # Ivy also looks into ~/.m2, and fails where Maven has a dependency's description there and not
    # its jar: then once more without that directory.
    ivy = scratch / "ivy"
    ran = _run_resolver(java, spark, packages, excluded, ivy, "-Xshare:auto")
    if ran.returncode and _INCOMPLETE in ran.stdout + ran.stderr:
        shutil.rmtree(ivy)  # it would go on with what it has found
        options = f"-Xshare:auto -Duser.home={scratch}"
        ran = _run_resolver(java, spark, packages, excluded, ivy, options)
    fetched = list((ivy / "jars").glob("*.jar"))
    if ran.returncode or len(fetched) < len(packages):
        lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines()]
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
    options: str,
) -> subprocess.CompletedProcess[str]:
    """Run the resolver in a JVM with some options."""
    command = [
        str(spark / "bin" / "spark-submit"),
        *("--master", "local", "--deploy-mode", "client"),
        *("--conf", f"spark.jars.ivy={ivy}"),
        # With the options of `cluster env`, the JVM would know only that cluster's host
        # names.
        *("--conf", f"spark.driver.defaultJavaOptions={options}"),
        *("--exclude-packages", ",".join(excluded)),
        *("--packages", ",".join(packages)),
        *("--class", "org.apache.hadoop.util.VersionInfo", "spark-internal"),
    ]
    environ = {**os.environ, "JAVA_HOME": str(java.home), "SPARK_HOME": str(spark)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def _unpack_webapps(jar: Path, target: Path) -> None:
    """Unpack the daemons' web pages; else each daemon would unpack them all at each start."""
    with zipfile.ZipFile(jar) as opened:
        pages = [name for name in opened.namelist() if name.startswith("webapps/")]
        opened.extractall(target, pages)
