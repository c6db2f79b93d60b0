"""The file of a bearer token: who may read it, its size, and no word of its content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hopsgpu.cluster_managers.standalone.token_file import read_token, token_file_of
from hopsgpu.errors import ConfigError

TOKEN = "aa.bb-_~+/cc=="


def test_the_property_counts_before_the_variable() -> None:
    environ = {"HOPSGPU_MASTER_TOKEN_FILE": "/b"}
    assert token_file_of({}, {}) is None
    assert token_file_of({}, environ) == Path("/b")
    assert token_file_of({"spark.hopsgpu.master.token_file": "/a"}, environ) == Path("/a")


def write(file: Path, content: str, mode: int = 0o600) -> Path:
    file.write_text(content)
    file.chmod(mode)
    return file


def test_a_token_is_read_without_its_line_break(tmp_path: Path) -> None:
    assert read_token(write(tmp_path / "token", f"{TOKEN}\n", 0o400)) == TOKEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="can be used by other users: run chmod 600"):
        read_token(write(tmp_path / "token", TOKEN, mode))


@pytest.mark.parametrize(
    "content", ["", "zq zq", "zq\nzq", "é", "zq\r\nX: zq", "x" * (64 * 1024 + 1)]
)
def test_other_contents_are_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"token_file \(HOPSGPU_MASTER_TOKEN_FILE\)") as error:
        read_token(write(tmp_path / "token", content))
    assert "zq" not in str(error.value) and "xxx" not in str(error.value)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, reason in (("pipe", "no regular file"), (".", "no regular"), ("absent", "No such")):
        with pytest.raises(ConfigError, match=f"{reason}|Is a directory"):
            read_token(tmp_path / name)
