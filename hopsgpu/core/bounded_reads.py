"""Bounded reads of files that other users or programs may have written.

`LakePath.read` has the same bound by default. tests/unit/test_bounded_reads.py refuses reads of the
package that have none.
"""

from __future__ import annotations

from pathlib import Path

from hopsgpu.errors import StoreError
from hopsgpu.units import MIB

# The bound of records and other JSON files that hopsgpu writes; those are far smaller.
MAX_RECORD_BYTES = MIB


def read_file(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the content of a local file.

    Raises:
        OSError: the file cannot be read.
        StoreError: the file has more than `max_bytes` (kind "damaged").
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    check_size(str(path), len(content), max_bytes)
    return content


def read_end(path: Path, max_bytes: int) -> str:
    """Return the last bytes of a log as text."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - max_bytes, 0))
        # The process that writes the log may go on.
        return file.read(max_bytes).decode(errors="backslashreplace")


def check_size(name: str, size: int, max_bytes: int) -> None:
    """Raise a StoreError of kind "damaged" if a file has more than `max_bytes`."""
    if size > max_bytes:
        raise StoreError(
            f"{name} was not read: it has more than the {max_bytes} bytes that are accepted for"
            " such a file; check who wrote it, and restore or remove it",
            "damaged",
        )
