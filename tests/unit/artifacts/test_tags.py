"""Tags, their history and rollbacks."""

from __future__ import annotations

import getpass
import json
from pathlib import Path

import pytest

from hopsgpu.artifacts import tags
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.artifacts.tags import ROLLBACK, TAG, UNTAG, TagChange, earlier_versions
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.lake import LakePath


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights.pt").write_bytes(b"weights")
    made = ModelStore(f"file://{tmp_path}/models")
    for _ in range(5):
        made.publish(source, "net")
    return made


@pytest.fixture
def home(store: ModelStore, tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/models/net")


def moves(store: ModelStore, tag: str = "production") -> list[tuple[int | None, int | None, str]]:
    return [(c.previous, c.version, c.action) for c in store.history("net", tag)]


def test_change_has_user_time_and_previous_version(home: LakePath, store: ModelStore) -> None:
    tags.put_tag(home, "production", 1, now=0.0)
    tags.put_tag(home, "production", 3, now=1.5)
    me = getpass.getuser()
    assert store.history("net", "production") == (
        TagChange(1, None, me, "1970-01-01T00:00:00.000Z", "tag"),
        TagChange(3, 1, me, "1970-01-01T00:00:01.500Z", "tag"),
    )


def test_tag_set_twice_at_one_version_changed_once(store: ModelStore) -> None:
    for _ in range(2):
        store.tag("net", 2, "production")
    assert moves(store) == [(None, 2, TAG)]


def test_tags_of_a_publish_are_in_the_history(store: ModelStore, tmp_path: Path) -> None:
    store.tag("net", 2, "candidate")
    store.publish(tmp_path / "model", "net", tags=["candidate"])
    assert moves(store, "candidate") == [(None, 2, TAG), (2, 6, TAG)]


def test_rollback_returns_to_the_version_before(store: ModelStore) -> None:
    store.tag("net", 1, "production")
    store.tag("net", 2, "production")
    assert store.rollback("net", "production") == store.get("net", 1)
    assert store.tags("net") == {"production": 1}
    assert moves(store)[-1] == (2, 1, ROLLBACK)


def test_second_rollback_goes_back_further(store: ModelStore) -> None:
    for number in (1, 2, 3):
        store.tag("net", number, "production")
    assert [store.rollback("net", "production").version for _ in range(2)] == [2, 1]
    with pytest.raises(StoreError, match="earlier version") as raised:
        store.rollback("net", "production")
    assert raised.value.kind == "absent"
    assert store.tags("net") == {"production": 1}


def test_rollback_passes_over_deleted_versions(store: ModelStore) -> None:
    for number in (1, 2, 3):
        store.tag("net", number, "production")
    store.delete("net", 2)
    assert store.rollback("net", "production").version == 1


def test_removed_tag_keeps_its_history(store: ModelStore) -> None:
    store.tag("net", 1, "production")
    store.untag("net", "production")
    assert store.tags("net") == {}
    assert moves(store) == [(None, 1, TAG), (1, None, UNTAG)]
    with pytest.raises(StoreError, match="'production'"):
        store.rollback("net", "production")
    store.tag("net", 4, "production")
    assert moves(store) == [(None, 1, TAG), (1, None, UNTAG), (None, 4, TAG)]
    assert store.rollback("net", "production").version == 1


def test_unknown_tag_has_no_history(store: ModelStore) -> None:
    with pytest.raises(StoreError, match="'canary'") as raised:
        store.history("net", "canary")
    assert raised.value.kind == "absent"
    for call in (store.history, store.rollback):
        with pytest.raises(ConfigError, match="'latest'"):
            call("net", "latest")


def test_tag_without_history_begins_one(home: LakePath, store: ModelStore) -> None:
    """An earlier hopsgpu wrote the tag."""
    (home / "_tags").make()
    (home / "_tags" / "production").write(json.dumps({"version": 3}).encode())
    assert store.history("net", "production") == ()
    store.tag("net", 4, "production")
    assert moves(store) == [(3, 4, TAG)]
    assert store.rollback("net", "production").version == 3


@pytest.mark.parametrize(
    "history",
    [
        7,
        [7],
        [{}],
        [{"version": 1.5, "previous": None, "user": "u", "time": "t", "action": "tag"}],
        [{"version": 1, "previous": None, "user": 1, "time": "t", "action": "tag"}],
        [{"version": 1, "previous": None, "user": "u", "time": "t", "action": "tag", "more": 1}],
    ],
)
def test_damaged_history_harms_no_reader(
    home: LakePath, store: ModelStore, history: object
) -> None:
    (home / "_tags").make()
    written = json.dumps({"version": 3, "history": history}).encode()
    (home / "_tags" / "production").write(written)
    assert store.get("net", "production").version == 3
    for call in (store.history, store.rollback):
        with pytest.raises(StoreError, match="production") as raised:
            call("net", "production")
        assert raised.value.kind == "damaged"
    store.tag("net", 4, "production")
    assert moves(store) == [(3, 4, TAG)]


def test_the_oldest_changes_are_dropped(home: LakePath, store: ModelStore) -> None:
    entry = {"version": 1, "previous": 2, "user": "ann", "time": "-", "action": "tag"}
    (home / "_tags").make()
    written = json.dumps({"version": 3, "history": [entry] * 1000}).encode()
    (home / "_tags" / "production").write(written)
    store.tag("net", 4, "production")
    assert len(store.history("net", "production")) == 1000
    assert moves(store)[-1] == (3, 4, TAG)


def change(version: int | None, previous: int | None = None, action: str = TAG) -> TagChange:
    return TagChange(version, previous, "ann", "-", action)


@pytest.mark.parametrize(
    ("changes", "current", "expected"),
    [
        ([], 1, []),
        ([change(1)], 1, []),
        ([change(2, 1)], 2, [1]),
        ([change(1), change(2), change(3)], 3, [2, 1]),
        ([change(1), change(2), change(1, 2, ROLLBACK)], 1, []),
        ([change(1), change(2), change(1, 2, ROLLBACK), change(3)], 3, [1]),
        ([change(1), change(2), change(1), change(2)], 2, [1]),
        ([change(1), change(None, 1, UNTAG), change(2)], 2, [1]),
        # The history was cut: a rollback may lead to a version before it.
        ([change(5, 9, ROLLBACK), change(6, 5)], 6, [5, 9]),
    ],
)
def test_earlier_versions_of_a_history(
    changes: list[TagChange], current: int, expected: list[int]
) -> None:
    assert earlier_versions(changes, current) == expected
