"""The class-data archive: its file, its creation, and the options of JVMs."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from hopsgpu.devcluster import class_archive as module
from hopsgpu.devcluster import site_files
from hopsgpu.devcluster.class_archive import ClassArchive, archive_of, make_archive
from hopsgpu.devcluster.layout import ClusterLayout

# In place of the Spark whose JVM leaves the archive.
MAKES = """#!/bin/sh
echo "$@" > "$MARKS/called"
for word in $PYSPARK_SUBMIT_ARGS; do
  case "$word" in *ArchiveClassesAtExit=*) file=${word#*ArchiveClassesAtExit=} ;; esac
done
printf archive > "${file%\\'}"
"""
FAILS = "#!/bin/sh\necho 'Error: no such class'\nexit 1\n"


@pytest.fixture
def java(tmp_path: Path) -> Path:
    base = tmp_path / "jdk" / "lib" / "server" / "classes.jsa"
    base.parent.mkdir(parents=True)
    base.write_bytes(b"base")
    (tmp_path / "jdk" / "release").write_text('IMPLEMENTOR="A"\nJAVA_VERSION="17.0.9"\n')
    return tmp_path / "jdk"


@pytest.fixture
def spark(tmp_path: Path) -> Path:
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    (tmp_path / "spark" / "jars" / "a.jar").write_bytes(b"a")
    return tmp_path / "spark"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hopsgpu"


def found(java: Path, spark: Path) -> ClassArchive:
    archive = archive_of(java, spark)
    assert archive is not None
    return archive


def made(
    archive: ClassArchive, tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return what is reported while a program in place of Spark creates the archive."""
    program, said = tmp_path / "program", list[str]()
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(program))
    monkeypatch.setenv("MARKS", str(tmp_path))
    layout = ClusterLayout(tmp_path / "cluster")
    layout.logs.mkdir(parents=True, exist_ok=True)
    make_archive(archive, layout, {}, "hdfs://here/tmp/classes", said.append)
    return said


def test_another_jar_or_jdk_has_another_file_in_the_same_family(java: Path, spark: Path) -> None:
    first = found(java, spark)
    assert found(java, spark) == first
    (spark / "jars" / "a.jar").write_bytes(b"other")
    second = found(java, spark)
    (java / "lib" / "server" / "classes.jsa").write_bytes(b"update")
    third = found(java, spark)
    assert len({first.file, second.file, third.file}) == 3
    assert len({one.file.name.rpartition("-")[0] for one in (first, second, third)}) == 1


def test_none_where_there_is_nothing_to_stand_on(
    java: Path, spark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert archive_of(tmp_path, spark) is None
    assert archive_of(java, tmp_path) is None
    (java / "release").write_text('JAVA_VERSION="21.0.1"\n')
    assert archive_of(java, spark) is None
    (java / "release").write_text('JAVA_VERSION="17.0.9"\n')
    # It would be two words among a JVM's options.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert archive_of(java, spark) is None


def test_every_jvm_is_told_of_it_and_has_the_jars_first(
    java: Path, spark: Path, tmp_path: Path
) -> None:
    archive = found(java, spark)
    given = site_files.spark_defaults(ClusterLayout(tmp_path), spark, archive, None)
    for who in ("driver.default", "executor.default", "yarn.am.extra"):
        assert archive.options in given[f"spark.{who}JavaOptions"]
    for who in ("driver", "executor"):
        assert given[f"spark.{who}.extraClassPath"] == f"{spark}/jars/*"
    without = site_files.spark_defaults(ClusterLayout(tmp_path), spark, None, None)
    assert not [name for name, value in without.items() if "Archive" in value or "Class" in name]


def test_it_is_made_once_and_those_before_it_go(
    java: Path, spark: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = found(java, spark)
    (said,) = made(first, tmp_path, MAKES, monkeypatch)
    assert str(first.file) in said
    assert first.file.read_bytes() == b"archive"
    assert (
        tmp_path / "called"
    ).read_text() == "-P -m hopsgpu.backends.spark.class_data hdfs://here/tmp/classes\n"
    assert made(first, tmp_path, FAILS, monkeypatch) == []
    (spark / "jars" / "b.jar").write_bytes(b"b")
    second = found(java, spark)
    made(second, tmp_path, MAKES, monkeypatch)
    assert list(cache.glob("*.jsa")) == [second.file]
    assert not list(cache.glob("making-*"))


def test_a_failure_is_told_and_leaves_nothing(
    java: Path, spark: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = made(found(java, spark), tmp_path, FAILS, monkeypatch)
    assert "no such class" in said[-1]
    assert not [*cache.glob("*.jsa"), *cache.glob("making-*")]


def test_one_makes_it_and_the_others_do_not_wait(
    java: Path, spark: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    fd = os.open(cache / "spark-classes.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert made(found(java, spark), tmp_path, MAKES, monkeypatch) == []
    finally:
        os.close(fd)
    assert not (tmp_path / "called").exists()
