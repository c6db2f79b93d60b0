"""Paths on the lake: their URLs, and local directories as lakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.root import choose_root, join_url, normalize_url


@pytest.mark.parametrize(
    ("url", "path"),
    [("file://tmp/x", "/tmp/x"), ("file://tmp/", "/tmp/"), ("file://host:80/a/b", "/host:80/a/b")],
)
def test_file_system_of_another_host_is_refused(url: str, path: str) -> None:
    with pytest.raises(ConfigError, match=f"{url}.* file://{path}$"):
        LakePath(url)
    with pytest.raises(ConfigError, match="host"):
        ModelStore(url)


def test_this_host_may_be_named(tmp_path: Path) -> None:
    (LakePath(f"file://localhost{tmp_path}") / "f").write(b"here")
    assert (tmp_path / "f").read_bytes() == b"here"


@pytest.mark.parametrize("root", ["file:///", "hdfs:///", "hdfs://host:9000/", "webhdfs://h:1//"])
def test_root_of_a_file_system_is_a_path(root: str) -> None:
    url = root if root.endswith("///") else f"{root.rstrip('/')}/"
    lake = LakePath(root)
    assert (lake.url, lake.path) == (url, "/")
    assert repr(ModelStore(root)) == f"ModelStore('{url}')"
    net = lake / "net"
    assert (net.url, net.path) == (f"{url}net", "/net")
    assert LakePath(f"{url}/net//") == net
    assert choose_root(root, None, "ann") == normalize_url(url) == url
    assert join_url(url, "models/net") == f"{url}models/net"


def test_the_root_of_the_local_file_system_is_listed() -> None:
    root = LakePath("file:///")
    assert set(root.names()) == {entry.name for entry in Path("/").iterdir() if entry.exists()}
    assert (root / "tmp").parent.url == "file:///"


def test_the_default_root_is_below_the_default_file_system() -> None:
    assert choose_root(None, "hdfs:///", "ann") == "hdfs:///user/ann/hopsgpu"
    for files in ("hdfs://lake", "hdfs://lake/"):
        assert choose_root(None, files, "ann") == "hdfs://lake/user/ann/hopsgpu"


def test_broken_links_hide_no_other_entries(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("nothing")
    (tmp_path / "file").touch()
    (tmp_path / "no directory").symlink_to("file/below")
    (tmp_path / "other").symlink_to("net")
    assert LakePath(f"file://{tmp_path}").names() == ("file", "net", "other")
    assert ModelStore(f"file://{tmp_path}").list() == ()


def test_error_of_an_entry_that_is_no_link_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        name = "disk"

        def stat(self) -> os.stat_result:
            raise OSError(5, "Input/output error")

        def is_symlink(self) -> bool:
            return False

    monkeypatch.setattr(os, "scandir", lambda path: [Broken()])
    with pytest.raises(StoreError, match="Input/output"):
        LakePath(f"file://{tmp_path}", should_fail_fast=True).entries()
