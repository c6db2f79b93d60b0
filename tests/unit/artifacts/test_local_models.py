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


def test_every_model_that_is_listed_is_found(store: ModelStore, root: Path, model: Path) -> None:
    store.publish(model, "latest")
    for name in ("a:b", "a\\b", "u\u0308ber", " padded", "\u200b", "a\u2028b"):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "manifest.json").touch()
    assert store.list() == ("latest",)
    for name in store.list():
        assert store.get(name).version == store.versions(name)[0].version == 1


def test_a_number_that_no_version_has_is_refused(store: ModelStore, model: Path) -> None:
    store.publish(model, "net")
    for version in ("9" * 5000, 10**5000, -(10**5000), "9" * 19, 10**18):
        with pytest.raises(ConfigError, match="has at most 18 digits"):
            store.get("net", version)


def test_the_longest_number_is_only_absent(store: ModelStore, model: Path) -> None:
    store.publish(model, "net")
    for version in (10**18 - 1, "9" * 18, 0):
        with pytest.raises(StoreError, match=f"no version {version!r} of 'net'"):
            store.get("net", version)


def test_a_directory_with_a_longer_number_is_passed_over(
    store: ModelStore, root: Path, model: Path
) -> None:
    store.publish(model, "net")
    for name in ("9" * 255, "9" * 19):
        (root / "net" / name).mkdir()
        (root / "net" / name / "manifest.json").touch()
    assert store.get("net").version == 1
    assert store.publish(model, "net").version == 2
    assert [version.version for version in store.versions("net")] == [1, 2]


def test_a_file_with_a_number_is_no_version(store: ModelStore, root: Path, model: Path) -> None:
    store.publish(model, "net")
    (root / "net" / "7").write_text("notes")
    assert store.list() == ("net",)
    assert [version.version for version in store.versions("net")] == [1]
    assert store.get("net").version == 1
    for number in (7, 9):
        with pytest.raises(StoreError, match=f"no version {number} of 'net'.*; versions: 1;"):
            store.get("net", number)
    assert store.publish(model, "net").version == 8


