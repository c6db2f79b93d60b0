"""The roots of all users, as `usage` finds them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage import lake_root
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.lake_root import given_roots, roots_of_users, session_root

SITE = (
    "<configuration><property><name>fs.defaultFS</name><value>{}</value></property></configuration>"
)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "core-site.xml").write_text(SITE.format("hdfs://lake:8020"))
    (tmp_path / "yarn-site.xml").write_text("<configuration/>")
    monkeypatch.setattr(LakePath, "with_client", lambda self: self)
    monkeypatch.setattr(
        LakePath, "parent", property(lambda self: LakePath(self.url.rpartition("/")[0]))
    )
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    return {"HADOOP_CONF_DIR": str(tmp_path), "HADOOP_USER_NAME": "alice"}


def test_roots_of_other_users_are_beside_the_own(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def names(self: LakePath, *, only_directories: bool = False) -> tuple[str, ...]:
        calls.append((self.url, only_directories))
        return ("alice", "bob", "hive", "old#1", "a?b")

    monkeypatch.setattr(LakePath, "names", names)
    roots, problems = roots_of_users(environ)
    assert [root.url for root in roots] == [
        f"hdfs://lake:8020/user/{user}/hopsgpu" for user in ("alice", "bob", "hive")
    ]
    assert calls == [("hdfs://lake:8020/user", True)] and problems == []


def test_directories_that_may_not_be_listed_are_a_problem(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LakePath, *, only_directories: bool = False) -> tuple[str, ...]:
        raise StoreError("no permission", kind="permission")

    monkeypatch.setattr(LakePath, "names", refuse)
    roots, problems = roots_of_users(environ)
    assert [root.url for root in roots] == ["hdfs://lake:8020/user/alice/hopsgpu"]
    assert [problem.endswith("no permission") for problem in problems] == [True]


def test_configured_root_is_the_only_one(environ: dict[str, str]) -> None:
    roots, problems = roots_of_users({**environ, "HOPSGPU_ROOT": "hdfs://lake/shared"})
    assert ([root.url for root in roots], problems) == (["hdfs://lake/shared"], [])


def test_root_of_the_session_is_the_only_one(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = {"spark.hopsgpu.root": "hdfs://lake/team"}
    context = SimpleNamespace(getConf=lambda: conf)
    pyspark = SimpleNamespace(SparkContext=SimpleNamespace(_active_spark_context=context))
    monkeypatch.setitem(sys.modules, "pyspark", pyspark)
    roots, _ = roots_of_users(environ)
    assert [root.url for root in roots] == ["hdfs://lake/team"]
    assert session_root(environ) == "hdfs://lake/team"


def test_root_without_a_session_is_that_of_a_new_session(
    environ: dict[str, str],
) -> None:
    assert session_root(environ) == "hdfs://lake:8020/user/alice/hopsgpu"
    assert session_root({**environ, "HOPSGPU_ROOT": "hdfs://lake/shared/"}) == "hdfs://lake/shared"


def test_a_machine_without_a_cluster_has_one_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    roots, _ = roots_of_users({})
    assert [root.url for root in roots] == [f"file://{tmp_path}/hopsgpu"]


def test_given_roots_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_root, "roots_of_users", lambda environ: pytest.fail("read"))
    roots, _ = given_roots(["file:///a", "file:///b/", "file:///a"])
    assert [root.url for root in roots] == ["file:///a", "file:///b"]
    assert given_roots("file:///a")[0] == [LakePath("file:///a")]


@pytest.mark.parametrize("root", [[], 7, [None], {"file:///a"}])
def test_other_roots_are_refused(root: object) -> None:
    with pytest.raises(ConfigError, match="root="):
        given_roots(root)  # type: ignore[arg-type]
