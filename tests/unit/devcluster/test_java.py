"""Which Java is chosen, and the error without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.devcluster.java import find_java
from hopsgpu.errors import ClusterError


def jdk(home: Path, version: str) -> Path:
    """Make a fake JDK whose java describes itself like a real one."""
    binary = home / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(
        f"#!/bin/sh\ncat >&2 <<'X'\n    java.home = {home}\n"
        f"    java.specification.version = {version}\nX\n"
    )
    binary.chmod(0o755)
    (home / "bin" / "javac").touch()
    return home


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    a, b = jdk(tmp_path / "a", "21"), jdk(tmp_path / "b", "17")
    java = find_java({"JAVA_HOME": str(a), "PATH": f"{b}/bin"})
    assert (java.home, java.version, java.binary) == (a, 21, a / "bin" / "java")
    assert find_java({"PATH": f"{b}/bin"}).home == b
    assert find_java({"JAVA_HOME": "", "PATH": f"{b}/bin"}).version == 17


def test_a_wrong_java_home_does_not_hide_a_right_path(tmp_path: Path) -> None:
    old, new = jdk(tmp_path / "old", "1.8"), jdk(tmp_path / "new", "17")
    assert find_java({"JAVA_HOME": str(old), "PATH": f"{new}/bin"}).home == new


def test_a_link_on_the_path_leads_to_the_real_home(tmp_path: Path) -> None:
    home = jdk(tmp_path / "jvm", "17")
    link = tmp_path / "usr" / "java"
    link.parent.mkdir()
    link.symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(link.parent)}).home == home


@pytest.mark.parametrize(("version", "said"), [("1.8", "Java 8"), ("11", "Java 11"), ("25", "25")])
def test_a_wrong_version_says_which_and_what_to_install(
    tmp_path: Path, version: str, said: str
) -> None:
    home = jdk(tmp_path / "jvm", version)
    with pytest.raises(ClusterError) as caught:
        find_java({"JAVA_HOME": str(home), "PATH": ""})
    message = str(caught.value)
    assert said in message
    assert str(home) in message
    assert "JDK 17 or 21" in message
    assert "\n" not in message


def test_a_jre_is_none_with_which_the_check_of_hosts_can_be_compiled(tmp_path: Path) -> None:
    jre, home = jdk(tmp_path / "jre", "17"), jdk(tmp_path / "jdk", "17")
    (jre / "bin" / "javac").unlink()
    assert find_java({"JAVA_HOME": str(jre), "PATH": f"{home}/bin"}).home == home
    with pytest.raises(ClusterError, match=r"a Java 17 without javac \(.*/jre\): install a JDK"):
        find_java({"JAVA_HOME": str(jre), "PATH": ""})


def test_no_java_at_all(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="JAVA_HOME is not set and there is no java"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(ClusterError, match="JAVA_HOME has no working java"):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": ""})
