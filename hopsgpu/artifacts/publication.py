"""Publish files as a model's next version.

A publish calls `begin`, then `upload` for each part in the process that has its files, then
`commit`, or `abandon`.
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

# Hugging Face's Trainer describes its own process in these files. With save_on_each_node=True,
# several processes write these files, all about the same training.
_ABOUT_A_PROCESS = frozenset({"trainer_state.json", "training_args.bin"})


def merge(parts: Mapping[int, Mapping[str, FileFacts]]) -> MergePlan:
    """Merge the uploaded parts of ranks; the same path with the same content is one file.

    If the file describes the process that wrote it, the contents may differ, and one file is taken.

    Raises:
        StoreError: no part has a file, two parts have different content under one path, or one part
            has a file where another has a directory.
    """
    owners: dict[str, int] = {}
    for rank, files in sorted(parts.items()):
        for path, facts in files.items():
            first = owners.setdefault(path, rank)
            is_about_process = path.rpartition("/")[2] in _ABOUT_A_PROCESS
            if parts[first][path] != facts and not is_about_process:
                raise StoreError(
                    f"ranks {first} and {rank} wrote different content to {path!r}: let only one"
                    " rank write the file, or use a different name in each rank"
                )
    if not owners:
        raise StoreError("no rank wrote a file to publish")
    for path, rank in owners.items():
        above = path
        while above := above.rpartition("/")[0]:
            if above in owners:
                raise StoreError(
                    f"rank {owners[above]} wrote a file {above!r}, and rank {rank} a directory of"
                    f" the same name, with {path!r}: use different names"
                )
    # The part with most files stays in place: a move costs the same for files of all sizes.
    base = max(parts, key=lambda rank: (len(parts[rank]), -rank))
    return MergePlan(
        # The files of the base part stay, also if other parts have the same path.
        files={path: parts[base].get(path, parts[rank][path]) for path, rank in owners.items()},
        base=base,
        moves={path: rank for path, rank in owners.items() if path not in parts[base]},
    )


def begin(store: LakePath, name: str) -> LakePath:
    """Make the place of a publish, and remove the leftovers of dead publishers.

    The place's client is shared by `upload`, `commit` and `abandon`, because creating a client on a
    secure cluster takes as long as several calls.
    """
    # A new client: the store's client may be old, or another process's.
    home = (LakePath(store.url) / model_name(name)).with_client()
    staging, now = commit_of(home).begin(home)
    log.debug("place of a publish: %s", staging.url)
    stale_uploads.sweep(home, now)
    return staging


def part_of(staging: LakePath, rank: int) -> LakePath:
    return commit_of(staging).part(staging, rank)


def files_of(local_dir: str | Path) -> dict[str, Path]:
    """Return the files that `upload` would upload, by path; links are followed.

    Raises:
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
    """Upload a directory as a rank's part of a publish; return the files for `commit`.

    The files stay until `abandon`, even after an error.

    Args:
        rank: number of the part; each part has another number.
        stop: event; once it is set, the upload ends early with Cancelled.
    """
    files = files_of(local_dir)
    if not files:
        return {}
    return upload_files(files, part_of(staging, rank), stop=stop)


def publish(
    staging: LakePath, files: Mapping[str, Path], about: VersionDescription
) -> ModelVersion:
    """Upload files and make them the model's next version, as `upload` and `commit` do.

    HDFS takes half a second to close a file, because it waits for the DataNode's report. Therefore
    the manifest is written while the last files are still being written.

    Args:
        files: from `files_of`; at least one.

    Raises:
        StoreError: as `commit`, or a file was changed meanwhile.
    """
    part = part_of(staging, 0)
    uploads: queue.SimpleQueue[tuple[str, FileFacts] | None] = queue.SimpleQueue()
    stop = threading.Event()

    def upload_all() -> dict[str, FileFacts]:
        try:
            return upload_files(
                files, part, stop=stop, on_facts=lambda path, facts: uploads.put((path, facts))
            )
        finally:
            uploads.put(None)

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hopsgpu-upload") as pool:
        uploading = pool.submit(upload_all)
        try:
            facts_by_path: dict[str, FileFacts] = {}
            while len(facts_by_path) < len(files) and (file := uploads.get()) is not None:
                path, facts = file
                facts_by_path[path] = facts
            if len(facts_by_path) < len(files):
                uploading.result()

            def finish_uploads() -> None:
                if uploading.result() != facts_by_path:
                    raise StoreError(
                        "files of the model changed during the upload: publish them when no process"
                        " writes to them"
                    )

            parts = {0: facts_by_path}
            return commit(staging, parts, about, finish_uploads=finish_uploads)
        except BaseException:
            stop.set()  # so that nothing is written after this call
            raise


def commit(
    staging: LakePath,
    parts: Mapping[int, Mapping[str, FileFacts]],
    about: VersionDescription,
    *,
    finish_uploads: Callable[[], None] = lambda: None,
) -> ModelVersion:
    """Make the uploaded files the model's next version.

    Args:
        parts: results of `upload`, by rank.
        finish_uploads: called before the version is made; it returns once all files are uploaded.

    Raises:
        StoreError: the lake refused the operation, the parts contradict each other, or there is no
            file; `abandon` removes the uploaded files. If only a tag could not be set, the version
            exists, and the message says so.
    """
    version_commit = commit_of(staging)
    home = version_commit.home(staging)
    name = home.url.rpartition("/")[2]
    plan = merge(parts)
    publication = uuid.uuid4().hex
    # The publisher's user name on the lake, unless a driver publishes for another user.
    user = about.user or staging.owner()

    def make_manifest(number: int) -> bytes:
        return manifest.compose(
            name=name,
            version=number,
            files=plan.files,
            about=about,
            user=user,
            publication=publication,
            time=time.time(),
            hopsgpu=__version__,
        ).to_bytes()

    number = version_commit.commit(staging, plan, make_manifest, finish_uploads)
    version = ModelVersion(name, number, f"{home.url}/{number}")
    log.info("published %s, %d files", version.url, len(plan.files))
    for tag in about.tags or ():
        try:
            put_tag(home, tag, number)
        except StoreError as error:
            raise StoreError(
                f"{version.url} is published, but not tagged {tag!r}: {error}", kind=error.kind
            ) from error
    return version


def abandon(staging: LakePath) -> None:
    """Remove the uploaded files, unless they have become a version.

    After an error, a later publish removes the files.
    """
    if commit_of(staging).abandon(staging):
        log.info("removed %s: its publish failed or was cancelled", staging.url)
