"""Packing of a directory as an archive, and digests that show changes."""

from __future__ import annotations

import hashlib
import os
import tarfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hopsgpu.errors import Cancelled, ConfigError
from hopsgpu.packaging.python_env.environment import DRIVER_PACKAGES

ARCHIVE = "environment.tar.gz"
# A directory with more files is a wrong one, such as the home directory. PyTorch has 15,000.
MAX_FILES = 200_000
_READERS = 4
_EXCLUDED_DIRECTORIES = frozenset({"node_modules"})
_CACHE = "__pycache__"
# gzip's second level takes three times as long, and makes no large file much smaller.
_COMPRESSION_LEVEL = 1


def files_of(directory: Path, max_files: int = MAX_FILES) -> dict[str, Path]:
    """Return the files of a directory to pack, by sorted path below it; links are followed.

    Hidden directories, node_modules, virtual environments in it and `DRIVER_PACKAGES` are left out.

    Raises:
        ConfigError: the directory cannot be read, or has more than `max_files` files.
    """
    files: dict[str, Path] = {}
    for name, path in _walk(directory, directory, frozenset()):
        files[name] = path
        if len(files) > max_files:
            raise ConfigError(
                f"python_env: {directory} contains more than {max_files} files: name the"
                " directory of the modules or of the environment, not one above it"
            )
    return dict(sorted(files.items()))


def _walk(root: Path, directory: Path, ancestors: frozenset[Path]) -> Iterator[tuple[str, Path]]:
    real = directory.resolve()
    if real in ancestors:  # a circular link
        return
    try:
        children = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"python_env: {directory} cannot be read: {error.strerror}") from error
    for path in children:
        if path.is_dir():
            if not _is_excluded(path, root):
                yield from _walk(root, path, ancestors | {real})
        elif path.is_file() and not (path.parent == root and path.stem in DRIVER_PACKAGES):
            yield path.relative_to(root).as_posix(), path


def _is_excluded(directory: Path, root: Path) -> bool:
    name = directory.name
    return (
        (directory.parent == root and name in DRIVER_PACKAGES)
        or name.startswith(".")
        or name in _EXCLUDED_DIRECTORIES
        or (directory / "pyvenv.cfg").exists()
    )


def digest_of(files: Mapping[str, Path], stop: threading.Event) -> str:
    """Return the SHA-256 of names and contents of files, in hexadecimal, without `__pycache__`.

    Raises:
        ConfigError: a file cannot be read.
        Cancelled: `stop` was set.
    """
    names = [name for name in files if _CACHE not in name.split("/")]
    total = hashlib.sha256()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="hopsgpu-digest") as pool:
        # Python releases the GIL while it reads and digests.
        for name, digest in zip(
            names, pool.map(lambda n: digest_of_file(files[n], stop), names), strict=True
        ):
            total.update(f"{name}\0{digest}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


def digest_of_file(file: Path, stop: threading.Event | None = None) -> str:
    """Return the SHA-256 of a file, in hexadecimal; raise as `digest_of` does."""
    if stop is not None and stop.is_set():
        raise Cancelled("the run was cancelled while its Python environment was built")
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"python_env: {file} cannot be read: {error.strerror}") from error


def pack(files: Mapping[str, Path], archive: Path, stop: threading.Event) -> None:
    """Pack files as a tar.gz; raise as `digest_of` does.

    Modification times are kept, because Python compares them with those in compiled files.
    """
    with tarfile.open(archive, "w:gz", compresslevel=_COMPRESSION_LEVEL) as tar:
        for name, file in files.items():
            if stop.is_set():
                raise Cancelled("the run was cancelled while its Python environment was packed")
            try:
                info = tar.gettarinfo(os.path.realpath(file), name)
                info.uname = info.gname = ""
                info.uid = info.gid = 0
                # Pack a file with two hard links twice: a link could lead out of the archive.
                info.type, info.linkname = tarfile.REGTYPE, ""
                with file.open("rb") as content:
                    info.size = os.fstat(content.fileno()).st_size
                    tar.addfile(info, content)
            except OSError as error:
                raise ConfigError(
                    f"python_env: {file} cannot be packed: {error.strerror or error}"
                ) from error
