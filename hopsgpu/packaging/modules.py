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

# A directory beyond these limits is not a project (a home directory, /tmp): only its top-level
# modules and the modules that a call imports are packed.
MAX_ENTRIES = 5_000
MAX_BYTES = 20 * 2**20
# The directory of a container in which YARN unpacks the modules that `hopsgpu submit` ships.
SHIPPED_MODULES_DIR = "hopsgpu-modules"
_PYTHON_ENV_ADVICE = "pass it with python_env= if the ranks' Python lacks it"
# A launch waits for the packing: the best level takes 50 % longer and saves a tenth of the bytes.
_COMPRESSION_LEVEL = 1
# A package with data may have this many files and still be searched for its modules.
_MAX_SEARCHED = 20 * MAX_ENTRIES


@dataclass(frozen=True)
class PackedModules:
    """A zip of the user's modules.

    Attributes:
        archive: the bytes of the zip; its top-level directories "0", "1", … are the roots.
        roots: number of roots.
        warnings: what was not packed, and why.
        names: its top-level modules.
    """

    archive: bytes
    roots: int
    warnings: tuple[str, ...]
    names: frozenset[str] = frozenset()

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of the archive, in hexadecimal."""
        return hashlib.sha256(self.archive).hexdigest()


@dataclass(frozen=True)
class ImportRoot:
    """An entry of the ranks' `sys.path`.

    Attributes:
        path: a directory or zip, all of whose modules are packed if it is small; None for the
            sources alone.
        sources: modules and packages that are packed in any case, with all their files.
        is_expected: whether the user expects modules from `path` that no import names. If such a
            root is large, some of its modules are packed, and a warning says which. Any other root
            is packed whole or not at all.
    """

    path: Path | None
    sources: tuple[ModuleSource, ...] = ()
    is_expected: bool = True


def import_roots(
    function: Callable[..., Any],
    imported: ImportedModules = ImportedModules(),  # noqa: B008 - frozen
    py_files_dir: Path | None = None,
    reader: ImportReader | None = None,
) -> tuple[ImportRoot, ...]:
    """Return where the ranks of a function import the user's modules from, in `sys.path` order.

    The roots are the directory of the script (or the notebook's working directory), and places
    outside the Python environment that have an imported module. Imports of the function, its
    arguments, the script and these modules count. If YARN runs the script, the modules beside it
    are those that were shipped with it. `py_files_dir` has the files that Spark's `addPyFile` and
    `--py-files` brought to the driver.
    """
    names = {*imported.needed, *imported.likely, home_module(function), *modules_bound_in_main()}
    sources = users_module_sources(sorted(names), reader or ImportReader())
    positions = user_path_entries()
    main = sys.modules.get("__main__")
    first = [] if main is None else [_root_of_main(main)]
    entries = [Path(entry) for entry in sys.path if isinstance(entry, str)]
    first += [path.resolve() for path in entries if path.parent.name == SHIPPED_MODULES_DIR]
    main_roots = [path for path in first if path is not None and not is_in_environment(path)]
    later = {s.root for s in sources if s.root is not None and s.root.resolve() in positions}
    py_files = [] if py_files_dir is None else [py_files_dir, *_zips_in(py_files_dir, positions)]
    ordered = sorted(
        (path for path in later.union(py_files) if not is_in_environment(path)),
        key=lambda path: positions.get(path.resolve(), len(positions)),
    )
    return _assign_sources([*main_roots, *ordered], [*main_roots, *py_files], sources)


def _assign_sources(
    paths: Sequence[Path], expected: Iterable[Path], sources: Iterable[ModuleSource]
) -> tuple[ImportRoot, ...]:
    """Return each root once, with its sources; sources without a root come last."""
    by_root: dict[Path, list[ModuleSource]] = {}
    written: dict[Path, Path] = {}
    for path in paths:
        by_root.setdefault(path.resolve(), [])
        written.setdefault(path.resolve(), path)
    rootless: list[ModuleSource] = []
    for source in sources:
        root = None if source.root is None else source.root.resolve()
        (rootless if root is None else by_root.get(root, rootless)).append(source)
    resolved = {path.resolve() for path in expected}
    roots = [ImportRoot(written[r], tuple(below), r in resolved) for r, below in by_root.items()]
    return (*roots, ImportRoot(None, tuple(rootless))) if rootless else tuple(roots)


def _zips_in(directory: Path, entries: Iterable[Path]) -> list[Path]:
    return [path for path in entries if path.parent == directory.resolve() and path.is_file()]


def home_module(function: Callable[..., Any]) -> str:
    """Return the module of a function, or of a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None)
    return home if isinstance(home, str) else type(function).__module__


def root_of_script(script: Path) -> ImportRoot:
    """Return a root with the modules beside a script, and its imports from `sys.path`."""
    beside = script.resolve().parent
    try:
        source = script.read_text(encoding="utf-8", errors="replace")
    except OSError:  # packing reports it
        source = ""
    names = [item.name for item in imports_of_source("__main__", source, is_package=False)]
    directory = None if is_in_environment(beside) else beside
    sources = users_module_sources(names, ImportReader(), directory)
    return ImportRoot(directory, tuple(s for s in sources if s.root != directory))


def _root_of_main(main: ModuleType) -> Path | None:
    file = getattr(main, "__file__", None)
    if file is None:
        # A notebook or `python -c` imports modules from the working directory.
        try:
            return Path.cwd() if "" in sys.path else None
        except FileNotFoundError:  # the directory was removed
            return None
    spec = getattr(main, "__spec__", None)
    name = main.__name__ if spec is None else spec.name
    above = name.count(".") + (Path(file).name == "__init__.py")
    return Path(file).resolve().parents[above]


