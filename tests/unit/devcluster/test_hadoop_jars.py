"""The daemons' jars: resolved once by Spark, then taken from the cache."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from hopsgpu.devcluster.hadoop_jars import daemon_jars, hadoop_version, pyspark_home
from hopsgpu.devcluster.java import Java
from hopsgpu.errors import ClusterError

JAVA = Java(Path("/jdk"), 17)
RESOLVES = """#!/bin/sh
echo "$JAVA_HOME $*" >> "$(dirname "$0")/calls"
for a; do case "$a" in spark.jars.ivy=*) ivy=${a#*=} ;; esac; done
mkdir -p "$ivy/jars"
for j in a b c d; do cp "$(dirname "$0")/one.jar" "$ivy/jars/$j.jar"; done
"""
FAILS = "#!/bin/sh\necho ':: org.x#y: not found'; echo noise; exit 1\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hopsgpu"


def spark(home: Path, submit: str) -> Path:
    (home / "jars").mkdir(parents=True)
    (home / "bin").mkdir()
    for path, page in (
        (home / "jars" / "hadoop-client-api-3.9.1.jar", "cluster"),
        (home / "bin" / "one.jar", "hdfs"),
    ):
        with zipfile.ZipFile(path, "w") as jar:
            jar.writestr(f"webapps/{page}/index.html", "page")
            jar.writestr("org/Main.class", "code")
    (home / "bin" / "spark-submit").write_text(submit)
    (home / "bin" / "spark-submit").chmod(0o755)
    return home


def test_they_are_fetched_once(tmp_path: Path, cache: Path) -> None:
    home = spark(tmp_path / "spark", RESOLVES)
    said: list[str] = []
    found = daemon_jars(JAVA, home, "3.9.1", said.append)
    jars = found.directory
    assert (found.version, found.extra) == ("3.9.1", home / "jars")
    assert found.class_path == f"{jars}:{jars}/*:{home}/jars/*"
    assert jars.parent == cache
    assert "3.9.1" in jars.name
    kept = sorted(str(f.relative_to(jars)) for f in jars.rglob("*") if f.is_file())
    pages = ["webapps/cluster/index.html", "webapps/hdfs/index.html"]
    assert kept == ["a.jar", "b.jar", "c.jar", "d.jar", *pages]
    assert len(said) == 2 and "knows no digests" in said[1]
    assert daemon_jars(JAVA, home, "3.9.1", said.append) == found
    assert len(said) == 2
    calls = (home / "bin" / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith("/jdk ")
    assert "hadoop-client-minicluster:3.9.1" in calls[0]
    assert [p.name for p in cache.iterdir()] == [jars.name]


def test_another_hadoop_comes_with_all_its_jars(tmp_path: Path, cache: Path) -> None:
    """Beside PySpark's there would be two versions of Hadoop on the class path."""
    home = spark(tmp_path / "spark", RESOLVES.replace("a b c d", "a b c d e f g"))
    found = daemon_jars(JAVA, home, "3.3.99", print)
    assert (found.version, found.extra) == ("3.3.99", None)
    assert found.class_path == f"{found.directory}:{found.directory}/*"
    (call,) = (home / "bin" / "calls").read_text().splitlines()
    assert "org.apache.hadoop:hadoop-hdfs:3.3.99" in call and "minicluster" not in call
    # The daemons of HDFS do not start without these, and Maven's jars lack them.
    assert {page.name for page in (found.directory / "webapps").iterdir()} >= {"hdfs", "datanode"}
    assert not (found.directory / "webapps" / "cluster").exists(), "PySpark's are another version's"
    both = daemon_jars(JAVA, home, "3.4.2", print)
    assert both.directory != found.directory and {one.name for one in cache.iterdir()} == {
        both.directory.name,
        found.directory.name,
    }


def test_a_failure_says_what_the_resolver_said_and_leaves_nothing(
    tmp_path: Path, cache: Path
) -> None:
    home = spark(tmp_path / "spark", FAILS)
    with pytest.raises(ClusterError) as caught:
        daemon_jars(JAVA, home, "3.9.1", print)
    assert "org.x#y: not found" in str(caught.value)
    assert "noise" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_home_where_maven_has_no_more_than_a_description_is_passed_over(
    tmp_path: Path, cache: Path
) -> None:
    fails = 'echo "[download failed: org.x#y;1!y.jar]" >&2; exit 1\n'
    home = spark(tmp_path / "spark", f'{RESOLVES}case "$*" in *-Duser.home=*) ;; *) {fails};; esac')
    assert (daemon_jars(JAVA, home, "3.9.1", print).directory / "a.jar").is_file()
    first, second = (home / "bin" / "calls").read_text().splitlines()
    assert "-Duser.home" not in first and f"-Duser.home={cache}/fetching-" in second


def test_an_incomplete_answer_is_a_failure(tmp_path: Path, cache: Path) -> None:
    home = spark(tmp_path / "spark", RESOLVES.replace("a b c d", "a"))
    with pytest.raises(ClusterError, match="could not fetch"):
        daemon_jars(JAVA, home, "3.9.1", print)
    assert list(cache.iterdir()) == []


def test_the_version_is_pysparks(tmp_path: Path) -> None:
    assert hadoop_version(pyspark_home())[0] == "3"
    with pytest.raises(ClusterError, match="hadoop-client-api"):
        hadoop_version(tmp_path)
