"""The user's own modules: found at the driver, packed, and importable in every rank."""

from __future__ import annotations

import functools
import hashlib
import io
import stat
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hopsgpu.packaging.import_scan import ImportedModules, imports_of_source
from hopsgpu.packaging.module_files import (
    File,
    files_below,
    files_in,
    is_package,
    is_utf8,
    printable,
)
from hopsgpu.packaging.module_finder import (
    ImportReader,
    ModuleSource,
    is_in_environment,
    modules_bound_in_main,
    user_path_entries,
    users_module_sources,
)

# A directory beyond these limits is no project of modules (a home directory, /tmp): only modules at
# its top level are taken, and parts that are named.
MAX_ENTRIES = 5_000
MOST_BYTES = 20 * 2**20
# The directory of a container in which YARN unpacks the modules that `hopsgpu submit` ships.
SHIPPED_MODULES_DIR = "hopsgpu-modules"
_BRING = "pass it with python_env= if the ranks' Python lacks it"
# A launch waits for it: the best compression takes 50 % longer, for a tenth of the bytes.
_LEVEL = 1
# Largest number of files of a package with data that is still searched for its modules.
_MOST_LOOKED_AT = 20 * MAX_ENTRIES


@dataclass(frozen=True)
class PackedModules:
    """A zip of the user's modules.

    Attributes:
        archive: the bytes of the zip; each root is a top-level directory "0", "1", … in it.
        roots: number of roots.
        warnings: what was not packed, and why.
        names: the top-level modules that can be imported from it.
    """

    archive: bytes
    roots: int
    warnings: tuple[str, ...]
    names: frozenset[str] = frozenset()

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the archive, in hexadecimal."""
        return hashlib.sha256(self.archive).hexdigest()


@dataclass(frozen=True)
class ImportRoot:
    """A place that ranks import from as from one entry of `sys.path`.

    Attributes:
        path: a directory or zip, all of whose modules are packed if it is small; None for the parts
            alone.
        parts: parts that are packed whatever else there is, with the files in them.
        expected: whether the user expects modules from there that nothing names. If such a root is
            large, some of them are packed, and a warning says which. Another root is packed whole
            or not at all.
    """

    path: Path | None
    parts: tuple[ModuleSource, ...] = ()
    expected: bool = True


def import_roots(
    function: Callable[..., Any],
    imported: ImportedModules = ImportedModules(),  # noqa: B008 - frozen
    added: Path | None = None,
    sources: ImportReader | None = None,
) -> tuple[ImportRoot, ...]:
    """Return where the ranks of a function import the user's modules from, in `sys.path` order.

    That is the directory of the script (or the notebook's working directory), and every other place
    outside the Python environment that has a module which the function, its arguments, the script
    or one of those modules imports. If YARN runs the script, the modules beside it are those that
    were shipped with it.

    Args:
        function: the user's function.
        imported: what its pickle imports.
        added: the directory of the files that Spark's `addPyFile` and `--py-files` brought to the
            driver.
        sources: reads the imports of modules on the way.
    """
    named = {*imported.needed, *imported.likely, _module_of(function), *modules_bound_in_main()}
    parts = users_module_sources(sorted(named), sources or ImportReader())
    places = user_path_entries()
    main = sys.modules.get("__main__")
    first = [] if main is None else [_root_of_main(main)]
    entries = [Path(entry) for entry in sys.path if isinstance(entry, str)]
    first += [path.resolve() for path in entries if path.parent.name == SHIPPED_MODULES_DIR]
    whole = [path for path in first if path is not None and not is_in_environment(path)]
    later = {p.root for p in parts if p.root is not None and p.root.resolve() in places}
    brought = [] if added is None else [added, *_zips_in(added, places)]
    ordered = sorted(
        (path for path in later.union(brought) if not is_in_environment(path)),
        key=lambda path: places.get(path.resolve(), len(places)),
    )
    return _with_parts([*whole, *ordered], [*whole, *brought], parts)


def _with_parts(
    paths: Sequence[Path], expected: Iterable[Path], parts: Iterable[ModuleSource]
) -> tuple[ImportRoot, ...]:
    """Return each root once, with its parts; parts that belong to no root come last."""
    own: dict[Path, list[ModuleSource]] = {}
    written: dict[Path, Path] = {}
    for path in paths:
        own.setdefault(path.resolve(), [])
        written.setdefault(path.resolve(), path)
    rest: list[ModuleSource] = []
    for part in parts:
        root = None if part.root is None else part.root.resolve()
        (rest if root is None or root not in own else own[root]).append(part)
    known = {path.resolve() for path in expected}
    found = [ImportRoot(written[path], tuple(below), path in known) for path, below in own.items()]
    return (*found, ImportRoot(None, tuple(rest))) if rest else tuple(found)


def _zips_in(directory: Path, places: Iterable[Path]) -> list[Path]:
    """Return the zips on `sys.path` that are in a directory."""
    return [path for path in places if path.parent == directory.resolve() and path.is_file()]


def _module_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None)
    return home if isinstance(home, str) else type(function).__module__


def root_of_script(script: Path) -> ImportRoot:
    """Return the user's modules that a script imports, as one root.

    They are those in its own directory, and those elsewhere on this Python's `sys.path` that it
    imports.
    """
    beside = script.resolve().parent
    try:
        source = script.read_text(encoding="utf-8", errors="replace")
    except OSError:  # packing reports it
        source = ""
    names = [found.name for found in imports_of_source("__main__", source, package=False)]
    own = None if is_in_environment(beside) else beside
    parts = users_module_sources(names, ImportReader(), own)
    return ImportRoot(own, tuple(part for part in parts if part.root != own))


def _root_of_main(main: ModuleType) -> Path | None:
    file = getattr(main, "__file__", None)
    if file is None:
        # A notebook or `python -c`: modules beside it come from the working directory.
        try:
            return Path.cwd() if "" in sys.path else None
        except FileNotFoundError:  # it was removed: nothing is imported from it either
            return None
    spec = getattr(main, "__spec__", None)
    name = main.__name__ if spec is None else spec.name
    above = name.count(".") + (Path(file).name == "__init__.py")
    return Path(file).resolve().parents[above]


@dataclass
class Packer:
    """A packer of modules for several launches, which packs again only if a file has changed.

    Several threads may use it.

    Attributes:
        sources: the imports of the modules, for `import_roots`.
    """

    sources: ImportReader = field(default_factory=ImportReader)
    _last: tuple[object, PackedModules] | None = None

    def pack(self, roots: Sequence[ImportRoot | Path]) -> PackedModules:
        """Pack as `pack_modules` does; a file has changed if its time, size, inode or mode has."""
        found = [
            _found(root if isinstance(root, ImportRoot) else ImportRoot(root)) for root in roots
        ]
        state = [(one.warnings, [file.state for file in one.files]) for one in found]
        last = self._last
        if last is None or last[0] != state:
            last = self._last = (state, _packed(found))
        return last[1]


def pack_modules(roots: Sequence[ImportRoot | Path]) -> PackedModules:
    """Pack the modules below each root, every file of the packages among them, and named parts.

    Hidden directories, virtual environments, caches and this hopsgpu itself are left out. If a root
    has more than 20 MiB of modules and packages, only its modules are packed, without other files.
    If it has more than 5,000 entries, or its modules alone exceed 20 MiB, only the modules at its
    top level are packed. A root with `expected=False` is then not packed at all. Named parts are
    packed in each case; if a part exceeds these limits itself, only its modules are packed, without
    other files, or nothing. A warning says so.
    """
    return Packer().pack(roots)


@dataclass(frozen=True)
class _PackableFiles:
    """The files of a root to pack, and warnings for the user about what is not packed."""

    files: tuple[File, ...]
    warnings: tuple[str, ...]


def _found(root: ImportRoot) -> _PackableFiles:
    warnings: list[str] = []
    files: dict[str, File] = {}
    for part in root.parts:
        for file in _of_part(part, warnings):
            files.setdefault(file.name, file)
    if root.path is not None:
        for file in _of_root(root.path, root.expected, warnings):
            files.setdefault(file.name, file)
    unnamed = sorted(printable(file.path) for name, file in files.items() if not is_utf8(name))
    if unnamed:
        more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
        warnings.append(f"not sent to the ranks, because the name is not UTF-8: {unnamed[0]}{more}")
    ordered = sorted(filter(is_utf8, files))
    return _PackableFiles(tuple(files[name] for name in ordered), tuple(warnings))


def _of_root(path: Path, expected: bool, warnings: list[str]) -> list[File]:
    """Return a root's modules with the files of its packages; fewer if the root is too large."""
    found = files_below(path, "", most=MAX_ENTRIES)
    if found is not None:
        packages = {file.name.rpartition("/")[0] for file in found if is_package(file)}
        packages.discard("")
        all_files = [f for f in found if f.is_module or not packages.isdisjoint(f.above)]
        modules = [file for file in all_files if file.is_module]
        if _size(all_files) <= MOST_BYTES:
            return all_files
        if expected and _size(modules) <= MOST_BYTES:
            warnings.append(
                f"{printable(path)} contains more than {MOST_BYTES >> 20} MiB: of packages that the"
                " function and the script do not name, only modules are sent to the ranks"
            )
            return modules
    if not expected or not path.is_dir():
        return []
    warnings.append(
        f"{printable(path)} is too large to send to the ranks: they can import only its top-level"
        " modules and the packages that the function or the script names. Put the project into a"
        " directory of its own"
    )
    return [file for file in files_in(path) if file.is_module]


def _of_part(part: ModuleSource, warnings: list[str]) -> list[File]:
    """Return all files of a part; only its modules if the files are too many, or nothing."""
    found = files_below(part.path, part.name, inside=part.inside, most=_MOST_LOOKED_AT)
    if found is not None and _is_small(found):
        return found
    where = printable(part.path)
    if any(part.path.parent.glob("*.dist-info")):
        # pip has installed packages here: a part of such a package would shadow a whole one.
        warnings.append(f"{where} is too large to send to the ranks: {_BRING}")
        return []
    modules = [file for file in found or () if file.is_module]
    if found is not None and _is_small(modules):
        warnings.append(
            f"{where} is too large to send to the ranks: only its modules are sent. Put data on"
            f" the lake, or {_BRING}"
        )
        return modules
    warnings.append(f"{where} is too large to send to the ranks: {_BRING}")
    return []


def _is_small(files: Sequence[File]) -> bool:
    return len(files) <= MAX_ENTRIES and _size(files) <= MOST_BYTES


def _size(files: Sequence[File]) -> int:
    return sum(file.size for file in files)


def _packed(roots: Sequence[_PackableFiles]) -> PackedModules:
    warnings = [warning for root in roots for warning in root.warnings]
    names: set[str] = set()
    buffer = io.BytesIO()
    taken = [root.files for root in roots if root.files]
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, files in enumerate(taken):
            for file in files:
                # With a fixed time, equal modules give equal bytes.
                entry = zipfile.ZipInfo(f"{number}/{file.name}")
                entry.external_attr = (stat.S_IFREG | (0o755 if file.may_run else 0o644)) << 16
                try:
                    content = file.content()
                except (OSError, zipfile.BadZipFile, KeyError) as error:
                    why = getattr(error, "strerror", None) or error
                    warnings.append(f"{printable(file.path)} is not sent to the ranks: {why}")
                    continue
                archive.writestr(entry, content, zipfile.ZIP_DEFLATED, _LEVEL)
                if file.is_module:
                    names.add(file.top)
    return PackedModules(buffer.getvalue(), len(taken), tuple(warnings), frozenset(names))
