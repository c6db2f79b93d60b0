"""How files become a version: they are uploaded to a staging directory, which is then renamed.

A publish calls `begin`, then `upload` for each part, in whichever process has its files, then
`commit`:

    <root>/<name>/_staging/<id>/<rank>/    the files of one part
    <root>/<name>/_claims/<n>              an empty file: the number n is taken, permanently
    <root>/<name>/<n>/                     a version, made by one strict rename of a directory

Before the rename there is no version, and after it there is the complete version, whichever process
is killed. A number is claimed by exclusive creation of its claim. Claims stay, so no number is used
twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.artifacts import manifest, stale_uploads
from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.artifacts.tags import put_tag
from hopsgpu.artifacts.versions import CLAIMS, STAGING, ModelVersion, numbers
from hopsgpu.core.version import __version__
from hopsgpu.errors import StoreError
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import Lake
from hopsgpu.storage.local_tree import files_below
from hopsgpu.storage.names import model_name
from hopsgpu.storage.transfer import upload_files

log = logging.getLogger(__name__)

_RENAMES_AT_ONCE = 8


@dataclass(frozen=True)
class Merged:
    """How the parts of several ranks become one directory.

    Attributes:
        files: files of all parts, by path.
        base: the rank whose part becomes the version.
        moves: for each path that is moved into that part, the rank whose part has the file.
    """

    files: Mapping[str, FileFacts]
    base: int
    moves: Mapping[str, int]


def merge(parts: Mapping[int, Mapping[str, FileFacts]]) -> Merged:
    """Merge parts; a path that several of them have with the same content is one file.

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
            if parts[first][path] != facts:
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
    return Merged(
        files={path: parts[rank][path] for path, rank in whose.items()},
        base=base,
        moves={path: rank for path, rank in whose.items() if path not in parts[base]},
    )


def claim(home: Lake) -> int:
    """Claim the model's next number for the caller, permanently.

    If several callers do so at once, each gets a number of its own.

    Args:
        home: directory of the model.

    Raises:
        StoreError: the lake refused the operation.
    """
    claims = home / CLAIMS
    claims.make()
    number = max((*numbers(claims.names()), *numbers(home.names())), default=0)
    while True:
        number += 1
        if (claims / str(number)).create():
            log.debug("claimed version %d of %s", number, home.url)
            return number
        log.info("another publisher has claimed version %d of %s", number, home.url)


