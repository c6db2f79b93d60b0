"""Transfers are logged with their size, their duration and how they ended."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import Lake
from hopsgpu.storage.transfer import download_files, upload_files


def test_transfers_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.storage")
    source = tmp_path / "source"
    source.mkdir()
    files = {name: source / name for name in ("a", "b")}
    for file in files.values():
        file.write_bytes(b"x" * 1000)
    root = Lake(f"file://{tmp_path}/lake")
    facts = upload_files(files, root)
    download_files(facts, root, tmp_path / "copy")
    (root / "b").write(b"other")
    with pytest.raises(StoreError):
        download_files(facts, root, tmp_path / "copy")
    uploaded, read, failed = caplog.messages
    whole = rf"{re.escape(root.url)}: 2 files, 2000 bytes,"
    assert re.fullmatch(rf"upload to {whole} done after \d+\.\d\d s", uploaded)
    assert re.fullmatch(rf"read from {whole} done after \d+\.\d\d s", read)
    assert re.fullmatch(
        rf"read from {whole} failed \(StoreError: .*/b is damaged.*\) after \S+ s", failed
    )