@dataclass
class Packer:
    """A thread-safe packer for several launches, which packs again only if a file has changed.

    The `import_reader` is for `import_roots`.
    """

    import_reader: ImportReader = field(default_factory=ImportReader)
    _last: tuple[object, PackedModules] | None = None

    def pack(self, roots: Sequence[ImportRoot | Path]) -> PackedModules:
        """Pack as `pack_modules` does."""
        below = [_packable_files(r if isinstance(r, ImportRoot) else ImportRoot(r)) for r in roots]
        state = [(root.warnings, [file.state for file in root.files]) for root in below]
        last = self._last
        if last is None or last[0] != state:
            last = self._last = (state, _pack(below))
        return last[1]


def pack_modules(roots: Sequence[ImportRoot | Path]) -> PackedModules:
    """Pack each root's sources, and the modules below it with all files of their packages.

    Hidden directories, virtual environments, caches and this hopsgpu itself are left out.

    - If a root has more than 20 MiB of modules and packages, only its modules are packed, without
      other files.
    - If a root has more than 5,000 entries, or more than 20 MiB of modules, only the modules at its
      top level are packed.
    - In both cases, a root with `is_expected=False` is not packed at all.
    - If a source exceeds these limits, only its modules are packed, without other files, or
      nothing.

    A warning says what is not packed.
    """
    return Packer().pack(roots)


@dataclass(frozen=True)
class _PackableFiles:
    """The files of a root to pack, and warnings about what is not packed."""

    files: tuple[File, ...]
    warnings: tuple[str, ...]


def _packable_files(root: ImportRoot) -> _PackableFiles:
    warnings: list[str] = []
    files: dict[str, File] = {}
    for source in root.sources:
        for file in _files_of_source(source, warnings):
            files.setdefault(file.name, file)
    if root.path is not None:
        for file in _files_of_root(root.path, root.is_expected, warnings):
            files.setdefault(file.name, file)
    unnamed = sorted(printable(file.path) for name, file in files.items() if not is_utf8(name))
    if unnamed:
        more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
        warnings.append(f"not sent to the ranks, because the name is not UTF-8: {unnamed[0]}{more}")
    ordered = sorted(filter(is_utf8, files))
    return _PackableFiles(tuple(files[name] for name in ordered), tuple(warnings))


def _files_of_root(path: Path, is_expected: bool, warnings: list[str]) -> list[File]:
    """Return a root's modules with the files of its packages; fewer if the root is too large."""
    below = files_below(path, "", limit=MAX_ENTRIES)
    if below is not None:
        packages = {file.name.rpartition("/")[0] for file in below if is_package(file)}
        packages.discard("")
        files = [f for f in below if f.is_module or not packages.isdisjoint(f.parents)]
        modules = [file for file in files if file.is_module]
        if _size(files) <= MAX_BYTES:
            return files
        if is_expected and _size(modules) <= MAX_BYTES:
            warnings.append(
                f"{printable(path)} contains more than {MAX_BYTES >> 20} MiB: of packages that the"
                " function and the script do not name, only modules are sent to the ranks"
            )
            return modules
    if not is_expected or not path.is_dir():
        return []
    warnings.append(
        f"{printable(path)} is too large to send to the ranks: they can import only its top-level"
        " modules and the packages that the function or the script names. Put the project into a"
        " directory of its own"
    )
    return [file for file in files_in(path) if file.is_module]


def _files_of_source(source: ModuleSource, warnings: list[str]) -> list[File]:
    """Return all files of a source; if these are too many, only its modules or nothing."""
    files = files_below(source.path, source.name, inside=source.inside, limit=_MAX_SEARCHED)
    if files is not None and _is_small(files):
        return files
    where = printable(source.path)
    if any(source.path.parent.glob("*.dist-info")):
        # pip has installed packages here: an incomplete package would shadow a complete one.
        warnings.append(f"{where} is too large to send to the ranks: {_PYTHON_ENV_ADVICE}")
        return []
    modules = [file for file in files or () if file.is_module]
    if files is not None and _is_small(modules):
        warnings.append(
            f"{where} is too large to send to the ranks: only its modules are sent. Put data on"
            f" the lake, or {_PYTHON_ENV_ADVICE}"
        )
        return modules
    warnings.append(f"{where} is too large to send to the ranks: {_PYTHON_ENV_ADVICE}")
    return []


def _is_small(files: Sequence[File]) -> bool:
    return len(files) <= MAX_ENTRIES and _size(files) <= MAX_BYTES


def _size(files: Sequence[File]) -> int:
    return sum(file.size for file in files)


def _pack(roots: Sequence[_PackableFiles]) -> PackedModules:
    warnings = [warning for root in roots for warning in root.warnings]
    names: set[str] = set()
    buffer = io.BytesIO()
    packed = [root.files for root in roots if root.files]
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, files in enumerate(packed):
            for file in files:
                # With a fixed time, equal modules give equal bytes.
                entry = zipfile.ZipInfo(f"{number}/{file.name}")
                entry.external_attr = (
                    stat.S_IFREG | (0o755 if file.is_executable else 0o644)
                ) << 16
                try:
                    content = file.content()
                except (OSError, zipfile.BadZipFile, KeyError) as error:
                    reason = getattr(error, "strerror", None) or error
                    warnings.append(f"{printable(file.path)} is not sent to the ranks: {reason}")
                    continue
                archive.writestr(entry, content, zipfile.ZIP_DEFLATED, _COMPRESSION_LEVEL)
                if file.is_module:
                    names.add(file.top)
    return PackedModules(buffer.getvalue(), len(packed), tuple(warnings), frozenset(names))
