"""The models that the ranks of one container leave: inspected and uploaded on the node."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass
from pathlib import Path

from hopsgpu.artifacts import publication
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import LakePath

# Each uploads several files at a time by itself.
_RANKS_AT_ONCE = 4


@dataclass(frozen=True)
class ModelFiles:
    """What a rank left in its model directory.

    Attributes:
        files: number of files.
        bytes: bytes of all files.
        problem: why the files cannot be published, or "".
        trouble: kind of the problem, as of a StoreError.
    """

    files: int
    bytes: int
    problem: str = ""
    trouble: str = ""


def read_model_dirs(directories: Mapping[int, Path]) -> dict[int, ModelFiles]:
    """Return what is in the model directory of each rank, or why it cannot be published."""
    return {rank: _left(directory) for rank, directory in directories.items()}


def _left(directory: Path) -> ModelFiles:
    try:
        files = publication.files_of(directory) if directory.is_dir() else {}
        return ModelFiles(len(files), sum(path.stat().st_size for path in files.values()))
    except (HopsGpuError, OSError) as error:  # what other ranks left is kept all the same
        return ModelFiles(0, 0, str(error), str(getattr(error, "kind", "")))


def upload_all(
    directories: Mapping[int, Path], staging_url: str, stop: threading.Event
) -> dict[int, dict[str, FileFacts]]:
    """Upload the model directory of each rank; at the first problem stop the others.

    Args:
        directories: directories by rank.
        staging_url: URL of the directory that `publication.begin` returned.
        stop: event that cancels the upload.

    Returns:
        What `publication.upload` returned about the files, by rank.

    Raises:
        HopsGpuError: as `publication.upload`.
    """
    staging = LakePath(staging_url).with_client()
    with ThreadPoolExecutor(_RANKS_AT_ONCE, thread_name_prefix="hopsgpu-upload") as pool:
        uploads = {
            rank: pool.submit(publication.upload, staging, directory, rank, stop=stop)
            for rank, directory in directories.items()
        }
        try:
            ended, _ = wait(uploads.values(), return_when=FIRST_EXCEPTION)
            # Of those that have ended: what made the others stop is raised, and not their end.
            for upload in ended:
                upload.result()
        except BaseException:
            stop.set()
            raise
    return {rank: upload.result() for rank, upload in uploads.items()}


def dump_model_files(left: Mapping[int, ModelFiles]) -> bytes:
    """Serialise for the control channel as JSON (RFC 8259), which `load_model_files` reads."""
    return json.dumps({rank: astuple(one) for rank, one in left.items()}).encode()


def load_model_files(payload: bytes) -> dict[int, ModelFiles]:
    """Return what `dump_model_files` wrote."""
    return {int(rank): ModelFiles(*fields) for rank, fields in json.loads(payload).items()}


def dump_parts(parts: Mapping[int, Mapping[str, FileFacts]]) -> bytes:
    """Serialise for the control channel as JSON (RFC 8259), which `load_parts` reads."""
    return json.dumps(
        {
            rank: {name: [facts.bytes, facts.digest] for name, facts in part.items()}
            for rank, part in parts.items()
        }
    ).encode()


def load_parts(payload: bytes) -> dict[int, dict[str, FileFacts]]:
    """Return what `dump_parts` wrote."""
    return {
        int(rank): {name: FileFacts(*facts) for name, facts in part.items()}
        for rank, part in json.loads(payload).items()
    }
