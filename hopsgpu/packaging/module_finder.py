"""The places from which the driver imports the modules that a call names; none is imported.

Modules of the Python environment (its standard library, its site-packages) must be in the ranks'
Python. All others are the user's: a directory that is on `sys.path` by PYTHONPATH, by
`sys.path.insert` or by a `.pth` file, an editable installation, a zip.
"""

from __future__ import annotations

import functools
import itertools
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from hopsgpu.packaging.import_scan import Import, imports_of_source

# hopsgpu sends the first two to the ranks; executors have the others.
PROVIDED_MODULES = frozenset({"hopsgpu", "cloudpickle", "pyspark", "py4j"})
MAIN_MODULES = frozenset({"__main__", "__mp_main__"})
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_INIT = "__init__.py"
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES)


@dataclass(frozen=True)
class ModuleSource:
    """A module or package of the user's, or a portion of a namespace package.

    Attributes:
        name: file or directory name under which ranks can import it: "pkg", "pkg.py".
        path: the file or directory, or the zip that contains it.
        inside: name in the zip; "" without a zip.
    """

    name: str
    path: Path
    inside: str = ""

    @property
    def root(self) -> Path | None:
        """The entry of `sys.path` that has it; None if it has another name there."""
        if self.inside:
            return self.path if self.inside == self.name else None
        return self.path.parent if self.path.name == self.name else None


def is_in_environment(path: Path) -> bool:
    if not _PACKAGES.isdisjoint(path.parts):
        return True
    return path.parent == path or any(map(path.is_relative_to, _environment()))


@functools.cache
def _environment() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    keys = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    directories = [*(Path(paths[key]) for key in keys), Path(sys.executable).resolve().parent]
    return tuple(dict.fromkeys([*directories, *(path.resolve() for path in directories)]))


def user_path_entries() -> dict[Path, int]:
    """Return the resolved entries of `sys.path` before the standard library, and their positions.

    The environment takes precedence over later entries (of a `.pth` file, or appended by a
    notebook). Entries of the environment are left out.
    """
    positions: dict[Path, int] = {}
    library = Path(sysconfig.get_paths()["stdlib"]).resolve()
    for position, entry in enumerate(sys.path):
        # Python, too, imports only from entries that are strings.
        if isinstance(entry, str):
            try:
                path = Path(entry).resolve()
            except FileNotFoundError:  # the working directory was removed
                continue
            if path == library:
                break
            if not is_in_environment(path):
                positions.setdefault(path, position)
    return positions


def module_sources(name: str, beside: Path | None = None) -> tuple[ModuleSource, ...]:
    """Return where a top-level module of the user's is imported from; empty for other modules.

    A namespace package may have several sources. A directory `beside` comes before `sys.path`.
    """
    if beside is not None and (spec := PathFinder.find_spec(name, [str(beside)])) is not None:
        return _sources_of_spec(name, spec)
    if name in MAIN_MODULES or name in PROVIDED_MODULES or not name:
        return ()
    if name not in sys.modules and name in sys.stdlib_module_names:
        return ()
    spec = _spec_of(name)
    return () if spec is None else _sources_of_spec(name, spec)


def _sources_of_spec(name: str, spec: ModuleSpec) -> tuple[ModuleSource, ...]:
    locations = spec.submodule_search_locations
    # A path of `zipimport` continues below the zip's path.
    if locations is not None:
        sources = [_source_at(name, Path(location).absolute()) for location in list(locations)]
    elif spec.has_location and spec.origin is not None:
        origin = Path(spec.origin).absolute()
        sources = [_source_at(name + _suffix(origin.name), origin)]
    else:
        sources = []
    return tuple(s for s in sources if s is not None and not is_in_environment(s.path))


def loaded_source(name: str) -> tuple[ModuleSource, ...]:
    """Return the file of a loaded module, under the module's full dotted name.

    For a module whose package has no files: pytest imports test modules like this with
    `--import-mode=importlib`.
    """
    module = sys.modules.get(name)
    file = None if module is None else vars(module).get("__file__")
    if not isinstance(file, str) or name in MAIN_MODULES:
        return ()
    path = Path(file).absolute()
    if not path.is_file() or is_in_environment(path):
        return ()
    init = "/__init__" * (path.name == _INIT)
    return (ModuleSource(_file_name(name) + init + _suffix(path.name), path),)


