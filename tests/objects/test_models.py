"""The model store on an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.artifacts import publication, stale_uploads
from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.attempts.publisher import check_writable
from hopsgpu.errors import StoreError
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import LakePath
from tests.contract import test_models
from tests.objects.contracts import contracts_of
from tests.objects.emulators import Emulator

# They move versions, or are about the staging directory and what is renamed.
WITHOUT = (
    "test_a_version_that_another_program_made_keeps_its_number",
    "test_a_lost_answer_to_the_rename_is_no_second_version",
    "test_leftovers_are_swept_by_the_age_of_their_newest_file",
    "test_drafts_of_tags_and_probes_are_swept_by_their_age",
)
globals().update(contracts_of(test_models, WITHOUT))
DAY = test_models.DAY


def test_a_version_without_a_claim_keeps_its_number(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    version = store.publish(model, "net")
    manifest = LakePath(version.url) / "manifest.json"
    other = lake / "net" / "41" / "manifest.json"
    other.write(manifest.read().replace(b'"version": 1', b'"version": 41'))
    assert store.get("net").version == 41
    store.delete("net", 41)
    assert store.publish(model, "net").version == 42


def test_an_upload_is_no_version_until_its_manifest_is_there(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    staging = publication.begin(lake, "net")
    parts = {0: publication.upload(staging, model, 0)}
    assert store.list() == () and store.versions("net") == ()
    with pytest.raises(StoreError, match="no model 'net'") as absent:
        store.get("net", 1)
    assert absent.value.kind == "absent"
    # Somebody who is quicker does not wait for it.
    assert store.publish(model, "net").version == 2
    assert publication.commit(staging, parts, VersionDescription()).version == 1
    assert [version.version for version in store.versions("net")] == [1, 2]
    publication.abandon(staging)
    store.get("net", 1).verify()


def test_a_lost_answer_to_the_commit_is_no_failure(
    lake: LakePath, store: ModelStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = LakePath.create

    def lose(self: LakePath, content: bytes = b"") -> bool:
        made = create(self, content)
        return made and not self.url.endswith("manifest.json")

    monkeypatch.setattr(LakePath, "create", lose)
    version = store.publish(model, "net")
    assert version.version == 1
    version.verify()


def test_abandoned_uploads_are_swept_by_the_age_of_their_newest_file(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    store.publish(model, "net")
    home = lake / "net"
    dead = publication.begin(lake, "net")
    parts = {0: publication.upload(dead, model, 0)}
    assert dead.url == f"{home.url}/2"
    # No claim was made for it.
    (home / "4" / "somebody's").write(b"x")
    newest = max(entry.modified for entry in (dead / "layers").entries())
    assert stale_uploads.sweep(home, newest + DAY) == []
    assert stale_uploads.sweep(home, newest + 2 * DAY) == ["2"]
    assert home.names(only_directories=True) == ("1", "4", "_claims")
    # Its publisher has slept meanwhile.
    with pytest.raises(StoreError, match=r"net/2 is not published: .* publish again"):
        publication.commit(dead, parts, VersionDescription())
    assert [version.version for version in store.versions("net")] == [1]
    assert store.publish(model, "net").version == 5


def test_an_upload_that_is_being_swept_cannot_be_committed(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    dead = publication.begin(lake, "net")
    parts = {0: publication.upload(dead, model, 0)}
    # A sweep begins so.
    assert (dead / "manifest.json").create()
    with pytest.raises(StoreError, match="another process has put .*manifest.json there") as told:
        publication.commit(dead, parts, VersionDescription())
    assert told.value.kind == "exists"
    assert store.versions("net") == ()


def test_a_version_in_whose_place_nothing_was_uploaded_is_refused(lake: LakePath) -> None:
    staging = publication.begin(lake, "net")
    with pytest.raises(StoreError, match="'deep/er' has no bytes, and 7 were uploaded"):
        publication.commit(staging, {0: {"deep/er": FileFacts(7, "")}}, VersionDescription())


def test_probes_are_swept_by_their_age(
    lake: LakePath, store: ModelStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = lake / "net"
    # Of those who are killed before they remove what they have written.
    with monkeypatch.context() as dying:
        dying.setattr(LakePath, "remove", lambda self: None)
        check_writable(lake.url, "net", "run-0", should_write_block=True)
        store.publish(model, "net", tags=["production"])
        check_writable(lake.url, "net", "run-1", should_write_block=False)
    now = max(entry.modified for entry in home.entries())
    assert stale_uploads.sweep(home, now) == []
    drafts = set((home / "_tags").names()) - {"production"}
    removed = stale_uploads.sweep(home, now + 2 * DAY)
    assert sorted(removed) == sorted([*drafts, "_probe-run-0", *["_probe-run-1"] * 2])
    assert home.names() == ("1", "_claims", "_tags")
    assert store.get("net", "production").version == 1


def test_credentials_are_in_no_manifest_and_no_url(
    lake: LakePath,
    store: ModelStore,
    model: Path,
    emulator: Emulator,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = (emulator.secret or emulator.variables[emulator.address]).encode()
    with caplog.at_level("DEBUG", logger="hopsgpu"):
        version = store.publish(model, "net", tags=["production"])
    kept = (LakePath(version.url) / "manifest.json").read() + (lake / "net/_tags/production").read()
    assert secret not in kept + caplog.text.encode() + version.url.encode()