def begin(store_url: str, name: str) -> str:
    """Create the staging directory of a publish, and sweep what dead publishers left.

    Args:
        store_url: URL of the models' root.
        name: name of the model.

    Returns:
        The URL of the staging directory, for `upload`, `commit` and `abandon`.

    Raises:
        ConfigError: `name` cannot be a model's name.
        StoreError: the lake refused the operation.
    """
    home = (Lake(store_url) / model_name(name)).with_client()
    staging = home / STAGING / uuid.uuid4().hex
    staging.make()
    log.debug("staging directory of a publish: %s", staging.url)
    # The modification time of the new directory is the lake's own time.
    stale_uploads.sweep(home, staging.stat().modified)
    return staging.url


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
    staging_url: str, local_dir: str | Path, rank: int, *, stop: threading.Event | None = None
) -> dict[str, FileFacts]:
    """Upload a directory as a rank's part of a publish.

    Args:
        staging_url: from `begin`.
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
    part = Lake(staging_url) / str(rank)
    part.make()
    return upload_files(files, part, stop=stop)


def publish(staging_url: str, files: Mapping[str, Path], about: VersionDescription) -> ModelVersion:
    """Upload files and make them the model's next version, as `upload` and `commit` do.

    To close a file on HDFS takes half a second, nearly all of it waiting for the DataNode's report.
    So the manifest is written while the last files are still being written.

    Args:
        staging_url: from `begin`.
        files: from `files_of`; at least one.
        about: what the publisher says, for the manifest.

    Raises:
        StoreError: as `commit`, or a file was changed meanwhile.
        ConfigError: a file cannot be read.
    """
    part = Lake(staging_url).with_client() / "0"
    part.make()
    uploads: queue.SimpleQueue[tuple[str, FileFacts] | None] = queue.SimpleQueue()
    stop = threading.Event()

    def uploaded() -> dict[str, FileFacts]:
        try:
            return upload_files(
                files, part, stop=stop, known=lambda path, facts: uploads.put((path, facts))
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

            return commit(staging_url, {0: known}, about, close=close)
        except BaseException:
            stop.set()  # nothing is written any more once this call has ended
            raise


def commit(
    staging_url: str,
    parts: Mapping[int, Mapping[str, FileFacts]],
    about: VersionDescription,
    *,
    close: Callable[[], None] = lambda: None,
) -> ModelVersion:
    """Make what was uploaded the model's next version.

    Args:
        staging_url: from `begin`.
        parts: what `upload` returned, by rank.
        about: what the publisher says, for the manifest.
        close: called before the version is made; it returns once all files are uploaded.

    Raises:
        StoreError: the lake refused the operation, the parts contradict each other, or there is no
            file; `abandon` removes what is left. If only a tag could not be set, the version
            exists, and the message says so.
    """
    name, _, publication = staging_url.rsplit("/", 3)[1:]
    home = Lake(staging_url.removesuffix(f"/{STAGING}/{publication}")).with_client()
    staging = home / STAGING / publication
    merged = merge(parts)
    base = staging / str(merged.base)
    _gather(staging, base, merged.moves)
    # The user as whom the lake knows the publisher, unless a driver publishes for somebody else.
    user = about.user or staging.stat().owner
    while True:
        number = claim(home)
        written = manifest.compose(
            name=name,
            version=number,
            files=merged.files,
            about=about,
            user=user,
            publication=publication,
            time=time.time(),
            hopsgpu=__version__,
        ).written()
        (base / manifest.FILE).write(written)
        close()
        version = ModelVersion(name, number, f"{home.url}/{number}")
        if _renamed(base, home / str(number), written):
            break
        log.info("%s exists already: claims another number", version.url)
    log.info("published %s, %d files", version.url, len(merged.files))
    with contextlib.suppress(StoreError):  # the version exists; a sweep removes the rest
        staging.remove()
    for tag in about.tags or ():
        try:
            put_tag(home, tag, number)
        except StoreError as error:
            raise StoreError(
                f"{version.url} is published, but not tagged {tag!r}: {error}", kind=error.kind
            ) from error
    return version


def abandon(staging_url: str) -> None:
    """Remove what was uploaded; once it is a version, it stays.

    Raises:
        StoreError: the lake refused the operation; a later publish sweeps it away.
    """
    Lake(staging_url).remove()
    log.info("removed %s: its publish failed or was cancelled", staging_url)


def _gather(staging: Lake, base: Lake, moves: Mapping[str, int]) -> None:
    for directory in sorted({path.rpartition("/")[0] for path in moves} - {""}):
        (base / directory).make()

    def move(path: str) -> None:
        source = staging / str(moves[path]) / path
        # If the answer to a first try was lost, the second try returns False.
        if not source.rename(base / path) and source.exists():
            raise StoreError(f"{(base / path).url} exists already", kind="exists")

    if moves:
        with concurrent.futures.ThreadPoolExecutor(_RENAMES_AT_ONCE) as pool:
            list(pool.map(move, moves))


def _renamed(source: Lake, target: Lake, written: bytes) -> bool:
    """Return whether the version is in place, by this rename or by one whose answer was lost."""
    try:
        return source.rename(target) or _is_ours(target, written)
    except StoreError as error:
        if _is_ours(target, written):
            log.info("%s is in place, although its rename failed: %s", target.url, error)
            return True
        raise


def _is_ours(version: Lake, written: bytes) -> bool:
    try:
        return (version / manifest.FILE).read() == written
    except StoreError:
        return False
