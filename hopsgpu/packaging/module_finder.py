"""The places from which the driver imports the modules that a call names; none is imported.

What the Python environment has (its standard library, its site-packages) is not the user's, and
must be in the ranks' Python. Everything else is the user's: a directory on `sys.path` by
PYTHONPATH, by `sys.path.insert` or by a `.pth` file, an editable installation, a zip.
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

# These reach the ranks by themselves, or are present wherever executors run.
PROVIDED_MODULES = frozenset({"hopsgpu", "cloudpickle", "pyspark", "py4j"})
MAIN_MODULES = frozenset({"__main__", "__mp_main__"})
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_INIT = "__init__.py"
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES)


@dataclass(frozen=True)
class ModuleSource:
    """A module or package of the user's, or a portion of a namespace package.

    Attributes:
        name: the name it must have in a directory to be imported from there: "pkg", "pkg.py".
        path: the file or directory; for what is in a zip, the zip.
        inside: its name in the zip; "" if it is in none.
    """

    name: str
    path: Path
    inside: str = ""

    @property
    def root(self) -> Path | None:
        """Return the directory or zip to import it from; None if its name differs there."""
        if self.inside:
            return self.path if self.inside == self.name else None
        return self.path.parent if self.path.name == self.name else None


def is_in_environment(path: Path) -> bool:
    """Return whether a directory or file belongs to the Python environment itself."""
    if not _PACKAGES.isdisjoint(path.parts):
        return True
    return path.parent == path or any(path.is_relative_to(own) for own in _environment())


@functools.cache
def _environment() -> tuple[Path, ...]:
    """Return the environment's directories, as they are written and as they are resolved."""
    paths = sysconfig.get_paths()
    own = [Path(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    own.append(Path(sys.executable).resolve().parent)
    return tuple(dict.fromkeys([*own, *(path.resolve() for path in own)]))


def user_path_entries() -> dict[Path, int]:
    """Return the resolved entries of `sys.path` before the standard library, and their positions.

    The modules of later entries (those of a `.pth` file, or those that a notebook appends) come
    after those of the environment. Entries of the environment itself are left out.
    """
    found: dict[Path, int] = {}
    library = Path(sysconfig.get_paths()["stdlib"]).resolve()
    for place, entry in enumerate(sys.path):
        # Python, too, imports only from entries that are strings.
        if isinstance(entry, str):
            try:
                path = Path(entry).resolve()
            except FileNotFoundError:  # the working directory was removed
                continue
            if path == library:
                break
            if not is_in_environment(path):
                found.setdefault(path, place)
    return found


def module_sources(name: str, beside: Path | None = None) -> tuple[ModuleSource, ...]:
    """Return the user's parts that a top-level module is imported from; none for other modules.

    A namespace package may have several.

    Args:
        name: name of the module.
        beside: a directory that comes before all of `sys.path`, or None.
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
    places = spec.submodule_search_locations
    # A path of `zipimport` continues below the zip's path.
    if places is not None:
        found = [_part(name, Path(place).absolute()) for place in list(places)]
    elif spec.has_location and spec.origin is not None:
        origin = Path(spec.origin).absolute()
        found = [_part(name + _suffix(origin.name), origin)]
    else:
        found = []
    return tuple(part for part in found if part is not None and not is_in_environment(part.path))


def loaded_source(name: str) -> tuple[ModuleSource, ...]:
    """Return the file of a loaded module, as a part that has the module's full dotted name.

    It serves a module whose package is found nowhere: pytest imports a test module like this with
    `--import-mode=importlib`.
    """
    module = sys.modules.get(name)
    file = None if module is None else vars(module).get("__file__")
    if not isinstance(file, str) or name in MAIN_MODULES:
        return ()
    path = Path(file).absolute()
    if not path.is_file() or is_in_environment(path):
        return ()
    package = "/__init__" * (path.name == _INIT)
    return (ModuleSource(_file_name(name) + package + _suffix(path.name), path),)


def _spec_of(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if module is None:
        if name in sys.modules:  # None marks a module that must not be imported
            return None
        try:
            return find_spec(name)
        except (ImportError, ValueError):
            return None
    # Not getattr: a lazy module would answer by importing.
    known: dict[str, Any] = getattr(module, "__dict__", {})
    found = known.get("__spec__")
    path, file = known.get("__path__"), known.get("__file__")
    if path is None and isinstance(found, ModuleSpec):
        return found
    # A module that was made without a spec, or that has extended its path (pkgutil.extend_path).
    spec = ModuleSpec(name, None, origin=file if isinstance(file, str) else None)
    spec.has_location = spec.origin is not None
    spec.submodule_search_locations = None if path is None else [str(one) for one in path]
    return spec


def _part(name: str, path: Path) -> ModuleSource | None:
    """Return the part at a path, which may continue inside a zip; None if nothing is there."""
    if path.exists():
        return ModuleSource(name, path)
    for above in path.parents:
        if above.is_file():
            return ModuleSource(name, above, path.relative_to(above).as_posix())
        if above.exists():
            return None
    return None


def _suffix(file: str) -> str:
    """Return the suffix that makes a file a module."""
    return next((s for s in _SUFFIXES if file.endswith(s)), Path(file).suffix)


@dataclass
class ImportReader:
    """The imports of modules, read again only if the module's file has changed."""

    _known: dict[tuple[Path, str], tuple[object, tuple[Import, ...]]] = field(default_factory=dict)

    def imports(self, part: ModuleSource, name: str) -> tuple[Import, ...]:
        """Return the imports of a module of a part; none if the part has no source of it."""
        stem = "/".join(name.split(".")[1:])
        if part.name.endswith(_INIT) and part.name.removesuffix(f"/{_INIT}") == _file_name(name):
            candidates = [("", True)]
        elif part.name.endswith(_SUFFIXES):
            candidates = [("", False)] if part.name == f"{_file_name(name)}.py" else []
        else:
            candidates = [(f"{stem}/{_INIT}".lstrip("/"), True)]
            candidates += [(f"{stem}.py", False)] if stem else []
        for inner, package in candidates:
            found = self._read(part, inner, name, package)
            if found is not None:
                return found
        return ()

    def _read(
        self, part: ModuleSource, inner: str, name: str, package: bool
    ) -> tuple[Import, ...] | None:
        file = part.path if part.inside or not inner else part.path / inner
        inside = "/".join(filter(None, (part.inside, inner))) if part.inside else ""
        try:
            stat = file.stat()
        except OSError:
            return None
        state = stat.st_mtime_ns, stat.st_size, stat.st_ino
        known = self._known.get((file, inside))
        if known is not None and known[0] == state:
            return known[1]
        source = _content(file, inside)
        if source is None:
            return None
        found = imports_of_source(name, source.decode(errors="replace"), package)
        self._known[file, inside] = state, found
        return found


def _file_name(name: str) -> str:
    return name.replace(".", "/")


def _content(file: Path, inside: str) -> bytes | None:
    try:
        if not inside:
            return file.read_bytes()
        with zipfile.ZipFile(file) as archive:
            return archive.read(inside)
    except (OSError, KeyError, zipfile.BadZipFile):
        return None  # packing, or the rank, reports what cannot be read


def users_module_sources(
    names: Iterable[str], sources: ImportReader, beside: Path | None = None
) -> tuple[ModuleSource, ...]:
    """Return the user's parts that modules are imported from, and those that they import in turn.

    Args:
        names: dotted names of what is imported first.
        sources: reads the imports of modules on the way.
        beside: as in `module_sources`.
    """
    pending, met = list(names), set[str]()
    tops: dict[str, tuple[ModuleSource, ...]] = {}
    alone: dict[str, tuple[ModuleSource, ...]] = {}
    while pending:
        name = pending.pop()
        if name in met:
            continue
        met.add(name)
        top, _, below = name.partition(".")
        if top not in tops:
            tops[top] = module_sources(top, beside)
        if below:
            pending.append(name.rpartition(".")[0])
        for part in tops[top]:
            pending += [found.name for found in sources.imports(part, name)]
        if below and not tops[top] and name in sys.modules and _is_made_up(top):
            alone[name] = loaded_source(name)
            for part in alone[name]:
                pending += [i.name for i in sources.imports(part, name)]
    found = itertools.chain.from_iterable((*tops.values(), *alone.values()))
    return tuple(dict.fromkeys(found))


def _is_made_up(top: str) -> bool:
    """Return whether a loaded module has no file or directory at all."""
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
