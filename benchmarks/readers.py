"""Readers of a table, each in a process of its own, so that CPU and memory are its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from fsspec.core import url_to_fs
from pyarrow import fs


def run_readers(module: str, commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Run a module with each of some arguments, at the same time; return the JSON of each."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True
        )
        for arguments in commands
    ]
    printed = [reader.communicate()[0] for reader in readers]
    return [json.loads(text) for text in printed]


def arrow_files(url: str) -> tuple[Any, str]:
    """Return a pyarrow.fs.FileSystem for a URL, and the path on it."""
    system, path = url_to_fs(url)
    if url.startswith("file:"):
        return fs.LocalFileSystem(), path
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path
