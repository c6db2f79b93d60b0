"""The model store on a local directory, with other programs' files and concurrent processes."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts import checkpoint_restore, stale_uploads, tags, versions
from hopsgpu.artifacts.models import ModelStore, ModelVersion
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, FileFacts
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local import Local


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def store(root: Path) -> ModelStore:
    return ModelStore(f"file://{root}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights.pt").write_bytes(b"weights")
    return source


def test_every_listed_model_is_found(store: ModelStore, root: Path, model: Path) -> None:
    store.publish(model, "latest")
    for name in ("a:b", "a\\b", "u\u0308ber", " padded", "\u200b", "a\u2028b"):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "manifest.json").touch()
    assert store.list() == ("latest",)
    for name in store.list():
        assert store.get(name).version == store.versions(name)[0].version == 1


def test_number_with_too_many_digits_is_refused(store: ModelStore, model: Path) -> None:
    store.publish(model, "net")
    for version in ("9" * 5000, 10**5000, -(10**5000), "9" * 19, 10**18):
        with pytest.raises(ConfigError, match="18 digits"):
            store.get("net", version)


def test_longest_number_is_absent(store: ModelStore, model: Path) -> None:
    store.publish(model, "net")
    for version in (10**18 - 1, "9" * 18, 0):
        with pytest.raises(StoreError, match=f" {version!r} of 'net'"):
            store.get("net", version)


def test_directory_with_a_longer_number_is_ignored(
    store: ModelStore, root: Path, model: Path
) -> None:
    store.publish(model, "net")
    for name in ("9" * 255, "9" * 19):
        (root / "net" / name).mkdir()
        (root / "net" / name / "manifest.json").touch()
    assert store.get("net").version == 1
    assert store.publish(model, "net").version == 2
    assert [version.version for version in store.versions("net")] == [1, 2]


def test_file_with_a_number_is_no_version(store: ModelStore, root: Path, model: Path) -> None:
    store.publish(model, "net")
    (root / "net" / "7").write_text("notes")
    assert store.list() == ("net",)
    assert [version.version for version in store.versions("net")] == [1]
    assert store.get("net").version == 1
    for number in (7, 9):
        with pytest.raises(StoreError, match=f" {number} of 'net'.* 1;"):
            store.get("net", number)
    assert store.publish(model, "net").version == 8


def make_unreadable(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make a directory unreadable, also for root."""

    def refused(call: Callable[[Local, str], object]) -> Callable[[Local, str], object]:
        def look(self: Local, path: str) -> object:
            if directory in (Path(path), *Path(path).parents) and path != str(directory):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            if path == str(directory) and call is entries:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return call(self, path)

        return look

    entries = Local.entries
    for name in ("stat", "entries", "read"):
        monkeypatch.setattr(Local, name, refused(getattr(Local, name)))