def refuse_looks_below(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make a directory unreadable; root, who runs the tests, may read all."""

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


def test_a_version_that_may_not_be_read_hides_no_other(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net", tags=["prod"])
    second = store.publish(model, "net")
    refuse_looks_below(monkeypatch, root / "net" / "2")
    assert store.list() == ("net",)
    assert [version.version for version in store.versions("net")] == [1, 2]
    assert store.get("net", 1) == store.get("net", "prod")
    for version in ("latest", 2):
        with pytest.raises(StoreError, match=r"net/2/.*ask the owner") as told:
            store.get("net", version)
        assert told.value.kind == "permission"
    with pytest.raises(StoreError, match="version 2 of .* is the latest"):
        store.get("net")
    with pytest.raises(StoreError, match="net/2/manifest.json") as told:
        second.verify()
    assert told.value.kind == "permission"
    with pytest.raises(StoreError, match="no version 9 of 'net'.*; versions: 1, 2; tags: prod"):
        store.get("net", 9)


def test_a_model_that_may_not_be_read_is_passed_over(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("net", "other"):
        store.publish(model, name)
    refuse_looks_below(monkeypatch, root / "net")
    assert store.list() == ("other",)


def test_a_version_without_its_manifest_is_damaged_and_can_be_deleted(
    store: ModelStore, root: Path, model: Path, tmp_path: Path
) -> None:
    store.publish(model, "net")
    second = store.publish(model, "net", tags=["prod"])
    assert second.manifest["version"] == 2
    (root / "net" / "2" / "manifest.json").unlink()
    said = r"net/2 .*manifest\.json is missing"
    unread = ModelVersion("net", 2, second.url)
    for call in (
        lambda: store.get("net", 2),
        lambda: store.get("net", "prod"),
        second.verify,
        unread.verify,
        lambda: unread.download(tmp_path / "copy"),
        lambda: unread.manifest,
    ):
        with pytest.raises(StoreError, match=said) as told:
            call()
        assert told.value.kind == "damaged"
    assert store.get("net").version == 1
    with pytest.raises(StoreError, match="version 2 of .* is tagged 'prod'"):
        store.delete("net", 2)
    store.untag("net", "prod")
    store.delete("net", 2)
    assert not (root / "net" / "2").exists()
    with pytest.raises(StoreError, match="no version 2 of 'net'"):
        store.get("net", 2)
    # What others put there is no version that was damaged: an empty directory, a file, one of a
    # number that nobody claimed.
    (root / "net" / "2").mkdir()
    (root / "net" / "9").mkdir()
    (root / "net" / "9" / "notes").touch()
    (root / "net" / "_claims" / "8").touch()
    (root / "net" / "8").touch()
    for number in (2, 8, 9):
        for call in (store.get, store.delete):
            with pytest.raises(StoreError, match=f"no version {number} of 'net'") as told:
                call("net", number)
            assert told.value.kind == "absent"


def test_a_version_that_is_deleted_while_it_is_read_is_not_damaged(
    store: ModelStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.publish(model, "net")
    for name in ("download_files", "check_files"):
        read = getattr(versions, name)

        def reading(*arguments: Any, read: Callable[..., None] = read) -> None:
            store.delete("net", version.version)
            read(*arguments)

        monkeypatch.setattr(versions, name, reading)
    with pytest.raises(StoreError, match="net/1 was deleted$") as told:
        version.download(tmp_path / "copy")
    assert told.value.kind == "absent" and list((tmp_path / "copy").iterdir()) == []
    with pytest.raises(StoreError, match="net/1 was deleted$") as told:
        version.verify()
    assert told.value.kind == "absent"
    version = store.publish(model, "net")
    with pytest.raises(StoreError, match="net/2 was deleted$") as told:
        version.verify()
    assert told.value.kind == "absent"


def test_a_deletion_that_is_refused_leaves_nothing(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.publish(model, "net")
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self == root / "net" / "1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    with monkeypatch.context() as refusing:
        refusing.setattr(Path, "rename", refused)
        with pytest.raises(StoreError, match="cannot rename .*net/1: ") as told:
            store.delete("net", 1)
    assert told.value.kind == "permission"
    assert list((root / "net" / "_staging").iterdir()) == []
    version.verify()
    # Of two at once the other one was first.
    before_reading(monkeypatch, {1: lambda: store.delete("net", 1)})
    with pytest.raises(StoreError, match="cannot rename .*net/1: ") as told:
        store.delete("net", 1)
    assert told.value.kind == "absent"
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


def test_a_version_that_is_tagged_while_it_is_deleted_comes_back(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")
    readings = before_reading(monkeypatch, {2: written_tag(root, 1)})
    with pytest.raises(StoreError, match="version 1 of .* is tagged 'prod'"):
        store.delete("net", 1)
    assert readings == [2]
    store.get("net", "prod").verify()
    assert list((root / "net" / "_staging").iterdir()) == []


def test_a_sweep_does_not_take_what_may_come_back(
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
    with pytest.raises(StoreError, match="is tagged 'prod'"):
        store.delete("net", 1)
    store.get("net", "prod").verify()


def test_a_version_whose_place_is_taken_is_not_lost(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")

    def tagged_and_taken() -> None:
        written_tag(root, 1)()
        (root / "net" / "1").mkdir()

    before_reading(monkeypatch, {2: tagged_and_taken})
    with pytest.raises(StoreError, match="cannot restore .*net/1") as told:
        store.delete("net", 1)
    assert told.value.kind == "exists"
    (kept,) = (root / "net" / "_staging").glob("*/1")
    assert str(kept) in str(told.value) and (kept / "weights.pt").exists()


def test_a_tag_set_while_its_version_is_aside_goes_and_both_are_told(
    store: ModelStore, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")

    def tag() -> None:
        with pytest.raises(StoreError, match="cannot set tag 'prod'"):
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


def test_a_version_that_is_deleted_while_it_is_tagged_leaves_no_tag(
    store: ModelStore, root: Path, model: Path
) -> None:
    store.publish(model, "net")
    late = Late(f"file://{root}", lambda: store.delete("net", 1))
    with pytest.raises(StoreError, match="cannot set tag 'prod'") as told:
        late.tag("net", 1, "prod")
    assert told.value.kind == "absent"
    assert (store.versions("net"), store.tags("net")) == ((), {})


def test_a_tag_that_somebody_moved_on_stays(
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


def test_what_a_killed_process_leaves_of_a_tag_misleads_nobody(
    store: ModelStore, root: Path, model: Path
) -> None:
    store.publish(model, "net")
    store.delete("net", store.publish(model, "net").version)
    written_tag(root, 2)()
    with pytest.raises(StoreError, match="no version 'prod' of 'net'") as told:
        store.get("net", "prod")
    assert told.value.kind == "absent"
    assert store.publish(model, "net").version == 3
    store.tag("net", 1, "prod")
    assert store.get("net", "prod").version == 1
    store.delete("net", 3)
    written_tag(root, 2)()
    store.untag("net", "prod")
    assert store.tags("net") == {}


def test_no_tag_leads_nowhere_whoever_tags_and_deletes_at_once(
    store: ModelStore, model: Path
) -> None:
    def told(call: Callable[[], None]) -> bool:
        try:
            call()
        except StoreError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(60):
            number = store.publish(model, "net").version
            deleted = pool.submit(told, lambda n=number: store.delete("net", n))
            tagged = pool.submit(told, lambda n=number: store.tag("net", n, "prod"))
            assert not (deleted.result() and tagged.result())
            there = {version.version for version in store.versions("net")}
            assert set(store.tags("net").values()) <= there
            assert (number in there) is not deleted.result()
            if tagged.result():
                assert store.get("net", "prod").version == number
                store.untag("net", "prod")


def test_the_record_of_a_checkpoint_that_is_none_is_told(tmp_path: Path) -> None:
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
        with pytest.raises(StoreError, match=f"{record.url} is damaged") as told:
            checkpoint_restore._facts(record)
        assert told.value.kind == "damaged"


def test_without_a_url_the_store_is_that_of_a_session_here(
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
