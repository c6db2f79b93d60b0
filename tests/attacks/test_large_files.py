"""Files of another user that are larger than anything that hopsgpu writes there, or no files."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts import checkpoint_restore, python_environments, tags
from hopsgpu.artifacts.checkpoints import _record
from hopsgpu.artifacts.manifest import Manifest
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.artifacts.versions import ModelVersion
from hopsgpu.attempts.return_values import Value
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.scoring.score_plan import EarlierPlan
from hopsgpu.serving import model_loading
from hopsgpu.storage.digests import MAX_LIST_BYTES, FileFacts
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.transfer import download_files
from hopsgpu.tuning.journal import _MAX_JOURNAL_BYTES, Journal
from hopsgpu.units import MIB
from tests.attacks.users import as_other_user
from tests.bounds import HANG_SECONDS

# Without content on the disk.
HUGE = 3 * 2**30
# The bound of a rank's value is 100 MiB, all others are lower.
MOST_MEMORY = 128 * MIB


def _plant(file: Path, size: int = HUGE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as content:
        content.truncate(size)


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    """The most memory, in bytes, that Python has taken so far in the test."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def _lake(path: Path) -> LakePath:
    return LakePath(f"file://{path}")


def _version(root: Path) -> ModelVersion:
    return ModelStore(f"file://{root}/models").get("m", 1)


def _restore(root: Path) -> object:
    return checkpoint_restore._facts(_lake(root) / "shard.complete")


def _load_index(root: Path) -> object:
    return model_loading._safetensors(root / "model.safetensors.index.json", None)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "manifest": ("models/m/1/manifest.json", lambda root: _version(root).manifest),
    "tag": ("models/m/_tags/production", lambda root: tags.read_tags(_lake(root / "models/m"))),
    "run": ("runs/fit-1/run.json", lambda root: RunStore(_lake(root)).record("fit-1")),
    "environment": (
        "environments/key/environment.json",
        lambda root: python_environments.find(_lake(root), "key"),
    ),
    "checkpoint": ("shard.complete", _restore),
    "plan": ("score.json", lambda root: EarlierPlan(_lake(root))),
    "value": (
        "value",
        lambda root: Value(file="value", digest="0").content(_lake(root)),
    ),
    "index": ("model.safetensors.index.json", _load_index),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_huge_file_of_another_user_is_refused(
    shared_dir: Path, memory: Callable[[], int], kind: str
) -> None:
    name, read = READERS[kind]
    as_other_user(lambda: _plant(shared_dir / name))
    with pytest.raises(StoreError, match="more than the .* check who wrote it") as refusal:
        read(shared_dir)
    assert str(shared_dir / name) in str(refusal.value)
    assert memory() < MOST_MEMORY


def test_the_own_journal_has_a_larger_bound(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    line = json.dumps({"op_code": 1, "text": "x" * 2 * MIB}).encode() + b"\n"
    file.write_bytes(line)
    assert Journal(_lake(file)).size == len(line)
    _plant(file, _MAX_JOURNAL_BYTES + 1)
    with pytest.raises(StoreError, match="more than the"):
        Journal(_lake(file))


def test_a_download_ends_at_the_size_in_the_manifest(shared_dir: Path, tmp_path: Path) -> None:
    as_other_user(lambda: _plant(shared_dir / "version/weights", 512 * MIB))
    facts = {"weights": FileFacts(10, "0" * 32)}
    with pytest.raises(StoreError, match="expected 10 bytes, found more"):
        download_files(facts, _lake(shared_dir / "version"), tmp_path)
    assert (tmp_path / "weights").stat().st_size <= MIB


@pytest.mark.parametrize("kind", ["manifest", "run"])
def test_a_pipe_in_the_place_of_a_file_makes_nobody_wait(shared_dir: Path, kind: str) -> None:
    name, read = READERS[kind]
    file = shared_dir / name

    def plant() -> None:
        file.parent.mkdir(parents=True)
        os.mkfifo(file)

    as_other_user(plant)
    problems: list[Exception] = []

    def try_to_read() -> None:
        try:
            read(shared_dir)
        except StoreError as error:
            problems.append(error)

    reader = threading.Thread(target=try_to_read, daemon=True)
    reader.start()
    reader.join(HANG_SECONDS)
    assert "it is a pipe or a device" in str(problems[0])


def test_nothing_is_published_or_saved_that_nobody_could_read() -> None:
    files = {f"{number:09}": FileFacts(1, "0" * 32) for number in range(MAX_LIST_BYTES // 50)}
    content: dict[str, Any] = {
        "files": {name: dataclasses.asdict(facts) for name, facts in files.items()}
    }
    for write in (Manifest(files, content).to_bytes, lambda: _record(files, None)):
        with pytest.raises(ConfigError, match="put the files into fewer ones"):
            write()
    few = dict(list(files.items())[: len(files) // 10])
    assert len(_record(few, None)) > MIB