def test_version_that_may_not_be_read_hides_no_other(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net", tags=["prod"])
    second = store.publish(model, "net")
    make_unreadable(monkeypatch, root / "net" / "2")
    assert store.list() == ("net",)
    assert [version.version for version in store.versions("net")] == [1, 2]
    assert store.get("net", 1) == store.get("net", "prod")
    for version in ("latest", 2):
        with pytest.raises(StoreError, match="net/2/") as raised:
            store.get("net", version)
        assert raised.value.kind == "permission"
    with pytest.raises(StoreError, match="2 .* latest"):
        store.get("net")
    with pytest.raises(StoreError, match="net/2/manifest.json") as raised:
        second.verify()
    assert raised.value.kind == "permission"
    with pytest.raises(StoreError, match="9 of 'net'.* 1, 2; .* prod"):
        store.get("net", 9)


def test_model_that_may_not_be_read_is_not_listed(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("net", "other"):
        store.publish(model, name)
    make_unreadable(monkeypatch, root / "net")
    assert store.list() == ("other",)


def test_version_without_its_manifest_is_damaged_and_can_be_deleted(
    store: ModelStore, root: Path, model: Path, tmp_path: Path
) -> None:
    store.publish(model, "net")
    second = store.publish(model, "net", tags=["prod"])
    assert second.manifest["version"] == 2
    (root / "net" / "2" / "manifest.json").unlink()
    missing = r"net/2 .*manifest\.json"
    unread = ModelVersion("net", 2, second.url)
    for call in (
        lambda: store.get("net", 2),
        lambda: store.get("net", "prod"),
        second.verify,
        unread.verify,
        lambda: unread.download(tmp_path / "copy"),
        lambda: unread.manifest,
    ):
        with pytest.raises(StoreError, match=missing) as raised:
            call()
        assert raised.value.kind == "damaged"
    assert store.get("net").version == 1
    with pytest.raises(StoreError, match="2 of .* 'prod'"):
        store.delete("net", 2)
    store.untag("net", "prod")
    store.delete("net", 2)
    assert not (root / "net" / "2").exists()
    with pytest.raises(StoreError, match="2 of 'net'"):
        store.get("net", 2)
    # Entries of other programs are no damaged versions: an empty directory, a file, a directory
    # whose number was not claimed.
    (root / "net" / "2").mkdir()
    (root / "net" / "9").mkdir()
    (root / "net" / "9" / "notes").touch()
    (root / "net" / "_claims" / "8").touch()
    (root / "net" / "8").touch()
    for number in (2, 8, 9):
        for call in (store.get, store.delete):
            with pytest.raises(StoreError, match=f" {number} of 'net'") as raised:
                call("net", number)
            assert raised.value.kind == "absent"


def test_version_that_is_deleted_while_it_is_read_is_not_damaged(
    store: ModelStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.publish(model, "net")
    for name in ("download_files", "check_files"):
        read = getattr(versions, name)

        def reading(*arguments: Any, read: Callable[..., None] = read) -> None:
            store.delete("net", version.version)
            read(*arguments)

        monkeypatch.setattr(versions, name, reading)
    with pytest.raises(StoreError, match="net/1 ") as raised:
        version.download(tmp_path / "copy")
    assert raised.value.kind == "absent" and list((tmp_path / "copy").iterdir()) == []
    with pytest.raises(StoreError, match="net/1 ") as raised:
        version.verify()
    assert raised.value.kind == "absent"
    version = store.publish(model, "net")
    with pytest.raises(StoreError, match="net/2 ") as raised:
        version.verify()
    assert raised.value.kind == "absent"


def test_refused_deletion_leaves_nothing(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.publish(model, "net")
    rename = os.rename

    def refused(source: str, target: str, **directories: int) -> None:
        if source == "1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        rename(source, target, **directories)  # type: ignore[arg-type]

    with monkeypatch.context() as refusing:
        refusing.setattr(os, "rename", refused)
        with pytest.raises(StoreError, match="net/1: ") as raised:
            store.delete("net", 1)
    assert raised.value.kind == "permission"
    assert list((root / "net" / "_staging").iterdir()) == []
    version.verify()
    # Another deletion was first.
    before_reading(monkeypatch, {1: lambda: store.delete("net", 1)})
    with pytest.raises(StoreError, match="net/1: ") as raised:
        store.delete("net", 1)
    assert raised.value.kind == "absent"
    assert list((root / "net" / "_staging").iterdir()) == []


def before_reading(
    monkeypatch: pytest.MonkeyPatch, calls: dict[int, Callable[[], None]]
) -> list[int]:
    """Run something just before the nth reading of all tags."""
    read, readings = tags.read_tags, [0]

    def reading(home: LakePath) -> dict[str, int]:
        readings[0] += 1
        calls.get(readings[0], lambda: None)()
        return read(home)

    monkeypatch.setattr(tags, "read_tags", reading)
    return readings


def written_tag(root: Path, version: int) -> Callable[[], None]:
    """Do what another process does that tags `net`, before it checks the version."""

    def write() -> None:
        (root / "net" / "_tags").mkdir(exist_ok=True)
        (root / "net" / "_tags" / "prod").write_text(json.dumps({"version": version}))

    return write


def test_version_that_is_tagged_while_it_is_deleted_is_restored(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")
    readings = before_reading(monkeypatch, {2: written_tag(root, 1)})
    with pytest.raises(StoreError, match="1 of .* 'prod'"):
        store.delete("net", 1)
    assert readings == [2]
    store.get("net", "prod").verify()
    assert list((root / "net" / "_staging").iterdir()) == []


def test_sweep_keeps_a_version_that_may_be_restored(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")
    for path in (root / "net" / "1", *(root / "net" / "1").iterdir()):
        os.utime(path, (1, 1))
    home = LakePath(f"file://{root}/net")

    def tagged_and_swept() -> None:
        written_tag(root, 1)()
        assert stale_uploads.sweep(home, int(time.time() * 1000)) == []

    before_reading(monkeypatch, {2: tagged_and_swept})
    with pytest.raises(StoreError, match="'prod'"):
        store.delete("net", 1)
    store.get("net", "prod").verify()


def test_version_that_cannot_be_restored_is_kept_in_staging(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")

    def tagged_and_taken() -> None:
        written_tag(root, 1)()
        (root / "net" / "1").mkdir()

    before_reading(monkeypatch, {2: tagged_and_taken})
    with pytest.raises(StoreError, match="net/1") as raised:
        store.delete("net", 1)
    assert raised.value.kind == "exists"
    (kept,) = (root / "net" / "_staging").glob("*/1")
    assert str(kept) in str(raised.value) and (kept / "weights.pt").exists()


def test_tag_set_while_its_version_is_deleted_is_refused(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")

    def tag() -> None:
        with pytest.raises(StoreError, match="'prod'"):
            tags.put_tag(LakePath(f"file://{root}/net"), "prod", 1)

    before_reading(monkeypatch, {2: tag})
    store.delete("net", 1)
    assert (store.versions("net"), store.tags("net")) == ((), {})


class Late(ModelStore):
    """Finds a version, and continues slowly."""

    def __init__(self, url: str, meanwhile: Callable[[], None]) -> None:
        super().__init__(url)
        self._meanwhile = meanwhile

    def get(self, name: str, version: int | str = "latest") -> ModelVersion:
        found = super().get(name, version)
        self._meanwhile()
        return found


def test_version_that_is_deleted_while_it_is_tagged_leaves_no_tag(
    store: ModelStore, root: Path, model: Path
) -> None:
    store.publish(model, "net")
    late = Late(f"file://{root}", lambda: store.delete("net", 1))
    with pytest.raises(StoreError, match="'prod'") as raised:
        late.tag("net", 1, "prod")
    assert raised.value.kind == "absent"
    assert (store.versions("net"), store.tags("net")) == ((), {})


def test_tag_that_another_user_moved_stays(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")

    def look(home: LakePath, number: int) -> bool:
        written_tag(root, 1)()
        return False

    monkeypatch.setattr(tags, "is_version", look)
    with pytest.raises(StoreError, match="version 7 of"):
        tags.put_tag(LakePath(f"file://{root}/net"), "prod", 7)
    assert store.tags("net") == {"prod": 1}


def test_tag_of_a_killed_process_misleads_no_reader(
    store: ModelStore, root: Path, model: Path
) -> None:
    store.publish(model, "net")
    store.delete("net", store.publish(model, "net").version)
    written_tag(root, 2)()
    with pytest.raises(StoreError, match="'prod' of 'net'") as raised:
        store.get("net", "prod")
    assert raised.value.kind == "absent"
    assert store.publish(model, "net").version == 3
    store.tag("net", 1, "prod")
    assert store.get("net", "prod").version == 1
    store.delete("net", 3)
    written_tag(root, 2)()
    store.untag("net", "prod")
    assert store.tags("net") == {}


def test_concurrent_tags_and_deletions_leave_no_dangling_tag(
    store: ModelStore, model: Path
) -> None:
    def has_succeeded(call: Callable[[], None]) -> bool:
        try:
            call()
        except StoreError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(60):
            number = store.publish(model, "net").version
            deleted = pool.submit(has_succeeded, lambda n=number: store.delete("net", n))
            tagged = pool.submit(has_succeeded, lambda n=number: store.tag("net", n, "prod"))
            assert not (deleted.result() and tagged.result())
            numbers = {version.version for version in store.versions("net")}
            assert set(store.tags("net").values()) <= numbers
            assert (number in numbers) is not deleted.result()
            if tagged.result():
                assert store.get("net", "prod").version == number
                store.untag("net", "prod")


def test_damaged_record_of_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    record = LakePath(f"file://{tmp_path}/step-1.json")
    whole = json.dumps({"files": {"a/b": {"bytes": 1, DIGEST: "0f"}}})
    record.write(whole.encode())
    assert checkpoint_restore._facts(record) == {"a/b": FileFacts(1, "0f")}
    for odd in (
        "[" * 200_000,
        '{"files": []}',
        '{"files": {}}',
        whole.replace('"bytes": 1', '"bytes": 1e999'),
        whole.replace('"bytes": 1', '"bytes": "1"'),
        whole.replace("a/b", "../b"),
        whole.replace('"0f"', "null"),
    ):
        record.write(odd.encode())
        with pytest.raises(StoreError, match=record.url) as raised:
            checkpoint_restore._facts(record)
        assert raised.value.kind == "damaged"


def test_store_without_a_url_is_that_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}/root")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "weights").write_text("weights")
    version = ModelStore().publish(tmp_path / "files", "net")
    assert version.url == f"file://{tmp_path}/root/models/net/1"
    assert [v.url for v in ModelStore(f"file://{tmp_path}/root/models").versions("net")] == [
        version.url
    ]
