"""One suite for every lake: a local directory, and the real HDFS."""

from __future__ import annotations

import concurrent.futures
import hashlib
import subprocess
from pathlib import Path

import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.stores.lake import Lake
from hopsgpu.stores.models import ModelStore


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = tmp_path / "model"
    (source / "layers").mkdir(parents=True)
    (source / "weights.bin").write_bytes(bytes(range(256)) * 40_000)
    (source / "layers" / "0.txt").write_text("ein Wort mit Umlaut: ü")
    (source / "empty").write_bytes(b"")
    return source


def test_files(lake: Lake) -> None:
    lake.make()
    lake.make()
    assert lake.names() == ()
    file = lake / "a file"
    file.write(b"one")
    file.write(b"two")
    assert file.read() == b"two"
    assert lake.names() == ("a file",)
    assert (lake / "absent").names() == ()
    file.remove()
    file.remove()
    assert lake.names() == ()


def test_rename_is_strict(lake: Lake) -> None:
    for name in ("new", "old"):
        (lake / name).make()
        (lake / name / "f").write(name.encode())
    assert (lake / "new").rename(lake / "old") is False
    assert (lake / "old" / "f").read() == b"old"
    assert (lake / "new" / "f").read() == b"new"
    (lake / "empty").make()
    assert (lake / "new").rename(lake / "empty") is False
    assert (lake / "new").rename(lake / "newer") is True
    assert (lake / "newer" / "f").read() == b"new"


def test_errors_name_the_path(lake: Lake) -> None:
    lake.make()
    with pytest.raises(StoreError, match=f"cannot read {lake.url}/absent: "):
        (lake / "absent").read()


def test_a_published_version_comes_back(lake: Lake, model: Path, tmp_path: Path) -> None:
    store = ModelStore(lake.url)
    assert store.versions("net") == ()
    first = store.publish(model, "net", run_id="run-1")
    second = store.publish(model, "net")
    assert [v.version for v in store.versions("net")] == [1, 2]
    assert store.get("net") == second
    assert store.get("net", 1) == first
    assert first.url == f"{lake.url}/net/1"
    manifest = first.manifest
    assert manifest["run_id"] == "run-1"
    weights = (model / "weights.bin").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    assert manifest["files"]["weights.bin"] == {"bytes": len(weights), "sha256": digest}
    copy = first.download(tmp_path / "copy")
    for file in ("weights.bin", "layers/0.txt", "empty"):
        assert (copy / file).read_bytes() == (model / file).read_bytes()
    with pytest.raises(ZeroDivisionError), second.open("layers/0.txt"):
        raise ZeroDivisionError("the reader's own")
    with second.open("layers/0.txt") as opened:
        assert opened.read().decode() == "ein Wort mit Umlaut: ü"
    with pytest.raises(StoreError, match="no version 7 of 'net'.*1, 2"):
        store.get("net", 7)


def test_a_damaged_file_is_named(lake: Lake, model: Path, tmp_path: Path) -> None:
    version = ModelStore(lake.url).publish(model, "net")
    (Lake(version.url) / "layers" / "0.txt").write(b"something else")
    with pytest.raises(StoreError, match=r"layers/0\.txt is damaged"):
        version.download(tmp_path / "copy")


def test_publishers_at_once_get_a_version_each(lake: Lake, model: Path) -> None:
    store = ModelStore(lake.url)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        published = list(pool.map(lambda _: store.publish(model, "net").version, range(4)))
    assert sorted(published) == [1, 2, 3, 4]
    assert (lake / "net").names() == ("1", "2", "3", "4", "_staging")
    assert (lake / "net" / "_staging").names() == ()


def test_what_is_refused_leaves_nothing(lake: Lake, model: Path, tmp_path: Path) -> None:
    store = ModelStore(lake.url)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(StoreError, match="holds no file"):
        store.publish(tmp_path / "nothing", "net")
    (model / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match="hopsgpu's own name"):
        store.publish(model, "net")
    (model / "manifest.json").rename(model / "w#1.bin")
    with pytest.raises(StoreError, match=r"'w#1\.bin' cannot be published"):
        store.publish(model, "net")
    assert store.versions("net") == ()
    assert (lake / "net" / "_staging").names() == ()
    for name in ("../net", "a/b", "", ".."):
        with pytest.raises(ConfigError, match="model="):
            store.publish(model, name)
    with pytest.raises(StoreError, match="not a path inside"):
        store.publish(tmp_path / "model" / "layers", "other").open("../../x").__enter__()


def test_a_process_can_be_forked_afterwards(lake: Lake) -> None:
    """PySpark launches its JVM so; with a file system that fsspec caches, it hangs."""
    lake.make()
    subprocess.run(["true"], preexec_fn=lambda: None, check=True, timeout=20)


@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "relative/path", "hdfs:", "", "ftp://h/x", "file:///a#b"]
)
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="absolute hdfs:// or file:// URL"):
        Lake(url)
