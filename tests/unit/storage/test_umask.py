"""Which permissions new files get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hopsgpu.storage.umask import creation_mask, parse_mask


@pytest.mark.parametrize(
    ("setting", "mask"),
    [
        ("022", 0o022),
        (" 077 ", 0o077),
        ("0027", 0o027),
        ("u=rwx,g=rx,o=", 0o027),
        ("g-w,o-rwx", 0o027),
        ("a=rwx", 0),
        ("g+w", 0o002),
        ("what", None),
        ("9", None),
    ],
)
def test_settings(setting: str, mask: int | None) -> None:
    assert parse_mask(setting) == mask


def test_the_configuration_counts_before_the_process(tmp_path: Path) -> None:
    before = os.umask(0o037)
    try:
        assert creation_mask({}) == 0o037
        assert creation_mask({"HADOOP_CONF_DIR": str(tmp_path)}) == 0o037
        (tmp_path / "core-site.xml").write_text(
            "<configuration><property><name>fs.permissions.umask-mode</name><value>077</value>"
            "</property></configuration>"
        )
        assert creation_mask({"HADOOP_CONF_DIR": str(tmp_path)}) == 0o077
        (tmp_path / "hdfs-site.xml").write_text(
            '<configuration xmlns:x="http://www.w3.org/2001/XInclude"><x:include href="site.xml"/>'
            "</configuration>"
        )
        (tmp_path / "site.xml").write_text(
            "<configuration><property><name>fs.permissions.umask-mode</name><value>027</value>"
            "</property></configuration>"
        )
        assert creation_mask({"HADOOP_CONF_DIR": str(tmp_path)}) == 0o027
        (tmp_path / "hdfs-site.xml").unlink()
        (tmp_path / "etc").mkdir()
        (tmp_path / "core-site.xml").rename(tmp_path / "etc" / "core-site.xml")
        (tmp_path / "etc").rename(tmp_path / "hadoop")
        (tmp_path / "etc").mkdir()
        (tmp_path / "hadoop").rename(tmp_path / "etc" / "hadoop")
        assert creation_mask({"HADOOP_HOME": str(tmp_path)}) == 0o077
    finally:
        os.umask(before)
