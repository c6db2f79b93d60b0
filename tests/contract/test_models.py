"""The model store, on every lake."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import hopsgpu
from hopsgpu.artifacts import publication, stale_uploads
from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.artifacts.models import ModelStore, ModelVersion
from hopsgpu.attempts.publisher import check_writable
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.digests import DIGEST, FileFacts
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS

DAY = 24 * 3600 * 1000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = tmp_path / "model"
    (source / "layers").mkdir(parents=True)
    (source / "weights.pt").write_bytes(bytes(range(256)) * 40_000)
    (source / "layers" / "0.txt").write_text("ein Wort mit Umlaut: ü")
    (source / "empty").write_bytes(b"")
    return source


@pytest.fixture
def store(lake: LakePath) -> ModelStore:
    return ModelStore(lake.url)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def left(lake: LakePath, name: str = "net") -> tuple[str, ...]:
    return (lake / name / "_staging").names()


def test_a_published_version_comes_back(
    lake: LakePath, store: ModelStore, model: Path, tmp_path: Path
) -> None:
    assert store.versions("net") == ()
    assert store.list() == ()
    signature = {"inputs": {"image": [None, 28, 28]}, "outputs": ("digit",)}
    metrics = {"accuracy": 0.97, "loss": math.nan, "epochs": 3}
    first = store.publish(model, "net", run_id="run-1", metrics=metrics, signature=signature)
    second = store.publish(model, "net")
    assert first == ModelVersion("net", 1, f"{lake.url}/net/1")
    assert store.versions("net") == (first, second)
    assert store.get("net") == second
    assert store.get("net", 1) == store.get("net", "1") == first
    assert store.list() == ("net",)
    assert left(lake) == ()
    copy = first.download(tmp_path / "new" / "copy")
    assert contents(copy) == contents(model)
    first.verify()
    with pytest.raises(ZeroDivisionError), second.open("layers/0.txt"):
        raise ZeroDivisionError("the reader's own")
    with second.open("layers/0.txt") as opened:
        assert opened.read().decode() == "ein Wort mit Umlaut: ü"


def test_a_manifest_says_what_a_version_is(lake: LakePath, store: ModelStore, model: Path) -> None:
    import xxhash

    signature = {"inputs": {"image": [None, 28, 28]}, "outputs": ("digit",)}
    version = store.publish(
        model,
        "net",
        run_id="run-1",
        metrics={"accuracy": 0.97, "loss": math.inf, "epochs": 3},
        signature=signature,
        tags=["new"],
    )
    manifest = version.manifest
    assert manifest == json.loads((LakePath(version.url) / "manifest.json").read())
    weights = (model / "weights.pt").read_bytes()
    digest = xxhash.xxh3_128(weights).hexdigest()
    assert manifest["files"]["weights.pt"] == {"bytes": len(weights), "digest": digest}
    assert sorted(manifest["files"]) == ["empty", "layers/0.txt", "weights.pt"]
    assert manifest["digest"] == DIGEST == "xxh3_128"
    said = {name: manifest[name] for name in ("schema", "name", "version", "framework", "run_id")}
    assert said == {
        "schema": 1,
        "name": "net",
        "version": 1,
        "framework": "torch",
        "run_id": "run-1",
    }
    assert manifest["metrics"] == {"accuracy": 0.97, "loss": "Infinity", "epochs": 3}
    assert manifest["signature"] == {"inputs": {"image": [None, 28, 28]}, "outputs": ["digit"]}
    assert manifest["tags"] == ["new"]
    assert manifest["user"] == lake.owner()
    assert manifest["hopsgpu"] == hopsgpu.__version__
    assert manifest["time"].endswith("Z")


def test_what_is_not_there_is_told_with_what_is(store: ModelStore, model: Path) -> None:
    with pytest.raises(StoreError, match="no model 'net' in .*; models: none") as none:
        store.get("net")
    assert none.value.kind == "absent"
    store.publish(model, "net", tags="good")
    store.publish(model, "net")
    for version in (7, "7", "best"):
        with pytest.raises(StoreError, match="no version '?(7|best)'? of 'net'.* 1, 2; tags: good"):
            store.get("net", version)
    store.publish(model, "c-net")
    with pytest.raises(StoreError, match="no model 'other' in .*; models: c-net, net$"):
        store.get("other")
    with store.get("net").open(PurePosixPath("layers/0.txt")) as file:
        assert file.read() == (model / "layers" / "0.txt").read_bytes()
    with pytest.raises(StoreError, match=r"has no file 'layers': empty, layers/0\.txt, weights"):
        store.get("net").open("layers")
    for path in ("../2/weights.pt", "/etc/passwd", "manifest.json"):
        with pytest.raises(StoreError, match="has no file"):
            store.get("net").open(path)
    for version in (True, 1.0, None):
        with pytest.raises(ConfigError, match=r"version=.*: must be a number, a tag or 'latest'"):
            store.get("net", version)  # type: ignore[arg-type]


def test_what_is_no_version_is_passed_over(lake: LakePath, store: ModelStore, model: Path) -> None:
    store.publish(model, "net")
    for name in ("3", "04", "export"):
        (lake / "net" / name).make()
    (lake / "net" / "5").write(b"notes")
    assert [version.version for version in store.versions("net")] == [1]
    assert store.get("net").version == 1
    assert store.list() == ("net",)
    assert store.publish(model, "net").version == 6


def test_what_others_left_among_the_models_is_passed_over(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    store.publish(model, "net")
    for name in (".trash", "_other", "notes"):
        (lake / name).make()
    (lake / "README").write(b"not a model")
    if lake.url.startswith("file://"):  # what no URL of ours can name
        for name in ("a#b", "c?d", "e;f"):
            (Path(lake.path) / name).mkdir()
    assert store.list() == ("net",)
    with pytest.raises(StoreError, match="'other'.* net$"):
        store.get("other")


@pytest.mark.parametrize("damage", ["other", "shorter", "longer", "missing"])
def test_damage_is_named_and_nothing_is_downloaded(
    store: ModelStore, model: Path, tmp_path: Path, damage: str
) -> None:
    version = store.publish(model, "net")
    file = LakePath(version.url) / "layers" / "0.txt"
    content = file.read()
    if damage == "missing":
        file.remove()
    else:
        file.write({"other": b"E" + content[1:], "shorter": b"", "longer": content + b"x"}[damage])
    target = tmp_path / "copy"
    target.mkdir()
    (target / "own").write_text("stays")
    for read in (lambda: version.download(target), version.verify):
        with pytest.raises(StoreError, match=r"net/1/layers/0\.txt is (damaged|missing)") as told:
            read()
        assert told.value.kind == "damaged"
    assert contents(target) == {"own": b"stays"}
    assert [path.name for path in target.iterdir()] == ["own"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-30], "manifest.json is damaged"),
        (lambda text: text.replace('"files"', '"fyles"'), "manifest.json is damaged"),
        (lambda text: text.replace("layers/0.txt", "../../0.txt"), "manifest.json is damaged"),
        (lambda text: text.replace("layers/0.txt", "/tmp/0.txt"), "manifest.json is damaged"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "has schema 2"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(
    store: ModelStore, model: Path, tmp_path: Path, change: Callable[[str], str], said: str
) -> None:
    version = store.publish(model, "net")
    file = LakePath(version.url) / "manifest.json"
    file.write(change(file.read().decode()).encode())
    with pytest.raises(StoreError, match=said):
        version.download(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_download_replaces_files_and_follows_no_way_out(
    store: ModelStore, model: Path, tmp_path: Path
) -> None:
    version = store.publish(model, "net")
    target = tmp_path / "copy"
    version.download(target)
    (target / "weights.pt").write_bytes(b"old")
    version.download(str(target))
    assert contents(target) == contents(model)
    (target / "layers" / "0.txt").unlink()
    (target / "layers").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (target / "layers").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="layers is a link to a directory outside"):
        version.download(target)
    assert contents(tmp_path / "elsewhere") == {}
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot download into .*file: it is a file"):
        version.download(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot download into .*file/below: "):
        version.download(tmp_path / "file" / "below")
    for odd in (None, 3, ""):
        with pytest.raises(
            ConfigError, match=f"dst={odd!r}: must be the path of a local directory"
        ):
            version.download(odd)  # type: ignore[arg-type]


def publish_together(together: threading.Barrier, url: str, model: Path) -> None:
    """Publishes once all others can, in a process of its own."""
    own = ModelStore(url)
    together.wait(HANG_SECONDS)
    own.publish(model, "net")


def test_publishers_at_once_get_a_version_each(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    spawn = multiprocessing.get_context("spawn")
    given: Any = (spawn.Barrier(8), lake.url, model)
    publishers = [spawn.Process(target=publish_together, args=given) for _ in range(8)]
    for publisher in publishers:
        publisher.start()
    for publisher in publishers:
        publisher.join(HANG_SECONDS)
    assert [publisher.exitcode for publisher in publishers] == [0] * 8
    assert [version.version for version in store.versions("net")] == [1, 2, 3, 4, 5, 6, 7, 8]
    for version in store.versions("net"):
        version.verify()
        assert version.manifest["version"] == version.version
    assert left(lake) == ()


def test_tags_move_and_lead_to_versions(lake: LakePath, store: ModelStore, model: Path) -> None:
    store.publish(model, "net", tags=("production", "production"))
    store.publish(model, "net")
    assert store.get("net", "production").version == 1
    store.tag("net", 2, "production")
    store.tag("net", "latest", "newest")
    assert store.get("net", "production").version == 2
    store.tag("net", "production", "stable-1.0")
    assert store.tags("net") == {"newest": 2, "production": 2, "stable-1.0": 2}
    store.untag("net", "newest")
    with pytest.raises(StoreError, match="no version 'newest' of 'net'") as untagged:
        store.untag("net", "newest")
    assert untagged.value.kind == "absent"
    (lake / "net" / "_tags" / "odd").write(b"no tag")
    store.untag("net", "odd")
    assert sorted(store.tags("net")) == ["production", "stable-1.0"]
    with pytest.raises(StoreError, match="no version 3 of 'net'"):
        store.tag("net", 3, "production")
    for tag in ("7", "latest", "a/b", "", "_own", ".."):
        with pytest.raises(ConfigError, match="tag="):
            store.tag("net", 1, tag)
    assert store.get("net", "production").version == 2
    # Whoever serves models reads numbers, and nothing else is in their way.
    names = set((lake / "net").names())
    assert {name for name in names if not name.isdigit()} - {"_staging"} == {"_claims", "_tags"}


def test_the_longest_tags_are_set(store: ModelStore, model: Path) -> None:
    longest = ("漢" * 66, "ü" * 100)
    store.publish(model, "net", tags=longest)
    assert store.tags("net") == dict.fromkeys(longest, 1)


def test_a_deleted_version_is_gone_and_its_number_too(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    for _ in range(3):
        store.publish(model, "net")
    store.tag("net", 3, "production")
    with pytest.raises(StoreError, match=r"version 3 of .* is tagged 'production'"):
        store.delete("net", "production")
    store.tag("net", 1, "production")
    store.delete("net", 3)
    assert [version.version for version in store.versions("net")] == [1, 2]
    assert store.get("net").version == 2
    assert left(lake) == ()
    with pytest.raises(StoreError, match="no version 3"):
        store.delete("net", 3)
    assert store.publish(model, "net").version == 4
    for version in (4, 2):
        store.delete("net", version)
    store.untag("net", "production")
    store.delete("net", 1)
    assert store.list() == ()
    assert store.publish(model, "net").version == 5


def test_a_version_that_another_program_made_keeps_its_number(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    store.publish(model, "net")
    (lake / "net" / "1").rename(lake / "net" / "41")
    assert store.get("net").version == 41
    store.delete("net", 41)
    assert store.publish(model, "net").version == 42


def test_what_is_refused_leaves_nothing(
    lake: LakePath, store: ModelStore, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(StoreError, match="contains no file to publish as 'net'"):
        store.publish(tmp_path / "nothing", "net")
    with pytest.raises(ConfigError, match="/absent does not exist"):
        store.publish(tmp_path / "absent", "net")
    with pytest.raises(
        ConfigError, match="weights.pt is a file: pass the directory that contains it"
    ):
        store.publish(model / "weights.pt", "net")
    for odd in (None, 3, ""):
        with pytest.raises(
            ConfigError, match=f"local_dir={odd!r}: must be the path of a local directory"
        ):
            store.publish(odd, "net")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ModelStore.3.: must be a URL"):
        ModelStore(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="metrics: 'accuracy' is 'high'; must be a number"):
        store.publish(model, "net", metrics={"accuracy": "high"})
    with pytest.raises(ConfigError, match=r"metrics\.a: cannot be written as JSON"):
        store.publish(model, "net", metrics={"a": 10**5000})
    with pytest.raises(ConfigError, match="tags=3: must be a list of strings"):
        store.publish(model, "net", tags=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"signature\.inputs=<object"):
        store.publish(model, "net", signature={"inputs": object()})
    with pytest.raises(ConfigError, match="tag='latest'"):
        store.publish(model, "net", tags=["latest"])
    with pytest.raises(ConfigError, match="tag='漢+': must be a name of at most 200 .* not 300"):
        store.publish(model, "net", tags=["漢" * 100])
    (model / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match="reserved for hopsgpu"):
        store.publish(model, "net")
    (model / "manifest.json").rename(model / "w#1.bin")
    with pytest.raises(ConfigError, match=r"w#1\.bin"):
        store.publish(model, "net")
    (model / "w#1.bin").unlink()
    for odd, to in (("link", "nowhere"), ("round", tmp_path / "model" / "layers" / "..")):
        (model / odd).symlink_to(to)
        with pytest.raises(ConfigError, match=f"cannot upload .*/{odd}"):
            store.publish(model, "net")
        (model / odd).unlink()
    os.mkfifo(model / "pipe")
    with pytest.raises(ConfigError, match="cannot upload .*/pipe"):
        store.publish(model, "net")
    (model / "pipe").unlink()
    for name in ("../net", "a/b", "", "..", "_net", ".net", "a\nb", "n" * 300):
        with pytest.raises(ConfigError, match="model="):
            store.publish(model, name)
    assert not lake.exists()


def test_links_and_names_of_all_kinds_are_published(
    store: ModelStore, model: Path, tmp_path: Path
) -> None:
    (model / "links").mkdir()
    (model / "links" / "to file").symlink_to(model / "layers" / "0.txt")
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "file").write_text("elsewhere")
    (model / "links" / "to a directory").symlink_to(tmp_path / "elsewhere")
    (model / "links" / "within").symlink_to(model / "layers")
    (model / "layers" / "manifest.json").write_text("the user's own")
    (model / "ü %41+&=日本").write_text("a name")
    version = store.publish(model, "modèle e\u0301 1")
    assert version.name == "modèle é 1"
    assert store.get("modèle é 1") == version
    followed = {
        "links/to a directory/deep/file": b"elsewhere",
        "links/within/0.txt": contents(model)["layers/0.txt"],
        "links/within/manifest.json": b"the user's own",
    }
    assert contents(version.download(tmp_path / "copy")) == contents(model) | followed


def test_a_publish_that_fails_leaves_nothing(
    lake: LakePath, store: ModelStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(model, "net")
    problem = StoreError("the quota is full", "quota")

    def refuse(*arguments: object, **options: object) -> None:
        raise problem

    monkeypatch.setattr(publication, "upload_files", refuse)
    with pytest.raises(StoreError) as told:
        store.publish(model, "net")
    assert told.value is problem
    assert left(lake) == ()
    assert [version.version for version in store.versions("net")] == [1]


def test_files_that_change_while_they_are_uploaded_are_no_version(
    lake: LakePath, store: ModelStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_files = publication.upload_files

    def changed(files: dict[str, Path], *arguments: Any, **options: Any) -> dict[str, FileFacts]:
        upload_files(files, *arguments, **options)
        (model / "weights.pt").write_bytes(b"trained on")
        return upload_files(files, *arguments)

    monkeypatch.setattr(publication, "upload_files", changed)
    with pytest.raises(StoreError, match="changed during the upload"):
        store.publish(model, "net")
    assert store.versions("net") == () and left(lake) == ()


def test_a_lost_answer_to_the_rename_is_no_second_version(
    lake: LakePath, store: ModelStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = LakePath.rename
    for answer in (False, StoreError("no answer", "unreachable")):

        def lose(self: LakePath, target: LakePath, answer: object = answer) -> bool:
            done = rename(self, target)
            if not target.url.rpartition("/")[2].isdigit():
                return done
            if isinstance(answer, StoreError):
                raise answer
            return False

        monkeypatch.setattr(LakePath, "rename", lose)
        version = store.publish(model, "net")
        monkeypatch.undo()
        assert store.get("net") == version
        assert left(lake) == ()
    assert [version.version for version in store.versions("net")] == [1, 2]


def test_leftovers_are_swept_by_the_age_of_their_newest_file(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    store.publish(model, "net")
    home = lake / "net"
    dead = publication.begin(lake, "net")
    publication.upload(dead, model, 0)
    (home / "3").make()
    (home / "4").make()
    (home / "4" / "somebody's").write(b"x")
    newest = max(entry.modified for entry in (dead / "0" / "layers").entries())
    assert stale_uploads.sweep(home, newest + DAY) == []
    store.publish(model, "net")
    assert (dead / "0").exists()
    removed = stale_uploads.sweep(home, newest + 2 * DAY)
    empty = {"3"} if lake.url.startswith("file:") else set()
    assert set(removed) == {dead.url.rpartition("/")[2]} | empty
    assert left(lake) == ()
    assert (home / "4" / "somebody's").exists()
    with pytest.raises(StoreError):
        publication.commit(dead, {0: {"empty": FileFacts(0, "")}}, VersionDescription())
    assert [version.version for version in store.versions("net")] == [1, 5]


def test_drafts_of_tags_and_probes_are_swept_by_their_age(
    lake: LakePath, store: ModelStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    home = lake / "net"
    # Of those who are killed before they remove, or rename, what they have written.
    with monkeypatch.context() as dying:
        dying.setattr(LakePath, "remove", lambda self: None)
        check_writable(lake.url, "net", "run-0", should_write_block=True)
        store.publish(model, "net", tags=["production"])
        check_writable(lake.url, "net", "run-1", should_write_block=False)
        dying.setattr(type(home.client), "rename", refuse)
        with pytest.raises(StoreError, match="cannot replace"):
            store.tag("net", 1, "staging")
    places = {home, home / "_staging", home / "_claims"}
    assert lake.names() == ("_probe-run-0", "net")
    assert all("_probe-run-1" in place.names() for place in places)
    # Of the tag that was not put there, and of the files whose owner is who changes a tag.
    drafts = set((home / "_tags").names()) - {"production"}
    assert len(drafts) == 3
    staged = set((home / "_staging").names()) - {"_probe-run-1"}
    # What is not hopsgpu's stays, however old it is.
    (home / "_tags" / ".hidden").write(b"")
    (home / "_probe").write(b"")
    now = (home / "_probe").stat().modified
    assert stale_uploads.sweep(home, now) == []
    removed = stale_uploads.sweep(home, now + 2 * DAY)
    assert sorted(removed) == sorted([*drafts, *staged, "_probe-run-0", *["_probe-run-1"] * 3])
    assert lake.names() == ("net",)
    assert home.names() == ("1", "_claims", "_probe", "_staging", "_tags")
    assert (home / "_claims").names() == ("1",) and left(lake) == ()
    assert (home / "_tags").names() == (".hidden", "production")
    assert store.get("net", "production").version == 1


def shards(tmp_path: Path, files: dict[int, dict[str, str]]) -> dict[int, Path]:
    directories = {}
    for rank, own in files.items():
        directories[rank] = tmp_path / f"rank-{rank}"
        directories[rank].mkdir()
        for path, content in own.items():
            file = directories[rank] / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
    return directories


def test_the_parts_of_several_ranks_are_one_version(
    lake: LakePath, store: ModelStore, tmp_path: Path
) -> None:
    files = {
        0: {"config.json": "{}", "s/__0_0.distcp": "zero", ".metadata": "m"},
        1: {"config.json": "{}", "s/__1_0.distcp": "one", "deep/er/x": "x"},
        2: {},
        3: {"config.json": "{}", "s/__3_0.distcp": "three", "s/__3_1.distcp": "3", "s/more": ""},
    }
    staging = publication.begin(lake, "net")
    parts = {}
    for rank, directory in shards(tmp_path, files).items():
        parts[rank] = publication.upload(staging, directory, rank)
    assert parts[2] == {}
    about = VersionDescription(
        run_id="run-1", application="application_1_1", user="ann", code_digest="c0de"
    )
    version = publication.commit(staging, parts, about)
    assert version == store.get("net")
    merged = {path: content.encode() for own in files.values() for path, content in own.items()}
    assert contents(version.download(tmp_path / "copy")) == merged
    assert sorted(version.manifest["files"]) == sorted(merged)
    assert version.manifest["framework"] == "torch"
    assert version.manifest["user"] == "ann"
    assert version.manifest["application"] == "application_1_1"
    assert left(lake) == ()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a/w": "other"}, "ranks 0 and 4 wrote different content to 'a/w'"),
        ({"a": "a file"}, "rank 4 wrote a file 'a', and rank 0 a directory of the same name"),
        ({"a/w/deep": ""}, "rank 0 wrote a file 'a/w', and rank 4 a directory of the same name"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(
    lake: LakePath, store: ModelStore, tmp_path: Path, other: dict[str, str], said: str
) -> None:
    staging = publication.begin(lake, "net")
    directories = shards(tmp_path, {0: {"a/w": "one"}, 4: other})
    parts = {rank: publication.upload(staging, own, rank) for rank, own in directories.items()}
    with pytest.raises(StoreError, match=said):
        publication.commit(staging, parts, VersionDescription())
    publication.abandon(staging)
    publication.abandon(staging)
    assert left(lake) == ()
    assert store.list() == ()


def test_a_tag_goes_back_and_says_who_moved_it(
    lake: LakePath, store: ModelStore, model: Path
) -> None:
    for _ in range(3):
        store.publish(model, "net")
    for number in (1, 2, 3):
        store.tag("net", number, "production")
    store.delete("net", 2)
    assert store.rollback("net", "production") == store.get("net", 1)
    assert store.get("net", "production").version == 1
    store.untag("net", "production")
    history = store.history("net", "production")
    assert [(change.previous, change.version, change.action) for change in history] == [
        (None, 1, "tag"),
        (1, 2, "tag"),
        (2, 3, "tag"),
        (3, 1, "rollback"),
        (1, None, "untag"),
    ]
    assert {change.user for change in history} == {lake.owner()}
    assert [change.time for change in history] == sorted(change.time for change in history)
    assert store.tags("net") == {}


def test_a_format_is_recognised_and_loaded(
    lake: LakePath, store: ModelStore, tmp_path: Path
) -> None:
    import numpy as np
    import xgboost

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    trained = xgboost.XGBRegressor(n_estimators=2).fit(x, x.sum(1))
    (tmp_path / "booster").mkdir()
    trained.save_model(tmp_path / "booster" / "model.json")
    version = store.publish(tmp_path / "booster", "net", signature=(x, x.sum(1)))
    assert [str(one) for one in version.formats] == ["XGBoost (model.json)"]
    assert version.manifest["signature"]["inputs"][0]["shape"] == [-1, 3]
    answer = version.load().predict(xgboost.DMatrix(x))
    np.testing.assert_allclose(answer, trained.predict(x), rtol=1e-6)
