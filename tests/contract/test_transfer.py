"""Files to every lake and back."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.hdfs import Hdfs
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local import Local
from hopsgpu.storage.local_tree import files_below
from hopsgpu.storage.transfer import check_files, download_files, upload_files
from hopsgpu.storage.webhdfs import WebHdfs

SIZES = {"empty": 0, "small": 1000, "below/deep/odd": 3 * 2**20 + 1, "large.bin": 17 * 2**20}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(size))
    return tmp_path / "source"


def test_files_come_back_as_they_were(lake: LakePath, source: Path, tmp_path: Path) -> None:
    facts = upload_files(files_below(source), lake)
    assert facts == {
        name: FileFacts(size, xxhash.xxh3_128_hexdigest((source / name).read_bytes()))
        for name, size in SIZES.items()
    }
    check_files(facts, lake)
    target = tmp_path / "not" / "there"
    download_files(facts, lake, target)
    assert {name: file.read_bytes() for name, file in files_below(target).items()} == {
        name: (source / name).read_bytes() for name in SIZES
    }


def test_many_files(lake: LakePath, tmp_path: Path) -> None:
    files = {}
    for number in range(150):
        file = tmp_path / f"{number}"
        file.write_bytes(b"%d" % number)
        files[f"d{number % 3}/{number}"] = file
    facts = upload_files(files, lake)
    assert list(facts) == list(files)
    assert [len((lake / f"d{d}").names()) for d in range(3)] == [50, 50, 50]
    check_files(facts, lake)


def test_files_are_read_through_one_client(
    lake: LakePath, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = upload_files(files_below(source), lake)
    made: list[object] = []
    for kind in (Hdfs, Local, WebHdfs):
        init = kind.__init__

        def counted(one: object, *given: Any, init: Any = init, **named: Any) -> None:
            made.append(one)
            init(one, *given, **named)

        monkeypatch.setattr(kind, "__init__", counted)
    check_files(facts, LakePath(lake.url))
    assert len(made) == 1
    download_files(facts, LakePath(lake.url), tmp_path / "target")
    assert len(made) == 2


@pytest.mark.parametrize("damage", ["other", "shorter", "longer", "missing", "a directory"])
def test_what_is_damaged_is_named(
    lake: LakePath, source: Path, tmp_path: Path, damage: str
) -> None:
    facts = upload_files(files_below(source), lake)
    damaged = lake / "below/deep/odd"
    content = (source / "below/deep/odd").read_bytes()
    if damage in ("missing", "a directory"):
        damaged.remove()
        if damage == "a directory":
            damaged.make()
    else:
        contents = {
            "other": b"\x00" + content[:-1],
            "shorter": content[:-1],
            "longer": content + b"x",
        }
        damaged.write(contents[damage])
    for read in (check_files, lambda f, r: download_files(f, r, tmp_path / "copy")):
        with pytest.raises(StoreError, match=f"{damaged.url} is (damaged|missing)") as told:
            read(facts, lake)
        assert told.value.kind == "damaged"


def test_the_first_problem_ends_the_others(lake: LakePath, source: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="gone cannot be read"):
        upload_files({**files_below(source), "gone": tmp_path / "gone"}, lake)
    (lake / "small").make()
    with pytest.raises(StoreError, match=f"cannot write {lake.url}/small: ") as told:
        upload_files(files_below(source), lake)
    assert told.value.kind == "exists"


def test_it_can_be_stopped(lake: LakePath, source: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        upload_files(files_below(source), lake, stop=stop)
    facts = upload_files(files_below(source), lake)
    with pytest.raises(Cancelled):
        download_files(facts, lake, tmp_path / "copy", stop=stop)


def test_paths_outside_are_refused(lake: LakePath, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        upload_files({"../x": source / "small"}, lake)
    with pytest.raises(ConfigError):
        download_files({"../x": FileFacts(0, "")}, lake, tmp_path / "copy")
    with pytest.raises(ConfigError):
        check_files({"/x": FileFacts(0, "")}, lake)
