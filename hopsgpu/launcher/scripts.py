"""Scripts at the driver: found, packed with their working directory, and stored on the lake."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import json
import logging
import os
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hopsgpu.artifacts import python_environments
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.code_variables import Setting
from hopsgpu.packaging.import_scan import imports_of_source
from hopsgpu.packaging.module_finder import (
    ImportReader,
    ModuleSource,
    is_in_environment,
    users_module_sources,
)
from hopsgpu.packaging.modules import ImportRoot, PackedModules, pack_modules, root_of_script
from hopsgpu.packaging.preload import StaticFindings, scan_script
from hopsgpu.packaging.python_env.builder import owned_key
from hopsgpu.packaging.python_env.packing import digest_of_file
from hopsgpu.packaging.script import (
    FILE,
    MODULE,
    PROGRAM,
    KeptDirectories,
    ScriptCall,
    StoredScript,
)
from hopsgpu.packaging.working_dir import MAX_BYTES, WorkingDirectory, find_files
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

_ARCHIVE = "script.tar.gz"
_COMPRESSION_LEVEL = 1
# The largest module that is searched for imports.
_MAX_SOURCE = 2**20


@dataclass(frozen=True)
class ScriptRequest:
    """A script as the user names it.

    Attributes:
        target: path of a Python file, name of a module, or a program; `kind` says which.
        working_dir: the directory that travels to the ranks; None for the script alone, with its
            modules.
    """

    kind: str
    target: str
    working_dir: Path | None = None


def request_of(target: object, working_dir: str | os.PathLike[str] | None) -> ScriptRequest:
    """Return the script that the first argument of `launch` names.

    A text that ends with `.py`, has a slash, or names an existing file is a path; other texts are
    names of modules.

    Raises:
        ConfigError: it names neither.
    """
    directory = None if working_dir is None else Path(working_dir)
    if isinstance(target, os.PathLike):
        return ScriptRequest(FILE, os.fspath(target), directory)
    text = str(target)
    if text.endswith(".py") or "/" in text or Path(text).is_file():
        return ScriptRequest(FILE, text, directory)
    if all(part.isidentifier() for part in text.split(".")):
        return ScriptRequest(MODULE, text, directory)
    raise ConfigError(
        f"train_fn={text!r}: must be a function, the path of a Python file ('train.py') or the"
        " name of a module ('mypkg.train')"
    )


def default_script_name(target: object) -> str:
    """Return the default name of a run of a script: that of its file or module."""
    text = target.target if isinstance(target, ScriptRequest) else str(target)
    if isinstance(target, ReadyScript):
        text = target.call.target
    name = Path(text).name
    stem = name.removesuffix(".py") if name.endswith(".py") else name
    letters = "".join(c if c.isalnum() or c in "_.-" else "-" for c in stem)
    return letters.strip("-.")[:40] or "script"


@dataclass(frozen=True)
class PackableScript:
    """A script that was found, with all that travels; nothing is stored yet.

    Attributes:
        beside: the script's own file if the working directory does not contain it, else None.
        paths: directories in the working directory that modules are imported from.
        needs: top-level modules that the ranks' Python must have.
    """

    call: ScriptCall
    directory: WorkingDirectory | None
    beside: Path | None
    modules: PackedModules
    foreseen: StaticFindings
    needs: tuple[str, ...]
    paths: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        directory = () if self.directory is None else self.directory.warnings
        return (*directory, *self.modules.warnings)

    @property
    def bytes(self) -> int:
        return (0 if self.directory is None else self.directory.bytes) + len(self.modules.archive)

    @functools.cached_property
    def content(self) -> str:
        """The SHA-256 of all that travels, computed once.

        Raises:
            ConfigError: a file cannot be read.
        """
        parts = [
            None if self.directory is None else self.directory.digest(threading.Event()),
            None if self.beside is None else [self.beside.name, digest_of_file(self.beside)],
            self.modules.digest,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def store(self, root: LakePath, stop: threading.Event) -> StoredScript:
        """Store the script on the lake unless the same one is there already.

        Raises:
            ConfigError: a file cannot be read.
            StoreError: the lake refused.
            Cancelled: `stop` was set.
        """
        key = owned_key(root, f"script {self.content}")
        description = python_environments.find(root, key)
        if description is None:
            with tempfile.TemporaryDirectory(prefix="hopsgpu-script-") as directory:
                archive = Path(directory, _ARCHIVE)
                self._pack(archive, stop)
                fields = {
                    "name": self.call.target,
                    "digest": digest_of_file(archive, stop),
                    "bytes": archive.stat().st_size,
                    "roots": self.modules.roots,
                }
                log.info("stores %s: %d bytes", self.call.target, fields["bytes"])
                description = python_environments.upload(root, key, archive, fields, stop)
        else:
            log.info("%s is on the lake already, unchanged", self.call.target)
        return StoredScript(
            python_environments.archive_of(root, key, description).url,
            str(description["digest"]),
            int(description["roots"]),
            self.paths,
        )

    def _pack(self, archive: Path, stop: threading.Event) -> None:
        with tarfile.open(archive, "w:gz", compresslevel=_COMPRESSION_LEVEL) as tar:
            for name in ("work", "script", "modules"):
                _add_directory(tar, name)
            if self.directory is not None:
                self.directory.add_to(tar, "work", stop)
            if self.beside is not None:
                tar.add(self.beside.resolve(), f"script/{self.beside.name}", filter=_without_owner)
            with zipfile.ZipFile(io.BytesIO(self.modules.archive)) as modules:
                for entry in modules.infolist():
                    info = tarfile.TarInfo(f"modules/{entry.filename}")
                    info.size = entry.file_size
                    info.mode = entry.external_attr >> 16 & 0o777 or 0o644
                    with modules.open(entry) as content:
                        tar.addfile(info, content)


def _add_directory(tar: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    tar.addfile(info)


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


@dataclass(frozen=True)
class ReadyScript:
    """A script that was stored on the lake before its driver started, as in cluster mode."""

    call: ScriptCall
    stored: StoredScript
    foreseen: StaticFindings
    needs: tuple[str, ...]
    content: str
    warnings: tuple[str, ...] = ()

    def store(self, root: LakePath, stop: threading.Event) -> StoredScript:
        return self.stored

    def as_fields(self) -> dict[str, Any]:
        return {
            "call": asdict(self.call),
            "stored": self.stored.as_fields(),
            "imports": self.foreseen.imports,
            "settings": [tuple(setting) for setting in self.foreseen.settings],
            "needs": self.needs,
            "content": self.content,
            "warnings": self.warnings,
        }

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> ReadyScript:
        call = values["call"]
        return cls(
            ScriptCall(call["kind"], call["target"], tuple(call["args"])),
            StoredScript.from_fields(values["stored"]),
            StaticFindings(
                tuple(values["imports"]),
                frozenset(Setting(*setting) for setting in values["settings"]),
            ),
            tuple(values["needs"]),
            str(values["content"]),
            tuple(values["warnings"]),
        )


Script = PackableScript | ReadyScript


def ready_script(script: PackableScript, root: LakePath, stop: threading.Event) -> ReadyScript:
    """Store a script, and return it for a driver that runs on another machine.

    Raises:
        ConfigError, StoreError, Cancelled: as `PackableScript.store`.
    """
    stored, content = script.store(root, stop), script.content
    return ReadyScript(script.call, stored, script.foreseen, script.needs, content, script.warnings)


def find_script(
    request: ScriptRequest,
    args: Sequence[object],
    kept: KeptDirectories,
    max_bytes: int = MAX_BYTES,
) -> PackableScript:
    """Find a script, the files of its working directory, and its modules from elsewhere.

    Args:
        args: its arguments.
        max_bytes: bound of the working directory.

    Raises:
        ConfigError: the script or the directory does not exist, the directory is too large, or an
            argument is not a text.
    """
    words = tuple(map(_checked_word, args))
    if request.kind == MODULE:
        return _find_module(request, words, kept, max_bytes)
    if request.kind == PROGRAM:
        directory = _directory(request, (), kept, max_bytes)
        call = ScriptCall(PROGRAM, request.target, words)
        return PackableScript(call, directory, None, pack_modules([]), StaticFindings(), ())
    check_exists(request)
    file = Path(request.target)
    source = _source_of(file)
    inside, beside = _name_inside(request.working_dir, file), file.resolve().parent
    directory = _directory(request, () if inside is None else (inside,), kept, max_bytes)
    names = [item.name for item in imports_of_source("__main__", source, is_package=False)]
    imported = _imported_modules(names, directory, beside)
    roots: list[ImportRoot | Path] = [imported.root]
    if inside is None:
        roots = [root_of_script(file)]
    modules = pack_modules(roots)
    return PackableScript(
        ScriptCall(FILE, f"../script/{file.name}" if inside is None else inside, words),
        directory,
        file if inside is None else None,
        modules,
        scan_script(source, _module_sources(directory, [beside, *imported.paths], modules)),
        (),
        imported.relative_paths(directory),
    )


def check_exists(request: ScriptRequest) -> None:
    """Raise ConfigError if there is no such script, or no such directory, on this machine."""
    if request.kind == FILE and not Path(request.target).is_file():
        raise ConfigError(
            f"{request.target!r}: there is no such file on this machine; give the path of a Python"
            " script, or the name of a module (`-m` on the command line)"
        )
    if request.working_dir is not None and not request.working_dir.is_dir():
        raise ConfigError(f"working_dir={str(request.working_dir)!r}: must be a directory")


def _find_module(
    request: ScriptRequest, words: tuple[str, ...], kept: KeptDirectories, max_bytes: int
) -> PackableScript:
    name, beside = request.target, (request.working_dir or Path.cwd()).resolve()
    top = name.partition(".")[0]
    spec = PathFinder.find_spec(top, [str(beside)])
    is_beside = spec is not None and not is_in_environment(beside)
    if not is_beside and importlib.util.find_spec(top) is None:
        raise ConfigError(
            f"{name!r}: this Python finds no module {top!r}, neither in {beside} nor on sys.path;"
            " give the name of a module, or the path of a Python file"
        )
    directory = _directory(request, (), kept, max_bytes)
    imported = _imported_modules([name, f"{name}.__main__"], directory, beside)
    modules = pack_modules([imported.root])
    sources = _module_sources(directory, [beside, *imported.paths], modules)
    run = next((n for n in (f"{name}.__main__", name) if n in sources), name)
    text, _ = sources.get(run, ("", False))
    is_sent = is_beside or bool(imported.paths) or top in modules.names
    return PackableScript(
        ScriptCall(MODULE, name, words),
        directory,
        None,
        modules,
        scan_script(text, sources, run),
        () if is_sent else (top,),
        imported.relative_paths(directory),
    )


def _checked_word(value: object) -> str:
    if not isinstance(value, (str, int, float, os.PathLike)) or isinstance(value, bool):
        raise ConfigError(
            f"args has {value!r}: the arguments of a script must be texts, numbers or paths"
        )
    word = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if "\0" in word:
        raise ConfigError(f"args has {word!r}: a NUL character cannot be in an argument")
    return word


def _name_inside(working_dir: Path | None, file: Path) -> str | None:
    if working_dir is None:
        return None
    # The script itself may be a link to a file elsewhere.
    absolute, root = Path(os.path.abspath(file)), working_dir.resolve()  # noqa: PTH100
    parent = absolute.parent.resolve()
    return (
        (parent / absolute.name).relative_to(root).as_posix()
        if parent.is_relative_to(root)
        else None
    )


def _directory(
    request: ScriptRequest, needed: tuple[str, ...], kept: KeptDirectories, max_bytes: int
) -> WorkingDirectory | None:
    if request.working_dir is None:
        return None
    return find_files(
        request.working_dir, needed=needed, not_sent=kept.not_sent, max_bytes=max_bytes
    )


@dataclass(frozen=True)
class _ImportedModules:
    """The user's modules that a script imports.

    Attributes:
        root: modules that the working directory does not contain.
        paths: directories in the working directory that contain the others.
    """

    root: ImportRoot
    paths: tuple[Path, ...]

    def relative_paths(self, directory: WorkingDirectory | None) -> tuple[str, ...]:
        if directory is None:
            return ()
        return tuple(path.relative_to(directory.path).as_posix() for path in self.paths)


def _imported_modules(
    names: Sequence[str], directory: WorkingDirectory | None, beside: Path
) -> _ImportedModules:
    """Find the user's modules that a script imports.

    Args:
        beside: the directory that the script itself imports from first.
    """
    elsewhere: list[ModuleSource] = []
    paths: dict[Path, None] = {}
    for source in users_module_sources(names, ImportReader(), beside):
        root = None if source.root is None else source.root.resolve()
        if directory is None or root is None or not _has_travelled(source, directory):
            # Also a module that .gitignore names: the script needs it.
            elsewhere.append(source)
        elif root != beside:
            paths[root] = None
    return _ImportedModules(ImportRoot(None, tuple(elsewhere)), tuple(paths))


def _has_travelled(source: ModuleSource, directory: WorkingDirectory) -> bool:
    path = source.path.resolve()
    if not path.is_relative_to(directory.path):
        return False
    return path.relative_to(directory.path).as_posix() in directory.files


def _source_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


def _module_sources(
    directory: WorkingDirectory | None, roots: Sequence[Path], modules: PackedModules
) -> dict[str, tuple[str, bool]]:
    """Return the user's modules by dotted name, as the script finds them.

    Args:
        roots: directories in the working directory that the script imports from.
    """
    sources: dict[str, tuple[str, bool]] = {}
    files = [] if directory is None else [directory.path / name for name in directory.files]
    for root in roots:
        for path in files:
            is_module = path.suffix == ".py" and path.is_relative_to(root) and path.is_file()
            if is_module and path.stat().st_size <= _MAX_SOURCE:
                _add_source(sources, path.relative_to(root).parts, _source_of(path))
    with zipfile.ZipFile(io.BytesIO(modules.archive)) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(".py") and entry.file_size <= _MAX_SOURCE:
                parts = tuple(entry.filename.split("/")[1:])
                _add_source(sources, parts, archive.read(entry).decode(errors="replace"))
    return sources


def _add_source(sources: dict[str, tuple[str, bool]], parts: Sequence[str], text: str) -> None:
    stem = parts[-1].removesuffix(".py")
    names = [*parts[:-1], *(() if stem == "__init__" else (stem,))]
    if names:
        sources.setdefault(".".join(names), (text, stem == "__init__"))
