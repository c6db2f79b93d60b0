"""Providers of encryption keys that a client of HDFS accepts. No NameNode is asked."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hopsgpu.storage.error_messages import explain
from hopsgpu.storage.hdfs import Hdfs, as_exception

URL = "hdfs://127.0.0.1:1"


KMS = ["kms://http@kms1:9600/kms", "kms://https@kms1;kms2:9600/kms", "kms://https@kms1/kms", ""]
OTHERS = [
    "jceks://file@/etc/hadoop/keys.jceks",
    "jceks://hdfs@nn1:8020/keys.jceks",
    "localjceks://file/keys.jceks",
    "kms://kms1:9600/kms",
    "kms://ftp@kms1:9600/kms",
    "kms://https@",
    "user:///",
]


@pytest.mark.parametrize("provider", [*KMS, *OTHERS])
@pytest.mark.parametrize(
    "name", ["hadoop.security.key.provider.path", "dfs.encryption.key.provider.uri"]
)
def test_only_a_kms_is_used_and_other_providers_leave_all_other_files_readable(
    tmp_path: Path,
    name: str,
    provider: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "core-site.xml").write_text(
        f"<configuration><property><name>{name}</name><value>{provider}</value></property>"
        "</configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, "hopsgpu.storage")
    Hdfs(URL, should_fail_fast=True)  # hdfs-native refuses other providers when a client is made
    assert [provider in message for message in caplog.messages] == [True] * (provider in OTHERS)


def test_a_file_in_an_encryption_zone_says_which_providers_are_supported() -> None:
    said = (
        'OperationFailed("File is in an HDFS encryption zone but no KMS provider is configured (set'
        ' `hadoop.security.key.provider.path` in core-site.xml)")'
    )
    meaning = explain(as_exception(said))
    assert (meaning.kind, meaning.is_retryable) == ("unsupported", False)
    assert "kms://https@host:port/kms" in meaning.advice
