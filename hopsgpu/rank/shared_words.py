"""A file of 64-bit words that a rank and its agent share; each word has one writer."""

from __future__ import annotations

import mmap
from pathlib import Path

_WORD_BYTES = 8


def create_file(file: Path, words: int) -> Path:
    """Create a file of words that are 0, and return its path."""
    # Write the bytes, so that a full disk is noticed here and not at a store.
    file.write_bytes(bytes(words * _WORD_BYTES))
    return file


def map_file(file: Path, words: int) -> memoryview:
    """Map a file; a cast to 8-byte words makes each access one load or store."""
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), words * _WORD_BYTES))
