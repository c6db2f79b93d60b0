"""Drivers in pods: the user on HDFS, and the directory of uploaded files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.spark import kubernetes_submission
from hopsgpu.backends.spark.kubernetes_submission import UPLOADS, prepare_driver_pod, spark_url
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.storage.lake import LakePath

TAG, OTHER = "hopsgpu-submit-0123456789abcdef", "hopsgpu-submit-fedcba9876543210"
USER = "spark.kubernetes.driverEnv.HADOOP_USER_NAME"
NOW = 1_800_000_000


@pytest.fixture(autouse=True)
def _no_hadoop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "HADOOP_USER_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kubernetes_submission, "time", SimpleNamespace(time=lambda: NOW))


def cluster(*living: str, error: HopsGpuError | None = None) -> Any:
    def living_submissions() -> frozenset[str]:
        if error is not None:
            raise error
        return frozenset(living)

    drivers = SimpleNamespace(living_submissions=living_submissions)
    return SimpleNamespace(cluster="k8s-1", namespace="team", submitted_drivers=lambda: drivers)


def hadoop(directory: Path, **properties: str) -> str:
    lines = "".join(
        f"<property><name>{name.replace('_', '.')}</name><value>{value}</value></property>"
        for name, value in {"fs.defaultFS": "hdfs://nn:8020", **properties}.items()
    )
    directory.mkdir()
    (directory / "core-site.xml").write_text(f"<configuration>{lines}</configuration>")
    return str(directory)


def test_files_are_in_a_private_directory_until_the_end(tmp_path: Path) -> None:
    root = LakePath(tmp_path.as_uri())
    with prepare_driver_pod({}, lambda: root, cluster(), TAG, False) as settings:
        directory = tmp_path / "uploads" / "k8s-1-team" / f"{NOW}-{TAG}"
        assert settings == {UPLOADS: directory.as_uri()}
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "job.py").touch()
    assert not directory.exists()
    with prepare_driver_pod({}, lambda: root, cluster(), TAG, True):
        pass
    assert directory.exists()
    with (
        contextlib.suppress(HopsGpuError),
        prepare_driver_pod({}, lambda: root, cluster(), OTHER, True),
    ):
        raise HopsGpuError("spark-submit failed")
    assert [entry.name for entry in directory.parent.iterdir()] == [directory.name]


def test_files_of_earlier_submissions_are_removed_when_no_driver_needs_them(tmp_path: Path) -> None:
    uploads = tmp_path / "uploads" / "k8s-1-team"
    names = {
        "old": f"{NOW - 4000}-{TAG}",
        "living": f"{NOW - 4000}-{OTHER}",
        "young": f"{NOW - 10}-hopsgpu-submit-00000000000000aa",
        "foreign": "somebody's",
    }
    for name in names.values():
        (uploads / name).mkdir(parents=True)
    root = LakePath(tmp_path.as_uri())

    def left(manager: Any) -> set[str]:
        with prepare_driver_pod({}, lambda: root, manager, "hopsgpu-submit-1", False):
            return {entry.name for entry in uploads.iterdir()} - {f"{NOW}-hopsgpu-submit-1"}

    assert left(cluster(error=HopsGpuError("no answer"))) == set(names.values())
    assert left(cluster(OTHER)) == set(names.values()) - {names["old"]}


def test_a_directory_of_the_user_is_left_alone() -> None:
    def no_root() -> LakePath:
        raise AssertionError("the root is not needed")

    given = {UPLOADS: "s3a://bucket/mine"}
    with prepare_driver_pod(given, no_root, cluster(), TAG, False) as settings:
        assert settings == {}


def test_nothing_is_created_if_nothing_is_submitted(tmp_path: Path) -> None:
    root = LakePath(tmp_path.as_uri())
    with prepare_driver_pod({}, lambda: root, None, None, False) as settings:
        assert settings == {UPLOADS: f"{tmp_path.as_uri()}/uploads"}
    assert not (tmp_path / "uploads").exists()


@pytest.mark.parametrize(
    ("url", "of_spark"),
    [("s3://bucket/a", "s3a://bucket/a"), ("gs://b/a", "gs://b/a"), ("hdfs://n/a", "hdfs://n/a")],
)
def test_sparks_names_of_lakes(url: str, of_spark: str) -> None:
    assert spark_url(url) == of_spark


def test_the_driver_acts_for_the_submitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", hadoop(tmp_path / "plain"))
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    root = LakePath(tmp_path.as_uri())
    given = {UPLOADS: "hdfs://nn:8020/up"}
    with prepare_driver_pod(given, lambda: root, cluster(), TAG, False) as settings:
        assert settings == {USER: "alice"}
    given[USER] = "bob"
    with prepare_driver_pod(given, lambda: root, cluster(), TAG, False) as settings:
        assert settings == {}
    secure = hadoop(tmp_path / "secure", **{"hadoop_security_authentication": "kerberos"})
    monkeypatch.setenv("HADOOP_CONF_DIR", secure)
    with (
        pytest.raises(ConfigError, match="requires Kerberos"),
        prepare_driver_pod({UPLOADS: "hdfs://nn:8020/up"}, lambda: root, cluster(), TAG, False),
    ):
        pass
