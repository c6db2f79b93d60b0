"""Publish files as a model's next version.

A publish calls `begin`, then `upload` for each part, in whichever process has its files, then
`commit`. `version_commit` has the step that makes the version, and the places of the files.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from hopsgpu.artifacts import manifest, stale_uploads
from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.artifacts.tags import put_tag
from hopsgpu.artifacts.version_commit import MergePlan, commit_of
from hopsgpu.artifacts.versions import ModelVersion
from hopsgpu.core.version import __version__
from hopsgpu.errors import StoreError
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.local_tree import files_below
from hopsgpu.storage.names import model_name
from hopsgpu.storage.transfer import upload_files

log = logging.getLogger(__name__)


# Hugging Face's Trainer writes these files about the process that writes them. With
# save_on_each_node=True several processes write them, and all describe the same training.
_ABOUT_A_PROCESS = frozenset({"trainer_state.json", "training_args.bin"})


def merge(parts: Mapping[int, Mapping[str, FileFacts]]) -> MergePlan:
    """Merge parts; a path that several of them have with the same content is one file.

    Of files about the process that wrote them, one is taken.

    Args:
        parts: uploaded files, by rank and then by path.

    Raises:
        StoreError: no part has a file, two parts have different content under one path, or one has
            a file where another has a directory.
    """
    whose: dict[str, int] = {}
    for rank, files in sorted(parts.items()):
        for path, facts in files.items():
            first = whose.setdefault(path, rank)
            is_about_process = path.rpartition("/")[2] in _ABOUT_A_PROCESS
            if parts[first][path] != facts and not is_about_process:
                raise StoreError(
                    f"ranks {first} and {rank} wrote different content to {path!r}: let only one"
                    " rank write the file, or use a different name in each rank"
                )
    if not whose:
        raise StoreError("no rank wrote a file to publish")
    for path, rank in whose.items():
        above = path
        while above := above.rpartition("/")[0]:
            if above in whose:
                raise StoreError(
                    f"rank {whose[above]} wrote a file {above!r}, and rank {rank} a directory of"
                    f" the same name, with {path!r}: use different names"
                )
    # The part with most files stays in place: to move a file costs the same whatever its size.
    base = max(parts, key=lambda rank: (len(parts[rank]), -rank))
    return MergePlan(
        # A file of the part that stays in place is the version's.
        files={path: parts[base].get(path, parts[rank][path]) for path, rank in whose.items()},
        base=base,
        moves={path: rank for path, rank in whose.items() if path not in parts[base]},
    )


def begin(store: LakePath, name: str) -> LakePath:
    """Make the place of a publish, and sweep what dead publishers left.

    Args:
        store: the models' root.
        name: name of the model.

    Returns:
        The place, for `upload`, `commit` and `abandon`; they share its client, because to make one
        on a secure cluster takes as long as several of their calls.

    Raises:
        ConfigError: `name` cannot be a model's name.
        StoreError: the lake refused the operation.
    """
    # A client of its own: the store's may be old, or another process's.
    home = (LakePath(store.url) / model_name(name)).with_client()
    staging, now = commit_of(home).begin(home)
    log.debug("place of a publish: %s", staging.url)
    stale_uploads.sweep(home, now)
    return staging


def part_of(staging: LakePath, rank: int) -> LakePath:
    """Return the directory of a rank's part of a publish, from `begin`."""
    return commit_of(staging).part(staging, rank)


def files_of(local_dir: str | Path) -> dict[str, Path]:
    """Return the files of a directory that `upload` would upload, by path; links are followed.

    Raises:
        ConfigError: as `files_below`.
        StoreError: a file or a directory has the manifest's name.
    """
    files = files_below(Path(local_dir))
    if any(path.partition("/")[0] == manifest.FILE for path in files):
        raise StoreError(
            f"{local_dir} has a file or a directory named {manifest.FILE!r}, a name that is"
            " reserved for hopsgpu: rename it"
        )
    return files