def _spec_of(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if module is None:
        if name in sys.modules:  # None marks a module that must not be imported
            return None
        try:
            return find_spec(name)
        except (ImportError, ValueError):
            return None
    # Not getattr: a lazy module would import.
    attributes: dict[str, Any] = getattr(module, "__dict__", {})
    own_spec = attributes.get("__spec__")
    path, file = attributes.get("__path__"), attributes.get("__file__")
    if path is None and isinstance(own_spec, ModuleSpec):
        return own_spec
    # The module has no spec, or has extended its path (pkgutil.extend_path).
    spec = ModuleSpec(name, None, origin=file if isinstance(file, str) else None)
    spec.has_location = spec.origin is not None
    spec.submodule_search_locations = None if path is None else [str(entry) for entry in path]
    return spec


def _source_at(name: str, path: Path) -> ModuleSource | None:
    """Return the source at a path, which may continue inside a zip; None if there is no file."""
    if path.exists():
        return ModuleSource(name, path)
    for above in path.parents:
        if above.is_file():
            return ModuleSource(name, above, path.relative_to(above).as_posix())
        if above.exists():
            return None
    return None


def _suffix(file: str) -> str:
    return next((s for s in _SUFFIXES if file.endswith(s)), Path(file).suffix)


@dataclass
class ImportReader:
    """A reader of modules' imports. It reads a file again only if the file has changed."""

    _cache: dict[tuple[Path, str], tuple[object, tuple[Import, ...]]] = field(default_factory=dict)

    def imports(self, source: ModuleSource, name: str) -> tuple[Import, ...]:
        """Return the imports of a module; empty if the source does not contain its text."""
        stem, file_name = "/".join(name.split(".")[1:]), _file_name(name)
        if source.name == f"{file_name}/{_INIT}":
            candidates = [("", True)]
        elif source.name.endswith(_SUFFIXES):
            candidates = [("", False)] if source.name == f"{file_name}.py" else []
        else:
            candidates = [(f"{stem}/{_INIT}".lstrip("/"), True)]
            candidates += [(f"{stem}.py", False)] if stem else []
        for inner, is_package in candidates:
            imports = self._read(source, inner, name, is_package)
            if imports is not None:
                return imports
        return ()

    def _read(
        self, source: ModuleSource, inner: str, name: str, is_package: bool
    ) -> tuple[Import, ...] | None:
        file = source.path if source.inside or not inner else source.path / inner
        inside = "/".join(filter(None, (source.inside, inner))) if source.inside else ""
        try:
            stat = file.stat()
        except OSError:
            return None
        state = stat.st_mtime_ns, stat.st_size, stat.st_ino
        cached = self._cache.get((file, inside))
        if cached is not None and cached[0] == state:
            return cached[1]
        text = _content(file, inside)
        if text is None:
            return None
        imports = imports_of_source(name, text.decode(errors="replace"), is_package)
        self._cache[file, inside] = state, imports
        return imports


def _file_name(name: str) -> str:
    return name.replace(".", "/")


def _content(file: Path, inside: str) -> bytes | None:
    try:
        if not inside:
            return file.read_bytes()
        with zipfile.ZipFile(file) as archive:
            return archive.read(inside)
    except (OSError, KeyError, zipfile.BadZipFile):
        return None  # packing, or the rank, reports the error


def users_module_sources(
    names: Iterable[str], reader: ImportReader, beside: Path | None = None
) -> tuple[ModuleSource, ...]:
    """Return the sources of the user's modules among some modules and those that they import.

    Args:
        names: dotted names of the modules.
        beside: as in `module_sources`.
    """
    pending, visited = list(names), set[str]()
    by_top: dict[str, tuple[ModuleSource, ...]] = {}
    loaded: dict[str, tuple[ModuleSource, ...]] = {}
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        top, _, below = name.partition(".")
        if top not in by_top:
            by_top[top] = module_sources(top, beside)
        if below:
            pending.append(name.rpartition(".")[0])
        if below and not by_top[top] and name in sys.modules and _has_no_file(top):
            loaded[name] = loaded_source(name)
        for source in (*by_top[top], *loaded.get(name, ())):
            pending += [item.name for item in reader.imports(source, name)]
    sources = itertools.chain.from_iterable((*by_top.values(), *loaded.values()))
    return tuple(dict.fromkeys(sources))


def _has_no_file(top: str) -> bool:
    """Return whether a loaded module has neither a file nor a directory."""
    spec = _spec_of(top)
    return spec is None or (spec.origin is None and not spec.submodule_search_locations)


def modules_bound_in_main() -> Iterator[str]:
    """Yield the modules from which the script or notebook imported something, under any name."""
    for value in list(vars(sys.modules["__main__"]).values()):
        # Not isinstance, which asks the object for its class: a proxy may refuse to answer.
        kind = type(value)
        if issubclass(kind, ModuleType):
            yield value.__name__
        else:
            home = value.__module__ if issubclass(kind, (type, FunctionType)) else kind.__module__
            if isinstance(home, str):
                yield home
