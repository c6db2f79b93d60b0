"""The Hadoop daemons' jars: downloaded once by Spark's own resolver, then cached."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from hopsgpu.devcluster.java import Java
from hopsgpu.errors import ClusterError

# The ResourceManager's web proxy makes its certificates with Bouncy Castle, which neither
# PySpark nor the minicluster package carries.
_BOUNCY_CASTLE = "1.82"
# Not downloaded, as PySpark's jars, which are on the class path, include the same versions.
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
        "includes Hadoop 3 (as the one of `pip install pyspark` does)"
    )


def daemon_jars(java: Java, spark: Path, say: Callable[[str], object]) -> Path:
    """Return a directory with what the daemons need besides PySpark's jars: `*.jar`, `webapps`.

    The directory appears by one rename, so it is complete if it exists, and then neither the
    network nor the resolver is used.

    Raises:
        ClusterError: the resolver could not download them; the message has its output.
    """
    version = hadoop_version(spark)
    kept = cache() / f"hadoop-daemons-{version}-bc-{_BOUNCY_CASTLE}"
    if kept.is_dir():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    say(f"downloading Hadoop {version}'s daemons (about 65 MB, once) to {kept}")
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="fetching-") as scratch:
        jars = _resolve(java, spark, version, Path(scratch))
        try:
            jars.rename(kept)
        except OSError:
            # Another `up` was quicker: its copy is as good as ours.
            if not kept.is_dir():
                raise
    return kept


def cache() -> Path:
    """Return the directory of files that all clusters of a user share."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative one.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "hopsgpu"


def _resolve(java: Java, spark: Path, version: str, scratch: Path) -> Path:
    """Run spark-submit only for its resolver; the class that it starts prints a version."""
    wanted = (
        f"org.apache.hadoop:hadoop-client-minicluster:{version}",
        f"org.bouncycastle:bcprov-jdk18on:{_BOUNCY_CASTLE}",
        f"org.bouncycastle:bcpkix-jdk18on:{_BOUNCY_CASTLE}",
        f"org.bouncycastle:bcutil-jdk18on:{_BOUNCY_CASTLE}",
    )
    command = [
        str(spark / "bin" / "spark-submit"),
        *("--master", "local", "--deploy-mode", "client"),
        *("--conf", f"spark.jars.ivy={scratch / 'ivy'}"),
        # With the options of `cluster env`, the JVM would know only that cluster's host
        # names.
        *("--conf", "spark.driver.defaultJavaOptions=-Xshare:auto"),
        *("--exclude-packages", ",".join(_CARRIED)),
        *("--packages", ",".join(wanted)),
        *("--class", "org.apache.hadoop.util.VersionInfo", "spark-internal"),
    ]
    environ = {**os.environ, "JAVA_HOME": str(java.home), "SPARK_HOME": str(spark)}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    fetched = list((scratch / "ivy" / "jars").glob("*.jar"))
    if ran.returncode or len(fetched) < len(wanted):
        said = [line.strip() for line in (ran.stdout + ran.stderr).splitlines()]
        why = [line for line in said if re.search(r"not found|unresolved|Exception|ERROR", line)]
        raise ClusterError(
            f"Spark's resolver could not fetch {', '.join(wanted)}: this needs the network once "
            "(to use a mirror, set spark.jars.ivySettings in spark-defaults.conf). It said:\n  "
            + "\n  ".join((why or said)[-8:])
        )
    jars = scratch / "jars"
    jars.mkdir()
    for jar in fetched:
        shutil.move(jar, jars / jar.name)
    for jar in (*jars.glob("*.jar"), *(spark / "jars").glob("hadoop-client-api-*.jar")):
        _unpack_webapps(jar, jars)
    return jars


def _unpack_webapps(jar: Path, target: Path) -> None:
    """Unpack the daemons' web pages; else each daemon would unpack them all at each start."""
    with zipfile.ZipFile(jar) as opened:
        pages = [name for name in opened.namelist() if name.startswith("webapps/")]
        opened.extractall(target, pages)