def upload(
    staging: LakePath, local_dir: str | Path, rank: int, *, stop: threading.Event | None = None
) -> dict[str, FileFacts]:
    """Upload a directory as a rank's part of a publish.

    Args:
        staging: from `begin`.
        local_dir: directory of the rank's files.
        rank: the rank; each part is uploaded under a different one.
        stop: event; once it is set, the upload ends early with Cancelled.

    Returns:
        What was uploaded, for `commit`; empty if the directory has no file.

    Raises:
        ConfigError: as `files_of`.
        StoreError: as `files_of`, or the lake refused the operation; what was uploaded by then
            stays until `abandon`.
        Cancelled: `stop` was set; what was uploaded by then stays likewise.
    """
    files = files_of(local_dir)
    if not files:
        return {}
    return upload_files(files, part_of(staging, rank), stop=stop)


def publish(
    staging: LakePath, files: Mapping[str, Path], about: VersionDescription
) -> ModelVersion:
    """Upload files and make them the model's next version, as `upload` and `commit` do.

    To close a file on HDFS takes half a second, nearly all of it waiting for the DataNode's report.
    So the manifest is written while the last files are still being written.

    Args:
        staging: from `begin`.
        files: from `files_of`; at least one.
        about: what the publisher says, for the manifest.

    Raises:
        StoreError: as `commit`, or a file was changed meanwhile.
        ConfigError: a file cannot be read.
    """
    part = part_of(staging, 0)
    uploads: queue.SimpleQueue[tuple[str, FileFacts] | None] = queue.SimpleQueue()
    stop = threading.Event()

    def uploaded() -> dict[str, FileFacts]:
        try:
            return upload_files(
                files, part, stop=stop, on_facts=lambda path, facts: uploads.put((path, facts))
            )
        finally:
            uploads.put(None)

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hopsgpu-upload") as pool:
        uploading = pool.submit(uploaded)
        try:
            known: dict[str, FileFacts] = {}
            while len(known) < len(files) and (file := uploads.get()) is not None:
                path, facts = file
                known[path] = facts
            if len(known) < len(files):
                uploading.result()

            def close() -> None:
                if uploading.result() != known:
                    raise StoreError(
                        "files of the model changed during the upload: publish them when no process"
                        " writes to them"
                    )

            return commit(staging, {0: known}, about, close=close)
        except BaseException:
            stop.set()  # nothing is written any more once this call has ended
            raise


def commit(
    staging: LakePath,
    parts: Mapping[int, Mapping[str, FileFacts]],
    about: VersionDescription,
    *,
    close: Callable[[], None] = lambda: None,
) -> ModelVersion:
    """Make what was uploaded the model's next version.

    Args:
        staging: from `begin`.
        parts: what `upload` returned, by rank.
        about: what the publisher says, for the manifest.
        close: called before the version is made; it returns once all files are uploaded.

    Raises:
        StoreError: the lake refused the operation, the parts contradict each other, or there is no
            file; `abandon` removes what is left. If only a tag could not be set, the version
            exists, and the message says so.
    """
    way = commit_of(staging)
    home = way.home(staging)
    name = home.url.rpartition("/")[2]
    merged = merge(parts)
    publication = uuid.uuid4().hex
    # The user as whom the lake knows the publisher, unless a driver publishes for somebody else.
    user = about.user or staging.owner()

    def written(number: int) -> bytes:
        return manifest.compose(
            name=name,
            version=number,
            files=merged.files,
            about=about,
            user=user,
            publication=publication,
            time=time.time(),
            hopsgpu=__version__,
        ).written()

    number = way.commit(staging, merged, written, close)
    version = ModelVersion(name, number, f"{home.url}/{number}")
    log.info("published %s, %d files", version.url, len(merged.files))
    for tag in about.tags or ():
        try:
            put_tag(home, tag, number)
        except StoreError as error:
            raise StoreError(
                f"{version.url} is published, but not tagged {tag!r}: {error}", kind=error.kind
            ) from error
    return version


def abandon(staging: LakePath) -> None:
    """Remove what was uploaded; once it is a version, it stays.

    Raises:
        StoreError: the lake refused the operation; a later publish sweeps it away.
    """
    if commit_of(staging).abandon(staging):
        log.info("removed %s: its publish failed or was cancelled", staging.url)
