"""Somebody who changes what is downloaded: on the way, on a mirror, or in the cache."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hopsgpu.devcluster.hadoop_jars import _BOUNCY_CASTLE, _DAEMONS, daemon_jars
from hopsgpu.devcluster.jar_digests import known_digests
from hopsgpu.devcluster.java import Java
from hopsgpu.errors import ClusterError
from tests.bounds import HANG_SECONDS
from tests.constraints import entries_of

ROOT = Path(__file__).resolve().parents[2]
JAVA = Java(Path("/jdk"), 17)
HADOOP = "3.5.0"
NAMES = ["{}_{}".format(*package.split(":")) + f"-{HADOOP}.jar" for package in _DAEMONS]


def spark(home: Path, names: Sequence[str]) -> Path:
    """Make a Spark whose resolver downloads jars of these names, which are not Hadoop's."""
    for directory in ("jars", "bin", "downloads"):
        (home / directory).mkdir(parents=True)
    # An empty ZIP file.
    for name in ("jars/hadoop-client-api-3.9.1.jar", *(f"downloads/{name}" for name in names)):
        (home / name).write_bytes(b"PK\5\6" + bytes(18))
    submit = home / "bin" / "spark-submit"
    submit.write_text(
        '#!/bin/sh\nfor a; do case "$a" in spark.jars.ivy=*) ivy=${a#*=} ;; esac; done\n'
        f'mkdir -p "$ivy/jars" && cp {home}/downloads/* "$ivy/jars"\n'
    )
    submit.chmod(0o755)
    return home


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hopsgpu"


def test_a_jar_that_was_changed_on_the_way_is_not_kept(tmp_path: Path, cache: Path) -> None:
    home = spark(tmp_path / "spark", NAMES)
    with pytest.raises(ClusterError, match=r"has the SHA-256 digest .*: check the repository"):
        daemon_jars(JAVA, home, HADOOP, print)
    assert list(cache.iterdir()) == []


def test_a_jar_that_the_mirror_added_is_not_kept(tmp_path: Path, cache: Path) -> None:
    home = spark(tmp_path / "spark", ["a.jar", *NAMES])
    with pytest.raises(ClusterError, match=r"a\.jar is none of the jars of this Hadoop"):
        daemon_jars(JAVA, home, HADOOP, print)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", [NAMES[0], "added.jar"])
def test_a_jar_that_was_changed_in_the_cache_is_not_started(
    tmp_path: Path, cache: Path, name: str
) -> None:
    jars = cache / f"hadoop-daemons-{HADOOP}-unshaded"
    jars.mkdir(parents=True)
    home = spark(tmp_path / "spark", [])
    assert daemon_jars(JAVA, home, HADOOP, print).directory == jars
    (jars / name).write_bytes(b"changed")
    with pytest.raises(ClusterError, match=f"{name} .*: remove the directory"):
        daemon_jars(JAVA, home, HADOOP, print)


def test_the_digests_of_the_default_hadoop_are_known() -> None:
    minicluster = f"org.apache.hadoop:hadoop-client-minicluster:{HADOOP}"
    assert known_digests([minicluster, f"org.bouncycastle:bcprov-jdk18on:{_BOUNCY_CASTLE}"])
    assert not known_digests([minicluster, "org.bouncycastle:bcprov-jdk18on:0"])


def test_each_package_that_make_installs_has_a_digest() -> None:
    text = (ROOT / "constraints.txt").read_text()
    packages = entries_of(text)
    assert len(packages) > 200
    for package in packages:
        version, *digests = package.split("--hash=sha256:")
        assert "==" in version and digests, package
    # A mirror has the same files; its address is the user's.
    assert "://" not in text and "-index" not in text


@pytest.mark.parametrize("one", ["hopsgpu", "demo", "check", "dev", "bench", "kerberos", "azure"])
def test_make_installs_only_what_has_a_digest(one: str) -> None:
    stamp = ".venv/.installed" + ("" if one == "hopsgpu" else f"-{one}")
    argv = ["make", "--dry-run", "--always-make", stamp]
    made = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    (recipe,) = [line for line in made.stdout.splitlines() if "constraints.txt" in line]
    select, packages, itself = recipe.rsplit(" && ", 2)
    assert "--require-hashes --no-deps --requirement" in packages
    assert "--no-deps --no-build-isolation --editable ." in itself
    chosen = subprocess.run(
        select.rpartition(" > ")[0],
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    names = {package.partition("==")[0] for package in entries_of(chosen.stdout)}
    assert {"pyspark", "setuptools"} <= names
    assert ("torch" in names) == (one in ("demo", "dev", "bench"))
