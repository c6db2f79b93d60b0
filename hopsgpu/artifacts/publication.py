"""How files become a version: uploaded to a staging directory, which then is renamed.

A publish is `begin`, an `upload` of each part, from whatever process has its files, and `commit`:

    <root>/<name>/_staging/<id>/<rank>/    the files of one part
    <root>/<name>/_claims/<n>              an empty file: the number n is somebody's, for ever
    <root>/<name>/<n>/                     a version, of one strict rename of a directory

Until the rename nothing is a version, whoever is killed; from then on it is one, whole. A number
is claimed by the exclusive creation of its claim, which stays: no number is ever used twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.artifacts import manifest, stale_uploads
from hopsgpu.artifacts.manifest import About
from hopsgpu.artifacts.tags import put_tag
from hopsgpu.artifacts.versions import CLAIMS, STAGING, ModelVersion, numbers
from hopsgpu.core.version import __version__
from hopsgpu.errors import StoreError
from hopsgpu.storage.digests import Facts
from hopsgpu.storage.lake import Lake
from hopsgpu.storage.local_tree import files_below
from hopsgpu.storage.names import model_name
from hopsgpu.storage.transfer import upload_files

_RENAMES_AT_ONCE = 8


@dataclass(frozen=True)
class Merged:
    """How the parts of several ranks become one directory.

    Attributes:
        files: of all parts.
        base: the rank whose part becomes the version.
        moves: by path, the rank from whose part a file is moved into it.
    """

    files: Mapping[str, Facts]
    base: int
    moves: Mapping[str, int]


def merge(parts: Mapping[int, Mapping[str, Facts]]) -> Merged:
    """Merges parts: a path that several have, with the same content, is one file.

    Args:
        parts: what was uploaded, by path, by rank.

    Raises:
        StoreError: no part has a file, or two say different things of a path.
    """
    whose: dict[str, int] = {}
    for rank, files in sorted(parts.items()):
        for path, facts in files.items():
            first = whose.setdefault(path, rank)
            if parts[first][path] != facts:
                raise StoreError(
                    f"ranks {first} and {rank} left different content in {path!r}: let one rank"
                    " write it, or each under a name of its own"
                )
    if not whose:
        raise StoreError("no rank left a file to publish")
    for path, rank in whose.items():
        above = path
        while above := above.rpartition("/")[0]:
            if above in whose:
                raise StoreError(
                    f"rank {whose[above]} left a file {above!r}, and rank {rank} a directory of"
                    f" that name, with {path!r}: let them have different names"
                )
    # The part with most files stays where it is: moving one costs as much as for 1 MB of it.
    base = max(parts, key=lambda rank: (len(parts[rank]), -rank))
    return Merged(
        files={path: parts[rank][path] for path, rank in whose.items()},
        base=base,
        moves={path: rank for path, rank in whose.items() if path not in parts[base]},
    )


def claim(home: Lake) -> int:
    """Makes the model's next number the caller's, for ever; of several callers each gets one.

    Args:
        home: of the model.

    Raises:
        StoreError: the lake refused.
    """
    claims = home / CLAIMS
    claims.make()
    number = max((*numbers(claims.names()), *numbers(home.names())), default=0)
    while True:
        number += 1
        if (claims / str(number)).create():
            return number


def begin(store_url: str, name: str) -> str:
    """Makes the staging directory of a publish, and sweeps what dead publishers left.

    Args:
        store_url: of the models' root.
        name: of the model.

    Returns:
        The staging directory's URL, for `upload`, `commit` and `abandon`.

    Raises:
        ConfigError: no name of a model.
        StoreError: the lake refused.
    """
    home = (Lake(store_url) / model_name(name)).with_client()
    staging = home / STAGING / uuid.uuid4().hex
    staging.make()
    # What has just been made tells the lake's own time.
    stale_uploads.sweep(home, staging.stat().modified)
    return staging.url


def files_of(local_dir: str | Path) -> dict[str, Path]:
    """What `upload` would upload of a directory, by path; links are followed.

    Raises:
        ConfigError: as `files_below`.
        StoreError: a file or a directory with the manifest's name.
    """
    files = files_below(Path(local_dir))
    if any(path.partition("/")[0] == manifest.FILE for path in files):
        raise StoreError(
            f"{manifest.FILE} is hopsgpu's own name, and {local_dir} has a file or a directory of"
            " that name: rename it"
        )
    return files


def upload(
    staging_url: str, local_dir: str | Path, rank: int, *, stop: threading.Event | None = None
) -> dict[str, Facts]:
    """Uploads a directory as a rank's part of a publish.

    Args:
        staging_url: from `begin`.
        local_dir: the rank's files.
        rank: whose; no two parts are uploaded under the same.
        stop: set to have it end early, with a StoreError.

    Returns:
        What was uploaded, for `commit`; nothing where the directory has no file.

    Raises:
        ConfigError: as `files_of`.
        StoreError: as `files_of`, or the lake refused; what was uploaded so far is there until
            `abandon`.
    """
    files = files_of(local_dir)
    if not files:
        return {}
    part = Lake(staging_url) / str(rank)
    part.make()
    return upload_files(files, part, stop=stop)


def publish(staging_url: str, files: Mapping[str, Path], about: About) -> ModelVersion:
    """Uploads files and makes them the model's next version, as `upload` and `commit` do.

    Closing a file on HDFS takes half a second, nearly all of it waiting for the DataNode's report:
    the manifest is written while the last files are.

    Args:
        staging_url: from `begin`.
        files: from `files_of`; at least one.
        about: for the manifest.

    Raises:
        StoreError: as `commit`, or a file was changed meanwhile.
        ConfigError: a file cannot be read.
    """
    part = Lake(staging_url).with_client() / "0"
    part.make()
    told: queue.SimpleQueue[tuple[str, Facts] | None] = queue.SimpleQueue()
    stop = threading.Event()

    def uploaded() -> dict[str, Facts]:
        try:
            return upload_files(
                files, part, stop=stop, known=lambda path, facts: told.put((path, facts))
            )
        finally:
            told.put(None)

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hopsgpu-upload") as pool:
        uploading = pool.submit(uploaded)
        try:
            known: dict[str, Facts] = {}
            while len(known) < len(files) and (one := told.get()) is not None:
                known[one[0]] = one[1]
            if len(known) < len(files):
                uploading.result()

            def close() -> None:
                if uploading.result() != known:
                    raise StoreError(
                        "files of the model were changed while they were uploaded: publish what is"
                        " written no more"
                    )

            return commit(staging_url, {0: known}, about, close=close)
        except BaseException:
            stop.set()  # nothing is written when this has returned
            raise


def commit(
    staging_url: str,
    parts: Mapping[int, Mapping[str, Facts]],
    about: About,
    *,
    close: Callable[[], None] = lambda: None,
) -> ModelVersion:
    """Makes what was uploaded the model's next version.

    Args:
        staging_url: from `begin`.
        parts: what `upload` gave, by rank.
        about: for the manifest.
        close: called before the version is there: returns once all of it is uploaded.

    Raises:
        StoreError: the lake refused, the parts contradict each other, or there is no file;
            `abandon` removes what is left. Where only a tag could not be set, the version is
            there, and the error says so.
    """
    name, _, publication = staging_url.rsplit("/", 3)[1:]
    home = Lake(staging_url.removesuffix(f"/{STAGING}/{publication}")).with_client()
    staging = home / STAGING / publication
    merged = merge(parts)
    base = staging / str(merged.base)
    _gather(staging, base, merged.moves)
    # Whom the lake takes the publisher for, unless a driver speaks for somebody.
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
    with contextlib.suppress(StoreError):  # the version is there; a sweep takes the rest
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
    """Removes what was uploaded; once it is a version, that stays.

    Raises:
        StoreError: the lake refused; a later publish sweeps it away.
    """
    Lake(staging_url).remove()


def _gather(staging: Lake, base: Lake, moves: Mapping[str, int]) -> None:
    for directory in sorted({path.rpartition("/")[0] for path in moves} - {""}):
        (base / directory).make()

    def move(path: str) -> None:
        source = staging / str(moves[path]) / path
        # An answer that was lost leaves False to the second try.
        if not source.rename(base / path) and source.exists():
            raise StoreError(f"{(base / path).url} is there already", kind="exists")

    if moves:
        with concurrent.futures.ThreadPoolExecutor(_RENAMES_AT_ONCE) as pool:
            list(pool.map(move, moves))


def _renamed(source: Lake, target: Lake, written: bytes) -> bool:
    """Whether a version is in its place, by this rename or by one whose answer was lost."""
    try:
        return source.rename(target) or _is_ours(target, written)
    except StoreError:
        if _is_ours(target, written):
            return True
        raise


def _is_ours(version: Lake, written: bytes) -> bool:
    try:
        return (version / manifest.FILE).read() == written
    except StoreError:
        return False
