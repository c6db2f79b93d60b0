"""The directory of a user's cached files."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from hopsgpu.core.cache_directory import cache_directory
from hopsgpu.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/hopsgpu"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/hopsgpu"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/hopsgpu"),
        ({"HOME": "/h"}, "/h/.cache/hopsgpu"),
    ],
)
def test_the_environment_decides(environ: dict[str, str], directory: str) -> None:
    assert cache_directory(environ) == Path(directory)


def test_without_home_the_user_database_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pwd.struct_passwd(("me", "x", os.getuid(), 0, "", "/of/me", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", {os.getuid(): entry}.__getitem__)
    assert cache_directory({}) == Path("/of/me/.cache/hopsgpu")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME"):
        cache_directory({})
