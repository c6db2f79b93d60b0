"""Inspection and upload of the model directories of one container's ranks."""

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

# The upload of one rank already has several files in parallel.
_RANKS_AT_ONCE = 4


@dataclass(frozen=True)
class ModelFiles:
    """The number and total size of the files in a rank's model directory.

    Attributes:
        problem: why the files cannot be published, or "".
        trouble: `StoreError.kind` of the problem, or "".
    """

    files: int
    bytes: int
    problem: str = ""
    trouble: str = ""


def read_model_dirs(directories: Mapping[int, Path]) -> dict[int, ModelFiles]:
    return {rank: _read_model_dir(directory) for rank, directory in directories.items()}


def _read_model_dir(directory: Path) -> ModelFiles:
    try:
        files = publication.files_of(directory) if directory.is_dir() else {}
        return ModelFiles(len(files), sum(path.stat().st_size for path in files.values()))
    except (HopsGpuError, OSError) as error:  # other ranks' models must still be reported
        return ModelFiles(0, 0, str(error), str(getattr(error, "kind", "")))


def upload_all(
    directories: Mapping[int, Path], staging_url: str, stop: threading.Event
) -> dict[int, dict[str, FileFacts]]:
    """Upload the model directory of each rank; at the first problem stop the others, and raise it.

    Args:
        staging_url: URL of the directory that `publication.begin` returned.
    """
    staging = LakePath(staging_url).with_client()
    with ThreadPoolExecutor(_RANKS_AT_ONCE, thread_name_prefix="hopsgpu-upload") as pool:
        uploads = {
            rank: pool.submit(publication.upload, staging, directory, rank, stop=stop)
            for rank, directory in directories.items()
        }
        try:
            ended, _ = wait(uploads.values(), return_when=FIRST_EXCEPTION)
            # Raise the first problem, and not the cancellation of uploads that still run.
            for upload in ended:
                upload.result()
        except BaseException:
            stop.set()
            raise
    return {rank: upload.result() for rank, upload in uploads.items()}


def dump_model_files(model_files: Mapping[int, ModelFiles]) -> bytes:
    return json.dumps({rank: astuple(files) for rank, files in model_files.items()}).encode()


def load_model_files(payload: bytes) -> dict[int, ModelFiles]:
    return {int(rank): ModelFiles(*fields) for rank, fields in json.loads(payload).items()}


def dump_parts(parts: Mapping[int, Mapping[str, FileFacts]]) -> bytes:
    return json.dumps(
        {
            rank: {name: [facts.bytes, facts.digest] for name, facts in part.items()}
            for rank, part in parts.items()
        }
    ).encode()


def load_parts(payload: bytes) -> dict[int, dict[str, FileFacts]]:
    return {
        int(rank): {name: FileFacts(*facts) for name, facts in part.items()}
        for rank, part in json.loads(payload).items()
    }
