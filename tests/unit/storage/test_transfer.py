"""What the log says of transfers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hopsgpu.errors import StoreError
from hopsgpu.storage import transfer
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.transfer import check_files, download_files, upload_files

LOGGER = transfer.__name__


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source"
    file.write_bytes(b"0123456789")
    return file


def test_a_transfer_is_logged_with_its_bytes_and_rate(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    lake = LakePath(f"file://{tmp_path}/lake")
    facts = upload_files({"a": source, "b": source}, lake)
    begin, end = caplog.messages
    assert begin.endswith(f"{lake.url}: begins, 2 files, 20 bytes")
    assert f"{lake.url}: complete, 2 files, 20 bytes" in end
    assert end.endswith(" MiB/s)")
    caplog.clear()
    download_files(facts, lake, tmp_path / "copy")
    check_files(facts, lake)
    assert [text.partition(" ")[0] for text in caplog.messages] == [
        "download",
        "download",
        "check",
        "check",
    ]
    # Nobody has to wait for so few bytes.
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_a_large_transfer_is_logged_for_people(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(257 * 2**20)
    upload_files({"large": large}, LakePath(f"file://{tmp_path}/lake"))
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO]


def test_a_transfer_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    lake = LakePath(f"file://{tmp_path}/lake")
    with pytest.raises(StoreError):
        check_files({"absent": FileFacts(1, "")}, lake)
    (message,) = caplog.messages
    assert f"{lake.url}: " in message and "StoreError" in message
