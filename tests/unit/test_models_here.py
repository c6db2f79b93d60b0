"""The model store on a local directory: what others put there, and who else is at work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.stores import restoring
from hopsgpu.stores.digests import DIGEST, Facts
from hopsgpu.stores.lake import Lake
from hopsgpu.stores.models import ModelStore


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
        with pytest.raises(ConfigError, match="has more than 18 digits, and no version has"):
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


def test_the_record_of_a_checkpoint_that_is_none_is_told(tmp_path: Path) -> None:
    record = Lake(f"file://{tmp_path}/step-1.json")
    whole = json.dumps({"files": {"a/b": {"bytes": 1, DIGEST: "0f"}}})
    record.write(whole.encode())
    assert restoring._facts(record) == {"a/b": Facts(1, "0f")}
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
            restoring._facts(record)
        assert told.value.kind == "damaged"
